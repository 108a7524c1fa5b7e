//! Counting allocations, for tests that nothing is allocated. A macro, because the global allocator belongs to the test's
//! own crate, and so does the unsafe code that it needs.

/// Declares a global allocator that counts, and a module `allocations` that reads its counters. They belong to the whole
/// process: put one test into a file that uses them.
///
/// `allocations::count()` is the number of allocations so far; `allocations::take_large_bytes()` the bytes of those of at
/// least `allocations::LARGE` since it was last called.
#[macro_export]
macro_rules! count_allocations {
    () => {
        #[allow(dead_code)] // not every test looks at large allocations
        mod allocations {
            use std::alloc::{GlobalAlloc, Layout, System};
            use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

            struct Counting;

            #[global_allocator]
            static COUNTING: Counting = Counting;
            static COUNT: AtomicUsize = AtomicUsize::new(0);
            static LARGE_BYTES: AtomicUsize = AtomicUsize::new(0);

            /// Bytes from which an allocation may be a pool of an engine.
            pub const LARGE: usize = 64 << 10;

            // SAFETY: every method passes its arguments on to the system's allocator.
            unsafe impl GlobalAlloc for Counting {
                unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
                    COUNT.fetch_add(1, SeqCst);
                    if layout.size() >= LARGE {
                        LARGE_BYTES.fetch_add(layout.size(), SeqCst);
                    }
                    // SAFETY: the caller guarantees a layout of more than 0 bytes.
                    unsafe { System.alloc(layout) }
                }

                unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
                    // SAFETY: the caller guarantees that `ptr` came from `alloc` with this layout.
                    unsafe { System.dealloc(ptr, layout) }
                }

                unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
                    COUNT.fetch_add(1, SeqCst);
                    // SAFETY: the caller guarantees that `ptr` came from `alloc` with this layout, and a size of more
                    // than 0 bytes.
                    unsafe { System.realloc(ptr, layout, size) }
                }
            }

            pub fn count() -> usize {
                COUNT.load(SeqCst)
            }

            pub fn take_large_bytes() -> usize {
                LARGE_BYTES.swap(0, SeqCst)
            }
        }
    };
}
