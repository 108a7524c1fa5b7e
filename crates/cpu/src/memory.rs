//! The engine's pools, and spans: typed windows into them that tasks on several threads share.

use crate::buffer::Buffer;
use ironhorse_core::eager::Array;
use ironhorse_core::{DType, Error, Layout, Pool, Result, Slot};
use std::marker::PhantomData;
use std::ops::Range;

/// All pools of an engine.
#[derive(Debug)]
pub struct Memory {
    pools: [Buffer; Pool::ALL.len()],
}

impl Memory {
    /// Pools of which none is allocated yet.
    pub const fn new() -> Self {
        Self { pools: [const { Buffer::new() }; Pool::ALL.len()] }
    }

    /// Makes each pool at least as large as the layout asks.
    pub fn reserve(&mut self, layout: &Layout) -> Result<()> {
        for pool in Pool::ALL {
            let bytes = layout.bytes(pool);
            let floats = bytes.div_ceil(size_of::<f32>());
            self.pools[pool.index()].grow(floats).ok_or_else(|| Error::OutOfMemory {
                engine: "cpu",
                what: format!(
                    "cannot allocate {bytes} bytes for {}; use a smaller batch, sequence or model",
                    pool.name()
                ),
            })?;
        }
        Ok(())
    }

    /// Bytes of one pool.
    pub fn bytes(&self, pool: Pool) -> usize {
        bytes_of(&self.pools[pool.index()])
    }

    /// Bytes held.
    pub fn allocated(&self) -> usize {
        self.pools.iter().map(bytes_of).sum()
    }

    /// The window of an f32 slot.
    pub fn f32(&self, slot: Slot) -> Result<Span<f32>> {
        self.span(slot, slot.dtype == DType::F32)
    }

    /// The window of an i32 slot.
    pub fn i32(&self, slot: Slot) -> Result<Span<i32>> {
        self.span(slot, slot.dtype == DType::I32)
    }

    fn span<T: Word>(&self, slot: Slot, right_type: bool) -> Result<Span<T>> {
        let buffer = &self.pools[slot.pool.index()];
        let inside = slot.end() <= bytes_of(buffer) && slot.offset.is_multiple_of(size_of::<T>());
        if !right_type || !inside {
            return Err(if right_type {
                let held = bytes_of(buffer);
                Error::Program(format!(
                    "{slot:?} is outside its pool of {held} bytes; reserve the program first"
                ))
            } else {
                let what = format!("this engine does not compute in {}; use --dtype f32", slot.dtype);
                Error::Unsupported { engine: "cpu", what }
            });
        }
        let start = buffer.start().wrapping_byte_add(slot.offset).cast();
        Ok(Span { start, len: slot.numel(), of: PhantomData })
    }
}

fn bytes_of(buffer: &Buffer) -> usize {
    buffer.len() * size_of::<f32>()
}

/// Streams that are fetched at a time: one after the other a core of the machines we know reads 10 GB/s, eight at a time 16 to 18.
pub const STREAMS: usize = 8;
/// Floats in a cache line.
const LINE: usize = 16;

/// Asks for the lines of a window to come into the second-level cache, those of several streams in turns.
pub struct Streams {
    span: Span<f32>,
    /// Elements from one stream to the next.
    apart: usize,
    /// Elements of each stream that were asked for.
    done: usize,
}

impl Streams {
    /// The streams of a window of which nothing was asked for yet.
    pub fn new(span: Span<f32>) -> Self {
        Self { span, apart: span.len().div_ceil(STREAMS).next_multiple_of(LINE), done: 0 }
    }

    /// Asks for the next of `parts` equal parts.
    pub fn fetch(&mut self, parts: usize) {
        let end = (self.done + self.apart.div_ceil(parts.max(1))).next_multiple_of(LINE).min(self.apart);
        for line in (self.done..end).step_by(LINE) {
            for stream in
                (0..STREAMS).map(|stream| stream * self.apart + line).take_while(|&at| at < self.span.len())
            {
                fetch(self.span.ptr().wrapping_add(stream));
            }
        }
        self.done = end;
    }
}

/// Asks for the cache line at an address, which need not be mapped, to come into the second-level cache.
#[inline(always)]
pub fn fetch(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; any address is allowed, and every x86-64 has the instruction.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Element types for which every bit pattern is a value.
pub trait Word: Copy {}
impl Word for f32 {}
impl Word for f64 {}
impl Word for i32 {}
impl Word for i64 {}
impl Word for u64 {}

/// A window: an address and a length, `Copy` and shared between tasks. The op that made it decides which task writes which
/// part.
///
/// For windows into an engine's pools `Op::check` has made sure that what an op writes shares no memory with anything else it
/// uses; for eager ops the caller of `Run::run` guarantees it.
///
/// A window of an optional array that is not given has a null address: `is_some` is false, and nothing may be read
/// from it or written to it.
#[derive(Debug)]
pub struct Span<T> {
    start: *mut T,
    len: usize,
    of: PhantomData<T>,
}

impl<T> Clone for Span<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Span<T> {}

// SAFETY: a span is an address and a length; using it is unsafe and bound to the rules of `get` and `get_mut`.
unsafe impl<T> Send for Span<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Span<T> {}

impl<T: Word> Span<T> {
    /// The window of `len` elements at `start`.
    ///
    /// # Safety
    /// Unless `len` is 0 or `start` is null, `start` is aligned and the elements are memory of this process that stays
    /// allocated, and holds values, for as long as the span is used; what is only read may be read-only memory.
    pub unsafe fn from_raw(start: *mut T, len: usize) -> Self {
        Self { start, len, of: PhantomData }
    }

    /// An array that is not given.
    pub(crate) fn none(len: usize) -> Self {
        Self { start: std::ptr::null_mut(), len, of: PhantomData }
    }

    /// The window of a slice that this caller holds alone while the span is used.
    pub(crate) fn of_slice(x: &mut [T]) -> Self {
        Self { start: x.as_mut_ptr(), len: x.len(), of: PhantomData }
    }

    /// The window of the first `len` elements of an array of an eager op.
    ///
    /// # Safety
    /// The array's elements have type `T`; the rest as in [`Span::from_raw`].
    pub(crate) unsafe fn of(array: Array, len: usize) -> Self {
        Self { start: array.at.cast(), len, of: PhantomData }
    }

    /// How many elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether the array is given.
    pub(crate) fn is_some(self) -> bool {
        !self.start.is_null()
    }

    /// The address of the first element.
    pub fn ptr(self) -> *mut T {
        self.start
    }

    /// The window of some of the elements.
    #[inline(always)]
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "span range out of bounds");
        let start = if self.is_some() { self.start.wrapping_add(range.start) } else { self.start };
        Self { start, len: range.len(), of: PhantomData }
    }

    /// The window of row `index`, where each row has `cols` elements.
    #[inline(always)]
    pub(crate) fn row(self, index: usize, cols: usize) -> Self {
        self.part(index * cols..(index + 1) * cols)
    }

    /// Elements to read.
    ///
    /// # Safety
    /// While the slice lives nobody writes this range.
    #[inline(always)]
    pub unsafe fn get<'a>(self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.len, "span range out of bounds");
        if range.is_empty() {
            return &[];
        }
        assert!(self.is_some(), "an array that is not given");
        // SAFETY: whoever made the span guarantees its memory; the range lies in it; any bit pattern is a `Word`; the caller
        // rules out writers.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// Elements to write.
    ///
    /// # Safety
    /// While the slice lives nobody else reads or writes this range.
    #[inline(always)]
    pub unsafe fn get_mut<'a>(self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "span range out of bounds");
        if range.is_empty() {
            return &mut [];
        }
        assert!(self.is_some(), "an array that is not given");
        // SAFETY: as in `get`; the caller rules out every other use.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// All elements, to read.
    ///
    /// # Safety
    /// As [`Span::get`].
    #[inline(always)]
    pub unsafe fn all<'a>(self) -> &'a [T] {
        // SAFETY: passed on to the caller.
        unsafe { self.get(0..self.len) }
    }

    /// All elements, to write.
    ///
    /// # Safety
    /// As [`Span::get_mut`].
    #[inline(always)]
    pub unsafe fn all_mut<'a>(self) -> &'a mut [T] {
        // SAFETY: passed on to the caller.
        unsafe { self.get_mut(0..self.len) }
    }

    /// One element.
    ///
    /// # Safety
    /// As [`Span::get`].
    #[inline(always)]
    pub(crate) unsafe fn value(self, index: usize) -> T {
        // SAFETY: passed on to the caller.
        unsafe { self.get(index..index + 1)[0] }
    }

    /// Writes one element, if the array is given.
    ///
    /// # Safety
    /// As [`Span::get_mut`].
    #[inline(always)]
    pub(crate) unsafe fn set(self, index: usize, value: T) {
        if self.is_some() {
            // SAFETY: passed on to the caller.
            unsafe { self.get_mut(index..index + 1)[0] = value };
        }
    }
}
