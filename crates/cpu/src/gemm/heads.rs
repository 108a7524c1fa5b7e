//! The products of attention for a tile of queries, where heads are small: scores, weighted sums of values, and the gradients.
//!
//! A product over the elements of a head has as few as 16 steps, so what surrounds the steps of a tile is what takes time: the sizes are
//! known to the compiler here, nothing is packed, and a tile of scores stays in the first-level cache.
//!
//! order  every element is one chain of multiply-adds from zero, then added to what is there; as [`gemm_local`](super::gemm_local) has it. On the
//! tile unit, where operands are rounded to bf16, as `heads_tiles` says.

#[cfg(target_arch = "x86_64")]
use super::{heads_tiles, heads_x86, tiles};
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::IsaKind;
use ironhorse_core::Operands;

/// Queries of a tile: columns of a row of scores.
pub(crate) const QUERIES: usize = 32;
/// Rows that are computed at a time: there is room for a multiple of so many keys.
pub(crate) const ROWS: usize = 16;

/// The kernels for heads of one size.
pub(crate) struct HeadKernels {
    pub head_dim: usize,
    pub scores: unsafe fn(&HeadScores),
    pub sums: unsafe fn(&HeadSums<'_>),
    pub gradients: unsafe fn(&HeadGradients),
    /// Dot products of the columns of two tiles, in the order of [`dot`](crate::element::dot).
    pub dots: unsafe fn([*const f32; 2], &mut [f32; QUERIES]),
    /// Rows that become columns of a tile (head_dim, [`QUERIES`]); missing ones are 0.
    pub to_columns: unsafe fn(&FloatRows, *mut f32),
    /// Columns of such a tile that become rows, each multiplied with a factor.
    pub from_columns: unsafe fn(*const f32, &[f32; QUERIES], &FloatRows),
    /// What a thread does before the first product of a tile and after the last.
    pub enter: Option<unsafe fn()>,
    pub leave: Option<unsafe fn()>,
}

/// Sizes of heads that these kernels are for: on every machine, as the order of summation depends on it. Larger ones where operands are
/// rounded and the machine has tiles, whichever of its instructions an engine uses.
pub(crate) fn are_small(head_dim: usize, operands: Operands) -> bool {
    matches!(head_dim, 16 | 32) || are_tiled(head_dim, operands)
}

/// Whether the tile unit multiplies heads of this size.
fn are_tiled(head_dim: usize, operands: Operands) -> bool {
    #[cfg(target_arch = "x86_64")]
    return operands == Operands::Bf16
        && heads_tiles::HEADS.iter().any(|heads| heads.head_dim == head_dim)
        && tiles::are_there();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// The kernels for heads of this size, where there are some.
pub(crate) fn head_kernels(isa: Isa, head_dim: usize, operands: Operands) -> Option<&'static HeadKernels> {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx512 => {
            let of =
                if are_tiled(head_dim, operands) { &heads_tiles::HEADS[..] } else { &heads_x86::HEADS[..] };
            of.iter().find(|kernels| kernels.head_dim == head_dim)
        }
        _ => None,
    }
}

/// `count` rows of a head, `rs` apart.
#[derive(Clone, Copy)]
pub(crate) struct FloatRows {
    pub ptr: *mut f32,
    pub rs: usize,
    pub count: usize,
}

/// Scores of some keys.
#[derive(Clone, Copy)]
pub(crate) struct HeadScores {
    /// (count, head_dim)
    pub keys: FloatRows,
    /// (head_dim, [`QUERIES`])
    pub queries: *const f32,
    /// (count, [`QUERIES`]), room for a multiple of [`ROWS`]
    pub out: *mut f32,
}

/// Weighted sums of some rows.
#[derive(Clone, Copy)]
pub(crate) struct HeadSums<'a> {
    /// (count, [`QUERIES`])
    pub weights: *const f32,
    /// (count, head_dim)
    pub rows: FloatRows,
    /// (head_dim, [`QUERIES`])
    pub sums: *mut f32,
    /// What sums so far are multiplied with before these are added; without it they are not read.
    pub keeps: Option<&'a [f32; QUERIES]>,
}

/// What a tile of queries adds to the gradients of some keys.
#[derive(Clone, Copy)]
pub(crate) struct HeadGradients {
    /// (count, [`QUERIES`]), room for a multiple of [`ROWS`]
    pub weights: *const f32,
    /// (queries, head_dim)
    pub rows: FloatRows,
    /// (count, head_dim)
    pub to: FloatRows,
}
