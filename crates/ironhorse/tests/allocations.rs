//! After the first step, a training step allocates nothing.

use ironhorse::core::Scalars;
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::{Gpt2Config, ModelConfig};
use ironhorse::train::session::{Session, SessionSpec};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Bytes of allocations large enough to be pools.
static LARGE_BYTES: AtomicUsize = AtomicUsize::new(0);
const LARGE: usize = 64 << 10;

// SAFETY: every method calls the same method of `System`, which implements `GlobalAlloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        if layout.size() >= LARGE {
            LARGE_BYTES.fetch_add(layout.size(), Ordering::SeqCst);
        }
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

/// One test, because the counters belong to the whole process.
#[test]
fn steps_after_the_first_allocate_nothing() {
    let gpt2 = ModelConfig::Gpt2(Gpt2Config::new(130, 500, 2, 3, 48));
    let sizes = "hidden=48,layers=2,heads=3,kv_heads=1,experts=5,top_k=2,ffn=70,vocab=500,context=130";
    let experts = ModelConfig::parse(sizes).unwrap();
    for (threads, config) in [1, 2, 3].into_iter().flat_map(|threads| [(threads, gpt2), (threads, experts)]) {
        let spec = SessionSpec { train: Some((2, 130)), ..SessionSpec::default() };
        LARGE_BYTES.store(0, Ordering::SeqCst);
        let mut session = Session::new(Box::new(CpuEngine::new(threads)), config, &spec).unwrap();
        let planned = session.train_program().unwrap().layout().total();
        let taken = LARGE_BYTES.swap(0, Ordering::SeqCst);
        let rounding = 7 * (2 << 20); // each pool is rounded up to whole huge pages
        assert!(
            taken <= planned + rounding && taken + 7 * LARGE >= planned,
            "{taken} for a plan of {planned}"
        );
        session.init(1).unwrap();
        let x: Vec<i32> = (0..260).map(|i| i % 500).collect();
        let y: Vec<i32> = (0..260).map(|i| (i + 1) % 500).collect();
        let mut step = |step: u32| {
            for micro_step in 0..2 {
                let s = Scalars {
                    step,
                    micro_step,
                    loss_scale: 1.0 / 520.0,
                    grad_clip: 1.0,
                    ..Scalars::default()
                };
                session.micro_step(&x, &y, &s).unwrap();
            }
            session.update(&Scalars { step, ..Scalars::default() }).unwrap();
        };
        step(1);
        assert!(ALLOCATIONS.load(Ordering::SeqCst) > 0, "the counter counts");
        // On a busy machine a worker thread may start, and allocate, only now. Allocations of the steps themselves
        // would occur in every attempt.
        let fewest = (0..3).map(|attempt| {
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            (2 + 30 * attempt..32 + 30 * attempt).for_each(&mut step);
            ALLOCATIONS.load(Ordering::SeqCst) - before
        });
        assert_eq!(fewest.min(), Some(0), "{} with {threads} threads", config.kind());
    }
}
