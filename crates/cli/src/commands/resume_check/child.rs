//! Training runs as processes of their own, which can be watched, stopped and killed.

use anyhow::{Context, Result, bail};
use ironhorse::train::format::checkpoint::checkpoints_of;
use ironhorse::train::run::RunJson;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The Python interpreter, where the command runs inside one: the wheel's `_command.py` sets it. The executable of this
/// process is then not one that knows our flags.
const PYTHON: &str = "IRONHORSE_PYTHON";
/// The environment variable of the kernel cache.
const CACHE: &str = "IRONHORSE_CACHE";
/// Time between two checks of a run.
const LOOK: Duration = Duration::from_micros(200);
/// The end of a log that holds at least its last line.
const TAIL: u64 = 1 << 18;
/// Lines that are shown of a process that failed.
const SHOWN: usize = 5;

/// A new process of this command.
fn own_command() -> Result<Command> {
    if let Some(python) = std::env::var_os(PYTHON).filter(|python| !python.is_empty()) {
        let mut command = Command::new(python);
        command.args(["-m", "ironhorse._command"]);
        return Ok(command);
    }
    Ok(Command::new(std::env::current_exe().context("cannot find the executable of this command")?))
}

/// How a process of a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// A new run in a new folder.
    New,
    /// The run begins again, in a folder that has no checkpoint.
    Again,
    /// The run goes on from its newest checkpoint.
    Resume,
}

/// How a wait for a moment of a run ended.
#[derive(Debug)]
pub enum Waited {
    /// The moment came.
    Came,
    /// The process ended before.
    Ended(ExitStatus),
}

/// How many ranks make a part of a run, and the flag that says so.
#[derive(Clone, Copy, Debug)]
pub struct World {
    pub flag: &'static str,
    pub ranks: usize,
}

impl World {
    /// One process that starts no others.
    pub const ALONE: Self = Self { flag: "--ranks", ranks: 1 };
}

/// A training run, made by one process after the other, or by several ranks at a time.
pub struct Run {
    config: PathBuf,
    pub folder: PathBuf,
}

impl Run {
    /// A run with the settings of this configuration file, in this folder, which does not exist yet.
    pub fn new(config: &Path, folder: &Path) -> Self {
        Self { config: config.to_owned(), folder: folder.to_owned() }
    }

    /// The folder of an empty kernel cache for the process of this number.
    pub fn empty_cache(&self, number: u64) -> PathBuf {
        self.folder.with_extension(format!("cache-{number}"))
    }

    /// What its processes print.
    fn printed(&self) -> PathBuf {
        self.folder.with_extension("log")
    }

    /// How the next process of the run must begin.
    pub fn next_start(&self) -> Start {
        match (checkpoints_of(&self.folder).is_empty(), self.folder.exists()) {
            (false, _) => Start::Resume,
            (true, true) => Start::Again,
            (true, false) => Start::New,
        }
    }

    /// Starts a process, which starts the ranks if there are several; `cache` is its kernel cache in place of the user's.
    pub fn start(&self, start: Start, world: World, cache: Option<&Path>) -> Result<Process> {
        let mut command = own_command()?;
        command.arg("train");
        match start {
            Start::Resume => command.arg("--resume").arg(&self.folder),
            Start::New | Start::Again => {
                command.arg("--config").arg(&self.config).arg("--out").arg(&self.folder)
            }
        };
        if start == Start::Again {
            command.arg("--overwrite");
        }
        if world.ranks > 1 {
            command.arg(world.flag).arg(world.ranks.to_string());
        }
        if let Some(cache) = cache {
            command.env(CACHE, cache);
        }
        let printed = self.printed();
        let open = || File::options().create(true).append(true).open(&printed);
        let log = open().and_then(|log| Ok((log.try_clone()?, log)));
        let (out, err) = log.with_context(|| format!("{}: cannot create", printed.display()))?;
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child = child.with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Process { child, ranks: world.ranks })
    }

    /// Starts a process and waits for its end; an error unless it succeeds.
    pub fn complete(&self, start: Start, world: World, cache: Option<&Path>) -> Result<()> {
        self.check(self.start(start, world, cache)?.wait()?)
    }

    /// An error, with the last lines that the process printed, unless it succeeded.
    pub fn check(&self, status: ExitStatus) -> Result<()> {
        if status.success() {
            return Ok(());
        }
        let text = fs::read_to_string(self.printed()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(SHOWN)..].join(" | ");
        bail!("a training process of {} ended with {status}: {last}", self.folder.display())
    }

    /// The last step in its log.
    pub fn logged(&self) -> Option<u64> {
        let mut file = File::open(self.folder.join("metrics.jsonl")).ok()?;
        let length = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        // without what is being written
        let line = text.get(..text.rfind('\n')?)?.lines().next_back()?;
        serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64()
    }

    /// The steps from which it was resumed.
    pub fn resumed_from(&self) -> Result<Vec<u64>> {
        let json = RunJson::read(&self.folder)?;
        Ok(json.map_or_else(Vec::new, |json| json.resumes.iter().map(|start| start.step).collect()))
    }

    /// The hidden names in the folder of its checkpoints: of one that is being written or removed.
    pub fn hidden(&self) -> Vec<OsString> {
        let entries = fs::read_dir(self.folder.join("checkpoints")).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name());
        names.filter(|name| name.as_encoded_bytes().starts_with(b".step-")).collect()
    }
}

/// A process of a run; killed when it is dropped before its end.
pub struct Process {
    child: Child,
    /// How many ranks it starts; 1 if it trains itself.
    ranks: usize,
}

impl Process {
    /// Waits until it ends.
    pub fn wait(mut self) -> Result<ExitStatus> {
        self.child.wait().context("cannot wait for a training process")
    }

    /// Waits for a moment of the run, or for its end.
    pub fn wait_for(&mut self, mut came: impl FnMut() -> bool) -> Result<Waited> {
        loop {
            if came() {
                return Ok(Waited::Came);
            }
            if let Some(status) = self.child.try_wait().context("cannot wait for a training process")? {
                return Ok(Waited::Ended(status));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until this moment, or for its end.
    pub fn wait_until(&mut self, moment: Instant) -> Result<Waited> {
        self.wait_for(|| Instant::now() >= moment)
    }

    /// Kills it, as SIGKILL does: it has no chance to save. Of several ranks one is killed, that of this number or, where there are
    /// fewer, of the rest of a division, and the others end by themselves. `None` if it had not ended before.
    pub fn kill(mut self, rank: u64) -> Result<Option<ExitStatus>> {
        let ended = self.child.try_wait().context("cannot wait for a training process")?;
        if ended.is_some() {
            return Ok(ended);
        }
        if self.ranks > 1 {
            let rank = (rank % self.ranks as u64) as usize;
            return self.kill_rank(rank);
        }
        self.child.kill().context("cannot kill a training process")?;
        let status = self.child.wait().context("cannot wait for a training process")?;
        // it may have ended between the check and the kill
        Ok(status.code().map(|_| status))
    }

    /// Kills one of the ranks as soon as all are started, and waits for the end of the others.
    #[cfg(target_os = "linux")]
    fn kill_rank(mut self, rank: usize) -> Result<Option<ExitStatus>> {
        use rustix::process::{Pid, Signal, kill_process};
        let (world, started) = (self.ranks, format!("/proc/{0}/task/{0}/children", self.child.id()));
        let ranks = || -> Vec<i32> {
            let text = fs::read_to_string(&started).unwrap_or_default();
            text.split_whitespace().filter_map(|id| id.parse().ok()).collect()
        };
        if let Waited::Ended(status) = self.wait_for(|| ranks().len() == world)? {
            return Ok(Some(status));
        }
        if let Some(pid) = ranks().get(rank).copied().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL); // it may just have ended
        }
        let status = self.wait()?;
        Ok(Some(status).filter(|status| status.code() != Some(crate::STOPPED)))
    }

    /// This system does not say which processes one has started.
    #[cfg(not(target_os = "linux"))]
    fn kill_rank(self, _rank: usize) -> Result<Option<ExitStatus>> {
        bail!("one of several ranks can be killed on Linux only; leave --ranks out")
    }

    /// Asks it to stop, as `kill` does. It has not been waited for, so no other process can have its id.
    #[cfg(unix)]
    pub fn terminate(&self) -> Result<()> {
        use rustix::process::{Pid, Signal, kill_process};
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .context("the id of a training process is out of range")?;
        kill_process(pid, Signal::TERM).context("cannot signal a training process")
    }

    /// This system has no such signal.
    #[cfg(not(unix))]
    pub fn terminate(&self) -> Result<()> {
        bail!("this system has no SIGTERM")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // it has ended already, except after an error
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
