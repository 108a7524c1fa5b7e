//! The graph of attention, forward, and what both directions share.
//!
//! ```text
//! S = scale·Q·Kᵀ          if causal, masked to -inf above the diagonal
//! m = max S,  e = exp(S - m),  z = Σ e        per row
//! Stats = m + log z       P = e / z (bf16 or f16)    Out = P·V
//! ```

use super::graph::{BF16, BOOL, Data, F32, Graph, I32, Pointwise, PointwiseOp, Reduce, Role, Tensor, View};
use crate::Result;
use crate::ffi::cudnn::Cudnn;
use std::rc::Rc;

/// Elements from one sequence, one head and one position to the next; those of a head's channels are side by side.
pub(crate) type Steps = [i64; 3];

/// Sizes and places of an attention. Gradients have the steps of what they are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// The type of all tensors but the statistics: bf16 or f16.
    pub data: Data,
    pub batch: i64,
    /// Heads of the queries and the output.
    pub heads: i64,
    /// Heads of the keys and values; divides `heads`.
    pub kv_heads: i64,
    /// Queries of a sequence.
    pub q_len: i64,
    /// Keys of a sequence.
    pub kv_len: i64,
    pub head_dim: i64,
    /// Bits of the f32 that scores are multiplied by.
    pub scale_bits: u32,
    /// Whether a query sees no key of a higher number than its own.
    pub causal: bool,
    pub q: Steps,
    pub k: Steps,
    pub v: Steps,
    pub out: Steps,
}

impl Shape {
    /// Causal attention in bf16 whose queries, keys and values are packed side by side in each token's row.
    pub fn packed(batch: i64, [heads, kv_heads]: [i64; 2], seq: i64, head_dim: i64) -> Self {
        let steps = |row: i64| [seq * row, head_dim, row];
        let qkv = steps((heads + 2 * kv_heads) * head_dim);
        Self {
            data: BF16,
            batch,
            heads,
            kv_heads,
            q_len: seq,
            kv_len: seq,
            head_dim,
            scale_bits: ((1.0 / (head_dim as f64).sqrt()) as f32).to_bits(),
            causal: true,
            q: qkv,
            k: qkv,
            v: qkv,
            out: steps(heads * head_dim),
        }
    }

    /// Queries and their gradient.
    pub fn q_view(&self) -> View {
        self.view(self.heads, self.q_len, self.q)
    }

    /// Keys and their gradient.
    pub fn k_view(&self) -> View {
        self.view(self.kv_heads, self.kv_len, self.k)
    }

    /// Values and their gradient.
    pub fn v_view(&self) -> View {
        self.view(self.kv_heads, self.kv_len, self.v)
    }

    /// The output and its gradient.
    pub fn out_view(&self) -> View {
        self.view(self.heads, self.q_len, self.out)
    }

    /// Scores: each query row against each key.
    pub fn scores(&self) -> View {
        View::packed([self.batch, self.heads, self.q_len, self.kv_len])
    }

    /// One number for each query row.
    pub fn rows(&self) -> View {
        View::packed([self.batch, self.heads, self.q_len, 1])
    }

    /// The factor of the scores.
    pub fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }

    fn view(&self, heads: i64, len: i64, [batch, head, position]: Steps) -> View {
        View { dims: [self.batch, heads, len, self.head_dim], strides: [batch, head, position, 1] }
    }
}

/// What a query may not see masked, if there is anything.
pub(super) fn masked(graph: &mut Graph, shape: &Shape, scores: Tensor) -> Result<Tensor> {
    if shape.causal { causal(graph, scores) } else { Ok(scores) }
}

/// Scores where the query is not before the key, -inf elsewhere.
fn causal(graph: &mut Graph, scores: Tensor) -> Result<Tensor> {
    let index =
        |axis| PointwiseOp { axis: Some(axis), ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_GEN_INDEX) };
    let row = graph.between("row", I32, scores.view)?;
    graph.pointwise("row", index(2), scores, row)?;
    let column = graph.between("column", I32, scores.view)?;
    graph.pointwise("column", index(3), scores, column)?;
    let keep = graph.between("keep", BOOL, scores.view)?;
    let compare =
        PointwiseOp { b: Some(column), compute: BOOL, ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_CMP_GE) };
    graph.pointwise("keep", compare, row, keep)?;
    let nothing = graph.number("minus infinity", f32::NEG_INFINITY)?;
    let masked = graph.between("masked", F32, scores.view)?;
    let select = PointwiseOp {
        b: Some(nothing),
        mask: Some(keep),
        ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_BINARY_SELECT)
    };
    graph.pointwise("masked", select, scores, masked)?;
    Ok(masked)
}

/// The forward: reads Q, K, V; writes Out and Stats.
pub(super) fn attention_fwd(cudnn: &Rc<Cudnn>, shape: &Shape) -> Result<Graph> {
    let mut graph = Graph::new(cudnn);
    let g = &mut graph;
    let q = g.memory(Role::Q, shape.data, shape.q_view())?;
    let k = g.memory(Role::K, shape.data, shape.k_view().transposed())?;
    let v = g.memory(Role::V, shape.data, shape.v_view())?;
    let out = g.memory(Role::Out, shape.data, shape.out_view())?;
    let stats = g.memory(Role::Stats, F32, shape.rows())?;
    let scale = g.number("scale", shape.scale())?;

    let scores = g.between("scores", F32, shape.scores())?;
    g.matmul("scores", q, k, scores)?;
    let scaled = g.binary("scaled", Pointwise::CUDNN_POINTWISE_MUL, scores, scale)?;
    let masked = masked(g, shape, scaled)?;

    let max = g.between("max", F32, shape.rows())?;
    g.reduce("max", Reduce::CUDNN_REDUCE_TENSOR_MAX, masked, max)?;
    let less = g.binary("less max", Pointwise::CUDNN_POINTWISE_SUB, masked, max)?;
    let exp = g.unary("exp", Pointwise::CUDNN_POINTWISE_EXP, less)?;
    let sum = g.between("sum", F32, shape.rows())?;
    g.reduce("sum", Reduce::CUDNN_REDUCE_TENSOR_ADD, exp, sum)?;
    let log = g.unary("log sum", Pointwise::CUDNN_POINTWISE_LOG, sum)?;
    let add = PointwiseOp { b: Some(log), ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_ADD) };
    g.pointwise("stats", add, max, stats)?;

    let p = g.between("probabilities", shape.data, shape.scores())?;
    let divide = PointwiseOp { b: Some(sum), ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_DIV) };
    g.pointwise("probabilities", divide, exp, p)?;
    g.matmul("out", p, v, out)?;
    Ok(graph)
}
