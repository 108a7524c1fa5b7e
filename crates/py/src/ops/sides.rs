//! Sizes and sides of arrays in memory that needs no allocation: a small op takes as long as one.

use std::ops::Deref;

/// Sizes by position in the op's arguments.
#[derive(Clone, Copy)]
pub struct Sizes<const N: usize> {
    /// Bit i: the size of argument i is known.
    known: u32,
    values: [i64; N],
}

impl<const N: usize> Sizes<N> {
    /// Sizes of which none is known.
    pub const NONE: Self = Self { known: 0, values: [0; N] };

    /// A size, if it is known.
    pub fn get(&self, i: usize) -> Option<i64> {
        (self.known >> i & 1 == 1).then_some(self.values[i])
    }

    /// Sets a size.
    pub fn set(&mut self, i: usize, size: i64) {
        self.known |= 1 << i;
        self.values[i] = size;
    }

    /// Sets a size unless it is known; the size.
    pub fn get_or_set(&mut self, i: usize, size: i64) -> i64 {
        if self.known >> i & 1 == 0 {
            self.set(i, size);
        }
        self.values[i]
    }
}

/// A shape to be made, which needs no allocation if it has few sides.
pub struct Sides {
    few: [usize; 8],
    len: usize,
    many: Vec<usize>,
}

impl Sides {
    /// No sides.
    pub const NONE: Self = Self { few: [0; 8], len: 0, many: Vec::new() };

    /// Adds sides.
    pub fn extend(&mut self, sides: &[usize]) {
        let len = self.len + sides.len();
        match self.few.get_mut(self.len..len) {
            Some(room) => room.iter_mut().zip(sides).for_each(|(to, side)| *to = *side),
            None => {
                let before = if self.many.is_empty() { &self.few[..self.len] } else { &[] };
                self.many.extend(before.iter().chain(sides));
            }
        }
        self.len = len;
    }
}

impl Deref for Sides {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        self.few.get(..self.len).unwrap_or(&self.many)
    }
}

/// Whether shapes are equal: a loop, because comparing so few bytes by `memcmp` takes longer.
pub fn same(a: &[usize], b: &[usize]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b)
}
