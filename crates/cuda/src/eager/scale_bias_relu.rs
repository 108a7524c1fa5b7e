//! relu(x scale + bias) of the rows of a matrix.

use super::gpu::{At, Kernel};
use super::layout::{Columns, address, aligned};
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Float, Gate, Rows};
use std::ffi::c_void;

const FILE: &str = "elementwise/scale_bias_relu.cu";
/// Rows that a thread of the backward has in flight: `BWD_AHEAD` of the kernels.
const AHEAD: usize = 4;
/// Threads of its blocks: `BWD_THREADS`.
const BWD_THREADS: usize = 512;
/// Blocks of a backward, at most, unless the tiles of one group are more: enough for short-lived ones to keep any GPU busy.
const BLOCKS: usize = 8192;
/// Partial sums of a column, at most.
const GROUPS: usize = 2048;

/// Elements that a thread owns of each row.
fn unit(arrays: &[Array], cols: usize, float: Float) -> usize {
    let vector = 16 / float.size();
    if cols.is_multiple_of(vector) && aligned(arrays) { vector } else { 1 }
}

/// Bytes of the gate of [`scale_bias_relu`] as bits; 0 where a shape or an address does not allow it.
pub fn gate_bytes(arrays: &[Array], rows: Rows, float: Float) -> usize {
    let whole = rows.cols.is_multiple_of(32) && unit(arrays, rows.cols, float) > 1;
    if whole { rows.elements() / 8 } else { 0 }
}

/// y = relu(x scale + bias), NaN stays NaN; `y` may be `x`. Where `gate` is not null, it gets one bit an element: whether a
/// gradient passes.
///
/// # Safety
/// See [the module](super); x and y: the elements of `rows`, bias: a row, gate: null or [`gate_bytes`], which is not 0.
pub unsafe fn scale_bias_relu(
    at: &At<'_>,
    [x, bias]: [Array; 2],
    (y, gate): (Array, *mut c_void),
    rows: Rows,
    scale: f64,
) -> Result<()> {
    if rows.elements() == 0 {
        return Ok(());
    }
    let unit = unit(&[x, y, bias], rows.cols, x.float);
    let name = if unit == 1 { "scale_bias_relu_fwd_any" } else { "scale_bias_relu_fwd" };
    let columns = Columns::of(rows.cols / unit);
    let args = Args::new().ptr(address(y)).ptr(gate.addr() as u64).ptr(address(x)).ptr(address(bias));
    let args = args.u64(rows.rows as u64).u64(rows.cols as u64).f64(scale).u32(columns.tiles as u32);
    at.launch(&Kernel::of(FILE, name, x.float), columns.grid(rows.rows.div_ceil(columns.y)), args)
}

/// How rows are cut for the sums of columns: (groups, rows of each). A function of the shape only, so that sums are the
/// same on every device.
fn groups(rows: usize, columns: Columns) -> (usize, usize) {
    let least = AHEAD * columns.y;
    let wanted = (BLOCKS / columns.tiles).clamp(1, GROUPS);
    let each = rows.div_ceil(wanted).next_multiple_of(least).max(least);
    (rows.div_ceil(each), each)
}

/// d_x = g scale, d_bias = Σ g over the rows, with g = d_y where the gate is open (!(y <= 0)), else 0. Either output may be null;
/// `d_x` may be `d_y`. With `same`, d_y is one number for all elements.
///
/// # Safety
/// See [the module](super); d_bias: a row, d_y with `same`: one element, bits: as the forward left them, all others: the elements of
/// `rows`.
pub unsafe fn scale_bias_relu_bwd(
    at: &At<'_>,
    (d_y, same): (Array, bool),
    gate: Gate,
    [d_x, d_bias]: [Array; 2],
    rows: Rows,
    scale: f64,
) -> Result<()> {
    let sums = !d_bias.at.is_null();
    if rows.elements() == 0 {
        if sums {
            // SAFETY: a row of the caller's.
            unsafe { at.zero(d_bias.at, rows.cols * d_bias.float.size())? };
        }
        return Ok(());
    }
    if !sums && d_x.at.is_null() {
        return Ok(());
    }
    let (kept, arrays) = match gate {
        Gate::Result(y) => (address(y), [y, d_x]),
        Gate::Bits(bits) => (bits.addr() as u64, [d_x, d_x]),
    };
    let whole = if same { d_x } else { d_y };
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
    let args = Args::new().ptr(address(d_x)).ptr(partials).ptr(address(d_y)).u32(same.into()).ptr(kept);
    let args = args.u64(rows.rows as u64).u64(rows.cols as u64).u64(each as u64).f64(scale);
    let grid = columns.grid(groups);
    at.launch(&Kernel::of(FILE, name, d_y.float), grid, args.u32(columns.tiles as u32))?;
    if !sums {
        return Ok(());
    }
    let args = Args::new().ptr(address(d_bias)).ptr(partials).u32(groups as u32).u64(rows.cols as u64);
    let grid = Grid::linear(rows.cols.div_ceil(32), 1024);
    at.launch(&Kernel::of(FILE, "scale_bias_relu_sums", d_y.float), grid, args)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    Float::ALL.map(|float| Kernel::of(FILE, "", float).spec()).into()
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
