//! What an error means to a caller: the one place that knows the codes of the driver and of the libraries.

use super::Error;

/// What a caller can do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// No such device, or its driver or a library is missing: install it or choose another device.
    NotFound,
    /// Too little memory: make something smaller.
    OutOfMemory,
    /// The device failed in the middle of its work and may not answer any more: restart the process.
    DeviceLost,
    /// The engine cannot do this: an element type, a size, an architecture.
    Unsupported,
    /// A value or a size that the caller gave is invalid.
    BadInput,
}

/// Codes of the driver that mean that there is no device to use.
const NO_DEVICE: [&str; 8] = [
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_INVALID_DEVICE",
    "CUDA_ERROR_DEVICE_NOT_LICENSED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_NOT_INITIALIZED",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
];
/// Codes of the driver that mean that a kernel did something it must not do. The context is unusable from then on.
const KERNEL_FAULT: [&str; 9] = [
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_ASSERT",
];
/// `CUBLAS_STATUS_ALLOC_FAILED`, and `CUDNN_STATUS_INTERNAL_ERROR_*ALLOCATION_FAILED` of the device and of the host.
const ALLOCATION_FAILED: [(&str, i64); 3] = [("cuBLASLt", 3), ("cuDNN", 4003), ("cuDNN", 4004)];
/// `CUBLAS_STATUS_ARCH_MISMATCH` and `CUBLAS_STATUS_NOT_SUPPORTED`; all of cuDNN's 3000 are `CUDNN_STATUS_NOT_SUPPORTED_*`.
const NOT_SUPPORTED: [(&str, i64); 2] = [("cuBLASLt", 8), ("cuBLASLt", 15)];

impl Error {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::LibraryMissing { .. } | Self::SymbolMissing { .. } | Self::NoDevice(_) => {
                ErrorKind::NotFound
            }
            Self::OutOfMemory(_) => ErrorKind::OutOfMemory,
            Self::Compile { .. } | Self::Unsupported(_) => ErrorKind::Unsupported,
            Self::Input(_) | Self::Core(_) => ErrorKind::BadInput,
            Self::Driver { name, .. } => driver_kind(code(name)),
            Self::Library { library, status, .. } => library_kind(library, *status),
        }
    }

    /// Whether a kernel read or wrote where it must not, or ran into a trap: this one, or one launched before it.
    pub(crate) fn is_kernel_fault(&self) -> bool {
        matches!(self, Self::Driver { name, .. } if KERNEL_FAULT.contains(&code(name)))
    }
}

/// The name of a code without the kernel that [`crate::user::Kernel`] puts before it.
fn code(name: &str) -> &str {
    name.rsplit(' ').next().unwrap_or(name)
}

fn driver_kind(name: &str) -> ErrorKind {
    match name {
        _ if NO_DEVICE.contains(&name) => ErrorKind::NotFound,
        "CUDA_ERROR_OUT_OF_MEMORY" => ErrorKind::OutOfMemory,
        "CUDA_ERROR_NOT_SUPPORTED" | "CUDA_ERROR_NO_BINARY_FOR_GPU" => ErrorKind::Unsupported,
        "CUDA_ERROR_INVALID_VALUE" | "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" => ErrorKind::BadInput,
        _ => ErrorKind::DeviceLost,
    }
}

fn library_kind(library: &str, status: i64) -> ErrorKind {
    match (library, status) {
        code if ALLOCATION_FAILED.contains(&code) => ErrorKind::OutOfMemory,
        code if NOT_SUPPORTED.contains(&code) => ErrorKind::Unsupported,
        ("cuDNN", 3000..4000) => ErrorKind::Unsupported,
        _ => ErrorKind::DeviceLost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_what_a_caller_can_act_on() {
        let driver = |name: &str| Error::Driver { call: "cuX", name: name.into(), text: String::new() };
        assert_eq!(driver("CUDA_ERROR_OUT_OF_MEMORY").kind(), ErrorKind::OutOfMemory);
        assert_eq!(driver("CUDA_ERROR_INVALID_DEVICE").kind(), ErrorKind::NotFound);
        assert_eq!(driver("CUDA_ERROR_NOT_SUPPORTED").kind(), ErrorKind::Unsupported);
        assert_eq!(driver("CUDA_ERROR_INVALID_VALUE").kind(), ErrorKind::BadInput);
        let lost = driver("CUDA_ERROR_ILLEGAL_ADDRESS");
        assert!(lost.is_kernel_fault() && lost.kind() == ErrorKind::DeviceLost);
        assert!(driver("kernel wild: CUDA_ERROR_ASSERT").is_kernel_fault());
        assert!(!driver("CUDA_ERROR_ECC_UNCORRECTABLE").is_kernel_fault());
        let library =
            |library, status| Error::Library { library, call: "call", status, detail: String::new() }.kind();
        assert_eq!(library("cuBLASLt", 3), ErrorKind::OutOfMemory);
        assert_eq!(library("cuBLASLt", 15), ErrorKind::Unsupported);
        assert_eq!(library("cuDNN", 3007), ErrorKind::Unsupported);
        assert_eq!(library("cuDNN", 3), ErrorKind::DeviceLost);
    }
}
