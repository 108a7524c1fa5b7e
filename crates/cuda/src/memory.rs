//! The pools of a plan on the device, and scratch memory that ops share.

use crate::device::Device;
use crate::ffi::driver::{Buffer, Stream};
use crate::{Error, Result};
use ironhorse_core::{Layout, Pool, Slot};
use std::rc::Rc;

/// All pools of an engine.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pools: [Option<Buffer>; Pool::ALL.len()],
}

impl Memory {
    /// Makes each pool at least as large as the layout asks: new memory is zero, what was there stays. Returns whether
    /// any address changed.
    pub fn reserve(&mut self, device: &Rc<Device>, stream: &Stream, layout: &Layout) -> Result<bool> {
        let more: usize =
            Pool::ALL.iter().map(|&pool| layout.bytes(pool).saturating_sub(self.bytes(pool))).sum();
        let (free, total) = device.memory()?;
        if more > free {
            return Err(Error::OutOfMemory(format!(
                "this run needs {} on {}, which has {} free of {}",
                human(layout.total()),
                device.info.name,
                human(free),
                human(total)
            )));
        }
        let mut moved = false;
        for pool in Pool::ALL {
            let (has, needs) = (self.bytes(pool), layout.bytes(pool));
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
            moved = true;
        }
        Ok(moved)
    }

    /// Bytes of one pool.
    pub fn bytes(&self, pool: Pool) -> usize {
        self.pools[pool.index()].as_ref().map_or(0, Buffer::bytes)
    }

    /// Bytes of all pools.
    pub fn allocated(&self) -> usize {
        Pool::ALL.iter().map(|&pool| self.bytes(pool)).sum()
    }

    /// Where a slot is.
    pub fn address(&self, slot: Slot) -> Result<u64> {
        let has = self.bytes(slot.pool);
        if slot.end() > has {
            return Err(Error::Unsupported(format!(
                "slot {slot:?} lies outside its pool of {has} bytes; reserve the program first"
            )));
        }
        let start = self.pools[slot.pool.index()].as_ref().map_or(0, Buffer::address);
        Ok(start + slot.offset as u64)
    }
}

/// Memory for the duration of one op, shared by all ops: they run one after the other.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// The last is the one in use; earlier launches may still point at the smaller ones before it.
    buffers: Vec<Buffer>,
}

impl Scratch {
    /// An address with at least this many bytes.
    pub fn at_least(&mut self, device: &Rc<Device>, bytes: usize) -> Result<u64> {
        if let Some(last) = self.buffers.last().filter(|last| last.bytes() >= bytes) {
            return Ok(last.address());
        }
        let buffer = Buffer::new(device, bytes.next_multiple_of(1 << 20))?;
        let address = buffer.address();
        self.buffers.push(buffer);
        Ok(address)
    }

    /// Bytes held.
    pub fn allocated(&self) -> usize {
        self.buffers.iter().map(Buffer::bytes).sum()
    }
}

/// Bytes for people.
pub(crate) fn human(bytes: usize) -> String {
    let gib = bytes as f64 / (1_u64 << 30) as f64;
    if gib >= 0.1 { format!("{gib:.1} GiB") } else { format!("{:.1} MiB", gib * 1024.0) }
}
