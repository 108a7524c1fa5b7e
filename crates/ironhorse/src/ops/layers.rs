//! Ops that layers need beyond the C functions: gradients, what a forward keeps for its backward, products with transposed
//! matrices and those of experts. Rust and `ironhorse.nn` call them; arrays of heads are (batch, positions, heads · head_dim),
//! as a linear layer makes them.

use super::check::{self, Range};
use super::spec::{Arg, Elem, Role, Value};
use super::{Result, Stream};
use crate::core::eager::{Array, GemmPart, GemmShape, GroupedGemm};
use crate::eager::Runner;

define! {
    /// y = x / sqrt(mean(x^2) + eps) * weight of each row, and rstd, the factor of each row.
    rmsnorm = nn_rmsnorm(
        x: read [rows, dim],
        weight: read [dim],
        y: write [rows, dim],
        rstd: write [rows],
        rows: size { .leading() },
        dim: size,
        eps: double { .bound(Bound::NotNegative).number(1e-6) },
    ) => RmsNorm { x, weight, y, rstd, rows: Rows { rows, cols: dim }, eps };

    /// The gradients of rmsnorm.
    rmsnorm_bwd = nn_rmsnorm_bwd(
        d_y: read [rows, dim],
        x: read [rows, dim],
        weight: read [dim],
        rstd: read [rows],
        d_x: write [rows, dim],
        d_weight: write [dim],
        rows: size { .leading() },
        dim: size,
    ) => RmsNormBwd { d_y, x, weight, rstd, d_x, d_weight, rows: Rows { rows, cols: dim } };

    /// The gradients of silu(gate) * up.
    swiglu_bwd = nn_swiglu_bwd(
        d_y: read [n],
        gate: read [n],
        up: read [n],
        d_gate: write [n],
        d_up: write [n],
        n: count { .leading() },
    ) => SwigluBwd { d_y, gate, up, d_gate, d_up, n };

    /// y = x with elements i and i + head_dim / 2 of each head rotated by the angles in row offset + position of `cos` and `sin`, or back.
    rope = nn_rope(
        x: read [batch, seq, (heads * head_dim)],
        cos: read [(offset + seq), (head_dim / 2)],
        sin: read [(offset + seq), (head_dim / 2)],
        y: write [batch, seq, (heads * head_dim)],
        batch: size,
        seq: size,
        heads: size,
        head_dim: size { .bound(Bound::Even) },
        offset: size { .or(Default::Int(0)) },
        back: flag { .or(Default::Flag(false)) },
    ) => Rope {
        x,
        cos: Array { at: cos.at.wrapping_byte_add(offset * head_dim / 2 * 4), ..cos },
        sin: Array { at: sin.at.wrapping_byte_add(offset * head_dim / 2 * 4), ..sin },
        y,
        shape: RopeShape { batch, seq, heads, head_dim, pairs: Pairs::Halves },
        back,
    };

    /// out = softmax(q k^T / sqrt(head_dim)) v of each head, causal, and lse, the logarithm of what the softmax divided by.
    /// Query head h uses key head h / (heads / kv_heads); the last query sees all keys.
    attention = nn_attention(
        q: read [batch, seq, (heads * head_dim)],
        k: read [batch, kv_len, (kv_heads * head_dim)],
        v: read [batch, kv_len, (kv_heads * head_dim)],
        out: write [batch, seq, (heads * head_dim)],
        lse: write [batch, heads, seq],
        batch: size,
        seq: size,
        kv_len: size,
        heads: size { .or(Default::Required) },
        kv_heads: size { .bound(Bound::Divides("heads")).or(Default::Required) },
        head_dim: size,
    ) => Attention {
        q, k, v, out, lse,
        shape: AttentionShape::position_major(
            [batch, seq, kv_len], [heads, kv_heads], head_dim, (1.0 / (head_dim.max(1) as f64).sqrt(), true),
        ),
    };

    /// The gradients of attention.
    attention_bwd = nn_attention_bwd(
        d_out: read [batch, seq, (heads * head_dim)],
        q: read [batch, seq, (heads * head_dim)],
        k: read [batch, kv_len, (kv_heads * head_dim)],
        v: read [batch, kv_len, (kv_heads * head_dim)],
        out: read [batch, seq, (heads * head_dim)],
        lse: read [batch, heads, seq],
        d_q: write [batch, seq, (heads * head_dim)],
        d_k: write [batch, kv_len, (kv_heads * head_dim)],
        d_v: write [batch, kv_len, (kv_heads * head_dim)],
        batch: size,
        seq: size,
        kv_len: size,
        heads: size { .or(Default::Required) },
        kv_heads: size { .bound(Bound::Divides("heads")).or(Default::Required) },
        head_dim: size,
    ) { .idle(&["q", "k"]) } => AttentionBwd {
        d_out, q, k, v, out, lse, d_q, d_k, d_v,
        shape: AttentionShape::position_major(
            [batch, seq, kv_len], [heads, kv_heads], head_dim, (1.0 / (head_dim.max(1) as f64).sqrt(), true),
        ),
        any_order: false,
    };

    /// c = alpha a b + beta c, where a is stored as (k, m) if transpose_a, and b as (n, k) if transpose_b.
    gemm_transposed = nn_gemm(
        a: read [m, k],
        b: read [k, n],
        c: write [m, n],
        m: size,
        n: size,
        k: size,
        alpha: number,
        beta: number,
        transpose_a: flag,
        transpose_b: flag,
    ) { .python(Python::Hidden).idle(&["c"]) } => Gemm {
        a, b, c, shape: GemmShape { batch: 1, m, n, k, alpha, beta, transpose_a, transpose_b },
    };
}

/// Which product of a linear layer of several experts: each has a range of rows and a weight (O, I) of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouped {
    /// out (rows, O) = inp (rows, I) times the transposed weight: a is inp, b the weights (E, O, I).
    Forward,
    /// d_inp (rows, I) = d_out (rows, O) times the weight: a is d_out, b the weights.
    Input,
    /// d_weight (E, O, I) += transposed d_out (rows, O) times inp (rows, I): a is d_out, b is inp.
    Weight,
}

/// The arrays and sizes of [`gemm_grouped`].
#[derive(Clone, Copy, Debug)]
pub struct GroupedLinear<'a> {
    /// Which product.
    pub kind: Grouped,
    /// The left factor.
    pub a: *const f32,
    /// The right factor.
    pub b: *const f32,
    /// The result.
    pub c: *mut f32,
    /// O, the outputs of an expert.
    pub outs: usize,
    /// I, the inputs of an expert.
    pub ins: usize,
    /// Rows `offsets[e]..offsets[e + 1]` are those of expert e.
    pub offsets: &'a [i32],
}

/// The products of a linear layer of experts. An expert without rows costs nothing.
///
/// # Safety
/// See [the module](super); sizes as [`Grouped`] says, with `offsets.len() - 1` experts and `offsets`' last as rows.
///
/// # Errors
/// See [the module](super); offsets that do not begin with 0, or that decrease.
pub unsafe fn gemm_grouped(linear: &GroupedLinear<'_>, stream: Stream) -> Result {
    const OP: &str = "gemm_grouped";
    static A: Arg = Arg::new("a", Role::Read(Elem::F32), &[]);
    static B: Arg = Arg::new("b", Role::Read(Elem::F32), &[]);
    static C: Arg = Arg::new("c", Role::Update, &[]);
    let &GroupedLinear { kind, a, b, c, outs, ins, offsets } = linear;
    let rows = match offsets {
        [0, .., last] if offsets.is_sorted() => *last as usize,
        _ => {
            let expected = "numbers from 0 that do not decrease";
            return check::refuse(OP, "offsets", format_args!("{offsets:?}"), expected);
        }
    };
    let weights = (offsets.len() - 1).saturating_mul(outs).saturating_mul(ins);
    let (wide, narrow) = (rows.saturating_mul(outs), rows.saturating_mul(ins));
    let [a_len, b_len, c_len] = match kind {
        Grouped::Forward => [narrow, weights, wide],
        Grouped::Input => [wide, weights, narrow],
        Grouped::Weight => [wide, narrow, weights],
    };
    if c_len == 0 {
        return Ok(());
    }
    let left = Range::new(OP, &A, a.cast(), a_len)?;
    let right = Range::new(OP, &B, b.cast(), b_len)?;
    let result = Range::new(OP, &C, c.cast_const().cast(), c_len)?;
    result.shares(left, OP, [&C, &A])?;
    result.shares(right, OP, [&C, &B])?;
    let place = check::place_of(OP, &[left, right, result], stream)?;
    let parts: Vec<GemmPart> = (0..offsets.len() - 1).map(|e| part(kind, offsets, e, [outs, ins])).collect();
    let op = GroupedGemm { a: Array::f32(a), b: Array::f32(b), c: Array::f32_mut(c), parts: &parts };
    // SAFETY: the arrays were checked and have the sizes the caller guarantees; the parts lie inside and write apart.
    check::at(place, stream, |at| unsafe { Runner { op: OP, at }.run(&op) })
}

/// The product of expert `e`.
fn part(kind: Grouped, offsets: &[i32], e: usize, [outs, ins]: [usize; 2]) -> GemmPart {
    let (first, rows) = (offsets[e] as usize, (offsets[e + 1] - offsets[e]) as usize);
    let (wide, narrow, weight) = (first * outs, first * ins, e * outs * ins);
    let shape = |[m, n, k]: [usize; 3], beta, [transpose_a, transpose_b]: [bool; 2]| GemmShape {
        batch: 1,
        m,
        n,
        k,
        alpha: 1.0,
        beta,
        transpose_a,
        transpose_b,
    };
    match kind {
        Grouped::Forward => {
            let shape = shape([rows, outs, ins], 0.0, [false, true]);
            GemmPart { a: narrow, b: weight, c: wide, shape }
        }
        Grouped::Input => {
            let shape = shape([rows, ins, outs], 0.0, [false, false]);
            GemmPart { a: wide, b: weight, c: narrow, shape }
        }
        Grouped::Weight => {
            let shape = shape([outs, ins, rows], 1.0, [true, false]);
            GemmPart { a: wide, b: narrow, c: weight, shape }
        }
    }
}
