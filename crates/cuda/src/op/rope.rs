//! Rotary position embedding, with tables of cosines and sines that stay on the device.

use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::device::{Buffer, Device};
use crate::kernels::Spec;
use ironhorse_core::DType;
use ironhorse_core::op::{Rope, RopeScaling};

/// Threads of a block.
const THREADS: u32 = 256;

/// The tables of all ropes so far. None is dropped: launches point at them.
#[derive(Debug, Default)]
pub(crate) struct Tables(Vec<Table>);

#[derive(Debug)]
struct Table {
    key: Key,
    positions: usize,
    /// (positions, HD/2) cosines, then as many sines from a multiple of 16 bytes on.
    values: Buffer,
}

/// HD, the bits of base and alpha, and the scaling.
type Key = (usize, u32, u32, RopeScaling);

impl Tables {
    /// Addresses of cosines and sines of at least `positions` positions.
    fn get(&mut self, device: &'static Device, op: &Rope, positions: usize) -> Result<(u64, u64)> {
        let key = (op.head_dim(), op.base.to_bits(), op.alpha.to_bits(), op.scaling);
        let fits = |table: &&Table| table.key == key && table.positions >= positions;
        let (at, positions) = match self.0.iter().find(fits) {
            Some(table) => (table.values.address(), table.positions),
            None => {
                let values = Buffer::from_host(device, &values(op, positions))?;
                let at = values.address();
                self.0.push(Table { key, positions, values });
                (at, positions)
            }
        };
        Ok((at, at + sines_at(op, positions) as u64))
    }
}

/// Byte of a table where the sines start.
fn sines_at(op: &Rope, positions: usize) -> usize {
    (positions * (op.head_dim() / 2) * size_of::<f32>()).next_multiple_of(16)
}

/// Angles in f64, their cosines and sines rounded to f32.
fn values(op: &Rope, positions: usize) -> Vec<u8> {
    let half = op.head_dim() / 2;
    let frequencies: Vec<f64> = (0..half).map(|i| op.frequency(i)).collect();
    let mut bytes = vec![0; 2 * sines_at(op, positions)];
    let (cosines, sines) = bytes.split_at_mut(sines_at(op, positions));
    let pairs = cosines.chunks_exact_mut(4).zip(sines.chunks_exact_mut(4));
    for (i, (cos, sin)) in pairs.take(positions * half).enumerate() {
        let (s, c) = ((i / half) as f64 * frequencies[i % half]).sin_cos();
        cos.copy_from_slice(&(c as f32).to_le_bytes());
        sin.copy_from_slice(&(s as f32).to_le_bytes());
    }
    bytes
}

fn spec(act: DType, vectors: bool) -> Result<Spec> {
    Spec::act_vectors("rope/packed.cu", act, vectors)
}

pub(crate) fn rope(cx: &mut Lower<'_>, op: &Rope) -> Result<()> {
    let [_, seq, width] = *op.qkv.shape.dims() else { return Ok(()) };
    if op.qkv.numel() == 0 {
        return Ok(());
    }
    // With a cache all positions of the context occur; a sequence always has the same length.
    let positions = if op.at_position { op.context } else { seq };
    let (cosines, sines) = cx.libraries.rope.get(cx.device, op, positions)?;
    let (at, half, whole) = (cx.ptr(op.qkv)?, op.head_dim() / 2, 16 / op.qkv.dtype.size());
    let vectors = half.is_multiple_of(whole) && at.is_multiple_of(16);
    let per_token = (op.heads + op.kv_heads) * half / if vectors { whole } else { 1 };
    let count = op.qkv.shape.rows() * per_token;
    let scalars = if op.at_position { cx.scalars } else { 0 };
    let places = op.positions.map_or(Ok(0), |slot| cx.ptr(slot))?;
    let args = Args::new().ptr(at).ptr(cosines).ptr(sines).ptr(scalars).ptr(places).ptr(cx.fault);
    let args = args.u64(count as u64);
    let args = args.u32s([per_token, half]).u64s([width, seq]);
    let args = args.f32(if op.back { -1.0 } else { 1.0 }).u32s([op.context]);
    let grid = Grid::linear(count.div_ceil(THREADS as usize), THREADS);
    cx.launch(&spec(op.qkv.dtype, vectors)?, "rope", grid, args)
}

pub(super) fn specs() -> Vec<Spec> {
    Spec::all_vectors(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::{Pool, Slot};

    #[test]
    fn tables_hold_cosines_then_sines() {
        let qkv = Slot { pool: Pool::Io, offset: 0, shape: [1, 5, 18].into(), dtype: DType::F32 };
        let (base, alpha, scaling) = (10_000.0, 1.0, RopeScaling::None);
        let (heads, kv_heads, back, at_position, positions) = (1, 1, false, false, None);
        let op =
            Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context: 5 };
        let bytes = values(&op, 5);
        assert_eq!((sines_at(&op, 5), bytes.len()), (64, 128));
        let float = |at: usize| f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((float(0), float(64)), (1.0, 0.0));
        assert_eq!((float(4 * 3 * 4), float(64 + 4 * 3 * 4)), (4.0_f64.cos() as f32, 4.0_f64.sin() as f32));
    }
}
