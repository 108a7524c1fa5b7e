//! A kernel of a user's code on a GPU, and its launch.

use super::Code;
use crate::eager::Gpu;
use crate::{Error, Result};
use cudarc::driver::sys::{CUfunction, CUmodule};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Sizes in x, y and z.
pub type Dims = [u32; 3];

/// The largest grid.
const MOST_BLOCKS: Dims = [0x7fff_ffff, 0xffff, 0xffff];
/// Dynamic shared memory that needs no permission.
const SHARED: u32 = 48 << 10;
/// `CU_FUNC_ATTRIBUTE_...`
const MAX_THREADS: u32 = 0;
const STATIC_SHARED: u32 = 1;
const REGISTERS: u32 = 4;
const MAX_DYNAMIC_SHARED: u32 = 8;

/// A kernel, loaded for the life of the process: work that uses it may be under way or recorded in a graph.
#[derive(Debug)]
pub struct Kernel {
    gpu: &'static Gpu,
    name: String,
    raw: CUfunction,
    /// Threads that a block may have with the registers it needs.
    pub max_threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory that its text declares.
    pub static_shared: u32,
    /// Dynamic shared memory that launches may ask for so far.
    allowed: AtomicU32,
}

// SAFETY: a handle of the driver, which may be used from any thread and is never destroyed.
unsafe impl Send for Kernel {}
// SAFETY: as above; what changes is atomic.
unsafe impl Sync for Kernel {}

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
    /// Where it starts.
    pub start: usize,
    /// Its size.
    pub bytes: usize,
    /// Whether the kernel needs what is in it.
    pub read: bool,
    /// Whether it is copied back.
    pub written: bool,
}

#[derive(Clone, Copy)]
struct Module(CUmodule);
// SAFETY: a handle of the driver, which may be used from any thread and is never destroyed.
unsafe impl Send for Module {}

impl Kernel {
    /// A kernel of code on a GPU. `name` is what messages call it, `lowered` what the code calls it.
    pub fn load(index: usize, code: &Code, name: &str, lowered: &str) -> Result<Self> {
        let gpu = Gpu::open(index)?;
        let _current = gpu.enter()?;
        let module = module(gpu, code)?;
        let text = CString::new(lowered).map_err(|_| Error::Input(format!("kernel name {lowered:?}")))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the driver writes the handle.
        let status = unsafe { (gpu.driver.cuModuleGetFunction)(&mut raw, module.0, text.as_ptr()) };
        gpu.driver.check("cuModuleGetFunction", status)?;
        let ask = |what: u32| -> Result<u32> {
            let mut value = 0;
            // SAFETY: the driver writes the value.
            let status = unsafe { (gpu.driver.cuFuncGetAttribute)(&mut value, what, raw) };
            gpu.driver.check("cuFuncGetAttribute", status)?;
            Ok(value.max(0) as u32)
        };
        let (max_threads, registers, static_shared) =
            (ask(MAX_THREADS)?, ask(REGISTERS)?, ask(STATIC_SHARED)?);
        let allowed = AtomicU32::new(SHARED.saturating_sub(static_shared));
        Ok(Self { gpu, name: name.to_owned(), raw, max_threads, registers, static_shared, allowed })
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
        let _current = self.gpu.enter()?;
        if shared > self.allowed.load(Ordering::Relaxed) {
            // All there is, not what this launch needs: others may hold the same function of the driver.
            let most = (self.gpu.info.shared_per_block as u32).saturating_sub(self.static_shared).max(shared);
            // SAFETY: a kernel of this context.
            let status =
                unsafe { (self.gpu.driver.cuFuncSetAttribute)(self.raw, MAX_DYNAMIC_SHARED, most as c_int) };
            self.gpu.driver.check("cuFuncSetAttribute", status).map_err(|error| self.failed(&error))?;
            self.allowed.store(most, Ordering::Relaxed);
        }
        let mut pointers: Vec<*mut c_void> =
            args.iter_mut().map(|arg| std::ptr::from_mut(arg).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        // SAFETY: the caller's.
        let status = unsafe {
            let pointers = pointers.as_mut_ptr();
            let none = std::ptr::null_mut();
            (self.gpu.driver.cuLaunchKernel)(
                self.raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                stream.cast(),
                pointers,
                none,
            )
        };
        self.gpu.driver.check("cuLaunchKernel", status).map_err(|error| self.failed(&error))
    }

    /// Copies arrays of the host to the GPU, launches, copies back what was written, and waits. An array that occurs
    /// twice is one on the GPU too.
    ///
    /// # Safety
    /// As for [`Self::launch`]; arrays are memory of the host that nothing else changes meanwhile.
    pub unsafe fn launch_host(&self, grid: Dims, block: Dims, shared: u32, args: &[Arg]) -> Result<()> {
        self.check(grid, block, shared)?;
        let arrays = distinct(args).map_err(|text| Error::Input(format!("kernel {}: {text}", self.name)))?;
        let _current = self.gpu.enter()?;
        let mut held = Held { gpu: self.gpu, memory: Vec::with_capacity(arrays.len()) };
        let driver = &self.gpu.driver;
        let default = std::ptr::null_mut();
        for array in &arrays {
            let address = self.gpu.allocate(default, array.bytes)?;
            held.memory.push(address);
            if array.bytes > 0 && array.read {
                let from = std::ptr::without_provenance::<c_void>(array.start);
                // SAFETY: both are `bytes` large; the wait below, also after a failure, outlasts the copy.
                let status =
                    unsafe { (driver.cuMemcpyHtoDAsync_v2)(address, from, array.bytes, default.cast()) };
                driver.check("cuMemcpyHtoD", status)?;
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
        // SAFETY: the caller's; addresses are those of the copies.
        unsafe { self.launch(grid, block, shared, default, &mut values)? };
        for (array, &address) in arrays.iter().zip(&held.memory) {
            if array.bytes > 0 && array.written {
                let to = std::ptr::without_provenance_mut::<c_void>(array.start);
                // SAFETY: both are `bytes` large; the wait below outlasts the copy.
                let status =
                    unsafe { (driver.cuMemcpyDtoHAsync_v2)(to, address, array.bytes, default.cast()) };
                driver.check("cuMemcpyDtoH", status).map_err(|error| self.failed(&error))?;
            }
        }
        held.wait().map_err(|error| self.failed(&error))
    }

    /// Refuses what the driver would refuse with fewer words.
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
        let most = (self.gpu.info.shared_per_block as u64).saturating_sub(u64::from(self.static_shared));
        if u64::from(shared) > most {
            return refuse(format!(
                "{shared} bytes of dynamic shared memory; {most} is the most on {}, besides {} that it declares",
                self.gpu.info.name, self.static_shared
            ));
        }
        Ok(())
    }

    /// The error with the kernel's name, and with advice where the kernel itself went wrong.
    fn failed(&self, error: &Error) -> Error {
        let Error::Driver { call, name, text } = error else { return error.clone() };
        let lost = [
            "ILLEGAL_ADDRESS",
            "MISALIGNED",
            "ILLEGAL_INSTRUCTION",
            "LAUNCH_FAILED",
            "ASSERT",
            "LAUNCH_TIMEOUT",
        ];
        let advice = if lost.iter().any(|word| name.contains(word)) {
            "; this or an earlier kernel read or wrote where it must not: the GPU is lost to this process, restart it; \
             `compute-sanitizer python ...` names the line"
        } else {
            ""
        };
        Error::Driver { call, name: format!("kernel {}: {name}", self.name), text: format!("{text}{advice}") }
    }
}

/// The loaded module of code; the same code is loaded once for a GPU.
fn module(gpu: &'static Gpu, code: &Code) -> Result<Module> {
    type Modules = Mutex<HashMap<(usize, String), Module>>;
    static MODULES: OnceLock<Modules> = OnceLock::new();
    let mut modules = MODULES.get_or_init(Modules::default).lock().unwrap_or_else(PoisonError::into_inner);
    let place = (gpu.info.index, code.key.clone());
    if let Some(module) = modules.get(&place) {
        return Ok(*module);
    }
    let mut raw = std::ptr::null_mut();
    // SAFETY: the context is current (the caller entered it); the driver copies the code.
    let status = unsafe { (gpu.driver.cuModuleLoadData)(&mut raw, code.cubin.as_ptr().cast()) };
    gpu.driver.check("cuModuleLoadData", status)?;
    modules.insert(place, Module(raw));
    Ok(Module(raw))
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
                return Err("two arrays share a part of their memory, and one is written".into());
            }
        }
    }
    Ok(arrays)
}

/// Device memory of a call; given back after everything on the stream is done.
struct Held {
    gpu: &'static Gpu,
    memory: Vec<u64>,
}

impl Held {
    fn wait(&self) -> Result<()> {
        // SAFETY: the default stream.
        let status = unsafe { (self.gpu.driver.cuStreamSynchronize)(std::ptr::null_mut()) };
        self.gpu.driver.check("cuStreamSynchronize", status)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // After a failure copies may still run; they use arrays of the caller.
        let _ = self.wait();
        for &address in &self.memory {
            let _ = self.gpu.free(std::ptr::null_mut(), address);
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
