//! A separate folder for each test, in which the binary runs.

use ironhorse::train::format::checkpoint::checkpoints_of;
use ironhorse::train::format::shards::{ShardKind, ShardWriter};
use ironhorse::train::run::metrics::{Metrics, read_metrics};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// A training run of a few milliseconds.
pub const TINY: &str = "--model n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32 \
                        --batch 2 --seq 16 --steps 6 --val-every 3 --sample-tokens 20";

/// What a command did.
pub struct Done {
    pub code: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Done {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!stderr.contains("panicked"), "{stderr}");
        Self { code: output.status.code(), stdout: output.stdout, stderr }
    }
}

/// The binary, on the CPU wherever the tests run.
pub fn ironhorse() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ironhorse"));
    command.env("CUDA_VISIBLE_DEVICES", "");
    command
}

/// A working folder, removed at the end.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// A place with a finished run of [`TINY`] in `run`, trained once for all tests that need one.
    pub fn with_run() -> Self {
        static RUN: OnceLock<Place> = OnceLock::new();
        let trained = RUN.get_or_init(|| {
            let place = Self::new();
            place.does(&format!("train {TINY} --out run"));
            place
        });
        let place = Self::new();
        copy_folder(&trained.path("run"), &place.path("run"));
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A command, its arguments separated by spaces.
    pub fn command(&self, line: &str) -> Command {
        let mut command = ironhorse();
        command.args(line.split_whitespace()).current_dir(self.0.path());
        command
    }

    /// Runs a command.
    pub fn runs(&self, line: &str) -> Done {
        self.command(line).output().unwrap().into()
    }

    /// Runs a command that must succeed.
    pub fn does(&self, line: &str) -> Done {
        let done = self.runs(line);
        assert_eq!(done.code, Some(0), "{line}: {}", done.stderr);
        done
    }

    /// Runs a command that must fail: exit code 2, one line that contains all `texts`, no file changed.
    pub fn refuses(&self, line: &str, texts: &[&str]) {
        self.refuses_command(self.command(line), texts);
    }

    /// The same for arguments that contain spaces.
    pub fn refuses_command(&self, mut command: Command, texts: &[&str]) {
        let before = self.files();
        let done: Done = command.output().unwrap().into();
        let about = format!("{:?}: {}", command.get_args().collect::<Vec<_>>(), done.stderr);
        assert_eq!(done.code, Some(2), "{about}");
        assert_eq!(done.stderr.lines().count(), 1, "{about}");
        assert!(done.stderr.starts_with("error: "), "{about}");
        assert!(done.stdout.is_empty(), "{about}");
        for text in texts {
            assert!(done.stderr.contains(text), "{about} should say {text:?}");
        }
        assert_eq!(self.files(), before, "{about}");
    }

    /// Every file with its contents, every folder with empty contents.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.0.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let content = if path.is_dir() { Vec::new() } else { std::fs::read(&path).unwrap() };
                if path.is_dir() {
                    folders.push(path.clone());
                }
                files.insert(path, content);
            }
        }
        files
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap()
    }

    pub fn metrics(&self, run: &str) -> Vec<Metrics> {
        read_metrics(&self.path(run).join("metrics.jsonl")).unwrap()
    }

    /// The loss of every step, to the bit.
    pub fn losses(&self, run: &str) -> Vec<u32> {
        self.metrics(run).iter().map(|metrics| metrics.loss.to_bits()).collect()
    }

    pub fn weights(&self, run: &str) -> Vec<u8> {
        self.read(&format!("{}/model.safetensors", self.last(run)))
    }

    /// The newest checkpoint of a run.
    pub fn last(&self, run: &str) -> String {
        let all = checkpoints_of(&self.path(run));
        let (_, newest) = all.first().unwrap_or_else(|| panic!("{run} has no checkpoint"));
        format!("{run}/checkpoints/{}", newest.file_name().unwrap().to_str().unwrap())
    }

    pub fn shard(&self, name: &str, tokens: &[u32]) {
        let mut writer = ShardWriter::create(&self.path(name), ShardKind::U16).unwrap();
        writer.push(tokens).unwrap();
        writer.finish().unwrap();
    }
}

pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let from = entry.unwrap().path();
        let to = to.join(from.file_name().unwrap());
        if from.is_dir() {
            copy_folder(&from, &to);
        } else {
            std::fs::copy(&from, &to).unwrap();
        }
    }
}
