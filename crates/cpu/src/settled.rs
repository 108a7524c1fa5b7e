//! Weights that do not change any more, kept in the order in which products read them.

use crate::gemm::{Arrangement, Kept, Workspace};
use crate::isa::Isa;
use crate::memory::Memory;
use crate::team::Team;
use ironhorse_core::op::{Arg, EmbeddingFwd, LinearFwd, Op};
use ironhorse_core::{DType, Operands, Pool, Program, Slot};

/// Which weights are packed, and how, in the order of their places.
#[derive(Default)]
pub struct Settled {
    weights: Vec<(Slot, Kept)>,
    /// The programs that may read them so.
    programs: Vec<u64>,
}

/// What packing needs.
pub struct Packer<'a> {
    pub memory: &'a Memory,
    pub team: &'a Team,
    pub workspace: &'a mut Workspace,
    pub isa: Isa,
    pub operands: Operands,
}

impl Settled {
    /// Whether the program can run as weights are now.
    pub fn knows(&self, program: &Program) -> bool {
        self.weights.is_empty() || self.programs.contains(&program.id())
    }

    /// How exactly this weight is kept, where it is packed.
    pub fn kept(&self, slot: Slot) -> Option<Kept> {
        self.meeting(slot).and_then(|(weight, kept)| (weight == slot).then_some(kept))
    }

    /// A packed weight that shares memory with the slot.
    pub fn meeting(&self, slot: Slot) -> Option<(Slot, Kept)> {
        let place = |slot: &Slot| (slot.pool.index(), slot.end());
        let after = self.weights.partition_point(|(one, _)| place(one) <= (slot.pool.index(), slot.offset));
        self.weights.get(after).filter(|(one, _)| one.overlaps(&slot)).copied()
    }

    /// Packs the weights of linear layers that these programs use for nothing else, but to look up tokens.
    pub fn set(&mut self, packer: &mut Packer<'_>, programs: &[&Program]) -> ironhorse_core::Result<()> {
        self.undo_all(packer)?;
        let ops = || programs.iter().flat_map(|program| program.nodes()).map(|node| node.op);
        let mut found: Vec<Slot> = ops().filter_map(|op| weight(&op)).collect();
        found.sort_by_key(|slot| (slot.pool.index(), slot.offset, slot.bytes()));
        found.dedup();
        for op in ops() {
            for arg in op.args() {
                let reads = reads_packed(&op, &arg);
                found.retain(|slot| !slot.overlaps(&arg.slot) || reads && *slot == arg.slot);
            }
        }
        for slot in found {
            let kept = Kept::of(packer.isa, packer.operands, [slot.shape.rows(), slot.shape.cols()]);
            packer.bring((slot, kept), Arrangement::Packed)?;
            self.weights.push((slot, kept));
        }
        self.programs = programs.iter().map(|program| program.id()).collect();
        Ok(())
    }

    /// Puts weights that share memory with the slot back in the order of their elements.
    pub fn undo(&mut self, packer: &mut Packer<'_>, slot: Slot) -> ironhorse_core::Result<()> {
        while let Some(one) = self.meeting(slot) {
            packer.bring(one, Arrangement::Rows)?;
            self.weights.retain(|weight| *weight != one);
        }
        Ok(())
    }

    /// Puts all weights back in the order of their elements.
    pub fn undo_all(&mut self, packer: &mut Packer<'_>) -> ironhorse_core::Result<()> {
        while let Some((slot, _)) = self.weights.last().copied() {
            self.undo(packer, slot)?;
        }
        Ok(())
    }
}

impl Packer<'_> {
    fn bring(&mut self, (slot, kept): (Slot, Kept), to: Arrangement) -> ironhorse_core::Result<()> {
        let weight = (self.memory.f32(slot)?.ptr(), [slot.shape.rows(), slot.shape.cols()]);
        // SAFETY: the engine is held alone, so nobody uses the slot meanwhile; it has rows × columns floats.
        unsafe { kept.bring(to, self.team, self.workspace, self.isa, weight) }
            .map_err(crate::op::engine_error)
    }
}

/// The weight of a linear layer, where it is one that can be packed.
fn weight(op: &Op) -> Option<Slot> {
    let Op::LinearFwd(LinearFwd { weight, .. }) = *op else { return None };
    let kept = matches!(weight.pool, Pool::Params | Pool::Frozen) && weight.dtype == DType::F32;
    (kept && weight.numel() > 0).then_some(weight)
}

/// Whether the op can read this argument where it is packed.
fn reads_packed(op: &Op, arg: &Arg) -> bool {
    match *op {
        Op::LinearFwd(LinearFwd { weight, .. }) => arg.name == "weight" && arg.slot == weight,
        Op::EmbeddingFwd(EmbeddingFwd { wte, .. }) => arg.name == "wte" && arg.slot == wte,
        _ => false,
    }
}
