//! Plain data of the direct ops: one call on the caller's memory, without program, pools or engine. Both `ironhorse_cpu::direct`
//! and `ironhorse_cuda::direct` have the ops of [the table](#ops), with the same names and arguments.
//!
//! Arrays are contiguous and row-major unless strides are given. Results are rounded once to the array's type; sums,
//! statistics and what an op keeps for its backward are [`Float::acc`]. A gradient is written, not added to.
//!
//! # Ops
//! On a GPU `scale_bias_relu` can keep the gate of its gradient as bits, which its backward then takes instead of y.
//!
//! | forward | backward |
//! | --- | --- |
//! | `unary(op, x, y, n)` | `unary_bwd(op, d_y, x, d_x, n)` |
//! | `binary(op, a, b, y, n)` | `swiglu_bwd(d_y, gate, up, d_gate, d_up, n)` |
//! | `scale_bias_relu(x, bias, y, rows, scale)` | `scale_bias_relu_bwd(d_y, y, d_x, d_bias, rows, scale)` |
//! | `softmax(x, y, rows)` | `softmax_bwd(d_y, y, d_x, rows)` |
//! | `rmsnorm(x, weight, y, rstd, rows, eps)` | `rmsnorm_bwd(d_y, x, weight, rstd, d_x, d_weight, rows)` |
//! | `layernorm(x, weight, bias, y, mean, rstd, rows, eps)` | `layernorm_bwd(d_y, x, weight, mean, rstd, d_x, d_weight, d_bias, rows)` |
//! | `cross_entropy(logits, targets, losses, lse, rows, ignore)` | `cross_entropy_bwd(d_losses, logits, targets, lse, d_logits, rows, ignore)` |
//! | `rope(x, cos, sin, y, shape)` | the same with `shape.back` |
//! | `attention(q, k, v, out, lse, shape)` | `attention_bwd(d_out, q, k, v, out, lse, d_q, d_k, d_v, shape)` |

use std::ffi::c_void;

/// The floating-point types that direct ops compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Float {
    /// `double`
    F64,
    /// `float`
    F32,
    /// The upper half of a float.
    BF16,
    /// IEEE half precision.
    F16,
}

impl Float {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::F64, Self::F32, Self::BF16, Self::F16];

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }

    /// The type of sums, statistics and kept values: f64 for f64, f32 for all others.
    pub const fn acc(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// What kernels call it.
    pub const fn ctype(self) -> &'static str {
        match self {
            Self::F64 => "double",
            Self::F32 => "float",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// Memory of one type: where it starts. Null is "not wanted" where an op's doc says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// The first element.
    pub at: *mut c_void,
    /// Its type.
    pub float: Float,
}

impl Array {
    /// f32 memory that is read.
    pub fn f32(at: *const f32) -> Self {
        Self { at: at.cast_mut().cast(), float: Float::F32 }
    }

    /// f32 memory that is written.
    pub fn f32_mut(at: *mut f32) -> Self {
        Self { at: at.cast(), float: Float::F32 }
    }

    /// No memory.
    pub fn none(float: Float) -> Self {
        Self { at: std::ptr::null_mut(), float }
    }
}

/// y = f(x), elementwise. `unary_bwd` has all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// x / (1 + e^-x)
    Silu,
    /// x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2
    GeluTanh,
    /// x (1 + erf(x / √2)) / 2
    GeluErf,
    /// x²
    Square,
    /// a x
    Scale(f64),
}

/// y = f(a, b), elementwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// a + b
    Add,
    /// a b
    Mul,
    /// silu(a) b
    Swiglu,
}

/// The rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// How many.
    pub rows: usize,
    /// Elements of each.
    pub cols: usize,
}

impl Rows {
    /// Elements in all.
    pub fn elements(self) -> usize {
        self.rows * self.cols
    }
}

/// Class numbers of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Targets {
    /// `int`, what C programs have.
    I32(*const i32),
    /// `long long`, what PyTorch has.
    I64(*const i64),
}

/// Rotary position embedding of x (batch, seq, heads, head_dim), contiguous; cos and sin (seq, head_dim / 2) of type [`Float::acc`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// Sequences.
    pub batch: usize,
    /// Positions.
    pub seq: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Element 2i turns with 2i + 1 (the paper); else i with i + head_dim / 2 (GPT-NeoX, Hugging Face).
    pub interleaved: bool,
    /// Turns the other way: the gradient.
    pub back: bool,
}

/// Attention of q (batch, heads, q_len, head_dim) to k, v (batch, kv_heads, kv_len, head_dim); lse (batch, heads, q_len), of type
/// [`Float::acc`] and contiguous. Query head h uses key head h / (heads / kv_heads). With `causal`, query i sees the keys up to
/// kv_len - q_len + i. A query that sees no key gets zeros, and minus infinity as its lse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Queries of a sequence.
    pub q_len: usize,
    /// Keys of a sequence.
    pub kv_len: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// What scores are multiplied with.
    pub scale: f64,
    /// Whether queries see only what is not later.
    pub causal: bool,
    /// Strides of q.
    pub q: Strides,
    /// Strides of k.
    pub k: Strides,
    /// Strides of v.
    pub v: Strides,
    /// Strides of out.
    pub out: Strides,
}

/// Elements from one sequence, head or position to the next; those of a head lie side by side. Gradients have the strides
/// of what they are of, d_out those of out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// From sequence to sequence.
    pub batch: usize,
    /// From head to head.
    pub head: usize,
    /// From position to position.
    pub position: usize,
}

impl Strides {
    /// Of a contiguous (batch, heads, len, head_dim).
    pub fn head_major(heads: usize, len: usize, head_dim: usize) -> Self {
        Self { batch: heads * len * head_dim, head: len * head_dim, position: head_dim }
    }

    /// Of a contiguous (batch, len, heads, head_dim).
    pub fn position_major(heads: usize, len: usize, head_dim: usize) -> Self {
        Self { batch: heads * len * head_dim, head: head_dim, position: heads * head_dim }
    }
}
