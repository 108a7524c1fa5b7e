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
    /// Where it lives.
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
    /// Overwrite.
    Write,
    /// Add.
    Add,
    /// Overwrite in the first micro-step of an optimizer step, add in the later ones. This saves a pass that zeroes all
    /// gradients.
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
pub trait OpSpec: Copy {
    /// The name.
    const NAME: &'static str;
    /// All possible names, if the name depends on a field.
    const NAMES: &'static [&'static str] = &[Self::NAME];
    /// The name of this instance.
    fn name(&self) -> &'static str {
        Self::NAME
    }
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
}

/// The object-safe part of [`OpSpec`].
pub(super) trait DynSpec {
    fn name_dyn(&self) -> &'static str;
    fn visit_dyn(&mut self, f: &mut dyn FnMut(&'static str, Access, &mut Slot));
    fn check_dyn(&self) -> Result<()>;
    fn numerics_dyn(&self, arg: &str) -> Numerics;
    fn flops_dyn(&self) -> u64;
    fn bytes_dyn(&self) -> Option<u64>;
    fn in_place_dyn(&self) -> &'static [(&'static str, &'static str)];
}

impl<T: OpSpec> DynSpec for T {
    fn name_dyn(&self) -> &'static str {
        self.name()
    }
    fn visit_dyn(&mut self, f: &mut dyn FnMut(&'static str, Access, &mut Slot)) {
        self.visit(f);
    }
    fn check_dyn(&self) -> Result<()> {
        self.check()
    }
    fn numerics_dyn(&self, arg: &str) -> Numerics {
        self.numerics(arg)
    }
    fn flops_dyn(&self) -> u64 {
        self.flops()
    }
    fn bytes_dyn(&self) -> Option<u64> {
        self.bytes()
    }
    fn in_place_dyn(&self) -> &'static [(&'static str, &'static str)] {
        self.in_place()
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

/// Generates the `visit` method of an [`OpSpec`] from a list of `Access field`; in `Accumulate(a) field`, `a` is the
/// field that holds its [`Accum`].
macro_rules! slots {
    ($($access:ident $(($accum:ident))? $field:ident),* $(,)?) => {
        fn visit(
            &mut self,
            f: &mut dyn FnMut(&'static str, $crate::op::Access, &mut $crate::Slot),
        ) {
            $(let access = $crate::op::Access::$access $((self.$accum))?;
            if let Some(slot) = $crate::op::spec::SlotField::slot_mut(&mut self.$field) {
                f(stringify!($field), access, slot);
            })*
        }
    };
}
pub(super) use slots;

/// Checks that no written slot shares memory with another slot of the op, except where the op supports working in
/// place.
pub(super) fn check_aliasing(op: &Op) -> Result<()> {
    let args = op.args();
    let in_place = op.spec().in_place_dyn();
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
    pub fn fail(&self, what: String) -> Result<()> {
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

    /// Checks that all slots are f32.
    pub fn all_f32(&self, slots: &[(&str, &Slot)]) -> Result<()> {
        slots.iter().try_for_each(|(name, slot)| self.dtype(name, slot, DType::F32))
    }

    /// Checks that all slots have the float type of the first.
    pub fn same_float(&self, slots: &[(&str, &Slot)]) -> Result<()> {
        let Some(((first, reference), rest)) = slots.split_first() else { return Ok(()) };
        if !matches!(reference.dtype, DType::F32 | DType::BF16) {
            return self.fail(format!("`{first}` is {}, expected f32 or bf16", reference.dtype));
        }
        rest.iter().try_for_each(|(name, slot)| self.dtype(name, slot, reference.dtype))
    }
}
