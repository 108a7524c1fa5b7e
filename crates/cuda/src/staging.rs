//! Page-locked memory that copies go through, so that the host never waits for the device inside a step.

use crate::Result;
use crate::device::{Device, Event, Pinned, Stream};
use ironhorse_core::parallel::{self, PIECE};
use ironhorse_core::{DType, bf16_to_f32, f32_to_bf16};

/// Values as the device stores them. The element type is chosen outside the loops, so that each of them is a plain one.
pub(crate) fn to_device(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::BF16 => each(bytes, values, |value| f32_to_bf16(value).to_le_bytes()),
        DType::I32 => each(bytes, values, |value| (value as i32).to_le_bytes()),
        DType::I16 => each(bytes, values, |value| (value as i16).to_le_bytes()),
        DType::F8(format) => each(bytes, values, |value| [format.encode(value)]),
        _ => each(bytes, values, f32::to_le_bytes),
    }
}

/// Large arrays on all cores: one core converts more slowly than the device copies.
fn each<const N: usize>(bytes: &mut [u8], values: &[f32], convert: impl Fn(f32) -> [u8; N] + Sync) {
    let (cells, _) = bytes.as_chunks_mut();
    parallel::for_each(cells.chunks_mut(PIECE).zip(values.chunks(PIECE)), |(cells, values)| {
        for (cell, &value) in cells.iter_mut().zip(values) {
            *cell = convert(value);
        }
    });
}

/// What [`to_device`] wrote, as values.
pub(crate) fn to_host(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        DType::BF16 => back(bytes, values, |cell| bf16_to_f32(u16::from_le_bytes(cell))),
        DType::I32 => back(bytes, values, |cell| i32::from_le_bytes(cell) as f32),
        DType::I16 => back(bytes, values, |cell| f32::from(i16::from_le_bytes(cell))),
        DType::F8(format) => back(bytes, values, |[bits]: [u8; 1]| format.decode(bits)),
        _ => back(bytes, values, f32::from_le_bytes),
    }
}

fn back<const N: usize>(bytes: &[u8], values: &mut [f32], convert: impl Fn([u8; N]) -> f32 + Sync) {
    let (cells, _) = bytes.as_chunks();
    parallel::for_each(values.chunks_mut(PIECE).zip(cells.chunks(PIECE)), |(values, cells)| {
        for (value, &cell) in values.iter_mut().zip(cells) {
            *value = convert(cell);
        }
    });
}

/// Bytes of one buffer: transfers larger than that go in pieces.
const BYTES: usize = 4 << 20;
/// Buffers in turn: the host fills one while the device reads the others.
const BUFFERS: usize = 4;

/// A ring of upload buffers.
#[derive(Debug)]
pub(crate) struct Staging {
    ring: Vec<(Pinned, Event)>,
    next: usize,
}

impl Staging {
    pub fn new(device: &'static Device, stream: &Stream) -> Result<Self> {
        let ring = (0..BUFFERS)
            .map(|_| {
                let event = Event::new(device, false)?;
                event.record(stream)?;
                Ok((Pinned::new(device, BYTES)?, event))
            })
            .collect::<Result<_>>()?;
        Ok(Self { ring, next: 0 })
    }

    /// Copies `bytes` bytes to the device; `fill(range, to)` writes each piece of them.
    pub fn upload(
        &mut self,
        stream: &Stream,
        to: u64,
        bytes: usize,
        mut fill: impl FnMut(std::ops::Range<usize>, &mut [u8]),
    ) -> Result<()> {
        for start in (0..bytes).step_by(BYTES) {
            let piece = start..bytes.min(start + BYTES);
            let (buffer, free) = &mut self.ring[self.next];
            free.synchronize()?; // long passed, unless the host is a whole ring ahead
            fill(piece.clone(), &mut buffer.as_mut_slice()[..piece.len()]);
            stream.upload(to + start as u64, buffer, piece.len())?;
            free.record(stream)?;
            self.next = (self.next + 1) % BUFFERS;
        }
        Ok(())
    }

    /// Copies from the device and waits; `take(range, from)` gets each piece.
    pub fn download(
        &mut self,
        stream: &Stream,
        from: u64,
        bytes: usize,
        mut take: impl FnMut(std::ops::Range<usize>, &[u8]),
    ) -> Result<()> {
        let piece = |i: usize| i * BYTES..bytes.min((i + 1) * BYTES);
        let pieces = bytes.div_ceil(BYTES);
        let slot = |next: usize, i: usize| (next + i) % BUFFERS;
        let mut started = 0;
        for i in 0..pieces {
            while started < pieces.min(i + BUFFERS) {
                let (buffer, done) = &self.ring[slot(self.next, started)];
                done.synchronize()?;
                let range = piece(started);
                stream.download(buffer, 0, from + range.start as u64, range.len())?;
                done.record(stream)?;
                started += 1;
            }
            let (buffer, done) = &self.ring[slot(self.next, i)];
            done.synchronize()?;
            take(piece(i), &buffer.as_slice()[..piece(i).len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_as_their_type_keeps_them() {
        let values = [1.0, -2.5, 3.3, f32::INFINITY, 1e-40];
        for (dtype, kept) in [
            (DType::F32, values),
            (DType::BF16, values.map(|value| bf16_to_f32(f32_to_bf16(value)))),
            (DType::I32, [1.0, -2.0, 3.0, 2_147_483_600.0, 0.0]),
            (DType::I16, [1.0, -2.0, 3.0, 32_767.0, 0.0]),
        ] {
            // few, and enough for several cores with a rest
            for times in [1, PIECE] {
                let (values, kept) = (values.repeat(times), kept.repeat(times));
                let mut bytes = vec![0; values.len() * dtype.size()];
                to_device(dtype, &values, &mut bytes);
                let mut back = vec![0.0; values.len()];
                to_host(dtype, &bytes, &mut back);
                assert!(back.iter().zip(&kept).all(|(a, b)| a.to_bits() == b.to_bits()), "{dtype} {times}");
            }
        }
    }
}
