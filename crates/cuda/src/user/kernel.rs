//! A kernel of a user's code on a GPU, and its launch.

use super::Code;
use crate::args::Grid;
use crate::device::{Device, Function, Stream};
use crate::{Error, Result};
use cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
use std::ffi::c_void;

/// Sizes in x, y and z.
pub type Dims = [u32; 3];

/// The largest grid.
const MOST_BLOCKS: Dims = [0x7fff_ffff, 0xffff, 0xffff];

/// A kernel, loaded for the life of the process: work that uses it may be under way or recorded in a graph.
#[derive(Debug)]
pub struct Kernel {
    device: &'static Device,
    name: String,
    function: Function,
    /// Threads that a block may have with the registers it needs.
    pub max_threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory that its text declares.
    pub static_shared: u32,
}

/// An argument of a launch on memory of the host.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// The bytes of a value, the first in the lowest place.
    Value(u64),
    /// An array; the kernel gets the address of a copy.
    Host(HostArray),
}

/// An array on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostArray {
    /// The address of its first byte.
    pub start: usize,
    /// Its size.
    pub bytes: usize,
    /// Whether the kernel needs what is in it.
    pub read: bool,
    /// Whether it is copied back.
    pub written: bool,
}

impl Kernel {
    /// A kernel of code on a GPU. `name` is what messages call it, `lowered` what the code calls it.
    pub fn load(index: usize, code: &Code, name: &str, lowered: &str) -> Result<Self> {
        let device = Device::open(index)?;
        let _current = device.enter()?;
        let function = device.users_function(&code.key, &code.cubin, lowered)?;
        Ok(Self {
            device,
            name: name.to_owned(),
            function,
            max_threads: function.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            registers: function.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            static_shared: function.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        })
    }

    /// Puts a launch on a stream of the GPU. A grid without blocks does nothing.
    ///
    /// # Safety
    /// `args` are the bytes of the kernel's arguments, in order, and addresses among them are what the kernel takes them
    /// for: what it reads or writes must be there until the stream has passed the launch.
    pub unsafe fn launch(
        &self,
        grid: Dims,
        block: Dims,
        shared: u32,
        stream: *mut c_void,
        args: &mut [u64],
    ) -> Result<()> {
        self.check(grid, block, shared)?;
        if grid.contains(&0) {
            return Ok(());
        }
        let _current = self.device.enter()?;
        let mut pointers: Vec<*mut c_void> =
            args.iter_mut().map(|arg| std::ptr::from_mut(arg).cast()).collect();
        let stream = Stream::borrowed(self.device, stream);
        let grid = Grid { grid, block, shared };
        // SAFETY: the caller of `launch` guarantees the arguments.
        let launched = unsafe { stream.launch_with(self.function, grid, &mut pointers, false) };
        launched.map_err(|error| self.failed(&error))
    }

    /// Copies arrays of the host to the GPU, launches, copies back what was written, and waits. An array that occurs
    /// twice is one on the GPU too.
    ///
    /// # Safety
    /// As for [`Self::launch`]; arrays are memory of the host that nothing else changes meanwhile.
    pub unsafe fn launch_host(&self, grid: Dims, block: Dims, shared: u32, args: &[Arg]) -> Result<()> {
        self.check(grid, block, shared)?;
        let arrays = distinct(args).map_err(|text| Error::Input(format!("kernel {}: {text}", self.name)))?;
        let _current = self.device.enter()?;
        let stream = Stream::default_of(self.device);
        let mut held = Held { stream, memory: Vec::with_capacity(arrays.len()) };
        for array in &arrays {
            let address = held.stream.allocate(array.bytes)?;
            held.memory.push(address);
            if array.read {
                let from = std::ptr::without_provenance(array.start);
                // SAFETY: both sides have `bytes` bytes; `held` waits before this function returns, also after a failure.
                unsafe { held.stream.upload_from(address, from, array.bytes)? };
            }
        }
        let mut values: Vec<u64> = args
            .iter()
            .map(|arg| match arg {
                Arg::Value(value) => *value,
                Arg::Host(array) => {
                    let at = arrays
                        .iter()
                        .position(|other| other.start == array.start && other.bytes == array.bytes);
                    at.map_or(0, |at| held.memory[at])
                }
            })
            .collect();
        // SAFETY: the caller of `launch_host` guarantees the arguments; addresses are those of the copies.
        unsafe { self.launch(grid, block, shared, std::ptr::null_mut(), &mut values)? };
        for (array, &address) in arrays.iter().zip(&held.memory) {
            if array.written {
                let to = std::ptr::without_provenance_mut(array.start);
                // SAFETY: both sides have `bytes` bytes; `held` waits before this function returns.
                let copied = unsafe { held.stream.download_to(to, address, array.bytes) };
                copied.map_err(|error| self.failed(&error))?;
            }
        }
        held.stream.synchronize().map_err(|error| self.failed(&error))
    }

    /// Refuses launches that the driver would refuse without naming the limit.
    fn check(&self, grid: Dims, block: Dims, shared: u32) -> Result<()> {
        let refuse = |text: String| Err(Error::Input(format!("kernel {}: {text}", self.name)));
        let threads = block.iter().map(|&size| u64::from(size)).product::<u64>();
        if threads == 0 {
            return refuse(format!("a block of {block:?} has no threads"));
        }
        if block[2] > 64 || threads > 1024 {
            return refuse(format!(
                "a block of {block:?} has {threads} threads; 1024 is the most, and 64 in z"
            ));
        }
        if threads > u64::from(self.max_threads) {
            return refuse(format!(
                "a block of {block:?} has {threads} threads; {} is the most with its {} registers; use smaller blocks \
                 or __launch_bounds__({threads})",
                self.max_threads, self.registers
            ));
        }
        if let Some(axis) = (0..3).find(|&axis| grid[axis] > MOST_BLOCKS[axis]) {
            let (name, most) = (["x", "y", "z"][axis], MOST_BLOCKS[axis]);
            return refuse(format!("a grid of {grid:?} has too many blocks in {name}; {most} is the most"));
        }
        let most = (self.device.info.shared_per_block as u64).saturating_sub(u64::from(self.static_shared));
        if u64::from(shared) > most {
            return refuse(format!(
                "{shared} bytes of dynamic shared memory; {most} is the most on {}, besides {} that it declares",
                self.device.info.name, self.static_shared
            ));
        }
        Ok(())
    }

    /// The error with the kernel's name, and with advice where the kernel itself went wrong.
    fn failed(&self, error: &Error) -> Error {
        let advice = if error.is_kernel_fault() {
            "; this or an earlier kernel read or wrote where it must not: the GPU is lost to this process, restart it; \
             `compute-sanitizer python ...` names the line"
        } else {
            ""
        };
        let Error::Driver { call, name, text } = error else { return error.clone() };
        Error::Driver { call, name: format!("kernel {}: {name}", self.name), text: format!("{text}{advice}") }
    }
}

/// The arrays among arguments, each once. Two that share a part are refused where one is written.
fn distinct(args: &[Arg]) -> Result<Vec<HostArray>, String> {
    let mut arrays: Vec<HostArray> = Vec::new();
    for arg in args {
        let Arg::Host(array) = *arg else { continue };
        let same = |other: &&mut HostArray| other.start == array.start && other.bytes == array.bytes;
        if let Some(other) = arrays.iter_mut().find(same) {
            other.read |= array.read;
            other.written |= array.written;
            continue;
        }
        arrays.push(array);
    }
    for (i, a) in arrays.iter().enumerate() {
        for b in &arrays[i + 1..] {
            let apart =
                a.start + a.bytes <= b.start || b.start + b.bytes <= a.start || a.bytes == 0 || b.bytes == 0;
            if !apart && (a.written || b.written) {
                return Err("two arrays overlap, and one of them is written".into());
            }
        }
    }
    Ok(arrays)
}

/// Device memory of a call on the default stream; freed once everything on it is done.
struct Held {
    stream: Stream,
    memory: Vec<u64>,
}

impl Drop for Held {
    fn drop(&mut self) {
        // After a failure copies to and from the caller's arrays may still be running.
        let _ = self.stream.synchronize();
        for &address in &self.memory {
            let _ = self.stream.free(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(start: usize, bytes: usize, written: bool) -> Arg {
        Arg::Host(HostArray { start, bytes, read: !written, written })
    }

    #[test]
    fn the_same_array_is_one_and_overlaps_are_refused() {
        let found = distinct(&[array(16, 8, false), Arg::Value(3), array(16, 8, true)]).unwrap();
        assert_eq!(found, [HostArray { start: 16, bytes: 8, read: true, written: true }]);
        assert_eq!(distinct(&[array(16, 8, false), array(20, 8, false)]).unwrap().len(), 2);
        assert!(distinct(&[array(16, 8, false), array(20, 8, true)]).is_err());
        assert_eq!(distinct(&[array(16, 8, true), array(24, 8, true), array(20, 0, true)]).unwrap().len(), 3);
    }
}
