//! The checks before an op, and where it runs.

use super::place::{self, Place, Stream};
use super::sets::MOST;
use super::spec::{Arg, Bound, Dim, Elem, Op, Value};
use crate::cuda::eager::{OnStream, StreamMemory};
use crate::eager::{At, Runner};
use crate::error::{OpError, Result};
use std::ffi::c_void;
use std::fmt::Display;

/// Elements no array can have: more bytes than a process can address (2⁴⁷ on today's 64-bit machines), whatever the type.
const TOO_MANY: usize = if usize::BITS == 64 { 1 << 44 } else { isize::MAX as usize / size_of::<u64>() };

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
        scalars(self, values)?;
        // SAFETY: guaranteed by the caller; scalars are checked.
        unsafe { self.call_checked(values, stream) }
    }

    /// [`Op::call`] after [`Op::check_scalars`].
    ///
    /// # Safety
    /// As [`Op::call`].
    ///
    /// # Errors
    /// See [the module](super).
    pub unsafe fn call_checked(&self, values: &[Value], stream: Stream) -> Result {
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
        scalars(self, values)?;
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
            work(&At::Device(OnStream::new(index as usize, stream.0, &memory)?))
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
    let other = arg.named.bound.map_or(0, |i| values[i].int());
    let good = match arg.bound {
        Bound::FromOne => x >= 1,
        Bound::Even => x % 2 == 0,
        Bound::UpTo(_) => x <= other,
        Bound::Divides(_) => other == 0 || (x > 0 && other % x == 0),
        _ => true,
    };
    if good {
        return Ok(());
    }
    match arg.bound {
        Bound::UpTo(_) | Bound::Divides(_) => {
            refuse(op.name, arg.name, x, format_args!("{}, {other}", arg.bound.text()))
        }
        bound => refuse(op.name, arg.name, x, bound.text()),
    }
}

/// The number of elements of an array; its bytes fit the address space.
///
/// # Safety
/// As [`Op::call`].
#[inline(always)] // three times in a call of which the others are a few instructions
unsafe fn elements(op: &Op, values: &[Value], i: usize, stream: Stream) -> Result<usize> {
    let arg = &op.args[i];
    // SAFETY: guaranteed by the caller.
    let above = if op.sets.above.has(i) { unsafe { rows_used(op, values, arg, stream) }? } else { 1 };
    // Saturated, so that an empty side empties the array, however long the others are.
    let mut elements = 1_usize;
    for dim in arg.dims {
        let side = match *dim {
            Dim::Size(i) => values[i].size(),
            Dim::Half(i) => values[i].size() / 2,
            Dim::Times(i, j) => values[i].size().saturating_mul(values[j].size()),
            Dim::AtLeast(i, j) => values[i].size().saturating_add(values[j].size()),
            Dim::Above(_) => above,
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
#[cold]
unsafe fn rows_used(op: &Op, values: &[Value], arg: &Arg, stream: Stream) -> Result<usize> {
    let indices = arg.dims.iter().find_map(|dim| if let Dim::Above(i) = *dim { Some(i) } else { None });
    let Some(i) = indices else { return Ok(1) };
    // SAFETY: guaranteed by the caller.
    let n = unsafe { elements(op, values, i, stream) }?;
    let at = values[i].pointer();
    if n == 0 || at.is_null() || place::common(op.name, &[at], stream)? != Place::Host {
        return Ok(1);
    }
    // SAFETY: not null, and n indices by the contract of the caller.
    let indices = unsafe { std::slice::from_raw_parts(at.cast::<i32>(), n) };
    Ok(indices.iter().max().map_or(0, |&i| usize::try_from(i).unwrap_or(0)) + 1)
}

/// The memory of an array.
#[derive(Clone, Copy)]
pub(super) struct Range {
    start: usize,
    /// 0 if there are no elements: such a range is apart from all others.
    end: usize,
}

impl Range {
    /// The range of `len` elements, which must be aligned and not null unless there are none.
    #[inline(always)]
    pub fn new(op: &str, arg: &Arg, at: *const c_void, len: usize) -> Result<Self> {
        let (start, size) = (at.addr(), arg.role.elem().map_or(1, Elem::size));
        if len == 0 {
            return Ok(Self { start, end: 0 });
        }
        // Sizes are powers of two, which the compiler does not see: a division takes as long as all other checks.
        match start.checked_add(len.saturating_mul(size)) {
            Some(end) if start != 0 && start & (size - 1) == 0 => Ok(Self { start, end }),
            _ => Self::unfit(op, arg.name, at, (len, size)),
        }
    }

    #[cold]
    fn unfit(op: &str, name: &str, at: *const c_void, (len, size): (usize, usize)) -> Result<Self> {
        if at.is_null() {
            return refuse(op, name, "null", format_args!("{len} elements"));
        }
        if !at.addr().is_multiple_of(size) {
            return refuse(op, name, format_args!("{at:p}"), format_args!("a multiple of {size}"));
        }
        let bytes = len.saturating_mul(size);
        refuse(op, name, format_args!("{bytes} bytes at {at:p}"), "memory that exists")
    }

    #[inline(always)]
    fn apart(self, other: Self) -> bool {
        self.end <= other.start || other.end <= self.start
    }

    /// Refuses an array that overlaps another, one of which is written, unless the op allows that.
    pub fn shares(self, other: Self, op: &str, [a, b]: [&Arg; 2]) -> Result {
        let named = a.same.contains(&b.name) || b.same.contains(&a.name);
        if self.apart(other) || named && (self.start, self.end) == (other.start, other.end) {
            return Ok(());
        }
        let (how, expected) =
            if named { (" in part", "the same array or a separate one") } else { ("", "a separate array") };
        let text = format!("{op}: `{}` overlaps `{}`{how}, expected {expected}", a.name, b.name);
        Err(OpError::invalid(text))
    }
}

/// The place of the arrays that have elements.
pub(super) fn place_of(op: &str, ranges: &[Range], stream: Stream) -> Result<Place> {
    if stream == Stream::HOST {
        return Ok(Place::Host);
    }
    let mut addresses = [std::ptr::null(); MOST];
    let mut used = 0;
    for (to, range) in addresses.iter_mut().zip(ranges.iter().filter(|range| range.end != 0)) {
        *to = std::ptr::without_provenance(range.start);
        used += 1;
    }
    place::common(op, &addresses[..used], stream)
}

/// Checks the arrays; `None` means that there is nothing to do.
///
/// # Safety
/// As [`Op::call`].
unsafe fn arrays(op: &Op, values: &[Value], stream: Stream) -> Result<Option<Place>> {
    let mut idle = true;
    for i in op.idle {
        // SAFETY: guaranteed by the caller.
        idle = idle && unsafe { elements(op, values, i, stream) }? == 0;
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
    let mut ranges = [Range { start: 0, end: 0 }; MOST];
    for i in op.sets.arrays {
        // SAFETY: guaranteed by the caller.
        let len = unsafe { elements(op, values, i, stream) }?;
        ranges[i] = Range::new(op.name, &op.args[i], values[i].pointer(), len)?;
    }
    for i in op.sets.arrays {
        let others = if op.sets.written.has(i) { op.sets.arrays } else { op.sets.written };
        for other in others.before(i) {
            if !ranges[i].apart(ranges[other]) {
                ranges[i].shares(ranges[other], op.name, [&op.args[i], &op.args[other]])?;
            }
        }
    }
    let place = place_of(op.name, &ranges, stream)?;
    if place == Place::Host {
        for i in op.sets.indices {
            let (arg, at) = (&op.args[i], values[i].pointer().cast());
            let bound = arg.named.below.map_or(1 << 31, |i| values[i].int());
            // SAFETY: host memory that is not null; its size is guaranteed by the caller.
            unsafe { indices(op.name, arg.name, at, elements(op, values, i, stream)?, bound) }?;
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
