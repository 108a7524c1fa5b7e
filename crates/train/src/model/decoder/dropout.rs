//! Dropout in training: of the embedding, of the attention's probabilities, and of what attention and MLP add to the
//! residual stream, each a place with its own number and so its own masks.

use super::Decoder;
use crate::Result;
use ironhorse_core::op::Dropout;
use ironhorse_core::{DropSite, Slot};

/// A place where elements are dropped; `usize` is the layer.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Embedding,
    /// The probabilities of the attention.
    Probabilities(usize),
    /// The result of the attention's projection.
    Attention(usize),
    /// The result of the MLP's projection.
    Mlp(usize),
}

impl Decoder {
    /// The dropout of a place; `None` where nothing is dropped. The numbers are part of what a checkpoint resumes from and
    /// of what an answer key was computed with: `python/ironhorse/reference/dropout.py` has the same.
    pub(super) fn drop_site(&self, place: Place) -> Option<DropSite> {
        let site = match place {
            Place::Embedding => 0,
            Place::Probabilities(l) => 3 * l + 1,
            Place::Attention(l) => 3 * l + 2,
            Place::Mlp(l) => 3 * l + 3,
        };
        self.dropout.drops().then_some(DropSite { rate: self.dropout, site: site as u32 })
    }

    fn drop_name(&self, place: Place) -> String {
        match place {
            Place::Embedding => "embed_dropout".into(),
            Place::Probabilities(l) => self.name(l, self.plan.names.attn),
            Place::Attention(l) => self.name(l, "attn.dropout"),
            Place::Mlp(l) => self.name(l, "mlp.dropout"),
        }
    }

    /// Drops elements of a value in place.
    pub(super) fn drop_fwd(&mut self, place: Place, value: Slot) -> Result<()> {
        let Some(drop) = self.drop_site(place) else { return Ok(()) };
        let name = self.drop_name(place);
        self.net.b.at(&name);
        self.net.b.push(Dropout { out: value, inp: value, drop })?;
        self.net.b.name(name, value);
        Ok(())
    }

    /// The gradient before dropout from the one after it, which stays as it is unless `in_place`.
    pub(super) fn drop_bwd(&mut self, place: Place, d_out: Slot, in_place: bool) -> Result<Slot> {
        let Some(drop) = self.drop_site(place) else { return Ok(d_out) };
        let name = self.drop_name(place);
        self.net.b.name_grad(&name, d_out);
        let d_inp = if in_place { d_out } else { self.net.hidden() };
        self.net.b.at(&name);
        self.net.b.push(Dropout { out: d_inp, inp: d_out, drop })?;
        Ok(d_inp)
    }
}
