//! Token plus position embedding.

use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{DType, Result, Slot};

/// `out[b,t] = wte[tokens[b,t]] + wpe[t]`; `wpe[position + t]` when decoding token by token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingFwd {
    /// (B,T,C)
    pub out: Slot,
    /// (B,T) i32
    pub tokens: Slot,
    /// (V,C)
    pub wte: Slot,
    /// (maxT,C)
    pub wpe: Slot,
    /// Tokens at or beyond this are an input error (V without padding).
    pub vocab: usize,
    /// Start at the scalar `position` instead of 0.
    pub at_position: bool,
}

impl OpSpec for EmbeddingFwd {
    const NAME: &'static str = "embedding_fwd";
    slots!(Write out, Read tokens, Read wte, Read wpe);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("out", &self.out), ("wte", &self.wte), ("wpe", &self.wpe)])?;
        check_embedding(c, [self.out, self.tokens, self.wte, self.wpe], ["out", "wpe"])?;
        if self.vocab > self.wte.shape.rows() {
            let what = format!("`vocab` is {}, but `wte` has {} rows", self.vocab, self.wte.shape.rows());
            return Checker(Self::NAME).fail(what);
        }
        Ok(())
    }

    fn flops(&self) -> u64 {
        self.out.numel() as u64
    }

    /// Only the rows looked up move.
    fn bytes(&self) -> Option<u64> {
        Some((3 * self.out.bytes() + self.tokens.bytes()) as u64)
    }
}

/// `d_wte[tokens[b,t]] += d_out[b,t]` and `d_wpe[t] (+)= Σ_b d_out[b,t]`, summed in the order of (b,t).
///
/// `d_wte` is always added to: the tied output head has written it before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingBwd {
    /// (V,C), added to
    pub d_wte: Slot,
    /// (maxT,C)
    pub d_wpe: Slot,
    /// (B,T,C)
    pub d_out: Slot,
    /// (B,T) i32
    pub tokens: Slot,
    /// How `d_wpe` treats what was there. Rows beyond T become 0 when it overwrites.
    pub accum: Accum,
}

impl OpSpec for EmbeddingBwd {
    const NAME: &'static str = "embedding_bwd";
    slots!(Update d_wte, Update d_wpe, Read d_out, Read tokens);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_out", &self.d_out)])?;
        c.same_float(&[("d_wte", &self.d_wte), ("d_wpe", &self.d_wpe)])?;
        let slots = [self.d_out, self.tokens, self.d_wte, self.d_wpe];
        check_embedding(c, slots, ["d_out", "d_wpe"])
    }

    fn flops(&self) -> u64 {
        2 * self.d_out.numel() as u64
    }

    fn bytes(&self) -> Option<u64> {
        Some((5 * self.d_out.bytes() + self.tokens.bytes()) as u64)
    }
}

fn check_embedding(c: Checker, [x, tokens, wte, wpe]: [Slot; 4], names: [&str; 2]) -> Result<()> {
    let [x_name, wpe_name] = names;
    c.dtype("tokens", &tokens, DType::I32)?;
    let width = wte.shape.cols();
    c.matrix(x_name, &x, tokens.numel(), width)?;
    c.matrix(wpe_name, &wpe, wpe.shape.rows(), width)?;
    let seq = tokens.shape.cols();
    if seq > wpe.shape.rows() {
        let what =
            format!("sequence length {seq} is beyond the model's context of {} positions", wpe.shape.rows());
        return c.fail(what);
    }
    Ok(())
}
