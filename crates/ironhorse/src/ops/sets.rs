//! The arguments of an op by kind: a call, which takes less than a microsecond, looks at those it needs and at no others.

use super::arg::{Arg, Bound, Dim, Elem, Role};

/// Arguments that an op has at most.
pub const MOST: usize = 16;

/// Positions of arguments in the op's list, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArgSet(u32);

impl ArgSet {
    /// The first argument alone.
    pub(super) const FIRST: Self = Self(1);
    pub(super) const NONE: Self = Self(0);

    pub(super) const fn with(self, position: usize) -> Self {
        Self(self.0 | 1 << position)
    }

    /// Whether a position is in it.
    #[inline]
    pub const fn has(self, position: usize) -> bool {
        self.0 >> position & 1 == 1
    }

    /// The positions in it that are lower than `position`.
    #[inline]
    pub const fn before(self, position: usize) -> Self {
        Self(self.0 & ((1 << position) - 1))
    }

    const fn with_if(self, condition: bool, position: usize) -> Self {
        if condition { self.with(position) } else { self }
    }
}

impl IntoIterator for ArgSet {
    type Item = usize;
    type IntoIter = Positions;

    #[inline]
    fn into_iter(self) -> Positions {
        Positions(self.0)
    }
}

/// The positions of an [`ArgSet`].
#[derive(Clone, Debug)]
pub struct Positions(u32);

impl Iterator for Positions {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let first = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(first)
    }
}

/// The arguments of an op by kind.
#[derive(Clone, Copy, Debug)]
pub struct ArgSets {
    /// Arrays that the op uses.
    pub arrays: ArgSet,
    /// Arrays that Python must be given, and those that the op ignores.
    pub inputs: ArgSet,
    /// Arrays that Python may make: outputs, and seeds.
    pub made: ArgSet,
    /// Arrays that are written and not read.
    pub writes: ArgSet,
    /// Arrays that are written, read or not.
    pub written: ArgSet,
    /// Arrays with a side that is at least a sum of sizes.
    pub least: ArgSet,
    /// Arrays with a side that the largest index tells.
    pub above: ArgSet,
    /// Indices that must be in range.
    pub indices: ArgSet,
    /// Sizes.
    pub sizes: ArgSet,
    /// Sizes that arrays tell.
    pub solved: ArgSet,
    /// Numbers, integers that are not sizes, and flags.
    pub scalars: ArgSet,
    /// Sizes, and numbers with a bound.
    pub bounded: ArgSet,
    /// Sizes with [`Bound::Classes`].
    pub classes: ArgSet,
}

impl ArgSets {
    pub(super) const fn of(args: &[Arg]) -> Self {
        let none = ArgSet::NONE;
        let mut sets = Self {
            arrays: none,
            inputs: none,
            made: none,
            writes: none,
            written: none,
            least: none,
            above: none,
            indices: none,
            sizes: none,
            solved: none,
            scalars: none,
            bounded: none,
            classes: none,
        };
        let mut i = 0;
        while i < args.len() {
            let arg = &args[i];
            let write = matches!(arg.role, Role::Write(_));
            let size = arg.role.is_size();
            let array = arg.role.elem().is_some();
            sets.arrays = sets.arrays.with_if(array, i);
            sets.inputs = sets.inputs.with_if(array && !write || matches!(arg.role, Role::Unused), i);
            sets.made = sets.made.with_if(write || matches!(arg.role, Role::Read(Elem::U64)), i);
            sets.writes = sets.writes.with_if(write, i);
            sets.written = sets.written.with_if(arg.role.written(), i);
            let mut side = 0;
            while side < arg.dims.len() {
                sets.least = sets.least.with_if(matches!(arg.dims[side], Dim::AtLeast(..)), i);
                sets.above = sets.above.with_if(matches!(arg.dims[side], Dim::Above(_)), i);
                side += 1;
            }
            sets.indices = sets.indices.with_if(arg.below.is_some(), i);
            sets.sizes = sets.sizes.with_if(size, i);
            sets.solved = sets.solved.with_if(arg.solved(), i);
            let scalar = matches!(arg.role, Role::Number | Role::Double | Role::Int | Role::Flag);
            sets.scalars = sets.scalars.with_if(scalar, i);
            sets.bounded = sets.bounded.with_if(size || scalar && !matches!(arg.bound, Bound::Any), i);
            sets.classes = sets.classes.with_if(matches!(arg.bound, Bound::Classes), i);
            i += 1;
        }
        assert!(args.len() <= MOST, "calls have room for so many arguments");
        assert!(sets.indices.0.count_ones() <= 1, "Python copies the indices of one array");
        sets
    }
}
