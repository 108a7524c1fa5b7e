//! The bias gradient: column sums of the output's gradient, in two launches with partial sums between them.

use crate::Result;
use crate::args::{Args, Grid};
use crate::device::{Device, Function};
use crate::kernels::Spec;
use ironhorse_core::DType;

/// A tensor whose columns are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColumnSums {
    pub rows: usize,
    pub cols: usize,
    /// Type of the tensor.
    pub inputs: DType,
    /// Type of the sums.
    pub output: DType,
    /// The address of the tensor.
    pub x: u64,
    /// The address of the sums.
    pub sums: u64,
    pub adds: bool,
}

/// A kernel with its shape and arguments.
pub(crate) type Step = (&'static str, Function, Grid, Args);

/// Blocks of the first launch: a number, not the device's, so that the order of summation does not depend on it.
const BLOCKS: usize = 1056;
/// Rows below which a chunk is not worth a block.
const LEAST_ROWS: usize = 64;
const THREADS: u32 = 256;
/// Warps of a block: each takes every eighth row.
const WARPS: usize = 8;

/// How the rows are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    vector: bool,
    tiles: usize,
    chunks: usize,
    chunk_rows: usize,
}

impl ColumnSums {
    fn division(&self) -> Division {
        let per_lane = 16 / self.inputs.size();
        let vector = self.cols.is_multiple_of(per_lane) && self.x.is_multiple_of(16);
        let tiles = self.cols.div_ceil(32 * if vector { per_lane } else { 1 });
        let most = (BLOCKS / tiles.max(1)).clamp(1, 512);
        let chunks = self.rows.div_ceil(LEAST_ROWS).clamp(1, most);
        let chunk_rows = self.rows.div_ceil(chunks).next_multiple_of(WARPS);
        Division { vector, tiles, chunks: self.rows.div_ceil(chunk_rows.max(1)), chunk_rows }
    }

    /// Bytes of the partial sums.
    pub fn scratch(&self) -> usize {
        self.division().chunks * self.cols * 4
    }

    /// The two launches; there is at least one row and one column.
    pub fn steps(&self, device: &'static Device, scratch: u64) -> Result<[Step; 2]> {
        let spec = spec("product/bias.cu", self.inputs, self.output)?;
        let Division { vector, tiles, chunks, chunk_rows } = self.division();
        let name = if vector { "bias_partials" } else { "bias_partials_any" };
        let partials = device.function(&spec.clone().kernel(name))?;
        let first = Args::new().ptr(scratch).ptr(self.x).u64s([self.rows, self.cols, chunk_rows]);
        Ok([
            (name, partials, Grid::plane(tiles, chunks, THREADS), first),
            self.finish(device, scratch, chunks)?,
        ])
    }

    /// The second launch, for `chunks` rows of partial sums.
    pub fn finish(&self, device: &'static Device, partials: u64, chunks: usize) -> Result<Step> {
        let spec = spec("product/bias.cu", self.inputs, self.output)?;
        let function = device.function(&spec.kernel("bias_finish"))?;
        let args = Args::new().ptr(self.sums).ptr(partials).u32(chunks as u32);
        let args = args.u64(self.cols as u64).u32(self.adds.into());
        Ok(("bias_finish", function, Grid::linear(self.cols.div_ceil(32), 1024), args))
    }
}

/// A kernel file for these element types.
pub(crate) fn spec(file: &'static str, inputs: DType, output: DType) -> Result<Spec> {
    Spec::new(file).typed("IN", inputs)?.typed("OUT", output)
}

/// Every specialisation there is.
pub(crate) fn specs() -> Vec<Spec> {
    let types = [DType::F32, DType::BF16];
    let pairs = types.into_iter().flat_map(|inputs| types.map(|output| (inputs, output)));
    let files =
        |(inputs, output)| ["product/bias.cu", "product/gemm_any.cu"].map(|file| spec(file, inputs, output));
    pairs.flat_map(files).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(rows: usize, cols: usize, inputs: DType) -> ColumnSums {
        ColumnSums { rows, cols, inputs, output: DType::F32, x: 64, sums: 64, adds: false }
    }

    #[test]
    fn every_row_is_in_exactly_one_chunk_and_every_column_in_one_tile() {
        for rows in [1, 7, 8, 9, 63, 64, 65, 129, 1000, 4096, 65536, 65537, 1 << 22] {
            for cols in [1, 31, 33, 768, 1003, 3072, 50304, 50257, 1 << 21] {
                for inputs in [DType::F32, DType::BF16] {
                    let d = sums(rows, cols, inputs).division();
                    assert!(d.chunks * d.chunk_rows >= rows, "{rows} {cols} {d:?}");
                    assert!((d.chunks - 1) * d.chunk_rows < rows, "{rows} {cols} {d:?}: an empty chunk");
                    assert!(d.chunks <= 512);
                    let width = if d.vector { 512 / inputs.size() } else { 32 };
                    assert_eq!(d.tiles, cols.div_ceil(width));
                }
            }
        }
    }

    #[test]
    fn gpt2_shapes_fill_the_device() {
        for cols in [768, 2304, 3072] {
            let d = sums(65536, cols, DType::BF16).division();
            assert!(d.vector && (900..=BLOCKS).contains(&(d.tiles * d.chunks)), "{cols} {d:?}");
        }
    }

    #[test]
    fn odd_widths_and_addresses_go_one_column_per_lane() {
        assert!(!sums(10, 12, DType::BF16).division().vector);
        assert!(sums(10, 12, DType::F32).division().vector);
        assert!(!ColumnSums { x: 8, ..sums(10, 16, DType::BF16) }.division().vector);
    }
}
