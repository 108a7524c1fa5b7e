//! Linear layers, with their adapters where they have some.

use super::adapter::is_frozen;
use super::{Blocks, Linear};
use crate::Result;
use ironhorse_core::Slot;
use ironhorse_core::op::{Accum, Act, LinearBwdInput, LinearBwdWeight, LinearFwd, PreAct};

impl Blocks {
    pub fn linear(&mut self, name: &str, inp: Slot, p: Linear) -> Result<Slot> {
        let out = self.tokens_by(p.weight.shape.rows());
        self.linear_into(name, out, inp, p)?;
        self.b.name(name, out);
        Ok(out)
    }

    /// A linear layer whose result has no name.
    pub fn linear_into(&mut self, name: &str, out: Slot, inp: Slot, p: Linear) -> Result<()> {
        if self.is_fp8(name, &p) {
            return self.linear_fp8(name, [out, inp], None, p);
        }
        self.b.at(name);
        self.b.push(LinearFwd { out, pre: None, inp, weight: p.weight, bias: p.bias })?;
        match p.adapter {
            Some(adapter) => self.adapt(name, out, inp, adapter),
            None => Ok(()),
        }
    }

    /// `proj(act(fc(inp)))`; gives the result, and the value before the activation. `None` where the products of a layer are not of
    /// 8-bit numbers.
    pub fn mlp_fp8(
        &mut self,
        [fc_name, proj_name]: [&str; 2],
        inp: Slot,
        act: Act,
        [fc, proj]: [Linear; 2],
    ) -> Result<Option<[Slot; 2]>> {
        if !self.is_fp8(fc_name, &fc) || !self.is_fp8(proj_name, &proj) {
            return Ok(None);
        }
        let pre = self.linear(fc_name, inp, fc)?;
        let out = self.tokens_by(proj.weight.shape.rows());
        self.linear_fp8(proj_name, [out, pre], Some(act), proj)?;
        self.b.name(proj_name, out);
        Ok(Some([out, pre]))
    }

    /// The backward of [`Blocks::mlp_fp8`]; `[d_inp, d_out]`.
    pub fn mlp_bwd_fp8(
        &mut self,
        [fc_name, proj_name]: [&str; 2],
        [d_inp, d_out]: [Slot; 2],
        pre: PreAct,
        [fc, proj]: [Linear; 2],
    ) -> Result<()> {
        let d_act = self.tokens_by(fc.weight.shape.rows());
        self.linear_bwd_fp8(proj_name, proj, [d_act, d_out], None)?;
        self.linear_bwd_fp8(fc_name, fc, [d_inp, d_act], Some(pre))
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
        if self.is_fp8(name, &p) && pre.is_none() {
            return self.linear_bwd_fp8(name, p, [d_inp, d_out], None);
        }
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
