//! A tensor held by its Python object, for versions of torch whose C interface is too old.

use super::tensor::{DTYPES, Device, Dtype, Tensor, failed};
use ironhorse::ops::Result;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::c_void;

/// A tensor.
pub struct Object {
    object: Py<PyAny>,
    data: *mut c_void,
    dtype: Dtype,
    device: Device,
    sizes: Vec<i64>,
    strides: Vec<i64>,
}

impl Object {
    /// Reads address, type, device, sizes and strides.
    pub fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let device = object.getattr("device")?;
        let device = match device.getattr("type")?.extract::<String>()?.as_str() {
            "cpu" => Device::Cpu,
            "cuda" => Device::Cuda(device.getattr("index")?.extract()?),
            _ => Device::Other,
        };
        let dtype = object.getattr("dtype")?.str()?;
        let dtype = dtype.to_cow()?;
        let known = DTYPES.into_iter().find(|known| dtype.strip_prefix("torch.") == Some(known.name()));
        let address: usize = object.call_method0("data_ptr")?.extract()?;
        Ok(Self {
            data: std::ptr::with_exposed_provenance_mut(address),
            dtype: known.unwrap_or(Dtype::Other),
            device,
            sizes: object.getattr("shape")?.extract()?,
            strides: object.call_method0("stride")?.extract()?,
            object: object.clone().unbind(),
        })
    }

    /// The Python object.
    pub fn into_object(self) -> Py<PyAny> {
        self.object
    }

    fn make(py: Python<'_>, sizes: &[i64], strides: &[i64], dtype: Dtype, device: Device) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let options = PyDict::new(py);
        options.set_item("dtype", torch.getattr(dtype.name())?)?;
        options.set_item("device", device.to_string())?;
        Self::new(&torch.call_method("empty_strided", (sizes.to_vec(), strides.to_vec()), Some(&options))?)
    }
}

impl Tensor for Object {
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
        &self.sizes
    }

    fn strides(&self) -> &[i64] {
        &self.strides
    }

    fn empty(sizes: &[i64], strides: &[i64], dtype: Dtype, device: Device) -> Result<Self> {
        Python::attach(|py| Self::make(py, sizes, strides, dtype, device)).map_err(|e| failed(e.to_string()))
    }

    fn copy_from(&self, other: &Self) -> Result {
        let copied = Python::attach(|py| self.object.call_method1(py, "copy_", (&other.object,)).map(|_| ()));
        copied.map_err(|error| failed(error.to_string()))
    }

    fn stream(index: i32) -> Result<*mut c_void> {
        let address = Python::attach(|py| -> PyResult<usize> {
            let stream = py.import("torch.cuda")?.call_method1("current_stream", (index,))?;
            stream.getattr("cuda_stream")?.extract()
        });
        address.map(std::ptr::with_exposed_provenance_mut).map_err(|error| failed(error.to_string()))
    }

    fn detached<R>(work: impl FnOnce() -> R) -> R {
        /// Makes `work` Send: it holds addresses, which the tensors keep valid, and runs on this thread.
        struct Here<T>(T);
        // SAFETY: nothing leaves this thread: `detach` only releases the lock during the call.
        unsafe impl<T> Send for Here<T> {}
        impl<R, F: FnOnce() -> R> Here<F> {
            fn call(self) -> Here<R> {
                Here((self.0)())
            }
        }
        let work = Here(work);
        Python::attach(|py| py.detach(move || work.call())).0
    }
}
