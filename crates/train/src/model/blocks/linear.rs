//! Linear layers, with their adapters where they have some.

use super::adapter::is_frozen;
use super::{Blocks, Linear};
use crate::Result;
use ironhorse_core::Slot;
use ironhorse_core::op::{Accum, LinearBwdInput, LinearBwdWeight, LinearFwd, PreAct};

impl Blocks {
    pub fn linear(&mut self, name: &str, inp: Slot, p: Linear) -> Result<Slot> {
        let out = self.tokens_by(p.weight.shape.rows());
        self.linear_into(name, out, inp, p)?;
        self.b.name(name, out);
        Ok(out)
    }

    /// A linear layer whose result has no name.
    pub fn linear_into(&mut self, name: &str, out: Slot, inp: Slot, p: Linear) -> Result<()> {
        self.b.at(name);
        self.b.push(LinearFwd { out, pre: None, inp, weight: p.weight, bias: p.bias })?;
        match p.adapter {
            Some(adapter) => self.adapt(name, out, inp, adapter),
            None => Ok(()),
        }
    }

    /// Both gradients of a linear layer; `[d_inp, d_out, inp]`. With `pre`, the input was the activation of that. A frozen
    /// one has no gradient of its own, but its adapters have.
    pub fn linear_bwd(
        &mut self,
        name: &str,
        p: Linear,
        [d_inp, d_out, inp]: [Slot; 3],
        pre: Option<PreAct>,
    ) -> Result<()> {
        self.b.at(name);
        if !is_frozen(p.weight) {
            let (d_weight, d_bias) = (self.b.grad(p.weight), p.bias.map(|bias| self.b.grad(bias)));
            self.b.push(LinearBwdWeight { d_weight, d_bias, d_out, inp, accum: Accum::FirstWrites })?;
        }
        self.b.push(LinearBwdInput { d_inp, d_out, weight: p.weight, pre })?;
        match p.adapter {
            Some(adapter) => self.adapt_bwd(name, adapter, [d_inp, d_out, inp]),
            None => Ok(()),
        }
    }
}
