//! How one product is cut into slices, panels and tasks, and the tasks.

use super::kernel::{Ahead, FETCH, Kernels, LINE, Pack, Packing, Tile, rows_apart};
use super::workspace::{WorkerScratch, Workspace};
use super::{Beta, Gemm, narrow};
use crate::team::{TaskPanic, Team};
use std::ops::Range;

/// Longest slice of k: a panel of b (48 columns) and one of a stream through the first-level cache.
pub(super) const KC: usize = 384;
/// The same on the tile unit: a panel is half as large, and the unit so fast that reading and writing c between slices would take as long
/// as the products.
pub(super) const TILED_KC: usize = 1024;
/// A slice there has a multiple of so many steps.
pub(super) const TILED_STEPS: usize = 32;
/// Bytes of the shared operand packed at a time, so that it stays in the second-level cache; a longer k takes several
/// phases.
const SHARED_BYTES: usize = 1 << 20;
/// Bytes of the shared operand that a task multiplies with its whole block before it goes on to the next.
const CHUNK_BYTES: usize = 1 << 20;
/// Floats of a result from which on it is written past the caches: a line that is overwritten there need not come from memory first.
const PAST_CACHES: usize = 1 << 19;
/// Panels of the streamed operand in a task, at most: if it is b and its columns are contiguous, if it is b and they are
/// not, and if it is a. Wide blocks read longer pieces of rows, narrow ones leave room in the cache for the next.
const MAX_BLOCK: [usize; 3] = [2, 4, 8];

/// Length of a slice of k where the matrices are not narrow; the last slice may be shorter. It decides the order of summation, so it
/// depends on k only.
pub(super) fn slice_len(k: usize) -> usize {
    k.div_ceil(k.div_ceil(KC).max(1)).next_multiple_of(8)
}

/// The same on the tile unit.
fn tiled_slice_len(k: usize) -> usize {
    k.div_ceil(k.div_ceil(TILED_KC).max(1)).next_multiple_of(TILED_STEPS)
}

/// That of a product, by its sizes and strides.
pub(super) fn slice_of(g: &Gemm<'_>) -> usize {
    if narrow::fits(g) { narrow::SLICE } else { slice_len(g.k) }
}

/// Makes room for any product of at most this size, whatever its sizes turn out to be.
pub(super) fn reserve_most(ws: &mut Workspace, kernels: &Kernels, threads: usize, [m, n, k]: [usize; 3]) {
    let longest = if kernels.enter.is_some() { TILED_KC } else { KC };
    let kc = kernels.room(k.next_multiple_of(TILED_STEPS).min(longest));
    // The lesser side is shared: whole panels of it, one slice at least.
    let shared = (m.min(n) + super::MAX_NR) * kc;
    let vectors = (MAX_BLOCK[1] * kernels.nr).max(MAX_BLOCK[2] * kernels.mr);
    let addresses =
        (vectors * kc.div_ceil(FETCH)).max(kc * vectors.div_ceil(FETCH)) + 2 * kernels.fetches(kc).max(1);
    ws.reserve(shared.max(SHARED_BYTES / size_of::<f32>()), threads, (vectors * kc, addresses));
}

/// An address that tasks may share. The rules for its use are stated where it is created.
#[derive(Clone, Copy)]
pub(super) struct SharedPtr<T>(pub(super) T);

// SAFETY: only a wrapper; every use of the address has its own argument.
unsafe impl<T> Sync for SharedPtr<T> {}

/// One operand seen as vectors of length k, in panels of `width` of them.
#[derive(Clone, Copy)]
struct Side {
    ptr: *const f32,
    /// From one vector to the next, and along one.
    s_w: usize,
    s_k: usize,
    count: usize,
    width: usize,
    pack: Pack,
}

// SAFETY: an operand is only read during a product.
unsafe impl Sync for Side {}

impl Side {
    fn panels(&self) -> usize {
        self.count.div_ceil(self.width)
    }

    /// Vectors of a range of panels.
    fn vectors(&self, panels: &Range<usize>) -> Range<usize> {
        self.count.min(panels.start * self.width)..self.count.min(panels.end * self.width)
    }

    /// Addresses that cover what [`Side::pack`] will read, into `list`. Strides without contiguous elements are
    /// left alone.
    fn fetch(&self, panels: &Range<usize>, steps: &Range<usize>, list: &mut Vec<*const f32>) {
        let vectors = self.vectors(panels);
        let at = self.ptr.wrapping_add(vectors.start * self.s_w + steps.start * self.s_k);
        let (rows, stride, len) = match (self.s_w, self.s_k) {
            (_, 1) => (vectors.len(), self.s_w, steps.len()),
            (1, _) => (steps.len(), self.s_k, vectors.len()),
            _ => (0, 0, 0),
        };
        for row in 0..rows {
            list.extend((0..len).step_by(FETCH).map(|column| at.wrapping_add(row * stride + column)));
        }
    }

    /// Most addresses [`Side::fetch`] gives for that many panels and steps.
    fn fetches(&self, panels: usize, steps: usize) -> usize {
        let vectors = panels * self.width;
        (vectors * steps.div_ceil(FETCH)).max(steps * vectors.div_ceil(FETCH))
    }

    /// Packs steps `steps` of `panels` to `dst`.
    ///
    /// # Safety
    /// The operand is readable; `dst` is good for `panels.len() * width * steps.len()` floats.
    unsafe fn pack(&self, panels: &Range<usize>, steps: &Range<usize>, dst: *mut f32) {
        let vectors = self.vectors(panels);
        // SAFETY: the vectors and steps are inside the operand; the rest is guaranteed by the caller.
        unsafe {
            let src = self.ptr.add(vectors.start * self.s_w + steps.start * self.s_k);
            let (count, k) = (vectors.len(), steps.len());
            (self.pack)(&Packing { src, s_w: self.s_w, s_k: self.s_k, count, k, dst });
        }
    }
}

pub(super) struct Plan<'a> {
    g: &'a Gemm<'a>,
    kernels: &'static Kernels,
    /// Packed before the tasks, and by them.
    shared: Side,
    streamed: Side,
    /// Whether the streamed operand is b.
    stream_b: bool,
    kc: usize,
    /// Slices of k between two barriers.
    phase: usize,
    /// Panels of the streamed operand, and of the shared one, in a task.
    block: usize,
    part: usize,
    threads: usize,
    /// Whether c is written once, and read so much later that no cache has it.
    past_caches: bool,
}

impl<'a> Plan<'a> {
    pub(super) fn new(g: &'a Gemm<'a>, kernels: &'static Kernels, threads: usize) -> Self {
        let a = Side {
            ptr: g.a.ptr,
            s_w: g.a.rs,
            s_k: g.a.cs,
            count: g.m,
            width: kernels.mr,
            pack: kernels.pack_a,
        };
        let b = Side {
            ptr: g.b.ptr,
            s_w: g.b.cs,
            s_k: g.b.rs,
            count: g.n,
            width: kernels.nr,
            pack: kernels.pack_b,
        };
        let stream_b = g.n >= g.m;
        let (shared, streamed) = if stream_b { (a, b) } else { (b, a) };
        let kc = if kernels.enter.is_some() { tiled_slice_len(g.k) } else { slice_of(g) };
        let slice_bytes = shared.panels() * shared.width * kernels.room(kc) * size_of::<f32>();
        let phase = (SHARED_BYTES / slice_bytes).max(1);
        // About four tasks a thread even out what the threads do besides.
        let (panels, others) = (streamed.panels(), shared.panels());
        let most = MAX_BLOCK[if !stream_b { 2 } else { usize::from(streamed.s_k != 1) }];
        let block = (panels / (4 * threads)).clamp(1, most);
        let parts = (2 * threads).div_ceil(panels.div_ceil(block)).min(others);
        let part = others.div_ceil(if threads == 1 { 1 } else { parts });
        // Gradients of weights: nothing reads them before all others are computed, too.
        let sums_rows = g.a.rs == 1 && g.b.cs == 1;
        let whole_lines = g.c.ptr.addr().is_multiple_of(64) && g.c.rs.is_multiple_of(LINE);
        let is_large = g.m.saturating_mul(g.n) >= PAST_CACHES;
        let past_caches = sums_rows && whole_lines && is_large && g.beta == Beta::Overwrite && g.k <= kc;
        Self { g, kernels, shared, streamed, stream_b, kc, phase, block, part, threads, past_caches }
    }

    /// # Safety
    /// As [`gemm`](super::gemm); m, n and k are not zero.
    pub(super) unsafe fn run(&self, team: &Team, ws: &mut Workspace) -> Result<(), TaskPanic> {
        let slices = self.slices();
        ws.reserve(self.phase.min(slices) * self.shared_slice(), self.threads, self.scratch());
        // Each address is used by one worker at a time (its number), the shared one is written to in disjoint parts.
        let packed = SharedPtr(ws.shared.as_mut_ptr());
        let workers = SharedPtr(ws.workers.as_mut_ptr());
        let mut first = 0;
        while first < slices {
            let phase = first..slices.min(first + self.phase);
            // SAFETY: `packed` holds `phase` slices; the tasks write disjoint panels.
            team.run(self.packings(), &|task, _| unsafe { self.pack_shared(task, { packed }.0, &phase) })?;
            team.run(self.tasks(), &|task, worker| {
                // SAFETY: worker < threads buffers were reserved and no other task has this worker number.
                let scratch = unsafe { &mut *{ workers }.0.add(worker) };
                // SAFETY: the phase is packed; tasks have disjoint regions of c.
                unsafe { self.task(task, &phase, { packed }.0, scratch, worker) };
            })?;
            first = phase.end;
        }
        Ok(())
    }

    pub(super) fn slices(&self) -> usize {
        self.g.k.div_ceil(self.kc)
    }

    /// Floats of a slice of the shared operand, packed.
    fn shared_slice(&self) -> usize {
        self.shared.panels() * self.shared.width * self.kernels.room(self.kc)
    }

    /// Floats of all of the shared operand, if it is packed at once.
    pub(super) fn shared_len(&self) -> Option<usize> {
        let slices = self.slices();
        (slices <= self.phase).then(|| slices * self.shared_slice())
    }

    /// Floats of a block of the streamed operand, and addresses to fetch, that a worker needs.
    pub(super) fn scratch(&self) -> (usize, usize) {
        let fetches = self.streamed.fetches(self.block, self.kc) + 2 * self.kernels.fetches(self.kc).max(1);
        (self.block * self.streamed.width * self.kernels.room(self.kc), fetches)
    }

    /// Whether a task computes whole rows of c.
    pub(super) fn has_whole_rows(&self) -> bool {
        !self.stream_b && self.part >= self.shared.panels()
    }

    /// Tasks of a phase.
    pub(super) fn tasks(&self) -> usize {
        self.streamed.panels().div_ceil(self.block) * self.parts()
    }

    fn parts(&self) -> usize {
        self.shared.panels().div_ceil(self.part)
    }

    fn steps(&self, slice: usize) -> Range<usize> {
        slice * self.kc..self.g.k.min((slice + 1) * self.kc)
    }

    /// Where panel `panel` of slice `slice` (counted from the start of the phase) is.
    fn shared_at(&self, slice: usize, panel: usize, steps: usize) -> usize {
        let room = |steps| self.kernels.room(steps);
        (slice * self.shared.panels() * room(self.kc) + panel * room(steps)) * self.shared.width
    }

    /// Panels of the shared operand that one task packs.
    fn packed_together(&self) -> usize {
        self.shared.panels().div_ceil(4 * self.threads)
    }

    /// Tasks of packing the shared operand.
    pub(super) fn packings(&self) -> usize {
        self.shared.panels().div_ceil(self.packed_together())
    }

    /// # Safety
    /// `packed` is good for the slices of `phase`; `task` is below [`Plan::packings`], and no other call has it.
    pub(super) unsafe fn pack_shared(&self, task: usize, packed: *mut f32, phase: &Range<usize>) {
        let (panels, group) = (self.shared.panels(), self.packed_together());
        // Panel by panel over all slices, so that each source row is read contiguously.
        for panel in task * group..panels.min((task + 1) * group) {
            for slice in phase.clone() {
                let steps = self.steps(slice);
                // SAFETY: this panel of this slice is inside `packed` and is no other task's.
                unsafe {
                    let dst = packed.add(self.shared_at(slice - phase.start, panel, steps.len()));
                    self.shared.pack(&(panel..panel + 1), &steps, dst);
                }
            }
        }
    }

    /// # Safety
    /// `packed` holds the phase, `task` is below [`Plan::tasks`] and no other call has it, `scratch` is as [`Plan::scratch`] says.
    ///
    /// Returns the rows of c that it computed, or a part of them.
    pub(super) unsafe fn task(
        &self,
        task: usize,
        phase: &Range<usize>,
        packed: *const f32,
        scratch: &mut WorkerScratch,
        worker: usize,
    ) -> Range<usize> {
        let (block, part) = (task / self.parts(), task % self.parts());
        let cut = |n: usize, size: usize, panels: usize| n * size..panels.min((n + 1) * size);
        let mine = cut(block, self.block, self.streamed.panels());
        let part = cut(part, self.part, self.shared.panels());
        let buffer = scratch.block.as_mut_ptr();
        if let Some(enter) = self.kernels.enter {
            // SAFETY: the kernels are of an `Isa` this machine has.
            unsafe { enter() };
        }
        for slice in phase.clone() {
            let steps = self.steps(slice);
            // SAFETY: the buffer holds `self.block` panels of `self.kc` steps.
            unsafe { self.streamed.pack(&mine, &steps, buffer) };
            scratch.fetch.clear();
            self.fetch_after(task, slice, phase, &mut scratch.fetch);
            // Tiles beyond the end of the list fetch an address that is in the cache anyway.
            let each = self.kernels.fetches(steps.len()).max(1);
            scratch.fetch.resize(scratch.fetch.len().next_multiple_of(each) + each, packed);
            let mut lists = scratch.fetch.chunks_exact(each).map(<[_]>::as_ptr);
            let mut fetch = lists.next().unwrap_or(std::ptr::null());
            let chunk = (CHUNK_BYTES / (self.shared.width * steps.len() * size_of::<f32>())).max(1);
            for start in part.clone().step_by(chunk) {
                let chunk = start..part.end.min(start + chunk);
                for panel in mine.clone() {
                    for other in chunk.clone() {
                        // SAFETY: both panels are packed; the tile is inside the task's region of c.
                        unsafe {
                            let room = self.kernels.room(steps.len());
                            let x = buffer.add((panel - mine.start) * self.streamed.width * room);
                            let y = packed.add(self.shared_at(slice - phase.start, other, steps.len()));
                            self.tile((panel, x), (other, y), steps.clone(), fetch);
                            fetch = lists.next().unwrap_or(fetch);
                        }
                    }
                }
            }
        }
        if let Some(leave) = self.kernels.leave {
            // SAFETY: as above.
            unsafe { leave() };
        }
        let (mine, part) = (self.streamed.vectors(&mine), self.shared.vectors(&part));
        let (rows, columns) = if self.stream_b { (part, mine) } else { (mine, part) };
        if self.steps(phase.end - 1).end == self.g.k {
            self.g.finish(rows.clone(), columns, worker);
        }
        rows
    }

    /// What this worker will pack next: the next slice of its block, or the first of that of its next task.
    fn fetch_after(&self, task: usize, slice: usize, phase: &Range<usize>, list: &mut Vec<*const f32>) {
        let (task, slice) = if slice + 1 < phase.end { (task, slice + 1) } else { (task + 1, phase.start) };
        let block = task / self.parts();
        let panels = self.streamed.panels();
        let start = (block * self.block).min(panels);
        self.streamed.fetch(&(start..panels.min(start + self.block)), &self.steps(slice), list);
    }

    /// One tile: panel number and address of the streamed and of the shared operand.
    ///
    /// # Safety
    /// Both panels hold `steps`; the tile is this task's.
    #[inline(always)]
    unsafe fn tile(
        &self,
        x: (usize, *const f32),
        y: (usize, *const f32),
        steps: Range<usize>,
        fetch: *const *const f32,
    ) {
        let (a, b) = if self.stream_b { (y, x) } else { (x, y) };
        let kernels = self.kernels;
        let (row, column) = (a.0 * kernels.mr, b.0 * kernels.nr);
        let rows = kernels.mr.min(self.g.m - row);
        let columns = kernels.nr.min(self.g.n - column);
        let vectors = columns.div_ceil(kernels.lanes);
        let tile = Tile {
            k: steps.len(),
            a: a.1,
            a_rows: rows_apart(1),
            a_cs: kernels.mr,
            b: b.1,
            b_rs: kernels.nr,
            // SAFETY: row < m and column < n.
            c: unsafe { self.g.c.ptr.add(row * self.g.c.rs + column) },
            c_rs: self.g.c.rs,
            rows,
            columns,
            last: columns - (vectors - 1) * kernels.lanes,
            alpha: self.g.alpha,
            accumulate: self.g.beta == Beta::Accumulate || steps.start > 0,
            fetch,
            ahead: Ahead::NOTHING,
            fetches_c: false,
            past_caches: self.past_caches,
        };
        // SAFETY: the kernel of the size of the tile, of an `Isa` this machine has.
        unsafe { (kernels.packed(rows, vectors))(&tile) };
    }
}
