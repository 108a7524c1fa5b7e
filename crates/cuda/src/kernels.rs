//! Our kernels: their sources, a file with its constants, and compiling it.

use crate::cache::{Cache, key};
use crate::ffi::nvrtc::{Compiled, Nvrtc, Source};
use crate::{Error, Result};
use ironhorse_core::DType;
use ironhorse_core::eager::Float;
use ironhorse_core::op::Gain;
use std::fmt;

macro_rules! sources {
    ($($family:literal: $($file:literal)*;)*) => {
        /// Every file of `kernels/` by its path there, headers included, with its text.
        pub const KERNEL_FILES: &[(&str, &str)] = &[$($((
            concat!($family, "/", $file),
            include_str!(concat!("../kernels/", $family, "/", $file)),
        ),)*)*];
    };
}

sources! {
    "common": "arch.cuh" "async_copy.cuh" "chain.cuh" "cluster.cuh" "dropout.cuh" "fill.cu" "floats.cuh" "fp8.cuh" "hopper.cuh" "limits.cu" "mma.cuh" "partials.cuh" "positions.cuh"
        "prelude.cuh" "random.cuh" "row_block.cuh" "rows.cuh" "scan.cuh" "tf32.cuh" "unaligned.cuh";
    "attention": "append.cu" "cached.cu" "cached_split.cu" "dropout.cuh" "flash.cuh" "flash_any.cu" "flash_bwd.cu" "flash_bwd_walk.cuh" "flash_bwd_wgmma.cu" "flash_f32.cu" "flash_fwd.cu"
        "packed.cuh" "places.cuh" "starts.cuh" "strided.cuh" "tile.cuh" "tile_f32.cuh" "tile_half.cuh";
    "elementwise": "activation.cu" "activation.cuh" "dropout.cu" "eager.cu" "gelu.cuh" "scale_bias_relu.cu" "swiglu.cu" "swiglu.cuh";
    "embedding": "bwd.cu" "fwd.cu" "scatter_few.cu";
    "experts": "eager_router.cu" "grouped.cuh" "grouped_any.cu" "grouped_any.cuh" "grouped_fp8.cu" "grouped_fp8.cuh" "grouped_fp8_any.cu" "grouped_fp8_swiglu.cu" "grouped_hopper.cuh"
        "grouped_lora.cuh" "grouped_lora_any.cu" "grouped_lora_mma.cu" "grouped_mma.cu" "grouped_mma.cuh"
        "grouped_results.cuh" "grouped_rows.cuh" "grouped_swiglu.cu" "grouped_swiglu.cuh" "grouped_swiglu_bwd.cu" "grouped_wgmma.cu" "permute.cu" "router.cu" "sort.cu";
    "fp8": "amax.cuh" "many.cu" "pairs.cuh" "permute.cu" "quantize.cu" "row_tile.cuh" "swiglu.cu" "tile.cuh";
    "loss": "argmax.cu" "cross_entropy.cu" "cross_entropy_bwd.cu" "eager_cross_entropy.cu" "fp8.cu" "gradient.cuh" "mean.cu" "preference.cu" "softmax.cu";
    "norm": "bwd.cu" "bwd.cuh" "bwd_fp8.cuh" "bwd_hopper.cu" "eager_bwd.cu" "eager_fwd.cu" "fp8.cu" "fwd.cu" "gain.cuh" "qk.cu" "row.cuh" "row_block.cuh" "row_warp.cuh";
    "optimizer": "adamw.cu" "eager.cu" "grad_norm.cu" "muon.cu" "squares.cuh" "state.cuh";
    "product": "bias.cu" "eager_gemm.cu" "gemm_any.cu" "gemm_tf32.cu" "gemm_tf32.cuh" "gemm_tf32_wgmma.cu"
        "gemv.cu" "linear_gelu.cu" "linear_gelu_bwd.cu" "linear_hopper.cuh";
    "ranks": "poison.cu" "tree_sum.cu";
    "rope": "eager.cu" "packed.cu" "tables.cu";
    "sampling": "eager.cu" "sample.cu" "search.cuh";
}

/// A file with the constants it is compiled for: one module.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Spec {
    /// The file of `kernels/`.
    pub file: &'static str,
    /// `-DNAME=VALUE`, in order.
    pub defines: Vec<(&'static str, Value)>,
}

/// The value of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// The name of a type.
    Word(&'static str),
    /// A number.
    Number(u32),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => f.write_str(word),
            Self::Number(number) => number.fmt(f),
        }
    }
}

impl From<&'static str> for Value {
    fn from(word: &'static str) -> Self {
        Self::Word(word)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Number(number)
    }
}

impl Spec {
    /// A file without constants.
    pub fn new(file: &'static str) -> Self {
        Self { file, defines: Vec::new() }
    }

    /// A file with the constant `ELEM`: the element type of an eager op.
    pub fn of(file: &'static str, float: Float) -> Self {
        Self::new(file).define("ELEM", float.ctype())
    }

    /// A file of eager ops for each element type.
    pub(crate) fn of_all(file: &'static str) -> Vec<Self> {
        Float::ALL.map(|float| Self::of(file, float)).into()
    }

    /// A file with the constant `ACT`: the element type of the engine's activations.
    pub(crate) fn act(file: &'static str, act: DType) -> Result<Self> {
        Self::new(file).typed("ACT", act)
    }

    /// As [`Self::act`], with the constant `VECTORS`: whether threads take 16 bytes at a time.
    pub(crate) fn act_vectors(file: &'static str, act: DType, vectors: bool) -> Result<Self> {
        Ok(Self::act(file, act)?.define("VECTORS", u32::from(vectors)))
    }

    /// What `spec` gives for each of the engine's element types, with and without vectors.
    pub(crate) fn all_vectors(spec: impl Fn(DType, bool) -> Result<Self>) -> Vec<Self> {
        ENGINE_TYPES.into_iter().flat_map(|act| [spec(act, false), spec(act, true)]).flatten().collect()
    }

    /// What `spec` gives for each of the engine's element types.
    pub(crate) fn all_types(spec: impl Fn(DType) -> Result<Self>) -> Vec<Self> {
        ENGINE_TYPES.into_iter().flat_map(spec).collect()
    }

    /// The file with one more constant: what kernels call an element type.
    pub(crate) fn typed(self, name: &'static str, dtype: DType) -> Result<Self> {
        Ok(self.define(name, ctype(dtype)?))
    }

    /// The file with one more constant: the bits of a float, unless it is 1, for which kernels do not multiply.
    pub(crate) fn factor(self, name: &'static str, factor: f32) -> Self {
        if factor == 1.0 { self } else { self.define(name, factor.to_bits()) }
    }

    /// The file with the gain of an RMS norm, see norm/gain.cuh.
    pub(crate) fn gain(self, gain: Gain) -> Self {
        match gain {
            Gain::Weight => self,
            Gain::OnePlusWeight => self.define("PLUS_ONE", 1),
        }
    }

    /// The file with one more constant.
    pub fn define(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.defines.push((name, value.into()));
        self
    }

    /// One of the file's kernels.
    pub(crate) fn kernel(self, name: &'static str) -> Kernel {
        Kernel { spec: self, name }
    }

    /// The compiler's flags.
    pub fn flags(&self) -> Vec<String> {
        let mut flags: Vec<String> =
            ["--std=c++17", "--extra-device-vectorization", "-default-device", "--ptxas-options=-v"]
                .map(String::from)
                .into();
        flags.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        flags
    }

    /// Compiles for an architecture; returns device code and the compiler's resource report.
    pub fn compile(&self, nvrtc: &Nvrtc, arch: &str) -> Result<Compiled> {
        let text = text_of(self.file)?;
        let headers: Vec<(&str, &str)> = headers().collect();
        nvrtc.compile(&Source { name: self.file, text, headers: &headers, arch, flags: &self.flags() })
    }

    /// A key of everything that decides the device code.
    fn key(&self, arch: &str, (major, minor): (i32, i32)) -> Result<String> {
        let flags = self.flags().join(" ");
        let version = format!("{major}.{minor}");
        let mut parts = vec![self.file, text_of(self.file)?, &flags, arch, &version];
        parts.extend(headers().map(|(_, text)| text));
        Ok(key(&parts))
    }
}

/// The specialisations of families of ops: what `specs` of each module returns.
macro_rules! specs_of {
    ($($family:ident)*) => { [$($family::specs()),*].concat() };
}
pub(crate) use specs_of;

/// A kernel: its file with constants, and its name there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub spec: Spec,
    pub name: &'static str,
}

fn headers() -> impl Iterator<Item = (&'static str, &'static str)> {
    KERNEL_FILES.iter().copied().filter(|(name, _)| name.ends_with(".cuh"))
}

/// The element types that the engine's kernels compute with.
const ENGINE_TYPES: [DType; 2] = [DType::F32, DType::BF16];

/// What kernels call an element type.
pub(crate) fn ctype(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("float"),
        DType::BF16 => Ok("bf16"),
        other => Err(Error::Unsupported(format!("no kernel computes with {other}"))),
    }
}

fn text_of(file: &str) -> Result<&'static str> {
    let found = KERNEL_FILES.iter().find(|(name, _)| *name == file);
    found.map(|(_, text)| *text).ok_or_else(|| Error::Unsupported(format!("there is no kernel file {file}")))
}

/// Device code of a specialisation: read from the cache, or compiled and kept there.
#[derive(Debug, Default)]
pub(crate) struct Compiler {
    nvrtc: Option<Nvrtc>,
    /// NVRTC's version decides the device code, so it is part of a key even when nothing is compiled.
    version: Option<(i32, i32)>,
}

impl Compiler {
    /// Passes the code of a specialisation to `load`; cached code that does not load is compiled again.
    pub fn load<M>(
        &mut self,
        spec: &Spec,
        arch: &str,
        cache: &Cache,
        load: impl Fn(&[u8]) -> Result<M>,
    ) -> Result<M> {
        let nvrtc = match &self.nvrtc {
            Some(nvrtc) => nvrtc,
            None => self.nvrtc.insert(Nvrtc::load()?),
        };
        let version = match self.version {
            Some(version) => version,
            None => *self.version.insert(nvrtc.version()?),
        };
        let stem = spec.file.trim_end_matches(".cu").replace('/', "-");
        let entry = format!("{stem}-{}.cubin", spec.key(arch, version)?);
        if let Some(cubin) = cache.read(&entry) {
            match load(&cubin) {
                Ok(module) => return Ok(module),
                Err(error) => tracing::warn!("cached {entry} does not load ({error}); compiling again"),
            }
        }
        let start = std::time::Instant::now();
        let compiled = spec.compile(nvrtc, arch)?;
        tracing::info!("compiled {} {:?} in {:?}", spec.file, spec.defines, start.elapsed());
        cache.write(&entry, &compiled.cubin);
        load(&compiled.cubin)
    }
}
