//! Matrix products.

use super::process_team::{ProcessTeam, with_team};
use super::{Failed, Run, Span};
use crate::gemm::{self as product, Beta, Group, LocalScratch, MatMut, MatRef, gemm_grouped, gemm_local};
use crate::kernel::elementwise::scale_by;
use crate::team::Split;
use ironhorse_core::eager::{Array, Gemm, GemmShape, GroupedGemm};

/// Multiply-adds of a product below which waking threads costs more than it gains.
const WORTH_IT: usize = 1 << 19;
/// Products of no more than this many multiply-adds, and no side longer than [`SMALL_SIDE`], are made by one thread.
const SMALL: usize = 1 << 20;
const SMALL_SIDE: usize = 256;

/// The address of an array, to be shared between tasks.
fn address(array: Array) -> Span<f32> {
    // SAFETY: a window without elements.
    unsafe { Span::of(array, 0) }
}

fn multiply_adds(s: &GemmShape) -> usize {
    s.m.saturating_mul(s.n).saturating_mul(s.k)
}

/// The product of matrices that start `from` elements into the arrays.
fn describe<'a>(s: &GemmShape, [a, b, c]: [Span<f32>; 3], from: [usize; 3]) -> product::Gemm<'a> {
    let k = if s.alpha == 0.0 { 0 } else { s.k };
    let beta = if s.beta == 0.0 { Beta::Overwrite } else { Beta::Accumulate };
    let matrix = |at: Span<f32>, from: usize, [rows, cols]: [usize; 2], transposed: bool| {
        let ptr = at.ptr().wrapping_add(from).cast_const();
        if transposed { MatRef::row_major(ptr, rows).transposed() } else { MatRef::row_major(ptr, cols) }
    };
    let a = matrix(a, from[0], [s.m, s.k], s.transpose_a);
    let b = matrix(b, from[1], [s.k, s.n], s.transpose_b);
    let c = MatMut { ptr: c.ptr().wrapping_add(from[2]), rs: s.n };
    product::Gemm::new((s.m, s.n, k), a, b, c).alpha(s.alpha).beta(beta)
}

impl Run for Gemm {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, s) = (ProcessTeam.isa(), &self.shape);
        let steps = [s.m * s.k, s.k * s.n, s.m * s.n];
        let results = s.batch * steps[2];
        if results == 0 {
            return Ok(());
        }
        if s.beta != 0.0 && s.beta != 1.0 {
            // SAFETY: guaranteed by the caller of `run`.
            let c = unsafe { Span::<f32>::of(self.c, results) };
            // SAFETY: tasks have disjoint ranges.
            ProcessTeam.pieces(results, 1 << 14, 1, |r| unsafe { scale_by(isa, c.get_mut(r), s.beta) })?;
        }
        let arrays = [self.a, self.b, self.c].map(address);
        let number = |i: usize| describe(s, arrays, steps.map(|step| i * step));
        if multiply_adds(s) <= SMALL && s.m.max(s.n).max(s.k) <= SMALL_SIDE {
            ProcessTeam.pieces(s.batch, 1, multiply_adds(s) * 4, |range| {
                let mut scratch = LocalScratch::new();
                // SAFETY: product i of the batch lies inside the three arrays; tasks write different ones.
                range.for_each(|i| unsafe { gemm_local(&mut scratch, isa, &number(i)) });
            })?;
            return Ok(());
        }
        with_team(multiply_adds(s) >= WORTH_IT, |team, workspace| {
            // SAFETY: product i of the batch lies inside the three arrays, whose sizes the caller of `run` guarantees.
            (0..s.batch).try_for_each(|i| unsafe { product::gemm(team, workspace, isa, &number(i)) })
        })?;
        Ok(())
    }
}

impl Run for GroupedGemm<'_> {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (parts, arrays) = (self.parts, [self.a, self.b, self.c].map(address));
        let number = |i: usize| describe(&parts[i].shape, arrays, [parts[i].a, parts[i].b, parts[i].c]);
        let sizes = |s: &GemmShape| [s.m, s.n, s.k];
        let largest = |most: [usize; 3], size: [usize; 3]| std::array::from_fn(|i| most[i].max(size[i]));
        let most = parts.iter().map(|part| sizes(&part.shape)).fold([0; 3], largest);
        let work = parts.iter().fold(0_usize, |sum, part| sum.saturating_add(multiply_adds(&part.shape)));
        let group = Group::new(parts.len(), most, &number);
        with_team(work >= WORTH_IT, |team, workspace| {
            // SAFETY: guaranteed by the caller of `run`: each part lies inside the arrays, and no two write the same elements.
            unsafe { gemm_grouped(team, workspace, ProcessTeam.isa(), &group) }
        })?;
        Ok(())
    }
}
