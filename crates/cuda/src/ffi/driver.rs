//! The functions of the driver, and what their status codes mean.

use super::library::{DRIVER, functions};
use crate::{Error, Result};
use cudarc::driver::sys::{
    CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec,
    CUgraphNode, CUlaunchConfig, CUmodule, CUstream,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

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
    fn cuDeviceGetP2PAttribute(*mut c_int, u32, CUdevice, CUdevice) -> u32;
    fn cuDeviceTotalMem_v2(*mut usize, CUdevice) -> u32;
    fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> u32;
    fn cuCtxGetCurrent(*mut CUcontext) -> u32;
    fn cuCtxSetCurrent(CUcontext) -> u32;
    fn cuPointerGetAttribute(*mut c_void, u32, CUdeviceptr) -> u32;
    fn cuMemGetInfo_v2(*mut usize, *mut usize) -> u32;
    fn cuMemAlloc_v2(*mut CUdeviceptr, usize) -> u32;
    fn cuMemFree_v2(CUdeviceptr) -> u32;
    fn cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream) -> u32;
    fn cuMemFreeAsync(CUdeviceptr, CUstream) -> u32;
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> u32;
    fn cuMemFreeHost(*mut c_void) -> u32;
    fn cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream) -> u32;
    fn cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream) -> u32;
    fn cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream) -> u32;
    fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream) -> u32;
    fn cuStreamCreate(*mut CUstream, c_uint) -> u32;
    fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> u32;
    fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int) -> u32;
    fn cuStreamWaitEvent(CUstream, CUevent, c_uint) -> u32;
    fn cuStreamDestroy_v2(CUstream) -> u32;
    fn cuStreamSynchronize(CUstream) -> u32;
    fn cuThreadExchangeStreamCaptureMode(*mut u32) -> u32;
    fn cuStreamBeginCapture_v2(CUstream, u32) -> u32;
    fn cuStreamEndCapture(CUstream, *mut CUgraph) -> u32;
    fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64) -> u32;
    fn cuGraphLaunch(CUgraphExec, CUstream) -> u32;
    fn cuGraphDestroy(CUgraph) -> u32;
    fn cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize) -> u32;
    fn cuGraphNodeGetType(CUgraphNode, *mut u32) -> u32;
    fn cuGraphMemsetNodeGetParams(CUgraphNode, *mut CUDA_MEMSET_NODE_PARAMS) -> u32;
    fn cuGraphNodeGetDependencies(CUgraphNode, *mut CUgraphNode, *mut usize) -> u32;
    fn cuGraphNodeGetDependentNodes(CUgraphNode, *mut CUgraphNode, *mut usize) -> u32;
    fn cuGraphAddDependencies(CUgraph, *const CUgraphNode, *const CUgraphNode, usize) -> u32;
    fn cuGraphDestroyNode(CUgraphNode) -> u32;
    fn cuGraphExecDestroy(CUgraphExec) -> u32;
    fn cuEventCreate(*mut CUevent, c_uint) -> u32;
    fn cuEventRecord(CUevent, CUstream) -> u32;
    fn cuEventSynchronize(CUevent) -> u32;
    fn cuEventQuery(CUevent) -> u32;
    fn cuEventElapsedTime(*mut f32, CUevent, CUevent) -> u32;
    fn cuEventDestroy_v2(CUevent) -> u32;
    fn cuModuleLoadData(*mut CUmodule, *const c_void) -> u32;
    fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> u32;
    fn cuFuncGetAttribute(*mut c_int, u32, CUfunction) -> u32;
    fn cuFuncSetAttribute(CUfunction, u32, c_int) -> u32;
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize) -> u32;
    fn cuOccupancyMaxActiveClusters(*mut c_int, CUfunction, *const CUlaunchConfig) -> u32;
    fn cuTensorMapEncodeTiled(*mut c_void, u32, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32, u32, u32, u32, u32) -> u32;
    fn cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void) -> u32;
}

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(crate) const OUT_OF_MEMORY: u32 = 2;

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
