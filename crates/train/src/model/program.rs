//! What the programs of all models share.

use crate::{Error, Result};
use ironhorse_core::op::{AdamW, GradNorm};
use ironhorse_core::{Builder, DType, Pool, Section, Shape};
use serde::{Deserialize, Serialize};

/// What the backward computes again instead of keeping it from the forward. The results are the same bits, on engines that
/// compute what follows a product from the product as it is stored. Each level includes the ones before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Keep everything.
    #[default]
    None,
    /// Recompute GELU or SwiGLU: spares 4C per token and layer of GPT-2, F per token and expert of a mixture.
    Gelu,
    /// Recompute both norms and, of a mixture, the rows given to experts: spares 2C more, or C per token and expert.
    Full,
    /// Recompute everything inside the experts: spares 2F + C more per token and expert, for a third of their forward
    /// and backward. Of a model without experts the same as `Full`.
    Experts,
}

impl Recompute {
    /// Whether norms are recomputed.
    pub(super) fn norms(self) -> bool {
        matches!(self, Self::Full | Self::Experts)
    }
}

/// Refuses a batch that is empty or longer than the context.
pub(super) fn check_batch((batch, seq): (usize, usize), context: usize) -> Result<()> {
    if batch == 0 || seq == 0 {
        return Err(Error::Config(format!("batch {batch} × sequence {seq}: both must be at least 1")));
    }
    if seq > context {
        return Err(Error::Config(format!(
            "sequence length {seq} is beyond the model's context of {context}; use --seq {context} or less"
        )));
    }
    Ok(())
}

/// Declares the io `halt`: not 0 from a bad step on until the host clears it. Every program of a model declares it, and
/// before any other io: programs of one session share the memory of their io, and it is the one that must keep its
/// contents while others run.
pub(super) fn declare_halt(b: &mut Builder) {
    b.io("halt", Shape::new([]), DType::F32);
}

/// The update: gradient norm and AdamW over everything, unless the `loss` or the norm is not finite. Io: `norm`.
pub(super) fn push_update(b: &mut Builder) -> Result<()> {
    let norm = b.io("norm", Shape::new([]), DType::F32);
    let undeclared = |name| ironhorse_core::Error::Program(format!("no io is called `{name}`"));
    let find = |name| b.find_io(name).ok_or_else(|| undeclared(name));
    let (loss, halt) = (find("loss")?, find("halt")?);
    let [params, grads, moment1, moment2] =
        [Pool::Params, Pool::Grads, Pool::Moment1, Pool::Moment2].map(|pool| b.flat(pool));
    let master = b.precision().has_master().then(|| b.flat(Pool::Master));
    b.section(Section::Update);
    b.at("grad_norm");
    b.push(GradNorm { norm, halt, grads, loss })?;
    b.at("adamw");
    b.push(AdamW { params, master, grads, moment1, moment2, norm, halt })?;
    Ok(())
}
