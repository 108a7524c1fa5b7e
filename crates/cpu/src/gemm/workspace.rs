//! Memory for packed operands that is kept from call to call.

use crate::buffer::Buffer;

/// What [`gemm`](super::gemm) keeps between calls: the packed shared operand, and a block for each worker.
///
/// It grows when a product needs more than any before it, so from the second training step on nothing is allocated.
#[derive(Default)]
pub struct Workspace {
    pub(super) shared: Buffer,
    pub(super) workers: Vec<WorkerScratch>,
    /// How many tasks a group of products has up to each of them, how many of packing, and floats packed before it.
    pub(super) ends: Vec<Ends>,
}

/// Of one product of a group and all before it.
#[derive(Clone, Copy, Default)]
pub(super) struct Ends {
    /// Blocks.
    pub(super) blocks: usize,
    /// Panels of right operands that are packed before the blocks.
    pub(super) panels: usize,
    /// Floats of these panels.
    pub(super) floats: usize,
    /// Tasks of rows that are finished after the blocks.
    pub(super) finishes: usize,
}

/// What one worker needs.
#[derive(Default)]
pub(super) struct WorkerScratch {
    /// Its block of the streamed operand, packed.
    pub(super) block: Buffer,
    /// Addresses to fetch ahead.
    pub(super) fetch: Vec<*const f32>,
    /// For products that it computes alone.
    pub(super) local: LocalScratch,
}

// SAFETY: the addresses are only handed to prefetch instructions, never followed.
unsafe impl Send for WorkerScratch {}
// SAFETY: as above.
unsafe impl Sync for WorkerScratch {}

impl Workspace {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// So many floats of any value, for use between products.
    pub fn floats(&mut self, len: usize) -> *mut f32 {
        self.shared.reserve(len);
        self.shared.as_mut_ptr()
    }

    /// Makes room for a shared operand of `shared` floats, and in each of `threads` workers for a block of so many
    /// floats and so many addresses.
    pub(super) fn reserve(&mut self, shared: usize, threads: usize, (block, fetches): (usize, usize)) {
        self.shared.reserve(shared);
        if self.workers.len() < threads {
            self.workers.resize_with(threads, WorkerScratch::default);
        }
        for worker in &mut self.workers {
            worker.block.reserve(block);
            worker.fetch.clear();
            worker.fetch.reserve(fetches);
        }
    }

    /// Makes room in each of `threads` workers for products it computes alone, which pack this many floats of a and of
    /// b.
    pub(super) fn reserve_local(&mut self, threads: usize, [a, b]: [usize; 2]) {
        if self.workers.len() < threads {
            self.workers.resize_with(threads, WorkerScratch::default);
        }
        for worker in &mut self.workers {
            worker.local.packed_a.reserve(a);
            worker.local.packed.reserve(b);
        }
    }

    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.shared.as_mut_slice().fill(f32::NAN);
        for worker in &mut self.workers {
            for buffer in [&mut worker.block, &mut worker.local.packed, &mut worker.local.packed_a] {
                buffer.as_mut_slice().fill(f32::NAN);
            }
        }
    }
}

/// What [`gemm_local`](super::gemm_local) keeps between calls, one for each worker.
#[derive(Default)]
pub struct LocalScratch {
    /// A panel of b.
    pub(super) packed: Buffer,
    /// Some rows of a.
    pub(super) packed_a: Buffer,
}

impl LocalScratch {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for products with a right operand of at most `k` by `n`, and as many rows of the left.
    pub fn reserve(&mut self, k: usize, n: usize) {
        self.packed.reserve(k * n.next_multiple_of(super::MAX_NR));
        self.packed_a.reserve(k * n.next_multiple_of(super::MAX_NR));
    }
}
