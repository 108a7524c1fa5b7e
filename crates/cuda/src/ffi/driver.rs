//! The driver: contexts, memory, streams, events, graphs, modules.

use super::library::{DRIVER, functions};
use crate::args::Args;
use crate::device::Device;
use crate::{Error, Result};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::rc::Rc;

functions! {
    /// The driver's functions.
    Driver of DRIVER;
    fn cuInit(c_uint) -> u32;
    fn cuDriverGetVersion(*mut c_int) -> u32;
    fn cuGetErrorName(u32, *mut *const c_char) -> u32;
    fn cuGetErrorString(u32, *mut *const c_char) -> u32;
    fn cuDeviceGetCount(*mut c_int) -> u32;
    fn cuDeviceGet(*mut CUdevice, c_int) -> u32;
    fn cuDeviceGetName(*mut c_char, c_int, CUdevice) -> u32;
    fn cuDeviceGetAttribute(*mut c_int, u32, CUdevice) -> u32;
    fn cuDeviceTotalMem_v2(*mut usize, CUdevice) -> u32;
    fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> u32;
    fn cuDevicePrimaryCtxRelease_v2(CUdevice) -> u32;
    fn cuCtxSetCurrent(CUcontext) -> u32;
    fn cuMemGetInfo_v2(*mut usize, *mut usize) -> u32;
    fn cuMemAlloc_v2(*mut CUdeviceptr, usize) -> u32;
    fn cuMemFree_v2(CUdeviceptr) -> u32;
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> u32;
    fn cuMemFreeHost(*mut c_void) -> u32;
    fn cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream) -> u32;
    fn cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream) -> u32;
    fn cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream) -> u32;
    fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream) -> u32;
    fn cuStreamCreate(*mut CUstream, c_uint) -> u32;
    fn cuStreamDestroy_v2(CUstream) -> u32;
    fn cuStreamSynchronize(CUstream) -> u32;
    fn cuStreamBeginCapture_v2(CUstream, u32) -> u32;
    fn cuStreamEndCapture(CUstream, *mut CUgraph) -> u32;
    fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64) -> u32;
    fn cuGraphLaunch(CUgraphExec, CUstream) -> u32;
    fn cuGraphDestroy(CUgraph) -> u32;
    fn cuGraphExecDestroy(CUgraphExec) -> u32;
    fn cuEventCreate(*mut CUevent, c_uint) -> u32;
    fn cuEventRecord(CUevent, CUstream) -> u32;
    fn cuEventQuery(CUevent) -> u32;
    fn cuEventSynchronize(CUevent) -> u32;
    fn cuEventElapsedTime(*mut f32, CUevent, CUevent) -> u32;
    fn cuEventDestroy_v2(CUevent) -> u32;
    fn cuModuleLoadData(*mut CUmodule, *const c_void) -> u32;
    fn cuModuleUnload(CUmodule) -> u32;
    fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> u32;
    fn cuFuncSetAttribute(CUfunction, u32, c_int) -> u32;
    fn cuFuncGetAttribute(*mut c_int, u32, CUfunction) -> u32;
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize) -> u32;
    fn cuLaunchKernel(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void) -> u32;
}

/// `CUDA_ERROR_OUT_OF_MEMORY`
const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: u32 = 600;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED: u32 = 8;

impl Driver {
    /// Turns a status into a result.
    pub fn check(&self, call: &'static str, status: u32) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let text = |get: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
            let mut words: *const c_char = std::ptr::null();
            // SAFETY: the driver writes a pointer to a static text, or leaves null for unknown codes.
            unsafe {
                get(status, &mut words);
                if words.is_null() {
                    format!("code {status}")
                } else {
                    CStr::from_ptr(words).to_string_lossy().into_owned()
                }
            }
        };
        Err(Error::Driver { call, name: text(self.cuGetErrorName), text: text(self.cuGetErrorString) })
    }
}

/// Calls a driver function and checks its status: `call!(device, cuMemFree_v2(address))`.
macro_rules! call {
    ($device:expr, $f:ident($($arg:expr),* $(,)?)) => {{
        let driver = &$device.driver;
        // SAFETY: the arguments are what the driver's header asks for; pointers outlive the call.
        let status = unsafe { (driver.$f)($($arg),*) };
        driver.check(stringify!($f), status)
    }};
}
pub(crate) use call;

/// Device memory.
#[derive(Debug)]
pub struct Buffer {
    device: Rc<Device>,
    address: CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    /// Memory with whatever it held; 0 bytes give a null address.
    pub fn new(device: &Rc<Device>, bytes: usize) -> Result<Self> {
        let mut address = 0;
        if bytes > 0 {
            device.make_current()?;
            // SAFETY: the driver writes the address.
            let status = unsafe { (device.driver.cuMemAlloc_v2)(&mut address, bytes) };
            if status == OUT_OF_MEMORY {
                let (free, total) = device.memory()?;
                return Err(Error::OutOfMemory(format!(
                    "{} has {free} bytes free of {total}, {bytes} more are needed",
                    device.info.name
                )));
            }
            device.driver.check("cuMemAlloc", status)?;
        }
        Ok(Self { device: device.clone(), address, bytes })
    }

    /// A copy of host data.
    pub fn from_host(device: &Rc<Device>, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(device, bytes.len())?;
        if !bytes.is_empty() {
            let stream = Stream::default_of(device);
            call!(
                device,
                cuMemcpyHtoDAsync_v2(buffer.address, bytes.as_ptr().cast(), bytes.len(), stream.raw)
            )?;
            stream.synchronize()?;
        }
        Ok(buffer)
    }

    /// Its address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.address != 0 {
            let _ = self.device.make_current();
            let _ = call!(self.device, cuMemFree_v2(self.address));
        }
    }
}

/// Page-locked host memory: copies to and from it run beside the host.
#[derive(Debug)]
pub struct Pinned {
    device: Rc<Device>,
    start: *mut u8,
    bytes: usize,
}

impl Pinned {
    /// Zeroed memory.
    pub fn new(device: &Rc<Device>, bytes: usize) -> Result<Self> {
        device.make_current()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        call!(device, cuMemHostAlloc(&mut start, bytes.max(1), 0))?;
        // SAFETY: just allocated with this size.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes.max(1)) };
        Ok(Self { device: device.clone(), start: start.cast(), bytes })
    }

    /// Its address on the host.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its contents. The caller has waited for every copy into it.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated with this size, initialised in `new`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Its contents, to change. The caller has waited for every copy out of it.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuMemFreeHost(self.start.cast()));
    }
}

/// A queue of device work.
#[derive(Debug)]
pub struct Stream {
    device: Rc<Device>,
    pub(crate) raw: CUstream,
}

impl Stream {
    /// A stream that does not wait for the default stream.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuStreamCreate(&mut raw, 1))?;
        Ok(Self { device: device.clone(), raw })
    }

    fn default_of(device: &Rc<Device>) -> Self {
        Self { device: device.clone(), raw: std::ptr::null_mut() }
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Rc<Device> {
        &self.device
    }

    /// Waits for all work given so far.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.device, cuStreamSynchronize(self.raw))
    }

    /// Launches a kernel.
    pub(crate) fn launch(
        &self,
        function: &Function,
        [gx, gy, gz]: [u32; 3],
        [bx, by, bz]: [u32; 3],
        shared: u32,
        args: &mut Args,
    ) -> Result<()> {
        let mut pointers = args.pointers();
        call!(
            self.device,
            cuLaunchKernel(
                function.raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                self.raw,
                pointers.as_mut_ptr(),
                std::ptr::null_mut()
            )
        )
    }

    /// Fills with zero.
    pub fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        call!(self.device, cuMemsetD8Async(at, 0, bytes, self.raw))
    }

    /// Copies within the device.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        call!(self.device, cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw))
    }

    /// Copies from pinned memory; it must not change until the stream has done so.
    pub fn upload(&self, to: u64, from: &Pinned, bytes: usize) -> Result<()> {
        debug_assert!(bytes <= from.bytes);
        call!(self.device, cuMemcpyHtoDAsync_v2(to, from.start.cast(), bytes, self.raw))
    }

    /// Copies into pinned memory; its contents are good once the stream has done so.
    pub fn download(&self, to: &Pinned, from: u64, bytes: usize) -> Result<()> {
        debug_assert!(bytes <= to.bytes);
        call!(self.device, cuMemcpyDtoHAsync_v2(to.start.cast(), from, bytes, self.raw))
    }

    /// Copies into pinned memory from byte `offset` on.
    pub fn download_at(&self, to: &Pinned, offset: usize, from: u64, bytes: usize) -> Result<()> {
        debug_assert!(offset + bytes <= to.bytes);
        let start = to.start.wrapping_add(offset);
        call!(self.device, cuMemcpyDtoHAsync_v2(start.cast(), from, bytes, self.raw))
    }

    /// Records everything `work` puts on this stream into a graph instead of running it.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        call!(self.device, cuStreamBeginCapture_v2(self.raw, 1))?; // thread local
        let done = work();
        let mut graph = std::ptr::null_mut();
        let ended = call!(self.device, cuStreamEndCapture(self.raw, &mut graph));
        done?;
        ended?;
        let mut exec = std::ptr::null_mut();
        let made = call!(self.device, cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        let _ = call!(self.device, cuGraphDestroy(graph));
        made?;
        Ok(Graph { device: self.device.clone(), exec })
    }

    /// Runs a graph.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        call!(self.device, cuGraphLaunch(graph.exec, self.raw))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            let _ = self.device.make_current();
            let _ = call!(self.device, cuStreamDestroy_v2(self.raw));
        }
    }
}

/// A recorded section.
#[derive(Debug)]
pub struct Graph {
    device: Rc<Device>,
    exec: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuGraphExecDestroy(self.exec));
    }
}

/// A point on a stream.
#[derive(Debug)]
pub struct Event {
    device: Rc<Device>,
    raw: CUevent,
}

impl Event {
    /// An event; one that is `timed` can be subtracted from another.
    pub fn new(device: &Rc<Device>, timed: bool) -> Result<Self> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuEventCreate(&mut raw, if timed { 0 } else { 2 }))?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Marks the stream's present end.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        call!(self.device, cuEventRecord(self.raw, stream.raw))
    }

    /// Whether the stream has passed the mark.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        let status = unsafe { (self.device.driver.cuEventQuery)(self.raw) };
        if status == NOT_READY {
            return Ok(false);
        }
        self.device.driver.check("cuEventQuery", status)?;
        Ok(true)
    }

    /// Waits until the stream has passed the mark.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.device, cuEventSynchronize(self.raw))
    }

    /// Milliseconds since an earlier event; both have passed.
    pub fn since(&self, earlier: &Self) -> Result<f32> {
        let mut ms = 0.0;
        call!(self.device, cuEventElapsedTime(&mut ms, earlier.raw, self.raw))?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuEventDestroy_v2(self.raw));
    }
}

/// A loaded CUBIN.
#[derive(Debug)]
pub struct Module {
    device: Rc<Device>,
    raw: CUmodule,
}

impl Module {
    /// Loads device code.
    pub fn load(device: &Rc<Device>, cubin: &[u8]) -> Result<Rc<Self>> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuModuleLoadData(&mut raw, cubin.as_ptr().cast()))?;
        Ok(Rc::new(Self { device: device.clone(), raw }))
    }

    /// One of its kernels.
    pub fn function(self: &Rc<Self>, name: &str) -> Result<Function> {
        let text = CString::new(name).map_err(|_| Error::Unsupported(format!("kernel name {name:?}")))?;
        let mut raw = std::ptr::null_mut();
        call!(self.device, cuModuleGetFunction(&mut raw, self.raw, text.as_ptr()))?;
        Ok(Function { module: self.clone(), raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuModuleUnload(self.raw));
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    module: Rc<Module>,
    pub(crate) raw: CUfunction,
}

impl Function {
    /// Lets launches ask for this much dynamic shared memory (needed beyond 48 KiB).
    pub fn allow_shared(&self, bytes: usize) -> Result<()> {
        call!(self.module.device, cuFuncSetAttribute(self.raw, MAX_DYNAMIC_SHARED, bytes as c_int))
    }

    /// How many blocks of this size one multiprocessor holds at a time.
    pub fn blocks_per_sm(&self, threads: u32, shared: usize) -> Result<u32> {
        let mut blocks = 0;
        call!(
            self.module.device,
            cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.raw, threads as c_int, shared)
        )?;
        Ok(blocks.max(0) as u32)
    }
}
