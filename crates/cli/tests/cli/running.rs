//! Helpers that watch running training processes, send them signals and wait for them. Nothing depends on the speed of
//! the machine.

use super::Place;
use super::place::Done;
use ironhorse::train::format::checkpoint::{Checkpoint, checkpoints_of};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The time limit for conditions that always become true.
const LIMIT: Duration = Duration::from_secs(300);

/// A run that does not end by itself. Its learning rate does not depend on the number of steps, so that it can be cut
/// short and compared with a shorter one.
pub const ENDLESS: &str = "--model n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32 --batch 2 --seq 16 --threads 1 \
                           --steps 4000000 --schedule constant --warmup 0 --val-every 0 --val-batches 1 --sample-every 0 \
                           --sample-tokens 0";

/// A process; killed when it is dropped before its end.
pub struct Running {
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Running {
    /// Starts a command line; its output goes to files, so that it never blocks on a pipe.
    pub fn start(place: &Place, line: &str) -> Self {
        Self::spawn(place, place.command(line))
    }

    pub fn spawn(place: &Place, mut command: Command) -> Self {
        let free = |kind: &str| {
            (0..).map(|i| place.path(&format!("{kind}-{i}.txt"))).find(|path| !path.exists()).unwrap()
        };
        let (out, err) = (free("out"), free("err"));
        command.stdin(Stdio::null()).stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
        Self { child: command.spawn().unwrap(), out, err }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.err).unwrap_or_default()
    }

    /// Waits for a condition; the process must not end before that.
    pub fn wait_for(&mut self, what: &str, mut condition: impl FnMut() -> bool) {
        let began = Instant::now();
        while !condition() {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("ended with {status} before {what}: {}", self.said());
            }
            assert!(began.elapsed() < LIMIT, "never came: {what}: {}", self.said());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the log of the run has this step.
    pub fn wait_for_step(&mut self, run: &Path, step: usize) {
        self.wait_for(&format!("step {step}"), || steps_logged(run) > step);
    }

    /// Waits until it handles signals.
    #[cfg(target_os = "linux")]
    pub fn wait_for_handlers(&mut self) {
        let status = format!("/proc/{}/status", self.child.id());
        self.wait_for("it listens to SIGUSR2, the last of its signals", || {
            let text = std::fs::read_to_string(&status).unwrap_or_default();
            let caught = text.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
            u64::from_str_radix(caught.trim(), 16).unwrap_or(0) & (1 << 11) != 0
        });
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Sends a signal again and again until the process ends.
    pub fn signal_until_it_ends(mut self, signal: Signal) -> Done {
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < LIMIT, "does not end: {}", self.said());
            self.signal(signal);
            std::thread::sleep(Duration::from_millis(50));
        }
        self.end()
    }

    /// Waits until it ends.
    pub fn end(mut self) -> Done {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let stderr = self.said();
                assert!(!stderr.contains("panicked"), "{stderr}");
                return Done { code: status.code(), stdout: std::fs::read(&self.out).unwrap(), stderr };
            }
            assert!(began.elapsed() < LIMIT, "does not end: {}", self.said());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Whole lines in a run's log.
pub fn steps_logged(run: &Path) -> usize {
    let bytes = std::fs::read(run.join("metrics.jsonl")).unwrap_or_default();
    bytes.iter().filter(|&&byte| byte == b'\n').count()
}

/// The steps of the checkpoints of a run, the newest first; all of them must be complete.
pub fn checkpoints(run: &Path) -> Vec<u64> {
    let all = checkpoints_of(run);
    all.iter().for_each(|(_, path)| drop(Checkpoint::open(path).unwrap()));
    all.into_iter().map(|(step, _)| step).collect()
}

/// Every file of a run's checkpoint.
pub fn checkpoint(run: &Path, step: u64) -> BTreeMap<String, Vec<u8>> {
    let folder = run.join(format!("checkpoints/step-{step:06}"));
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap()))
        .collect()
}

/// A run's metrics without their times.
pub fn metrics(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let mut value: serde_json::Value = serde_json::from_str(line).unwrap();
        value["ms"].take();
        value["data_ms"].take();
        value["tokens_per_s"].take();
        value
    };
    text.lines().map(line).collect()
}

/// Checks that two runs of this many steps have the same last checkpoint and the same metrics.
pub fn assert_equal(one: &Path, two: &Path, steps: u64) {
    let (first, second) = (checkpoint(one, steps), checkpoint(two, steps));
    assert_eq!(first.keys().collect::<Vec<_>>(), second.keys().collect::<Vec<_>>());
    for (name, bytes) in &first {
        let other = &second[name];
        if name == "trainer.json" {
            assert_eq!(String::from_utf8_lossy(bytes), String::from_utf8_lossy(other));
        }
        assert!(bytes == other, "{name} of {} and {}", one.display(), two.display());
    }
    assert_eq!(metrics(one), metrics(two));
}

/// Temporary names anywhere below a folder.
pub fn leftovers(place: &Place) -> Vec<PathBuf> {
    let hidden = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with('.');
    place.files().into_keys().filter(hidden).collect()
}
