//! Many products of different sizes in one call: the experts of a layer.
//!
//! Products with a large operand b that keep all threads busy are computed like any other, one after the other. All
//! others are cut into blocks of c, and the blocks of all of them are the tasks of one run: many small experts fill the
//! cores too. Small operands b whose columns are contiguous are packed before, all of them, so that a block is whole rows of c, which the
//! caller may go on with while they are in a cache.
//!
//! order  as [`gemm`]: which way a product takes changes no bit, so it may depend on the threads.

use super::blocks::{self, Cut};
use super::local::{pack_right, packed_len};
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
    let Group { count, most, product, finish } = *group;
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
    let mut total = Ends::default();
    ws.ends.clear();
    for i in 0..count {
        let g = product(i);
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
    // Whether blocks are whole rows, and so are finished as they are computed.
    let by_rows = |g: &Gemm<'_>| !is_large(g) && matches!(cut(g), Cut::Rows(_));
    team.run(total.blocks, &|task, worker| {
        let i = ends.partition_point(|end| end.blocks <= task);
        let (g, before) = (product(i), before(i));
        // SAFETY: guaranteed by the caller; task - before is below the number of blocks of this product; tasks have disjoint
        // blocks of disjoint results; worker < threads, and no other task has this worker number.
        let (rows, _) = unsafe {
            let scratch = &mut (*{ workers }.0.add(worker)).local;
            let packed = (packed(&g).0 > 0).then(|| { panels }.0.add(before.floats).cast_const());
            cut(&g).run(&g, task - before.blocks, packed, (isa, scratch))
        };
        if let Some(finish) = finish.filter(|_| by_rows(&g)) {
            finish(i, rows);
        }
    })?;
    for g in (0..count).map(product).filter(is_large) {
        // SAFETY: guaranteed by the caller.
        unsafe { gemm(team, ws, isa, &g) }?;
    }
    let Some(finish) = finish else { return Ok(()) };
    for (i, g) in (0..count).map(|i| (i, product(i))).filter(|(_, g)| !by_rows(g)) {
        team.chunks(g.m, FINISHED, |rows, _| finish(i, rows))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{Beta, MatMut, MatRef};

    /// The same bits as one product after the other, for any number of threads; rows of experts from none to many.
    #[test]
    fn a_group_is_its_products_one_by_one() {
        let sizes = [0_usize, 1, 3, 5, 300, 0, 64, 700];
        let (n, k) = (200, 130);
        let rows: usize = sizes.iter().sum();
        let value = |i: usize| (i * 7919 % 1000) as f32 / 500.0 - 1.0;
        let a: Vec<f32> = (0..rows * k).map(value).collect();
        let b: Vec<f32> = (0..sizes.len() * n * k).map(|i| value(i + 13)).collect();
        for isa in Isa::supported() {
            for (beta, transposed) in [(Beta::Overwrite, true), (Beta::Accumulate, false)] {
                let run = |c: &mut Vec<f32>, threads: Option<usize>| {
                    let c = SharedPtr(c.as_mut_ptr());
                    let (a, b) = (SharedPtr(a.as_ptr()), SharedPtr(b.as_ptr()));
                    let product = |i: usize| {
                        let (a, b, c) = ({ a }.0, { b }.0, { c }.0);
                        let first: usize = sizes[..i].iter().sum();
                        let left = MatRef::row_major(a.wrapping_add(first * k), k);
                        let b = b.wrapping_add(i * n * k);
                        let right = if transposed {
                            MatRef::row_major(b, k).transposed()
                        } else {
                            MatRef::row_major(b, n)
                        };
                        let c = MatMut { ptr: c.wrapping_add(first * n), rs: n };
                        Gemm::new((sizes[i], n, k), left, right, c).beta(beta)
                    };
                    let team = Team::new(threads.unwrap_or(2));
                    let mut ws = Workspace::new();
                    // SAFETY: the matrices are as large as said and apart.
                    unsafe {
                        match threads {
                            Some(_) => {
                                let group = Group {
                                    count: sizes.len(),
                                    most: [rows, n, k],
                                    product: &product,
                                    finish: None,
                                };
                                gemm_grouped(&team, &mut ws, isa, &group).unwrap();
                            }
                            None => {
                                let all = (0..sizes.len()).map(product);
                                all.for_each(|g| gemm(&team, &mut ws, isa, &g).unwrap());
                            }
                        }
                    }
                };
                let start: Vec<f32> = (0..rows * n).map(|i| value(i + 5)).collect();
                let mut want = start.clone();
                run(&mut want, None);
                for threads in [1, 2, 3, 8, 20] {
                    let mut got = start.clone();
                    run(&mut got, Some(threads));
                    assert!(
                        got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{isa:?} {threads}"
                    );
                }
            }
        }
    }
}
