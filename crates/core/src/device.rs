//! What an engine says of its device: its name and datasheet, its memory, and limits measured on it.

use crate::DType;

/// The device an engine runs on, as far as its maker describes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceDescription {
    /// "cpu", "cuda:0", ...
    pub name: String,
    /// The name of the product, as "NVIDIA H200"; `None` where the engine runs on the host.
    pub product: Option<String>,
    /// Operations per second that the maker states for dense matrix products, by element type, where known.
    pub datasheet: Vec<(DType, f64)>,
    /// Whether experts stay in bf16 where other layers are in 8 bits, because the device has no fast 8-bit products for them.
    pub experts_in_bf16: bool,
}

impl DeviceDescription {
    /// The host under this name, without a datasheet.
    pub fn host(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Operations per second that the maker states for dense matrix products of this element type, where known.
    pub fn datasheet_flops(&self, dtype: DType) -> Option<f64> {
        self.datasheet.iter().find(|(of, _)| *of == dtype).map(|(_, rate)| *rate)
    }
}

/// The memory of an engine, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Held for pools and scratch.
    pub allocated: usize,
    /// Held, by category: pools by name, scratch, libraries.
    pub by_category: Vec<(String, usize)>,
    /// Could still be reserved; `None` where the engine works in host memory.
    pub free: Option<usize>,
    /// How much more than now was held at the peak before the first step had finished, while algorithms were chosen.
    pub freed: usize,
}

/// A limit of a device that an engine can measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Floating-point operations with this element type.
    Flops(DType),
    /// Bytes read and written.
    Bandwidth,
}

/// Upper limits of a device, measured on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Floating-point operations per second, a multiply-add counted as two.
    pub flops_per_s: f64,
    /// Bytes read and written per second, on arrays beyond the caches.
    pub bytes_per_s: f64,
}

impl Limits {
    /// The least time for so much work: that of the arithmetic or of the bytes, whichever is longer.
    pub fn least_seconds(&self, flops: u64, bytes: u64) -> f64 {
        (flops as f64 / self.flops_per_s).max(bytes as f64 / self.bytes_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_of_the_two_decides() {
        let limits = Limits { flops_per_s: 100.0, bytes_per_s: 10.0 };
        assert_eq!(limits.least_seconds(200, 10), 2.0);
        assert_eq!(limits.least_seconds(200, 30), 3.0);
        assert_eq!(limits.least_seconds(0, 0), 0.0);
    }
}
