//! The engine's pools, and spans: typed windows into them that tasks on several threads share.

use crate::buffer::Buffer;
use ironhorse_core::{DType, Error, Layout, Pool, Result, Slot};
use std::marker::PhantomData;
use std::ops::Range;

/// All pools of an engine.
#[derive(Debug)]
pub struct Memory {
    pools: [Buffer; Pool::ALL.len()],
}

impl Memory {
    /// Nothing allocated yet.
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

/// Element types for which every bit pattern is a value.
pub trait Word: Copy {}
impl Word for f32 {}
impl Word for i32 {}
impl Word for u64 {}

/// A window into a pool. `Copy` and shareable: who writes which part is settled by the op.
///
/// `Op::check` has made sure that what an op writes shares no memory with anything else it uses, so the only duty
/// left to an op is that its tasks write disjoint parts.
#[derive(Clone, Copy, Debug)]
pub struct Span<T> {
    start: *mut T,
    len: usize,
    of: PhantomData<T>,
}

// SAFETY: a span is an address and a length; using it is unsafe and bound to the rules of `get` and `get_mut`.
unsafe impl<T> Send for Span<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Span<T> {}

impl<T: Word> Span<T> {
    /// The window of `len` elements at `start`.
    ///
    /// # Safety
    /// Unless `len` is 0, `start` is aligned and the elements are memory of this process that stays allocated, and
    /// holds values, for as long as the span is used; what is only read may be read-only memory.
    pub unsafe fn from_raw(start: *mut T, len: usize) -> Self {
        let start = if len == 0 { std::ptr::dangling_mut() } else { start };
        Self { start, len, of: PhantomData }
    }

    /// How many elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The address of the first element.
    pub fn ptr(self) -> *mut T {
        self.start
    }

    /// Whether both are the same window.
    pub fn is(self, other: Self) -> bool {
        std::ptr::eq(self.start, other.start)
    }

    /// Elements to read.
    ///
    /// # Safety
    /// While the slice lives nobody writes this range.
    pub unsafe fn get<'a>(self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.len, "span range out of bounds");
        // SAFETY: `span` checked that the window lies in its pool, the line above that the range lies in the window;
        // any bit pattern is a `Word`; the caller rules out writers.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// Elements to write.
    ///
    /// # Safety
    /// While the slice lives nobody else reads or writes this range.
    pub unsafe fn get_mut<'a>(self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "span range out of bounds");
        // SAFETY: as in `get`; the caller rules out every other use.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// All elements, to read.
    ///
    /// # Safety
    /// As [`Span::get`].
    pub unsafe fn all<'a>(self) -> &'a [T] {
        // SAFETY: passed on to the caller.
        unsafe { self.get(0..self.len) }
    }

    /// All elements, to write.
    ///
    /// # Safety
    /// As [`Span::get_mut`].
    pub unsafe fn all_mut<'a>(self) -> &'a mut [T] {
        // SAFETY: passed on to the caller.
        unsafe { self.get_mut(0..self.len) }
    }
}
