//! Kernel arguments: values packed as the driver wants them.

/// The arguments of one launch, in order. Sizes and order must be those of the kernel's signature.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Args {
    bytes: Vec<u64>,
}

impl Args {
    pub fn new() -> Self {
        Self::default()
    }

    /// A device address.
    pub fn ptr(mut self, address: u64) -> Self {
        self.bytes.push(address);
        self
    }

    /// `unsigned int` or `int`.
    pub fn u32(mut self, value: u32) -> Self {
        self.bytes.push(u64::from(value)); // little endian: the low half comes first
        self
    }

    /// `unsigned long long` or `long long`.
    pub fn u64(mut self, value: u64) -> Self {
        self.bytes.push(value);
        self
    }

    /// `float`.
    pub fn f32(self, value: f32) -> Self {
        self.u32(value.to_bits())
    }

    /// `double`.
    pub fn f64(self, value: f64) -> Self {
        self.u64(value.to_bits())
    }

    /// Addresses of the values, as `cuLaunchKernel` takes them. Valid as long as `self` is not changed.
    pub fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        self.bytes.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect()
    }
}
