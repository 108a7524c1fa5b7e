//! The trait that every op implements, and the checks that ops share.

use super::{Numerics, Op};
use crate::{DType, Error, Result, Shape, Slot};

/// How an op uses a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Overwritten, and not read before.
    Write,
    /// Read and changed in place.
    Update,
    /// Overwritten or added to; see [`Accum`].
    Accumulate(Accum),
}

impl Access {
    /// Changed in place if `updates`, else only read.
    pub(super) const fn update_if(updates: bool) -> Self {
        if updates { Self::Update } else { Self::Read }
    }

    /// Whether the old contents matter in some micro-step.
    pub fn reads(self) -> bool {
        !matches!(self, Self::Write | Self::Accumulate(Accum::Write))
    }

    /// Whether the old contents matter in this micro-step.
    pub fn reads_at(self, micro_step: u32) -> bool {
        match self {
            Self::Accumulate(accum) => accum.adds(micro_step),
            other => other.reads(),
        }
    }

    /// Whether the contents change.
    pub fn writes(self) -> bool {
        self != Self::Read
    }
}

/// One slot of an op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arg {
    /// The field's name.
    pub name: &'static str,
    /// How it is used.
    pub access: Access,
    /// The memory that the op is given.
    pub slot: Slot,
}

impl Arg {
    /// The minimum number of bytes moved for this argument.
    pub(super) fn traffic(&self) -> u64 {
        let once = self.slot.bytes() as u64;
        if self.access.reads() && self.access.writes() { 2 * once } else { once }
    }
}

/// What happens to the old contents of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accum {
    /// The op overwrites them.
    Write,
    /// The op adds to them.
    Add,
    /// The op overwrites them in the first micro-step of an optimizer step and adds to them in the later ones. This saves a
    /// pass that zeroes all gradients.
    FirstWrites,
}

impl Accum {
    /// Whether this run adds, given the index of the micro-step.
    pub fn adds(self, micro_step: u32) -> bool {
        match self {
            Self::Write => false,
            Self::Add => true,
            Self::FirstWrites => micro_step > 0,
        }
    }
}

/// The description of an op.
pub trait OpSpec {
    /// The name of this instance.
    fn name(&self) -> &'static str;
    /// Calls `f` for every slot with its name and use.
    fn visit(&mut self, f: &mut dyn FnMut(&'static str, Access, &mut Slot));
    /// Checks shapes and element types.
    fn check(&self) -> Result<()>;
    /// The accuracy of the result that it writes to this field.
    fn numerics(&self, arg: &str) -> Numerics;
    /// Floating-point operations.
    fn flops(&self) -> u64;
    /// The minimum number of bytes moved, if it is not simply every slot once.
    fn bytes(&self) -> Option<u64> {
        None
    }
    /// Pairs of fields that may share memory exactly (the op works in place).
    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }
    /// The fields that a matrix product multiplies, which tensor cores round in tf32.
    fn operands(&self) -> &'static [&'static str] {
        &[]
    }
    /// If it reads the scalar `position`: what this must stay below. `None` if every position is valid.
    fn positions(&self) -> Option<usize> {
        None
    }
}

/// Concatenates lists, which must have `N` elements in total.
pub(super) const fn concat<const N: usize>(lists: &[&[&'static str]]) -> [&'static str; N] {
    let mut all = [""; N];
    let (mut count, mut list) = (0, 0);
    while list < lists.len() {
        let mut i = 0;
        while i < lists[list].len() {
            all[count] = lists[list][i];
            count += 1;
            i += 1;
        }
        list += 1;
    }
    all
}

/// A field that holds a slot or an optional slot.
pub(super) trait SlotField {
    fn slot_mut(&mut self) -> Option<&mut Slot>;
}

impl SlotField for Slot {
    fn slot_mut(&mut self) -> Option<&mut Slot> {
        Some(self)
    }
}

impl SlotField for Option<Slot> {
    fn slot_mut(&mut self) -> Option<&mut Slot> {
        self.as_mut()
    }
}

/// Declares an op: its struct and its [`OpSpec`].
///
/// A field that is a slot is followed by how it is used: `= Read`, `= Write`, `= Update`, or `= Accumulate(a)`, where `a` is the
/// field that holds its [`Accum`]. After the struct come
/// - the op's name; where that depends on a field, all names and the index of the one it has;
/// - the check of its slots, with a [`Checker`] for the errors;
/// - the accuracy of its results, which may depend on the argument;
/// - its floating-point operations;
/// - the bytes that it moves, where these are not every slot once;
/// - pairs of slots that may be the same, where there are any;
/// - the operands of its matrix products, where there are any;
/// - what the scalar `position` must stay below, where the op reads it.
macro_rules! op {
    (
        $(#[$meta:meta])*
        pub struct $Op:ident {
            $($(#[$field_meta:meta])* pub $field:ident: $ty:ty $(= $access:ident $(($of:ident))?)?,)*
        }
        $(name $name:literal)? $(names $names:expr, $which_op:ident => $which:expr;)?
        check($check_op:ident, $c:ident) $check:block
        numerics $(($numerics_op:ident, $arg:ident))? $numerics:block
        flops($flops_op:ident) $flops:block
        $(bytes($bytes_op:ident) $bytes:block)?
        $(in_place $(($one:ident, $other:ident))+)?
        $(operands($($operand:ident),+))?
        $(positions($positions_op:ident) $positions:block)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $Op {
            $($(#[$field_meta])* pub $field: $ty,)*
        }

        impl $Op {
            /// All names that the op can have.
            pub const NAMES: &'static [&'static str] = $(&[$name])? $($names)?;
        }

        impl $crate::op::OpSpec for $Op {
            fn name(&self) -> &'static str {
                let which = 0 $(+ { let $which_op = self; $which })?;
                Self::NAMES[which]
            }

            fn visit(&mut self, f: &mut dyn FnMut(&'static str, $crate::op::Access, &mut $crate::Slot)) {
                $($(
                    let access = $crate::op::Access::$access $((self.$of))?;
                    if let Some(slot) = $crate::op::spec::SlotField::slot_mut(&mut self.$field) {
                        f(stringify!($field), access, slot);
                    }
                )?)*
            }

            fn check(&self) -> $crate::Result<()> {
                let ($check_op, $c) = (self, &$crate::op::spec::Checker($crate::op::OpSpec::name(self)));
                $check
            }

            fn numerics(&self, _arg: &str) -> $crate::op::Numerics {
                $(let ($numerics_op, $arg) = (self, _arg);)?
                $numerics
            }

            fn flops(&self) -> u64 {
                let $flops_op = self;
                $flops
            }

            $(fn bytes(&self) -> Option<u64> {
                let $bytes_op = self;
                Some($bytes)
            })?

            $(fn in_place(&self) -> &'static [(&'static str, &'static str)] {
                &[$((stringify!($one), stringify!($other)),)+]
            })?

            $(fn operands(&self) -> &'static [&'static str] {
                let Self { $($operand: _,)+ .. } = self;
                &[$(stringify!($operand)),+]
            })?

            $(fn positions(&self) -> Option<usize> {
                let $positions_op = self;
                $positions
            })?
        }
    };
}
pub(super) use op;

/// A slot and its name in error texts.
pub(super) type Named<'a> = (&'a str, &'a Slot);

/// Fields of an op with their names.
macro_rules! named {
    ($op:tt: $($field:ident),+) => {
        &[$((stringify!($field), &$op.$field)),+]
    };
}
pub(super) use named;

/// Checks that no written slot shares memory with another slot of the op, except where the op supports working in
/// place.
pub(super) fn check_aliasing(op: &Op) -> Result<()> {
    let args = op.args();
    let in_place = op.spec().in_place();
    for (i, a) in args.iter().enumerate() {
        for b in &args[i + 1..] {
            if !(a.access.writes() || b.access.writes()) || !a.slot.overlaps(&b.slot) {
                continue;
            }
            let allowed =
                in_place.iter().any(|&(x, y)| (x, y) == (a.name, b.name) || (y, x) == (a.name, b.name));
            if !(allowed && a.slot.offset == b.slot.offset && a.slot.bytes() == b.slot.bytes()) {
                return Err(Error::Op {
                    op: op.name(),
                    what: format!("`{}` and `{}` share memory", a.name, b.name),
                });
            }
        }
    }
    Ok(())
}

/// Checks slots of the op of this name, which begins the error texts.
pub(super) struct Checker(pub &'static str);

impl Checker {
    pub fn fail<T>(&self, what: String) -> Result<T> {
        Err(Error::Op { op: self.0, what })
    }

    /// Checks that `slot` has exactly this shape.
    pub fn shape(&self, name: &str, slot: &Slot, expected: impl Into<Shape>) -> Result<()> {
        let expected = expected.into();
        if slot.shape == expected {
            return Ok(());
        }
        self.fail(format!("`{name}` is {}, expected {expected}", slot.shape))
    }

    /// Checks that `slot` has this many elements, whatever its shape.
    pub fn numel(&self, name: &str, slot: &Slot, expected: usize) -> Result<()> {
        if slot.numel() == expected {
            return Ok(());
        }
        self.fail(format!("`{name}` has {} elements, expected {expected}", slot.numel()))
    }

    /// Checks that `slot`, seen as a matrix, has this many rows and columns.
    pub fn matrix(&self, name: &str, slot: &Slot, rows: usize, cols: usize) -> Result<()> {
        if slot.shape.rows() == rows && slot.shape.cols() == cols {
            return Ok(());
        }
        self.fail(format!("`{name}` is {}, expected {rows} rows of {cols}", slot.shape))
    }

    /// Checks that `slot` has this element type.
    pub fn dtype(&self, name: &str, slot: &Slot, expected: DType) -> Result<()> {
        if slot.dtype == expected {
            return Ok(());
        }
        self.fail(format!("`{name}` is {}, expected {expected}", slot.dtype))
    }

    /// Checks that all slots have exactly this shape.
    pub fn shapes(&self, slots: &[Named<'_>], expected: impl Into<Shape>) -> Result<()> {
        let expected = expected.into();
        slots.iter().try_for_each(|(name, slot)| self.shape(name, slot, expected))
    }

    /// Checks that all slots have this many elements, whatever their shapes.
    pub fn numels(&self, slots: &[Named<'_>], expected: usize) -> Result<()> {
        slots.iter().try_for_each(|(name, slot)| self.numel(name, slot, expected))
    }

    /// Checks that all slots, seen as matrices, have this many rows and columns.
    pub fn matrices(&self, slots: &[Named<'_>], rows: usize, cols: usize) -> Result<()> {
        slots.iter().try_for_each(|(name, slot)| self.matrix(name, slot, rows, cols))
    }

    /// Checks that all slots have this element type.
    pub fn dtypes(&self, slots: &[Named<'_>], expected: DType) -> Result<()> {
        slots.iter().try_for_each(|(name, slot)| self.dtype(name, slot, expected))
    }

    /// Checks that all slots have as many elements as the first, and its float type.
    pub fn same_size(&self, slots: &[Named<'_>]) -> Result<()> {
        self.same_float(slots)?;
        slots.first().map_or(Ok(()), |(_, first)| self.numels(slots, first.numel()))
    }

    /// Checks that all slots have the float type of the first.
    pub fn same_float(&self, slots: &[Named<'_>]) -> Result<()> {
        let Some(((first, reference), rest)) = slots.split_first() else { return Ok(()) };
        if !matches!(reference.dtype, DType::F32 | DType::BF16) {
            return self.fail(format!("`{first}` is {}, expected f32 or bf16", reference.dtype));
        }
        self.dtypes(rest, reference.dtype)
    }
}
