//! Many products of different sizes in one call: the experts of a layer.
//!
//! Products with a large operand b that keep all threads busy are computed like any other, one after the other. All
//! others are cut into blocks of c, and the blocks of all of them are the tasks of one run: many small experts fill the
//! cores too. Small operands b whose columns are contiguous are packed before, all of them, so that a block is whole rows of c, which the
//! caller may go on with while they are in a cache. Products that round their operands are cut as if they were alone (`plan`), and their
//! tasks join the run where what these share is small.
//!
//! order  as [`gemm`]: which way a product takes changes no bit, so it may depend on the threads.

use super::blocks::{self, Cut};
use super::kernel::LINE;
use super::local::{Beside, pack_right, packed_len};
use super::plan::{KC, Plan, SharedPtr, TILED_STEPS, reserve_most};
use super::sliced::{self, Sliced};
use super::workspace::Ends;
use super::{Gemm, Workspace, gemm, gemv, kernels, rounding_kernels};
use crate::isa::Isa;
use crate::team::{TaskPanic, Team};
use ironhorse_core::Operands;
use std::ops::Range;

/// Multiply-adds for each thread from which on a product is cut up among all threads.
const SHARE: usize = 1 << 21;
/// Floats of right operands that are packed before the blocks, at most; where there are more, each block packs what it needs.
const PACKED: usize = 1 << 20;
/// The same for products that round their operands; where there are more, such products are computed one after the other.
const PLANNED: usize = 1 << 22;

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

/// How a product of a group is computed.
enum Way<'a> {
    /// By all threads, before the others.
    Alone,
    /// In blocks. Panels of b that are packed before, and floats of all of them; none if b stays as it is.
    Blocks(Cut, (usize, usize)),
    /// By the tasks of a plan of its own.
    Planned(Plan<'a>),
    /// In slices of k, whose sums are added afterwards.
    Sliced(Sliced<'a>),
}

impl Way<'_> {
    /// Whether tasks compute whole rows, which are finished as soon as they are.
    fn has_whole_rows(&self) -> bool {
        match self {
            Self::Alone | Self::Sliced(_) => false,
            Self::Blocks(cut, _) => matches!(cut, Cut::Rows(_)),
            Self::Planned(plan) => plan.has_whole_rows(),
        }
    }

    /// Tasks of packing, floats for what is packed or summed, and tasks of the run.
    fn needs(&self, g: &Gemm<'_>) -> Ends {
        match self {
            Self::Alone => Ends::default(),
            &Self::Blocks(cut, (panels, floats)) => {
                Ends { panels, floats, blocks: cut.blocks(g), ..Ends::default() }
            }
            Self::Planned(plan) => Ends {
                panels: plan.packings(),
                floats: plan.shared_len().unwrap_or(0),
                blocks: plan.tasks(),
                ..Ends::default()
            },
            Self::Sliced(sliced) => Ends {
                floats: sliced.sums_len().next_multiple_of(LINE),
                blocks: sliced.slices(),
                ..Ends::default()
            },
        }
    }
}

/// What decides how the products of a group are computed.
struct Ways {
    isa: Isa,
    threads: usize,
    /// Rows of all products.
    rows: usize,
    /// Whether right operands are packed before, and whether products that round their operands are part of the run.
    packs: bool,
    plans: bool,
}

impl Ways {
    fn new(isa: Isa, threads: usize, group: &Group<'_>) -> Self {
        let ways = Self { isa, threads, rows: group.most[0], packs: true, plans: true };
        let floats = |of: fn(&Way<'_>) -> bool| {
            let of_one = |i| {
                let g = (group.product)(i);
                let way = ways.of(&g);
                if of(&way) { way.needs(&g).floats } else { 0 }
            };
            (0..group.count).map(of_one).sum::<usize>()
        };
        let packs = floats(|way| matches!(way, Way::Blocks(..))) <= PACKED;
        let plans = floats(|way| matches!(way, Way::Planned(_) | Way::Sliced(_))) <= PLANNED;
        Self { packs, plans, ..ways }
    }

    fn of<'a>(&self, g: &'a Gemm<'a>) -> Way<'a> {
        if g.is_rounded() {
            if !self.plans {
                return Way::Alone;
            }
            if let Some(sliced) = Sliced::new(g, self.isa) {
                return Way::Sliced(sliced);
            }
            let plan = Plan::new(g, rounding_kernels(self.isa), self.threads);
            return if plan.shared_len().is_some() { Way::Planned(plan) } else { Way::Alone };
        }
        let is_large = work([g.m, g.n, g.k]) >= SHARE.saturating_mul(self.threads);
        if is_large && !gemv::fits(g) && !blocks::fits(g) {
            return Way::Alone;
        }
        let packed = if self.packs && blocks::packs(g) { packed_len(kernels(self.isa), g) } else { (0, 0) };
        Way::Blocks(Cut::new(g, self.rows, self.threads, packed.0 > 0), packed)
    }
}

/// Whether a product that rounds its operands is computed in whole rows, where a group has no other.
pub(super) fn plans_rows(g: &Gemm<'_>, isa: Isa, threads: usize) -> bool {
    let plan = g.is_rounded().then(|| Plan::new(g, rounding_kernels(isa), threads));
    plan.is_some_and(|plan| {
        plan.has_whole_rows() && plan.shared_len().is_some_and(|floats| floats <= PLANNED)
    })
}

/// Of all products before one.
fn before_of(ends: &[Ends], i: usize) -> Ends {
    if i == 0 { Ends::default() } else { ends[i - 1] }
}

/// Multiply-adds.
fn work([m, n, k]: [usize; 3]) -> usize {
    m.saturating_mul(n).saturating_mul(k)
}

/// Takes memory for the largest products that this group may have in later calls.
fn reserve(ws: &mut Workspace, isa: Isa, threads: usize, group: &Group<'_>) {
    let Group { count, most, product, .. } = *group;
    if work(most) >= SHARE.saturating_mul(threads) {
        reserve_most(ws, kernels(isa), threads, most);
    }
    // Another call may have rows for every product.
    let whole = |g: &Gemm<'_>| if g.b.cs != 1 && blocks::fits(g) { packed_len(kernels(isa), g).1 } else { 0 };
    let mut floats = (0..count).map(|i| whole(&product(i))).sum::<usize>().min(PACKED);
    if (0..count).any(|i| product(i).operands == Operands::Bf16) {
        let kernels = rounding_kernels(isa);
        reserve_most(ws, kernels, threads, most);
        ws.reserve(0, threads, (sliced::most_scratch([most[0], most[1]], kernels), 0));
        // The lesser side is shared. Steps are as many for each product, or they are shared out.
        let steps = if (0..count).all(|i| product(i).k == most[2]) { count * most[2] } else { most[2] };
        let slices = steps / KC + count;
        let lesser = most[0].min(most[1]).next_multiple_of(kernels.mr.max(kernels.nr));
        let planned = lesser * (steps + slices * (TILED_STEPS + kernels.unit));
        let sums = sliced::most_sums([most[0], most[1]], slices, kernels);
        floats += planned.max(sums).min(PLANNED);
    }
    ws.shared.reserve(floats);
    ws.reserve_local(threads, blocks::scratch_len(most[2]));
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
    let Group { count, product, finish, beside, .. } = *group;
    let threads = team.threads();
    reserve(ws, isa, threads, group);
    let ways = Ways::new(isa, threads, group);
    // These come first: they use the memory of the others.
    for g in (0..count).map(product).filter(|g| matches!(ways.of(g), Way::Alone)) {
        // SAFETY: guaranteed by the caller.
        unsafe { gemm(team, ws, isa, &g) }?;
    }
    let mut total = Ends::default();
    ws.ends.clear();
    for i in 0..count {
        let g = product(i);
        let way = ways.of(&g);
        if matches!(way, Way::Sliced(_)) || (finish.is_some() && !way.has_whole_rows()) {
            total.finishes += g.m.div_ceil(FINISHED);
        }
        let needs = way.needs(&g);
        total.blocks += needs.blocks;
        total.panels += needs.panels;
        total.floats += needs.floats;
        ws.ends.push(total);
        match &way {
            Way::Planned(plan) => ws.reserve(0, threads, plan.scratch()),
            Way::Sliced(sliced) => ws.reserve(0, threads, (sliced.scratch(), 0)),
            Way::Alone | Way::Blocks(..) => {}
        }
    }
    ws.shared.reserve(total.floats);
    // Each worker uses its own; the panels are written to by one task each.
    let (workers, panels) = (SharedPtr(ws.workers.as_mut_ptr()), SharedPtr(ws.shared.as_mut_ptr()));
    let ends = &ws.ends[..];
    team.run(total.panels, &|task, _| {
        let i = ends.partition_point(|end| end.panels <= task);
        let (g, task) = (product(i), task - before_of(ends, i).panels);
        // SAFETY: guaranteed by the caller; the task is below the number of those of this product, which has these floats.
        unsafe {
            let dst = { panels }.0.add(before_of(ends, i).floats);
            match ways.of(&g) {
                Way::Planned(plan) => plan.pack_shared(task, dst, &(0..plan.slices())),
                _ => pack_right(kernels(isa), &g, task, dst),
            }
        }
    })?;
    team.run(total.blocks, &|task, worker| {
        let i = ends.partition_point(|end| end.blocks <= task);
        let (g, before) = (product(i), before_of(ends, i));
        let (task, way) = (task - before.blocks, ways.of(&g));
        // SAFETY: guaranteed by the caller; the task is below the number of those of this product; tasks have disjoint blocks of disjoint
        // results; worker < threads, and no other task has this worker number.
        let rows = unsafe {
            let scratch = &mut *{ workers }.0.add(worker);
            let packed = { panels }.0.add(before.floats).cast_const();
            match &way {
                Way::Alone => return,
                Way::Sliced(sliced) => {
                    return sliced.task(task, packed.cast_mut(), scratch.block.as_mut_ptr());
                }
                Way::Planned(plan) => plan.task(task, &(0..plan.slices()), packed, scratch, worker),
                Way::Blocks(cut, (count, _)) => {
                    let packed = (*count > 0).then_some(packed);
                    let beside = beside.filter(|_| way.has_whole_rows()).map(|beside| beside(i));
                    cut.run(&g, task, (packed, beside), (isa, &mut scratch.local)).0
                }
            }
        };
        if let Some(finish) = finish.filter(|_| way.has_whole_rows()) {
            finish(i, rows);
        }
    })?;
    // The rows of all products are one list: many experts of few rows keep all threads busy too.
    team.run(total.finishes, &|task, _| {
        let i = ends.partition_point(|end| end.finishes <= task);
        let (g, before) = (product(i), before_of(ends, i));
        let first = (task - before.finishes) * FINISHED;
        let rows = first..g.m.min(first + FINISHED);
        if let Way::Sliced(sliced) = ways.of(&g) {
            // SAFETY: the run has left the sums of all slices; tasks have disjoint rows.
            unsafe { sliced.finish(rows.clone(), { panels }.0.add(before.floats)) };
        }
        if let Some(finish) = finish {
            finish(i, rows);
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
        operands: Operands,
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
        let &Sizes { ref rows, n, k, transposed, operands } = sizes;
        let (a, b, c) = (SharedPtr(a.as_ptr()), SharedPtr(b.as_ptr()), SharedPtr(c.as_mut_ptr()));
        let first = |i: usize| rows[..i].iter().sum::<usize>();
        let product = |i: usize| {
            let (a, b, c) = ({ a }.0, { b }.0, { c }.0);
            let left = MatRef::row_major(a.wrapping_add(first(i) * k), k);
            let b = b.wrapping_add(i * n * k);
            let right =
                if transposed { MatRef::row_major(b, k).transposed() } else { MatRef::row_major(b, n) };
            let c = MatMut { ptr: c.wrapping_add(first(i) * n), rs: n };
            Gemm::new((rows[i], n, k), left, right, c).beta(beta).operands(operands)
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
        let threads = [1, 2, 3, 8, 20];
        for operands in [Operands::F32, Operands::Bf16] {
            let rows = vec![0, 1, 3, 5, 300, 0, 64, 700];
            let sizes = Sizes { rows, n: 200, k: 130, transposed: true, operands };
            agrees(&sizes, &threads, &[(Beta::Overwrite, false)]);
            agrees(&Sizes { transposed: false, ..sizes }, &threads, &[(Beta::Accumulate, false)]);
        }
    }

    /// With more of what is packed than is packed at once, and with slices of k that are more than a phase.
    #[test]
    fn large_products_that_round_are_those_one_by_one() {
        for (count, n, k) in [(200, 64, 390), (2, 48, 20_000)] {
            let rows = vec![50; count];
            let sizes = Sizes { rows, n, k, transposed: true, operands: Operands::Bf16 };
            agrees(&sizes, &[1, 3], &[(Beta::Accumulate, true)]);
        }
    }

    /// The gradients of weights: what is summed over are the rows of experts, few and many of them.
    #[test]
    fn sums_over_rows_are_those_one_by_one() {
        let rows = [0_usize, 31, 40, 1000, 384, 385, 1300];
        let first = |i: usize| rows[..i].iter().sum::<usize>();
        let all = first(rows.len());
        for (m, n) in [(200, 64), (33, 100), (64, 64), (300, 200)] {
            let value = |i: usize| (i * 7919 % 1000) as f32 / 500.0 - 1.0;
            let a: Vec<f32> = (0..all * m).map(value).collect();
            let b: Vec<f32> = (0..all * n).map(|i| value(i + 13)).collect();
            let start: Vec<f32> = (0..rows.len() * m * n).map(|i| value(i + 5)).collect();
            for (isa, beta) in
                Isa::supported().flat_map(|isa| [Beta::Overwrite, Beta::Accumulate].map(|beta| (isa, beta)))
            {
                let run = |threads: Option<usize>| {
                    let mut c = start.clone();
                    let (a, b, to) =
                        (SharedPtr(a.as_ptr()), SharedPtr(b.as_ptr()), SharedPtr(c.as_mut_ptr()));
                    let product = |i: usize| {
                        let (a, b, c) = ({ a }.0, { b }.0, { to }.0);
                        let left = MatRef::row_major(a.wrapping_add(first(i) * m), m).transposed();
                        let right = MatRef::row_major(b.wrapping_add(first(i) * n), n);
                        let c = MatMut { ptr: c.wrapping_add(i * m * n), rs: n };
                        Gemm::new((m, n, rows[i]), left, right, c).beta(beta).operands(Operands::Bf16)
                    };
                    let (team, mut ws) = (Team::new(threads.unwrap_or(2)), Workspace::new());
                    // SAFETY: the matrices are as large as said and apart.
                    unsafe {
                        if threads.is_some() {
                            let group = Group::new(rows.len(), [m, n, all], &product);
                            gemm_grouped(&team, &mut ws, isa, &group).unwrap();
                        } else {
                            (0..rows.len()).map(product).for_each(|g| gemm(&team, &mut ws, isa, &g).unwrap());
                        }
                    }
                    c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let want = run(None);
                for threads in [1, 2, 8] {
                    assert!(run(Some(threads)) == want, "{isa:?}, {m} by {n}, {beta:?}, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn every_row_is_finished_once() {
        let modes = [(Beta::Overwrite, true)];
        // Right operands that are packed before, and experts of few rows, whose blocks are columns: 17 is one row more than a task.
        for operands in [Operands::F32, Operands::Bf16] {
            let rows = vec![3, 0, 100, 1, 17, 70, 2, 300];
            agrees(&Sizes { rows, n: 200, k: 130, transposed: true, operands }, &[1, 2, 8], &modes);
        }
        let operands = Operands::F32;
        // More right operands than are packed before: blocks are columns, or rows.
        let floats = |n: usize, count: usize| count * n.next_multiple_of(48) * 384;
        for (n, count) in [(200, 12), (144, 20)] {
            assert!(floats(n, count) > PACKED);
            agrees(&Sizes { rows: vec![40; count], n, k: 384, transposed: true, operands }, &[1, 3], &modes);
        }
        // One of them is large, the others are not.
        let rows = vec![20, 300, 5, 0, 33];
        agrees(&Sizes { rows, n: 400, k: 300, transposed: true, operands }, &[1, 3], &modes);
    }
}
