//! A tensor held by a handle of libtorch's C interface.

use super::abi::{RawTensor, Torch};
use super::tensor::{DTYPES, Device, Dtype, Tensor, failed};
use ironhorse::ops::Result;
use std::ffi::c_void;

/// A tensor; dropping it releases the handle.
pub struct Handle {
    raw: RawTensor,
    data: *mut c_void,
    dtype: Dtype,
    device: Device,
    dim: usize,
    sizes: *const i64,
    strides: *const i64,
}

/// torch; an error if it is not loaded, which cannot happen in a kernel that torch calls.
fn torch() -> Result<&'static Torch> {
    Torch::get().ok_or_else(|| failed("torch is not registered".into()))
}

impl Handle {
    /// Takes ownership of a handle, which is released also if this fails.
    ///
    /// # Safety
    /// The handle is valid, and the caller owns it.
    pub unsafe fn own(raw: RawTensor) -> Result<Self> {
        let null = std::ptr::null();
        let mut it = Self {
            raw,
            data: std::ptr::null_mut(),
            dtype: Dtype::Other,
            device: Device::Other,
            dim: 0,
            sizes: null,
            strides: null,
        };
        it.read()?;
        Ok(it)
    }

    /// Reads address, type, device, sizes and strides.
    fn read(&mut self) -> Result {
        let torch = torch()?;
        let core = torch.core();
        let (mut dtype, mut device, mut index, mut dim) = (0, 0, 0, 0);
        // SAFETY: the handle is valid, and all pointers are places for results. Sizes and strides live as long as the tensor.
        let status = unsafe {
            (core.aoti_torch_get_data_ptr)(self.raw, &mut self.data)
                | (core.aoti_torch_get_dtype)(self.raw, &mut dtype)
                | (core.aoti_torch_get_device_type)(self.raw, &mut device)
                | (core.aoti_torch_get_dim)(self.raw, &mut dim)
                | (core.aoti_torch_get_sizes)(self.raw, &mut self.sizes)
                | (core.aoti_torch_get_strides)(self.raw, &mut self.strides)
                | if device == torch.cpu {
                    0
                } else {
                    (core.aoti_torch_get_device_index)(self.raw, &mut index)
                }
        };
        torch.check("access to a tensor", status).map_err(failed)?;
        self.dim = dim as usize;
        let known = torch.dtypes.iter().position(|&number| number == dtype);
        self.dtype = known.map_or(Dtype::Other, |i| DTYPES[i]);
        self.device = match device {
            cpu if cpu == torch.cpu => Device::Cpu,
            cuda if cuda == torch.cuda_type => Device::Cuda(index),
            _ => Device::Other,
        };
        Ok(())
    }

    /// Gives up ownership of the handle.
    pub fn into_raw(self) -> RawTensor {
        std::mem::ManuallyDrop::new(self).raw
    }

    fn side(&self, values: *const i64) -> &[i64] {
        if self.dim == 0 {
            return &[];
        }
        // SAFETY: torch returned `dim` numbers, which live as long as the tensor.
        unsafe { std::slice::from_raw_parts(values, self.dim) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(torch) = Torch::get() {
            // SAFETY: this owns the handle, and nothing uses it any more. A failure in drop has no one to report to.
            let _ = unsafe { (torch.core().aoti_torch_delete_tensor_object)(self.raw) };
        }
    }
}

impl Tensor for Handle {
    fn data(&self) -> *mut c_void {
        self.data
    }

    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn device(&self) -> Device {
        self.device
    }

    fn sizes(&self) -> &[i64] {
        self.side(self.sizes)
    }

    fn strides(&self) -> &[i64] {
        self.side(self.strides)
    }

    fn empty(sizes: &[i64], strides: &[i64], dtype: Dtype, device: Device) -> Result<Self> {
        let torch = torch()?;
        let number = DTYPES.iter().position(|&known| known == dtype).map_or(-1, |i| torch.dtypes[i]);
        let (kind, index) = match device {
            Device::Cuda(index) => (torch.cuda_type, index),
            _ => (torch.cpu, 0),
        };
        let (dim, sides, steps) = (sizes.len() as i64, sizes.as_ptr(), strides.as_ptr());
        let mut raw = std::ptr::null_mut();
        // SAFETY: both lists have `dim` numbers; `raw` is a place for the handle.
        let status = unsafe {
            (torch.core().aoti_torch_empty_strided)(dim, sides, steps, number, kind, index, &mut raw)
        };
        torch.check("aoti_torch_empty_strided", status).map_err(|text| {
            // The only known reason; torch before 2.13 does not pass its message on.
            failed(format!("{text} (out of memory for a new tensor of {sizes:?} {dtype} on {device}?)"))
        })?;
        // SAFETY: torch has just created the handle for this caller.
        unsafe { Self::own(raw) }
    }

    fn copy_from(&self, other: &Self) -> Result {
        let torch = torch()?;
        // SAFETY: both handles are valid.
        let status = unsafe { (torch.core().aoti_torch_copy_)(self.raw, other.raw, 0) };
        torch.check("aoti_torch_copy_", status).map_err(failed)
    }

    fn stream(index: i32) -> Result<*mut c_void> {
        torch()?.stream(index).map_err(failed)
    }

    fn detached<R>(work: impl FnOnce() -> R) -> R {
        // torch releases the interpreter's lock before it calls the kernel.
        work()
    }
}
