//! relu(x scale + bias) of the rows of a matrix.

use super::layout::{Columns, address, lane_width, pointers, whole_vectors};
use super::{Launch, OnStream};
use crate::args::Grid;
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Float, Gate, Rows, ScaleBiasRelu, ScaleBiasReluBwd};

const FILE: &str = "elementwise/scale_bias_relu.cu";
/// Rows whose loads a thread of the backward has in flight: `BWD_AHEAD` of the kernels.
const AHEAD: usize = 4;
/// Threads of a block of the backward: `BWD_THREADS`.
const BWD_THREADS: usize = 512;
/// The most blocks of a backward, unless the tiles of one group are more: enough short-lived blocks to keep any GPU busy.
const BLOCKS: usize = 8192;
/// The most partial sums of a column.
const GROUPS: usize = 2048;

/// Elements that a thread owns of each row.
fn unit(arrays: &[Array], cols: usize, float: Float) -> usize {
    if whole_vectors(arrays, cols, float) { lane_width(float) } else { 1 }
}

/// Bytes of [`ScaleBiasRelu::gate`]; 0 if the shape or an address does not allow a gate.
pub fn gate_bytes(arrays: &[Array], rows: Rows, float: Float) -> usize {
    let whole = rows.cols.is_multiple_of(32) && unit(arrays, rows.cols, float) > 1;
    if whole { rows.elements() / 8 } else { 0 }
}

/// NaN stays NaN.
impl Launch for ScaleBiasRelu {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { x, bias, y, gate, rows, scale } = *self;
        if rows.elements() == 0 {
            return Ok(());
        }
        let unit = unit(&[x, y, bias], rows.cols, x.float);
        let name = if unit == 1 { "scale_bias_relu_fwd_any" } else { "scale_bias_relu_fwd" };
        let columns = Columns::of(rows.cols / unit);
        let args = pointers([y]).at(gate).arrays([x, bias]);
        let args = args.u64s([rows.rows, rows.cols]).f64(scale).u32(columns.tiles as u32);
        at.launch(&Spec::of(FILE, x.float).kernel(name), columns.grid(rows.rows.div_ceil(columns.y)), args)
    }
}

/// How rows are cut for the sums of columns: (groups, rows of each). A function of the shape only, so that sums are the
/// same on every device.
fn groups(rows: usize, columns: Columns) -> (usize, usize) {
    let least = AHEAD * columns.y;
    let wanted = (BLOCKS / columns.tiles).clamp(1, GROUPS);
    let each = rows.div_ceil(wanted).next_multiple_of(least).max(least);
    (rows.div_ceil(each), each)
}

impl Launch for ScaleBiasReluBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { d_y, expanded, gate, d_x, d_bias, rows, scale } = *self;
        if rows.elements() == 0 {
            return at.fill_zero([d_bias], rows.cols);
        }
        let sums = d_bias.is_some();
        if !sums && !d_x.is_some() {
            return Ok(());
        }
        let (kept, arrays) = match gate {
            Gate::Result(y) => (address(y), [y, d_x]),
            Gate::Bits(bits) => (bits.addr() as u64, [d_x, d_x]),
        };
        let whole = if expanded { d_x } else { d_y };
        let unit = unit(&[whole, arrays[0], arrays[1]], rows.cols, d_y.float);
        let name = match gate {
            Gate::Result(_) if unit == 1 => "scale_bias_relu_bwd_any",
            Gate::Result(_) => "scale_bias_relu_bwd",
            Gate::Bits(_) if unit == 1 => {
                return Err(Error::Input("fused_scale_bias_relu_bwd: d_y is not aligned as x was".into()));
            }
            Gate::Bits(_) => "scale_bias_relu_bwd_bits",
        };
        let columns = Columns::narrow(rows.cols / unit, BWD_THREADS);
        let (groups, each) = groups(rows.rows, columns);
        let partials = if sums { at.scratch(groups * rows.cols * d_y.float.acc().size())? } else { 0 };
        let args = pointers([d_x]).ptr(partials).arrays([d_y]).u32(expanded.into()).ptr(kept);
        let args = args.u64s([rows.rows, rows.cols, each]).f64(scale);
        let kernel = |name| Spec::of(FILE, d_y.float).kernel(name);
        at.launch(&kernel(name), columns.grid(groups), args.u32(columns.tiles as u32))?;
        if !sums {
            return Ok(());
        }
        let args = pointers([d_bias]).ptr(partials).u32(groups as u32).u64(rows.cols as u64);
        at.launch(&kernel("scale_bias_relu_sums"), Grid::linear(rows.cols.div_ceil(32), 1024), args)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    Spec::of_all(FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_all_rows_and_stay_few() {
        for rows in [1, 2, 3, 31, 33, 8192, 1 << 20, (1 << 33) + 1] {
            for units in [1, 3, 16, 192, 300, 2048, 1 << 24] {
                let columns = Columns::narrow(units, BWD_THREADS);
                let (groups, each) = groups(rows, columns);
                assert!(groups * each >= rows && (groups - 1) * each < rows);
                assert!(
                    groups <= GROUPS && groups * columns.tiles <= BLOCKS.max(columns.tiles),
                    "{rows} {units}"
                );
            }
        }
    }
}
