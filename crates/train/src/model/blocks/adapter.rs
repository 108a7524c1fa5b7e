//! Adapters beside frozen linear layers, and what is left out where weights are frozen.

use super::Blocks;
use crate::Result;
use ironhorse_core::op::{
    Accum, LinearBwdWeight, LinearFwd, LoraBwdHidden, LoraBwdInput, LoraBwdWeight, LoraFwd, LoraParts,
};
use ironhorse_core::{Error, Pool, Slot};

/// The adapters of a linear layer, whose result they add to.
#[derive(Clone, Copy)]
pub(in crate::model) struct Adapter {
    /// (P·r,C)
    pub a: Slot,
    /// (rows of the parts,r)
    pub b: Slot,
    pub parts: LoraParts,
    /// alpha / r
    pub scale: f32,
}

impl Blocks {
    /// Adds what the adapters make of the layer's input; `name` is that of the layer.
    pub(super) fn adapt(&mut self, name: &str, out: Slot, inp: Slot, p: Adapter) -> Result<()> {
        let Adapter { a, b, parts, scale } = p;
        let hidden = self.tokens_by(a.shape.rows());
        self.b.push(LinearFwd { out: hidden, pre: None, inp, weight: a, bias: None })?;
        self.b.push(LoraFwd { out, hidden, b, parts, scale })?;
        self.hidden_of.insert(name.to_owned(), hidden);
        Ok(())
    }

    /// The gradients of the adapters, and what they add to that of the input; `[d_inp, d_out, inp]`.
    pub(super) fn adapt_bwd(&mut self, name: &str, p: Adapter, [d_inp, d_out, inp]: [Slot; 3]) -> Result<()> {
        let Adapter { a, b, parts, scale } = p;
        let missing = || Error::Program(format!("{name}: a backward of adapters without a forward"));
        let hidden = self.hidden_of.get(name).copied().ok_or_else(missing)?;
        let d_hidden = self.tokens_by(a.shape.rows());
        let (d_a, d_b, accum) = (self.b.grad(a), self.b.grad(b), Accum::FirstWrites);
        self.b.push(LoraBwdWeight { d_b, d_out, hidden, parts, scale, accum })?;
        self.b.push(LoraBwdHidden { d_hidden, d_out, b, parts, scale })?;
        self.b.push(LinearBwdWeight { d_weight: d_a, d_bias: None, d_out: d_hidden, inp, accum })?;
        self.b.push(LoraBwdInput { d_inp, d_hidden, a })?;
        Ok(())
    }

    /// Where the gradient of a small weight goes, and how it is stored. That of a frozen one goes to memory that nothing
    /// reads.
    pub fn grad_of(&mut self, weight: Slot) -> (Slot, Accum) {
        if !is_frozen(weight) {
            return (self.b.grad(weight), Accum::FirstWrites);
        }
        let dtype = self.b.precision().grads;
        (self.b.activation(weight.shape, dtype), Accum::Write)
    }
}

/// Whether a weight is not trained.
pub(super) fn is_frozen(weight: Slot) -> bool {
    weight.pool == Pool::Frozen
}
