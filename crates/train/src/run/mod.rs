//! The training loop.

mod balance;
mod run_folder;

pub use run_folder::{Ending, RunFolder, latest_checkpoint};

use self::balance::Balance;
use crate::data::Loader;
use crate::format::tokenizer::Tokenizer;
use crate::generate::{Request, generate};
use crate::metrics::Metrics;
use crate::sample::Sampler;
use crate::schedule::LrSchedule;
use crate::session::{PendingUpdate, Session};
use crate::verify::first_non_finite;
use crate::{Error, Result};
use ironhorse_core::Scalars;
use std::time::Instant;

/// The numbers of a run.
#[derive(Clone, Debug)]
pub struct TrainSettings {
    /// Optimizer steps.
    pub steps: u64,
    /// Decides how weights and moments are rounded to bf16, where they are.
    pub seed: u64,
    /// Micro-steps whose gradients make one step.
    pub accumulate: u32,
    /// Learning rate over the steps.
    pub schedule: LrSchedule,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub eps: f32,
    /// Decay of matrices.
    pub weight_decay: f32,
    /// Largest gradient norm; 0 turns clipping off.
    pub grad_clip: f32,
    /// Validate every so many steps; 0 means only before the first and after the last.
    pub val_every: u64,
    /// Batches of a validation.
    pub val_batches: u64,
    /// Write a sample every so many steps; 0 means only after the last.
    pub sample_every: u64,
    /// Tokens of a sample; 0 writes none.
    pub sample_tokens: usize,
    /// What samples begin with.
    pub prompt: String,
    /// How samples are drawn.
    pub sampler: Sampler,
}

impl TrainSettings {
    /// Whether the validation loss is measured before a step. Before the last it is not: the value after it is the
    /// one that is kept, unless it is also the first.
    fn validates_before(&self, step: u64) -> bool {
        let due = self.val_every > 0 && step.is_multiple_of(self.val_every);
        step == 0 || (due && step + 1 < self.steps)
    }
}

/// What a run learns from.
pub struct TrainData {
    /// Training batches.
    pub train: Loader,
    /// Validation batches, in order.
    pub val: Option<Loader>,
    /// Text to tokens and back; without it no samples are written.
    pub tokenizer: Option<Tokenizer>,
}

/// Who watches a run: a progress bar, a log, nobody.
pub trait Observer {
    /// A step is done.
    fn step(&mut self, metrics: &Metrics);
    /// A sample was written at this step.
    fn sample(&mut self, step: u64, text: &str);
    /// Something did not work that the run can do without.
    fn note(&mut self, text: &str);
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Validation loss before the first step.
    pub first_val_loss: Option<f32>,
    /// Validation loss after the last step.
    pub last_val_loss: Option<f32>,
    /// Training loss of the last step.
    pub last_loss: f32,
    /// The text written after the last step.
    pub sample: String,
}

/// Trains; everything worth keeping goes into the run folder as it happens.
///
/// One step is always in flight: the device works on it while the host prepares the next batch and reads the results of
/// the one before. Where the results are needed at once (validation, samples, the end) the run waits for them.
pub fn train(
    session: &mut Session,
    data: &mut TrainData,
    settings: &TrainSettings,
    run: &mut RunFolder,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    settings.schedule.validate()?;
    settings.sampler.validate()?;
    // a prompt that cannot be encoded is refused now, not after hours
    let prompt = prompt_of(data, settings)?;
    let tokens = session.train_program()?.io("x").map_or(0, |slot| slot.numel());
    let summary =
        Summary { first_val_loss: None, last_val_loss: None, last_loss: f32::NAN, sample: String::new() };
    let mut trainer = Trainer {
        session,
        settings,
        run,
        observer,
        summary,
        tokens,
        batches: [(); 2].map(|()| Batches::new(tokens * settings.accumulate as usize)),
        mark: Instant::now(),
        balance: Balance::default(),
    };
    let mut in_flight: Option<InFlight> = None;
    for step in 0..settings.steps {
        let mut metrics = Metrics { step, ..Metrics::default() };
        if settings.validates_before(step) {
            trainer.land(in_flight.take(), data, false)?;
            metrics.val_loss = trainer.validate(data, step)?;
            trainer.summary.first_val_loss = trainer.summary.first_val_loss.or(metrics.val_loss);
            trainer.mark = Instant::now();
        }
        let started = trainer.start(metrics, &mut data.train)?;
        trainer.land(in_flight.replace(started), data, false)?;
        let last = step + 1 == settings.steps;
        if last || (settings.sample_every > 0 && (step + 1).is_multiple_of(settings.sample_every)) {
            trainer.land(in_flight.take(), data, last)?;
            trainer.sample(step, data, &prompt);
            trainer.mark = Instant::now();
        } else if in_flight.as_ref().is_some_and(|step| step.pending.is_ready()) {
            trainer.land(in_flight.take(), data, false)?; // the engine worked while it was asked to: nothing is in flight
        }
    }
    Ok(trainer.summary)
}

/// The tokens of one step, kept until its results are known: a step that goes wrong is run again to find out where.
struct Batches {
    x: Vec<i32>,
    y: Vec<i32>,
}

impl Batches {
    fn new(tokens: usize) -> Self {
        Self { x: vec![0; tokens], y: vec![0; tokens] }
    }
}

/// A step whose results are on their way.
struct InFlight {
    metrics: Metrics,
    scalars: Scalars,
    pending: PendingUpdate,
}

/// Where the engine works by itself, reading how tokens spread makes it wait; so every so many steps.
const ROUTING_EVERY: u64 = 10;

/// A run under way.
struct Trainer<'a> {
    session: &'a mut Session,
    settings: &'a TrainSettings,
    run: &'a mut RunFolder,
    observer: &'a mut dyn Observer,
    summary: Summary,
    /// Tokens of a micro-step.
    tokens: usize,
    /// Of the even and of the odd steps.
    batches: [Batches; 2],
    /// When the step before was done.
    mark: Instant,
    balance: Balance,
}

impl Trainer<'_> {
    /// Gives a step to the engine.
    fn start(&mut self, mut metrics: Metrics, data: &mut Loader) -> Result<InFlight> {
        let scalars = scalars_of(self.settings, metrics.step, self.tokens);
        let batches = &mut self.batches[(metrics.step % 2) as usize];
        for micro_step in 0..self.settings.accumulate {
            let part = micro_step as usize * self.tokens..(micro_step as usize + 1) * self.tokens;
            let (x, y) = (&mut batches.x[part.clone()], &mut batches.y[part]);
            data.next_batch(x, y)?;
            if let Err(error) = self.session.micro_step(x, y, &Scalars { micro_step, ..scalars }) {
                return Err(self.diverged(error, metrics.step, &scalars));
            }
        }
        metrics.lr = scalars.lr;
        let pending = self.session.start_update(&scalars)?;
        if pending.is_ready() || metrics.step.is_multiple_of(ROUTING_EVERY) {
            metrics.router = self.session.routing()?;
        }
        Ok(InFlight { metrics, scalars, pending })
    }

    /// Waits for a step and logs it, the last one with its validation loss; one that is not finite ends the run.
    fn land(&mut self, step: Option<InFlight>, data: &mut TrainData, last: bool) -> Result<()> {
        let Some(InFlight { mut metrics, scalars, pending }) = step else { return Ok(()) };
        let (loss, norm) = self.session.finish_update(pending)?;
        let now = Instant::now();
        let seconds = now.duration_since(self.mark).as_secs_f32();
        self.mark = now;
        (metrics.loss, metrics.grad_norm) = (loss, Some(norm));
        metrics.ms = seconds * 1e3;
        metrics.tokens_per_s = (self.tokens * self.settings.accumulate as usize) as f32 / seconds;
        self.summary.last_loss = loss;
        if last {
            let validated = self.validate(data, metrics.step);
            if validated.is_err() {
                self.log(&metrics)?; // the step was made
            }
            metrics.val_loss = validated?;
            self.summary.last_val_loss = metrics.val_loss;
        }
        self.log(&metrics)?;
        if let Some(warning) = self.balance.add(&metrics.router, last) {
            self.observer.note(&format!("step {:>5}  {warning}", metrics.step));
        }
        let loss = metrics.val_loss.filter(|val| !val.is_finite()).unwrap_or(loss);
        if loss.is_finite() && norm.is_finite() {
            return Ok(());
        }
        let _ = self.run.curve(); // why the run ended matters more than its picture
        let found = self.find_non_finite(metrics.step, &scalars);
        let found = found.unwrap_or_else(|| "; run again, the step is finite".into());
        Err(Error::Diverged { step: metrics.step, loss, norm, found })
    }

    fn log(&mut self, metrics: &Metrics) -> Result<()> {
        self.run.log(metrics)?;
        self.observer.step(metrics);
        Ok(())
    }

    /// The validation loss; if the model is refused there because it ran away, that is why.
    fn validate(&mut self, data: &mut TrainData, step: u64) -> Result<Option<f32>> {
        validate(self.session, data, self.settings.val_batches).map_err(|error| {
            let scalars = scalars_of(self.settings, step, self.tokens);
            self.diverged(error, step, &scalars)
        })
    }

    /// What a step that was refused means: a router chooses no experts by numbers that are not finite, so a model with
    /// experts that runs away gets no further than that.
    fn diverged(&mut self, error: Error, step: u64, scalars: &Scalars) -> Error {
        let Some(found) = self.find_non_finite(step, scalars) else { return error };
        let _ = self.run.curve(); // why the run ended matters more than its picture
        Error::Diverged { step, loss: f32::NAN, norm: f32::NAN, found }
    }

    /// The first tensor of a step that is not finite, for [`Error::Diverged`]. The update of such a step left the weights as
    /// they were, so it can be run again; only the step after it, which was under way, may have changed them since.
    fn find_non_finite(&mut self, step: u64, scalars: &Scalars) -> Option<String> {
        let batches = &self.batches[(step % 2) as usize];
        let mut parts = batches.x.chunks(self.tokens).zip(batches.y.chunks(self.tokens));
        parts.find_map(|(x, y)| match first_non_finite(self.session, x, y, scalars) {
            Ok(Some(found)) => Some(format!("; first not finite: {found}")),
            _ => None,
        })
    }

    /// Writes a sample and the loss curve: extras, without which the run goes on and its weights are kept.
    fn sample(&mut self, step: u64, data: &TrainData, prompt: &[u32]) {
        match sample(self.session, data, self.settings, prompt) {
            Ok(text) if text.is_empty() => {}
            Ok(text) => {
                if let Err(error) = self.run.sample(step + 1, &text) {
                    let what = format!("the sample after step {} is not kept: {error}", step + 1);
                    self.observer.note(&what);
                }
                self.observer.sample(step + 1, &text);
                self.summary.sample = text;
            }
            Err(error) => self.observer.note(&format!("no sample after step {}: {error}", step + 1)),
        }
        if let Err(error) = self.run.curve() {
            self.observer.note(&format!("no loss curve after step {}: {error}", step + 1));
        }
    }
}

fn scalars_of(settings: &TrainSettings, step: u64, tokens: usize) -> Scalars {
    Scalars {
        step: step as u32 + 1,
        micro_step: 0,
        loss_scale: 1.0 / (tokens as f32 * settings.accumulate as f32),
        lr: settings.schedule.at(step),
        beta1: settings.beta1,
        beta2: settings.beta2,
        eps: settings.eps,
        weight_decay: settings.weight_decay,
        grad_clip: settings.grad_clip,
        position: 0,
        seed: settings.seed,
    }
}

/// The mean loss over the first batches of the validation data; the same batches every time.
fn validate(session: &mut Session, data: &mut TrainData, batches: u64) -> Result<Option<f32>> {
    let Some(val) = &mut data.val else { return Ok(None) };
    let batches = batches.min(val.len_batches());
    if batches == 0 {
        return Ok(None);
    }
    val.rewind();
    let tokens = session.eval_tokens()?;
    let (mut x, mut y) = (vec![0; tokens], vec![0; tokens]);
    let mut sum = 0.0_f64;
    for _ in 0..batches {
        val.next_batch(&mut x, &mut y)?;
        sum += f64::from(session.evaluate(&x, &y)?);
    }
    Ok(Some((sum / batches as f64) as f32))
}

/// What samples continue: the start of a text, then the prompt. Empty without a tokenizer.
fn prompt_of(data: &TrainData, settings: &TrainSettings) -> Result<Vec<u32>> {
    let Some(tokenizer) = data.tokenizer.as_ref() else { return Ok(Vec::new()) };
    let mut prompt = tokenizer.encode(settings.prompt.as_bytes())?;
    prompt.insert(0, tokenizer.eot);
    Ok(prompt)
}

/// Draws a sample; empty when none is wanted.
fn sample(
    session: &mut Session,
    data: &TrainData,
    settings: &TrainSettings,
    prompt: &[u32],
) -> Result<String> {
    let Some(tokenizer) = data.tokenizer.as_ref().filter(|_| settings.sample_tokens > 0) else {
        return Ok(String::new());
    };
    let request = Request {
        prompt,
        vocab: tokenizer.vocab_size(),
        tokens: settings.sample_tokens,
        context: Some(data.train.seq()),
        stop: Some(tokenizer.eot),
        sampler: settings.sampler,
    };
    let tokens = generate(session, &request, |_| Ok(()))?;
    Ok(settings.prompt.clone() + &tokenizer.decode_lossy(&tokens)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Decay;

    #[test]
    fn no_validation_is_run_for_nothing() {
        let schedule = LrSchedule {
            kind: Decay::Constant,
            peak: 1.0,
            warmup_steps: 0,
            total_steps: 5,
            final_fraction: 1.0,
        };
        let settings = TrainSettings {
            steps: 5,
            seed: 0,
            accumulate: 1,
            schedule,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 0.0,
            val_every: 2,
            val_batches: 1,
            sample_every: 0,
            sample_tokens: 0,
            prompt: String::new(),
            sampler: Sampler::default(),
        };
        let before = |settings: &TrainSettings| -> Vec<u64> {
            (0..settings.steps).filter(|&step| settings.validates_before(step)).collect()
        };
        assert_eq!(before(&settings), [0, 2], "after step 4 it is measured anyway");
        assert_eq!(before(&TrainSettings { steps: 6, ..settings.clone() }), [0, 2, 4]);
        assert_eq!(before(&TrainSettings { steps: 1, ..settings.clone() }), [0]);
        assert_eq!(before(&TrainSettings { val_every: 0, ..settings }), [0]);
    }
}
