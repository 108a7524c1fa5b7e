//! Many products of different sizes in one call: the experts of a layer.
//!
//! Products with a large operand b that keep all threads busy are computed like any other, one after the other. All
//! others are cut into blocks of c, and the blocks of all of them are the tasks of one run: many small experts fill the
//! cores too. Small operands b whose columns are contiguous are packed before, all of them, so that a block is whole rows of c, which the
//! caller may go on with while they are in a cache.
//!
//! order  as [`gemm`]: which way a product takes changes no bit, so it may depend on the threads.

use super::blocks::{self, Cut};
use super::local::{Beside, pack_right, packed_len};
use super::plan::{SharedPtr, reserve_most};
use super::workspace::{Ends, Workspace};
use super::{Gemm, gemm, gemv, kernels};
use crate::isa::Isa;
use crate::team::{TaskPanic, Team};
use std::ops::Range;

/// Multiply-adds for each thread from which on a product is cut up among all threads.
const SHARE: usize = 1 << 21;
/// Floats of right operands that are packed before the blocks, at most; where there are more, each block packs what it needs.
const PACKED: usize = 1 << 20;

/// Rows finished at a time where blocks are not rows.
const FINISHED: usize = 16;

/// Products without epilogues.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// How many there are.
    pub count: usize,
    /// Rows, columns and steps of any of them are at most these, in this call and in later ones of the same kind: memory is
    /// taken for the largest at once.
    pub most: [usize; 3],
    /// The product of a number below `count`; the same whenever it is asked for.
    pub product: &'a (dyn Fn(usize) -> Gemm<'static> + Sync),
    /// Called with the number of a product and some of its rows once these are final, while they are in a cache if that can be;
    /// every row is in one call. It may change these rows of c.
    pub finish: Option<&'a (dyn Fn(usize, Range<usize>) + Sync)>,
    /// Rows that `finish` uses beside those of a product: they are brought into the cache while it is computed.
    pub beside: Option<&'a (dyn Fn(usize) -> Beside + Sync)>,
}

impl<'a> Group<'a> {
    /// Products with whose rows nothing else is done.
    pub fn new(count: usize, most: [usize; 3], product: &'a (dyn Fn(usize) -> Gemm<'static> + Sync)) -> Self {
        Self { count, most, product, finish: None, beside: None }
    }
}

/// Computes all products of a group with all threads of `team`.
///
/// # Safety
/// As [`gemm`] for each product; the results share no memory.
///
/// # Errors
/// `product` panicked.
pub unsafe fn gemm_grouped(
    team: &Team,
    ws: &mut Workspace,
    isa: Isa,
    group: &Group<'_>,
) -> Result<(), TaskPanic> {
    let Group { count, most, product, finish, beside } = *group;
    let share = SHARE.saturating_mul(team.threads());
    let work = |[m, n, k]: [usize; 3]| m.saturating_mul(n).saturating_mul(k);
    let is_large = |g: &Gemm<'_>| !gemv::fits(g) && !blocks::fits(g) && work([g.m, g.n, g.k]) >= share;
    if work(most) >= share {
        reserve_most(ws, kernels(isa), team.threads(), most);
    }
    let packed = |g: &Gemm<'_>| if blocks::packs(g) { packed_len(kernels(isa), g) } else { (0, 0) };
    let packs = (0..count).map(|i| packed(&product(i)).1).sum::<usize>() <= PACKED;
    let packed = |g: &Gemm<'_>| if packs { packed(g) } else { (0, 0) };
    let cut = |g: &Gemm<'_>| Cut::new(g, most[0], team.threads(), packed(g).0 > 0);
    // Whether blocks are whole rows, and so are finished as they are computed.
    let by_rows = |g: &Gemm<'_>| !is_large(g) && matches!(cut(g), Cut::Rows(_));
    let mut total = Ends::default();
    ws.ends.clear();
    for i in 0..count {
        let g = product(i);
        if finish.is_some() && !by_rows(&g) {
            total.finishes += g.m.div_ceil(FINISHED);
        }
        if !is_large(&g) {
            let (panels, floats) = packed(&g);
            total.blocks += cut(&g).blocks(&g);
            total.panels += panels;
            total.floats += floats;
        }
        ws.ends.push(total);
    }
    // Another call may have rows for every product.
    let whole = |g: &Gemm<'_>| if g.b.cs != 1 && blocks::fits(g) { packed_len(kernels(isa), g).1 } else { 0 };
    let most_floats = (0..count).map(|i| whole(&product(i))).sum::<usize>().min(PACKED);
    ws.shared.reserve(total.floats.max(most_floats));
    ws.reserve_local(team.threads(), blocks::scratch_len(most[2]));
    // Each worker uses its own; the panels are written to by one task each.
    let (workers, panels) = (SharedPtr(ws.workers.as_mut_ptr()), SharedPtr(ws.shared.as_mut_ptr()));
    let ends = &ws.ends[..];
    let before = |i: usize| if i == 0 { Ends::default() } else { ends[i - 1] };
    team.run(total.panels, &|task, _| {
        let i = ends.partition_point(|end| end.panels <= task);
        // SAFETY: guaranteed by the caller; task - before is below the number of panels of this product.
        unsafe {
            let dst = { panels }.0.add(before(i).floats);
            pack_right(kernels(isa), &product(i), task - before(i).panels, dst);
        }
    })?;
    team.run(total.blocks, &|task, worker| {
        let i = ends.partition_point(|end| end.blocks <= task);
        let (g, before) = (product(i), before(i));
        // SAFETY: guaranteed by the caller; task - before is below the number of blocks of this product; tasks have disjoint
        // blocks of disjoint results; worker < threads, and no other task has this worker number.
        let (rows, _) = unsafe {
            let scratch = &mut (*{ workers }.0.add(worker)).local;
            let packed = (packed(&g).0 > 0).then(|| { panels }.0.add(before.floats).cast_const());
            let beside = beside.filter(|_| by_rows(&g)).map(|beside| beside(i));
            cut(&g).run(&g, task - before.blocks, (packed, beside), (isa, scratch))
        };
        if let Some(finish) = finish.filter(|_| by_rows(&g)) {
            finish(i, rows);
        }
    })?;
    for g in (0..count).map(product).filter(is_large) {
        // SAFETY: guaranteed by the caller.
        unsafe { gemm(team, ws, isa, &g) }?;
    }
    // The rows of all products are one list: many experts of few rows keep all threads busy too.
    let ends = &ws.ends[..];
    team.run(total.finishes, &|task, _| {
        let i = ends.partition_point(|end| end.finishes <= task);
        let first = (task - if i == 0 { 0 } else { ends[i - 1].finishes }) * FINISHED;
        if let Some(finish) = finish {
            finish(i, first..product(i).m.min(first + FINISHED));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{Beta, MatMut, MatRef};

    /// Rows of each product, columns, steps, and whether the columns of b are contiguous.
    struct Sizes {
        rows: Vec<usize>,
        n: usize,
        k: usize,
        transposed: bool,
    }

    /// Runs the products of `sizes` as a group, or without `threads` one after the other. With `doubles`, rows are doubled when they are
    /// final.
    fn run(
        isa: Isa,
        sizes: &Sizes,
        (a, b, c): (&[f32], &[f32], &mut [f32]),
        threads: Option<usize>,
        (beta, doubles): (Beta, bool),
    ) {
        let &Sizes { ref rows, n, k, transposed } = sizes;
        let (a, b, c) = (SharedPtr(a.as_ptr()), SharedPtr(b.as_ptr()), SharedPtr(c.as_mut_ptr()));
        let first = |i: usize| rows[..i].iter().sum::<usize>();
        let product = |i: usize| {
            let (a, b, c) = ({ a }.0, { b }.0, { c }.0);
            let left = MatRef::row_major(a.wrapping_add(first(i) * k), k);
            let b = b.wrapping_add(i * n * k);
            let right =
                if transposed { MatRef::row_major(b, k).transposed() } else { MatRef::row_major(b, n) };
            let c = MatMut { ptr: c.wrapping_add(first(i) * n), rs: n };
            Gemm::new((rows[i], n, k), left, right, c).beta(beta)
        };
        let double = |i: usize, rows: Range<usize>| {
            // SAFETY: rows of the result of product i, which this call alone uses.
            let c = unsafe {
                std::slice::from_raw_parts_mut({ c }.0.add((first(i) + rows.start) * n), rows.len() * n)
            };
            c.iter_mut().for_each(|c| *c *= 2.0);
        };
        let (team, mut ws) = (Team::new(threads.unwrap_or(2)), Workspace::new());
        // SAFETY: the matrices are as large as said and apart.
        unsafe {
            if threads.is_some() {
                let finish: Option<&(dyn Fn(usize, Range<usize>) + Sync)> =
                    if doubles { Some(&double) } else { None };
                let most = [first(rows.len()), n, k];
                let group = Group { finish, ..Group::new(rows.len(), most, &product) };
                gemm_grouped(&team, &mut ws, isa, &group).unwrap();
            } else {
                (0..rows.len()).map(product).for_each(|g| gemm(&team, &mut ws, isa, &g).unwrap());
                if doubles {
                    (0..rows.len()).for_each(|i| double(i, 0..rows[i]));
                }
            }
        }
    }

    /// The same bits as one product after the other, for any number of threads; every row is finished once, when it is final.
    fn agrees(sizes: &Sizes, threads: &[usize], modes: &[(Beta, bool)]) {
        let rows: usize = sizes.rows.iter().sum();
        let value = |i: usize| (i * 7919 % 1000) as f32 / 500.0 - 1.0;
        let a: Vec<f32> = (0..rows * sizes.k).map(value).collect();
        let b: Vec<f32> = (0..sizes.rows.len() * sizes.n * sizes.k).map(|i| value(i + 13)).collect();
        let start: Vec<f32> = (0..rows * sizes.n).map(|i| value(i + 5)).collect();
        for isa in Isa::supported() {
            for &mode in modes {
                let mut want = start.clone();
                run(isa, sizes, (&a, &b, &mut want), None, mode);
                for &threads in threads {
                    let mut got = start.clone();
                    run(isa, sizes, (&a, &b, &mut got), Some(threads), mode);
                    let differ = got.iter().zip(&want).position(|(a, b)| a.to_bits() != b.to_bits());
                    let row = differ.map(|at| at / sizes.n);
                    assert_eq!(row, None, "{isa:?}, {threads} threads, {mode:?}: this row is another");
                }
            }
        }
    }

    #[test]
    fn a_group_is_its_products_one_by_one() {
        let rows = vec![0, 1, 3, 5, 300, 0, 64, 700];
        let threads = [1, 2, 3, 8, 20];
        let sizes = Sizes { rows, n: 200, k: 130, transposed: true };
        agrees(&sizes, &threads, &[(Beta::Overwrite, false)]);
        agrees(&Sizes { transposed: false, ..sizes }, &threads, &[(Beta::Accumulate, false)]);
    }

    #[test]
    fn every_row_is_finished_once() {
        let modes = [(Beta::Overwrite, true)];
        // Right operands that are packed before, and experts of few rows, whose blocks are columns: 17 is one row more than a task.
        let rows = vec![3, 0, 100, 1, 17, 70, 2];
        agrees(&Sizes { rows, n: 200, k: 130, transposed: true }, &[1, 2, 8], &modes);
        // More right operands than are packed before: blocks are columns, or rows.
        let floats = |n: usize, count: usize| count * n.next_multiple_of(48) * 384;
        for (n, count) in [(200, 12), (144, 20)] {
            assert!(floats(n, count) > PACKED);
            agrees(&Sizes { rows: vec![40; count], n, k: 384, transposed: true }, &[1, 3], &modes);
        }
        // One of them is large, the others are not.
        let rows = vec![20, 300, 5, 0, 33];
        agrees(&Sizes { rows, n: 400, k: 300, transposed: true }, &[1, 3], &modes);
    }
}
