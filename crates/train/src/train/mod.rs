//! The training loop.

mod run_folder;

pub use run_folder::{RunFolder, latest_checkpoint};

use crate::data::Loader;
use crate::format::tokenizer::Tokenizer;
use crate::generate::{Request, generate};
use crate::metrics::Metrics;
use crate::sample::Sampler;
use crate::schedule::LrSchedule;
use crate::session::Session;
use crate::{Error, Result};
use ironhorse_core::Scalars;
use std::time::Instant;

/// The numbers of a run.
#[derive(Clone, Debug)]
pub struct TrainSettings {
    /// Optimizer steps.
    pub steps: u64,
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
pub fn train(
    session: &mut Session,
    data: &mut TrainData,
    settings: &TrainSettings,
    run: &mut RunFolder,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    settings.schedule.validate()?;
    settings.sampler.validate()?;
    let program = session.train_program()?;
    let tokens = program.io("x").map_or(0, |slot| slot.numel());
    let (mut x, mut y) = (vec![0_i32; tokens], vec![0_i32; tokens]);
    let mut summary =
        Summary { first_val_loss: None, last_val_loss: None, last_loss: f32::NAN, sample: String::new() };
    for step in 0..settings.steps {
        let mut metrics = Metrics { step, ..Metrics::default() };
        if step == 0 || (settings.val_every > 0 && step.is_multiple_of(settings.val_every)) {
            metrics.val_loss = validate(session, data, settings.val_batches)?;
            summary.first_val_loss = summary.first_val_loss.or(metrics.val_loss);
        }
        let start = Instant::now();
        let scalars = scalars_of(settings, step, tokens);
        for micro_step in 0..settings.accumulate {
            data.train.next_batch(&mut x, &mut y)?;
            session.micro_step(&x, &y, &Scalars { micro_step, ..scalars })?;
        }
        let (loss, norm) = session.update(&scalars)?;
        let seconds = start.elapsed().as_secs_f32();
        (metrics.loss, metrics.lr, metrics.grad_norm) = (loss, scalars.lr, Some(norm));
        metrics.ms = seconds * 1e3;
        metrics.tokens_per_s = (tokens * settings.accumulate as usize) as f32 / seconds;
        summary.last_loss = loss;
        let last = step + 1 == settings.steps;
        if last {
            metrics.val_loss = validate(session, data, settings.val_batches)?;
            summary.last_val_loss = metrics.val_loss;
        }
        run.log(&metrics)?;
        observer.step(&metrics);
        let loss = metrics.val_loss.filter(|val| !val.is_finite()).unwrap_or(loss);
        if !loss.is_finite() || !norm.is_finite() {
            run.curve()?;
            return Err(Error::Diverged { step, loss, norm });
        }
        if last || (settings.sample_every > 0 && (step + 1).is_multiple_of(settings.sample_every)) {
            summary.sample = sample(session, data, settings)?;
            if !summary.sample.is_empty() {
                run.sample(step + 1, &summary.sample)?;
                observer.sample(step + 1, &summary.sample);
            }
            run.curve()?;
        }
    }
    run.curve()?;
    Ok(summary)
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

fn sample(session: &mut Session, data: &TrainData, settings: &TrainSettings) -> Result<String> {
    let Some(tokenizer) = data.tokenizer.as_ref().filter(|_| settings.sample_tokens > 0) else {
        return Ok(String::new());
    };
    let mut prompt = tokenizer.encode(settings.prompt.as_bytes())?;
    prompt.insert(0, tokenizer.eot);
    let request = Request {
        prompt: &prompt,
        tokens: settings.sample_tokens,
        stop: Some(tokenizer.eot),
        sampler: settings.sampler,
    };
    let tokens = generate(session, &request, |_| Ok(()))?;
    Ok(settings.prompt.clone() + &tokenizer.decode_lossy(&tokens)?)
}
