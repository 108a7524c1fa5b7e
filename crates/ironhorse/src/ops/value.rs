//! The arguments of an op as values of one type.

use std::ffi::c_void;

/// The value of an argument.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// The address of an array.
    Pointer(*mut c_void),
    /// A size or another integer.
    Int(i64),
    /// A number, exact.
    Number(f64),
    /// A flag.
    Flag(bool),
}

macro_rules! values {
    ($($type:ty: $x:ident => $value:expr;)*) => { $(
        impl From<$type> for Value {
            fn from($x: $type) -> Self {
                $value
            }
        }
    )* };
}

values! {
    *const f32: x => Self::Pointer(x.cast_mut().cast());
    *mut f32: x => Self::Pointer(x.cast());
    *const i32: x => Self::Pointer(x.cast_mut().cast());
    *mut i32: x => Self::Pointer(x.cast());
    *const u64: x => Self::Pointer(x.cast_mut().cast());
    i64: x => Self::Int(x);
    i32: x => Self::Int(x.into());
    f32: x => Self::Number(x.into());
    f64: x => Self::Number(x);
    bool: x => Self::Flag(x);
}

impl Value {
    /// An address; null for other values.
    #[inline]
    pub fn pointer(self) -> *mut c_void {
        if let Self::Pointer(at) = self { at } else { std::ptr::null_mut() }
    }

    /// An integer; 0 for other values.
    #[inline]
    pub fn int(self) -> i64 {
        if let Self::Int(x) = self { x } else { 0 }
    }

    /// A checked size.
    #[inline]
    pub(super) fn size(self) -> usize {
        usize::try_from(self.int()).unwrap_or(0)
    }

    /// A number; 0 for other values.
    #[inline]
    pub fn number(self) -> f64 {
        if let Self::Number(x) = self { x } else { 0.0 }
    }

    /// A flag; false for other values.
    #[inline]
    pub fn flag(self) -> bool {
        matches!(self, Self::Flag(true))
    }
}
