//! Token embedding, with or without learned positions.

use super::mask::check_shape;
use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, named, op};
use crate::{DType, Result, Slot};

op! {
    /// `out[b,t] = wte[tokens[b,t]] + wpe[t]`, with `wpe[position + t]` when decoding token by token and
    /// `wpe[positions[b,t]]` where sequences hold several documents. Without `wpe`, only the token's row times `factor`.
    pub struct EmbeddingFwd {
        /// (B,T,C)
        pub out: Slot = Write,
        /// (B,T) i32
        pub tokens: Slot = Read,
        /// (V,C)
        pub wte: Slot = Read,
        /// (maxT,C)
        pub wpe: Option<Slot> = Read,
        /// (B,T) i32, the position of each token where sequences hold several documents; with `at_position`, of tokens that
        /// continue sequences in a cache: any below maxT, or -1 for a token that is not used
        pub positions: Option<Slot> = Read,
        /// V without padding; tokens outside of `0..vocab` are an input error.
        pub vocab: usize,
        /// Whether positions start at the scalar `position`, or where `positions` say, instead of 0.
        pub at_position: bool,
        /// What rows are multiplied by; 1 with `wpe`.
        pub factor: f32,
    }
    name "embedding_fwd"
    check(op, c) {
        c.same_float(named!(op: out, wte))?;
        if let Some(wpe) = &op.wpe {
            c.same_float(&[("wte", &op.wte), ("wpe", wpe)])?;
        }
        check_embedding(c, [op.out, op.tokens, op.wte], op.wpe, ["out", "wpe"])?;
        if op.vocab > op.wte.shape.rows() {
            let what = format!("`vocab` is {}, but `wte` has {} rows", op.vocab, op.wte.shape.rows());
            return c.fail(what);
        }
        check_factor(c, op.factor, op.wpe.is_some(), "wpe")?;
        if op.positions.is_some() && op.wpe.is_none() {
            return c.fail("`positions` needs `wpe`".into());
        }
        op.positions.map_or(Ok(()), |positions| check_shape(c, &positions, op.tokens.shape.dims()))
    }
    numerics { Numerics::new(Arithmetic::Addition) }
    flops(op) { op.out.numel() as u64 }
    // Only the rows looked up are read.
    bytes(op) {
        let rows = if op.wpe.is_some() { 3 } else { 2 };
        (rows * op.out.bytes() + op.tokens.bytes()) as u64
    }
    positions(op) {
        let wpe = op.wpe.filter(|_| op.at_position && op.positions.is_none())?;
        Some((wpe.shape.rows() + 1).saturating_sub(op.tokens.shape.cols()))
    }
}

op! {
    /// `d_wte[tokens[b,t]] (+)= factor·d_out[b,t]` and `d_wpe[t] (+)= Σ_b d_out[b,t]`, summed in the order of (b,t);
    /// with `positions`, `d_wpe[positions[b,t]] (+)= d_out[b,t]`.
    ///
    /// If the output head is tied, its backward has already written `d_wte`, and this op adds to it.
    pub struct EmbeddingBwd {
        /// (V,C)
        pub d_wte: Slot = Accumulate(accum_wte),
        /// (maxT,C)
        pub d_wpe: Option<Slot> = Accumulate(accum),
        /// (B,T,C)
        pub d_out: Slot = Read,
        /// (B,T) i32
        pub tokens: Slot = Read,
        /// (B,T) i32, that of the forward
        pub positions: Option<Slot> = Read,
        /// Whether `d_wte` is overwritten or added to. When overwritten, rows of tokens that do not occur become 0.
        pub accum_wte: Accum,
        /// Whether `d_wpe` is overwritten or added to. When overwritten, rows from T on become 0.
        pub accum: Accum,
        /// The factor of the forward; 1 with `d_wpe`.
        pub factor: f32,
    }
    name "embedding_bwd"
    check(op, c) {
        c.same_float(named!(op: d_out))?;
        c.same_float(named!(op: d_wte))?;
        if let Some(d_wpe) = &op.d_wpe {
            c.same_float(&[("d_wte", &op.d_wte), ("d_wpe", d_wpe)])?;
        }
        check_embedding(c, [op.d_out, op.tokens, op.d_wte], op.d_wpe, ["d_out", "d_wpe"])?;
        check_factor(c, op.factor, op.d_wpe.is_some(), "d_wpe")?;
        if op.positions.is_some() && op.d_wpe.is_none() {
            return c.fail("`positions` needs `d_wpe`".into());
        }
        op.positions.map_or(Ok(()), |positions| check_shape(c, &positions, op.tokens.shape.dims()))
    }
    numerics {
        // Sums of at most two thousand terms; the error of summing in order is about F32_UNIT·√terms/2.
        Numerics::new(Arithmetic::Sum(2e-6))
    }
    flops(op) { (if op.d_wpe.is_some() { 2 } else { 1 }) * op.d_out.numel() as u64 }
    // Only the rows looked up are accessed, and the whole table if it is cleared first.
    bytes(op) {
        let rows = if op.d_wpe.is_some() { 5 } else { 3 };
        let cleared = if op.accum_wte == Accum::Add { 0 } else { op.d_wte.bytes() };
        (rows * op.d_out.bytes() + op.tokens.bytes() + cleared) as u64
    }
}

fn check_factor(c: &Checker, factor: f32, has_positions: bool, positions: &str) -> Result<()> {
    if !factor.is_finite() || factor <= 0.0 {
        return c.fail(format!("`factor` is {factor}, expected a number above 0"));
    }
    if has_positions && factor != 1.0 {
        return c.fail(format!("`factor` is {factor}, expected 1 with `{positions}`"));
    }
    Ok(())
}

fn check_embedding(
    c: &Checker,
    [x, tokens, wte]: [Slot; 3],
    wpe: Option<Slot>,
    [x_name, wpe_name]: [&str; 2],
) -> Result<()> {
    c.dtype("tokens", &tokens, DType::I32)?;
    let width = wte.shape.cols();
    c.matrix(x_name, &x, tokens.numel(), width)?;
    let Some(wpe) = wpe else { return Ok(()) };
    c.matrix(wpe_name, &wpe, wpe.shape.rows(), width)?;
    let seq = tokens.shape.cols();
    if seq > wpe.shape.rows() {
        return c.fail(beyond_context(seq, wpe.shape.rows()));
    }
    Ok(())
}

/// The error of a sequence that is too long.
pub(super) fn beyond_context(seq: usize, context: usize) -> String {
    format!("sequence length {seq} is beyond the model's context of {context} positions")
}
