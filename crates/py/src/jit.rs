//! CUDA source of users: the classes of `ironhorse.jit` over `ironhorse_cuda::user`.

use crate::error;
use ironhorse::core::{f32_to_bf16, f32_to_f16};
use ironhorse::cuda::user::{Arg, Code, Dims, HostArray, Kernel, Source, arch_of};
use ironhorse::cuda::{Cache, Error};
use ironhorse::ops::OpError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use std::path::PathBuf;

/// An error as an exception; a source that does not compile is `ironhorse.jit.CompileError`.
fn raise(py: Python<'_>, error: Error) -> PyErr {
    if let Error::Compile { file, arch, log } = &error {
        let make = || -> PyResult<Bound<'_, PyAny>> {
            py.import("ironhorse.jit._errors")?.getattr("compile_error")?.call1((file, arch, log))
        };
        return make().map_or_else(|error| error, PyErr::from_value);
    }
    error::of_op(py, &OpError::from(error))
}

/// CUDA source to compile.
#[pyclass(frozen, module = "ironhorse._native")]
pub struct JitSource(Source);

/// Device code.
#[pyclass(frozen, module = "ironhorse._native")]
pub struct JitCode(Code);

/// A kernel on a GPU.
#[pyclass(frozen, module = "ironhorse._native")]
pub struct JitKernel {
    kernel: Kernel,
    name: String,
    /// Name and kind of each argument: `P` for an address, else numpy's letters for the type.
    arguments: Vec<(String, Kind)>,
}

type Parameters = Vec<(String, String, u32, bool)>;
type Templates = Vec<(String, String, String)>;

#[pymethods]
impl JitSource {
    #[new]
    fn new(name: String, text: String, folders: Vec<PathBuf>, flags: Vec<String>) -> Self {
        Self(Source { name, text, folders, flags })
    }

    /// (name, line, C linkage, [(kind, name, default)], [(name, base, stars, const)]) of each kernel.
    fn signatures(&self, py: Python<'_>) -> Vec<(String, u32, bool, Templates, Parameters)> {
        let found = py.detach(|| self.0.signatures());
        let flat = found.into_iter().map(|s| {
            let templates = s.template.into_iter().map(|p| (p.kind, p.name, p.default)).collect();
            let parameters = s.parameters.into_iter().map(|p| (p.name, p.base, p.pointers, p.constant));
            (s.name, s.line, s.c_linkage, templates, parameters.collect())
        });
        flat.collect()
    }

    /// The code for an architecture, with these kernels besides those of C linkage.
    fn compile(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        arch: &str,
        cache: Option<PathBuf>,
    ) -> PyResult<JitCode> {
        let compile = || self.0.compile(&names, arch, &Cache::open(cache.as_deref()));
        py.detach(compile).map(JitCode).map_err(|error| raise(py, error))
    }

    /// The architecture of a GPU of this machine.
    #[staticmethod]
    fn arch_of(py: Python<'_>, device: usize) -> PyResult<String> {
        py.detach(|| arch_of(device)).map_err(|error| raise(py, error))
    }
}

#[pymethods]
impl JitCode {
    /// The CUBIN.
    #[getter]
    fn cubin<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.cubin)
    }

    /// The log of the compiler.
    #[getter]
    fn log(&self) -> &str {
        &self.0.log
    }

    /// The requested names of kernels, each with its mangled name in the CUBIN.
    #[getter]
    fn lowered<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let names = PyDict::new(py);
        for (name, lowered) in &self.0.lowered {
            names.set_item(name, lowered)?;
        }
        Ok(names)
    }

    /// The key of the cache: a hash of everything that the code depends on.
    #[getter]
    fn key(&self) -> &str {
        &self.0.key
    }

    /// Whether it was read from the cache.
    #[getter]
    fn cached(&self) -> bool {
        self.0.cached
    }

    /// Seconds that compiling took.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.took.as_secs_f64()
    }

    /// A kernel on a GPU: `name` for messages, `lowered` in the code, and name and kind of each argument.
    fn load(
        &self,
        py: Python<'_>,
        device: usize,
        name: String,
        lowered: &str,
        arguments: Vec<(String, String)>,
    ) -> PyResult<JitKernel> {
        let kinds = arguments.into_iter().map(|(argument, kind)| match Kind::of(&kind) {
            Some(kind) => Ok((argument, kind)),
            None => Err(error::invalid(py, &format!("kernel {name}"), format_args!("kind {kind:?}"))),
        });
        let arguments = kinds.collect::<PyResult<_>>()?;
        let kernel = py.detach(|| Kernel::load(device, &self.0, &name, lowered));
        Ok(JitKernel { kernel: kernel.map_err(|error| raise(py, error))?, name, arguments })
    }
}

#[pymethods]
impl JitKernel {
    /// Registers of a thread.
    #[getter]
    fn registers(&self) -> u32 {
        self.kernel.registers
    }

    /// Bytes of shared memory that its source declares.
    #[getter]
    fn static_shared(&self) -> u32 {
        self.kernel.static_shared
    }

    /// Threads that a block may have.
    #[getter]
    fn max_threads(&self) -> u32 {
        self.kernel.max_threads
    }

    /// Puts a launch on a stream. Arguments are addresses on the GPU and numbers; the caller guarantees that the addresses are
    /// valid.
    fn launch(
        &self,
        py: Python<'_>,
        grid: Dims,
        block: Dims,
        shared: u32,
        stream: usize,
        args: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        let mut values = Vec::with_capacity(self.arguments.len());
        for (at, (argument, kind)) in self.arguments.iter().enumerate() {
            values.push(self.value(at, argument, *kind, &self.given(args, at)?)?);
        }
        let stream = stream as u64;
        let run = || {
            let stream = std::ptr::without_provenance_mut(stream as usize);
            // SAFETY: as many values as the kernel has arguments, packed by their types; the caller guarantees the addresses.
            unsafe { self.kernel.launch(grid, block, shared, stream, &mut values) }
        };
        py.detach(run).map_err(|error| raise(py, error))
    }

    /// Launches on copies of arrays of the host, each (address, bytes, read, written), and waits.
    fn launch_host(
        &self,
        py: Python<'_>,
        grid: Dims,
        block: Dims,
        shared: u32,
        args: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        let mut values = Vec::with_capacity(self.arguments.len());
        for (at, (argument, kind)) in self.arguments.iter().enumerate() {
            let given = self.given(args, at)?;
            values.push(match kind {
                Kind::Address if given.is_instance_of::<PyTuple>() => {
                    let (start, bytes, read, written) = given.extract()?;
                    Arg::Host(HostArray { start, bytes, read, written })
                }
                _ => Arg::Value(self.value(at, argument, *kind, &given)?),
            });
        }
        // SAFETY: as in `launch`; the caller keeps the arrays alive during the call.
        let run = || unsafe { self.kernel.launch_host(grid, block, shared, &values) };
        py.detach(run).map_err(|error| raise(py, error))
    }
}

impl JitKernel {
    fn given<'py>(&self, args: &Bound<'py, PyTuple>, at: usize) -> PyResult<Bound<'py, PyAny>> {
        if args.len() != self.arguments.len() {
            let (found, wanted) = (args.len(), self.arguments.len());
            let text = format_args!("{found} arguments, expected {wanted}");
            return Err(error::invalid(args.py(), &format!("kernel {}", self.name), text));
        }
        args.get_item(at)
    }

    /// The bytes of a number.
    fn value(&self, at: usize, argument: &str, kind: Kind, given: &Bound<'_, PyAny>) -> PyResult<u64> {
        kind.pack(given).map_err(|_| {
            let shown = given.repr().map_or_else(|_| "?".into(), |text| text.to_string());
            let text = format_args!("argument {} `{argument}` is {shown}, expected {}", at + 1, kind.words());
            error::invalid(given.py(), &format!("kernel {}", self.name), text)
        })
    }
}

/// The type of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Address,
    Bool,
    Signed(u32),
    Unsigned(u32),
    F16,
    Bf16,
    F32,
    F64,
}

impl Kind {
    fn of(letters: &str) -> Option<Self> {
        let bits = |rest: &str| rest.parse::<u32>().ok().filter(|bytes| [1, 2, 4, 8].contains(bytes));
        Some(match letters {
            "P" => Self::Address,
            "?" => Self::Bool,
            "f2" => Self::F16,
            "bf2" => Self::Bf16,
            "f4" => Self::F32,
            "f8" => Self::F64,
            _ => match letters.split_at_checked(1)? {
                ("i", rest) => Self::Signed(8 * bits(rest)?),
                ("u", rest) => Self::Unsigned(8 * bits(rest)?),
                _ => return None,
            },
        })
    }

    fn words(self) -> String {
        match self {
            Self::Address => "an array".into(),
            Self::Bool => "a bool".into(),
            Self::Signed(bits) => format!("an integer of {bits} bits"),
            Self::Unsigned(bits) => format!("an unsigned integer of {bits} bits"),
            Self::F16 | Self::Bf16 | Self::F32 | Self::F64 => "a number".into(),
        }
    }

    fn pack(self, given: &Bound<'_, PyAny>) -> PyResult<u64> {
        // Python's own conversions: a float is refused for an integer, a numpy number is accepted as its type.
        let refuse = || pyo3::exceptions::PyOverflowError::new_err("out of range");
        Ok(match self {
            Self::Address => given.extract::<u64>()?,
            Self::Bool => u64::from(given.is_truthy()?),
            Self::Signed(bits) => {
                let value = given.extract::<i64>()?;
                let room = 64 - bits;
                if (value << room) >> room != value {
                    return Err(refuse());
                }
                value as u64
            }
            Self::Unsigned(bits) => {
                let value = given.extract::<u64>()?;
                if bits < 64 && value >> bits != 0 {
                    return Err(refuse());
                }
                value
            }
            Self::F64 => given.extract::<f64>()?.to_bits(),
            Self::F32 => u64::from((given.extract::<f64>()? as f32).to_bits()),
            Self::F16 => u64::from(f32_to_f16(given.extract::<f64>()? as f32)),
            Self::Bf16 => u64::from(f32_to_bf16(given.extract::<f64>()? as f32)),
        })
    }
}
