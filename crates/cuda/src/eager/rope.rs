//! Rotary position embedding, by tables of cos and sin or by a table of angles.

use super::gpu::{At, Kernel};
use super::layout::{Columns, THREADS, address, aligned};
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Float, Pairs, RopeShape};

const FILE: &str = "rope/eager.cu";
const TABLE: &str = "rope/tables.cu";
/// Positions of a thread: `AHEAD` of rope/eager.cu.
const AHEAD: usize = 2;
/// Rows of a thread: `ROWS` of rope/tables.cu.
const ROWS: usize = 64;

/// A size that kernels count in 32 bits.
fn small(name: &str, size: usize) -> Result<u32> {
    let small = u32::try_from(size).ok().filter(|&size| size < 1 << 31);
    small.ok_or_else(|| Error::Input(format!("rope: {name} is {size}, expected less than 2^31")))
}

/// y = x with pairs of elements turned; `y` may be `x`.
///
/// # Safety
/// See [the module](super); sizes as [`RopeShape`] says.
pub unsafe fn rope(
    at: &At<'_>,
    [x, cos, sin]: [Array; 3],
    y: Array,
    shape: &RopeShape,
    back: bool,
) -> Result<()> {
    let (tokens, half) = (shape.batch * shape.seq, shape.head_dim / 2);
    if tokens * shape.heads * half == 0 {
        return Ok(());
    }
    let interleaved = shape.pairs == Pairs::Interleaved;
    let vector = 16 / x.float.size();
    let run = if interleaved { shape.head_dim } else { half };
    let vectors = run.is_multiple_of(vector) && aligned(&[x, y, cos, sin]);
    let (name, pairs) = match (interleaved, vectors) {
        (true, true) => ("rope_interleaved", vector / 2),
        (true, false) => ("rope_interleaved_any", 1),
        (false, true) => ("rope_halves", vector),
        (false, false) => ("rope_halves_any", 1),
    };
    small("heads * head_dim", shape.heads * shape.head_dim)?;
    let columns = Columns::of(shape.heads * (half / pairs));
    let mut args = [y, x, cos, sin].iter().fold(Args::new(), |args, &array| args.ptr(address(array)));
    args = args.u64(tokens as u64);
    for (name, size) in [("seq", shape.seq), ("heads", shape.heads), ("head_dim", shape.head_dim)] {
        args = args.u32(small(name, size)?);
    }
    let args = args.u32(back.into()).u32(columns.tiles as u32);
    let grid = columns.grid(tokens.div_ceil(AHEAD * columns.y));
    at.launch(&Kernel::of(FILE, name, x.float), grid, args)
}

/// [`rope`] of f32 arrays (x, y, heads) by a table of angles, whose row `offset` is that of the first position. `shape.heads`
/// has no meaning.
///
/// # Safety
/// As [`rope`]; angles: at least (offset + seq) rows of head_dim / 2.
pub unsafe fn rope_angles(
    at: &At<'_>,
    arrays: &[(Array, Array, usize)],
    angles: *const f32,
    offset: usize,
    shape: &RopeShape,
) -> Result<()> {
    let half = shape.head_dim / 2;
    let (n, heads) = (shape.seq * half, arrays.iter().map(|(_, _, heads)| heads).sum::<usize>());
    if n * shape.batch * heads == 0 {
        return Ok(());
    }
    // Where the second table starts must be aligned for vectors too.
    let table = (n * size_of::<f32>()).next_multiple_of(16);
    let cos = at.scratch(2 * table)?;
    let sin = cos + table as u64;
    let from = angles.addr() as u64 + (offset * half * size_of::<f32>()) as u64;
    let args = Args::new().ptr(cos).ptr(sin).ptr(from).u64(n as u64);
    at.launch(&Kernel::new(TABLE, "rope_turns"), Grid::linear(n.div_ceil(THREADS), THREADS as u32), args)?;
    let tables = [cos, sin].map(|table| Array::f32(std::ptr::without_provenance(table as usize)));
    for &(x, y, heads) in arrays {
        // SAFETY: the caller's; the tables have seq rows.
        unsafe { rope(at, [x, tables[0], tables[1]], y, &RopeShape { heads, ..*shape }, false)? };
    }
    Ok(())
}

/// freqs\[p, i\] = p / base^(2 i / head_dim), p < positions, i < head_dim / 2; the base with its NTK factor already.
///
/// # Safety
/// See [the module](super); freqs: positions·head_dim/2 elements of f32.
pub unsafe fn rope_freqs(
    at: &At<'_>,
    freqs: *mut f32,
    positions: usize,
    head_dim: usize,
    base: f64,
) -> Result<()> {
    let half = head_dim / 2;
    if positions * half == 0 {
        return Ok(());
    }
    let columns = Columns::of(half);
    let args = Args::new().ptr(freqs.addr() as u64).u64(positions as u64);
    let args = args.u32(small("head_dim", half)?).f64(base).u32(columns.tiles as u32);
    at.launch(&Kernel::new(TABLE, "rope_freqs"), columns.grid(positions.div_ceil(ROWS * columns.y)), args)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    let mut specs: Vec<Spec> = Float::ALL.map(|float| Kernel::of(FILE, "", float).spec()).into();
    specs.push(Kernel::new(TABLE, "").spec());
    specs
}
