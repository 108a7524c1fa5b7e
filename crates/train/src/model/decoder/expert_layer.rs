//! One linear layer of all experts, with their adapters where they have some, forward and backward.

use super::Decoder;
use crate::Result;
use crate::model::blocks::Adapter;
use ironhorse_core::op::{
    Accum, Gate, GroupedLinearBwdInput, GroupedLinearBwdWeight, GroupedLinearFwd, GroupedLoraBwdHidden,
    GroupedLoraBwdInput, GroupedLoraBwdWeight, GroupedLoraFwd, SwigluFwd,
};
use ironhorse_core::{Error, Pool, Slot};

/// The weights of a layer of the experts.
#[derive(Clone, Copy)]
pub(super) struct ExpertLayer {
    /// (E,OC,C)
    pub weight: Slot,
    /// A (E,P·r,C) and B (E,rows of the parts,r), trained beside it.
    pub adapter: Option<Adapter>,
}

impl Decoder {
    /// `[out, inp]` are rows, sorted by their experts; `act`, if given, receives SwiGLU of `out`. Gives what the adapters made
    /// of the input.
    pub(super) fn expert_layer_fwd(
        &mut self,
        name: &str,
        layer: ExpertLayer,
        [out, inp]: [Slot; 2],
        (act, offsets): (Option<Slot>, Slot),
    ) -> Result<Option<Slot>> {
        let ExpertLayer { weight, adapter } = layer;
        self.net.b.at(name);
        let Some(Adapter { a, b, parts, scale }) = adapter else {
            self.net.b.push(GroupedLinearFwd { out, act, inp, weight, offsets })?;
            return Ok(None);
        };
        self.net.b.push(GroupedLinearFwd { out, act: None, inp, weight, offsets })?;
        let hidden = self.hidden_rows(inp, a);
        self.net.b.push(GroupedLinearFwd { out: hidden, act: None, inp, weight: a, offsets })?;
        self.net.b.push(GroupedLoraFwd { out, hidden, b, offsets, parts, scale })?;
        if let Some(act) = act {
            self.net.b.push(SwigluFwd { out: act, inp: out, gate: Gate::Silu })?;
        }
        Ok(Some(hidden))
    }

    /// A new (rows,P·r) activation: for each row of `like`, what A (E,P·r,C) makes of it.
    fn hidden_rows(&mut self, like: Slot, a: Slot) -> Slot {
        let (rows, wide, dtype) = (like.shape.rows(), a.shape.dims()[1], self.net.dtype());
        self.net.b.activation([rows, wide], dtype)
    }

    /// The gradient of the layer's weights, unless they are frozen; `[d_out, inp]`.
    pub(super) fn expert_layer_bwd_weight(
        &mut self,
        name: &str,
        layer: ExpertLayer,
        [d_out, inp]: [Slot; 2],
        offsets: Slot,
    ) -> Result<()> {
        if layer.weight.pool == Pool::Frozen {
            return Ok(());
        }
        let (d_weight, accum) = (self.net.b.grad(layer.weight), Accum::FirstWrites);
        self.net.b.at(name);
        Ok(self.net.b.push(GroupedLinearBwdWeight { d_weight, d_out, inp, offsets, accum })?)
    }

    /// The gradients of the layer's input and of its adapters' B, from what the forward kept of them; `[d_inp, d_out]`. Gives the
    /// gradient of what the adapters made of the input, from which that of their A follows.
    pub(super) fn expert_layer_bwd_input(
        &mut self,
        name: &str,
        layer: ExpertLayer,
        [d_inp, d_out]: [Slot; 2],
        (hidden, offsets): (Option<Slot>, Slot),
    ) -> Result<Option<Slot>> {
        let ExpertLayer { weight, adapter } = layer;
        self.net.b.at(name);
        self.net.b.push(GroupedLinearBwdInput { d_inp, d_out, weight, offsets })?;
        let Some(Adapter { a, b, parts, scale }) = adapter else { return Ok(None) };
        let missing = || Error::Program(format!("{name}: a backward of adapters without a forward"));
        let hidden = hidden.ok_or_else(missing)?;
        let (d_b, d_hidden) = (self.net.b.grad(b), self.hidden_rows(d_inp, a));
        let accum = Accum::FirstWrites;
        self.net.b.push(GroupedLoraBwdWeight { d_b, d_out, hidden, offsets, parts, scale, accum })?;
        self.net.b.push(GroupedLoraBwdHidden { d_hidden, d_out, b, offsets, parts, scale })?;
        self.net.b.push(GroupedLoraBwdInput { d_inp, d_hidden, a, offsets })?;
        Ok(Some(d_hidden))
    }

    /// The gradient of the adapters' A, where there are adapters; `inp` is the layer's input.
    pub(super) fn expert_layer_bwd_a(
        &mut self,
        name: &str,
        layer: ExpertLayer,
        (d_hidden, inp): (Option<Slot>, Slot),
        offsets: Slot,
    ) -> Result<()> {
        let (Some(Adapter { a, .. }), Some(d_out)) = (layer.adapter, d_hidden) else { return Ok(()) };
        let (d_weight, accum) = (self.net.b.grad(a), Accum::FirstWrites);
        self.net.b.at(name);
        Ok(self.net.b.push(GroupedLinearBwdWeight { d_weight, d_out, inp, offsets, accum })?)
    }
}
