//! The checks before an op, and where it runs.

use super::place::{self, Place, Stream};
use super::spec::{Arg, Bound, Dim, Elem, Op, Role, Value};
use crate::cuda::eager::{At as DeviceAt, StreamMemory};
use crate::eager::{At, Runner};
use crate::error::{OpError, Result};
use std::ffi::c_void;
use std::fmt::Display;

/// Elements no array can have: more bytes than a process can address (2⁴⁷ on today's 64-bit machines), whatever the type.
const TOO_MANY: usize = if usize::BITS == 64 { 1 << 44 } else { isize::MAX as usize / size_of::<u64>() };

/// Arrays that an op has at most.
const MOST: usize = 10;

impl Op {
    /// Checks the arguments and runs the op where its arrays are. `values` are the arguments of the list, in order.
    ///
    /// # Safety
    /// Every pointer that is not null is of the type of its argument, and points to as many elements as its shape says;
    /// they stay allocated during the call, and no other thread writes them, or reads what is written, meanwhile.
    ///
    /// # Errors
    /// See [the module](super).
    pub unsafe fn call(&self, values: &[Value], stream: Stream) -> Result {
        // SAFETY: guaranteed by the caller.
        let Some(place) = (unsafe { arrays(self, values, stream) })? else { return Ok(()) };
        // SAFETY: `arrays` saw that the arrays are not null, aligned, overlap only where the op allows it, and are in
        // `place`; their sizes are guaranteed by the caller.
        at(place, stream, |at| unsafe { (self.run)(values, &Runner { op: self.name, at }) })
    }

    /// All checks of [`Op::call`] on host memory, without running the op.
    ///
    /// # Safety
    /// As [`Op::call`]; the arrays are host memory.
    ///
    /// # Errors
    /// See [the module](super).
    pub unsafe fn check(&self, values: &[Value]) -> Result {
        // SAFETY: guaranteed by the caller.
        unsafe { arrays(self, values, Stream::HOST) }.map(|_| ())
    }

    /// Checks sizes, numbers and flags alone.
    ///
    /// # Errors
    /// See [the module](super).
    pub fn check_scalars(&self, values: &[Value]) -> Result {
        scalars(self, values)
    }
}

/// Calls `work` with the place where the arrays of a call are.
pub(super) fn at(place: Place, stream: Stream, work: impl FnOnce(&At<'_>) -> Result) -> Result {
    match place {
        Place::Host => work(&At::Host),
        Place::Device(index) => {
            let memory = StreamMemory::default();
            work(&At::Device(DeviceAt::new(index as usize, stream.0, &memory)?))
        }
    }
}

/// Refuses the call because of an argument.
#[cold]
pub(super) fn refuse<T>(op: &str, name: &str, found: impl Display, expected: impl Display) -> Result<T> {
    Err(OpError::invalid(format!("{op}: `{name}` is {found}, expected {expected}")))
}

/// Sizes are not negative, and everything is within its bound.
fn scalars(op: &Op, values: &[Value]) -> Result {
    for i in op.sets.bounded {
        let arg = &op.args[i];
        match values[i] {
            Value::Number(x) if !arg.bound.admits(x) => {
                return refuse(op.name, arg.name, x as f32, arg.bound.text());
            }
            Value::Int(x) => integer(op, values, arg, x)?,
            _ => {}
        }
    }
    Ok(())
}

fn integer(op: &Op, values: &[Value], arg: &Arg, x: i64) -> Result {
    if x < 0 && arg.role.is_size() {
        return refuse(op.name, arg.name, x, "at least 0");
    }
    let other = |name| op.position(name).map_or(0, |i| values[i].int());
    let good = match arg.bound {
        Bound::FromOne => x >= 1,
        Bound::Even => x % 2 == 0,
        Bound::UpTo(name) => x <= other(name),
        Bound::Divides(name) => other(name) == 0 || (x > 0 && other(name) % x == 0),
        _ => true,
    };
    if good {
        return Ok(());
    }
    match arg.bound {
        Bound::UpTo(name) | Bound::Divides(name) => {
            refuse(op.name, arg.name, x, format_args!("{}, {}", arg.bound.text(), other(name)))
        }
        bound => refuse(op.name, arg.name, x, bound.text()),
    }
}

/// The number of elements of an array; its bytes fit the address space.
///
/// # Safety
/// As [`Op::call`].
unsafe fn elements(op: &Op, values: &[Value], arg: &Arg, stream: Stream) -> Result<usize> {
    // Saturated, so that an empty side empties the array, however long the others are.
    let mut elements = 1_usize;
    for dim in arg.dims {
        let side = match *dim {
            Dim::Size(i) => values[i].size(),
            Dim::Half(i) => values[i].size() / 2,
            Dim::Times(i, j) => values[i].size().saturating_mul(values[j].size()),
            Dim::AtLeast(i, j) => values[i].size().saturating_add(values[j].size()),
            // SAFETY: guaranteed by the caller.
            Dim::Above(i) => unsafe { rows_used(op, values, i, stream) }?,
        };
        elements = elements.saturating_mul(side);
    }
    if elements < TOO_MANY {
        return Ok(elements);
    }
    refuse(op.name, arg.name, "larger than any memory", "a size that fits into memory")
}

/// The rows that indices reach; 1 where they are on a device, which cannot be looked at.
///
/// # Safety
/// As [`Op::call`].
unsafe fn rows_used(op: &Op, values: &[Value], indices: usize, stream: Stream) -> Result<usize> {
    let arg = &op.args[indices];
    // SAFETY: guaranteed by the caller.
    let n = unsafe { elements(op, values, arg, stream) }?;
    let at = values[indices].pointer();
    if n == 0 || at.is_null() || place::common(op.name, &[at], stream)? != Place::Host {
        return Ok(1);
    }
    // SAFETY: not null, and n indices by the contract of the caller.
    let indices = unsafe { std::slice::from_raw_parts(at.cast::<i32>(), n) };
    Ok(indices.iter().max().map_or(0, |&i| usize::try_from(i).unwrap_or(0)) + 1)
}

/// The arrays of a call that have elements.
pub(super) struct Arrays {
    op: &'static str,
    list: [Range; MOST],
    used: usize,
}

#[derive(Clone, Copy)]
struct Range {
    arg: &'static Arg,
    start: usize,
    bytes: usize,
}

impl Arrays {
    pub fn new(op: &'static str) -> Self {
        static NONE: Arg = Arg::new("", Role::Unused, &[]);
        Self { op, list: [Range { arg: &NONE, start: 0, bytes: 0 }; MOST], used: 0 }
    }

    /// Adds an array of `len` elements, which must be aligned and not null unless it is empty.
    pub fn add(&mut self, arg: &'static Arg, at: *const c_void, len: usize) -> Result {
        let (op, name) = (self.op, arg.name);
        let size = arg.role.elem().map_or(1, Elem::size);
        if len == 0 {
            return Ok(());
        }
        if at.is_null() {
            return refuse(op, name, "null", format_args!("{len} elements"));
        }
        if !at.addr().is_multiple_of(size) {
            return refuse(op, name, format_args!("{at:p}"), format_args!("a multiple of {size}"));
        }
        let bytes = len.saturating_mul(size);
        if at.addr().checked_add(bytes).is_none() {
            return refuse(op, name, format_args!("{bytes} bytes at {at:p}"), "memory that exists");
        }
        if let Some(free) = self.list.get_mut(self.used) {
            *free = Range { arg, start: at.addr(), bytes };
            self.used += 1;
        }
        Ok(())
    }

    /// Refuses overlaps that the op does not allow; then says where all of the arrays are.
    pub fn place(&self, stream: Stream) -> Result<Place> {
        let arrays = &self.list[..self.used];
        for (i, a) in arrays.iter().enumerate() {
            for b in &arrays[..i] {
                let apart = a.start + a.bytes <= b.start || b.start + b.bytes <= a.start;
                if apart || !(a.arg.role.written() || b.arg.role.written()) {
                    continue;
                }
                let named = a.arg.same.contains(&b.arg.name) || b.arg.same.contains(&a.arg.name);
                if !(named && (a.start, a.bytes) == (b.start, b.bytes)) {
                    return self.overlap(a, b, named);
                }
            }
        }
        if stream == Stream::HOST {
            return Ok(Place::Host);
        }
        let addresses = self.list.map(|array| std::ptr::without_provenance(array.start));
        place::common(self.op, &addresses[..self.used], stream)
    }

    #[cold]
    fn overlap(&self, a: &Range, b: &Range, named: bool) -> Result<Place> {
        let (how, expected) =
            if named { (" in part", "the same array or a separate one") } else { ("", "a separate array") };
        let text =
            format!("{}: `{}` overlaps `{}`{how}, expected {expected}", self.op, a.arg.name, b.arg.name);
        Err(OpError::invalid(text))
    }
}

/// Checks everything; `None` means that there is nothing to do.
///
/// # Safety
/// As [`Op::call`].
unsafe fn arrays(op: &Op, values: &[Value], stream: Stream) -> Result<Option<Place>> {
    scalars(op, values)?;
    // SAFETY: guaranteed by the caller.
    let count = |arg: &Arg| unsafe { elements(op, values, arg, stream) };
    let mut idle = true;
    for i in op.idle {
        idle = idle && count(&op.args[i])? == 0;
    }
    if idle {
        return Ok(None);
    }
    for i in op.sets.classes {
        let (arg, classes) = (&op.args[i], values[i].int());
        if !(1..=i64::from(i32::MAX)).contains(&classes) {
            return refuse(op.name, arg.name, classes, arg.bound.text());
        }
    }
    let mut arrays = Arrays::new(op.name);
    for i in op.sets.arrays {
        let arg = &op.args[i];
        arrays.add(arg, values[i].pointer(), count(arg)?)?;
    }
    let place = arrays.place(stream)?;
    if place == Place::Host {
        for i in op.sets.indices {
            let (arg, at) = (&op.args[i], values[i].pointer().cast());
            let below = arg.below.and_then(|size| op.position(size));
            let bound = below.map_or(1 << 31, |i| values[i].int());
            // SAFETY: host memory that is not null; its size is guaranteed by the caller.
            unsafe { indices(op.name, arg.name, at, count(arg)?, bound) }?;
        }
    }
    Ok(Some(place))
}

/// Every index is in 0..bound.
///
/// # Safety
/// `at` points to `n` indices, or `n` is 0.
unsafe fn indices(op: &str, name: &str, at: *const i32, n: usize, bound: i64) -> Result {
    if n == 0 {
        return Ok(());
    }
    // SAFETY: guaranteed by the caller.
    let indices = unsafe { std::slice::from_raw_parts(at, n) };
    match indices.iter().position(|&x| x < 0 || i64::from(x) >= bound) {
        None => Ok(()),
        Some(i) => {
            let expected = format_args!("an index in 0..{bound}");
            refuse(op, &format!("{name}[{i}]"), indices[i], expected)
        }
    }
}
