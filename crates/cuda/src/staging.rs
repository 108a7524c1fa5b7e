//! Page-locked memory that copies go through, so that the host never waits for the device inside a step.

use crate::Result;
use crate::device::Device;
use crate::ffi::driver::{Event, Pinned, Stream};
use std::rc::Rc;

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
    pub fn new(device: &Rc<Device>, stream: &Stream) -> Result<Self> {
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
                stream.download(buffer, from + range.start as u64, range.len())?;
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
