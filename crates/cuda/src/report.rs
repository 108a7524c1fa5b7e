//! What `doctor` shows: each library with its version and place, and what will be used.

pub use crate::device::Peer;

use crate::device::FP8_COMPUTE;
use crate::ffi::library::{self, Kind, Open};
use crate::ffi::nccl::version_text;
use crate::{Attention, DeviceInfo, Result};
use std::ffi::c_int;

/// One library of this machine.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    /// Its name.
    pub name: &'static str,
    /// What it is needed for.
    pub purpose: &'static str,
    /// Version and path, or why it cannot be used.
    pub found: Result<(String, String)>,
}

/// Every library, found or not.
pub fn libraries() -> Vec<LibraryReport> {
    library::ALL
        .into_iter()
        .map(|kind| LibraryReport { name: kind.name, purpose: kind.purpose, found: look(kind) })
        .collect()
}

/// How the GPUs of this machine reach each other.
pub fn peers() -> Result<Vec<Peer>> {
    crate::device::peers()
}

fn look(kind: Kind) -> Result<(String, String)> {
    let open = Open::find(kind)?;
    Ok((version(kind, &open)?, open.path().display().to_string()))
}

/// Asks a library for its version.
fn version(kind: Kind, open: &Open) -> Result<String> {
    let number =
        |n: usize, major: usize, minor: usize| format!("{}.{}.{}", n / major, n % major / minor, n % minor);
    // SAFETY: the signatures are those of the libraries' headers; the functions only write their result.
    unsafe {
        Ok(if kind == library::DRIVER {
            let mut version: c_int = 0;
            open.symbol::<unsafe extern "C" fn(*mut c_int) -> u32>("cuDriverGetVersion")?(&mut version);
            format!("for CUDA {}.{}", version / 1000, version % 1000 / 10)
        } else if kind == library::NVRTC {
            let (mut major, mut minor): (c_int, c_int) = (0, 0);
            open.symbol::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> i32>("nvrtcVersion")?(
                &mut major, &mut minor,
            );
            format!("{major}.{minor}")
        } else if kind == library::CUBLASLT {
            number(open.symbol::<unsafe extern "C" fn() -> usize>("cublasLtGetVersion")?(), 10_000, 100)
        } else if kind == library::CUDNN {
            number(open.symbol::<unsafe extern "C" fn() -> usize>("cudnnGetVersion")?(), 10_000, 100)
        } else if kind == library::NCCL {
            let mut version: c_int = 0;
            open.symbol::<unsafe extern "C" fn(*mut c_int) -> i32>("ncclGetVersion")?(&mut version);
            version_text(version)
        } else if Open::find(library::DRIVER).is_err() {
            // Without a driver CUPTI recurses endlessly.
            "version not asked for without a driver".into()
        } else {
            let mut version = 0_u32;
            open.symbol::<unsafe extern "C" fn(*mut u32) -> u32>("cuptiGetVersion")?(&mut version);
            version.to_string()
        })
    }
}

/// What each choice will be on a device, in words.
pub fn choices(device: &DeviceInfo, libraries: &[LibraryReport]) -> Vec<(&'static str, String)> {
    let has = |kind: Kind| libraries.iter().any(|library| library.name == kind.name && library.found.is_ok());
    let attention = match (has(library::CUDNN), Attention::default()) {
        (true, _) => "cuDNN for bf16, our kernels for f32 and for shapes it refuses",
        (false, _) => "our flash-attention kernels (cuDNN is missing)",
    };
    let fp8 = match (device.has_fp8(), FP8_COMPUTE) {
        (true, _) if device.has_fp8_experts() => {
            "cuBLASLt, our kernels for experts, in training with --dtype fp8".into()
        }
        (true, _) => "cuBLASLt, in training with --dtype fp8; experts stay in bf16".into(),
        (false, (major, minor)) => format!("none: they need compute capability {major}.{minor} or newer"),
    };
    let timings = if has(library::CUPTI) { "CUPTI" } else { "events around each launch (CUPTI is missing)" };
    vec![
        ("kernels", format!("compiled by NVRTC for {}", device.arch())),
        ("products", "cuBLASLt, the fastest algorithm found for each shape".into()),
        ("8-bit products", fp8),
        ("attention", attention.into()),
        ("timings", timings.into()),
    ]
}
