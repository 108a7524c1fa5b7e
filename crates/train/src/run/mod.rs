//! A training run: the loop, its folder, its checkpoints, and what happens when something goes wrong.
//!
//! ```text
//! trainer/     the loop, what it measures, NaN or infinite steps, how it ends
//! save/        checkpoints by a thread    folder/      the run's folder and its lock    provenance.rs  run.json, algorithms.json
//! schedule.rs  the learning rate          metrics.rs   metrics.jsonl                    control.rs     stop and save requests
//! spikes.rs    outlier losses             balance.rs   loads of the experts             compare.rs     two logs side by side
//! rampup.rs    the batch size             together.rs  what ranks tell each other        events/        files of TensorBoard
//! append.rs    files that only grow       view/        a run as whoever looks at it sees it
//! ```

mod append;
mod balance;
pub mod compare;
mod control;
mod events;
mod folder;
pub mod metrics;
mod provenance;
pub mod rampup;
mod save;
pub mod schedule;
mod spikes;
mod together;
mod trainer;
pub mod view;

pub use crate::format::black_box::{BAD, BadStep, BlackBox};
pub use control::{Control, StopReason};
pub use folder::{COMPARE_SVG, RunFolder};
pub use provenance::{InitFacts, RunJson, Started, Work, host, read_algorithms, utc};
pub use save::{SaveSettings, SaveStats, Saver};

use crate::data::Batches;
use crate::eval::Task;
use crate::format::checkpoint::{Best, TrainerState};
use crate::generate::codec::Codec;
use crate::generate::sample::Sampler;
use crate::model::Recompute;
use crate::run::metrics::{Graded, Metrics};
use crate::run::rampup::Rampup;
use crate::run::schedule::LrSchedule;
use crate::session::{Batch, BatchPairs, Session};
use crate::{Error, Result};
use ironhorse_core::{DropRate, Scalars};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct TrainSettings {
    /// Optimizer steps.
    pub steps: u64,
    /// Decides how weights and moments are rounded to bf16, and what dropout drops, where they are.
    pub seed: u64,
    /// Micro-steps whose gradients make one step.
    pub accumulate: u32,
    /// Fewer of them in the first steps.
    pub rampup: Option<Rampup>,
    /// Learning rate over the steps.
    pub schedule: LrSchedule,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub eps: f32,
    /// Weight decay, of 2-D tensors only.
    pub weight_decay: f32,
    /// Largest gradient norm; 0 turns clipping off.
    pub grad_clip: f32,
    /// Steps in a row that may be skipped because their loss or gradient norm is NaN or infinite.
    pub bad_steps: u32,
    /// What the backward recomputes; recorded in black boxes only.
    pub recompute: Recompute,
    /// Into how many parts the tokens are cut for the output head; recorded in black boxes only.
    pub head_chunks: usize,
    /// How often elements are dropped; recorded in black boxes only.
    pub dropout: DropRate,
    /// The β of preferences; recorded in black boxes only.
    pub preference: Option<f32>,
    /// Validate every so many steps; 0 means only before the first and after the last.
    pub val_every: u64,
    /// Batches of a validation.
    pub val_batches: u64,
    /// End the run after so many validations without a new lowest loss; 0 means never.
    pub patience: u64,
    /// Grade the tasks every so many steps; 0 means only after the last.
    pub eval_every: u64,
    /// Write a sample every so many steps; 0 means only after the last.
    pub sample_every: u64,
    /// Tokens of a sample; 0 writes none.
    pub sample_tokens: usize,
    /// How samples are drawn.
    pub sampler: Sampler,
}

impl TrainSettings {
    /// Micro-steps of a step, counted from 0.
    pub fn micro_steps(&self, step: u64) -> u32 {
        self.rampup.map_or(self.accumulate, |rampup| rampup.at(step, self.accumulate))
    }

    /// Micro-steps of all steps together.
    pub fn all_micro_steps(&self) -> u64 {
        let ramp = self.rampup.map_or(0, |rampup| rampup.steps.min(self.steps));
        let first: u64 = (0..ramp).map(|step| u64::from(self.micro_steps(step))).sum();
        first.saturating_add((self.steps - ramp).saturating_mul(self.accumulate.into()))
    }

    /// Whether the validation loss is measured before a step. Before the last it is not: the value after it is the
    /// one that is kept, unless it is also the first.
    fn validates_before(&self, step: u64) -> bool {
        let due = self.val_every > 0 && step.is_multiple_of(self.val_every);
        step == 0 || (due && step + 1 < self.steps)
    }

    /// Whether the tasks are graded before a step: not before the first, and before the last neither.
    fn grades_before(&self, step: u64) -> bool {
        self.eval_every > 0 && step > 0 && step.is_multiple_of(self.eval_every) && step + 1 < self.steps
    }
}

/// What a run learns from.
pub struct TrainData {
    /// Training batches.
    pub train: Batches,
    /// Validation batches, in order.
    pub val: Option<Batches>,
    /// Text to tokens and back; without it no samples are written.
    pub tokenizer: Option<Arc<dyn Codec>>,
    /// Multiple-choice questions to grade on the way.
    pub tasks: Vec<Task>,
    /// What samples continue, one after the other.
    pub prompts: Vec<Prompt>,
    /// The tokens that end a sample.
    pub stop: Vec<u32>,
}

/// The beginning of a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The prompt as it is shown.
    pub text: String,
    /// The tokens that the model sees, with those that a tokenizer puts before texts.
    pub ids: Vec<u32>,
}

impl Prompt {
    /// A text as `ironhorse generate` continues it.
    pub fn of_text(tokenizer: &dyn Codec, text: &str) -> Result<Self> {
        Ok(Self { text: text.to_owned(), ids: tokenizer.prompt(text)? })
    }
}

/// Follows a run: a progress bar, a log, or nothing.
pub trait Observer {
    /// The run begins: steps that it has made already, and all of them.
    fn begin(&mut self, _made: u64, _steps: u64) {}
    /// A step is done.
    fn step(&mut self, metrics: &Metrics);
    /// A sample was written at this step.
    fn sample(&mut self, step: u64, text: &str);
    /// Something failed that the run can do without.
    fn note(&mut self, text: &str);
    /// The state was copied to host memory; training continues while a thread writes it.
    fn copied(&mut self, _step: u64, _bytes: u64, _took: Duration) {}
    /// A checkpoint is on the disk.
    fn saved(&mut self, _step: u64, _stats: &SaveStats) {}
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps were made.
    Done,
    /// No new lowest loss in as many validations as the patience of the run allows.
    Patience,
    /// It was stopped and can be resumed.
    Stopped(StopReason),
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Summary {
    /// How it ended.
    pub ending: Ending,
    /// Steps made, those of earlier starts included.
    pub steps: u64,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Validation loss before the first step.
    pub first_val_loss: Option<f32>,
    /// Validation loss after the last step.
    pub last_val_loss: Option<f32>,
    /// The lowest validation loss.
    pub best: Option<Best>,
    /// Training loss of the last step.
    pub last_loss: f32,
    /// The text written after the last step.
    pub sample: String,
    /// The accuracies of the tasks after the last step.
    pub eval: Graded,
    /// Steps of this start that were skipped because they were NaN or infinite.
    pub bad_steps: u64,
    /// What saving cost.
    pub saves: SaveStats,
}

/// Everything a run works with.
pub struct Job<'a> {
    /// The model on its engine, with the weights to start from.
    pub session: &'a mut Session,
    /// What it learns from, at the place where it starts.
    pub data: &'a mut TrainData,
    /// Its settings.
    pub settings: &'a TrainSettings,
    /// Its folder.
    pub folder: &'a mut RunFolder,
    /// Writes its checkpoints.
    pub saver: &'a mut Saver,
    /// Requests to stop or to save.
    pub control: &'a Control,
    /// Follows the run.
    pub observer: &'a mut dyn Observer,
    /// How far it has come: the default with its settings for a new run, that of the checkpoint for a resumed one.
    pub state: TrainerState,
}

/// Trains; everything worth keeping goes into the run's folder as it happens.
///
/// One step is always in flight: the device works on it while the host prepares the next batch and reads the results of
/// the one before. Where the results are needed at once (validation, samples, checkpoints, the end) the run waits for them.
pub fn train(job: Job<'_>) -> Result<Summary> {
    job.settings.schedule.validate()?;
    job.settings.sampler.validate()?;
    if let Some(rampup) = job.settings.rampup {
        rampup.validate(job.settings.accumulate, job.settings.steps)?;
    }
    job.observer.begin(job.state.step, job.settings.steps);
    let together = together::Together::new(job.session.ranks());
    let result = trainer::Trainer::new(job).and_then(trainer::Trainer::run);
    result.inspect_err(|error| together.give_up(error))
}

/// Moves the data to the position of a checkpoint.
pub fn restore_position(state: &TrainerState, data: &mut TrainData) -> Result<()> {
    let position = serde_json::from_value(state.data.clone()).map_err(|error| {
        let found = format!("not valid ({error})");
        Error::input("the checkpoint's position in the data", found, "samples and a fingerprint")
    })?;
    data.train.restore(position)
}

/// Measures what the session's weights give the pairs of training and validation, if there are pairs: the reference that
/// rewards are relative to. These are the weights that a run starts from, also of one that is resumed.
pub fn measure_reference(session: &mut Session, data: &mut TrainData, control: &Control) -> Result<()> {
    let none = vec![0.0; session.eval_tokens()?];
    for batches in [Some(&mut data.train), data.val.as_mut()].into_iter().flatten() {
        batches.measure_reference(|[x, y, positions]| {
            if control.stop_reason().is_some() {
                return Err(Error::Stopped);
            }
            let pairs = Some(BatchPairs { bounds: &[], reference: &none });
            let mut losses = Vec::new();
            session.token_losses(Batch { x, y, positions: Some(positions), pairs }, &mut losses)?;
            Ok(losses)
        })?;
    }
    Ok(())
}

/// The state of a new run.
pub fn new_state(settings: Value) -> TrainerState {
    TrainerState { settings, ..TrainerState::default() }
}

/// The numbers of a step with these targets, those of all its micro-steps.
fn scalars_of(settings: &TrainSettings, step: u64, targets: &[i32]) -> Scalars {
    let scalars = Scalars {
        step: step as u32 + 1,
        micro_step: 0,
        lr: settings.schedule.at(step),
        beta1: settings.beta1,
        beta2: settings.beta2,
        eps: settings.eps,
        weight_decay: settings.weight_decay,
        grad_clip: settings.grad_clip,
        position: 0,
        seed: settings.seed,
        ..Scalars::default()
    };
    scalars.counting(targets)
}

/// What is said of a step without a target that counts.
fn nothing_counts(step: u64, scalars: &Scalars, targets: &[i32]) -> Option<String> {
    (scalars.counted == 0.0).then(|| {
        let all = targets.len();
        format!(
            "step {step:>5}  none of its {all} targets counts: loss and gradient are 0; look at the masks with: ironhorse data show"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::schedule::Decay;
    use ironhorse_core::op::IGNORED;

    fn settings() -> TrainSettings {
        let schedule = LrSchedule {
            kind: Decay::Constant,
            peak: 1.0,
            warmup_steps: 0,
            total_steps: 5,
            final_fraction: 1.0,
            decay_fraction: 0.0,
        };
        TrainSettings {
            steps: 5,
            seed: 0,
            accumulate: 1,
            rampup: None,
            schedule,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 0.0,
            bad_steps: 3,
            recompute: Recompute::None,
            head_chunks: 1,
            dropout: DropRate::default(),
            preference: None,
            val_every: 2,
            val_batches: 1,
            patience: 0,
            eval_every: 2,
            sample_every: 0,
            sample_tokens: 0,
            sampler: Sampler::default(),
        }
    }

    #[test]
    fn a_step_is_the_mean_over_what_counts_in_all_its_micro_steps() {
        let targets = [IGNORED, 3, IGNORED, 0, IGNORED, IGNORED, IGNORED, 1];
        let scalars = scalars_of(&settings(), 4, &targets);
        assert_eq!((scalars.step, scalars.loss_scale, scalars.counted), (5, 1.0 / 3.0, 0.375));
        assert_eq!(nothing_counts(4, &scalars, &targets), None);
        let scalars = scalars_of(&settings(), 4, &[0, 1, 2]);
        assert_eq!((scalars.loss_scale, scalars.counted), (1.0 / 3.0, 1.0));
        let scalars = scalars_of(&settings(), 4, &[IGNORED; 6]);
        assert_eq!((scalars.loss_scale, scalars.counted), (0.0, 0.0));
        let note = nothing_counts(4, &scalars, &[IGNORED; 6]).unwrap();
        assert!(
            note.starts_with("step     4  none of its 6 targets counts: loss and gradient are 0"),
            "{note}"
        );
    }

    #[test]
    fn no_validation_is_run_for_nothing() {
        let settings = settings();
        let before = |settings: &TrainSettings| -> Vec<u64> {
            (0..settings.steps).filter(|&step| settings.validates_before(step)).collect()
        };
        let graded: Vec<u64> = (0..settings.steps).filter(|&step| settings.grades_before(step)).collect();
        assert_eq!(graded, [2]);
        assert_eq!(before(&settings), [0, 2], "after step 4 it is measured anyway");
        assert_eq!(before(&TrainSettings { steps: 6, ..settings.clone() }), [0, 2, 4]);
        assert_eq!(before(&TrainSettings { steps: 1, ..settings.clone() }), [0]);
        assert_eq!(before(&TrainSettings { val_every: 0, ..settings }), [0]);
    }
}
