//! Checks the data before the first step: every shard is read once, hashed, and its tokens checked.
//!
//! A cache remembers the result by path, length, time of change and inode, so that the next start is immediate.

mod cache;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use serde::{Deserialize, Serialize, Serializer};
use sha2::{Digest, Sha256};

use self::cache::{Cache, Stamp};
use crate::format::Source;
use crate::format::shards::{ShardKind, ShardReader, check_tokens, position_name};
use crate::{Error, Result};

/// Bytes read at a time by each thread; a multiple of both token sizes.
const PIECE: usize = 8 << 20;

/// The contents of one source of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFacts {
    /// The absolute path of the file; a name for built-in data.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// The number of tokens.
    pub tokens: u64,
    /// The length of the file.
    pub bytes: u64,
    /// The largest token.
    pub max_token: u32,
    /// SHA-256 of the file's bytes in hexadecimal, as `sha256sum` prints it.
    pub sha256: String,
}

/// Serialises a path lossily, so that a report can be written even if the path is not UTF-8.
fn lossy<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// Reads every shard once, on all cores; a token that is not below `vocab` is an error. Unchanged files that are in
/// `cache` (a JSON file) are not read. If the cache cannot be read or written, that is no error and only takes more
/// time.
///
/// `progress` is called with the number of bytes read and the total, and may stop the survey, which then returns
/// [`Error::Stopped`]. It is not called if all files are in the cache.
pub fn survey(
    paths: &[PathBuf],
    vocab: usize,
    cache: Option<&Path>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<SourceFacts>> {
    let mut cache = Cache::read(cache);
    let mut known: Vec<Option<SourceFacts>> = Vec::with_capacity(paths.len());
    let mut tasks = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        let absolute = std::path::absolute(path).map_err(|source| Error::io(path, "find", source))?;
        let meta = std::fs::metadata(&absolute).map_err(|source| Error::io(path, "open", source))?;
        // if a token is too large the file is read again, because the cache does not contain the position
        let facts = cache.get(&absolute, Stamp::of(&meta)).filter(|facts| (facts.max_token as usize) < vocab);
        if facts.is_none() {
            tasks.push(Task { index, path, absolute, bytes: meta.len() });
        }
        known.push(facts);
    }
    let mut first_error = None;
    let (outcomes, flow) = read_all(&tasks, vocab, progress);
    for (index, result) in outcomes {
        match result {
            Ok((facts, stamp)) => {
                cache.put(&facts, stamp);
                known[index] = Some(facts);
            }
            // in the order of the paths
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    cache.write();
    match first_error {
        _ if flow.is_break() => Err(Error::Stopped),
        Some(error) => Err(error),
        None => Ok(known.into_iter().flatten().collect()),
    }
}

/// A shard to read.
struct Task<'a> {
    index: usize,
    /// The name in messages.
    path: &'a Path,
    absolute: PathBuf,
    bytes: u64,
}

/// The result for a shard.
type Outcome = Result<(SourceFacts, Stamp)>;

/// A message from a reading thread.
enum News {
    Read(u64),
    Done(usize, Box<Outcome>),
}

/// Reads the shards on all cores, by index. After an error, later shards are skipped and earlier ones finished, so that
/// the error is always that of the first bad shard.
fn read_all(
    tasks: &[Task],
    vocab: usize,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> (BTreeMap<usize, Outcome>, ControlFlow<()>) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let all = tasks.iter().map(|task| task.bytes).sum();
    let (next, first_bad) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let (sender, receiver) = channel();
    let work = |sender: Sender<News>| {
        let mut piece = Vec::new();
        while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let wanted = || task.index < first_bad.load(Ordering::Relaxed);
            let mut report = |bytes| {
                // the receiver is dropped early only if `progress` panics
                let _ = sender.send(News::Read(bytes));
                wanted()
            };
            let Some(outcome) = read(task, vocab, &mut piece, &mut report).transpose() else { continue };
            if outcome.is_err() {
                first_bad.fetch_min(task.index, Ordering::Relaxed);
            }
            let _ = sender.send(News::Done(task.index, Box::new(outcome)));
        }
    };
    let (mut outcomes, mut flow) = (BTreeMap::new(), ControlFlow::Continue(()));
    std::thread::scope(|scope| {
        let work = &work;
        let mut threads = 0;
        for _ in 0..cores.min(tasks.len()) {
            let sender = sender.clone();
            let started = std::thread::Builder::new().spawn_scoped(scope, move || work(sender));
            threads += usize::from(started.is_ok());
        }
        if threads == 0 {
            // if no thread can be started, this one does the work and reports afterwards
            work(sender.clone());
        }
        drop(sender);
        let mut done = 0;
        for news in receiver {
            match news {
                News::Read(bytes) => {
                    done += bytes;
                    if flow.is_continue() {
                        flow = progress(done, all);
                    }
                    if flow.is_break() {
                        first_bad.store(0, Ordering::Relaxed); // no more shards are needed
                    }
                }
                News::Done(index, outcome) => drop(outcomes.insert(index, *outcome)),
            }
        }
    });
    (outcomes, flow)
}

/// Reads one shard. `report` is called with the bytes of every piece and returns whether the result is still needed; if
/// not, the result is `None`.
fn read(
    task: &Task,
    vocab: usize,
    piece: &mut Vec<u8>,
    report: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<(SourceFacts, Stamp)>> {
    let path = task.path;
    let cannot_read = |source| Error::io(path, "read", source);
    let file = File::open(&task.absolute).map_err(|source| Error::io(path, "open", source))?;
    let meta = file.metadata().map_err(cannot_read)?;
    if meta.is_dir() {
        return Err(Error::field(path, "path", "a folder", "a file"));
    }
    let stamp = Stamp::of(&meta);
    let shard = ShardReader::new(Source::new(&file, path)?)?;
    let (kind, tokens) = (shard.kind(), shard.num_tokens() as u64);
    // the reader has checked that the file has this length
    let (bytes, header) = (meta.len(), meta.len() - tokens * kind.size() as u64);
    let mut from = &file;
    from.seek(SeekFrom::Start(0)).map_err(cannot_read)?;
    let (mut hash, mut max_token, mut at) = (Sha256::new(), 0, 0);
    while at < bytes {
        piece.resize(PIECE.min(usize::try_from(bytes - at).unwrap_or(PIECE)), 0);
        from.read_exact(piece).map_err(cannot_read)?;
        hash.update(&piece[..]);
        // the header is shorter than a piece, so only the first piece contains part of it
        let skip = header.saturating_sub(at).min(piece.len() as u64);
        let first = (at + skip - header) / kind.size() as u64;
        max_token = max_token.max(check_piece(path, kind, first, &piece[skip as usize..], vocab)?);
        at += piece.len() as u64;
        if !report(piece.len() as u64) {
            return Ok(None);
        }
    }
    let after = file.metadata().map_err(cannot_read)?;
    if Stamp::of(&after) != stamp {
        return Err(Error::field(path, "file", "changed while it was read", "data that stays as it is"));
    }
    let sha256 = hex(&hash.finalize());
    Ok(Some((SourceFacts { path: task.absolute.clone(), tokens, bytes, max_token, sha256 }, stamp)))
}

/// The largest of these tokens; `first` is the position of the first. An error if one is outside the vocabulary.
fn check_piece(path: &Path, kind: ShardKind, first: u64, bytes: &[u8], vocab: usize) -> Result<u32> {
    match kind {
        ShardKind::U16 => {
            let tokens = bytes.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word).into());
            largest(path, first, tokens, vocab)
        }
        ShardKind::U32 => {
            let tokens = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
            largest(path, first, tokens, vocab)
        }
    }
}

fn largest(path: &Path, first: u64, tokens: impl Iterator<Item = u32> + Clone, vocab: usize) -> Result<u32> {
    // finding the maximum is fast; its position is searched only if it is too large
    let largest = tokens.clone().max().unwrap_or(0);
    let bad = (largest as usize >= vocab)
        .then(|| tokens.enumerate().find(|&(_, token)| token as usize >= vocab))
        .flatten();
    let checked = match bad {
        Some((index, token)) => check_tokens(path, &[token], vocab, |_| position_name(first + index as u64)),
        None => Ok(()),
    };
    checked.map(|()| largest)
}

/// The contents of a source in memory whose tokens are bytes: the built-in stories.
pub fn facts_of_memory(name: &str, bytes: &[u8]) -> SourceFacts {
    // a plain loop: runs of the tests, which are not optimised, begin here
    let (mut max_token, mut i) = (0, 0);
    while i < bytes.len() {
        max_token = if bytes[i] > max_token { bytes[i] } else { max_token };
        i += 1;
    }
    SourceFacts {
        path: name.into(),
        tokens: bytes.len() as u64,
        bytes: bytes.len() as u64,
        max_token: max_token.into(),
        sha256: hex(&Sha256::digest(bytes)),
    }
}

/// SHA-256, in hexadecimal, over the hashes and lengths of the sources in their order. Paths and names of the files do
/// not affect it.
pub fn fingerprint(facts: &[SourceFacts]) -> String {
    let mut hash = Sha256::new();
    for facts in facts {
        hash.update(facts.sha256.as_bytes());
        hash.update(facts.tokens.to_le_bytes());
    }
    hex(&hash.finalize())
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // writing to a string does not fail
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests;
