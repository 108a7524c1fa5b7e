//! Matrix products in f32: c = \[c +\] alpha a b, then an epilogue.
//!
//! The larger of a and b is cut into blocks, one task each; a task packs its block, a slice of k at a time, into
//! memory of its worker (second-level cache) and multiplies it with the other operand, which all tasks share and
//! which was packed before, in parallel. Where b is small a task computes a block of c by itself (`blocks`), and where many rows of a
//! narrow matrix and a wide one are summed nothing is packed (`narrow`). Nothing is allocated once the [`Workspace`] has grown.
//!
//! order  k is cut into slices by its length, and by whether the product is `narrow` or on the tile unit; inside a slice each element is one
//! chain of multiply-adds, and the slices are added to c in order. So the bits depend neither on the threads nor on the tiles. Few rows
//! have another order (`gemv`), and so have narrow matrices on the tile unit (`sliced`). Weights that no longer change are packed once
//! (`kept`: `panels`, or `halves` for operands that are rounded).

mod blocks;
mod dots;
mod gemv;
mod grouped;
mod halves;
#[cfg(target_arch = "x86_64")]
mod halves_x86;
mod heads;
#[cfg(target_arch = "x86_64")]
mod heads_tiles;
#[cfg(target_arch = "x86_64")]
mod heads_x86;
mod kept;
mod kernel;
mod local;
mod narrow;
mod pack;
mod panels;
mod plan;
mod portable;
mod queries;
mod rounded;
#[cfg(test)]
mod rows_tests;
mod sliced;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod workspace;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::isa::{Isa, IsaKind};
use crate::team::{TaskPanic, Team};
pub use grouped::{Group, gemm_grouped};
pub(crate) use heads::{
    FloatRows, HeadGradients, HeadKernels, HeadScores, HeadSums, QUERIES, ROWS, are_small, head_kernels,
};
use ironhorse_core::Operands;
pub use kept::{Arrangement, Kept, Weight};
use kernel::{Ahead, Kernels, Tile, rows_apart};
pub use local::{Beside, gemm_local};
pub(crate) use queries::{Scores, Weighted, add_weighted, keys_in_slice, scores};
use std::hint::black_box;
use std::ops::Range;
pub use workspace::{LocalScratch, Workspace};

/// The widest panel of any kernel.
const MAX_NR: usize = 64;

/// Rows, columns and steps of the smallest product whose operands are rounded.
const LEAST_ROUNDED: usize = 32;

/// A matrix that is read: element (i, j) at `ptr + i * rs + j * cs`.
#[derive(Clone, Copy, Debug)]
pub struct MatRef {
    /// Element (0, 0).
    pub ptr: *const f32,
    /// From one row to the next, in floats.
    pub rs: usize,
    /// From one column to the next, in floats.
    pub cs: usize,
}

impl MatRef {
    /// Rows of `cols` floats, one after the other.
    pub fn row_major(ptr: *const f32, cols: usize) -> Self {
        Self { ptr, rs: cols, cs: 1 }
    }

    /// The same matrix with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }
}

/// A matrix that is written: element (i, j) at `ptr + i * rs + j`.
#[derive(Clone, Copy, Debug)]
pub struct MatMut {
    /// Element (0, 0).
    pub ptr: *mut f32,
    /// From one row to the next, in floats.
    pub rs: usize,
}

impl From<MatMut> for MatRef {
    fn from(m: MatMut) -> Self {
        Self::row_major(m.ptr, m.rs)
    }
}

/// What becomes of the old c.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beta {
    /// It is not read; it may hold anything.
    Overwrite,
    /// The product is added to it.
    Accumulate,
}

/// How the order of summation depends on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    /// Few have an order of their own (`gemv`), all others that of packed products.
    Fastest,
    /// All have that of `gemv`.
    Dots,
    /// All have that of packed products.
    Packed,
    /// Each the same; b is packed already.
    Kept(Kept),
}

/// Called with (rows, columns, worker) of a region of c as soon as it is final, by the task that wrote it. The regions
/// cover c exactly once. It may change that region of c.
pub type Epilogue<'a> = &'a (dyn Fn(Range<usize>, Range<usize>, usize) + Sync);

/// One product: c\[m, n\] = \[c +\] alpha a\[m, k\] b\[k, n\].
#[derive(Clone, Copy)]
pub struct Gemm<'a> {
    /// Rows of a and c.
    pub m: usize,
    /// Columns of b and c.
    pub n: usize,
    /// Columns of a, rows of b.
    pub k: usize,
    /// Left operand, m by k.
    pub a: MatRef,
    /// Right operand, k by n.
    pub b: MatRef,
    /// Result, m by n.
    pub c: MatMut,
    /// What becomes of the old c.
    pub beta: Beta,
    /// Factor of the product; 1 costs nothing and changes no bit.
    pub alpha: f32,
    /// Applied to regions of c once they are final.
    pub epilogue: Option<Epilogue<'a>>,
    /// What a and b are rounded to: to bf16 by a rule of the sizes alone, where the product is large enough; never to tf32.
    pub operands: Operands,
    rows: Rows,
}

impl<'a> Gemm<'a> {
    /// c = a b, without an epilogue.
    pub fn new((m, n, k): (usize, usize, usize), a: MatRef, b: MatRef, c: MatMut) -> Self {
        let (operands, rows) = (Operands::F32, Rows::Fastest);
        Self { m, n, k, a, b, c, beta: Beta::Overwrite, alpha: 1.0, epilogue: None, operands, rows }
    }

    /// If `apart`, the bits of a row do not depend on how many there are: what a model generates for one request is the same whoever
    /// else is served, and however a prompt is cut into pieces. All are dot products: of b the columns must be contiguous, of a the rows.
    pub fn rows_apart(self, apart: bool) -> Self {
        Self { rows: if apart { Rows::Dots } else { Rows::Fastest }, ..self }
    }

    /// The same in the order of products of many rows: the bits are those of [`Kept::Panels`], whatever the strides are.
    pub fn rows_as_many(self, apart: bool) -> Self {
        Self { rows: if apart { Rows::Packed } else { Rows::Fastest }, ..self }
    }

    /// With b as [`Kept::bring`] packed it; rows of a are contiguous. The bits of a row do not depend on how many there are.
    pub fn kept(self, kept: Kept) -> Self {
        Self { rows: Rows::Kept(kept), ..self }
    }

    /// With another treatment of the old c.
    pub fn beta(self, beta: Beta) -> Self {
        Self { beta, ..self }
    }

    /// With a factor.
    pub fn alpha(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// With an epilogue.
    pub fn epilogue(self, epilogue: Epilogue<'a>) -> Self {
        Self { epilogue: Some(epilogue), ..self }
    }

    /// With operands that are rounded.
    pub fn operands(self, operands: Operands) -> Self {
        Self { operands, ..self }
    }

    /// Whether its operands are rounded. A product with a factor, or of few rows, columns or steps, stays as it is.
    fn is_rounded(&self) -> bool {
        self.operands == Operands::Bf16
            && self.rows == Rows::Fastest
            && self.alpha == 1.0
            && self.m.min(self.n).min(self.k) >= LEAST_ROUNDED
    }

    fn without_epilogue(&self) -> Gemm<'static> {
        let &Self { m, n, k, a, b, c, beta, alpha, operands, rows, .. } = self;
        Gemm { m, n, k, a, b, c, beta, alpha, epilogue: None, operands, rows }
    }

    fn finish(&self, rows: Range<usize>, columns: Range<usize>, worker: usize) {
        if let Some(epilogue) = self.epilogue {
            epilogue(rows, columns, worker);
        }
    }

    /// The product without a single step: zeros, or the old c.
    ///
    /// # Safety
    /// `c` is writable.
    unsafe fn no_steps(&self, worker: usize) {
        if self.beta == Beta::Overwrite {
            for i in 0..self.m {
                // SAFETY: row i < m of c, n floats.
                unsafe { std::slice::from_raw_parts_mut(self.c.ptr.add(i * self.c.rs), self.n) }.fill(0.0);
            }
        }
        self.finish(0..self.m, 0..self.n, worker);
    }
}

// SAFETY: a description with addresses; the functions that follow the addresses are unsafe and ask for what is needed.
unsafe impl Sync for Gemm<'_> {}

fn kernels(isa: Isa) -> &'static Kernels {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx512 => &x86::AVX512,
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx2Fma => &x86::AVX2,
        _ => &portable::KERNELS,
    }
}

/// The kernels of products whose operands are rounded.
fn rounding_kernels(isa: Isa) -> &'static Kernels {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx512 if tiles::are_there() => &tiles::KERNELS,
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx512 => &rounded::AVX512,
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx2Fma => &rounded::AVX2,
        _ => &rounded::PORTABLE,
    }
}

/// Whether products of bf16 operands are faster than those of f32 on this machine: its processor has instructions for them.
pub fn multiplies_bf16() -> bool {
    multiplies(Isa::detect())
}

/// Multiplies numbers in the first-level cache with the kernel of full tiles, so many tiles; gives the operations.
pub(crate) fn multiply_vectors(isa: Isa, tiles: usize) -> usize {
    const STEPS: usize = 96;
    let kernels = kernels(isa);
    let (mr, nr, vectors) = (kernels.mr, kernels.nr, kernels.nr / kernels.lanes);
    // Zeros or ones need less power than numbers do.
    let numbers = |count: usize| (0..count).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect::<Vec<f32>>();
    let (a, b, mut c) = (numbers(mr * STEPS), numbers(nr * STEPS), vec![0.0_f32; mr * nr]);
    let tile = Tile {
        k: STEPS,
        a: a.as_ptr(),
        a_rows: rows_apart(1),
        a_cs: mr,
        b: b.as_ptr(),
        b_rs: nr,
        c: c.as_mut_ptr(),
        c_rs: nr,
        rows: mr,
        columns: nr,
        last: kernels.lanes,
        alpha: 1.0,
        accumulate: false,
        fetch: std::ptr::null(),
        ahead: Ahead::NOTHING,
        fetches_c: false,
        past_caches: false,
    };
    for _ in 0..tiles {
        // SAFETY: the kernel of a tile of this size, of an `Isa` this machine has; the operands and c are as large as said.
        unsafe { (kernels.strided[mr - 1][vectors - 1])(black_box(&tile)) };
    }
    black_box(&c);
    2 * mr * nr * STEPS * tiles
}

/// Multiplies tiles of bf16 numbers in registers, so many times; gives the operations, 0 where there are no tiles.
pub(crate) fn multiply_tiles(steps: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if tiles::are_there() {
        // SAFETY: there are tiles.
        unsafe { tiles::products(steps) };
        return steps * tiles::STEP;
    }
    let _ = steps;
    0
}

/// The same with these instructions.
fn multiplies(isa: Isa) -> bool {
    rounding_kernels(isa).enter.is_some()
}

/// Computes `g` with all threads of `team`.
///
/// # Safety
/// The elements of `a` and `b` are readable and those of `c` writable by their strides; rows of `c` do not overlap
/// (`c.rs >= n`); `c` overlaps neither `a` nor `b`, and nobody else touches them during the call.
///
/// # Errors
/// The epilogue panicked.
pub unsafe fn gemm(team: &Team, ws: &mut Workspace, isa: Isa, g: &Gemm<'_>) -> Result<(), TaskPanic> {
    if g.m == 0 || g.n == 0 {
        return Ok(());
    }
    if g.k == 0 {
        // SAFETY: guaranteed by the caller.
        return team.run(1, &|_, worker| unsafe { g.no_steps(worker) });
    }
    if let Rows::Kept(kept) = g.rows {
        // SAFETY: guaranteed by the caller.
        return unsafe { kept.run(team, ws, isa, g) };
    }
    if gemv::fits(g) {
        // SAFETY: guaranteed by the caller; `fits` was asked.
        return unsafe { gemv::gemv(team, isa, g) };
    }
    // With an epilogue every block would be read and written once more: GPT-2's forward products took a fifth longer.
    let is_blocks = !g.is_rounded() && blocks::fits(g) && g.epilogue.is_none();
    if is_blocks || sliced::Sliced::new(g, isa).is_some() {
        let product = |_| g.without_epilogue();
        let group = Group::new(1, [g.m, g.n, g.k], &product);
        // SAFETY: guaranteed by the caller.
        return unsafe { gemm_grouped(team, ws, isa, &group) };
    }
    if g.is_rounded() {
        // SAFETY: guaranteed by the caller; m, n and k are not zero.
        return unsafe { plan::Plan::new(g, rounding_kernels(isa), team.threads()).run(team, ws) };
    }
    // SAFETY: guaranteed by the caller; m, n and k are not zero.
    unsafe { plan::Plan::new(g, kernels(isa), team.threads()).run(team, ws) }
}

/// Whether [`gemm`] computes whole rows of c at a time with so many threads, which a [`Group`] of this product alone can finish while they
/// are in a cache.
pub fn finishes_rows(g: &Gemm<'_>, isa: Isa, threads: usize) -> bool {
    let whole = if g.is_rounded() { grouped::plans_rows(g, isa, threads) } else { blocks::packs(g) };
    g.rows == Rows::Fastest && g.epilogue.is_none() && whole
}

/// Computes `g` on the calling thread, an element of c at a time as it were: rows of a and columns of b are contiguous, k is not 0, and the
/// epilogue is not called.
///
/// # Safety
/// As [`gemm`].
pub(crate) unsafe fn gemm_dots(isa: Isa, g: &Gemm<'_>) {
    assert!(g.a.cs == 1 && g.b.rs == 1 && g.k > 0, "operands of dot products are not contiguous");
    // SAFETY: guaranteed by the caller.
    unsafe { gemv::columns(isa, g, 0..g.n) };
}
