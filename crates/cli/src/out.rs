//! Standard output and error that do not panic when the reader goes away, and reports as JSON.
//!
//! A report goes to standard output with `--json -`; what is written for people then goes to standard error.

use anyhow::{Context, Result};
use ironhorse::core::NOTICE;
use ironhorse::train::Error;
use ironhorse::train::format::atomic::{self, AtomicFile};
use serde::Serialize;
use std::cell::RefCell;
use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The name of the output in errors.
const STDOUT: &str = "standard output";
/// The file name that means standard output.
const DASH: &str = "-";

/// Set while standard output belongs to the JSON report.
static JSON_ON_STDOUT: AtomicBool = AtomicBool::new(false);

/// The log of a rank: lines until it has a file, and whether anything is printed.
struct RankLog {
    /// The rank, if it prints nothing.
    quiet: Option<usize>,
    waiting: Vec<String>,
    file: Option<std::fs::File>,
}

static RANK: Mutex<Option<RankLog>> = Mutex::new(None);

fn rank_log() -> MutexGuard<'static, Option<RankLog>> {
    RANK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on this process is a rank: notes go to its log, too, and nowhere else unless it leads.
pub fn begin_rank(rank: usize) {
    let quiet = (rank > 0).then_some(rank);
    *rank_log() = Some(RankLog { quiet, waiting: Vec::new(), file: None });
}

/// The file that the notes of this rank go to.
pub fn rank_log_file(path: &Path) -> io::Result<()> {
    let mut log = rank_log();
    let Some(log) = log.as_mut() else { return Ok(()) };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut file = std::fs::File::options().create(true).append(true).open(path)?;
    for line in log.waiting.drain(..) {
        writeln!(file, "{line}")?;
    }
    log.file = Some(file);
    Ok(())
}

/// Keeps a note in the log of this rank. Gives whether it is to be printed, too.
fn log_note(text: &str) -> bool {
    let mut log = rank_log();
    let Some(log) = log.as_mut() else { return true };
    let line = format!("{:.3} {text}", running().as_secs_f64());
    match &mut log.file {
        Some(file) => drop(writeln!(file, "{line}")), // a full disk must not end a run
        None => log.waiting.push(line),
    }
    log.quiet.is_none()
}

/// Which rank this is, if it is one that prints nothing.
pub fn quiet_rank() -> Option<usize> {
    rank_log().as_ref().and_then(|log| log.quiet)
}

/// Prints a line for people. A reader who stopped reading (`ironhorse ... | head`) is not an error: the command still
/// has a result.
pub fn line(text: impl Display) -> Result<()> {
    match piece(format!("{text}\n").as_bytes()) {
        Err(error) if !is_closed_pipe(&error) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Whether what is printed for people may have colours: on a terminal, unless `NO_COLOR` is set.
pub fn colours() -> bool {
    let terminal = !JSON_ON_STDOUT.load(Ordering::Relaxed) && io::stdout().is_terminal();
    terminal && std::env::var_os("NO_COLOR").is_none()
}

/// Prints without a line end and flushes.
pub fn piece(text: &[u8]) -> Result<(), Error> {
    if quiet_rank().is_some() {
        return Ok(());
    }
    if JSON_ON_STDOUT.load(Ordering::Relaxed) {
        let _ = io::stderr().lock().write_all(text); // a closed standard error must not end a run
        return Ok(());
    }
    to_stdout(text)
}

fn to_stdout(text: &[u8]) -> Result<(), Error> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text).and_then(|()| stdout.flush()).map_err(cannot_print)
}

fn cannot_print(error: io::Error) -> Error {
    Error::io(Path::new(STDOUT), "write", error)
}

/// Prints a line to standard error, or tells it to [`notes_to`]. A closed standard error must not end a run.
pub fn note(text: impl Display) {
    if log_note(&text.to_string()) {
        say(text);
    }
}

/// [`note`] of a rank that has to be heard: that of an error.
pub fn note_of_rank(rank: usize, text: impl Display) {
    log_note(&text.to_string());
    say(format_args!("rank {rank}: {text}"));
}

fn say(text: impl Display) {
    match NOTES.with_borrow(Clone::clone) {
        Some(tell) => tell(&text.to_string()),
        None => {
            let _ = writeln!(io::stderr().lock(), "{text}");
        }
    }
}

/// Who is told notes.
type Tell = Rc<dyn Fn(&str)>;

thread_local! {
    /// Who is told them instead of standard error.
    static NOTES: RefCell<Option<Tell>> = const { RefCell::new(None) };
}

/// While `work` runs, notes of this thread are told to `tell`: another language shows them where its users look.
pub fn notes_to<T>(tell: Tell, work: impl FnOnce() -> T) -> T {
    /// Restores what was there before, also after a panic.
    struct Restore(Option<Tell>);
    impl Drop for Restore {
        fn drop(&mut self) {
            NOTES.set(self.0.take());
        }
    }
    let _restore = Restore(NOTES.replace(Some(tell)));
    work()
}

/// Shows on standard error what the engines log: warnings always, and what lets a command wait; choices with `-v`, every step with
/// `-vv`.
pub fn log_level(verbose: u8) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::prelude::*;
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        _ => LevelFilter::DEBUG,
    };
    VERBOSE.store(verbose > 0, Ordering::Relaxed);
    // a second subscriber is refused, which only a test could try
    let _ = tracing_subscriber::fmt()
        .with_max_level(level.max(LevelFilter::INFO))
        .with_writer(io::stderr)
        .with_target(false)
        .without_time()
        .finish()
        .with(Targets::new().with_default(level).with_target(NOTICE, LevelFilter::INFO))
        .try_init();
}

/// To be called at the start of a command: the Python package runs several in one process.
pub fn begin() {
    running(); // starts the clock
    JSON_ON_STDOUT.store(false, Ordering::Relaxed);
    *rank_log() = None;
}

/// How long the process has been running commands.
pub fn running() -> Duration {
    STARTED.get_or_init(Instant::now).elapsed()
}

static STARTED: OnceLock<Instant> = OnceLock::new();

/// Set by `-v`.
static VERBOSE: AtomicBool = AtomicBool::new(false);

/// Whether `-v` was given.
pub fn is_verbose() -> bool {
    VERBOSE.load(Ordering::Relaxed)
}

/// Whether the error is only that the reader of standard output went away. Any other broken pipe is an error.
pub fn is_closed_pipe(error: &Error) -> bool {
    matches!(error, Error::Io { path, source, .. }
        if path == Path::new(STDOUT) && source.kind() == ErrorKind::BrokenPipe)
}

/// Finds out before the work whether the report can be written after it. With `-` standard output is reserved for it.
pub fn check_json(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    if path == Path::new(DASH) {
        JSON_ON_STDOUT.store(true, Ordering::Relaxed);
        return Ok(());
    }
    check_file(Some(path))
}

/// Finds out before the work whether a file can be written after it.
pub fn check_file(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    // opening a device or a pipe can have an effect
    let special = path.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir());
    if !special {
        AtomicFile::create(path)?;
    }
    Ok(())
}

/// The same for a command that creates `folder` before it writes the report: the report may be inside it.
pub fn check_json_in(path: Option<&Path>, folder: Option<&Path>) -> Result<()> {
    let absolute = |path: &Path| std::path::absolute(path).ok();
    let inside = match (path.and_then(absolute), folder.and_then(absolute)) {
        (Some(path), Some(folder)) => path.parent() == Some(&folder) && !folder.exists(),
        _ => false,
    };
    if inside { Ok(()) } else { check_json(path) }
}

/// Writes a path into a report, for `#[serde(serialize_with = ...)]`. Bytes that are not UTF-8 are replaced.
pub fn lossy_path<P: AsRef<Path> + ?Sized, S: serde::Serializer>(path: &P, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.as_ref().to_string_lossy())
}

/// Writes a report as JSON, if it was asked for: to the file, or to standard output for `-`.
pub fn json(path: Option<&Path>, value: &impl Serialize) -> Result<()> {
    let Some(path) = path.filter(|_| quiet_rank().is_none()) else { return Ok(()) };
    let mut text = serde_json::to_string_pretty(value).context("the report cannot be written as JSON")?;
    text.push('\n');
    if path == Path::new(DASH) {
        return Ok(to_stdout(text.as_bytes())?);
    }
    Ok(atomic::write_file(path, |sink| sink.put(text.as_bytes()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_standard_output_may_close() {
        let broken = || io::Error::from(ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(&cannot_print(broken())));
        assert!(!is_closed_pipe(&cannot_print(ErrorKind::StorageFull.into())));
        assert!(!is_closed_pipe(&Error::io(Path::new("fifo"), "write", broken())));
    }

    #[test]
    fn notes_of_this_thread_are_told() {
        let told = Rc::new(RefCell::new(Vec::new()));
        let (all, inner) = (told.clone(), told.clone());
        let add = move |text: &str| told.borrow_mut().push(text.to_owned());
        notes_to(Rc::new(add), || {
            note("a");
            let nested = move |text: &str| inner.borrow_mut().push(format!("inner {text}"));
            notes_to(Rc::new(nested), || note("b"));
            note("c");
        });
        assert!(NOTES.with_borrow(Option::is_none));
        assert_eq!(*all.borrow(), ["a", "inner b", "c"]);
    }

    #[test]
    fn json_may_lie_in_a_folder_that_will_be_made() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let check = |json: &str, folder: Option<&str>| {
            check_json_in(Some(&at(json)), folder.map(at).as_deref()).map_err(|error| error.to_string())
        };
        assert_eq!(check("runs/x/summary.json", Some("runs/x")), Ok(()));
        assert_eq!(check("runs/./x/summary.json", Some("runs/x/")), Ok(()));
        assert_eq!(check("summary.json", Some("runs/x")), Ok(()));
        assert_eq!(check_json_in(None, Some(&at("runs/x"))).map_err(|error| error.to_string()), Ok(()));
        // folders that no command creates
        for (json, folder) in [
            ("runs/x/summary.json", None),
            ("runs/x/summary.json", Some("runs/y")),
            ("runs/summary.json", Some("runs/x")),
            ("runs/x/more/summary.json", Some("runs/x")),
        ] {
            let text = check(json, folder).unwrap_err();
            assert!(text.contains("summary.json: cannot create"), "{text}");
        }
        // a folder that is there is tried
        std::fs::create_dir_all(at("there/summary.json")).unwrap();
        assert!(check("there/summary.json", Some("there")).unwrap_err().contains("is a folder"));
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1, "nothing is made");
    }
}
