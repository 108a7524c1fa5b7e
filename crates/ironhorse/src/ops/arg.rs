//! One argument of an op, as data: its role, shape, bounds and default.

pub(super) const fn equal(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// The position of a name, at compile time: one that is not in the list is an index out of range there.
pub(super) const fn position(names: &[&str], name: &str) -> usize {
    let mut i = 0;
    while !equal(names[i], name) {
        i += 1;
    }
    i
}

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elem {
    /// `float`
    F32,
    /// `int32_t`
    I32,
    /// `uint64_t`
    U64,
}

impl Elem {
    /// The size of an element in bytes, which is also its alignment.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::U64 => 8,
        }
    }
}

/// What an argument is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An array that is read.
    Read(Elem),
    /// An array that is written.
    Write(Elem),
    /// An f32 array that is read and written.
    Update,
    /// An array that the op ignores.
    Unused,
    /// A size: i64, `int` in C.
    Size,
    /// A size that is `int64_t` in C too.
    Count,
    /// An i32 that is not a size.
    Int,
    /// An f32.
    Number,
    /// An f64; not in C.
    Double,
    /// A bool, `int` in C.
    Flag,
}

impl Role {
    /// The element type of an array that the op uses.
    #[inline]
    pub const fn elem(self) -> Option<Elem> {
        match self {
            Self::Read(elem) | Self::Write(elem) => Some(elem),
            Self::Update => Some(Elem::F32),
            _ => None,
        }
    }

    /// Whether the op writes the array.
    #[inline]
    pub const fn written(self) -> bool {
        matches!(self, Self::Write(_) | Self::Update)
    }

    /// Whether the argument is a size.
    #[inline]
    pub const fn is_size(self) -> bool {
        matches!(self, Self::Size | Self::Count)
    }
}

/// One side of an array, by the position of size arguments in the op's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// A size.
    Size(usize),
    /// Half of an even size.
    Half(usize),
    /// The product of two sizes.
    Times(usize, usize),
    /// A side that is at least the sum of two sizes.
    AtLeast(usize, usize),
    /// A side that is more than the largest of these indices.
    Above(usize),
}

/// The values an argument may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// All; sizes are at least 0 anyway.
    Any,
    /// At least 0.
    NotNegative,
    /// Finite and at least 0.
    Temperature,
    /// Finite and above 0.
    Positive,
    /// Above 0, at most 1.
    Share,
    /// At least 0, below 1.
    Decay,
    /// At least 1.
    FromOne,
    /// Even.
    Even,
    /// At most another size. Python asks for at least 1.
    UpTo(&'static str),
    /// A divisor of another size.
    Divides(&'static str),
    /// At least 1 and below 2^31, if there is a row at all.
    Classes,
}

impl Bound {
    /// The bound in words, empty for [`Bound::Any`].
    pub fn text(self) -> String {
        match self {
            Self::Any => String::new(),
            Self::NotNegative => "at least 0".into(),
            Self::Temperature => "a finite number, at least 0".into(),
            Self::Positive => "a finite number above 0".into(),
            Self::Share => "above 0 and at most 1".into(),
            Self::Decay => "at least 0 and below 1".into(),
            Self::FromOne => "at least 1".into(),
            Self::Even => "an even number".into(),
            Self::UpTo(name) => format!("at most `{name}`"),
            Self::Divides(name) => format!("a divisor of `{name}`"),
            Self::Classes => "at least 1 and below 2^31".into(),
        }
    }

    /// Whether a number is allowed.
    pub(super) fn admits(self, x: f64) -> bool {
        match self {
            Self::NotNegative => x >= 0.0,
            Self::Temperature => x >= 0.0 && x.is_finite(),
            Self::Positive => x > 0.0 && x.is_finite(),
            Self::Share => x > 0.0 && x <= 1.0,
            Self::Decay => (0.0..1.0).contains(&x),
            _ => true,
        }
    }
}

/// Python's default for an argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Default {
    /// No default: the argument must be given, unless it is an output, which is made, or a size that follows from the shapes
    /// of arrays.
    Absent,
    /// A size that must be given.
    Required,
    /// A number.
    Number(f64),
    /// An integer.
    Int(i64),
    /// A flag.
    Flag(bool),
    /// 1 divided by the square root of a size.
    InverseRoot(&'static str),
    /// 1 divided by a size.
    Inverse(&'static str),
    /// One seed for each row, random.
    Seeds,
    /// Not an argument in Python: what the arrays tell, or else this other size.
    Hidden(&'static str),
}

/// An argument of an op. Built in the table by chained calls.
#[derive(Clone, Copy, Debug)]
pub struct Arg {
    /// Its name everywhere.
    pub name: &'static str,
    /// What it is for.
    pub role: Role,
    /// The shape of an array, row-major and contiguous.
    pub dims: &'static [Dim],
    /// The values allowed.
    pub bound: Bound,
    /// Python's default.
    pub default: Default,
    /// A second keyword in Python.
    pub alias: Option<&'static str>,
    /// Arrays that a written array may be the same as.
    pub same: &'static [&'static str],
    /// The size that indices are below; if empty, they are only not negative.
    pub below: Option<&'static str>,
    /// Whether this size stands for any number of leading dimensions in Python.
    pub leading: bool,
    /// Whether this size may be smaller than the arrays in Python: the op works on their first elements.
    pub first: bool,
    /// What Python fills a new array with, for an op that writes nothing without rows.
    pub fill: Option<f32>,
    /// A written array is read too, unless this number is 0.
    pub reads_unless: Option<&'static str>,
    /// The positions of the arguments that the options name, so that no call compares names.
    pub named: Named,
}

/// The positions of the arguments that the options of an [`Arg`] name; `None` where they name none.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    /// The position of the argument that `bound` names.
    pub bound: Option<usize>,
    /// The position of the argument that `default` names.
    pub default: Option<usize>,
    /// The position of the argument that `below` names.
    pub below: Option<usize>,
    /// The position of the argument that `reads_unless` names.
    pub reads_unless: Option<usize>,
}

/// The arguments of an op with the positions of those that their options name.
pub(super) const fn linked<const N: usize>(names: &[&str], mut args: [Arg; N]) -> [Arg; N] {
    let mut i = 0;
    while i < N {
        args[i].named = args[i].links(names);
        i += 1;
    }
    args
}

impl Arg {
    pub(super) const fn new(name: &'static str, role: Role, dims: &'static [Dim]) -> Self {
        Self {
            name,
            role,
            dims,
            bound: Bound::Any,
            default: Default::Absent,
            alias: None,
            same: &[],
            below: None,
            leading: false,
            first: false,
            fill: None,
            reads_unless: None,
            named: Named { bound: None, default: None, below: None, reads_unless: None },
        }
    }

    const fn links(&self, names: &[&str]) -> Named {
        const fn at(names: &[&str], name: Option<&str>) -> Option<usize> {
            match name {
                Some(name) if !name.is_empty() => Some(position(names, name)),
                _ => None,
            }
        }
        let bound = match self.bound {
            Bound::UpTo(name) | Bound::Divides(name) => Some(name),
            _ => None,
        };
        let default = match self.default {
            Default::InverseRoot(name) | Default::Inverse(name) | Default::Hidden(name) => Some(name),
            _ => None,
        };
        Named {
            bound: at(names, bound),
            default: at(names, default),
            below: at(names, self.below),
            reads_unless: at(names, self.reads_unless),
        }
    }

    pub(super) const fn bound(self, bound: Bound) -> Self {
        Self { bound, ..self }
    }

    pub(super) const fn or(self, default: Default) -> Self {
        Self { default, ..self }
    }

    pub(super) const fn number(self, default: f64) -> Self {
        self.or(Default::Number(default))
    }

    pub(super) const fn alias(self, name: &'static str) -> Self {
        Self { alias: Some(name), ..self }
    }

    pub(super) const fn same(self, same: &'static [&'static str]) -> Self {
        Self { same, ..self }
    }

    pub(super) const fn below(self, size: &'static str) -> Self {
        Self { below: Some(size), ..self }
    }

    pub(super) const fn leading(self) -> Self {
        Self { leading: true, ..self }
    }

    pub(super) const fn first(self) -> Self {
        Self { first: true, ..self }
    }

    pub(super) const fn fill(self, fill: f32) -> Self {
        Self { fill: Some(fill), ..self }
    }

    pub(super) const fn reads_unless(self, number: &'static str) -> Self {
        Self { reads_unless: Some(number), ..self }
    }

    /// Whether Python works the size out from arrays where it is not given.
    #[inline]
    pub const fn solved(&self) -> bool {
        self.role.is_size() && matches!(self.default, Default::Absent | Default::Hidden(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{layers, table};

    #[test]
    fn positions_are_those_of_the_names() {
        for op in table::ALL.iter().chain(layers::table::ALL) {
            for arg in op.args {
                let name = |at: Option<usize>| at.map(|i| op.args[i].name);
                let bound = match arg.bound {
                    Bound::UpTo(name) | Bound::Divides(name) => Some(name),
                    _ => None,
                };
                let default = match arg.default {
                    Default::InverseRoot(name) | Default::Inverse(name) | Default::Hidden(name) => Some(name),
                    _ => None,
                };
                let below = arg.below.filter(|name| !name.is_empty());
                let Named { bound: b, default: d, below: i, reads_unless: r } = arg.named;
                let found = [name(b), name(d), name(i), name(r)];
                assert_eq!(found, [bound, default, below, arg.reads_unless], "{} {}", op.name, arg.name);
            }
        }
    }
}
