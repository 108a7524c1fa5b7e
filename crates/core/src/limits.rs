//! The peak performance of a device: the roofline that profiles are compared with.

/// The peak performance of a device, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Floating-point operations per second, a multiply-add counted as two.
    pub flops_per_s: f64,
    /// Bytes read and written per second, on arrays larger than the caches.
    pub bytes_per_s: f64,
}

impl Limits {
    /// The shortest possible time for this much work: that of the arithmetic or of the bytes, whichever is longer.
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
