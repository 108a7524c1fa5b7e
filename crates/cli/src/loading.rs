//! Weights from files into a session: with a bar where there is much to read, and how fast it was.

use crate::hardware::human_bytes;
use crate::{out, progress};
use indicatif::ProgressBar;
use ironhorse::core::Pool;
use ironhorse::train::format::WeightSource;
use ironhorse::train::model::BaseDigest;
use ironhorse::train::session::Session;
use ironhorse::train::{Error, Result};
use std::path::Path;
use std::time::{Duration, Instant};

/// Less than this is read before anybody wonders.
const MUCH: u64 = 256 << 20;
const BAR: &str = "reading the weights {bar:30.cyan/dim} {bytes}/{total_bytes}  {bytes_per_sec}  ETA {eta}";

/// Loads the weights of `source`, one tensor at a time; with adapters they are the frozen base.
pub fn load_base(session: &mut Session, source: &mut dyn WeightSource) -> Result<BaseDigest> {
    let path = source.path().to_owned();
    let mut loading = Loading::new(source);
    let digest = session.load_base(&path, |name, values| loading.read(source, name, values))?;
    loading.finish();
    Ok(digest)
}

/// Loads the weights of `source` that are to be used as they are, unless `stop` says so before the end.
pub fn load(session: &mut Session, source: &mut dyn WeightSource, stop: impl Fn() -> bool) -> Result<()> {
    let mut loading = Loading::new(source);
    session.load(Pool::Params, |name, values| match stop() {
        true => Err(Error::Stopped),
        false => loading.read(source, name, values),
    })?;
    loading.finish();
    Ok(())
}

/// How far the loading of weights has come.
struct Loading {
    /// Bytes of the files.
    bytes: u64,
    /// The numbers of all weights, and of those that were read.
    values: [u64; 2],
    bar: Option<ProgressBar>,
    started: Instant,
}

impl Loading {
    fn new(source: &dyn WeightSource) -> Self {
        let bytes = stored_bytes(source.path());
        let all = source.config().told_params() as u64;
        let bar = (bytes >= MUCH).then(|| progress::bar(Some(bytes), BAR));
        Self { bytes, values: [all.max(1), 0], bar, started: Instant::now() }
    }

    fn read(&mut self, source: &mut dyn WeightSource, name: &str, values: &mut [f32]) -> Result<()> {
        source.read_tensor(name, values)?;
        let [all, read] = &mut self.values;
        *read += values.len() as u64;
        if let Some(bar) = &self.bar {
            bar.set_position((self.bytes as f64 * (*read as f64 / *all as f64).min(1.0)) as u64);
        }
        Ok(())
    }

    fn finish(self) {
        let Some(bar) = self.bar else { return };
        bar.finish_and_clear();
        out::note(told(self.bytes, self.started.elapsed()));
    }
}

/// What was read and how fast, in words.
fn told(bytes: u64, time: Duration) -> String {
    let seconds = time.as_secs_f64().max(1e-9);
    let rate = bytes as f64 / seconds / 1e9;
    format!("read {} of weights in {seconds:.1} s ({rate:.2} GB/s)", human_bytes(bytes))
}

/// The size of a file, or of the weights in a folder.
fn stored_bytes(path: &Path) -> u64 {
    let length = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
    if !path.is_dir() {
        return length(path);
    }
    let files = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let weights =
        files.filter(|file| file.extension().is_some_and(|end| end == "safetensors" || end == "bin"));
    weights.map(|file| length(&file)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_files() {
        assert_eq!(told(3 << 30, Duration::from_secs(2)), "read 3.0 GiB of weights in 2.0 s (1.61 GB/s)");
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in [("model-1.safetensors", 5), ("model-2.safetensors", 7), ("config.json", 100)] {
            std::fs::write(folder.path().join(name), vec![0; bytes]).unwrap();
        }
        assert_eq!(stored_bytes(folder.path()), 12);
        assert_eq!(stored_bytes(&folder.path().join("config.json")), 100);
        assert_eq!(stored_bytes(&folder.path().join("none")), 0);
    }
}
