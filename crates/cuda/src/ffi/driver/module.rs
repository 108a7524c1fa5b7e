//! Loaded device code and its kernels.

use super::call;
use crate::device::Device;
use crate::{Error, Result};
use cudarc::driver::sys::{CUfunction, CUmodule};
use std::cell::Cell;
use std::ffi::{CString, c_int};
use std::rc::Rc;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED: u32 = 8;

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
        Ok(Function { module: self.clone(), raw, shared: Rc::default() })
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
    pub(super) raw: CUfunction,
    /// The most dynamic shared memory allowed so far. One per kernel: launches of other sizes share the limit.
    shared: Rc<Cell<usize>>,
}

impl Function {
    /// Lets launches ask for this much dynamic shared memory (needed beyond 48 KiB). Never takes back what was allowed.
    pub fn allow_shared(&self, bytes: usize) -> Result<()> {
        if bytes <= self.shared.get() {
            return Ok(());
        }
        call!(self.module.device, cuFuncSetAttribute(self.raw, MAX_DYNAMIC_SHARED, bytes as c_int))?;
        self.shared.set(bytes);
        Ok(())
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
