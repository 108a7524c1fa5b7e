//! A loader whose shards were all read once, and are few enough to stay open, allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use ironhorse_train::data::{Loader, LoaderConfig, OPEN_SHARDS, open_shards};
use ironhorse_train::format::shards::{ShardKind, ShardWriter};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every method calls the same method of `System`, which implements `GlobalAlloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller of `alloc` guarantees a layout of non-zero size.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller of `dealloc` guarantees that `alloc` returned `ptr` for this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller of `realloc` guarantees that `alloc` returned `ptr` for this layout, and a valid `size`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// One test, because the counter belongs to the whole process.
#[test]
fn batches_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..OPEN_SHARDS as u32 {
        let path = folder.path().join(format!("s_{number:02}.bin"));
        let mut writer = ShardWriter::create(&path, ShardKind::U16).unwrap();
        writer.push(&[number; 100]).unwrap();
        writer.finish().unwrap();
    }
    let sources = open_shards(&[folder.path().join("*.bin")]).unwrap();
    let config = LoaderConfig { batch: 3, seq: 16, vocab: 64, seed: 1, shuffle: true };
    let mut loader = Loader::new(sources, config).unwrap();
    let (mut x, mut y) = (vec![0; 48], vec![0; 48]);
    // two epochs: every shard is read
    for _ in 0..2 * 64 * 6 / 3 {
        loader.next_batch(&mut x, &mut y).unwrap();
    }
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    for _ in 0..1000 {
        loader.next_batch(&mut x, &mut y).unwrap();
    }
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), before);
}
