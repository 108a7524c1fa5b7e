//! The ops as functions of arrays, inputs before outputs.

use crate::eager::{Failed, Run};
use ironhorse_core::eager::*;

/// What an op returns.
pub type Done = Result<(), Failed>;

/// A function for each op. Unsafe as [`Run::run`].
macro_rules! calls {
    ($($name:ident($($arg:tt),*: $($ty:ty),*) => $op:expr;)*) => {$(
        pub unsafe fn $name($($arg: $ty),*) -> Done {
            // SAFETY: guaranteed by the caller.
            unsafe { $op.run() }
        }
    )*};
}

calls! {
    unary(op, x, y, n: UnaryFn, Array, Array, usize) => Unary { op, x, y, n };
    unary_bwd(op, [d_y, x], d_x, n: UnaryFn, [Array; 2], Array, usize) => UnaryBwd { op, d_y, x, d_x, n };
    binary(op, [a, b], y, n: BinaryFn, [Array; 2], Array, usize) => Binary { op, a, b, y, n };
    swiglu_bwd([d_y, gate, up], [d_gate, d_up], n: [Array; 3], [Array; 2], usize) =>
        SwigluBwd { d_y, gate, up, d_gate, d_up, n };
    scale_bias_relu([x, bias], y, rows, scale: [Array; 2], Array, Rows, f64) =>
        ScaleBiasRelu { x, bias, y, gate: std::ptr::null_mut(), rows, scale };
    scale_bias_relu_bwd([d_y, y], [d_x, d_bias], rows, scale: [Array; 2], [Array; 2], Rows, f64) =>
        ScaleBiasReluBwd { d_y, expanded: false, gate: Gate::Result(y), d_x, d_bias, rows, scale };
    softmax(x, y, rows: Array, Array, Rows) => Softmax { x, y, rows };
    softmax_bwd([d_y, y], d_x, rows: [Array; 2], Array, Rows) => SoftmaxBwd { d_y, y, d_x, rows };
    rmsnorm([x, weight], [y, rstd], rows, eps: [Array; 2], [Array; 2], Rows, f64) =>
        RmsNorm { x, weight, y, rstd, rows, eps };
    rmsnorm_bwd([d_y, x, weight, rstd], [d_x, d_weight], rows: [Array; 4], [Array; 2], Rows) =>
        RmsNormBwd { d_y, x, weight, rstd, d_x, d_weight, rows };
    layernorm([x, weight, bias], [y, mean, rstd], rows, eps: [Array; 3], [Array; 3], Rows, f64) =>
        LayerNorm { x, weight, bias, y, mean, rstd, rows, eps };
    layernorm_bwd([d_y, x, weight, mean, rstd], [d_x, d_weight, d_bias], rows: [Array; 5], [Array; 3], Rows) =>
        LayerNormBwd { d_y, x, weight, mean, rstd, d_x, d_weight, d_bias, rows };
    cross_entropy(logits, targets, [losses, lse], rows, ignore: Array, Targets, [Array; 2], Rows, i64) =>
        CrossEntropy { logits, targets, losses, lse, rows, ignore };
    cross_entropy_mean(losses, targets, [loss, inv_count], rows, ignore, mean: Array, Targets, [Array; 2], usize, i64, bool) =>
        CrossEntropyMean { losses, targets, loss, inv_count, rows, ignore, mean };
    cross_entropy_bwd([d_loss, logits, lse, inv_count], targets, d_logits, rows, ignore, per_row:
        [Array; 4], Targets, Array, Rows, i64, bool) =>
        CrossEntropyBwd { d_loss, logits, lse, inv_count, targets, d_logits, rows, ignore, per_row };
    rope([x, cos, sin], y, shape, back: [Array; 3], Array, &RopeShape, bool) => Rope { x, cos, sin, y, shape: *shape, back };
    attention([q, k, v], [out, lse], shape: [Array; 3], [Array; 2], &AttentionShape) =>
        Attention { q, k, v, out, lse, shape: *shape };
    attention_bwd([d_out, q, k, v, out, lse], [d_q, d_k, d_v], shape: [Array; 6], [Array; 3], &AttentionShape) =>
        AttentionBwd { d_out, q, k, v, out, lse, d_q, d_k, d_v, shape: *shape, any_order: false };
}
