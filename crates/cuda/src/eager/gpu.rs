//! The GPUs of this process as direct ops use them: opened once, shared by all threads, never closed.

use super::memory::Memory;
use crate::args::Args;
use crate::cache::Cache;
use crate::device::{Device, DeviceInfo, choose};
use crate::ffi::driver::Driver;
use crate::ffi::library::{NVRTC, Open};
use crate::kernels::{Compiler, Spec};
use crate::lower::Grid;
use crate::{Error, Result};
use cudarc::driver::sys::{CUcontext, CUfunction, CUmodule, CUstream};
use ironhorse_core::eager::Array;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::hash::Hash;
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

/// More than any machine has.
const MOST_GPUS: usize = 64;

/// A GPU.
#[derive(Debug)]
pub struct Gpu {
    pub(crate) driver: Driver,
    /// What it is.
    pub info: DeviceInfo,
    context: CUcontext,
    kernels: RwLock<HashMap<Kernel, Loaded<CUfunction>>>,
    /// Streams that nobody uses at the moment.
    streams: Mutex<Vec<FreeStream>>,
    compiler: Mutex<(Compiler, HashMap<Spec, Module>)>,
}

#[derive(Clone, Copy, Debug)]
struct Module(CUmodule);

#[derive(Clone, Copy, Debug)]
struct FreeStream(CUstream);

#[derive(Clone, Copy, Debug, PartialEq)]
struct Loaded<F> {
    raw: F,
    /// The most dynamic shared memory a launch may ask for so far.
    shared: u32,
}

/// Dynamic shared memory that every kernel may use.
const SHARED: u32 = 48 << 10;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED: u32 = 8;

/// Adds a kernel. Two threads can load the same one at once: what the first has been allowed since then must stay known, so
/// that the second does not lower it.
fn add<K: Eq + Hash, F: Copy>(kernels: &mut HashMap<K, Loaded<F>>, kernel: K, raw: F) -> Loaded<F> {
    *kernels.entry(kernel).or_insert(Loaded { raw, shared: SHARED })
}

/// Lets a kernel use more shared memory by `set`; never less than it may already.
fn raise<K: Eq + Hash, F: Copy>(
    kernels: &mut HashMap<K, Loaded<F>>,
    kernel: &K,
    shared: u32,
    set: impl FnOnce(F) -> Result<()>,
) -> Result<()> {
    match kernels.get_mut(kernel) {
        Some(loaded) if loaded.shared < shared => {
            set(loaded.raw)?;
            loaded.shared = shared;
            Ok(())
        }
        _ => Ok(()),
    }
}

// SAFETY: handles of the driver, which may be used from any thread; they are never destroyed.
unsafe impl Send for Gpu {}
// SAFETY: as above; what changes is behind locks.
unsafe impl Sync for Gpu {}
// SAFETY: as above.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Send for FreeStream {}

/// A kernel by name: file, constants, entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub file: &'static str,
    pub name: &'static str,
    /// `-DNAME=VALUE` with names of types.
    pub types: [(&'static str, &'static str); 2],
    /// `-DNAME=VALUE` with numbers; an empty name is no constant.
    pub numbers: [(&'static str, u32); 2],
}

impl Kernel {
    /// A kernel of a file without constants.
    pub fn new(file: &'static str, name: &'static str) -> Self {
        Self { file, name, types: [("", ""); 2], numbers: [("", 0); 2] }
    }

    /// With `T`, the constant `ELEM`, an element type.
    pub fn of(file: &'static str, name: &'static str, float: ironhorse_core::eager::Float) -> Self {
        Self { types: [("ELEM", float.ctype()), ("", "")], ..Self::new(file, name) }
    }

    /// With one more constant (two at most).
    pub fn number(mut self, name: &'static str, value: u32) -> Self {
        if let Some(free) = self.numbers.iter_mut().find(|(taken, _)| taken.is_empty()) {
            *free = (name, value);
        }
        self
    }

    /// The module it is in.
    pub fn spec(&self) -> Spec {
        let types = self.types.iter().filter(|(name, _)| !name.is_empty());
        let spec = types.fold(Spec::new(self.file), |spec, (name, value)| spec.define(name, value));
        let numbers = self.numbers.iter().filter(|(name, _)| !name.is_empty());
        numbers.fold(spec, |spec, (name, value)| spec.define(name, value))
    }
}

impl Gpu {
    /// The GPU of this index, opened at first use.
    pub fn open(index: usize) -> Result<&'static Self> {
        static GPUS: [OnceLock<Result<Gpu>>; MOST_GPUS] = [const { OnceLock::new() }; MOST_GPUS];
        let Some(slot) = GPUS.get(index) else {
            return Err(Error::NoDevice(format!("there is no GPU {index}")));
        };
        slot.get_or_init(|| Self::start(index)).as_ref().map_err(Clone::clone)
    }

    fn start(index: usize) -> Result<Self> {
        let (driver, info, raw) = choose(index)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes the context: the one that PyTorch and programs of the CUDA runtime use.
        let status = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, raw) };
        driver.check("cuDevicePrimaryCtxRetain", status)?;
        let compiler = Compiler::new(Cache::open(None));
        let (kernels, streams) = (RwLock::default(), Mutex::default());
        let compiler = Mutex::new((compiler, HashMap::new()));
        Ok(Self { driver, info, context, kernels, streams, compiler })
    }

    /// Device memory in the order of a stream; 0 bytes give a null address.
    pub(crate) fn allocate(&self, stream: *mut c_void, bytes: usize) -> Result<u64> {
        let mut address = 0;
        if bytes > 0 {
            let _current = self.enter()?;
            // SAFETY: the driver writes the address; the stream is the caller's.
            let status = unsafe { (self.driver.cuMemAllocAsync)(&mut address, bytes, stream.cast()) };
            self.check_memory("cuMemAllocAsync", status, bytes)?;
        }
        Ok(address)
    }

    pub(crate) fn free(&self, stream: *mut c_void, address: u64) -> Result<()> {
        if address == 0 {
            return Ok(());
        }
        let _current = self.enter()?;
        // SAFETY: made by `allocate` on the same stream.
        let status = unsafe { (self.driver.cuMemFreeAsync)(address, stream.cast()) };
        self.driver.check("cuMemFreeAsync", status)
    }

    /// A stream that nobody else uses, and that does not wait for the default stream.
    pub(super) fn take_stream(&self) -> Result<*mut c_void> {
        const NON_BLOCKING: u32 = 1;
        if let Some(free) = self.streams.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(free.0.cast());
        }
        let _current = self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes the handle.
        let status = unsafe { (self.driver.cuStreamCreate)(&mut raw, NON_BLOCKING) };
        self.driver.check("cuStreamCreate", status)?;
        Ok(raw.cast())
    }

    /// Gives back a stream of [`Self::take_stream`] on which nothing is left to do.
    pub(super) fn give_stream(&self, stream: *mut c_void) {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).push(FreeStream(stream.cast()));
    }

    /// Waits until all work of a stream is done.
    pub(super) fn wait(&self, stream: *mut c_void) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: a stream of this GPU.
        let status = unsafe { (self.driver.cuStreamSynchronize)(stream.cast()) };
        self.driver.check("cuStreamSynchronize", status)
    }

    /// Puts a copy from the host on a stream.
    ///
    /// # Safety
    /// `bytes` of memory on both sides, valid until the stream has passed the copy.
    pub(super) unsafe fn upload(
        &self,
        stream: *mut c_void,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the caller's.
        let status = unsafe { (self.driver.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, stream.cast()) };
        self.driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Puts a copy to the host on a stream.
    ///
    /// # Safety
    /// As [`Self::upload`].
    pub(super) unsafe fn download(
        &self,
        stream: *mut c_void,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the caller's.
        let status = unsafe { (self.driver.cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, stream.cast()) };
        self.driver.check("cuMemcpyDtoHAsync", status)
    }

    fn check_memory(&self, call: &'static str, status: u32, bytes: usize) -> Result<()> {
        if status == crate::ffi::driver::OUT_OF_MEMORY {
            let name = &self.info.name;
            return Err(Error::OutOfMemory(format!("{name} has no {} free", crate::memory::human(bytes))));
        }
        self.driver.check(call, status)
    }

    /// Makes the context current on this thread until the guard is gone.
    pub(crate) fn enter(&self) -> Result<Current<'_>> {
        let mut now = std::ptr::null_mut();
        // SAFETY: the driver writes the context.
        let status = unsafe { (self.driver.cuCtxGetCurrent)(&mut now) };
        self.driver.check("cuCtxGetCurrent", status)?;
        let before = (now != self.context).then_some(now);
        if before.is_some() {
            // SAFETY: the context is retained for the life of the process.
            let status = unsafe { (self.driver.cuCtxSetCurrent)(self.context) };
            self.driver.check("cuCtxSetCurrent", status)?;
        }
        Ok(Current { gpu: self, before })
    }

    fn kernel(&self, kernel: &Kernel, shared: u32) -> Result<CUfunction> {
        let known = self.kernels.read().unwrap_or_else(PoisonError::into_inner).get(kernel).copied();
        match known {
            Some(loaded) if shared <= loaded.shared => Ok(loaded.raw),
            Some(loaded) => self.allow(kernel, loaded, shared),
            None => {
                let loaded = self.load(kernel)?;
                if shared > loaded.shared { self.allow(kernel, loaded, shared) } else { Ok(loaded.raw) }
            }
        }
    }

    /// Lets launches of a kernel ask for more shared memory. Under the lock, and never less than another thread has asked for.
    fn allow(&self, kernel: &Kernel, loaded: Loaded<CUfunction>, shared: u32) -> Result<CUfunction> {
        let mut kernels = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        raise(&mut kernels, kernel, shared, |raw| {
            // SAFETY: a kernel of this context.
            let status =
                unsafe { (self.driver.cuFuncSetAttribute)(raw, MAX_DYNAMIC_SHARED, shared as c_int) };
            self.driver.check("cuFuncSetAttribute", status)
        })?;
        Ok(loaded.raw)
    }

    fn load(&self, kernel: &Kernel) -> Result<Loaded<CUfunction>> {
        let mut guard = self.compiler.lock().unwrap_or_else(PoisonError::into_inner);
        let (compiler, modules) = &mut *guard;
        let spec = kernel.spec();
        let module = match modules.get(&spec) {
            Some(module) => *module,
            None => {
                let module = compiler.load(&spec, &self.info.arch(), |cubin| self.module(cubin))?;
                modules.insert(spec, module);
                module
            }
        };
        let name = CString::new(kernel.name).map_err(|_| Error::Unsupported(kernel.name.into()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the driver writes the handle.
        let status = unsafe { (self.driver.cuModuleGetFunction)(&mut raw, module.0, name.as_ptr()) };
        self.driver.check("cuModuleGetFunction", status)?;
        let mut kernels = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        Ok(add(&mut kernels, kernel.clone(), raw))
    }

    fn module(&self, cubin: &[u8]) -> Result<Module> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current (only `At` gets here); the driver copies the code.
        let status = unsafe { (self.driver.cuModuleLoadData)(&mut raw, cubin.as_ptr().cast()) };
        self.driver.check("cuModuleLoadData", status)?;
        Ok(Module(raw))
    }
}

/// A context that is current on this thread; the one before comes back when this is dropped.
pub(crate) struct Current<'a> {
    gpu: &'a Gpu,
    before: Option<CUcontext>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current before; null is "none".
            let _ = unsafe { (self.gpu.driver.cuCtxSetCurrent)(before) };
        }
    }
}

/// Where a call works: a GPU, whose context is current on this thread as long as this lives, and a stream of it.
pub struct At<'a> {
    gpu: &'static Gpu,
    stream: *mut c_void,
    memory: &'a dyn Memory,
    _current: Current<'static>,
}

impl<'a> At<'a> {
    /// On this stream (null: the default stream) of GPU `index`.
    pub fn new(index: usize, stream: *mut c_void, memory: &'a dyn Memory) -> Result<Self> {
        let gpu = Gpu::open(index)?;
        Ok(Self { gpu, stream, memory, _current: gpu.enter()? })
    }

    /// The GPU.
    pub fn info(&self) -> &'static DeviceInfo {
        &self.gpu.info
    }

    /// The stream.
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    /// Memory for the time of this call.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<u64> {
        self.memory.take(self.gpu, self.stream, bytes)
    }

    /// Puts a kernel on the stream.
    pub(crate) fn launch(&self, kernel: &Kernel, grid: Grid, mut args: Args) -> Result<()> {
        let raw = self.gpu.kernel(kernel, grid.shared)?;
        let mut pointers = args.pointers();
        let ([gx, gy, gz], [bx, by, bz]) = (grid.grid, grid.block);
        // SAFETY: the arguments are in the order and sizes of the kernel's signature, which the launchers vouch for.
        let status = unsafe {
            (self.gpu.driver.cuLaunchKernel)(
                raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                grid.shared,
                self.stream.cast(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.gpu.driver.check("cuLaunchKernel", status)
    }

    /// Puts a fill with zero on the stream.
    ///
    /// # Safety
    /// `bytes` of device memory from `at` on.
    pub unsafe fn zero(&self, at: *mut c_void, bytes: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.set_bytes(at, 0, bytes) }
    }

    /// NaN in every element of some arrays, where they are not null: what is computed from nothing.
    ///
    /// # Safety
    /// Arrays that are not null have `len` elements of device memory.
    pub(super) unsafe fn fill_nan<const N: usize>(&self, arrays: [Array; N], len: usize) -> Result<()> {
        for array in arrays.into_iter().filter(|array| !array.at.is_null()) {
            // All bits set are a NaN in every type. SAFETY: the caller's.
            unsafe { self.set_bytes(array.at, 0xff, len * array.float.size())? };
        }
        Ok(())
    }

    /// # Safety
    /// `bytes` of device memory from `at` on.
    unsafe fn set_bytes(&self, at: *mut c_void, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        let status =
            unsafe { (self.gpu.driver.cuMemsetD8Async)(at.addr() as u64, value, bytes, self.stream.cast()) };
        self.gpu.driver.check("cuMemsetD8Async", status)
    }
}

/// Whether there is a GPU that direct ops can use.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        // matrix products have a kernel of our own where cuBLASLt is missing
        Device::check(0).and_then(|()| Open::find(NVRTC).map(drop)).is_ok()
    })
}

/// The GPU that `address` is memory of; `None` is the host. Asks only a driver that the process has loaded already: without
/// one there is no device memory.
pub fn device_of(address: *const c_void) -> Option<usize> {
    /// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, and its value for a device.
    const MEMORY_TYPE: u32 = 2;
    const ON_DEVICE: u32 = 2;
    /// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
    const ORDINAL: u32 = 9;
    let driver = loaded_driver()?;
    let ask = |what: u32| -> Option<u32> {
        let mut value = 0_u32;
        let out = std::ptr::from_mut(&mut value).cast();
        // SAFETY: the driver writes four bytes; any address may be asked about.
        let status = unsafe { (driver.cuPointerGetAttribute)(out, what, address.addr() as u64) };
        (status == 0).then_some(value)
    };
    if ask(MEMORY_TYPE)? != ON_DEVICE {
        return None;
    }
    ask(ORDINAL).map(|index| index as usize)
}

/// The driver, if this process has it.
fn loaded_driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return driver.as_ref();
    }
    if !crate::ffi::library::is_loaded(crate::ffi::library::DRIVER) {
        return None;
    }
    DRIVER.get_or_init(|| Driver::load().ok()).as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two threads load a kernel at once; the first is allowed more before the second adds it to the map.
    #[test]
    fn what_one_thread_was_allowed_no_other_lowers() {
        let mut kernels = HashMap::new();
        let mut driver = SHARED;
        assert_eq!(add(&mut kernels, "k", 7).shared, SHARED);
        let mut ask = |kernels: &mut HashMap<_, _>, shared: u32| {
            raise(kernels, &"k", shared, |raw| {
                assert_eq!(raw, 7);
                driver = shared;
                Ok(())
            })
            .unwrap();
            driver
        };
        assert_eq!(ask(&mut kernels, 100 << 10), 100 << 10);
        assert_eq!(add(&mut kernels, "k", 7), Loaded { raw: 7, shared: 100 << 10 });
        assert_eq!(ask(&mut kernels, 60 << 10), 100 << 10, "a smaller launch lowers nothing");
        assert_eq!(ask(&mut kernels, 200 << 10), 200 << 10);
        let refused = raise(&mut kernels, &"k", 300 << 10, |_| Err(Error::Unsupported("too much".into())));
        assert!(refused.is_err());
        assert_eq!(kernels["k"].shared, 200 << 10, "what the driver refused is not remembered as allowed");
    }
}
