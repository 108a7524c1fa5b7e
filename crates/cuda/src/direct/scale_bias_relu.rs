//! relu(x scale + bias) of the rows of a matrix.

use super::gpu::{At, Kernel};
use super::layout::{Columns, address, aligned};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use ironhorse_core::direct::{Array, Float, Rows};

const FILE: &str = "direct/scale_bias_relu.cu";
/// Rows that a thread has in flight: `FWD_AHEAD` and `BWD_AHEAD` of the kernels.
const AHEAD: usize = 4;
/// Blocks of a backward, about: four on each multiprocessor of a Hopper, four times over, so that fast ones take more.
const GROUPS: usize = 2048;

/// Elements that a thread owns of each row.
fn unit(arrays: &[Array], cols: usize, float: Float) -> usize {
    let vector = 16 / float.size();
    if cols.is_multiple_of(vector) && aligned(arrays) { vector } else { 1 }
}

/// y = relu(x scale + bias), NaN stays NaN; `y` may be `x`.
///
/// # Safety
/// See [the module](super); x and y: the elements of `rows`, bias: a row.
pub unsafe fn scale_bias_relu(
    at: &At<'_>,
    [x, bias]: [Array; 2],
    y: Array,
    rows: Rows,
    scale: f64,
) -> Result<()> {
    if rows.elements() == 0 {
        return Ok(());
    }
    let unit = unit(&[x, y, bias], rows.cols, x.float);
    let name = if unit == 1 { "scale_bias_relu_fwd_any" } else { "scale_bias_relu_fwd" };
    let columns = Columns::of(rows.cols / unit);
    let args = [y, x, bias].iter().fold(Args::new(), |args, &array| args.ptr(address(array)));
    let args = args.u64(rows.rows as u64).u64(rows.cols as u64).f64(scale).u32(columns.tiles as u32);
    let grid = columns.grid(rows.rows.div_ceil(AHEAD * columns.y));
    at.launch(&Kernel::of(FILE, name, x.float), grid, args)
}

/// How rows are cut for the sums of columns: (groups, rows of each). A function of the shape only, so that sums are the
/// same on every device.
fn groups(rows: usize, columns: Columns) -> (usize, usize) {
    let least = AHEAD * columns.y;
    let wanted = (GROUPS / columns.tiles).max(1);
    let each = rows.div_ceil(wanted).next_multiple_of(least).max(least);
    (rows.div_ceil(each), each)
}

/// d_x = g scale, d_bias = Σ g over the rows, with g = d_y where !(y <= 0), else 0. Either output may be null; `d_x` may be
/// `d_y`.
///
/// # Safety
/// See [the module](super); d_bias: a row, all others: the elements of `rows`.
pub unsafe fn scale_bias_relu_bwd(
    at: &At<'_>,
    [d_y, y]: [Array; 2],
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
    let unit = unit(&[d_y, y, d_x], rows.cols, d_y.float);
    let name = if unit == 1 { "scale_bias_relu_bwd_any" } else { "scale_bias_relu_bwd" };
    let columns = Columns::of(rows.cols / unit);
    let (groups, each) = groups(rows.rows, columns);
    let partials = if sums { at.scratch(groups * rows.cols * d_y.float.acc().size())? } else { 0 };
    let args = Args::new().ptr(address(d_x)).ptr(partials).ptr(address(d_y)).ptr(address(y));
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
                let columns = Columns::of(units);
                let (groups, each) = groups(rows, columns);
                assert!(groups * each >= rows && (groups - 1) * each < rows);
                assert!(groups * columns.tiles <= GROUPS.max(columns.tiles), "{rows} {units} {groups}");
            }
        }
    }
}
