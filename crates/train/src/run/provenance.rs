//! `run.json`: what a run is made of and where it ran, every resume included; `algorithms.json`: the libraries' algorithms
//! it computes with, so that an emptied cache changes no bits.

use crate::data::survey::{SourceFacts, hex};
use crate::format::{Source, atomic};
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;

/// The name of the file.
pub const RUN_JSON: &str = "run.json";
/// The file of chosen algorithms.
pub const ALGORITHMS: &str = "algorithms.json";
const FORMAT: &str = "ironhorse-run";

/// One start of a run: the first, or a resume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Started {
    /// When, in seconds since 1970.
    pub unix_s: u64,
    /// The same as a date and time, UTC.
    pub time: String,
    /// The command line.
    pub command: Vec<String>,
    /// The folder it was given in.
    pub folder: String,
    /// The version of ironhorse.
    pub version: String,
    /// The commit it was built from.
    pub commit: String,
    /// The machine's name.
    pub host: String,
    /// The engine: "cpu", "cuda:0".
    pub device: String,
    /// The device, its driver and the libraries in use, by name.
    pub hardware: Value,
    /// The step it starts at.
    pub step: u64,
    /// Settings that differ from those before, as `key: before → now`.
    #[serde(default)]
    pub changes: Vec<String>,
    /// What its steps ask of the device; runs of earlier versions do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
}

/// What the steps of a run ask of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Parameters of the model.
    pub parameters: u64,
    /// Bytes of the planned memory.
    pub planned_bytes: u64,
    /// Operations that the model asks for, forward and backward, for each token of a full batch.
    pub flops_per_token: Option<f64>,
    /// Operations per second by the device's datasheet, in the element type of the weights; unknown of CPUs.
    pub datasheet_flops: Option<f64>,
}

/// Weights that a run started from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InitFacts {
    /// The file or folder.
    pub path: String,
    /// SHA-256 over its files of weights, in the order of their names.
    pub sha256: String,
}

impl InitFacts {
    /// Reads the weights once. Of a folder the safetensors files count.
    pub fn of(path: &Path) -> Result<Self> {
        let mut files = match std::fs::read_dir(path) {
            Ok(entries) => entries
                .flatten()
                .map(|entry| entry.path())
                .filter(|file| file.extension().is_some_and(|extension| extension == "safetensors"))
                .collect(),
            Err(_) => vec![path.to_owned()],
        };
        files.sort();
        let mut hash = Sha256::new();
        for file in files {
            let mut source = Source::open(&file)?;
            let len = source.len();
            source.for_each_chunk(0, len, |chunk| {
                hash.update(chunk);
                Ok(())
            })?;
        }
        let sha256 = hex(&hash.finalize());
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Ok(Self { path: path.to_string_lossy().into_owned(), sha256 })
    }
}

/// What `run.json` says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunJson {
    format: String,
    /// The first start.
    pub started: Started,
    /// Every resume since.
    #[serde(default)]
    pub resumes: Vec<Started>,
    /// The weights it started from; `None` at random.
    #[serde(default)]
    pub init: Option<InitFacts>,
    /// The training data.
    pub data: Vec<SourceFacts>,
    /// The validation data.
    #[serde(default)]
    pub val_data: Vec<SourceFacts>,
}

impl RunJson {
    /// The facts of a new run.
    pub fn new(started: Started) -> Self {
        Self { format: FORMAT.to_owned(), started, ..Self::default() }
    }

    /// Reads that of a run; `None` if it has none.
    pub fn read(run: &Path) -> Result<Option<Self>> {
        read_json(&run.join(RUN_JSON), "the JSON of a run")
    }

    /// Writes that of a run.
    pub fn write(&self, run: &Path) -> Result<()> {
        write_json(&run.join(RUN_JSON), self)
    }

    /// The newest start.
    pub fn last_start(&self) -> &Started {
        self.resumes.last().unwrap_or(&self.started)
    }

    /// The engine of the last start.
    pub fn device(&self) -> &str {
        &self.last_start().device
    }
}

/// Reads the algorithms that a run computes with; none if it has none.
pub fn read_algorithms(run: &Path) -> Result<Vec<(String, String)>> {
    Ok(read_json(&run.join(ALGORITHMS), "a list of names and algorithms")?.unwrap_or_default())
}

/// Keeps the algorithms that a run computes with.
pub(super) fn write_algorithms(run: &Path, choices: &[(String, String)]) -> Result<()> {
    write_json(&run.join(ALGORITHMS), &choices)
}

/// The contents of a file; `None` if there is no such file.
fn read_json<T: DeserializeOwned>(path: &Path, expected: &str) -> Result<Option<T>> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|source| Error::io(path, "read", source))?,
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| Error::field(path, "content", format!("not valid ({error})"), expected))
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::field(path, "content", format!("not JSON ({error})"), "JSON"))?;
    text.push('\n');
    atomic::write_file(path, |sink| sink.put(text.as_bytes()))
}

/// The name of this machine, as far as it is known.
pub fn host() -> String {
    let said = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let said = said.or_else(|| std::env::var("HOSTNAME").ok()).or_else(|| std::env::var("COMPUTERNAME").ok());
    said.map_or_else(|| "an unknown host".into(), |name| name.trim().to_owned())
}

/// Seconds since 1970 as a date and time, UTC: `2026-11-15 23:59:59`.
pub fn utc(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    // years counted from March, so that the odd day is the last: 400 of them have 146,097 days
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = (if month < 10 { month + 3 } else { month - 9 }, year + era * 400);
    let year = year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{of_month:02} {hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_164_800, "2024-02-29 00:00:00"),
            (1_794_787_199, "2026-11-15 23:59:59"),
            (4_102_444_800, "2100-01-01 00:00:00"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn a_run_says_what_it_is_and_every_resume() {
        let top = tempfile::tempdir().unwrap();
        assert_eq!(RunJson::read(top.path()).unwrap(), None);
        let mut run = RunJson::new(Started { device: "cpu".into(), ..Started::default() });
        run.write(top.path()).unwrap();
        run.resumes.push(Started { device: "cuda:0".into(), step: 5, ..Started::default() });
        run.write(top.path()).unwrap();
        let read = RunJson::read(top.path()).unwrap().unwrap();
        assert_eq!((&read, read.device()), (&run, "cuda:0"));
        std::fs::write(top.path().join(RUN_JSON), "{").unwrap();
        assert!(
            RunJson::read(top.path()).unwrap_err().to_string().contains("run.json: content is not valid")
        );
        let choices = vec![("gemm a".to_owned(), "text".to_owned())];
        assert!(read_algorithms(top.path()).unwrap().is_empty());
        write_algorithms(top.path(), &choices).unwrap();
        assert_eq!(read_algorithms(top.path()).unwrap(), choices);
    }
}
