//! A matrix product by cuBLASLt: the library on a device, the descriptors of a product, and its algorithms. Shared by the
//! engine and by eager ops.

use crate::device::{Device, Stream};
use crate::ffi::cublaslt::{Algo, CublasLt, Found, check};
use crate::{Error, Result};
use cudarc::cublaslt::sys::{
    cublasComputeType_t as ComputeType, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayoutAttribute_t as LayoutAttribute,
    cudaDataType_t as DataType,
};
use ironhorse_core::{DType, Fp8};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

type Raw = *mut c_void;
type SetAttribute = unsafe extern "C" fn(Raw, u32, *const c_void, usize) -> i32;

fn data_type(dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(DataType::CUDA_R_32F as u32),
        DType::BF16 => Ok(DataType::CUDA_R_16BF as u32),
        DType::F8(Fp8::E4M3) => Ok(DataType::CUDA_R_8F_E4M3 as u32),
        DType::F8(Fp8::E5M2) => Ok(DataType::CUDA_R_8F_E5M2 as u32),
        other => {
            Err(Error::Unsupported(format!("matrix product of {other}, expected f32, bf16, e4m3 or e5m2")))
        }
    }
}

/// The library, started on a device.
#[derive(Debug)]
pub struct Handle {
    library: CublasLt,
    raw: Raw,
    device: &'static Device,
}

// SAFETY: the library's functions may be called with one handle from several threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Finds the library and starts it.
    pub fn new(device: &'static Device) -> Result<Arc<Self>> {
        device.make_current()?;
        let library = CublasLt::load()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library writes the handle; the device's context is current.
        check("cublasLtCreate", unsafe { (library.cublasLtCreate)(&mut raw) })?;
        let handle = Self { library, raw, device };
        tracing::info!("cuBLASLt {} from {}", handle.version(), handle.library.path().display());
        Ok(Arc::new(handle))
    }

    /// Its version, 130100 for 13.1.0.
    pub fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.library.cublasLtGetVersion)() }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: made by `cublasLtCreate`, destroyed once; descriptors hold the handle, so none is left.
        let _ = unsafe { (self.library.cublasLtDestroy)(self.raw) };
    }
}

/// A descriptor of any kind: destroyed with its own function.
#[derive(Debug)]
struct Descriptor {
    /// Keeps the library loaded.
    _handle: Arc<Handle>,
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> i32,
}

// SAFETY: plain data of the library, which nothing changes once it is made; any thread may read or destroy it.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// Keeps what `create`, the library's function of this name, writes to its argument and returns a status for.
    fn new(
        handle: &Arc<Handle>,
        name: &'static str,
        destroy: unsafe extern "C" fn(Raw) -> i32,
        create: impl FnOnce(*mut Raw) -> i32,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        check(name, create(&mut raw))?;
        Ok(Self { _handle: handle.clone(), raw, destroy })
    }

    /// Sets an attribute by the function for descriptors of this kind.
    fn set(&self, function: SetAttribute, attribute: u32, value: &[u8]) -> Result<()> {
        // SAFETY: the descriptor is alive, the value outlives the call and has the attribute's size.
        let status = unsafe { function(self.raw, attribute, value.as_ptr().cast(), value.len()) };
        check("cublasLt*SetAttribute", status)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the create function that belongs to `destroy`, destroyed once; the handle keeps the library.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// A column-major matrix: `rows` by `cols`, columns `ld` elements apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Element type.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from one column to the next.
    pub ld: usize,
}

/// What the library does with each element of the result, and the memory it needs for that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// `CUBLASLT_EPILOGUE_*`; 0 means none.
    pub code: u32,
    /// Address of the bias or of its gradient, or 0.
    pub bias: u64,
    /// Address of the value before GELU, shaped as the result, or 0.
    pub aux: u64,
}

/// What to compute: `D = alpha · op(A) · op(B) + beta · D`, then the epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Description {
    /// A as it is stored.
    pub a: Matrix,
    /// B as it is stored.
    pub b: Matrix,
    /// The result.
    pub d: Matrix,
    /// How many products; their matrices are stored one after the other.
    pub batch: i32,
    /// Whether A and B are transposed.
    pub transposed: [bool; 2],
    /// Whether f32 operands may be rounded to tf32.
    pub tf32: bool,
    /// What happens to each element of the result.
    pub epilogue: Epilogue,
    /// Addresses of the factors of A and B, which 8-bit operands have, or 0; multiples of 16.
    pub scales: [u64; 2],
    /// Whether sums of 8-bit products may keep fewer bits.
    pub fast_sums: bool,
}

/// The library's descriptors of one product.
#[derive(Debug)]
pub struct Product {
    handle: Arc<Handle>,
    desc: Descriptor,
    a: Descriptor,
    b: Descriptor,
    d: Descriptor,
}

/// Which algorithms the library may propose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The most workspace, in bytes.
    pub workspace: usize,
    /// The reductions allowed besides none: a mask of `reduction`.
    pub reductions: u32,
    /// What the addresses of A, B and D are multiples of.
    pub align: [u32; 3],
    /// How many algorithms it may propose.
    pub count: usize,
}

/// Addresses and factors of one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operands {
    /// Addresses of A, B, C and D.
    pub a: u64,
    /// See `a`.
    pub b: u64,
    /// See `a`; D itself, or another matrix of its size.
    pub c: u64,
    /// See `a`.
    pub d: u64,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C: 0 does not read it, 1 adds it.
    pub beta: f32,
    /// Address of the workspace.
    pub workspace: u64,
    /// Its size.
    pub workspace_bytes: usize,
}

impl Product {
    /// Makes the descriptors.
    pub fn new(handle: &Arc<Handle>, what: &Description) -> Result<Self> {
        let library = &handle.library;
        let compute = if what.tf32 {
            ComputeType::CUBLAS_COMPUTE_32F_FAST_TF32
        } else {
            ComputeType::CUBLAS_COMPUTE_32F
        };
        let destroy = library.cublasLtMatmulDescDestroy;
        // SAFETY: the library writes the descriptor; the types are among the header's values.
        let desc = Descriptor::new(handle, "cublasLtMatmulDescCreate", destroy, |to| unsafe {
            (library.cublasLtMatmulDescCreate)(to, compute as u32, DataType::CUDA_R_32F as u32)
        })?;
        let set = |attribute: DescAttribute, value: &[u8]| {
            desc.set(library.cublasLtMatmulDescSetAttribute, attribute as u32, value)
        };
        let op = |transposed: bool| i32::from(transposed).to_ne_bytes(); // CUBLAS_OP_N = 0, CUBLAS_OP_T = 1
        set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &op(what.transposed[0]))?;
        set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &op(what.transposed[1]))?;
        for (attribute, scale) in [
            (DescAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, what.scales[0]),
            (DescAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, what.scales[1]),
        ] {
            if scale != 0 {
                set(attribute, &scale.to_ne_bytes())?;
            }
        }
        if what.fast_sums {
            set(DescAttribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &[1])?;
        }
        let Epilogue { code, bias, aux } = what.epilogue;
        if code != 0 {
            set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &code.to_ne_bytes())?;
        }
        if bias != 0 {
            set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.to_ne_bytes())?;
        }
        if aux != 0 {
            set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux.to_ne_bytes())?;
            let ld = (what.d.ld as i64).to_ne_bytes();
            set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld)?;
        }
        let layout = |matrix: &Matrix| layout(handle, matrix, what.batch);
        let (a, b, d) = (layout(&what.a)?, layout(&what.b)?, layout(&what.d)?);
        Ok(Self { handle: handle.clone(), desc, a, b, d })
    }

    /// Algorithms the library proposes, best guess first; none if it has nothing for this product.
    pub fn propose(&self, wanted: &Wanted) -> Result<Vec<Found>> {
        let preference = preference(&self.handle, wanted)?;
        let mut found = vec![Found::default(); wanted.count];
        let mut count = 0;
        // SAFETY: all descriptors are alive; the library writes at most `wanted.count` results and their number.
        let status = unsafe {
            (self.handle.library.cublasLtMatmulAlgoGetHeuristic)(
                self.handle.raw,
                self.desc.raw,
                self.a.raw,
                self.b.raw,
                self.d.raw,
                self.d.raw,
                preference.raw,
                wanted.count as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status != 0 {
            tracing::debug!("cuBLASLt proposes nothing: status {status}");
            return Ok(Vec::new());
        }
        found.truncate(count.max(0) as usize);
        found.retain(|found| found.state == 0 && found.workspace <= wanted.workspace);
        Ok(found)
    }

    /// Whether an algorithm fits this product; returns the workspace it needs.
    pub fn accepts(&self, algo: &Algo) -> Option<usize> {
        let mut found = Found::default();
        // SAFETY: all descriptors are alive; the algorithm is plain data that the library checks.
        let status = unsafe {
            (self.handle.library.cublasLtMatmulAlgoCheck)(
                self.handle.raw,
                self.desc.raw,
                self.a.raw,
                self.b.raw,
                self.d.raw,
                self.d.raw,
                algo,
                &mut found,
            )
        };
        (status == 0 && found.state == 0).then_some(found.workspace)
    }

    /// Puts the product on the stream. The addresses are of device memory with the described matrices.
    pub fn enqueue(&self, algo: &Algo, at: &Operands, stream: &Stream) -> Result<()> {
        let address = |address: u64| address as usize as *mut c_void;
        // SAFETY: descriptors are alive; alpha and beta are host floats (the default pointer mode and the scale type say
        // so) that the library reads before it returns; the algorithm was proposed for or checked against these
        // descriptors.
        check("cublasLtMatmul", unsafe {
            (self.handle.library.cublasLtMatmul)(
                self.handle.raw,
                self.desc.raw,
                std::ptr::from_ref(&at.alpha).cast(),
                address(at.a),
                self.a.raw,
                address(at.b),
                self.b.raw,
                std::ptr::from_ref(&at.beta).cast(),
                address(at.c),
                self.d.raw,
                address(at.d),
                self.d.raw,
                algo,
                address(at.workspace),
                at.workspace_bytes,
                stream.raw.cast(),
            )
        })
    }
}

fn layout(handle: &Arc<Handle>, matrix: &Matrix, batch: i32) -> Result<Descriptor> {
    let (rows, cols, ld) = (matrix.rows as u64, matrix.cols as u64, matrix.ld as i64);
    let (data, destroy) = (data_type(matrix.dtype)?, handle.library.cublasLtMatrixLayoutDestroy);
    // SAFETY: the library writes the descriptor; the type is among the header's values.
    let made = Descriptor::new(handle, "cublasLtMatrixLayoutCreate", destroy, |to| unsafe {
        (handle.library.cublasLtMatrixLayoutCreate)(to, data, rows, cols, ld)
    })?;
    let set = |attribute: LayoutAttribute, value: &[u8]| {
        made.set(handle.library.cublasLtMatrixLayoutSetAttribute, attribute as u32, value)
    };
    if batch > 1 {
        let apart = ld * cols as i64;
        set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch.to_ne_bytes())?;
        set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &apart.to_ne_bytes())?;
    }
    Ok(made)
}

fn preference(handle: &Arc<Handle>, wanted: &Wanted) -> Result<Descriptor> {
    let library = &handle.library;
    let destroy = library.cublasLtMatmulPreferenceDestroy;
    // SAFETY: the library writes the descriptor.
    let made = Descriptor::new(handle, "cublasLtMatmulPreferenceCreate", destroy, |to| unsafe {
        (library.cublasLtMatmulPreferenceCreate)(to)
    })?;
    let set = |attribute: Preference, value: &[u8]| {
        made.set(library.cublasLtMatmulPreferenceSetAttribute, attribute as u32, value)
    };
    let [a, b, d] = wanted.align.map(u32::to_ne_bytes);
    set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(wanted.workspace as u64).to_ne_bytes())?;
    set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &wanted.reductions.to_ne_bytes())?;
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a)?;
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b)?;
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d)?;
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d)?;
    Ok(made)
}
