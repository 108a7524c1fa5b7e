//! The checks before an op.

use super::error::{OpError, Result};
use super::place::{self, Place, Stream};
use crate::cpu::flat::Span;
use std::ffi::c_void;
use std::fmt::Display;
use std::ops::Range;

/// Elements no array can have: more bytes than a process can address (2⁴⁷ on today's 64-bit machines), whatever the type.
const TOO_MANY: usize = if usize::BITS == 64 { 1 << 44 } else { isize::MAX as usize / size_of::<u64>() };

/// The checks of one call: collects its arrays and asks in the end whether they get along.
pub(super) struct Check {
    op: &'static str,
    arrays: Vec<Array>,
}

struct Array {
    name: &'static str,
    address: *const c_void,
    bytes: usize,
    written: bool,
}

impl Array {
    fn range(&self) -> Range<usize> {
        let start = self.address.addr();
        start..start.saturating_add(self.bytes)
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.range(), other.range());
        a.start < b.end && b.start < a.end
    }
}

impl Check {
    pub(super) fn new(op: &'static str) -> Self {
        Self { op, arrays: Vec::with_capacity(6) }
    }

    /// The name of the op.
    pub(super) fn op(&self) -> &'static str {
        self.op
    }

    /// Refuses the call because of an argument.
    pub(super) fn refuse<T>(&self, name: &str, found: impl Display, expected: impl Display) -> Result<T> {
        Err(OpError::invalid(format!("{}: `{name}` is {found}, expected {expected}", self.op)))
    }

    /// A size: not negative.
    pub(super) fn size(&self, name: &str, value: i64) -> Result<usize> {
        match usize::try_from(value) {
            Ok(size) => Ok(size),
            Err(_) => self.refuse(name, value, "a number that is not negative"),
        }
    }

    /// A size of at least 1.
    pub(super) fn positive(&self, name: &str, value: i64) -> Result<usize> {
        match self.size(name, value)? {
            0 => self.refuse(name, 0, "at least 1"),
            size => Ok(size),
        }
    }

    /// A number that `good` accepts.
    pub(super) fn number(
        &self,
        name: &str,
        x: f32,
        good: impl Fn(f32) -> bool,
        expected: &str,
    ) -> Result<f32> {
        if good(x) { Ok(x) } else { self.refuse(name, x, expected) }
    }

    /// The elements of an array with these sides; its bytes fit the address space.
    pub(super) fn product(&self, name: &str, sides: &[usize]) -> Result<usize> {
        // An empty side empties the array, however long the others are.
        if sides.contains(&0) {
            return Ok(0);
        }
        let elements = sides.iter().try_fold(1_usize, |product, &side| product.checked_mul(side));
        match elements.filter(|&n| n < TOO_MANY) {
            Some(elements) => Ok(elements),
            None => self.refuse(name, format!("{sides:?} elements"), "a size that fits into memory"),
        }
    }

    fn array<T>(&mut self, name: &'static str, address: *const T, len: usize, written: bool) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        if len >= TOO_MANY {
            return self.refuse(name, format_args!("{len} elements"), "a size that fits into memory");
        }
        if address.is_null() {
            return self.refuse(name, "null", format_args!("{len} elements"));
        }
        if !address.is_aligned() {
            return self.refuse(
                name,
                format_args!("{address:p}"),
                format_args!("a multiple of {}", align_of::<T>()),
            );
        }
        let bytes = len.saturating_mul(size_of::<T>());
        if address.addr().checked_add(bytes).is_none() {
            return self.refuse(name, format_args!("{bytes} bytes at {address:p}"), "memory that exists");
        }
        self.arrays.push(Array { name, address: address.cast(), bytes, written });
        Ok(())
    }

    /// An array that is read.
    ///
    /// # Safety
    /// If not null it has `len` elements, and they may be read during the call.
    pub(super) unsafe fn input<T: Element>(
        &mut self,
        name: &'static str,
        address: *const T,
        len: usize,
    ) -> Result<T::View> {
        self.array(name, address, len, false)?;
        // SAFETY: not null and aligned by the check; the rest is the caller's.
        Ok(unsafe { T::view(address.cast_mut(), len) })
    }

    /// An array that is written.
    ///
    /// # Safety
    /// If not null it has `len` elements, and this call alone uses them.
    pub(super) unsafe fn output<T: Element>(
        &mut self,
        name: &'static str,
        address: *mut T,
        len: usize,
    ) -> Result<T::View> {
        self.array(name, address, len, true)?;
        // SAFETY: not null and aligned by the check; the rest is the caller's.
        Ok(unsafe { T::view(address, len) })
    }

    /// Asks whether what is written overlaps anything, except pairs of names in `same`, which may be one array; and where
    /// all of it is.
    pub(super) fn place(&self, same: &[(&str, &str)], stream: Stream) -> Result<Place> {
        for (i, a) in self.arrays.iter().enumerate() {
            for b in &self.arrays[..i] {
                if !(a.written || b.written) || !a.overlaps(b) {
                    continue;
                }
                let named =
                    same.iter().any(|&(x, y)| (x, y) == (a.name, b.name) || (y, x) == (a.name, b.name));
                if named && a.address == b.address && a.bytes == b.bytes {
                    continue;
                }
                let expected = if named { "the same array or another" } else { "another array" };
                return Err(OpError::invalid(format!(
                    "{}: `{}` overlaps `{}`, expected {expected}",
                    self.op, a.name, b.name
                )));
            }
        }
        let mut addresses = [std::ptr::null(); 8];
        for (slot, array) in addresses.iter_mut().zip(&self.arrays) {
            *slot = array.address;
        }
        place::common(self.op, &addresses[..self.arrays.len().min(8)], stream)
    }

    /// Every index is in 0..bound.
    pub(super) fn indices(&self, name: &str, indices: Span<i32>, bound: usize) -> Result {
        // SAFETY: the array was given as an input: nobody writes it.
        let indices = unsafe { indices.all() };
        let inside = |&x: &i32| usize::try_from(x).is_ok_and(|x| x < bound);
        match indices.iter().position(|x| !inside(x)) {
            None => Ok(()),
            Some(i) => {
                self.refuse(&format!("{name}[{i}]"), indices[i], format_args!("0 to {bound} exclusive"))
            }
        }
    }
}

/// Types of array elements.
pub(super) trait Element: Sized {
    /// How an op sees the array.
    type View;

    /// # Safety
    /// As [`Span::from_raw`].
    unsafe fn view(address: *mut Self, len: usize) -> Self::View;
}

impl Element for f32 {
    type View = Span<f32>;
    unsafe fn view(address: *mut Self, len: usize) -> Span<f32> {
        // SAFETY: the caller's.
        unsafe { Span::from_raw(address, len) }
    }
}

impl Element for i32 {
    type View = Span<i32>;
    unsafe fn view(address: *mut Self, len: usize) -> Span<i32> {
        // SAFETY: the caller's.
        unsafe { Span::from_raw(address, len) }
    }
}

impl Element for u64 {
    type View = Span<u64>;
    unsafe fn view(address: *mut Self, len: usize) -> Span<u64> {
        // SAFETY: the caller's.
        unsafe { Span::from_raw(address, len) }
    }
}
