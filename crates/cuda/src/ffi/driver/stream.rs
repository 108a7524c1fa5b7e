//! Streams, recorded sections and events.

use super::{Function, Pinned, call};
use crate::Result;
use crate::args::Args;
use crate::device::Device;
use cudarc::driver::sys::{CUevent, CUgraphExec, CUstream};
use std::rc::Rc;

/// A queue of device work.
#[derive(Debug)]
pub struct Stream {
    device: Rc<Device>,
    pub(crate) raw: CUstream,
}

impl Stream {
    /// A stream that does not wait for the default stream.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuStreamCreate(&mut raw, 1))?;
        Ok(Self { device: device.clone(), raw })
    }

    pub(super) fn default_of(device: &Rc<Device>) -> Self {
        Self { device: device.clone(), raw: std::ptr::null_mut() }
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Rc<Device> {
        &self.device
    }

    /// Waits for all work given so far.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.device, cuStreamSynchronize(self.raw))
    }

    /// Launches a kernel.
    pub(crate) fn launch(
        &self,
        function: &Function,
        [gx, gy, gz]: [u32; 3],
        [bx, by, bz]: [u32; 3],
        shared: u32,
        args: &mut Args,
    ) -> Result<()> {
        let mut pointers = args.pointers();
        call!(
            self.device,
            cuLaunchKernel(
                function.raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                self.raw,
                pointers.as_mut_ptr(),
                std::ptr::null_mut()
            )
        )
    }

    /// Fills with zero.
    pub fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        call!(self.device, cuMemsetD8Async(at, 0, bytes, self.raw))
    }

    /// Copies within the device.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        call!(self.device, cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw))
    }

    /// Copies from pinned memory; it must not change until the stream has done so.
    pub fn upload(&self, to: u64, from: &Pinned, bytes: usize) -> Result<()> {
        debug_assert!(bytes <= from.bytes());
        call!(self.device, cuMemcpyHtoDAsync_v2(to, from.start().cast(), bytes, self.raw))
    }

    /// Copies into pinned memory; its contents are good once the stream has done so.
    pub fn download(&self, to: &Pinned, from: u64, bytes: usize) -> Result<()> {
        debug_assert!(bytes <= to.bytes());
        call!(self.device, cuMemcpyDtoHAsync_v2(to.start().cast(), from, bytes, self.raw))
    }

    /// Copies into pinned memory from byte `offset` on.
    pub fn download_at(&self, to: &Pinned, offset: usize, from: u64, bytes: usize) -> Result<()> {
        debug_assert!(offset + bytes <= to.bytes());
        let start = to.start().wrapping_add(offset);
        call!(self.device, cuMemcpyDtoHAsync_v2(start.cast(), from, bytes, self.raw))
    }

    /// Copies into page-locked memory and waits, so that the slice is never written to after the call.
    pub fn download_now(&self, to: &mut [u8], from: u64) -> Result<()> {
        let queued =
            call!(self.device, cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.raw));
        let done = self.synchronize(); // also where the copy was refused: nothing may still be on its way
        queued.and(done)
    }

    /// Records everything `work` puts on this stream into a graph instead of running it. The recording ends also
    /// where the work fails.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        call!(self.device, cuStreamBeginCapture_v2(self.raw, 1))?; // thread local
        let done = work();
        let mut graph = std::ptr::null_mut();
        let ended = call!(self.device, cuStreamEndCapture(self.raw, &mut graph));
        let made = done.and(ended).and_then(|()| {
            let mut exec = std::ptr::null_mut();
            call!(self.device, cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
            Ok(Graph { device: self.device.clone(), exec })
        });
        if !graph.is_null() {
            let _ = call!(self.device, cuGraphDestroy(graph));
        }
        made
    }

    /// Runs a graph.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        call!(self.device, cuGraphLaunch(graph.exec, self.raw))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            let _ = self.device.make_current();
            let _ = call!(self.device, cuStreamDestroy_v2(self.raw));
        }
    }
}

/// A recorded section.
#[derive(Debug)]
pub struct Graph {
    device: Rc<Device>,
    exec: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuGraphExecDestroy(self.exec));
    }
}

/// A point on a stream.
#[derive(Debug)]
pub struct Event {
    device: Rc<Device>,
    raw: CUevent,
}

impl Event {
    /// An event; one that is `timed` can be subtracted from another.
    pub fn new(device: &Rc<Device>, timed: bool) -> Result<Self> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuEventCreate(&mut raw, if timed { 0 } else { 2 }))?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Marks the stream's present end.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        call!(self.device, cuEventRecord(self.raw, stream.raw))
    }

    /// Waits until the stream has passed the mark.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.device, cuEventSynchronize(self.raw))
    }

    /// Milliseconds since an earlier event; both have passed.
    pub fn since(&self, earlier: &Self) -> Result<f32> {
        let mut ms = 0.0;
        call!(self.device, cuEventElapsedTime(&mut ms, earlier.raw, self.raw))?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuEventDestroy_v2(self.raw));
    }
}
