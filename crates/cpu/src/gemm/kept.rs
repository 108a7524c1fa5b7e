//! Weights that no longer change, kept in the order in which products read them.

use super::{Gemm, Workspace, halves, multiplies, panels};
use crate::isa::Isa;
use crate::team::{TaskPanic, Team};
use ironhorse_core::Operands;

/// A weight to be kept: where it is, its rows and columns.
pub type Weight = (*mut f32, [usize; 2]);

/// How the numbers of a weight lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Row after row.
    Rows,
    /// As [`Kept`] says.
    Packed,
}

/// How a weight is kept, in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// As floats, in panels of as many rows as a vector has lanes (`panels`).
    Panels,
    /// As bf16 in tiles, and what rounding took away beside them (`halves`).
    Halves,
}

impl Kept {
    /// How a weight of this size is kept for products whose operands are rounded so.
    pub fn of(isa: Isa, operands: Operands, size: [usize; 2]) -> Self {
        let rounds = operands == Operands::Bf16 && multiplies(isa) && halves::fits(size);
        if rounds { Self::Halves } else { Self::Panels }
    }

    /// Brings a weight, in its place, from one arrangement into the other. Every number stays what it was.
    ///
    /// # Safety
    /// The address is good for rows·columns floats that nobody else uses during the call, and [`Kept::of`] gave this for them and these
    /// instructions.
    ///
    /// # Errors
    /// A task panicked.
    pub unsafe fn bring(
        self,
        to: Arrangement,
        team: &Team,
        ws: &mut Workspace,
        isa: Isa,
        weight: Weight,
    ) -> Result<(), TaskPanic> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                Self::Panels => panels::bring(to, team, ws, isa, weight),
                Self::Halves => halves::bring(to, team, ws, weight),
            }
        }
    }

    /// Writes a row of a weight of this size, as it was before it was packed.
    pub fn read_row(self, isa: Isa, (weight, size): (&[f32], [usize; 2]), row: usize, out: &mut [f32]) {
        match self {
            Self::Panels => panels::read_row(isa, (weight, size), row, out),
            Self::Halves => halves::read_row((weight, size), row, out),
        }
    }

    /// The product whose b is kept so.
    ///
    /// # Safety
    /// As [`gemm`](super::gemm); m, n and k are not zero; b was packed by [`Kept::bring`] for these instructions, and rows of a are contiguous.
    ///
    /// # Errors
    /// The epilogue panicked.
    pub(super) unsafe fn run(
        self,
        team: &Team,
        ws: &mut Workspace,
        isa: Isa,
        g: &Gemm<'_>,
    ) -> Result<(), TaskPanic> {
        // SAFETY: guaranteed by the caller; `Kept::of` gives halves only where the machine has tiles.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Halves => halves::run(team, ws, g),
                _ => panels::run(team, isa, g),
            }
        }
    }
}
