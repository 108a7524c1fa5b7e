//! Kernel by kernel: when each ran and which op asked for it; and what the device's memory holds.

use super::{CudaEngine, Key, Streams};
use crate::Result;
use crate::args::{Args, Grid};
use crate::device::Event;
use crate::ffi::cupti::{Activity, Recorder};
use crate::measure;
use ironhorse_core::{Engine, Pool, Timed};

/// How long the host may take to put one launch and its event on the stream.
const NS_PER_LAUNCH: u64 = 20_000;
/// The driver queues about this many launches; the host waits beyond that, and is then far enough ahead.
const QUEUE: u64 = 1024;

impl CudaEngine {
    /// Runs the ops without a graph and times each kernel: with CUPTI where it is there, else with events.
    pub(crate) fn record_kernels(&mut self, key: &Key, record: &mut Vec<Timed>) -> Result<()> {
        self.stream.synchronize()?;
        match self.timed(key) {
            Ok(timed) => record.extend(timed),
            Err(error) => {
                self.squares.distrust(); // some of the kernels may have run
                return Err(error);
            }
        }
        self.note_squares(key);
        Ok(self.synchronize()?)
    }

    fn timed(&mut self, key: &Key) -> Result<Vec<Timed>> {
        match Recorder::start() {
            Ok(recorder) => {
                if let Some(timed) = self.with_cupti(key, recorder)? {
                    return Ok(timed);
                }
            }
            Err(error) => tracing::info!("kernels are timed with events: {error}"),
        }
        self.with_events(key)
    }

    /// The device's own record of each kernel; `None` if CUPTI recorded nothing that we asked for.
    fn with_cupti(&mut self, key: &Key, recorder: Recorder) -> Result<Option<Vec<Timed>>> {
        let Some(lowered) = self.lowered.get_mut(key) else { return Ok(Some(Vec::new())) };
        let streams =
            Streams { main: &self.stream, exchange: self.exchange.as_ref().unwrap_or(&self.stream) };
        lowered.enqueue(streams, |op, launch| recorder.during(op as u64, launch))?;
        streams.main.synchronize()?;
        let activities = match recorder.finish() {
            Ok(activities) => activities,
            Err(error) => {
                tracing::warn!("kernels are timed with events: {error}");
                return Ok(None);
            }
        };
        if activities.iter().all(|(op, _)| op.is_none()) && !lowered.launches.is_empty() {
            tracing::warn!("kernels are timed with events: CUPTI recorded none of ours");
            return Ok(None);
        }
        let first =
            |op| lowered.launches.iter().filter(|launch| launch.op == op).map(|launch| launch.first).min();
        Ok(Some(timeline(activities, |op| first(op).unwrap_or(op))))
    }

    /// Times launches by an event before and after each, with all launches on one stream, so that nothing runs beside them. A launch's
    /// time includes the gap before the next one, about a microsecond. The device is held up first, so that it never waits for the host.
    fn with_events(&mut self, key: &Key) -> Result<Vec<Timed>> {
        let wait = self.device.function(&measure::spec().kernel("limits_wait"))?;
        let Some(lowered) = self.lowered.get_mut(key) else { return Ok(Vec::new()) };
        let stream = &self.stream;
        let launches = &mut lowered.launches;
        let events: Vec<Event> =
            (0..=launches.len()).map(|_| Event::new(self.device, true)).collect::<Result<_>>()?;
        let ahead = QUEUE.min(launches.len() as u64) * NS_PER_LAUNCH;
        stream.launch(wait, Grid::linear(1, 1), &mut Args::new().u64(ahead))?;
        events[0].record(stream)?;
        for (launch, event) in launches.iter_mut().zip(&events[1..]) {
            launch.enqueue(stream)?;
            event.record(stream)?;
        }
        stream.synchronize()?;
        let mut timed = Vec::with_capacity(launches.len());
        let mut start_ns = 0;
        for (launch, ends) in launches.iter().zip(events.windows(2)) {
            let ns = (f64::from(ends[1].since(&ends[0])?) * 1e6).max(0.0) as u64;
            timed.push(Timed {
                op: launch.op,
                first: launch.first,
                name: launch.name.to_owned(),
                start_ns,
                ns,
            });
            start_ns += ns;
        }
        Ok(timed)
    }

    /// Pools, scratch, constants, what the driver and the libraries took besides, and what was held before on top of
    /// that (pools that grew, the search for algorithms): the sum is the peak.
    pub(crate) fn memory_by_category(&self) -> Vec<(String, usize)> {
        let mut all: Vec<(String, usize)> =
            Pool::ALL.iter().map(|&pool| (pool.name().to_owned(), self.memory.bytes(pool))).collect();
        all.push(("scratch".into(), self.scratch_bytes()));
        let constants = self.lowered.values().flat_map(|lowered| &lowered.constants);
        let counters: usize = self.lowered.values().map(|lowered| lowered.counters.allocated()).sum();
        all.push(("constants".into(), counters + constants.map(crate::device::Buffer::bytes).sum::<usize>()));
        let ours: usize = all.iter().map(|(_, bytes)| bytes).sum();
        // The driver counts other processes on this device too.
        if let Ok((free, total)) = self.device.memory() {
            all.push(("context and libraries".into(), (total - free).saturating_sub(ours)));
        }
        all.retain(|(_, bytes)| *bytes > 0);
        all
    }
}

/// Kernels in order of start, counted from the first. One whose call is not known belongs to the op before it.
fn timeline(activities: Vec<(Option<u64>, Activity)>, first_of: impl Fn(usize) -> usize) -> Vec<Timed> {
    let first = activities.first().map_or(0, |(_, activity)| activity.start);
    let mut op = activities.iter().find_map(|(op, _)| *op).unwrap_or(0);
    activities
        .into_iter()
        .map(|(of, activity)| {
            op = of.unwrap_or(op);
            let (start_ns, ns) = (activity.start - first, activity.end - activity.start);
            let op = op as usize;
            Timed { op, first: first_of(op), name: short_name(&activity.name), start_ns, ns }
        })
        .collect()
}

/// The names in a mangled C++ name without its parameters: `_ZN8cublasLt19splitKreduce_kernelILi32E…` becomes
/// `cublasLt::splitKreduce_kernel`. Other names stay.
fn short_name(name: &str) -> String {
    let Some(mangled) = name.strip_prefix("_Z") else { return name.to_owned() };
    let (mut rest, nested) = mangled.strip_prefix('N').map_or((mangled, false), |rest| (rest, true));
    let mut parts: Vec<&str> = Vec::new();
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Ok(length) = rest[..digits].parse::<usize>() else { break };
        let Some(part) = rest.get(digits..digits + length) else { break };
        parts.push(part);
        rest = &rest[digits + length..];
        if !nested {
            break;
        }
    }
    parts.retain(|part| !part.starts_with("_GLOBAL__N"));
    if parts.is_empty() { name.to_owned() } else { parts.join("::") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_names_become_readable() {
        for (mangled, short) in [
            ("layernorm_fwd", "layernorm_fwd"),
            ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"),
            ("_ZN8cublasLt19splitKreduce_kernelILi32ELi16EiEEvT_", "cublasLt::splitKreduce_kernel"),
            ("_ZN7cutlass6KernelI5ThingEEvNT_6ParamsE", "cutlass::Kernel"),
            ("_Z6kernelv", "kernel"),
            ("_ZN12_GLOBAL__N_14copyEv", "copy"),
            ("_Z", "_Z"),
            ("_ZN99abc", "_ZN99abc"),
            ("_ZN3\u{e9}\u{e9}", "_ZN3\u{e9}\u{e9}"),
        ] {
            assert_eq!(short_name(mangled), short);
        }
    }
}
