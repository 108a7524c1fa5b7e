//! cuDNN's backend interface: handles, and descriptors with attributes.

use super::library::{CUDNN, functions};
use crate::{Error, Result};
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_void};

functions! {
    /// cuDNN's functions. Enumerations cross as the numbers of its headers, which are the same in all of version 9.
    Cudnn of CUDNN;
    fn cudnnGetVersion() -> usize;
    fn cudnnCreate(*mut *mut c_void) -> i32;
    fn cudnnDestroy(*mut c_void) -> i32;
    fn cudnnSetStream(*mut c_void, CUstream) -> i32;
    fn cudnnGetErrorString(i32) -> *const c_char;
    fn cudnnGetLastErrorString(*mut c_char, usize) -> ();
    fn cudnnBackendCreateDescriptor(u32, *mut *mut c_void) -> i32;
    fn cudnnBackendDestroyDescriptor(*mut c_void) -> i32;
    fn cudnnBackendFinalize(*mut c_void) -> i32;
    fn cudnnBackendSetAttribute(*mut c_void, u32, u32, i64, *const c_void) -> i32;
    fn cudnnBackendGetAttribute(*mut c_void, u32, u32, i64, *mut i64, *mut c_void) -> i32;
    fn cudnnBackendExecute(*mut c_void, *mut c_void, *mut c_void) -> i32;
}

impl Cudnn {
    /// 91400 for 9.14.0.
    pub fn version(&self) -> usize {
        // SAFETY: the function has no arguments and returns a constant.
        unsafe { (self.cudnnGetVersion)() }
    }

    /// Turns a status into a result; `about` says what the call was for.
    pub fn check(&self, call: &'static str, about: impl FnOnce() -> String, status: i32) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: cuDNN returns a pointer to a static text for any number.
        let name = unsafe { text((self.cudnnGetErrorString)(status)) };
        let mut last = [0 as c_char; 2048];
        // SAFETY: cuDNN writes at most as many bytes as we say, ended with 0; the last byte stays 0 in any case.
        let reason = unsafe {
            (self.cudnnGetLastErrorString)(last.as_mut_ptr(), last.len() - 1);
            text(last.as_ptr())
        };
        let detail = format!(" ({name}) for {}; cuDNN says: {}", about(), reason.trim());
        Err(Error::Library { library: "cuDNN", call, status: i64::from(status), detail })
    }
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
