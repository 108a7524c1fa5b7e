//! Host memory beside an engine: what is copied into slots and out of them.

use crate::{DType, Error, Result, Slot};

/// Host memory that an engine copies its pools into; see [`crate::Engine::snapshot`].
pub trait HostMemory: Send {
    /// Its contents.
    fn bytes(&self) -> &[u8];

    /// Its contents, to change.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Whether it is page-locked, so that the device writes to it directly at the full speed of its bus.
    fn is_pinned(&self) -> bool {
        false
    }
}

impl HostMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Makes host memory of this many bytes; see [`crate::Engine::host_memory`].
pub type MakeHostMemory = Box<dyn FnOnce(usize) -> Result<Box<dyn HostMemory>> + Send>;

/// Ordinary host memory of this many zero bytes.
pub fn host_vec(bytes: usize) -> Result<Box<dyn HostMemory>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).map_err(|_| no_host_memory(bytes))?;
    memory.resize(bytes, 0_u8);
    Ok(Box::new(memory))
}

/// The error of asking for more host memory than there is.
pub fn no_host_memory(bytes: usize) -> Error {
    Error::Input(format!("{} MiB of host memory cannot be allocated", bytes.div_ceil(1 << 20)))
}

/// Host elements to copy into a slot; see [`crate::Engine::write`].
#[derive(Clone, Copy, Debug)]
pub enum HostSlice<'a> {
    /// Elements that are converted to the slot's element type.
    F32(&'a [f32]),
    /// Elements for i32 slots.
    I32(&'a [i32]),
    /// Bytes as the slot stores its elements, little-endian.
    Bytes(&'a [u8]),
}

impl HostSlice<'_> {
    /// Refuses a slice of another length than the slot's, and integers for a slot that does not hold i32.
    pub fn check(&self, slot: &Slot) -> Result<()> {
        match self {
            Self::F32(data) => check_host_len(slot, data.len()),
            Self::I32(data) => check_integers(slot, data.len()),
            Self::Bytes(data) => check_host_bytes(slot, data.len()),
        }
    }
}

/// Host memory that a slot is copied out to; see [`crate::Engine::read`].
#[derive(Debug)]
pub enum HostSliceMut<'a> {
    /// Elements that are converted from the slot's element type.
    F32(&'a mut [f32]),
    /// Elements of i32 slots.
    I32(&'a mut [i32]),
    /// Bytes as the slot stores its elements, little-endian.
    Bytes(&'a mut [u8]),
}

impl HostSliceMut<'_> {
    /// Refuses what [`HostSlice::check`] refuses.
    pub fn check(&self, slot: &Slot) -> Result<()> {
        match self {
            Self::F32(out) => check_host_len(slot, out.len()),
            Self::I32(out) => check_integers(slot, out.len()),
            Self::Bytes(out) => check_host_bytes(slot, out.len()),
        }
    }
}

/// Refuses a host buffer that does not have a slot's elements.
pub fn check_host_len(slot: &Slot, len: usize) -> Result<()> {
    if slot.numel() == len {
        return Ok(());
    }
    Err(Error::Input(format!("a buffer of {len} elements does not fit a slot of {}", slot.shape)))
}

fn check_integers(slot: &Slot, len: usize) -> Result<()> {
    if slot.dtype != DType::I32 {
        return Err(Error::Input(format!("integers do not fit a slot of {}", slot.dtype)));
    }
    check_host_len(slot, len)
}

/// Refuses a host buffer that does not have a slot's bytes.
pub fn check_host_bytes(slot: &Slot, bytes: usize) -> Result<()> {
    if slot.bytes() == bytes {
        return Ok(());
    }
    let want = slot.bytes();
    Err(Error::Input(format!(
        "a buffer of {bytes} bytes does not fit a slot of {}: {want} bytes",
        slot.shape
    )))
}
