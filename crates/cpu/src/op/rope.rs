//! Rotary position embedding, with tables of cosines and sines that the engine keeps.

use super::{Ctx, TASK, engine_error};
use crate::buffer::Buffer;
use crate::kernel::rope::rotate;
use crate::memory::Span;
use crate::team::Team;
use ironhorse_core::eager::Pairs;
use ironhorse_core::op::{Rope, RopeScaling, check_at_positions, check_positions};
use ironhorse_core::{Error, Result};

/// Positions a task computes the table of.
const POSITIONS: usize = 64;

/// The tables of all programs that ran so far: they grow in a program's first run only.
#[derive(Default)]
pub struct RopeTables(Vec<Table>);

/// HD, the bits of base and alpha, and the scaling.
type Key = (usize, u32, u32, RopeScaling);

/// A table with, for each position, the cosines of all pairs, then the sines.
struct Table {
    key: Key,
    positions: usize,
    values: Buffer,
}

impl RopeTables {
    /// The table of an op: at least `positions` rows of HD floats.
    fn get(&mut self, team: &Team, op: &Rope, positions: usize) -> Result<&[f32]> {
        let key = (op.head_dim(), op.base.to_bits(), op.alpha.to_bits(), op.scaling);
        let index = match self.0.iter().position(|table| table.key == key) {
            Some(index) => index,
            None => {
                self.0.push(Table { key, positions: 0, values: Buffer::new() });
                self.0.len() - 1
            }
        };
        let table = &mut self.0[index];
        if table.positions < positions {
            table.values.reserve(positions * op.head_dim());
            fill(team, op, table.values.as_mut_slice())?;
            table.positions = positions;
        }
        Ok(table.values.as_slice())
    }
}

/// Angles in f64, their cosines and sines rounded to f32.
fn fill(team: &Team, op: &Rope, values: &mut [f32]) -> Result<()> {
    let (hd, half) = (op.head_dim(), op.head_dim() / 2);
    let frequencies: Vec<f64> = (0..half).map(|i| op.frequency(i)).collect();
    let (positions, all) = (values.len() / hd.max(1), Span::of_slice(values));
    let task = |range: std::ops::Range<usize>, _: usize| {
        for position in range {
            // SAFETY: tasks have disjoint positions.
            let (cos, sin) = unsafe { all.get_mut(position * hd..(position + 1) * hd) }.split_at_mut(half);
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
                let (s, c) = (position as f64 * frequency).sin_cos();
                (*cos, *sin) = (c as f32, s as f32);
            }
        }
    };
    team.chunks(positions, POSITIONS, task).map_err(engine_error)
}

pub fn rope(ctx: &mut Ctx<'_>, op: &Rope) -> Result<()> {
    let qkv = ctx.f32(op.qkv)?;
    let [_, seq, width] = *op.qkv.shape.dims() else { return Ok(()) };
    let first = if op.at_position && op.positions.is_none() { ctx.scalars.position as usize } else { 0 };
    if first + seq > op.context {
        let (last, context) = (first + seq - 1, op.context);
        return Err(Error::Input(format!("position {last} is beyond the context of {context}")));
    }
    let (isa, hd) = (ctx.isa, op.head_dim());
    if hd == 0 {
        return Ok(());
    }
    let places = op.positions.map(|slot| ctx.i32(slot)).transpose()?;
    // SAFETY: nothing writes the positions while the op runs.
    let places = places.map(|places| unsafe { places.all() });
    match places {
        Some(places) if op.at_position => check_at_positions(places, op.context)?,
        Some(places) => check_positions(places, seq)?,
        None => {}
    }
    // Decoding reaches every position of the cache; a sequence has always the same length.
    let positions = if op.at_position { op.context } else { seq };
    let table = ctx.tables.get(ctx.team, op, positions)?;
    let rotated = (op.heads + op.kv_heads) * hd;
    let task = |rows: std::ops::Range<usize>, _: usize| {
        for row in rows {
            let position = places.map_or(first + row % seq, |places| places[row].max(0) as usize);
            // SAFETY: tasks have disjoint rows of the only slot.
            let heads = unsafe { qkv.get_mut(row * width..row * width + rotated) };
            let (cos, sin) = table[position * hd..(position + 1) * hd].split_at(hd / 2);
            rotate(isa, Pairs::Halves, heads, [cos, sin], op.back);
        }
    };
    // Tokens of a task: with fewer it costs as much to take as to do.
    ctx.team.chunks(op.qkv.shape.rows(), (TASK / width.max(1)).max(1), task).map_err(engine_error)
}
