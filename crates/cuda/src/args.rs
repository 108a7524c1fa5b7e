//! The shape and the arguments of a kernel launch, as the driver takes them.

use ironhorse_core::DType;
use ironhorse_core::eager::Array;

/// The arguments of one launch, in order. Sizes and order must be those of the kernel's signature.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Args {
    bytes: Vec<u64>,
    /// Indices of words that continue the argument before them.
    inner: Vec<usize>,
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

    /// A pointer as the caller of an eager op gave it.
    pub fn at<T>(self, pointer: *const T) -> Self {
        self.ptr(pointer.addr() as u64)
    }

    /// The addresses of arrays of an eager op.
    pub fn arrays<const N: usize>(self, arrays: [Array; N]) -> Self {
        arrays.into_iter().fold(self, |args, array| args.at(array.at))
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

    /// Sizes as `unsigned int`.
    pub fn u32s<const N: usize>(self, sizes: [usize; N]) -> Self {
        sizes.into_iter().fold(self, |args, size| args.u32(size as u32))
    }

    /// Sizes as `unsigned long long`.
    pub fn u64s<const N: usize>(self, sizes: [usize; N]) -> Self {
        sizes.into_iter().fold(self, |args, size| args.u64(size as u64))
    }

    /// `float`.
    pub fn f32(self, value: f32) -> Self {
        self.u32(value.to_bits())
    }

    /// `double`.
    pub fn f64(self, value: f64) -> Self {
        self.u64(value.to_bits())
    }

    /// A struct by value, as words of four bytes in the order of memory.
    pub fn words(mut self, words: &[u32]) -> Self {
        let start = self.bytes.len();
        let pair = |two: &[u32]| u64::from(two[0]) | u64::from(two.get(1).copied().unwrap_or(0)) << 32;
        self.bytes.extend(words.chunks(2).map(pair));
        self.inner.extend(start + 1..self.bytes.len());
        self
    }

    /// Other arguments behind these.
    pub fn extend(mut self, more: Self) -> Self {
        let start = self.bytes.len();
        self.bytes.extend(more.bytes);
        self.inner.extend(more.inner.into_iter().map(|at| start + at));
        self
    }

    /// Addresses of the values, as `cuLaunchKernelEx` takes them; valid until `self` changes.
    pub fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        let inner = &self.inner;
        let values = self.bytes.iter_mut().enumerate().filter(|(at, _)| !inner.contains(at));
        values.map(|(_, value)| std::ptr::from_mut(value).cast()).collect()
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Grid {
    /// A row of blocks.
    pub fn linear(blocks: usize, threads: u32) -> Self {
        Self::plane(blocks.max(1), 1, threads)
    }

    /// `across` by `down` blocks. More than fit 32 bits become a number that the driver refuses.
    pub fn plane(across: usize, down: usize, threads: u32) -> Self {
        let [across, down] = [across, down].map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
        Self { grid: [across, down, 1], block: [threads, 1, 1], shared: 0 }
    }

    /// Blocks whose threads share rows of this width: `THREADS` of common/row_block.cuh.
    pub fn row_blocks(blocks: usize, act: DType, width: usize) -> Self {
        let vectors = (width * act.size() / 16).max(1);
        Self::linear(blocks, vectors.div_ceil(vectors.div_ceil(256)).next_multiple_of(32) as u32)
    }

    /// The grid with this much dynamic shared memory.
    pub fn shared(self, bytes: usize) -> Self {
        Self { shared: bytes as u32, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_row_are_those_of_the_kernel() {
        let sizes = [(DType::BF16, 1600), (DType::BF16, 6400), (DType::BF16, 2048), (DType::F32, 4)];
        let threads = sizes.map(|(act, width)| Grid::row_blocks(3, act, width).block[0]);
        assert_eq!(threads, [224, 224, 256, 32]);
    }

    #[test]
    fn a_struct_is_one_argument() {
        let mut args = Args::new().u32(7).words(&[1, 2, 3]).f32(1.0);
        let at = args.pointers();
        assert_eq!(at.len(), 3);
        // SAFETY: `args` owns the words that follow each other in memory.
        let read = |at: *mut std::ffi::c_void, i: usize| unsafe { *at.cast::<u32>().add(i) };
        assert_eq!([0, 1, 2].map(|i| read(at[1], i)), [1, 2, 3]);
        assert_eq!((read(at[0], 0), read(at[2], 0)), (7, 1.0_f32.to_bits()));
    }
}
