//! The graph of attention, backward, in two variants that differ in how d_q is summed over the keys.
//!
//! ```text
//! r  = Σ d_out·out        per row, f32 in memory
//! P  = exp(scale·Q·Kᵀ - Stats), if causal masked
//! dV = Pᵀ·dOut
//! dS = (dOut·Vᵀ - r)·P·scale
//! dK = dSᵀ·Q              dQ = dS·K
//! ```

use super::attention_fwd::{Shape, masked};
use super::graph::{F32, Graph, Pointwise, PointwiseOp, Reduce, Role, Tensor, View};
use crate::Result;
use crate::ffi::cudnn::Cudnn;
use std::rc::Rc;

/// How d_q is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DqSum {
    /// Blocks of keys add into an f32 tensor in the order they happen to finish, then it is rounded: the last bits
    /// differ from run to run. cuDNN clears the tensor itself (since 9.6).
    AnyOrder,
    /// d_q is a plain product with dS, which cuDNN keeps in its workspace (B·NH·T·T in 16 bits): the same bits every time.
    Fixed,
}

/// The backward: reads Q, K, V, Out, Stats, DOut; writes DQ, DK, DV; uses RowSum, and DqSums for [`DqSum::AnyOrder`].
pub(super) fn attention_bwd(cudnn: &Rc<Cudnn>, shape: &Shape, dq_sum: DqSum) -> Result<Graph> {
    let mut graph = Graph::new(cudnn);
    let g = &mut graph;
    let q = g.memory(Role::Q, shape.data, shape.q_view())?;
    let k = g.memory(Role::K, shape.data, shape.k_view().transposed())?;
    let v = g.memory(Role::V, shape.data, shape.v_view().transposed())?;
    let stats = g.memory(Role::Stats, F32, shape.rows())?;
    let d_out = g.memory(Role::DOut, shape.data, shape.out_view())?;
    let scale = g.number("scale", shape.scale())?;
    let row_sum = row_sum(g, shape, d_out)?;

    // probabilities, and dV
    let scores = g.between("scores", F32, shape.scores())?;
    g.matmul("scores", q, k, scores)?;
    let scaled = g.binary("scaled", Pointwise::CUDNN_POINTWISE_MUL, scores, scale)?;
    let less = g.binary("less stats", Pointwise::CUDNN_POINTWISE_SUB, scaled, stats)?;
    let masked = masked(g, shape, less)?;
    let p = g.unary("probabilities", Pointwise::CUDNN_POINTWISE_EXP, masked)?;
    let p_t = g.transpose("probabilities transposed", shape.data, p)?;
    kv_gradient(g, shape, (Role::DV, shape.v_view()), p_t, d_out)?;

    // dS, and dK
    let d_p = g.between("d probabilities", F32, shape.scores())?;
    g.matmul("d probabilities", d_out, v, d_p)?;
    let centred = g.binary("less row sum", Pointwise::CUDNN_POINTWISE_SUB, d_p, row_sum)?;
    let d_scaled = g.binary("d scaled", Pointwise::CUDNN_POINTWISE_MUL, centred, p)?;
    let d_s = g.binary("d scores", Pointwise::CUDNN_POINTWISE_MUL, d_scaled, scale)?;
    let d_s_t = g.transpose("d scores transposed", shape.data, d_s)?;
    kv_gradient(g, shape, (Role::DK, shape.k_view()), d_s_t, q)?;

    // dQ
    let k_rows = g.transpose("keys", F32, k)?;
    let d_q = g.memory(Role::DQ, shape.data, shape.q_view())?;
    match dq_sum {
        DqSum::Fixed => g.matmul("d queries", d_s, k_rows, d_q)?,
        DqSum::AnyOrder => {
            let packed = View::packed(shape.q_view().dims);
            let sums = g.memory(Role::DqSums, F32, packed)?;
            g.matmul("d query sums", d_s, k_rows, sums)?;
            let round = PointwiseOp::new(Pointwise::CUDNN_POINTWISE_IDENTITY);
            g.pointwise("d queries", round, sums, d_q)?;
        }
    }
    Ok(graph)
}

/// Σ d_out·out per row. cuDNN's engines look for a product with a number after the sum, so there is one with 1.
fn row_sum(g: &mut Graph, shape: &Shape, d_out: Tensor) -> Result<Tensor> {
    let out = g.memory(Role::Out, shape.data, shape.out_view())?;
    let one = g.number("one", 1.0)?;
    let product = g.between("d_out out", F32, View::packed(shape.out_view().dims))?;
    let multiply = PointwiseOp { b: Some(out), ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_MUL) };
    g.pointwise("d_out out", multiply, d_out, product)?;
    let sum = g.between("row sum", F32, shape.rows())?;
    g.reduce("row sum", Reduce::CUDNN_REDUCE_TENSOR_ADD, product, sum)?;
    let row_sum = g.memory(Role::RowSum, F32, shape.rows())?;
    let times_one = PointwiseOp { b: Some(one), ..PointwiseOp::new(Pointwise::CUDNN_POINTWISE_MUL) };
    g.pointwise("row sum", times_one, sum, row_sum)?;
    Ok(row_sum)
}

/// `weightsᵀ · rows` to the gradient of keys or values; with fewer heads there, the sum over the heads each serves.
fn kv_gradient(
    g: &mut Graph,
    shape: &Shape,
    (role, view): (Role, View),
    weights_t: Tensor,
    rows: Tensor,
) -> Result<()> {
    let gradient = g.memory(role, shape.data, view)?;
    let name = format!("{role:?}");
    if shape.kv_heads == shape.heads {
        return g.matmul(&name, weights_t, rows, gradient);
    }
    let all = View::packed([shape.batch, shape.heads, shape.kv_len, shape.head_dim]);
    let per_head = g.between(&format!("{name} of each head"), shape.data, all)?;
    g.matmul(&name, weights_t, rows, per_head)?;
    g.reduce(&name, Reduce::CUDNN_REDUCE_TENSOR_ADD, per_head, gradient)
}
