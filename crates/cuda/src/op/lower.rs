//! Lowering: turning ops into launches. Everything a launcher in `op/*.rs` may use is here.

use super::Libraries;
use crate::args::{Args, Grid};
use crate::device::{Buffer, Device, Function, Stream};
use crate::gemm::{Step, workspace_limit};
use crate::kernels::{Kernel, Spec};
use crate::launch::{KernelLaunch, Launch, LibraryCall, Work};
use crate::memory::{Counters, Memory, OpScratch};
use crate::squares::{Squares, Sums, covers, norm_follows};
use crate::{Result, Settings};
use ironhorse_core::op::{Accum, Op};
use ironhorse_core::{Program, Slot};
use std::ops::Range;
use std::rc::Rc;

/// What launchers work with while a program is lowered.
pub(crate) struct Lower<'a> {
    pub device: &'static Device,
    pub settings: &'a Settings,
    pub program: &'a Program,
    pub memory: &'a Memory,
    pub libraries: &'a mut Libraries,
    pub scratch: &'a mut OpScratch,
    pub counters: &'a mut Counters,
    /// Constant data uploaded for this lowering; lives as long as its launches.
    pub constants: &'a mut Vec<Buffer>,
    /// Address of the scalar block (`struct Scalars` of common/prelude.cuh).
    pub scalars: u64,
    /// Address of the fault block (`struct Fault` of common/prelude.cuh).
    pub fault: u64,
    /// The stream launches go to; a search for the fastest algorithm may run there now.
    pub stream: &'a Stream,
    /// Sums of columns that an op before this one left in scratch memory.
    pub partials: &'a mut Option<Partials>,
    /// The sums of squares of gradients.
    pub squares: &'a mut Squares,
    /// The gradients whose sums of squares are there when this op begins.
    pub summed: &'a mut Vec<Slot>,
    /// The micro-step this lowering is for: in later ones gradients are added to.
    pub micro_step: u32,
    /// Index of the op being lowered.
    pub op: usize,
    /// The ops that are lowered together, by their places in the program.
    pub range: &'a Range<usize>,
    pub out: &'a mut Vec<Launch>,
}

/// The constant with which kernels also sum what they write over rows.
pub(super) const RESULT_SUMS: &str = "RESULT_SUMS";

/// Partial sums of the columns of what an op wrote, in scratch memory: there until another op uses that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partials {
    /// The op, by its place in the program.
    pub op: usize,
    /// What it wrote.
    pub of: Slot,
    /// The address of the sums, and how many rows of them there are.
    pub at: u64,
    pub rows: usize,
}

/// Where one op writes `slot` and one other op alone reads that: the other one than `op`, if both are in `range`. What is in the slot from
/// the one to the other is then no other op's business, nor is it in a program that runs again.
fn passes(program: &Program, range: &Range<usize>, op: usize, slot: Slot) -> Option<usize> {
    let nodes = program.nodes();
    let touches = |at: &usize| nodes[*at].op.args().iter().any(|arg| arg.slot.overlaps(&slot));
    // exactly this slot, and nothing of it is read
    let overwrites = |at: usize| {
        let op = &nodes[at].op;
        op.writes().any(|to| to == slot) && !op.reads().any(|from| from.overlaps(&slot))
    };
    let first = if overwrites(op) { op } else { (0..op).rev().find(touches)? };
    let mut behind = (first + 1..nodes.len()).filter(touches);
    let second = behind.next()?;
    let alone = overwrites(first)
        && nodes[second].op.reads().any(|from| from == slot)
        && !nodes[second].op.writes().any(|to| to.overlaps(&slot))
        && behind.next().or_else(|| (0..first).find(touches)).is_none_or(overwrites);
    let other = if op == first { second } else { first };
    (alone && [first, second].contains(&op) && range.contains(&op) && range.contains(&other)).then_some(other)
}

impl Lower<'_> {
    /// The device address of a slot.
    pub fn ptr(&self, slot: Slot) -> Result<u64> {
        self.memory.address(slot)
    }

    /// Whether slots begin at whole vectors.
    pub fn are_aligned(&self, slots: &[Slot]) -> Result<bool> {
        slots.iter().try_fold(true, |all, &slot| Ok(all && self.ptr(slot)?.is_multiple_of(16)))
    }

    /// The device address of a slot, or null if it is absent.
    pub fn optional(&self, slot: Option<Slot>) -> Result<u64> {
        slot.map_or(Ok(0), |slot| self.ptr(slot))
    }

    /// Whether a gradient is added to in this lowering.
    pub fn adds(&self, accum: Accum) -> bool {
        accum.adds(self.micro_step)
    }

    /// A kernel of `kernels/`, compiled now if this is its first use.
    pub fn kernel(&mut self, spec: &Spec, name: &'static str) -> Result<Function> {
        self.device.function(&spec.clone().kernel(name))
    }

    /// Memory for the duration of one op: the next op may get the same. Not zeroed; aligned to 256 bytes.
    pub fn scratch(&mut self, bytes: usize) -> Result<u64> {
        *self.partials = None; // they were there
        self.scratch.at_least(self.device, bytes)
    }

    /// The workspace of a library's product: a counter of its own if that is all it needs, else memory for the duration of one op, of which
    /// all ask for the same size, so that it does not grow piece by piece.
    pub fn workspace(&mut self, bytes: usize) -> Result<u64> {
        match (bytes, self.counters.take(self.device, bytes)?) {
            (0, _) => Ok(0),
            (_, Some(counter)) => Ok(counter),
            (_, None) => self.scratch(bytes.max(workspace_limit(self.device))),
        }
    }

    /// Partial sums of the columns of a slot, if an op before this one left some and no other op wrote to the slot since.
    pub fn partials_of(&self, slot: Slot) -> Option<Partials> {
        let left = self.partials.filter(|left| left.of == slot && left.op < self.op)?;
        let since = &self.program.nodes()[left.op + 1..self.op];
        let same = since.iter().flat_map(|node| node.op.writes()).all(|to| !to.overlaps(&slot));
        same.then_some(left)
    }

    /// Whether one of the next ops sums `slot` over rows for the gradient of a bias, before another one writes to it.
    pub fn bias_follows(&self, slot: Slot) -> bool {
        let next = self.program.nodes().iter().skip(self.op + 1).take(3).map(|node| &node.op);
        let sums = |op: &Op| matches!(op, Op::LinearBwdWeight(op) if op.d_out == slot && op.d_bias.is_some());
        let mut until = next.take_while(|op| sums(op) || !op.writes().any(|to| to.overlaps(&slot)));
        until.any(sums)
    }

    /// The other one of the two ops between which `slot` passes, see [`passes`].
    pub fn partner(&self, slot: Slot) -> Option<&Op> {
        let at = passes(self.program, self.range, self.op, slot)?;
        Some(&self.program.nodes()[at].op)
    }

    /// The address for `count` sums of squares of a gradient that the op overwrites, if the norm of all gradients is made of them.
    pub fn squares_for(&mut self, slot: Slot, count: usize) -> Result<Option<u64>> {
        if !norm_follows(self.program, self.op, slot) {
            return Ok(None);
        }
        let sums = self.squares.place(self.device, slot, count)?;
        self.summed.push(slot);
        Ok(Some(sums.at))
    }

    /// The parts of these gradients whose sums of squares are there, in the order of memory.
    pub fn summed_of(&self, grads: Slot) -> Vec<(Slot, Sums)> {
        let parts = self.summed.iter().filter(|slot| covers(&grads, slot));
        let mut all: Vec<_> =
            parts.filter_map(|slot| self.squares.of(*slot).map(|sums| (*slot, sums))).collect();
        all.sort_by_key(|(slot, _)| slot.offset);
        all
    }

    /// Constant data on the device.
    pub fn upload(&mut self, bytes: &[u8]) -> Result<u64> {
        let buffer = Buffer::from_host(self.device, bytes)?;
        let address = buffer.address();
        self.constants.push(buffer);
        Ok(address)
    }

    /// The addresses of slots as the first arguments of a kernel.
    pub fn pointers(&self, slots: &[Slot]) -> Result<Args> {
        slots.iter().try_fold(Args::new(), |args, &slot| Ok(args.ptr(self.ptr(slot)?)))
    }

    /// As [`Self::pointers`], with null for absent slots.
    pub fn optional_pointers(&self, slots: &[Option<Slot>]) -> Result<Args> {
        self.append(Args::new(), slots)
    }

    /// As [`Self::optional_pointers`], behind other arguments.
    pub fn append(&self, args: Args, slots: &[Option<Slot>]) -> Result<Args> {
        slots.iter().try_fold(args, |args, &slot| Ok(args.ptr(self.optional(slot)?)))
    }

    /// Adds a launch of a kernel, compiled now if this is its first use.
    pub fn launch(&mut self, spec: &Spec, name: &'static str, grid: Grid, args: Args) -> Result<()> {
        let function = self.kernel(spec, name)?;
        self.launch_function(name, function, grid, args);
        Ok(())
    }

    /// Adds a launch of a kernel whose blocks stay and walk over their work: of the grid's as many as the device holds, in whole clusters.
    pub fn launch_resident(
        &mut self,
        (spec, name): (&Spec, &'static str),
        grid: Grid,
        cluster: usize,
        args: Args,
    ) -> Result<()> {
        let function = self.kernel(spec, name)?;
        let (threads, shared) = (grid.block[0], grid.shared as usize);
        let blocks = function.resident(threads, shared)?.min(grid.grid[0] as usize) / cluster * cluster;
        self.launch_function(name, function, Grid::linear(blocks, threads).shared(shared), args);
        Ok(())
    }

    /// Adds a launch of a kernel that is loaded.
    pub fn launch_function(&mut self, name: &'static str, function: Function, grid: Grid, args: Args) {
        self.push_kernel(name, KernelLaunch { function, grid, args, chained: false });
    }

    /// Adds a launch of a kernel that reads `early` before it waits for the kernel ahead (common/chain.cuh). It starts
    /// before that one has ended if the device can do so and no other op of the program writes to `early`.
    pub fn launch_chained(&mut self, kernel: &Kernel, grid: Grid, args: Args, early: &[Slot]) -> Result<()> {
        let function = self.device.function(kernel)?;
        let follows_kernel = matches!(self.out.last(), Some(Launch { work: Work::Kernel(_), .. }));
        let chained = follows_kernel && self.device.chains && self.are_constant(early);
        if chained {
            function.prefer_shared()?;
        }
        self.push_kernel(kernel.name, KernelLaunch { function, grid, args, chained });
        Ok(())
    }

    /// Whether no op of the program but the one being lowered writes to any of the slots.
    fn are_constant(&self, slots: &[Slot]) -> bool {
        let others = self.program.nodes().iter().enumerate().filter(|(at, _)| *at != self.op);
        others.flat_map(|(_, node)| node.op.writes()).all(|to| !slots.iter().any(|slot| slot.overlaps(&to)))
    }

    fn push_kernel(&mut self, name: &'static str, kernel: KernelLaunch) {
        self.out.push(Launch { op: self.op, first: self.op, name, work: Work::Kernel(kernel) });
    }

    /// Says that the last launch does the work of those that it replaces too.
    pub fn joins(&mut self, replaced: impl IntoIterator<Item = Launch>) {
        let Some(new) = self.out.last_mut() else { return };
        new.first = replaced.into_iter().map(|old| old.first).fold(new.first, usize::min);
    }

    /// The same of all launches from place `from` on.
    pub fn all_join(&mut self, from: usize, replaced: impl IntoIterator<Item = Launch>) {
        let first = replaced.into_iter().map(|old| old.first).fold(self.op, usize::min);
        self.out[from..].iter_mut().for_each(|launch| launch.first = first);
    }

    /// Adds several kernel launches.
    pub fn launch_all(&mut self, steps: impl IntoIterator<Item = Step>) {
        steps
            .into_iter()
            .for_each(|(name, function, grid, args)| self.launch_function(name, function, grid, args));
    }

    /// Adds a call of a library.
    pub fn call(&mut self, name: &'static str, call: Rc<dyn LibraryCall>) {
        self.out.push(Launch { op: self.op, first: self.op, name, work: Work::Call(call) });
    }

    /// Adds a fill with zero.
    pub fn zero(&mut self, at: u64, bytes: usize) {
        self.out.push(Launch { op: self.op, first: self.op, name: "zero", work: Work::Zero { at, bytes } });
    }

    /// Adds a copy within the device.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) {
        self.out.push(Launch {
            op: self.op,
            first: self.op,
            name: "copy",
            work: Work::Copy { to, from, bytes },
        });
    }
}

#[cfg(test)]
mod tests {
    use super::passes;
    use ironhorse_core::op::{Act, ActFwd, LinearBwdInput, LinearFwd, PreAct};
    use ironhorse_core::{Builder, DType, Program, Slot};

    const FORWARD: usize = 0;

    /// Where else the slot is read.
    #[derive(Clone, Copy, Debug, Default)]
    struct Readers {
        before: bool,
        between: bool,
        after: bool,
    }

    /// A forward with GELU and its backward, other `readers`, and the forward once more; and the slot that passes from the one to the other.
    fn program(readers: Readers, forward_again: bool) -> (Program, Slot) {
        let mut b = Builder::new();
        let mut slot = |name: &str, sizes: [usize; 2]| b.io(name, sizes, DType::BF16);
        let [inp, d_out] = ["inp", "d_out"].map(|name| slot(name, [128, 64]));
        let [out, pre, d_pre, other] = ["out", "pre", "d_pre", "other"].map(|name| slot(name, [128, 256]));
        let (weight, next) = (slot("weight", [256, 64]), slot("next", [64, 256]));
        let act = Some(PreAct { act: Act::Gelu, slot: pre });
        let forward = LinearFwd { out, pre: act, inp, weight, bias: None };
        let reader = ActFwd { out: other, inp: pre, act: Act::Gelu };
        if readers.before {
            b.push(reader).unwrap();
        }
        b.push(forward).unwrap();
        if readers.between {
            b.push(reader).unwrap();
        }
        b.push(LinearBwdInput { d_inp: d_pre, d_out, weight: next, pre: act }).unwrap();
        if readers.after {
            b.push(reader).unwrap();
        }
        if forward_again {
            b.push(forward).unwrap();
        }
        (b.finish().unwrap(), pre)
    }

    #[test]
    fn a_slot_passes_from_its_writer_to_its_only_reader() {
        for again in [false, true] {
            let (program, pre) = program(Readers::default(), again);
            let all = 0..program.nodes().len();
            assert_eq!(passes(&program, &all, FORWARD, pre), Some(1));
            assert_eq!(passes(&program, &all, 1, pre), Some(FORWARD));
            // ops that run by themselves pass on what their slots are said to hold
            for part in [0..1, 1..all.end] {
                assert_eq!(passes(&program, &part, part.start, pre), None);
            }
            // the second forward has no reader
            assert_eq!(again.then(|| passes(&program, &all, 2, pre)).flatten(), None);
        }
    }

    #[test]
    fn a_slot_with_another_reader_does_not_pass() {
        // What is read before the forward is what the last run left.
        for bits in 1..8 {
            let readers = Readers { before: bits & 1 > 0, between: bits & 2 > 0, after: bits & 4 > 0 };
            let (program, pre) = program(readers, false);
            let all = 0..program.nodes().len();
            let forward = FORWARD + usize::from(readers.before);
            let backward = forward + 1 + usize::from(readers.between);
            let found = [forward, backward].map(|op| passes(&program, &all, op, pre));
            assert_eq!(found, [None; 2], "{readers:?}");
        }
    }
}
