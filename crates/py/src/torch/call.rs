//! One call of an op: the checks all ops share, its new tensors, and where it runs.

use super::tensor::{Device, Dtype, Tensor, contiguous, has_strides, invalid, is_contiguous, refuse};
use ironhorse::core::eager::{Array, Float, Rows};
use ironhorse::cuda;
use ironhorse::eager::{self, At};
use ironhorse::ops::Result;
use std::cell::RefCell;

/// A call: the type and device of its first tensor, which the others must share.
#[derive(Clone, Copy)]
pub struct TorchCall {
    pub op: &'static str,
    pub float: Float,
    device: Device,
}

impl TorchCall {
    /// A call on a tensor of any floating-point type that ops support.
    pub fn new<T: Tensor>(op: &'static str, name: &str, x: &T) -> Result<Self> {
        let expected = "float64, float32, bfloat16 or float16";
        match (x.dtype(), x.device()) {
            (_, Device::Other) => refuse(op, name, "on an unsupported device", "on cpu or cuda"),
            (Dtype::Float(float), device) => Ok(Self { op, float, device }),
            (dtype, _) => refuse(op, name, dtype, expected),
        }
    }

    /// The type of statistics.
    pub fn acc(&self) -> Float {
        self.float.acc()
    }

    /// Another tensor on the same device, of type `float` and these sizes.
    pub fn tensor<T: Tensor>(&self, name: &str, x: &T, float: Float, sizes: &[i64]) -> Result {
        if x.dtype() != Dtype::Float(float) {
            return refuse(self.op, name, x.dtype(), Dtype::Float(float));
        }
        self.sized(name, x, sizes)
    }

    /// Another tensor of the same type and device, with these sizes.
    pub fn same<T: Tensor>(&self, name: &str, x: &T, sizes: &[i64]) -> Result {
        self.tensor(name, x, self.float, sizes)
    }

    /// Another tensor on the same device with these sizes.
    pub fn sized<T: Tensor>(&self, name: &str, x: &T, sizes: &[i64]) -> Result {
        if x.device() != self.device {
            return refuse(
                self.op,
                name,
                format_args!("on {}", x.device()),
                format_args!("{}, like the first tensor", self.device),
            );
        }
        if x.sizes() != sizes {
            return refuse(self.op, name, format_args!("{:?}", x.sizes()), format_args!("{sizes:?}"));
        }
        Ok(())
    }

    /// The rows of the last dimension.
    pub fn rows<T: Tensor>(&self, name: &str, x: &T) -> Result<Rows> {
        let Some((&cols, outer)) = x.sizes().split_last() else {
            return refuse(self.op, name, "a single number", "rows of the last dimension");
        };
        Ok(Rows { rows: outer.iter().product::<i64>() as usize, cols: cols as usize })
    }

    /// The tensor itself if it is contiguous, else a contiguous copy.
    pub fn dense<T: Tensor>(&self, x: T) -> Result<T> {
        if is_contiguous(x.sizes(), x.strides()) {
            return Ok(x);
        }
        self.moved(&x, &contiguous(x.sizes()))
    }

    /// The tensor itself if it has these strides, else a copy that has them.
    pub fn with_strides<T: Tensor>(&self, x: T, strides: &[i64]) -> Result<T> {
        if has_strides(x.sizes(), x.strides(), |i| strides[i]) {
            return Ok(x);
        }
        self.moved(&x, strides)
    }

    /// A contiguous copy, in memory of its own.
    pub fn copied<T: Tensor>(&self, x: &T) -> Result<T> {
        self.moved(x, &contiguous(x.sizes()))
    }

    fn moved<T: Tensor>(&self, x: &T, strides: &[i64]) -> Result<T> {
        let copy = T::empty(x.sizes(), strides, x.dtype(), x.device())?;
        copy.copy_from(x)?;
        Ok(copy)
    }

    /// A new contiguous tensor.
    pub fn out<T: Tensor>(&self, sizes: &[i64], float: Float) -> Result<T> {
        self.out_strided(sizes, &contiguous(sizes), float)
    }

    /// A new tensor of these strides.
    pub fn out_strided<T: Tensor>(&self, sizes: &[i64], strides: &[i64], float: Float) -> Result<T> {
        T::empty(sizes, strides, Dtype::Float(float), self.device)
    }

    /// A new contiguous tensor if `wanted`, else one without elements.
    pub fn wanted<T: Tensor>(&self, wanted: bool, sizes: &[i64], float: Float) -> Result<Wanted<T>> {
        self.wanted_strided(wanted, sizes, &contiguous(sizes), float)
    }

    /// [`Self::wanted`] with strides.
    pub fn wanted_strided<T: Tensor>(
        &self,
        wanted: bool,
        sizes: &[i64],
        strides: &[i64],
        float: Float,
    ) -> Result<Wanted<T>> {
        let tensor: T = if wanted {
            self.out_strided(sizes, strides, float)?
        } else {
            self.out_strided(&[0], &[1], float)?
        };
        let at = if wanted { tensor.data() } else { std::ptr::null_mut() };
        Ok(Wanted { array: Array { at, float }, tensor })
    }

    /// How an op sees a tensor of the type of the call.
    pub fn array<T: Tensor>(&self, x: &T) -> Array {
        x.array(self.float)
    }

    /// How an op sees a tensor of statistics.
    pub fn statistic<T: Tensor>(&self, x: &T) -> Array {
        x.array(self.acc())
    }

    /// Runs an op where the tensors are.
    ///
    /// # Safety
    /// See [`eager::run`]: the tensors have the sizes and types that the op documents.
    pub unsafe fn eager<T: Tensor>(&self, op: &impl eager::Op) -> Result {
        // SAFETY: guaranteed by the caller; the tensors are held until the work is on the stream, whose memory torch keeps.
        self.run::<T>(|at| unsafe { eager::run(at, op) })
    }

    /// Runs the work where the tensors are, on torch's current stream there. Memory it needs comes from torch.
    pub fn run<T: Tensor>(&self, work: impl FnOnce(&At<'_>) -> Result) -> Result {
        match self.device {
            Device::Cuda(index) => {
                let memory = TorchMemory::<T> { device: self.device, taken: RefCell::default() };
                let Ok(gpu) = usize::try_from(index) else {
                    return invalid(format!("{}: there is no GPU {index}", self.op));
                };
                let at = At::Device(cuda::eager::OnStream::new(gpu, T::stream(index)?, &memory)?);
                T::detached(|| work(&at))
            }
            _ => T::detached(|| work(&At::Host)),
        }
    }

    /// Whether the tensors are memory of the host.
    pub fn on_host(&self) -> bool {
        self.device == Device::Cpu
    }
}

/// An output tensor, and the array that the op gets: null if the output is not needed.
pub struct Wanted<T> {
    pub array: Array,
    pub tensor: T,
}

/// Memory for the time of a call: tensors of torch's caching allocator, which takes them back for later work of the same
/// stream, also inside a CUDA graph.
struct TorchMemory<T> {
    device: Device,
    taken: RefCell<Vec<T>>,
}

impl<T: Tensor> cuda::eager::Memory for TorchMemory<T> {
    fn take(&self, _: &cuda::eager::Stream, bytes: usize) -> cuda::Result<u64> {
        let tensor = T::empty(&[bytes as i64], &[1], Dtype::U8, self.device)
            .map_err(|error| cuda::Error::OutOfMemory(error.text))?;
        let address = tensor.data().addr() as u64;
        self.taken.borrow_mut().push(tensor);
        Ok(address)
    }
}
