//! The graph of causal attention, forward, and what both directions share.
//!
//! ```text
//! S = scale·Q·Kᵀ          masked to -inf above the diagonal
//! m = max S,  e = exp(S - m),  z = Σ e        per row
//! Stats = m + log z       P = e / z (bf16)    Out = P·V
//! ```

use super::graph::{BF16, BOOL, F32, Graph, I32, Pointwise, PointwiseOp, Reduce, Role, Tensor, View};
use crate::Result;
use crate::ffi::cudnn::Cudnn;
use std::rc::Rc;

/// Sizes of an attention whose queries, keys and values are packed side by side in each token's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub batch: i64,
    /// Heads of the queries and the output.
    pub heads: i64,
    /// Heads of the keys and values; divides `heads`.
    pub kv_heads: i64,
    pub seq: i64,
    pub head_dim: i64,
    /// Elements from one token's queries to the next token's; the same for keys and values.
    pub qkv_row: i64,
    /// Elements from one token's output to the next token's.
    pub out_row: i64,
}

impl Shape {
    /// Queries and their gradient.
    pub fn q(&self) -> View {
        self.heads_of_rows(self.heads, self.qkv_row)
    }

    /// Keys, values and their gradients.
    pub fn kv(&self) -> View {
        self.heads_of_rows(self.kv_heads, self.qkv_row)
    }

    /// The output and its gradient.
    pub fn out(&self) -> View {
        self.heads_of_rows(self.heads, self.out_row)
    }

    /// Scores: each query row against each key.
    pub fn scores(&self) -> View {
        View::packed([self.batch, self.heads, self.seq, self.seq])
    }

    /// One number for each query row.
    pub fn rows(&self) -> View {
        View::packed([self.batch, self.heads, self.seq, 1])
    }

    /// `1/sqrt(HD)`
    pub fn scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }

    fn heads_of_rows(&self, heads: i64, row: i64) -> View {
        View {
            dims: [self.batch, heads, self.seq, self.head_dim],
            strides: [self.seq * row, self.head_dim, row, 1],
        }
    }
}

/// Scores where the query is not before the key, -inf elsewhere.
pub(super) fn causal(graph: &mut Graph, scores: Tensor) -> Result<Tensor> {
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
    let q = g.memory(Role::Q, BF16, shape.q())?;
    let k = g.memory(Role::K, BF16, shape.kv().transposed())?;
    let v = g.memory(Role::V, BF16, shape.kv())?;
    let out = g.memory(Role::Out, BF16, shape.out())?;
    let stats = g.memory(Role::Stats, F32, shape.rows())?;
    let scale = g.number("scale", shape.scale())?;

    let scores = g.between("scores", F32, shape.scores())?;
    g.matmul("scores", q, k, scores)?;
    let scaled = g.binary("scaled", Pointwise::CUDNN_POINTWISE_MUL, scores, scale)?;
    let masked = causal(g, scaled)?;

    let max = g.between("max", F32, shape.rows())?;
    g.reduce("max", Reduce::CUDNN_REDUCE_TENSOR_MAX, masked, max)?;
    let less = g.binary("less max", Pointwise::CUDNN_POINTWISE_SUB, masked, max)?;
    let exp = g.unary("exp", Pointwise::CUDNN_POINTWISE_EXP, less)?;
    let sum = g.between("sum", F32, shape.rows())?;
    g.reduce("sum", Reduce::CUDNN_REDUCE_TENSOR_ADD, exp, sum)?;
    let log = g.unary("log sum", Pointwise::CUDNN_POINTWISE_LOG, sum)?;
    let add = PointwiseOp { b: Some(log), ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_ADD) };
    g.pointwise("stats", add, max, stats)?;

    let p = g.between("probabilities", BF16, shape.scores())?;
    let divide = PointwiseOp { b: Some(sum), ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_DIV) };
    g.pointwise("probabilities", divide, exp, p)?;
    g.matmul("out", p, v, out)?;
    Ok(graph)
}
