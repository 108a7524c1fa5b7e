//! A product allocates nothing once the workspace has grown, on any thread.

use ironhorse_cpu::buffer::Buffer;
use ironhorse_cpu::gemm::{Gemm, LocalScratch, MatMut, MatRef, Workspace, gemm, gemm_local};
use ironhorse_cpu::isa::Isa;
use ironhorse_cpu::team::Team;

ironhorse_testkit::count_allocations!();

#[test]
fn second_round_allocates_nothing() {
    let team = Team::new(3);
    let mut ws = Workspace::new();
    let mut scratch = LocalScratch::new();
    let (mut a, mut b, mut c) = (Buffer::zeroed(1 << 20), Buffer::zeroed(1 << 20), Buffer::zeroed(1 << 20));
    let mut round = || {
        for (m, n, k) in [(64, 500, 300), (500, 64, 100), (1, 500, 300), (60, 300, 2000)] {
            let left = MatRef::row_major(a.as_mut_ptr(), k);
            let right = MatRef::row_major(b.as_mut_ptr(), k).transposed();
            let g = Gemm::new((m, n, k), left, right, MatMut { ptr: c.as_mut_ptr(), rs: n });
            // SAFETY: every matrix has at most 2^20 elements.
            unsafe { gemm(&team, &mut ws, Isa::detect(), &g) }.unwrap();
            // SAFETY: every matrix has at most 2^20 elements, and the scratch is used by this thread alone.
            unsafe { gemm_local(&mut scratch, Isa::detect(), &g) };
        }
        team.chunks(100, 7, |_, _| ()).unwrap();
    };
    round();
    // On a busy machine a worker thread may start, and allocate, only now. Allocations of the products themselves would
    // occur in every attempt.
    let fewest = (0..5).map(|_| {
        let before = allocations::count();
        (0..20).for_each(|_| round());
        allocations::count() - before
    });
    assert_eq!(fewest.min(), Some(0));
}
