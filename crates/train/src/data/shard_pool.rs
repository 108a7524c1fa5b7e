//! Reads many shards with few open files: a process may open about a thousand files, and a data set may have more
//! shards.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::Tokens;
use crate::format::shards::{ShardKind, ShardReader};
use crate::{Error, Result};

/// The largest number of shards of one set that are open at a time.
pub const OPEN_SHARDS: usize = 64;

/// The shards of one set that are open now.
#[derive(Default)]
struct Pool {
    open: Vec<Open>,
    /// Reads so far.
    clock: u64,
}

struct Open {
    /// The shard's number within the set.
    shard: usize,
    reader: ShardReader,
    /// The read that used it last.
    used: u64,
}

/// A shard that is opened again when it is needed.
struct PooledShard {
    number: usize,
    path: PathBuf,
    kind: ShardKind,
    count: usize,
    pool: Arc<Mutex<Pool>>,
}

/// Checks every shard and keeps the first [`OPEN_SHARDS`] open.
pub(super) fn open(paths: &[PathBuf]) -> Result<Vec<Box<dyn Tokens>>> {
    let pool = Arc::new(Mutex::new(Pool::default()));
    let open_one = |(number, path): (usize, &PathBuf)| -> Result<Box<dyn Tokens>> {
        let reader = ShardReader::open(path)?;
        let (kind, count) = (reader.kind(), reader.num_tokens());
        if number < OPEN_SHARDS {
            lock(&pool).open.push(Open { shard: number, reader, used: 0 });
        }
        Ok(Box::new(PooledShard { number, path: path.clone(), kind, count, pool: Arc::clone(&pool) }))
    };
    paths.iter().enumerate().map(open_one).collect()
}

/// A pool is consistent between any two statements, so a panic in another thread does not corrupt it.
fn lock(pool: &Mutex<Pool>) -> std::sync::MutexGuard<'_, Pool> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PooledShard {
    /// Opens the file again. Its header must be the same as at the start.
    fn reopen(&self) -> Result<ShardReader> {
        let reader = ShardReader::open(&self.path)?;
        if (reader.kind(), reader.num_tokens()) == (self.kind, self.count) {
            return Ok(reader);
        }
        let text = |kind: ShardKind, count| format!("{count} tokens of {} bytes", kind.size());
        Err(Error::field(
            &self.path,
            "shard",
            format!("changed since the start: {}", text(reader.kind(), reader.num_tokens())),
            text(self.kind, self.count),
        ))
    }
}

impl Tokens for PooledShard {
    fn len(&self) -> u64 {
        self.count as u64
    }

    /// Allocates only for a shard that is not open, or is read for the first time.
    fn read_at(&mut self, start: u64, out: &mut [u32]) -> Result<()> {
        let mut pool = lock(&self.pool);
        pool.clock += 1;
        let now = pool.clock;
        let place = match pool.open.iter().position(|open| open.shard == self.number) {
            Some(place) => place,
            None => {
                let reader = self.reopen()?;
                let fresh = Open { shard: self.number, reader, used: now };
                // close the least recently used file
                let oldest = (0..pool.open.len()).min_by_key(|&place| pool.open[place].used);
                match oldest.filter(|_| pool.open.len() >= OPEN_SHARDS) {
                    Some(place) => {
                        pool.open[place] = fresh;
                        place
                    }
                    None => {
                        pool.open.push(fresh);
                        pool.open.len() - 1
                    }
                }
            }
        };
        let open = &mut pool.open[place];
        open.used = now;
        // A start outside the address space is outside the shard too, which the reader reports.
        open.reader.read_at(usize::try_from(start).unwrap_or(usize::MAX), out)
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::data::{Loader, LoaderConfig, open_shards};

    /// Tells the child process which folder to read, and the number of shards.
    const CHILD_FOLDER: &str = "IRONHORSE_SHARDS_FOLDER";

    /// A shard of three tokens that tell its number.
    fn shard(number: u16) -> Vec<u8> {
        let mut bytes: Vec<u8> = [20240520_i32, 1, 3].iter().flat_map(|field| field.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        bytes.extend([number; 3].iter().flat_map(|token| token.to_le_bytes()));
        bytes
    }

    fn write(folder: &Path, count: u16) {
        for number in 0..count {
            std::fs::write(folder.join(format!("s_{number:05}.bin")), shard(number)).unwrap();
        }
    }

    /// Reads every shard of a folder; does nothing when it is run as a test.
    #[test]
    fn child_that_reads() {
        let Some(folder) = std::env::var_os(CHILD_FOLDER) else { return };
        let pattern = Path::new(&folder).join("*.bin");
        let sources = open_shards(&[pattern]).unwrap();
        let count = sources.len();
        let config = LoaderConfig { batch: 1, seq: 1, vocab: 1 << 16, seed: 1, shuffle: true };
        let mut loader = Loader::new(sources, config).unwrap();
        let (mut x, mut y, mut seen) = ([0], [0], vec![0; count]);
        for _ in 0..2 * count {
            loader.next_batch(&mut x, &mut y).unwrap();
            seen[x[0] as usize] += 1;
        }
        // three tokens are one or two windows of one token each
        assert!(seen.iter().all(|&times| times >= 1), "every shard is read");
    }

    #[cfg(unix)]
    #[test]
    fn three_thousand_shards_need_few_open_files() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), 3000);
        let this = std::env::current_exe().unwrap();
        let run = |limit: &str| {
            let mut child = Command::new("sh");
            child.args(["-c", "ulimit -n \"$1\" && shift && exec \"$@\"", "sh", limit]).arg(&this);
            child.args(["--exact", "data::shard_pool::tests::child_that_reads", "--test-threads=1"]);
            child.env(CHILD_FOLDER, folder.path()).output().unwrap()
        };
        let output = run("128");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        // the limit is effective: with fewer files than the pool keeps open, reading fails
        assert!(!run("40").status.success());
    }

    #[test]
    fn a_shard_that_changed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), OPEN_SHARDS as u16 + 2);
        let mut sources = open_shards(&[folder.path().join("*.bin")]).unwrap();
        let mut out = [0];
        for (number, source) in sources.iter_mut().enumerate() {
            source.read_at(1, &mut out).unwrap();
            assert_eq!(out[0] as usize, number);
        }
        // 0 and 1 were closed for the last two
        let mut longer = shard(0);
        longer.splice(8..12, 4_i32.to_le_bytes());
        longer.extend([0, 0]);
        std::fs::write(folder.path().join("s_00000.bin"), &longer).unwrap();
        std::fs::remove_file(folder.path().join("s_00001.bin")).unwrap();
        let text = sources[0].read_at(1, &mut out).unwrap_err().to_string();
        let want = "s_00000.bin: shard is changed since the start: 4 tokens of 2 bytes, expected 3 tokens of 2 bytes";
        assert!(text.ends_with(want), "{text}");
        let text = sources[1].read_at(1, &mut out).unwrap_err().to_string();
        assert!(text.contains("s_00001.bin: cannot open"), "{text}");
        sources[2].read_at(1, &mut out).unwrap();
        assert_eq!(out[0], 2);
        assert!(sources[2].read_at(u64::MAX, &mut out).is_err());
    }
}
