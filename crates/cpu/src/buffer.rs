//! Memory on boundaries of cache lines and, where it is large, in large pages.
//!
//! A matrix product touches a new page every few hundred bytes; with pages of 4 KiB the look-ups of their addresses
//! cost 4 % of it. Linux gives large pages to memory that asks for them.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

const CACHE_LINE: usize = 64;
/// Size of a large page on x86-64, and on aarch64 with pages of 4 KiB.
const LARGE_PAGE: usize = 2 << 20;

/// Floats on a cache-line boundary, in large pages if there are at least half a page of them. Grows, never shrinks.
#[derive(Debug)]
pub struct Buffer {
    ptr: NonNull<f32>,
    floats: usize,
}

// SAFETY: it owns its memory, as a Vec does.
unsafe impl Send for Buffer {}
// SAFETY: shared references give no access that writes.
unsafe impl Sync for Buffer {}

impl Default for Buffer {
    fn default() -> Self {
        Self::new()
    }
}

impl Buffer {
    /// An empty one.
    pub const fn new() -> Self {
        Self { ptr: NonNull::dangling(), floats: 0 }
    }

    /// A buffer of `floats` zeros.
    pub fn zeroed(floats: usize) -> Self {
        let mut buffer = Self::new();
        buffer.reserve(floats);
        buffer
    }

    /// How many floats it holds.
    pub fn len(&self) -> usize {
        self.floats
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.floats == 0
    }

    /// Makes room for `floats`. If it has to grow, all it holds becomes zero.
    pub fn reserve(&mut self, floats: usize) {
        if floats > self.floats {
            self.free();
            if self.grow(floats).is_none() {
                handle_alloc_error(layout(floats).unwrap_or(Layout::new::<f32>()));
            }
        }
    }

    /// Makes room for `floats`, keeping what it holds; what is new is zero. `None` if there is not so much memory.
    pub fn grow(&mut self, floats: usize) -> Option<()> {
        if floats <= self.floats {
            return Some(());
        }
        let layout = layout(floats)?;
        // SAFETY: the layout is not empty, as floats > 0.
        let ptr = NonNull::new(unsafe { alloc(layout) }.cast::<f32>())?;
        // Before the first access: pages that are already mapped stay small.
        if layout.align() == LARGE_PAGE {
            advise_large_pages(ptr.as_ptr().cast(), layout.size());
        }
        // SAFETY: the allocation holds `floats` floats, and zero bytes are the float 0.
        unsafe { ptr.write_bytes(0, floats) };
        // SAFETY: both hold at least `self.floats` floats and are separate allocations.
        unsafe { ptr.copy_from_nonoverlapping(self.ptr, self.floats) };
        self.free();
        (self.ptr, self.floats) = (ptr, floats);
        Some(())
    }

    fn free(&mut self) {
        if let Some(layout) = layout(self.floats).filter(|_| self.floats > 0) {
            // SAFETY: allocated by `grow` with the layout of the same number of floats.
            unsafe { dealloc(self.ptr.as_ptr().cast(), layout) };
            (self.ptr, self.floats) = (NonNull::dangling(), 0);
        }
    }

    /// The first float, for memory that is shared out by address.
    pub fn start(&self) -> *mut f32 {
        self.ptr.as_ptr()
    }

    /// The first float.
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.ptr.as_ptr()
    }

    /// All floats.
    pub fn as_slice(&self) -> &[f32] {
        // SAFETY: `floats` initialised floats, or a dangling pointer and none.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.floats) }
    }

    /// All floats, to write.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as `as_slice`, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.floats) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.free();
    }
}

/// Whole cache lines, or whole large pages; `None` beyond the address space.
fn layout(floats: usize) -> Option<Layout> {
    let bytes = floats.checked_mul(size_of::<f32>())?;
    let align = if bytes >= LARGE_PAGE / 2 { LARGE_PAGE } else { CACHE_LINE };
    Layout::from_size_align(bytes.checked_next_multiple_of(align)?, align).ok()
}

/// Asks for large pages. A refusal changes nothing but the speed.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn advise_large_pages(start: *mut u8, bytes: usize) {
    unsafe extern "C" {
        fn madvise(start: *mut core::ffi::c_void, bytes: usize, advice: i32) -> i32;
    }
    const MADV_HUGEPAGE: i32 = 14;
    // SAFETY: the range is whole pages of one allocation of ours; this advice changes no contents.
    let _ = unsafe { madvise(start.cast(), bytes, MADV_HUGEPAGE) };
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn advise_large_pages(_: *mut u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_aligned_and_zeroed() {
        let mut buffer = Buffer::new();
        assert!(buffer.is_empty() && buffer.as_slice().is_empty());
        for floats in [1, 17, 1000, 300_000, 2_000_003] {
            buffer.reserve(floats);
            assert_eq!(buffer.len(), floats);
            assert_eq!(buffer.as_mut_ptr() as usize % CACHE_LINE, 0);
            assert!(buffer.as_slice().iter().all(|&x| x == 0.0));
            buffer.as_mut_slice().fill(1.0);
            buffer.reserve(1);
            assert_eq!((buffer.len(), buffer.as_slice()[floats - 1]), (floats, 1.0));
        }
        assert_eq!(Buffer::zeroed(5).as_slice(), [0.0; 5]);
    }
}
