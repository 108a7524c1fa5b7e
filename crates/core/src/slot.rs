//! Slots: where a tensor lives. Plain data, no lifetimes.

use crate::{DType, Error, Result, Shape};
use std::fmt;
use std::ops::Range;

/// A memory region that an engine keeps for a program. Pools differ in who lays them out and how long they live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pool {
    /// The weights, in the order of the parameter table.
    Params,
    /// Gradients of the weights, laid out like [`Pool::Params`].
    Grads,
    /// First moments of AdamW, laid out like [`Pool::Params`].
    Moment1,
    /// Second moments of AdamW, laid out like [`Pool::Params`].
    Moment2,
    /// Master weights where [`Pool::Params`] is bf16: f32, or the i16 residual of
    /// [`split_master`](crate::split_master). Laid out like [`Pool::Params`].
    Master,
    /// Weights that are not trained: those of the base, where adapters are. Without gradients and moments.
    Frozen,
    /// Inputs and results of a step (tokens, targets, loss, norm): live for the whole step.
    Io,
    /// Keys and values of earlier positions: live from one run to the next.
    Cache,
    /// The largest elements of tensors in 8 bits, of earlier steps and of this one: live from step to step, and are part of
    /// what a run resumes from. All are f32.
    Scales,
    /// Everything between inputs and results; the planner reuses this memory by liveness.
    Activations,
}

impl Pool {
    /// All pools, in index order.
    pub const ALL: [Self; 10] = [
        Self::Params,
        Self::Grads,
        Self::Moment1,
        Self::Moment2,
        Self::Master,
        Self::Frozen,
        Self::Io,
        Self::Cache,
        Self::Scales,
        Self::Activations,
    ];

    /// Position in [`Pool::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name in memory reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Params => "parameters",
            Self::Grads => "gradients",
            Self::Moment1 => "first moments",
            Self::Moment2 => "second moments",
            Self::Master => "master weights",
            Self::Frozen => "frozen weights",
            Self::Io => "inputs and results",
            Self::Cache => "key/value cache",
            Self::Scales => "scales of 8-bit tensors",
            Self::Activations => "activations",
        }
    }
}

/// The alignment of slots in bytes: a cache line, and at least as wide as any vector register. In a
/// [`param_group`](crate::Builder::param_group) only the first member is aligned to it.
pub const ALIGN: usize = 64;

/// Where a tensor is stored: pool, byte offset, shape and element type. Always contiguous and row-major.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The memory region.
    pub pool: Pool,
    /// Byte offset in the pool. Virtual while a program is being built, real once it is planned.
    pub offset: usize,
    /// Dimensions.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

impl Slot {
    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.numel().saturating_mul(self.dtype.size())
    }

    /// The offset in the pool one past the last byte.
    pub fn end(&self) -> usize {
        self.offset.saturating_add(self.bytes())
    }

    /// Whether the two slots share memory.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.pool == other.pool
            && self.bytes() > 0
            && other.bytes() > 0
            && self.offset < other.end()
            && other.offset < self.end()
    }

    /// The same memory seen with another shape of the same size.
    pub fn view(self, shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        debug_assert_eq!(shape.numel(), self.numel(), "a view keeps the number of elements");
        Self { shape, ..self }
    }

    /// A range of the slot's rows, in which all dimensions but the last count as one.
    pub fn rows(self, rows: Range<usize>) -> Self {
        debug_assert!(rows.end <= self.shape.rows(), "rows of the slot");
        let cols = self.shape.cols();
        let offset = self.offset + rows.start * cols * self.dtype.size();
        Self { offset, shape: Shape::new([rows.len(), cols]), ..self }
    }

    /// Adjacent slots (no gaps between them) seen as one slot of this shape.
    ///
    /// # Errors
    /// The slots are not adjacent, or their elements do not add up to the shape.
    pub fn joined(slots: &[Self], shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let adjoin = |pair: &[Self]| {
            pair[0].pool == pair[1].pool && pair[0].dtype == pair[1].dtype && pair[0].end() == pair[1].offset
        };
        let Some(first) = slots.first().filter(|_| slots.windows(2).all(adjoin)) else {
            return Err(Error::Program(format!("slots are not adjacent in memory: {slots:?}")));
        };
        let count: usize = slots.iter().map(Self::numel).sum();
        if count != shape.numel() {
            return Err(Error::Program(format!("{count} elements cannot have shape {shape}")));
        }
        Ok(Self { shape, ..*first })
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}+{} {} {}", self.pool, self.offset, self.dtype, self.shape)
    }
}

/// Rounds a byte count up to a multiple of [`ALIGN`].
pub const fn align_up(bytes: usize) -> usize {
    bytes.div_ceil(ALIGN) * ALIGN
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(pool: Pool, offset: usize, n: usize) -> Slot {
        Slot { pool, offset, shape: Shape::new([n]), dtype: DType::F32 }
    }

    #[test]
    fn overlap_needs_the_same_pool_and_a_shared_byte() {
        let a = slot(Pool::Activations, 0, 16);
        assert!(a.overlaps(&slot(Pool::Activations, 60, 1)));
        assert!(!a.overlaps(&slot(Pool::Activations, 64, 1)));
        assert!(!a.overlaps(&slot(Pool::Params, 0, 16)));
        assert!(!a.overlaps(&slot(Pool::Activations, 8, 0)), "an empty slot touches nothing");
    }

    #[test]
    fn rows_are_where_they_are_in_the_whole() {
        let all = Slot { shape: Shape::new([2, 3, 5]), ..slot(Pool::Io, 64, 30) };
        let some = all.rows(2..6);
        assert_eq!((some.offset, some.shape, some.end()), (64 + 2 * 5 * 4, Shape::new([4, 5]), all.end()));
        assert_eq!(all.rows(6..6).numel(), 0);
    }

    #[test]
    fn absurd_slots_end_beyond_every_pool() {
        assert_eq!(slot(Pool::Io, usize::MAX - 3, 1).end(), usize::MAX);
        assert_eq!(slot(Pool::Io, 0, usize::MAX).end(), usize::MAX);
    }

    #[test]
    fn pools_index_themselves() {
        for (i, pool) in Pool::ALL.into_iter().enumerate() {
            assert_eq!(pool.index(), i);
        }
    }
}
