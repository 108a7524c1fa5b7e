//! Sums of squares that kernels leave of the gradients they write: the norm of all gradients is made of them, and reads only the others.
//!
//! An op leaves them where the program says that the norm follows and that no other op changes the gradient before it. What a program does
//! not say is followed here: a range of ops that runs again, another program, or the host may write to a gradient whose sums are held.

use crate::Result;
use crate::device::{Buffer, Device};
use ironhorse_core::op::{GradNorm, Op};
use ironhorse_core::{DType, Node, Pool, Program, Slot};
use std::collections::HashMap;

/// The sums of a gradient, f64 each: their address and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sums {
    pub at: u64,
    pub count: usize,
}

/// The sums of all gradients of an engine that kernels have left. Addresses stay, because launches hold them.
#[derive(Debug, Default)]
pub(crate) struct Squares {
    buffers: Vec<Buffer>,
    /// Bytes of the last buffer that are taken.
    used: usize,
    places: HashMap<Slot, Sums>,
    /// Gradients that are still what their sums were made of, in the order of memory.
    valid: Vec<Slot>,
}

impl Squares {
    /// The least that is allocated at a time.
    const BYTES: usize = 4 << 20;

    /// The place for `count` sums of a gradient, the same each time.
    pub fn place(&mut self, device: &'static Device, slot: Slot, count: usize) -> Result<Sums> {
        if let Some(sums) = self.places.get(&slot).filter(|sums| sums.count == count) {
            return Ok(*sums);
        }
        let bytes = (count * size_of::<f64>()).next_multiple_of(256);
        if self.buffers.last().is_none_or(|last| self.used + bytes > last.bytes()) {
            self.buffers.push(Buffer::new(device, bytes.max(Self::BYTES))?);
            self.used = 0;
        }
        let start = self.buffers.last().map_or(0, Buffer::address);
        let sums = Sums { at: start + self.used as u64, count };
        self.used += bytes;
        self.places.insert(slot, sums);
        Ok(sums)
    }

    /// The sums of a gradient for which there is a place.
    pub fn of(&self, slot: Slot) -> Option<Sums> {
        self.places.get(&slot).copied()
    }

    /// The gradients whose sums the norm among these ops finds; none if there is no norm among them.
    pub fn before<'a>(&self, nodes: impl Iterator<Item = &'a Node> + Clone) -> Vec<Slot> {
        if self.valid.is_empty() || !nodes.clone().any(|node| matches!(node.op, Op::GradNorm(_))) {
            return Vec::new();
        }
        let mut summed = self.valid.clone();
        let written = nodes.flat_map(|node| node.op.writes()).filter(|slot| slot.pool == Pool::Grads);
        written.for_each(|slot| summed.retain(|of| !of.overlaps(&slot)));
        summed
    }

    /// Notes what ops wrote and which sums they left.
    pub fn ran(&mut self, written: &[Slot], left: &[Slot]) {
        self.valid.retain(|slot| !written.iter().any(|to| to.overlaps(slot)));
        let new: Vec<Slot> = left.iter().filter(|slot| !self.valid.contains(slot)).copied().collect();
        if !new.is_empty() {
            self.valid.extend(new);
            self.valid.sort_by_key(|slot| slot.offset);
        }
    }

    /// Notes that something else wrote to a slot.
    pub fn overwritten(&mut self, slot: Slot) {
        self.valid.retain(|held| !held.overlaps(&slot));
    }

    /// Notes that no sum can be used any more.
    pub fn distrust(&mut self) {
        self.valid.clear();
    }

    /// Frees everything; no launch points at it any more.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Bytes held.
    pub fn allocated(&self) -> usize {
        self.buffers.iter().map(Buffer::bytes).sum()
    }
}

/// Whether the norm over all gradients reads this one as the op with number `op` leaves it.
pub(crate) fn norm_follows(program: &Program, op: usize, slot: Slot) -> bool {
    if slot.pool != Pool::Grads || slot.dtype != DType::BF16 {
        return false;
    }
    let reads = |op: &Op| match op {
        Op::GradNorm(GradNorm { grads, slices: None, .. }) => covers(grads, &slot),
        _ => false,
    };
    let mut later = program.nodes().iter().skip(op + 1).map(|node| &node.op);
    later.find(|op| reads(op) || op.writes().any(|to| to.overlaps(&slot))).is_some_and(reads)
}

/// Whether one slot is a part of another, of the same type.
pub(crate) fn covers(all: &Slot, part: &Slot) -> bool {
    all.pool == part.pool && all.dtype == part.dtype && all.offset <= part.offset && part.end() <= all.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::op::{Accum, CopySlot, GroupedLinearBwdWeight};
    use ironhorse_core::{Builder, Precision, Section, Slices};

    fn slot(offset: usize, n: usize) -> Slot {
        Slot { pool: Pool::Grads, offset, shape: ironhorse_core::Shape::new([n]), dtype: DType::BF16 }
    }

    #[test]
    fn sums_hold_until_something_writes_to_their_gradient() {
        let [a, b, c] = [slot(0, 64), slot(128, 64), slot(256, 64)];
        let mut squares = Squares::default();
        squares.ran(&[a, b, c], &[c, a]);
        assert_eq!(squares.valid, [a, c], "in the order of memory");
        squares.ran(&[b], &[]);
        assert_eq!(squares.valid, [a, c], "another gradient");
        squares.ran(&[a], &[a]);
        assert_eq!(squares.valid, [a, c], "written again, and summed again");
        squares.ran(&[a], &[]);
        assert_eq!(squares.valid, [c], "added to");
        squares.overwritten(Slot { pool: Pool::Params, ..c });
        assert_eq!(squares.valid, [c], "another pool");
        squares.overwritten(slot(320, 1));
        assert_eq!(squares.valid, [], "one element of it");
        squares.ran(&[a], &[a]);
        squares.distrust();
        assert_eq!(squares.valid, []);
    }

    /// The gradient of two experts' weights, perhaps something that changes it afterwards, and the norm.
    fn program(changed: bool, slices: Option<Slices>, precision: Precision) -> (Program, Slot) {
        let mut b = Builder::with_precision(precision);
        b.param("w", [2, 64, 64], true);
        let grads = b.flat(Pool::Grads);
        let d_weight = Slot { shape: [2, 64, 64].into(), ..grads };
        let [d_out, inp] = ["d_out", "inp"].map(|name| b.io(name, [8, 64], DType::BF16));
        let offsets = b.io("offsets", [3], DType::I32);
        let [norm, halt, loss] = ["norm", "halt", "loss"].map(|name| b.io(name, [1], DType::F32));
        let other = b.io("other", [64], grads.dtype);
        b.section(Section::Backward);
        b.push(GroupedLinearBwdWeight { d_weight, d_out, inp, offsets, accum: Accum::FirstWrites }).unwrap();
        if changed {
            b.section(Section::Sum);
            let part = Slot { shape: [64].into(), ..grads };
            b.push(CopySlot { out: part, inp: other }).unwrap();
        }
        b.section(Section::Update);
        b.push(GradNorm { norm, halt, grads, loss, slices }).unwrap();
        (b.finish().unwrap(), d_weight)
    }

    #[test]
    fn the_norm_finds_sums_of_gradients_that_its_range_does_not_write() {
        let (program, slot) = program(false, None, Precision::BF16);
        let mut squares = Squares::default();
        let before =
            |squares: &Squares, ops: std::ops::Range<usize>| squares.before(program.nodes()[ops].iter());
        assert_eq!(before(&squares, 1..2), []);
        squares.ran(&[slot], &[slot]);
        assert_eq!(before(&squares, 1..2), [slot]);
        assert_eq!(before(&squares, 0..2), [], "the range leaves its own");
        assert_eq!(before(&squares, 0..1), [], "no norm");
    }

    #[test]
    fn sums_are_left_where_the_norm_reads_what_the_op_wrote() {
        let follows = |(program, slot): (Program, Slot)| norm_follows(&program, 0, slot);
        assert!(follows(program(false, None, Precision::BF16)));
        assert!(!follows(program(true, None, Precision::BF16)), "changed in between");
        assert!(!follows(program(false, None, Precision::BF16_F32_GRADS)), "f32 is read");
        let (all, slot) = program(false, None, Precision::BF16);
        assert!(!norm_follows(&all, 1, slot), "no norm behind it");
        assert!(!norm_follows(&all, 0, Slot { pool: Pool::Io, ..slot }));
        assert!(
            !norm_follows(&all, 0, Slot { shape: [3, 64, 64].into(), ..slot }),
            "more than the norm reads"
        );
    }
}
