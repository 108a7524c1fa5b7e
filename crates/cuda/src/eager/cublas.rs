//! cuBLASLt for direct ops: opened once per process, started once per GPU; descriptors and the library's first proposal are
//! kept per shape, for all threads.

use super::gemm::Gemm;
use super::gpu::At;
use crate::ffi::cublaslt::{Algo, CublasLt, Found as Proposal, check, reduction};
use crate::{Error, Result};
use cudarc::cublaslt::sys::{
    cublasComputeType_t as ComputeType, cublasLtMatmulDescAttributes_t as DescAttribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayoutAttribute_t as Layout,
    cudaDataType_t as DataType,
};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

type Raw = *mut c_void;

/// The most workspace a proposal may ask for.
const WORKSPACE: u64 = 32 << 20;
/// Shapes kept; a program with more than these pays for the library's proposal again.
const MOST_PLANS: usize = 4096;
/// What addresses are at best multiples of: more does not make a proposal better.
const ALIGN: u32 = 64;

/// The library, or why there is none.
fn library() -> Result<&'static CublasLt> {
    static LIBRARY: OnceLock<Result<CublasLt>> = OnceLock::new();
    let open = || {
        let found = CublasLt::load();
        match &found {
            Ok(library) => tracing::info!("cuBLASLt from {}", library.path().display()),
            Err(error) => tracing::warn!("matrix products by a slow kernel: {error}"),
        }
        found
    };
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// Everything that decides a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    gpu: usize,
    /// batch, m, n, k
    sizes: [usize; 4],
    /// Of A and B.
    transposed: [bool; 2],
    /// What the addresses of A, B and C are multiples of.
    align: [u32; 3],
}

/// A descriptor, destroyed with its own function.
#[derive(Debug)]
struct Descriptor {
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> i32,
}

// SAFETY: plain data of the library, which any thread may read; nothing changes it once it is made.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the create function that belongs to `destroy`, destroyed once; the library is never closed.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// The library on one GPU, never stopped.
#[derive(Clone, Copy, Debug)]
struct Handle(Raw);

// SAFETY: the library's functions may be called with one handle from several threads.
unsafe impl Send for Handle {}

/// What is known of products so far.
#[derive(Default)]
struct Known {
    handles: HashMap<usize, Handle>,
    /// `None`: the library has nothing for it.
    plans: HashMap<Key, Option<Arc<Plan>>>,
}

/// How a product is computed.
#[derive(Debug)]
pub(super) struct Plan {
    library: &'static CublasLt,
    handle: Handle,
    desc: Descriptor,
    /// B, A and C as the library sees them: column-major, transposed.
    layouts: [Descriptor; 3],
    algo: Algo,
    workspace: usize,
}

// SAFETY: see `Handle` and `Descriptor`.
unsafe impl Sync for Plan {}

/// A plan and the bytes of memory it needs.
pub(super) struct Found {
    pub plan: Arc<Plan>,
    pub workspace: usize,
}

/// The plan of a product at these addresses of A, B and C; `None` where there is no library, or it has nothing.
pub(super) fn find(at: &At<'_>, shape: &Gemm, addresses: [u64; 3]) -> Result<Option<Found>> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let library = match library() {
        Ok(library) => library,
        Err(Error::LibraryMissing { .. } | Error::SymbolMissing { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let align = addresses.map(|address| 1 << address.trailing_zeros().min(ALIGN.trailing_zeros()));
    let sizes = [shape.batch, shape.m, shape.n, shape.k];
    let key = Key { gpu: at.info().index, sizes, transposed: shape.transposed, align };
    let mut guard = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = guard.get_or_insert_default();
    let plan = match known.plans.get(&key) {
        Some(plan) => plan.clone(),
        None => {
            let handle = match known.handles.get(&key.gpu) {
                Some(handle) => *handle,
                None => {
                    let mut raw = std::ptr::null_mut();
                    // SAFETY: the library writes the handle; the GPU's context is current as long as `at` lives.
                    check("cublasLtCreate", unsafe { (library.cublasLtCreate)(&mut raw) })?;
                    known.handles.insert(key.gpu, Handle(raw));
                    Handle(raw)
                }
            };
            let plan = Plan::new(library, handle, &key)?.map(Arc::new);
            if known.plans.len() >= MOST_PLANS {
                known.plans.clear();
            }
            known.plans.insert(key, plan.clone());
            plan
        }
    };
    Ok(plan.map(|plan| Found { workspace: plan.workspace, plan }))
}

impl Plan {
    /// Asks the library; `None` if it has nothing.
    fn new(library: &'static CublasLt, handle: Handle, key: &Key) -> Result<Option<Self>> {
        let [batch, m, n, k] = key.sizes;
        let Ok(count) = i32::try_from(batch) else { return Ok(None) };
        let (mut raw, float) = (std::ptr::null_mut(), DataType::CUDA_R_32F as u32);
        let compute = ComputeType::CUBLAS_COMPUTE_32F as u32;
        // SAFETY: the library writes the descriptor; the types are among the header's values.
        let status = unsafe { (library.cublasLtMatmulDescCreate)(&mut raw, compute, float) };
        check("cublasLtMatmulDescCreate", status)?;
        let desc = Descriptor { raw, destroy: library.cublasLtMatmulDescDestroy };
        // A row-major matrix is its transpose, column-major: Cᵀ = Bᵀ Aᵀ. What lies transposed the library transposes back.
        let [a_transposed, b_transposed] = key.transposed;
        for (attribute, transposed) in [
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, b_transposed),
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, a_transposed),
        ] {
            let value = i32::from(transposed).to_ne_bytes(); // CUBLAS_OP_N = 0, CUBLAS_OP_T = 1
            // SAFETY: the descriptor is alive, the value outlives the call and has the attribute's size.
            check("cublasLtMatmulDescSetAttribute", unsafe {
                let (from, bytes) = (value.as_ptr().cast(), value.len());
                (library.cublasLtMatmulDescSetAttribute)(desc.raw, attribute as u32, from, bytes)
            })?;
        }
        let layout =
            |rows, cols, swapped| layout(library, count, if swapped { [cols, rows] } else { [rows, cols] });
        let layouts = [layout(n, k, b_transposed)?, layout(k, m, a_transposed)?, layout(n, m, false)?];
        let preference = preference(library, key.align)?;
        let (mut proposal, mut proposals) = (Proposal::default(), 0);
        let [b, a, c] = &layouts;
        // SAFETY: all descriptors are alive; the library writes at most one result and their number.
        let status = unsafe {
            (library.cublasLtMatmulAlgoGetHeuristic)(
                handle.0,
                desc.raw,
                b.raw,
                a.raw,
                c.raw,
                c.raw,
                preference.raw,
                1,
                &mut proposal,
                &mut proposals,
            )
        };
        if status != 0 || proposals < 1 || proposal.state != 0 {
            tracing::debug!("cuBLASLt has nothing for {key:?}: status {status}");
            return Ok(None);
        }
        let Proposal { algo, workspace, .. } = proposal;
        Ok(Some(Self { library, handle, desc, layouts, algo, workspace }))
    }

    /// Puts the product on the stream.
    pub(super) fn enqueue(
        &self,
        at: &At<'_>,
        shape: &Gemm,
        [a, b, c]: [u64; 3],
        (workspace, bytes): (u64, usize),
    ) -> Result<()> {
        let address = |address: u64| address as usize as Raw;
        let [b_layout, a_layout, c_layout] = &self.layouts;
        // SAFETY: descriptors are alive, alpha and beta are host floats (the default pointer mode and the scale type say
        // so), read before the call returns; the algorithm was proposed for these descriptors.
        check("cublasLtMatmul", unsafe {
            (self.library.cublasLtMatmul)(
                self.handle.0,
                self.desc.raw,
                std::ptr::from_ref(&shape.alpha).cast(),
                address(b),
                b_layout.raw,
                address(a),
                a_layout.raw,
                std::ptr::from_ref(&shape.beta).cast(),
                address(c),
                c_layout.raw,
                address(c),
                c_layout.raw,
                &self.algo,
                address(workspace),
                bytes,
                at.stream(),
            )
        })
    }
}

/// `count` column-major f32 matrices, one after the other.
fn layout(library: &'static CublasLt, count: i32, [rows, cols]: [usize; 2]) -> Result<Descriptor> {
    let mut raw = std::ptr::null_mut();
    let (float, ld) = (DataType::CUDA_R_32F as u32, rows as i64);
    // SAFETY: the library writes the descriptor.
    let status =
        unsafe { (library.cublasLtMatrixLayoutCreate)(&mut raw, float, rows as u64, cols as u64, ld) };
    check("cublasLtMatrixLayoutCreate", status)?;
    let made = Descriptor { raw, destroy: library.cublasLtMatrixLayoutDestroy };
    let set = |attribute: Layout, value: &[u8]| {
        // SAFETY: the descriptor is alive, the value outlives the call and has the attribute's size.
        check("cublasLtMatrixLayoutSetAttribute", unsafe {
            let (from, bytes) = (value.as_ptr().cast(), value.len());
            (library.cublasLtMatrixLayoutSetAttribute)(made.raw, attribute as u32, from, bytes)
        })
    };
    if count > 1 {
        let apart = (rows * cols) as i64;
        set(Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count.to_ne_bytes())?;
        set(Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &apart.to_ne_bytes())?;
    }
    Ok(made)
}

/// Which proposals will do: sums of split products in f32 in a workspace, in a fixed order.
fn preference(library: &'static CublasLt, [a, b, c]: [u32; 3]) -> Result<Descriptor> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the library writes the descriptor.
    check("cublasLtMatmulPreferenceCreate", unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut raw) })?;
    let made = Descriptor { raw, destroy: library.cublasLtMatmulPreferenceDestroy };
    let set = |attribute: Preference, value: &[u8]| {
        // SAFETY: the descriptor is alive, the value outlives the call and has the attribute's size.
        check("cublasLtMatmulPreferenceSetAttribute", unsafe {
            let (from, bytes) = (value.as_ptr().cast(), value.len());
            (library.cublasLtMatmulPreferenceSetAttribute)(made.raw, attribute as u32, from, bytes)
        })
    };
    set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE.to_ne_bytes())?;
    set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction::COMPUTE_TYPE.to_ne_bytes())?;
    // The library's A is our B.
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b.to_ne_bytes())?;
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a.to_ne_bytes())?;
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c.to_ne_bytes())?;
    set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c.to_ne_bytes())?;
    Ok(made)
}
