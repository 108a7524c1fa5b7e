//! The pools of a plan on the device, and scratch memory that ops share.

use crate::device::{Buffer, Device, Pinned, Stream};
use crate::{Error, Result};
use ironhorse_core::{HostMemory, Layout, Pool, Slot};
use std::ops::Range;

/// Memory for snapshots, which another thread writes to disk.
impl HostMemory for Pinned {
    fn bytes(&self) -> &[u8] {
        self.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }

    fn is_pinned(&self) -> bool {
        true
    }
}

/// All pools of an engine.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pools: [Option<Buffer>; Pool::ALL.len()],
}

impl Memory {
    /// Whether a pool is smaller than the layout asks.
    pub fn must_grow(&self, layout: &Layout) -> bool {
        Pool::ALL.iter().any(|&pool| layout.bytes(pool) > self.bytes(pool))
    }

    /// Makes each pool at least as large as the layout asks: new memory is zero, what was there stays. Addresses change,
    /// also if it fails halfway.
    pub fn grow(&mut self, device: &'static Device, stream: &Stream, layout: &Layout) -> Result<()> {
        let sizes = Pool::ALL.map(|pool| (self.bytes(pool), layout.bytes(pool)));
        let needs = most_at_once(&sizes);
        if needs > device.memory()?.0 {
            return Err(device.out_of_memory(needs));
        }
        for pool in Pool::ALL {
            let (has, needs) = sizes[pool.index()];
            if needs <= has {
                continue;
            }
            let buffer = Buffer::new(device, needs)?;
            stream.zero(buffer.address(), needs)?;
            if let Some(old) = &self.pools[pool.index()] {
                stream.copy(buffer.address(), old.address(), has)?;
            }
            stream.synchronize()?;
            self.pools[pool.index()] = Some(buffer);
        }
        Ok(())
    }

    /// Bytes of one pool.
    pub fn bytes(&self, pool: Pool) -> usize {
        self.pools[pool.index()].as_ref().map_or(0, Buffer::bytes)
    }

    /// Bytes of all pools.
    pub fn allocated(&self) -> usize {
        Pool::ALL.iter().map(|&pool| self.bytes(pool)).sum()
    }

    /// The address of a slot.
    pub fn address(&self, slot: Slot) -> Result<u64> {
        let has = self.bytes(slot.pool);
        if slot.end() > has {
            return Err(Error::Unsupported(format!(
                "slot {slot:?} is outside its pool of {has} bytes; reserve the program first"
            )));
        }
        let start = self.pools[slot.pool.index()].as_ref().map_or(0, Buffer::address);
        Ok(start + slot.offset as u64)
    }
}

/// Bytes that must be free to grow pools (from, to) one after the other: each has its old and its new memory for a while.
fn most_at_once(sizes: &[(usize, usize)]) -> usize {
    let (mut taken, mut most) = (0, 0);
    for &(has, needs) in sizes.iter().filter(|(has, needs)| needs > has) {
        most = most.max(taken + needs);
        taken += needs - has;
    }
    most
}

/// Memory for the duration of one op, shared by all ops: they run one after the other.
#[derive(Debug, Default)]
pub(crate) struct OpScratch {
    /// The buffers, each larger than the one before. The last one is in use; earlier launches may still point at the smaller ones.
    buffers: Vec<Buffer>,
}

impl OpScratch {
    /// An address with at least this many bytes.
    pub fn at_least(&mut self, device: &'static Device, bytes: usize) -> Result<u64> {
        if let Some(last) = self.buffers.last().filter(|last| last.bytes() >= bytes) {
            return Ok(last.address());
        }
        let buffer = Buffer::new(device, bytes.next_multiple_of(1 << 20))?;
        let address = buffer.address();
        self.buffers.push(buffer);
        Ok(address)
    }

    /// Frees all but the largest; no launch points at the others any more.
    pub fn keep_largest(&mut self) {
        self.buffers.drain(..self.buffers.len().saturating_sub(1));
    }

    /// Bytes held.
    pub fn allocated(&self) -> usize {
        self.buffers.iter().map(Buffer::bytes).sum()
    }
}

/// The most bytes of a counter, and how far apart they are.
pub(crate) const COUNTER_BYTES: usize = 256;

/// The counters with which products of a library count the tiles that are done. The library fills each with zero before its product; in
/// a recorded range all are filled at once, at its beginning (`Stream::capture`), so each product has its own.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    buffer: Option<Buffer>,
    used: usize,
}

impl Counters {
    const BYTES: usize = 1 << 18;

    /// A new counter; `None` if it needs more than [`COUNTER_BYTES`], or if there is no room.
    pub fn take(&mut self, device: &'static Device, bytes: usize) -> Result<Option<u64>> {
        if !(1..=COUNTER_BYTES).contains(&bytes) || self.used + COUNTER_BYTES > Self::BYTES {
            return Ok(None);
        }
        let buffer = match &mut self.buffer {
            Some(buffer) => buffer,
            none => none.insert(Buffer::new(device, Self::BYTES)?),
        };
        let at = buffer.address() + self.used as u64;
        self.used += COUNTER_BYTES;
        Ok(Some(at))
    }

    /// Bytes held.
    pub fn allocated(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::bytes)
    }

    /// The addresses of the counters that are taken.
    pub fn range(&self) -> Range<u64> {
        let start = self.buffer.as_ref().map_or(0, Buffer::address);
        start..start + self.used as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_needs_the_old_and_the_new_memory() {
        assert_eq!(most_at_once(&[(0, 5), (0, 7)]), 12);
        assert_eq!(most_at_once(&[(4, 5), (0, 7)]), 8, "5, of which 4 come back, then 7");
        assert_eq!(most_at_once(&[(6, 8), (9, 9), (9, 3)]), 8);
        assert_eq!(most_at_once(&[]), 0);
    }
}
