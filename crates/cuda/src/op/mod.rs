//! The ops on the device, one file per family: which kernels or library calls, with which sizes.

mod attention;
mod flash;

use crate::kernels::Spec;
use crate::lower::Lower;
use crate::{Cache, Error, Result};
use ironhorse_core::op::Op;

/// The libraries ops call, opened at first use.
pub(crate) struct Libraries {
    #[allow(dead_code, reason = "the GEMM launcher keeps its algorithms there")]
    pub cache: Cache,
    /// cuDNN and its plans.
    pub attention: attention::CudnnLibrary,
}

impl Libraries {
    pub fn new(cache: Cache) -> Self {
        Self { cache, attention: attention::CudnnLibrary::default() }
    }
}

/// Lowers one op.
pub(crate) fn lower(cx: &mut Lower<'_>, op: &Op) -> Result<()> {
    match op {
        Op::AttentionFwd(op) => attention::attention_fwd(cx, op),
        Op::AttentionBwd(op) => attention::attention_bwd(cx, op),
        _ => Err(Error::Unsupported(format!("{} is not on this engine yet", op.name()))),
    }
}

/// Every specialisation the launchers ask for.
pub(crate) fn all_specs() -> Vec<Spec> {
    [flash::specs()].concat()
}
