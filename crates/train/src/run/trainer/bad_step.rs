//! Bad steps, whose loss or gradient norm is NaN or infinite. They change nothing: the engine halts updates by itself, the step in
//! flight included, until the halt is cleared. Such a step is skipped; after too many in a row the run goes back to its last
//! good checkpoint and past those batches, once; then it ends.

use super::Trainer;
use crate::data::LoaderState;
use crate::format::black_box::{self, BadStep};
use crate::format::checkpoint::{Checkpoint, TRAINER, checkpoints_of};
use crate::run::metrics::Metrics;
use crate::verify::first_non_finite;
use crate::{Error, Result};
use ironhorse_core::{EngineExt, Scalars};
use std::path::{Path, PathBuf};

/// Good steps after which a run that went back may go back again.
const FORGIVEN_AFTER: u64 = 100;
/// The most files that a note about a spike names.
const NAMED: usize = 3;

/// A bad step.
pub(super) struct Bad {
    pub metrics: Metrics,
    pub scalars: Scalars,
    /// The position in the data after it.
    pub position: LoaderState,
}

impl Trainer<'_> {
    /// A step that the engine refused is bad if a number in it is NaN or infinite: routers refuse such logits, so this is
    /// how the divergence of a model with experts shows. Any other refusal stays an error.
    pub(super) fn bad_by_error(&mut self, step: u64, error: Error) -> Result<Bad> {
        let Some((fetched, position)) = self.fetched.filter(|(fetched, _)| *fetched >= step) else {
            return Err(error);
        };
        if self.search_own(step).is_none() {
            return Err(error); // other ranks have no error, and are not asked
        }
        let tokens = self.tokens_of(step);
        let scalars = tokens.scalars(self.job.settings, step);
        let metrics = Metrics {
            step,
            loss: f32::NAN,
            grad_norm: Some(f32::NAN),
            lr: scalars.lr,
            tokens: Some(tokens.real()),
            ms: f32::NAN,
            tokens_per_s: f32::NAN,
            ..Metrics::default()
        };
        // if a later step was fetched since, the batches of this one end where those of the later one begin
        let later = step + 1..=fetched;
        let batches: u64 = later.map(|later| u64::from(self.job.settings.micro_steps(later))).sum();
        let samples = position.samples - batches * self.job.data.train.batch() as u64;
        let position = LoaderState { samples, ..position };
        Ok(Bad { metrics, scalars, position })
    }

    /// Makes a step bad for all ranks whose share this one cannot compute because a number in it is NaN or infinite. Any other
    /// refusal stays an error, as all do without other ranks.
    pub(super) fn make_bad(&mut self, step: u64, error: Error, scalars: &Scalars) -> Result<()> {
        let of_engine = matches!(error, Error::Core(ironhorse_core::Error::Input(_)));
        if self.together.place().is_alone() || !of_engine || self.search_own(step).is_none() {
            return Err(error);
        }
        self.job.session.poison(scalars)
    }

    /// The first NaN or infinity of a step. The step left the weights as they were, so it can be run again.
    pub(super) fn find_non_finite(&mut self, step: u64) -> Option<String> {
        self.search(step).map(|(_, found)| found)
    }

    /// The same with the micro-step that it is in.
    fn search(&mut self, step: u64) -> Option<(u32, String)> {
        let own = self.search_own(step);
        // without an answer of the others the run ends at their next message
        let all = self.together.share(&own).unwrap_or_default();
        all.into_iter().flatten().min_by_key(|(micro_step, _)| *micro_step)
    }

    /// The same in the micro-steps of this rank.
    pub(super) fn search_own(&mut self, step: u64) -> Option<(u32, String)> {
        let tokens = &self.batches[(step % 2) as usize];
        let scalars = tokens.scalars(self.job.settings, step);
        self.job.session.share_of(tokens.count()).into_iter().find_map(|number| {
            let (micro_step, batch) = (number as u32, tokens.micro_step(number));
            let scalars = Scalars { micro_step, ..scalars };
            let found = first_non_finite(self.job.session, batch, &scalars).ok().flatten()?;
            Some((micro_step, found))
        })
    }

    /// Skips a bad step; gives the next step if the run goes back to a checkpoint.
    pub(super) fn skip(&mut self, bad: Bad) -> Result<Option<u64>> {
        self.together.in_step(None); // to search for what was bad takes its time
        self.job.session.clear_halt()?;
        let Bad { mut metrics, scalars, position } = bad;
        let step = metrics.step;
        let norm = metrics.grad_norm.unwrap_or(f32::NAN);
        let first = self.bad_in_a_row == 0;
        let found = if first { self.search(step) } else { None };
        let written = self.black_box(step, (metrics.loss, norm), &scalars, found.clone(), position);
        let found = found.map(|(_, found)| found);
        match written {
            Ok(path) => {
                let found = match (&found, first) {
                    (Some(found), _) => format!("; first not finite: {found}"),
                    (None, true) => "; an immediate second run of the step is finite".to_owned(),
                    (None, false) => String::new(),
                };
                self.job.observer.note(&format!(
                    "step {step:>5}  skipped, nothing was changed: loss {}, gradient norm {norm}{found}; look into it with: \
                     ironhorse verify --replay {}",
                    metrics.loss,
                    path.display()
                ));
            }
            Err(error) => self.job.observer.note(&format!(
                "step {step:>5}  skipped, nothing was changed: loss {}, gradient norm {norm}; its black box could not be written: \
                 {error}",
                metrics.loss
            )),
        }
        metrics.bad = true;
        self.log(&metrics);
        self.summary.bad_steps += 1;
        self.bad_in_a_row += 1;
        (self.landed, self.position) = (step + 1, position);
        if self.bad_in_a_row <= self.job.settings.bad_steps {
            return Ok(None);
        }
        let diverged = diverged(step, metrics.loss, norm, found);
        // the newest checkpoint to go back to has the weights that the first of these bad steps ran on
        let below = self.landed - u64::from(self.bad_in_a_row).min(self.landed) + 1;
        self.go_back(step, below, diverged).map(Some)
    }

    /// A NaN or infinite validation loss: the weights are damaged although every step was finite. Gives the next step.
    pub(super) fn not_finite(&mut self, step: u64, loss: f32) -> Result<u64> {
        self.job.observer.note(&format!("step {step:>5}  the validation loss is {loss}"));
        let found = self.find_non_finite(step.saturating_sub(1));
        // the weights that were validated are those from before the bad steps, if there were any
        let below = step - u64::from(self.bad_in_a_row).min(step);
        self.go_back(step, below, diverged(step, loss, f32::NAN, found))
    }

    /// Goes back to the newest complete checkpoint of less than `below` steps, and skips the batches since. Fails with
    /// `why` if the run went back before, or if there is no such checkpoint.
    fn go_back(&mut self, step: u64, below: u64, why: Error) -> Result<u64> {
        if self.rolled_back_from.is_some() {
            return Err(why);
        }
        self.job.saver.finish(self.job.session, self.job.folder, self.job.observer);
        let Some(mut checkpoint) = self.earlier(below)? else { return Err(why) };
        let state = checkpoint.trainer().clone();
        self.job.session.restore(&mut checkpoint)?;
        self.job.saver.forget_after(state.step, self.together.leads())?;
        self.cut_back(state.step)?;
        self.job.data.train.restore(self.position)?;
        self.fetched = None;
        self.rolled_back_from = Some(step);
        (self.landed, self.best, self.bad_in_a_row) = (state.step, state.best, 0);
        self.job.observer.note(&format!(
            "step {step:>5}  {why}; going back to the checkpoint of step {} and past those batches",
            state.step
        ));
        Ok(state.step)
    }

    /// The newest good checkpoint of less than `below` steps: that of the leader, for all.
    fn earlier(&mut self, below: u64) -> Result<Option<Checkpoint>> {
        let newest = || {
            let earlier = checkpoints_of(self.job.folder.path()).into_iter().filter(|(at, _)| *at < below);
            earlier.map(|(_, path)| path).find_map(|path| good(&path))
        };
        let found = if self.together.leads() { newest() } else { None };
        let path = self.together.of_leader(found.as_ref().map(|found| found.path().to_owned()))?;
        match (found, path) {
            (None, Some(path)) => Checkpoint::open_compared(&path).map(Some),
            (found, _) => Ok(found),
        }
    }

    /// A run that has come far past the steps it went back from may go back again.
    pub(super) fn forget_rollback(&mut self) {
        self.rolled_back_from = self.rolled_back_from.filter(|from| self.landed <= from + FORGIVEN_AFTER);
    }

    /// Writes the black box of a bad step; that of the first of several in a row has the weights that all of them ran on.
    fn black_box(
        &mut self,
        step: u64,
        (loss, norm): (f32, f32),
        scalars: &Scalars,
        found: Option<(u32, String)>,
        position: LoaderState,
    ) -> Result<PathBuf> {
        let run = self.job.folder.path().to_owned();
        let folder = black_box::folder_of(&run, step);
        let made = if self.together.leads() { std::fs::create_dir_all(&folder) } else { Ok(()) };
        let of_leader = self.together.share(&made.is_ok())?;
        made.map_err(|source| Error::io(&folder, "create", source))?;
        if of_leader.contains(&false) {
            return Ok(folder); // the leader says why
        }
        let first = step - u64::from(self.bad_in_a_row).min(step);
        let weights = black_box::weights_of(&black_box::folder_of(&run, first));
        if self.bad_in_a_row == 0 {
            let state = self.state()?;
            self.job.saver.save_to(&weights, self.job.session, &state)?;
            if self.together.leads() {
                black_box::forget_weights(&run, step);
            }
        }
        if !self.together.leads() {
            return Ok(folder);
        }
        let weights_dtype = self.job.session.train_program()?.precision().weights;
        let (batch, seq) = (self.job.data.train.batch(), self.job.data.train.seq());
        let bad = BadStep {
            step,
            loss: loss.to_string(),
            norm: norm.to_string(),
            looked: self.bad_in_a_row == 0,
            micro_step: found.as_ref().map(|(micro_step, _)| *micro_step),
            found: found.map(|(_, found)| found).unwrap_or_default(),
            device: self.job.session.engine().name().to_owned(),
            dtype: self.job.state.settings["dtype"].as_str().unwrap_or(weights_dtype.name()).to_owned(),
            recompute: self.job.settings.recompute,
            head_chunks: self.job.settings.head_chunks,
            dropout: self.job.settings.dropout.rate(),
            preference: self.job.settings.preference,
            batch,
            seq,
            accumulate: self.job.settings.micro_steps(step),
            samples: (self.position.samples, position.samples),
            scalars: *scalars,
            weights: relative(&folder, &weights),
            weights_crc32: std::fs::read(weights.join(TRAINER)).map_or(0, |bytes| crc32fast::hash(&bytes)),
        };
        black_box::write(&folder, &bad, self.tokens_of(step).all())?;
        Ok(folder)
    }

    /// Reports which samples an outlier loss comes from.
    pub(super) fn note_spike(&mut self, metrics: &mut Metrics, position: LoaderState) {
        let Some(score) = self.spikes.add(metrics.loss) else { return };
        metrics.spike = Some(score);
        let samples = self.position.samples..position.samples;
        let places = self.job.data.train.describe(samples.clone()).unwrap_or_default();
        let more = if places.len() > NAMED { ", ..." } else { "" };
        self.job.observer.note(&format!(
            "step {:>5}  the loss jumps to {:.4} ({score:.0} deviations above the median); samples {} to {}: {}{more}",
            metrics.step,
            metrics.loss,
            samples.start,
            samples.end.saturating_sub(1),
            places.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", "),
        ));
    }
}

/// The error of a run that diverged; `found` is its first NaN or infinity.
pub(super) fn diverged(step: u64, loss: f32, norm: f32, found: Option<String>) -> Error {
    let found = found.map_or_else(String::new, |found| format!("; first not finite: {found}"));
    Error::Diverged { step, loss, norm, found }
}

/// Opens a checkpoint if it is complete and its weights are finite: one saved after they became NaN is complete, too.
fn good(path: &Path) -> Option<Checkpoint> {
    let mut checkpoint = Checkpoint::open(path).ok()?;
    let mut values = Vec::new();
    for spec in checkpoint.model().tensors() {
        values.clear();
        values.resize(spec.shape.numel(), 0.0);
        checkpoint.read_tensor(&spec.name, &mut values).ok()?;
        if values.iter().any(|value| !value.is_finite()) {
            return None;
        }
    }
    Some(checkpoint)
}

/// The path of a folder inside `from` or beside it, relative to `from`.
fn relative(from: &Path, to: &Path) -> PathBuf {
    match (to.strip_prefix(from), to.parent().and_then(Path::file_name), to.file_name()) {
        (Ok(inside), _, _) => inside.to_owned(),
        (_, Some(folder), Some(name)) => Path::new("..").join(folder).join(name),
        _ => to.to_owned(),
    }
}
