//! The functions of cuBLASLt, and what their status codes mean.

use super::library::{self, CUBLASLT, functions};
use crate::Result;
use std::ffi::{c_int, c_void};

type Raw = *mut c_void;

functions! {
    /// cuBLASLt's functions.
    CublasLt of CUBLASLT;
    fn cublasLtGetVersion() -> usize;
    fn cublasLtCreate(*mut Raw) -> i32;
    fn cublasLtDestroy(Raw) -> i32;
    fn cublasLtMatmulDescCreate(*mut Raw, u32, u32) -> i32;
    fn cublasLtMatmulDescDestroy(Raw) -> i32;
    fn cublasLtMatmulDescSetAttribute(Raw, u32, *const c_void, usize) -> i32;
    fn cublasLtMatrixLayoutCreate(*mut Raw, u32, u64, u64, i64) -> i32;
    fn cublasLtMatrixLayoutDestroy(Raw) -> i32;
    fn cublasLtMatrixLayoutSetAttribute(Raw, u32, *const c_void, usize) -> i32;
    fn cublasLtMatmulPreferenceCreate(*mut Raw) -> i32;
    fn cublasLtMatmulPreferenceDestroy(Raw) -> i32;
    fn cublasLtMatmulPreferenceSetAttribute(Raw, u32, *const c_void, usize) -> i32;
    fn cublasLtMatmulAlgoGetHeuristic(Raw, Raw, Raw, Raw, Raw, Raw, Raw, c_int, *mut Found, *mut c_int) -> i32;
    fn cublasLtMatmulAlgoCheck(Raw, Raw, Raw, Raw, Raw, Raw, *const Algo, *mut Found) -> i32;
    fn cublasLtMatmul(Raw, Raw, *const c_void, *const c_void, Raw, *const c_void, Raw, *const c_void, *const c_void, Raw, *mut c_void, Raw, *const Algo, *mut c_void, usize, *mut c_void) -> i32;
}

/// An algorithm with its configuration: opaque, plain data, good for any process with the same library and device.
pub type Algo = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`, with the status as a number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Found {
    /// The algorithm.
    pub algo: Algo,
    /// Bytes of workspace it needs.
    pub workspace: usize,
    /// 0 if the other fields mean anything.
    pub state: i32,
    /// How often it fills the device.
    pub waves: f32,
    reserved: [c_int; 4],
}

/// `CUBLASLT_REDUCTION_SCHEME_*`: how the parts of a dot product that was split are added up.
pub mod reduction {
    /// They are added in f32, in a workspace.
    pub const COMPUTE_TYPE: u32 = 2;
    /// They are added in the element type of the result, in a workspace.
    pub const OUTPUT_TYPE: u32 = 4;
}

/// A status of the library as a result.
pub(crate) fn check(call: &'static str, status: i32) -> Result<()> {
    let detail = match status {
        1 => " (not initialized)",
        3 => " (out of memory)",
        7 => " (invalid value)",
        8 => " (not on this architecture)",
        13 => " (execution failed)",
        14 => " (internal error)",
        15 => " (not supported)",
        _ => "",
    };
    library::check("cuBLASLt", call, status.into(), detail)
}
