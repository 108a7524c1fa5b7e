//! The gradient of an embedding table, f32.

use super::layout::{THREADS, whole_vectors};
use super::{Launch, OnStream};
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use crate::scalars::FAULT_BYTES;
use crate::scatter::{ScatterMemory, SortedScatter};
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Float, ScatterAdd};

const FEW: &str = "embedding/scatter_few.cu";
const MANY: &str = "embedding/bwd.cu";
/// Indices up to which comparing each with each beats sorting.
const FEW_INDICES: usize = 512;

/// Repeatable: up to 512 indices are added in their order, more of them in windows of 32 of each index. Indices that are not
/// in 0..table_rows are skipped; without `table_rows` only negative ones are.
impl Launch for ScatterAdd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { rows, indices, table, n, width, table_rows } = *self;
        if n == 0 || width == 0 {
            return Ok(());
        }
        let too_large =
            |what: &str, size: usize| Error::Input(format!("scatter_add: {what} is {size}: too large"));
        // No index reaches 2³¹; a negative one does when it is read as unsigned.
        let limit = table_rows.map_or(1 << 31, |limit| limit.min(1 << 31) as u32);
        let vectors = whole_vectors(&[Array::f32(rows), Array::f32_mut(table)], width, Float::F32);
        let count = u32::try_from(n).ok().filter(|&n| n < 1 << 31).ok_or_else(|| too_large("n_idx", n))?;
        if n <= FEW_INDICES {
            let args = Args::new().at(table).at(rows).at(indices).u32(count).u64(width as u64).u32(limit);
            let grid = Grid::plane(width.div_ceil(THREADS), n, THREADS as u32);
            return at.launch(&Spec::new(FEW).kernel("scatter_few"), grid, args);
        }
        // blockIdx.y is below 65,536.
        if width.div_ceil(if vectors { 4 } else { 1 }).div_ceil(32) > 65_535 {
            return Err(too_large("dim", width));
        }
        let scatter = SortedScatter { n, width, limit, unit: if vectors { 4 } else { 1 } };
        let scratch = at.scratch(FAULT_BYTES + scatter.scratch())?;
        // Indices that are out of range are reported to a fault block in scratch memory that nobody
        // reads.
        let fault = scratch + scatter.scratch() as u64;
        at.stream.zero(fault, FAULT_BYTES)?;
        let [indices, rows] = [indices.addr(), rows.addr()].map(|address| address as u64);
        let memory = ScatterMemory { indices, rows, table: table.addr() as u64, fault, scratch };
        let mut steps = scatter.steps(&memory).into_iter();
        steps.try_for_each(|(name, grid, args)| at.launch(&many(vectors).kernel(name), grid, args))
    }
}

/// The module of the engine's embedding gradient, for f32.
fn many(vectors: bool) -> Spec {
    Spec::new(MANY).define("ACT", "float").define("VECTORS", u32::from(vectors)).define("GRAD", "float")
}

/// The specialisation that the engine does not compile already.
pub(super) fn specs() -> Vec<Spec> {
    vec![Spec::new(FEW)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_compiles_the_sorting_kernels_too() {
        let engine = crate::op::specs();
        for vectors in [false, true] {
            assert!(engine.contains(&many(vectors)));
        }
    }
}
