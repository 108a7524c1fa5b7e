//! Token embedding, with or without learned positions.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{DType, Result, Slot};

/// `out[b,t] = wte[tokens[b,t]] + wpe[t]`, with `wpe[position + t]` when decoding token by token. Without `wpe`, only
/// the token's row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingFwd {
    /// (B,T,C)
    pub out: Slot,
    /// (B,T) i32
    pub tokens: Slot,
    /// (V,C)
    pub wte: Slot,
    /// (maxT,C)
    pub wpe: Option<Slot>,
    /// V without padding; tokens outside of `0..vocab` are an input error.
    pub vocab: usize,
    /// Start at the scalar `position` instead of 0.
    pub at_position: bool,
}

impl OpSpec for EmbeddingFwd {
    const NAME: &'static str = "embedding_fwd";
    slots!(Write out, Read tokens, Read wte, Read wpe);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("out", &self.out), ("wte", &self.wte)])?;
        if let Some(wpe) = &self.wpe {
            c.same_float(&[("wte", &self.wte), ("wpe", wpe)])?;
        }
        check_embedding(c, [self.out, self.tokens, self.wte], self.wpe, ["out", "wpe"])?;
        if self.vocab > self.wte.shape.rows() {
            let what = format!("`vocab` is {}, but `wte` has {} rows", self.vocab, self.wte.shape.rows());
            return Checker(Self::NAME).fail(what);
        }
        Ok(())
    }

    fn numerics(&self, _: &str) -> Numerics {
        Numerics::new(Arithmetic::Addition)
    }

    fn flops(&self) -> u64 {
        self.out.numel() as u64
    }

    /// Only the rows looked up are read.
    fn bytes(&self) -> Option<u64> {
        let rows = if self.wpe.is_some() { 3 } else { 2 };
        Some((rows * self.out.bytes() + self.tokens.bytes()) as u64)
    }
}

/// `d_wte[tokens[b,t]] (+)= d_out[b,t]` and `d_wpe[t] (+)= Σ_b d_out[b,t]`, summed in the order of (b,t).
///
/// If the output head is tied, its backward has already written `d_wte`, and this op adds to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingBwd {
    /// (V,C)
    pub d_wte: Slot,
    /// (maxT,C)
    pub d_wpe: Option<Slot>,
    /// (B,T,C)
    pub d_out: Slot,
    /// (B,T) i32
    pub tokens: Slot,
    /// Whether `d_wte` is overwritten or added to. When overwritten, rows of tokens that do not occur become 0.
    pub accum_wte: Accum,
    /// Whether `d_wpe` is overwritten or added to. When overwritten, rows from T on become 0.
    pub accum: Accum,
}

impl OpSpec for EmbeddingBwd {
    const NAME: &'static str = "embedding_bwd";
    slots!(Accumulate(accum_wte) d_wte, Accumulate(accum) d_wpe, Read d_out, Read tokens);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_out", &self.d_out)])?;
        c.same_float(&[("d_wte", &self.d_wte)])?;
        if let Some(d_wpe) = &self.d_wpe {
            c.same_float(&[("d_wte", &self.d_wte), ("d_wpe", d_wpe)])?;
        }
        check_embedding(c, [self.d_out, self.tokens, self.d_wte], self.d_wpe, ["d_out", "d_wpe"])
    }

    fn numerics(&self, _: &str) -> Numerics {
        // Sums of at most two thousand terms; the error of summing in order is about F32_UNIT·√terms/2.
        Numerics::new(Arithmetic::Sum(2e-6))
    }

    fn flops(&self) -> u64 {
        (if self.d_wpe.is_some() { 2 } else { 1 }) * self.d_out.numel() as u64
    }

    /// Only the rows looked up are accessed, and the whole table if it is cleared first.
    fn bytes(&self) -> Option<u64> {
        let rows = if self.d_wpe.is_some() { 5 } else { 3 };
        let cleared = if self.accum_wte == Accum::Add { 0 } else { self.d_wte.bytes() };
        Some((rows * self.d_out.bytes() + self.tokens.bytes() + cleared) as u64)
    }
}

fn check_embedding(
    c: Checker,
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
        let what =
            format!("sequence length {seq} is beyond the model's context of {} positions", wpe.shape.rows());
        return c.fail(what);
    }
    Ok(())
}
