//! Whole training runs in a separate folder, started and resumed like those of the command.

use super::engine::{Fault, MARK, POISON, faulty};
use ironhorse::core::{DropRate, Pool};
use ironhorse::train::Error;
use ironhorse::train::data::{Batches, Loader, LoaderConfig, MemoryTokens, Tokens};
use ironhorse::train::format::checkpoint::{Checkpoint, checkpoints_of, open_latest};
use ironhorse::train::generate::sample::Sampler;
use ironhorse::train::model::{Gpt2Config, Recompute};
use ironhorse::train::run::metrics::{Metrics, read_metrics};
use ironhorse::train::run::rampup::Rampup;
use ironhorse::train::run::schedule::{Decay, LrSchedule};
use ironhorse::train::run::{
    self, Control, Job, Observer, RunFolder, SaveSettings, Saver, Summary, TrainData, TrainSettings,
};
use ironhorse::train::session::{Session, SessionSpec};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

pub const BATCH: usize = 2;
pub const SEQ: usize = 8;
pub const VOCAB: usize = 64;

/// A run.
#[derive(Clone, Debug)]
pub struct Spec {
    pub steps: u64,
    pub bad_steps: u32,
    pub accumulate: u32,
    pub rampup: Option<Rampup>,
    /// The number of steps between saves.
    pub every: u64,
    /// Batches that make their step bad, counted over micro-steps.
    pub marked: Vec<u64>,
    /// Batches whose finite step leaves non-finite weights.
    pub poisoned: Vec<u64>,
    /// Batches that are missing from the data.
    pub without: Vec<u64>,
    pub fault: Fault,
    pub queued: bool,
    /// Overflows a second moment before the first step.
    pub overflow: bool,
    /// Batches of random tokens in data that are otherwise easy to learn.
    pub garbage: Vec<u64>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            steps: 12,
            bad_steps: 3,
            accumulate: 1,
            rampup: None,
            every: 2,
            marked: Vec::new(),
            poisoned: Vec::new(),
            without: Vec::new(),
            fault: Fault::Loss(f32::NAN.to_bits()),
            queued: false,
            overflow: false,
            garbage: Vec::new(),
        }
    }
}

impl Spec {
    /// Batch after batch in order; easy to learn if random batches must be noticeable.
    fn tokens(&self) -> Vec<u32> {
        let batches = (self.steps + 40) * u64::from(self.accumulate);
        let mut tokens = Vec::new();
        for batch in (0..batches).filter(|batch| !self.without.contains(batch)) {
            let count = BATCH * SEQ;
            let start = tokens.len();
            let noise = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32 % (VOCAB as u32 - 2);
            tokens.extend((0..count as u64).map(|i| match () {
                () if self.garbage.contains(&batch) => noise(batch * 1000 + i),
                () if self.garbage.is_empty() => noise(batch * 16 + i) / 4,
                () => i as u32 % 8,
            }));
            if self.marked.contains(&batch) {
                tokens[start + 1] = MARK as u32;
            }
            if self.poisoned.contains(&batch) {
                tokens[start + 1] = POISON as u32;
            }
            tokens[start] = 0; // the last target of the batch before does not tell which batch follows
        }
        tokens
    }

    pub fn settings(&self) -> TrainSettings {
        TrainSettings {
            steps: self.steps,
            seed: 5,
            accumulate: self.accumulate,
            rampup: self.rampup,
            schedule: LrSchedule {
                kind: Decay::Cosine,
                peak: 1e-2,
                warmup_steps: 2,
                total_steps: self.steps,
                final_fraction: 0.1,
                decay_fraction: 0.2,
            },
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            grad_clip: 1.0,
            bad_steps: self.bad_steps,
            recompute: Recompute::None,
            head_chunks: 1,
            dropout: DropRate::default(),
            preference: None,
            val_every: 5,
            val_batches: 2,
            patience: 0,
            eval_every: 0,
            sample_every: 0,
            sample_tokens: 0,
            sampler: Sampler::default(),
        }
    }

    pub fn data(&self) -> TrainData {
        let loader = |tokens: Vec<u32>| {
            let config = LoaderConfig { batch: BATCH, seq: SEQ, vocab: VOCAB, seed: 0, shuffle: false };
            let sources: Vec<Box<dyn Tokens>> = vec![Box::new(MemoryTokens::new("data.bin", tokens))];
            Batches::from(Loader::new(sources, config).unwrap())
        };
        let val = (0..100).map(|i| i * 7 % 60).collect();
        TrainData {
            train: loader(self.tokens()),
            val: Some(loader(val)),
            tokenizer: None,
            tasks: Vec::new(),
            prompts: Vec::new(),
            stop: Vec::new(),
        }
    }

    fn session(&self) -> Session {
        let shape = Some((BATCH, SEQ));
        let spec = SessionSpec { train: shape, eval: shape, ..SessionSpec::default() };
        let config = Gpt2Config::new(SEQ, VOCAB, 1, 2, 16);
        let mut session = Session::new(Box::new(faulty(self.fault, self.queued)), config, &spec).unwrap();
        session.init(3).unwrap();
        if self.overflow {
            let mut bytes = Vec::new();
            session.read_state(Pool::Moment2, 2, &mut bytes).unwrap();
            bytes[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
            session.write_state(Pool::Moment2, 2, &bytes).unwrap();
        }
        session
    }
}

/// Interventions from outside the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    Nothing,
    /// The run is asked to stop when the line of this step is logged for the n-th time.
    StopAt(u64, u32),
    /// The run's folder is copied below this one after every line, as a kill would leave it.
    CopyTo(PathBuf),
}

struct Watch {
    run: PathBuf,
    meanwhile: Meanwhile,
    control: Control,
    copies: u32,
    notes: Vec<String>,
}

impl Observer for Watch {
    fn step(&mut self, metrics: &Metrics) {
        match &mut self.meanwhile {
            Meanwhile::StopAt(step, times) if *step == metrics.step => {
                *times -= 1;
                if *times == 0 {
                    self.control.stop_flag().store(2, Ordering::Relaxed);
                }
            }
            Meanwhile::CopyTo(top) => {
                copy(&self.run, &top.join(format!("{:03}", self.copies)));
                self.copies += 1;
            }
            _ => {}
        }
    }

    fn sample(&mut self, _step: u64, _text: &str) {}

    fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_dir() {
            copy(&entry.path(), &to.join(entry.file_name()));
        } else {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// The result of a run.
pub struct Done {
    pub result: Result<Summary, Error>,
    pub notes: Vec<String>,
}

impl Done {
    pub fn summary(&self) -> &Summary {
        self.result.as_ref().unwrap_or_else(|error| panic!("{error}\n{:#?}", self.notes))
    }

    pub fn says(&self, text: &str) -> bool {
        self.notes.iter().any(|note| note.contains(text))
    }
}

/// Starts the run in this folder, or resumes it.
pub fn train(run: &Path, spec: &Spec, meanwhile: Meanwhile) -> Done {
    let (settings, mut data, mut session) = (spec.settings(), spec.data(), spec.session());
    let mut state = run::new_state(serde_json::json!({ "dtype": "f32" }));
    let mut folder = if run.join("config.toml").exists() {
        let folder = RunFolder::open(run).unwrap();
        let mut checkpoint = open_latest(run, Checkpoint::open, |error| panic!("{error}")).unwrap().unwrap();
        assert!(session.restore(&mut checkpoint).unwrap());
        state = checkpoint.trainer().clone();
        run::restore_position(&state, &mut data).unwrap();
        folder
    } else {
        RunFolder::create(run, "steps = 1\n", false).unwrap()
    };
    let control = Control::default();
    let sync = matches!(meanwhile, Meanwhile::CopyTo(_));
    let mut watch =
        Watch { run: run.to_owned(), meanwhile, control: control.clone(), copies: 0, notes: Vec::new() };
    let saves = SaveSettings { every: spec.every, minutes: 0.0, keep: 0, sync, ..SaveSettings::default() };
    let mut saver = Saver::new(&session, run, None, saves, state.step).unwrap();
    let result = run::train(Job {
        session: &mut session,
        data: &mut data,
        settings: &settings,
        folder: &mut folder,
        saver: &mut saver,
        control: &control,
        observer: &mut watch,
        state,
    });
    Done { result, notes: watch.notes }
}

/// The steps of the checkpoints of a run.
pub fn saved(run: &Path) -> Vec<u64> {
    let mut steps: Vec<u64> = checkpoints_of(run).into_iter().map(|(step, _)| step).collect();
    steps.reverse();
    steps
}

/// The files of a checkpoint.
pub fn files(run: &Path, step: u64) -> BTreeMap<String, Vec<u8>> {
    let folder = run.join(format!("checkpoints/step-{step:06}"));
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let entries = entries.map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().to_str().unwrap().to_owned(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

/// Weights and moments of a checkpoint.
pub fn tensors(run: &Path, step: u64) -> [Vec<u8>; 2] {
    let mut files = files(run, step);
    ["model.safetensors", "state.safetensors"].map(|name| files.remove(name).unwrap())
}

pub fn metrics(run: &Path) -> Vec<Metrics> {
    read_metrics(&run.join("metrics.jsonl")).unwrap()
}

/// Every line of the log without its times.
pub fn log(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines
        .map(|mut line| {
            for key in ["ms", "data_ms", "tokens_per_s"] {
                line.as_object_mut().unwrap().remove(key);
            }
            line
        })
        .collect()
}
