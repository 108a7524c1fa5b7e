//! The norm of what attention or MLP adds to the residual stream.

use super::Decoder;
use crate::Result;
use crate::model::blocks::{Norm, NormWeights};
use ironhorse_core::Slot;
use ironhorse_core::op::Accum;

impl Decoder {
    /// What is added to the residual stream: `out`, normalised where there is such a norm.
    pub(super) fn post_norm(
        &mut self,
        l: usize,
        norm: Option<(&str, NormWeights)>,
        out: Slot,
    ) -> Result<(Slot, Option<Norm>)> {
        let Some((part, weights)) = norm else { return Ok((out, None)) };
        let saved = self.net.norm(&self.name(l, part), out, weights)?;
        Ok((saved.out, Some(saved)))
    }

    /// The gradient of what went into [`post_norm`](Self::post_norm) from that of what came out, which stays as it is.
    pub(super) fn post_norm_bwd(
        &mut self,
        l: usize,
        part: Option<&str>,
        saved: Option<&Norm>,
        d_out: Slot,
    ) -> Result<Slot> {
        let (Some(part), Some(saved)) = (part, saved) else { return Ok(d_out) };
        let name = self.name(l, part);
        self.net.b.name_grad(&name, d_out);
        let d_inp = self.net.hidden();
        self.net.norm_bwd(&name, saved, [d_inp, d_out], Accum::Write)?;
        Ok(d_inp)
    }
}
