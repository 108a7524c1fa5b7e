//! Several processes that run one command together: how they start, meet and share a machine.

use crate::args::EngineArgs;
use crate::hardware::{COMMIT, VERSION};
use crate::{Outcome, failure, out};
use anyhow::{Context, Result};
use ironhorse::Device;
use ironhorse::core::ranks::PIECE_ELEMENTS;
use ironhorse_ranks::{Environment, Meeting, TcpRanks};
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The shortest time that ranks have to meet.
const TO_MEET: Duration = Duration::from_secs(60);
/// How much longer than the time limit a rank may take to end after another has failed.
const TO_END: Duration = Duration::from_secs(30);
/// The code of a process that a signal ended is this and the signal.
const BY_SIGNAL: i32 = 128;
/// How long a rank without its launcher has to stop, with a last save that may be large.
const TO_STOP: Duration = Duration::from_secs(1800);
/// How long a process may take to end once a rank is lost: rank 0 may have a checkpoint to complete. After that what it waits for does not
/// come back, a device that hangs.
const TO_LEAVE: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(10)];
/// How often a rank looks for its launcher.
const LOOK: Duration = Duration::from_millis(200);

/// Starts this command line `world` times and waits; `each` is called now and then, with the process of rank 0.
pub fn launch(
    line: &[OsString],
    world: usize,
    timeout: Duration,
    each: impl FnMut(Option<u32>),
) -> Result<Outcome> {
    let arguments = line.get(1..).unwrap_or_default();
    let ranks = ironhorse_ranks::launch(arguments, world).context("cannot start the ranks")?;
    let codes = ranks.wait(timeout + TO_END, each);
    Ok(outcome(&codes))
}

/// What the exit codes of all ranks mean together.
fn outcome(codes: &[i32]) -> Outcome {
    let any = |wanted: fn(i32) -> bool| codes.iter().any(|&code| wanted(code));
    if any(|code| code >= BY_SIGNAL) {
        Outcome::Stopped // whatever the others said of the one that was ended
    } else if any(|code| code == 1) {
        Outcome::Failed
    } else if any(|code| code != 0 && code != crate::STOPPED) {
        Outcome::Refused // what ended one ended all, and some may have noticed only that
    } else if any(|code| code == crate::STOPPED) {
        Outcome::Stopped
    } else {
        Outcome::Done
    }
}

/// Meets the other ranks, unless it is asked to `stop`; from here on only rank 0 prints. The flag is set when the launcher is
/// gone.
pub fn meet(
    environment: &Environment,
    timeout: Duration,
    flag: &Arc<AtomicUsize>,
    stop: &dyn Fn() -> bool,
) -> Result<Arc<TcpRanks>> {
    out::begin_rank(environment.place.rank);
    if environment.is_own() {
        follow_launcher(flag.clone(), timeout);
    }
    let version = format!("{VERSION} {COMMIT}");
    let meeting = Meeting {
        environment,
        version: &version,
        patience: TO_MEET.max(timeout),
        timeout,
        note: &|text| out::note(text),
        stop,
    };
    let ranks = meeting.meet().map_err(|error| match stop() {
        true => anyhow::Error::from(ironhorse::train::Error::Stopped),
        false => error.into(),
    })?;
    let hosts = ranks.hosts();
    let mut different: Vec<&String> = hosts.iter().collect();
    different.dedup();
    out::note(format_args!("{} ranks on {} by {}", hosts.len(), join(&different), environment.by));
    // Where a device hangs no call to it returns, not even those that free its memory: this process then ends without them.
    let to_leave = TO_LEAVE[usize::from(environment.place.rank > 0)];
    ranks.when_lost(move |error| {
        std::thread::sleep(to_leave);
        signal_hook::low_level::exit(failure::report(&error.clone().into()).into());
    });
    Ok(Arc::new(ranks))
}

/// The pieces of a bucket of so many bytes of f32 gradients.
pub fn pieces_of(bucket: u64) -> usize {
    (bucket as usize / (PIECE_ELEMENTS * size_of::<f32>())).max(1)
}

/// What a rank has of its machine: the GPU of its number, unless all are to share one, and its share of the cores.
pub fn share(
    environment: &Environment,
    engine: &EngineArgs,
    same_gpu: bool,
) -> Result<(Option<usize>, usize)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let gpus = || ironhorse::cuda::devices().map_or(1, |gpus| gpus.len().max(1));
    let gpu = match engine.device()? {
        Device::Cuda(_) if !same_gpu => Some(environment.local_rank % gpus()),
        _ => None,
    };
    // how many share these cores, as far as is known
    let same = if environment.address == "127.0.0.1" { environment.place.world } else { 1 };
    let here = environment.local_world.unwrap_or(same).max(1);
    Ok((gpu, (cores / here).max(1)))
}

/// Stops this rank, with a checkpoint where it makes some, when the process that started it is gone; ends it if it cannot stop.
#[cfg(unix)]
fn follow_launcher(stop: Arc<AtomicUsize>, patience: Duration) {
    use std::os::unix::process::parent_id;
    let launcher = parent_id();
    let follow = move || {
        while parent_id() == launcher {
            std::thread::sleep(LOOK);
        }
        stop.store(rustix::process::Signal::TERM.as_raw() as usize, Ordering::Relaxed);
        std::thread::sleep(patience + TO_STOP);
        std::process::exit(crate::STOPPED);
    };
    // without the thread the rank runs all the same
    drop(std::thread::Builder::new().name("launcher".into()).spawn(follow));
}

#[cfg(not(unix))]
fn follow_launcher(_stop: Arc<AtomicUsize>, _patience: Duration) {}

fn join(names: &[&String]) -> String {
    let some: Vec<&str> = names.iter().take(4).map(|name| name.as_str()).collect();
    let more = if names.len() > some.len() { ", ..." } else { "" };
    some.join(", ") + more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launcher_says_what_the_ranks_mean_together() {
        for (codes, expected) in [
            (&[0, 0][..], Outcome::Done),
            (&[3, 3], Outcome::Stopped),
            (&[3, 2, 3], Outcome::Refused),
            (&[3, 1], Outcome::Failed),
            (&[2, 1], Outcome::Failed),
            (&[2, 137], Outcome::Stopped),
            (&[0, 3], Outcome::Stopped),
            (&[101, 3], Outcome::Refused),
        ] {
            assert_eq!(outcome(codes), expected, "{codes:?}");
        }
    }
}
