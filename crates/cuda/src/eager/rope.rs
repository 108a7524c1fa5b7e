//! Rotary position embedding, by tables of cosines and sines or by a table of angles.

use super::layout::{Columns, THREADS, aligned, lane_width, pointers};
use super::{Launch, OnStream};
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Pairs, Rope, RopeAngles, RopeFreqs, RopeQk};

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

impl Launch for Rope {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        rotate(at, self, None)
    }
}

/// A second tensor with the positions of the first: x, y and the number of its heads.
type Second = (Array, Array, usize);

/// Rotates one tensor, or two of them in one launch.
fn rotate(at: &OnStream<'_>, op: &Rope, second: Option<Second>) -> Result<()> {
    let Rope { x, cos, sin, y, shape, back } = *op;
    let (x2, y2, heads2) = second.unwrap_or((x, y, 0));
    let (tokens, half, heads) = (shape.batch * shape.seq, shape.head_dim / 2, shape.heads + heads2);
    if tokens * heads * half == 0 {
        return Ok(());
    }
    let interleaved = shape.pairs == Pairs::Interleaved;
    let vector = lane_width(x.float);
    let run = if interleaved { shape.head_dim } else { half };
    let vectors = run.is_multiple_of(vector) && aligned(&[x, y, cos, sin, x2, y2]);
    let ([one, two], pairs) = match (interleaved, vectors) {
        (true, true) => (["rope_interleaved", "rope_interleaved_qk"], vector / 2),
        (true, false) => (["rope_interleaved_any", "rope_interleaved_any_qk"], 1),
        (false, true) => (["rope_halves", "rope_halves_qk"], vector),
        (false, false) => (["rope_halves_any", "rope_halves_any_qk"], 1),
    };
    small("heads * head_dim", heads * shape.head_dim)?;
    let columns = Columns::of(heads * (half / pairs));
    let mut args = pointers([y, x, cos, sin]).u64(tokens as u64);
    for (name, size) in [("seq", shape.seq), ("heads", shape.heads), ("head_dim", shape.head_dim)] {
        args = args.u32(small(name, size)?);
    }
    args = args.u32(back.into()).u32(columns.tiles as u32);
    if second.is_some() {
        args = args.arrays([y2, x2]).u32(heads2 as u32);
    }
    let kernel = Spec::of(FILE, x.float).kernel(if second.is_some() { two } else { one });
    at.launch(&kernel, columns.grid(tokens.div_ceil(AHEAD * columns.y)), args)
}

/// Rotates one tensor, or two of them, by a table of angles.
fn rotate_by_angles(at: &OnStream<'_>, op: &RopeAngles, second: Option<Second>) -> Result<()> {
    let RopeAngles { x, angles, y, offset, shape } = *op;
    let half = shape.head_dim / 2;
    let n = shape.seq * half;
    if n * shape.batch * (shape.heads + second.map_or(0, |(_, _, heads)| heads)) == 0 {
        return Ok(());
    }
    // The table of sines must be aligned for vectors too.
    let table = (n * size_of::<f32>()).next_multiple_of(16);
    let cos = at.scratch(2 * table)?;
    let sin = cos + table as u64;
    let args = Args::new().ptr(cos).ptr(sin).at(angles.wrapping_add(offset * half)).u64(n as u64);
    let grid = Grid::linear(n.div_ceil(THREADS), THREADS as u32);
    at.launch(&Spec::new(TABLE).kernel("rope_turns"), grid, args)?;
    let [cos, sin] = [cos, sin].map(|table| Array::f32(std::ptr::without_provenance(table as usize)));
    rotate(at, &Rope { x, cos, sin, y, shape, back: false }, second)
}

impl Launch for RopeAngles {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        rotate_by_angles(at, self, None)
    }
}

impl Launch for RopeQk {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        rotate_by_angles(at, &self.q, Some((self.k.x, self.k.y, self.k.shape.heads)))
    }
}

impl Launch for RopeFreqs {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { freqs, positions, head_dim, base } = *self;
        let half = head_dim / 2;
        if positions * half == 0 {
            return Ok(());
        }
        let columns = Columns::of(half);
        let args = Args::new().at(freqs).u64(positions as u64);
        let args = args.u32(small("head_dim", half)?).f64(base).u32(columns.tiles as u32);
        let grid = columns.grid(positions.div_ceil(ROWS * columns.y));
        at.launch(&Spec::new(TABLE).kernel("rope_freqs"), grid, args)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    [Spec::of_all(FILE), vec![Spec::new(TABLE)]].concat()
}
