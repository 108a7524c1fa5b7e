//! A range of ops as launches: run one by one at first, recorded and replayed from then on.

use crate::Result;
use crate::device::{Buffer, Graph, Stream};
use crate::launch::Launch;
use std::sync::atomic::{AtomicBool, Ordering};

/// A range of ops made ready.
#[derive(Default)]
pub(crate) struct Lowered {
    pub(crate) launches: Vec<Launch>,
    pub(crate) constants: Vec<Buffer>,
    graph: Option<Graph>,
    /// Whether recording has failed: then it runs launch by launch.
    eager: bool,
    runs: u32,
    /// Positions the scalar `position` must stay below.
    pub(super) context: Option<usize>,
}

impl Lowered {
    /// Puts everything on the stream.
    pub fn run(&mut self, stream: &Stream, graphs: bool) -> Result<()> {
        self.runs += 1;
        // The first run is eager: libraries load their kernels then, which a recording does not allow.
        let record = graphs && !self.eager && self.runs > 1 && self.launches.len() > 1;
        if self.graph.is_none() && record {
            match stream.capture(|| enqueue_all(&mut self.launches, stream)) {
                Ok(graph) => self.graph = Some(graph),
                Err(error) => {
                    self.eager = true;
                    warn_once(&error.to_string());
                }
            }
        }
        match &self.graph {
            Some(graph) => stream.replay(graph),
            None => enqueue_all(&mut self.launches, stream),
        }
    }
}

fn enqueue_all(launches: &mut [Launch], stream: &Stream) -> Result<()> {
    launches.iter_mut().try_for_each(|launch| launch.enqueue(stream))
}

/// Ranges fail for the same reason, so one line is enough.
fn warn_once(why: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!("ops run one by one, not as a CUDA graph, and so slower: {why}");
    }
}
