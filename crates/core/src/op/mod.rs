//! The ops: `Copy` structs of slots and numbers, one file per family.
//!
//! Each op knows how its slots must fit together ([`Op::check`]), what it reads and writes ([`Op::args`]), and the
//! minimum work it must do ([`Op::flops`], [`Op::bytes`]). Engines match on the enum. The builder calls `check` for all
//! of them, so every engine gives the same errors.

mod activation;
mod attention;
mod collective;
mod dropout;
mod elementwise;
mod embedding;
mod fp8;
mod grouped;
mod grouped_fp8;
mod grouped_lora;
mod linear;
mod lora;
mod loss;
mod mask;
mod matmul;
mod memory;
mod muon;
mod norm;
mod numerics;
mod optimizer;
mod preference;
mod qk_norm;
mod rope;
mod router;
mod routing;
mod spec;
mod swiglu;

pub use activation::{Act, ActBwd, ActFwd, PreAct};
pub use attention::{AttentionBwd, AttentionCached, AttentionFwd};
pub use collective::{AllGather, Exchange, TreeSum};
pub use dropout::{AttentionDropoutBwd, AttentionDropoutFwd, Dropout};
pub use elementwise::Add;
pub use embedding::{EmbeddingBwd, EmbeddingFwd};
pub use fp8::{Amax, MatmulFp8, Quantize, ScaleUpdate};
pub use grouped::{GroupedLinearBwdInput, GroupedLinearBwdWeight, GroupedLinearFwd};
pub use grouped_fp8::{GroupedFp8, GroupedFp8BwdWeight};
pub use grouped_lora::{GroupedLoraBwdHidden, GroupedLoraBwdInput, GroupedLoraBwdWeight, GroupedLoraFwd};
pub use linear::{LinearBwdInput, LinearBwdWeight, LinearFwd};
pub use lora::{LoraBwdHidden, LoraBwdInput, LoraBwdWeight, LoraFwd, LoraPart, LoraParts};
pub use loss::{Argmax, CrossEntropy, CrossEntropyBwd, IGNORED, LossMean};
pub use mask::{
    AttentionMask, bad_at_position, bad_cache_row, bad_position, check_at_positions, check_cache_rows,
    check_positions,
};
pub use matmul::Matmul;
pub use memory::{CopySlot, Fill};
pub use muon::{MuonMomentum, MuonUpdate, NewtonSchulz};
pub use norm::{
    Gain, LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd, ResidualRmsNormFwd, RmsNormApply,
    RmsNormBwd, RmsNormFwd,
};
pub use numerics::{Arithmetic, BF16_UNIT, F32_UNIT, Numerics, Product};
pub use optimizer::{AdamW, GradNorm};
pub use preference::{Preference, bad_pair, check_pairs};
pub use qk_norm::{QkHeads, QkNormBwd, QkNormFwd};
pub use rope::{Rope, RopeScaling};
pub use router::{RouterBwd, RouterFwd, RouterLoad};
pub use routing::{Combine, CombineBwd, Permute, PermuteBwd, RouteSort};
pub use spec::{Access, Accum, Arg, OpSpec};
pub use swiglu::{Gate, SwigluBwd, SwigluFwd};

use crate::{Param, Result, Slot, Update, muon_matrices};
use std::ops::Range;

macro_rules! ops {
    ($($name:ident),* $(,)?) => {
        /// One step of a program.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs)] // each variant carries the struct of the same name, documented there
        pub enum Op {
            $($name($name),)*
        }

        $(impl From<$name> for Op {
            fn from(op: $name) -> Self {
                Self::$name(op)
            }
        })*

        impl Op {
            /// Every op's name, in the order of the enum.
            pub const NAMES: &'static [&'static str] = {
                const COUNT: usize = 0 $(+ $name::NAMES.len())*;
                &spec::concat::<COUNT>(&[$($name::NAMES,)*])
            };

            fn spec(&self) -> &dyn OpSpec {
                match self {
                    $(Self::$name(op) => op,)*
                }
            }

            fn spec_mut(&mut self) -> &mut dyn OpSpec {
                match self {
                    $(Self::$name(op) => op,)*
                }
            }
        }
    };
}

ops!(
    EmbeddingFwd,
    EmbeddingBwd,
    LayerNormFwd,
    ResidualLayerNormFwd,
    LayerNormApply,
    LayerNormBwd,
    RmsNormFwd,
    ResidualRmsNormFwd,
    RmsNormApply,
    RmsNormBwd,
    LinearFwd,
    LinearBwdInput,
    LinearBwdWeight,
    LoraFwd,
    LoraBwdHidden,
    LoraBwdWeight,
    LoraBwdInput,
    ActFwd,
    ActBwd,
    SwigluFwd,
    SwigluBwd,
    Add,
    QkNormFwd,
    QkNormBwd,
    Rope,
    AttentionFwd,
    AttentionBwd,
    AttentionCached,
    Dropout,
    AttentionDropoutFwd,
    AttentionDropoutBwd,
    RouterFwd,
    RouterBwd,
    RouterLoad,
    RouteSort,
    Permute,
    PermuteBwd,
    Combine,
    CombineBwd,
    GroupedLinearFwd,
    GroupedLinearBwdInput,
    GroupedLinearBwdWeight,
    GroupedLoraFwd,
    GroupedLoraBwdHidden,
    GroupedLoraBwdWeight,
    GroupedLoraBwdInput,
    CrossEntropy,
    CrossEntropyBwd,
    Argmax,
    LossMean,
    Preference,
    GradNorm,
    AdamW,
    MuonMomentum,
    Matmul,
    MuonUpdate,
    Amax,
    Quantize,
    MatmulFp8,
    GroupedFp8,
    GroupedFp8BwdWeight,
    ScaleUpdate,
    Fill,
    CopySlot,
    Exchange,
    TreeSum,
    AllGather,
);

impl Op {
    /// The op's name: the same stem in Rust, CUDA, Python and tests.
    pub fn name(&self) -> &'static str {
        self.spec().name()
    }

    /// The slots with their names and how they are used, in declaration order.
    pub fn args(&self) -> Vec<Arg> {
        let mut args = Vec::new();
        let mut copy = *self;
        copy.spec_mut().visit(&mut |name, access, slot| args.push(Arg { name, access, slot: *slot }));
        args
    }

    /// The slots it reads.
    pub fn reads(&self) -> impl Iterator<Item = Slot> {
        self.args().into_iter().filter(|arg| arg.access.reads()).map(|arg| arg.slot)
    }

    /// The slots it writes.
    pub fn writes(&self) -> impl Iterator<Item = Slot> {
        self.args().into_iter().filter(|arg| arg.access.writes()).map(|arg| arg.slot)
    }

    /// Calls a function that may change each slot; the planner uses it to give slots their final offsets.
    pub fn map_slots(&mut self, f: &mut dyn FnMut(&mut Slot)) {
        self.spec_mut().visit(&mut |_, _, slot| f(slot));
    }

    /// Checks shapes, element types and aliasing.
    pub fn check(&self) -> Result<()> {
        self.spec().check()?;
        spec::check_aliasing(self)
    }

    /// The accuracy of the result that it writes to the argument of this name.
    pub fn numerics(&self, arg: &str) -> Numerics {
        self.spec().numerics(arg)
    }

    /// The arguments that a matrix product multiplies, which tensor cores round in tf32; empty without a product.
    pub fn operands(&self) -> &'static [&'static str] {
        self.spec().operands()
    }

    /// The flat parameters and master weights of an op of the update, if there are master weights.
    pub fn masters(&self) -> Option<[Slot; 2]> {
        match *self {
            Self::AdamW(AdamW { params, master, .. })
            | Self::MuonUpdate(MuonUpdate { params, master, .. }) => Some([params, master?]),
            _ => None,
        }
    }

    /// `[a, b, a + b]` of an op that stores a sum and then computes with what it stored.
    pub fn stored_sum(&self) -> Option<[Slot; 3]> {
        match *self {
            Self::ResidualLayerNormFwd(ResidualLayerNormFwd { residual, a, b, .. })
            | Self::ResidualRmsNormFwd(ResidualRmsNormFwd { residual, a, b, .. }) => Some([a, b, residual]),
            _ => None,
        }
    }

    /// The elements of the flat pools that an op of the update changes, in the order of the parameter table; empty for
    /// any other op.
    pub fn updates(&self, params: &[Param]) -> Vec<Range<usize>> {
        let (slot, first) = match *self {
            Self::AdamW(AdamW { params: slot, first, .. }) => {
                let adamw = params.iter().filter(|param| matches!(param.update, Update::AdamW { .. }));
                let end = first + slot.numel();
                let part = |range: Range<usize>| range.start.max(first)..range.end.min(end);
                return adamw.map(Param::elements).map(part).filter(|part| !part.is_empty()).collect();
            }
            Self::MuonMomentum(MuonMomentum { out, first, .. }) => (out, first),
            Self::MuonUpdate(MuonUpdate { inp, first, .. }) => (inp, first),
            _ => return Vec::new(),
        };
        let &[count, rows, cols] = slot.shape.dims() else { return Vec::new() };
        let matrices = muon_matrices(params, [rows, cols]).skip(first).take(count);
        matrices.map(|matrix| matrix.first..matrix.first + rows * cols).collect()
    }

    /// What the scalar `position` must stay below; `None` if the op does not read it or has no limit.
    pub fn positions(&self) -> Option<usize> {
        self.spec().positions()
    }

    /// Floating-point operations (a multiply-add counts as two).
    pub fn flops(&self) -> u64 {
        self.spec().flops()
    }

    /// The minimum number of bytes it must move: each slot read once and written once.
    pub fn bytes(&self) -> u64 {
        self.spec().bytes().unwrap_or_else(|| self.args().iter().map(Arg::traffic).sum())
    }
}
