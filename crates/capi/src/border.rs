//! Codes and texts of errors, and the functions that are not ops.

use facade::ops::{self, Code};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Done.
pub const IH_SUCCESS: i32 = 0;
/// The device the memory is on cannot be used.
pub const IH_NOT_AVAILABLE: i32 = -1;
/// An argument is invalid; ih_last_error() names it.
pub const IH_INVALID_VALUE: i32 = -2;
/// The computation could not be started, or failed.
pub const IH_LAUNCH_FAILED: i32 = -3;
/// There is not enough memory.
pub const IH_OUT_OF_MEMORY: i32 = -4;

const _: () = {
    assert!(IH_SUCCESS == Code::Success as i32 && IH_NOT_AVAILABLE == Code::NotAvailable as i32);
    assert!(IH_INVALID_VALUE == Code::InvalidValue as i32 && IH_LAUNCH_FAILED == Code::LaunchFailed as i32);
    assert!(IH_OUT_OF_MEMORY == Code::OutOfMemory as i32);
};

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn remember(text: &str) {
    // A nul would end the text early; the text of a panic may have one.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // Fails only in a thread that is ending.
    let _ = LAST.try_with(|last| last.replace(text));
}

/// Runs an op: its code, with the text kept; a panic becomes IH_LAUNCH_FAILED.
pub(crate) fn answer(op: impl FnOnce() -> ops::Result) -> i32 {
    match catch_unwind(AssertUnwindSafe(op)) {
        Ok(Ok(())) => IH_SUCCESS,
        Ok(Err(error)) => {
            remember(&error.text);
            error.code.as_i32()
        }
        Err(payload) => {
            remember(&format!("internal error: {}", panic_text(payload.as_ref())));
            IH_LAUNCH_FAILED
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a text")
}

/// What was wrong with the last call of this thread that failed; an empty text if none did. The text is valid until the next
/// call of this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn ih_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The version of the library, as in "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn ih_version() -> *const c_char {
    VERSION.as_ptr()
}

/// 1 if the functions can run on a CUDA device, for its memory; 0 if they run on the host only.
#[unsafe(no_mangle)]
pub extern "C" fn ih_cuda_available() -> c_int {
    ops::cuda_available().into()
}

/// Sets how many threads large calls may use, in the whole process; 0, the default, means one for each core. Results do not
/// depend on it. A negative number is IH_INVALID_VALUE.
#[unsafe(no_mangle)]
pub extern "C" fn ih_set_threads(threads: c_int) -> i32 {
    match usize::try_from(threads) {
        Ok(threads) => {
            ops::set_threads(threads);
            IH_SUCCESS
        }
        Err(_) => {
            remember(&format!("ih_set_threads: `threads` is {threads}, expected at least 0"));
            IH_INVALID_VALUE
        }
    }
}
