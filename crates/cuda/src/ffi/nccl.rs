//! NCCL: what several GPUs send each other. Loaded only where there are several.

use super::library::{NCCL, functions};
use crate::{Error, Result};
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_void};

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

functions! {
    /// NCCL's functions.
    NcclLibrary of NCCL;
    fn ncclGetVersion(*mut i32) -> i32;
    fn ncclGetUniqueId(*mut UniqueId) -> i32;
    fn ncclCommInitRank(*mut *mut c_void, i32, UniqueId, i32) -> i32;
    fn ncclCommDestroy(*mut c_void) -> i32;
    fn ncclCommAbort(*mut c_void) -> i32;
    fn ncclCommGetAsyncError(*mut c_void, *mut i32) -> i32;
    fn ncclGetErrorString(i32) -> *const c_char;
    fn ncclGetLastError(*mut c_void) -> *const c_char;
    fn ncclGroupStart() -> i32;
    fn ncclGroupEnd() -> i32;
    fn ncclSend(*const c_void, usize, i32, i32, *mut c_void, CUstream) -> i32;
    fn ncclRecv(*mut c_void, usize, i32, i32, *mut c_void, CUstream) -> i32;
    fn ncclReduce(*const c_void, *mut c_void, usize, i32, i32, i32, *mut c_void, CUstream) -> i32;
    fn ncclAllReduce(*const c_void, *mut c_void, usize, i32, i32, *mut c_void, CUstream) -> i32;
    fn ncclBroadcast(*const c_void, *mut c_void, usize, i32, i32, *mut c_void, CUstream) -> i32;
}

/// `ncclInt8`: bytes are moved as they are.
pub const BYTES: i32 = 0;
/// `ncclFloat32`
pub const FLOAT32: i32 = 7;
/// `ncclBfloat16`
pub const BFLOAT16: i32 = 9;
/// `ncclSum`
pub const SUM: i32 = 0;
/// `ncclInvalidUsage`
const INVALID_USAGE: i32 = 5;
/// `ncclInProgress`
const IN_PROGRESS: i32 = 7;
/// The oldest version with what is called here.
const OLDEST: i32 = 21_300;

impl NcclLibrary {
    /// 22803 for 2.28.3.
    pub fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: the function writes one number.
        unsafe { (self.ncclGetVersion)(&mut version) };
        version
    }

    /// Loads it and refuses one that is too old.
    pub fn open() -> Result<Self> {
        let library = Self::load()?;
        let version = library.version();
        if version >= OLDEST {
            return Ok(library);
        }
        let (path, install) = (library.path().display(), NCCL.install());
        Err(Error::Unsupported(format!(
            "NCCL {} in {path} is too old, expected {} or newer; {install}",
            version_text(version),
            version_text(OLDEST)
        )))
    }

    /// Fails if something went wrong in what a communicator does by itself: a link that broke, a rank that does not answer.
    ///
    /// # Safety
    /// The communicator is there, and nobody frees it meanwhile.
    pub unsafe fn check_async(&self, comm: *mut c_void) -> Result<()> {
        let mut status = 0;
        // SAFETY: the caller guarantees the communicator; the function writes one number.
        let asked = unsafe { (self.ncclCommGetAsyncError)(comm, &mut status) };
        self.check("ncclCommGetAsyncError", asked)?;
        if status == IN_PROGRESS { Ok(()) } else { self.check("an exchange", status) }
    }

    /// Turns a status into a result.
    pub fn check(&self, call: &'static str, status: i32) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns static texts for any number, and the last error of this process for no communicator.
        let (name, last) = unsafe {
            (text((self.ncclGetErrorString)(status)), text((self.ncclGetLastError)(std::ptr::null_mut())))
        };
        let hint = match status {
            INVALID_USAGE => {
                "; two ranks on one GPU need NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment"
            }
            _ => "",
        };
        let detail = format!(" ({name}); NCCL says: {}{hint}", last.trim());
        Err(Error::Library { library: "NCCL", call, status: i64::from(status), detail })
    }
}

/// 2.28.3 of 22803.
pub fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// # Safety
/// `words` is null or a text that ends with 0.
unsafe fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees the terminating 0.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}
