//! Shapes of up to four dimensions, `Copy`.

use std::fmt;

/// The dimensions of a slot, outermost first, row-major.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Shape::MAX_RANK],
    rank: u8,
}

impl Shape {
    /// The maximum number of dimensions.
    pub const MAX_RANK: usize = 4;

    /// A shape of `N` dimensions.
    pub const fn new<const N: usize>(dims: [usize; N]) -> Self {
        const { assert!(N <= Shape::MAX_RANK) };
        let mut all = [1; Self::MAX_RANK];
        let mut i = 0;
        while i < N {
            all[i] = dims[i];
            i += 1;
        }
        Self { dims: all, rank: N as u8 }
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// The number of elements; `usize::MAX` if the product overflows, which no pool can hold.
    pub fn numel(&self) -> usize {
        product(self.dims())
    }

    /// The last dimension; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// The product of all but the last dimension.
    pub fn rows(&self) -> usize {
        self.dims().split_last().map_or(1, |(_, outer)| product(outer))
    }
}

fn product(dims: &[usize]) -> usize {
    if dims.contains(&0) {
        return 0;
    }
    dims.iter().fold(1, |product: usize, &dim| product.saturating_mul(dim))
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self::new(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_cols_make_the_whole() {
        let shape = Shape::new([2, 3, 4]);
        assert_eq!((shape.rows(), shape.cols(), shape.numel()), (6, 4, 24));
        assert_eq!(shape.to_string(), "[2, 3, 4]");
        assert_eq!(Shape::new([usize::MAX, 2]).numel(), usize::MAX, "no wrapping to a small number");
        assert_eq!(Shape::new([usize::MAX, 2, 0]).numel(), 0);
        let scalar = Shape::new([]);
        assert_eq!((scalar.rows(), scalar.cols(), scalar.numel()), (1, 1, 1));
    }
}
