//! Weights that do not change any more, kept in the order in which products read them.

use crate::gemm::{Workspace, pack_panels, unpack_panels};
use crate::isa::Isa;
use crate::memory::Memory;
use crate::team::{TaskPanic, Team};
use ironhorse_core::op::{Arg, EmbeddingFwd, LinearFwd, Op};
use ironhorse_core::{DType, Pool, Program, Slot};

/// Which weights are in panels ([`pack_panels`]), in the order of their places.
#[derive(Default)]
pub struct Settled {
    slots: Vec<Slot>,
    /// The programs that may read them so.
    programs: Vec<u64>,
}

/// What packing needs.
pub struct Packer<'a> {
    pub memory: &'a Memory,
    pub team: &'a Team,
    pub workspace: &'a mut Workspace,
    pub isa: Isa,
}

impl Settled {
    /// Whether the program can run as weights are now.
    pub fn knows(&self, program: &Program) -> bool {
        self.slots.is_empty() || self.programs.contains(&program.id())
    }

    /// Whether exactly this weight is in panels.
    pub fn has(&self, slot: Slot) -> bool {
        self.meeting(slot) == Some(slot)
    }

    /// A weight in panels that shares memory with the slot.
    pub fn meeting(&self, slot: Slot) -> Option<Slot> {
        let place = |slot: &Slot| (slot.pool.index(), slot.end());
        let after = self.slots.partition_point(|one| place(one) <= (slot.pool.index(), slot.offset));
        self.slots.get(after).filter(|one| one.overlaps(&slot)).copied()
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
                let reads = reads_panels(&op, &arg);
                found.retain(|slot| !slot.overlaps(&arg.slot) || reads && *slot == arg.slot);
            }
        }
        for slot in found {
            packer.run(slot, true)?;
            self.slots.push(slot);
        }
        self.programs = programs.iter().map(|program| program.id()).collect();
        Ok(())
    }

    /// Puts weights that share memory with the slot back in the order of their elements.
    pub fn undo(&mut self, packer: &mut Packer<'_>, slot: Slot) -> ironhorse_core::Result<()> {
        while let Some(one) = self.meeting(slot) {
            packer.run(one, false)?;
            self.slots.retain(|slot| *slot != one);
        }
        Ok(())
    }

    /// The same for all.
    pub fn undo_all(&mut self, packer: &mut Packer<'_>) -> ironhorse_core::Result<()> {
        while let Some(slot) = self.slots.last().copied() {
            self.undo(packer, slot)?;
        }
        Ok(())
    }
}

impl Packer<'_> {
    fn run(&mut self, slot: Slot, packs: bool) -> ironhorse_core::Result<()> {
        let weight = self.memory.f32(slot)?.ptr();
        let (size, Self { team, isa, .. }) = ([slot.shape.rows(), slot.shape.cols()], &*self);
        // SAFETY: the engine is held alone, so nobody uses the slot meanwhile; it has rows × columns floats.
        let done: Result<(), TaskPanic> = unsafe {
            let run = if packs { pack_panels } else { unpack_panels };
            run(team, self.workspace, *isa, (weight, size))
        };
        done.map_err(crate::op::engine_error)
    }
}

/// The weight of a linear layer, where it is one that can be packed.
fn weight(op: &Op) -> Option<Slot> {
    let Op::LinearFwd(LinearFwd { weight, .. }) = *op else { return None };
    let kept = matches!(weight.pool, Pool::Params | Pool::Frozen) && weight.dtype == DType::F32;
    (kept && weight.numel() > 0).then_some(weight)
}

/// Whether the op can read this argument in panels.
fn reads_panels(op: &Op, arg: &Arg) -> bool {
    match *op {
        Op::LinearFwd(LinearFwd { weight, .. }) => arg.name == "weight" && arg.slot == weight,
        Op::EmbeddingFwd(EmbeddingFwd { wte, .. }) => arg.name == "wte" && arg.slot == wte,
        _ => false,
    }
}
