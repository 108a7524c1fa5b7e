//! `ironhorse train`

use super::verify::RecomputeArg;
use crate::args::{EngineArgs, StateArgs};
use crate::hardware::check_memory;
use crate::progress::Progress;
use crate::{Outcome, number, out};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use ironhorse::core::Pool;
use ironhorse::train::Error;
use ironhorse::train::data::corpus::{Split, corpus};
use ironhorse::train::data::{Loader, LoaderConfig, MemoryTokens, Tokens, open_shards};
use ironhorse::train::format::checkpoint::TrainerState;
use ironhorse::train::format::tokenizer::Tokenizer;
use ironhorse::train::format::{ModelChoice, WeightSource, open_weights};
use ironhorse::train::model::{Gpt2Config, ModelConfig};
use ironhorse::train::schedule::{Decay, LrSchedule};
use ironhorse::train::session::{Session, SessionSpec};
use ironhorse::train::train::{Ending, RunFolder, Summary, TrainData, TrainSettings, train};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The most steps of a run: the optimizer counts them in 32 bits.
const MOST_STEPS: u64 = u32::MAX as u64;

/// Trains a model; with no flags a small one on built-in stories, on this machine
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(after_help = "Examples:\n  ironhorse train\n  \
    ironhorse train --steps 200 --lr 3e-3 --out runs/quick\n  \
    ironhorse train --model d12 --data 'shards/*_train_*.bin' --val-data 'shards/*_val_*.bin' --tokenizer gpt2_tokenizer.bin\n  \
    ironhorse train --model hidden=128,layers=4,heads=4,experts=8,top_k=2,ffn=256,vocab=256,context=128\n  \
    ironhorse train --model moe-6.9b --device cuda --batch 8 --seq 1024 --recompute experts --master residual --moments bf16\n  \
    ironhorse train --init runs/0001/checkpoint --steps 500\n  \
    ironhorse train --config runs/0001/config.toml --out runs/again\n\n\
    A run folder holds config.toml (reproduces the run), metrics.jsonl, loss.svg, experts.svg (of a mixture of experts), samples/ and checkpoint/.\n\n\
    Exit code: 0 done, 1 the loss or the gradients ran away (the run folder has the log, no checkpoint), 2 could not run.")]
pub struct TrainArgs {
    /// d12, d24, d36, d48, moe-tiny, moe-6.9b, sizes such as n_layer=2,n_head=4,n_embd=64, a TOML file, or `builtin`
    #[arg(long, default_value = BUILTIN, value_name = "NAME")]
    model: String,
    /// Start from these weights: a model .bin, a Hugging Face folder, a checkpoint
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    init: Option<PathBuf>,
    /// Token shards to train on, as paths or patterns; the built-in stories if not given
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    data: Vec<String>,
    /// Token shards to validate on
    #[arg(long, value_name = "GLOB", num_args = 1..)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    val_data: Vec<String>,
    /// Tokenizer file, to write samples as text
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tokenizer: Option<PathBuf>,
    /// B: sequences per micro-step
    #[arg(long, value_name = "B", value_parser = number::count::<usize>)]
    batch: Option<usize>,
    /// T: tokens per sequence
    #[arg(long, value_name = "T", value_parser = number::count::<usize>)]
    seq: Option<usize>,
    /// Micro-steps whose gradients make one step
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = number::count::<u32>)]
    accumulate: u32,
    /// Optimizer steps
    #[arg(long, value_name = "N", value_parser = number::whole::<u64>(1..=MOST_STEPS))]
    steps: Option<u64>,
    /// Peak learning rate
    #[arg(long, value_name = "X", value_parser = number::at_least_0::<f32>)]
    lr: Option<f32>,
    /// How the learning rate falls after the warm-up
    #[arg(long, value_enum, default_value_t = ScheduleArg::Cosine)]
    schedule: ScheduleArg,
    /// Steps of linear warm-up
    #[arg(long, value_name = "N", value_parser = number::count_or_0::<u64>)]
    warmup: Option<u64>,
    /// Last learning rate over the peak
    #[arg(long, value_name = "X", value_parser = number::fraction::<f32>)]
    final_fraction: Option<f32>,
    /// Decay of matrices
    #[arg(long, default_value_t = 0.1, value_name = "X", value_parser = number::at_least_0::<f32>)]
    weight_decay: f32,
    /// AdamW's beta1
    #[arg(long, default_value_t = 0.9, value_name = "X", value_parser = number::below_1::<f64>)]
    beta1: f64,
    /// AdamW's beta2
    #[arg(long, value_name = "X", value_parser = number::below_1::<f64>)]
    beta2: Option<f64>,
    /// AdamW's epsilon
    #[arg(long, default_value_t = 1e-8, value_name = "X", value_parser = number::above_0::<f32>)]
    eps: f32,
    /// Largest gradient norm; 0 turns clipping off
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = number::at_least_0::<f32>)]
    grad_clip: f32,
    /// Validate every so many steps; 0 means only first and last
    #[arg(long, value_name = "N", value_parser = number::count_or_0::<u64>)]
    val_every: Option<u64>,
    /// Batches of a validation; 0 turns it off
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = number::count_or_0::<u64>)]
    val_batches: u64,
    /// Write a sample every so many steps; 0 means only at the end
    #[arg(long, value_name = "N", value_parser = number::count_or_0::<u64>)]
    sample_every: Option<u64>,
    /// Tokens of a sample; 0 writes none
    #[arg(long, value_name = "N", value_parser = number::count_or_0::<usize>)]
    sample_tokens: Option<usize>,
    /// What samples begin with
    #[arg(long, default_value = "", value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    #[command(flatten)]
    #[serde(flatten)]
    sampling: super::generate::SamplingArgs,
    /// Seed of weights, data order and samples
    #[arg(long, default_value_t = 1, value_name = "S", value_parser = number::seed)]
    seed: u64,
    /// Compute again in the backward instead of keeping
    #[arg(long, value_enum, default_value_t = RecomputeArg::None)]
    recompute: RecomputeArg,
    #[command(flatten)]
    #[serde(flatten)]
    state: StateArgs,
    #[command(flatten)]
    #[serde(flatten)]
    engine: EngineArgs,
    /// The run folder; the next free number below runs/ if not given
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    out: Option<PathBuf>,
    /// Also write the tokens of every step to this file: x and y, (steps, B, T), for another program to train on
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    save_batches: Option<PathBuf>,
    /// Use the run folder even if it holds a run: its checkpoint and samples are removed
    #[arg(long)]
    #[serde(skip)]
    overwrite: bool,
    /// Also write the summary to this file
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    json: Option<PathBuf>,
}

/// Shapes of the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum ScheduleArg {
    /// Half a cosine
    Cosine,
    /// A straight line
    Linear,
    /// Flat
    Constant,
}

/// Where runs go, and what `--model` is, if not given.
const RUNS: &str = "runs";
const BUILTIN: &str = "builtin";

/// The model of `ironhorse train` without flags: learns the built-in stories in less than 90 s on two cores.
fn builtin_model() -> ModelConfig {
    Gpt2Config::new(128, 256, 4, 4, 128).into()
}

/// Bytes of built-in stories: more than the default run reads.
const TRAIN_BYTES: usize = 4 << 20;
const VAL_BYTES: usize = 1 << 17;

/// Everything that depends on the model, settled; serialised it reproduces the run.
fn settle(mut args: TrainArgs, config: &ModelConfig) -> TrainArgs {
    let small = config.width() <= 256;
    let pick = |a: u64, b: u64| if small { a } else { b };
    args.batch.get_or_insert(pick(8, 4) as usize);
    args.seq.get_or_insert((pick(128, 64) as usize).min(config.max_seq_len()));
    args.steps.get_or_insert(pick(2200, 100));
    args.lr.get_or_insert(if small { 4e-3 } else { 3e-4 });
    args.final_fraction.get_or_insert(if small { 0.02 } else { 0.1 });
    args.beta2.get_or_insert(if small { 0.98 } else { 0.95 });
    let steps = args.steps.unwrap_or(1);
    args.warmup.get_or_insert(pick(100, 20).min(steps / 5));
    args.val_every.get_or_insert(pick(200, 50));
    args.sample_every.get_or_insert(pick(500, 0));
    args.sample_tokens.get_or_insert(pick(700, 64) as usize);
    // The built-in stories are bytes, whatever the model's vocabulary.
    args.sampling.settle(if args.data.is_empty() { 256 } else { config.vocab_size() });
    args
}

pub fn run(args: &TrainArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let (config, mut weights) = choose_model(args)?;
    let mut args = settle(args.clone(), &config);
    if args.seq > Some(config.max_seq_len()) {
        bail!("--seq {} is beyond the model's context of {}", args.seq.unwrap_or(0), config.max_seq_len());
    }
    if args.model != BUILTIN || weights.is_some() {
        args.model = config.to_line();
    }
    if let Some(source) = &weights {
        args.init.get_or_insert(source.path().to_owned());
    }
    let settings = settings_of(&args)?;
    settings.schedule.validate()?;
    let mut spec = SessionSpec {
        train: Some((args.batch.unwrap_or(1), args.seq.unwrap_or(1))),
        recompute: args.recompute.into(),
        precision: args.state.precision(args.engine.dtype()?, settings.accumulate)?,
        ..SessionSpec::default()
    };
    let engine = args.engine.engine()?;
    check_memory(engine.as_ref(), &config, &spec)?;
    let data = open_data(&args, &config)?;
    if let (Some(path), Some(shape)) = (&args.save_batches, spec.train) {
        let count = settings.steps.saturating_mul(settings.accumulate.into());
        super::batches::save(path, &mut open_data(&args, &config)?.train, count, shape.into())?;
    }
    spec.eval = spec.train.filter(|_| data.val.is_some());
    spec.decode = data.tokenizer.is_some().then_some(1);
    check_memory(engine.as_ref(), &config, &spec)?; // now with what validation and samples need
    let mut session = Session::new(engine, config, &spec)?;
    match &mut weights {
        Some(source) => session.load(Pool::Params, |name, values| source.read_tensor(name, values))?,
        None => session.init(args.seed)?,
    }

    let (folder, fresh) = match &args.out {
        Some(path) => (path.clone(), !path.exists()),
        None => (next_run(Path::new(RUNS))?, true),
    };
    let result = train_into(&folder, &args, &settings, session, data);
    if result.is_err() && fresh {
        remove_unused(&folder);
    }
    result
}

/// The sizes, and the weights if there are any.
fn choose_model(args: &TrainArgs) -> Result<(ModelConfig, Option<Box<dyn WeightSource>>)> {
    let init = args.init.as_deref().map(open_weights).transpose()?;
    if args.model == BUILTIN {
        return Ok((init.as_ref().map_or_else(builtin_model, |source| source.config()), init));
    }
    let choice = ModelChoice::parse(&args.model)?;
    let config = choice.config();
    if let Some(source) = init.as_ref().filter(|source| !source.config().computes_as(&config)) {
        bail!("--init {} has other sizes than --model {}", source.path().display(), args.model);
    }
    Ok(match choice {
        ModelChoice::Weights(source) => (config, init.or(Some(source))),
        ModelChoice::Sizes(_) => (config, init),
    })
}

fn train_into(
    folder: &Path,
    args: &TrainArgs,
    settings: &TrainSettings,
    mut session: Session,
    mut data: TrainData,
) -> Result<Outcome> {
    if args.overwrite
        && let (Some(Ok(init)), Ok(out)) =
            (args.init.as_ref().map(std::fs::canonicalize), folder.canonicalize())
        && init.starts_with(&out)
    {
        bail!("--init lies inside --out, which --overwrite would remove; choose another --out");
    }
    let text = toml::to_string_pretty(args).context("the settings are not TOML")?;
    let mut run = RunFolder::create(folder, &text, args.overwrite)?;
    let config = session.config();
    let tokens = args.batch.unwrap_or(1) * args.seq.unwrap_or(1);
    out::note(format_args!(
        "{} parameters{}, {} layers of {}, {} tokens a step, {} steps → {}",
        config.told_params(),
        config.active_params().map_or_else(String::new, |active| format!(" ({active} active)")),
        config.layers(),
        config.width(),
        tokens as u64 * u64::from(args.accumulate),
        settings.steps,
        folder.display()
    ));
    let started = Instant::now();
    let mut progress = Progress::new(settings.steps);
    let summary = train(&mut session, &mut data, settings, &mut run, &mut progress);
    progress.finish();
    let data_state = serde_json::to_value(data.train.state())?;
    let arguments = serde_json::to_value(args)?;
    let state =
        |step| TrainerState { step, data: data_state, rng: serde_json::Value::Null, settings: arguments };
    let tokenizer = data.tokenizer.as_ref();
    let summary = match summary {
        Ok(summary) => summary,
        Err(error) => {
            // an update that is not finite is never made, so the weights are worth keeping
            let kept = match error {
                _ if run.steps() == 0 => return Err(error.into()), // nothing was learnt
                Error::Diverged { step, .. } => {
                    run.checkpoint(Ending::Diverged, &mut session, tokenizer, &state(step))
                }
                _ => {
                    let _ = run.curve(); // why the run ended matters more than its picture
                    run.checkpoint(Ending::Failed, &mut session, tokenizer, &state(run.steps()))
                }
            };
            match kept {
                Ok(path) => {
                    out::note(format_args!("the weights as they were are kept in {}", path.display()))
                }
                Err(error) => out::note(format_args!("the weights are not kept: {error}")),
            }
            return Err(error.into());
        }
    };
    let checkpoint = run.checkpoint(Ending::Done, &mut session, tokenizer, &state(settings.steps))?;
    report(args, &run, &checkpoint, &summary, started.elapsed().as_secs_f64())
}

/// Removes the folder of a run that failed before its first step, so that it is not in the way of the next try.
fn remove_unused(folder: &Path) {
    let steps = std::fs::metadata(folder.join("metrics.jsonl")).map_or(0, |meta| meta.len());
    if steps == 0 {
        // what cannot be removed does no harm
        let _ = std::fs::remove_dir_all(folder);
        let _ = std::fs::remove_dir(RUNS); // if it is empty
    }
}

#[derive(Serialize)]
struct TrainReport<'a> {
    run: &'a Path,
    checkpoint: &'a Path,
    steps: u64,
    seconds: f64,
    first_val_loss: Option<f32>,
    last_val_loss: Option<f32>,
    last_loss: f32,
    sample: &'a str,
}

fn report(
    args: &TrainArgs,
    run: &RunFolder,
    checkpoint: &Path,
    summary: &Summary,
    seconds: f64,
) -> Result<Outcome> {
    if !summary.sample.is_empty() {
        out::line(format!("\n{}\n", summary.sample.trim_end()))?;
    }
    match (summary.first_val_loss, summary.last_val_loss) {
        (Some(first), Some(last)) => {
            out::line(format!("validation loss {first:.4} → {last:.4} in {seconds:.0} s"))?
        }
        _ => out::line(format!("last training loss {:.4} after {seconds:.0} s", summary.last_loss))?,
    }
    let pictures = if run.path().join("experts.svg").exists() { "loss.svg, experts.svg" } else { "loss.svg" };
    out::line(format!("run        {}   ({pictures}, metrics.jsonl, samples)", run.path().display()))?;
    out::line(format!("continue   ironhorse generate --model {}", checkpoint.display()))?;
    let steps = args.steps.unwrap_or(0);
    let report = TrainReport {
        run: run.path(),
        checkpoint,
        steps,
        seconds,
        first_val_loss: summary.first_val_loss,
        last_val_loss: summary.last_val_loss,
        last_loss: summary.last_loss,
        sample: &summary.sample,
    };
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

fn settings_of(args: &TrainArgs) -> Result<TrainSettings> {
    let steps = args.steps.context("--steps is missing")?;
    Ok(TrainSettings {
        seed: args.seed,
        steps,
        accumulate: args.accumulate,
        schedule: LrSchedule {
            kind: match args.schedule {
                ScheduleArg::Cosine => Decay::Cosine,
                ScheduleArg::Linear => Decay::Linear,
                ScheduleArg::Constant => Decay::Constant,
            },
            peak: args.lr.context("--lr is missing")?,
            warmup_steps: args.warmup.unwrap_or(0),
            total_steps: steps,
            final_fraction: args.final_fraction.context("--final-fraction is missing")?,
        },
        beta1: args.beta1,
        beta2: args.beta2.context("--beta2 is missing")?,
        eps: args.eps,
        weight_decay: args.weight_decay,
        grad_clip: args.grad_clip,
        val_every: args.val_every.unwrap_or(0),
        val_batches: args.val_batches,
        sample_every: args.sample_every.unwrap_or(0),
        sample_tokens: args.sample_tokens.unwrap_or(0),
        prompt: args.prompt.clone(),
        sampler: args.sampling.sampler(args.seed),
    })
}

fn open_data(args: &TrainArgs, config: &ModelConfig) -> Result<TrainData> {
    let loader = |sources: Vec<Box<dyn Tokens>>, shuffle: bool| {
        let config = LoaderConfig {
            batch: args.batch.unwrap_or(1),
            seq: args.seq.unwrap_or(1),
            vocab: config.vocab_size(),
            seed: args.seed,
            shuffle,
        };
        Loader::new(sources, config)
    };
    let stories = |split, bytes| -> Vec<Box<dyn Tokens>> {
        vec![Box::new(MemoryTokens::from_bytes("built-in stories", &corpus(args.seed, split, bytes)))]
    };
    let tokenizer = match &args.tokenizer {
        Some(path) => Some(Tokenizer::open(path)?),
        None if args.data.is_empty() || config.vocab_size() == 256 => Some(Tokenizer::bytes()),
        None => None,
    };
    if let Some(tokenizer) = tokenizer.as_ref().filter(|t| t.vocab_size() > config.vocab_size()) {
        bail!("the tokenizer has {} tokens, the model only {}", tokenizer.vocab_size(), config.vocab_size());
    }
    if args.data.is_empty() {
        let train = loader(stories(Split::Train, TRAIN_BYTES), true)?;
        let val = if args.val_data.is_empty() {
            loader(stories(Split::Validation, VAL_BYTES), false)?
        } else {
            loader(open_shards(&args.val_data)?, false)?
        };
        return Ok(TrainData { train, val: Some(val), tokenizer });
    }
    let train = loader(open_shards(&args.data)?, true)?;
    let val =
        if args.val_data.is_empty() { None } else { Some(loader(open_shards(&args.val_data)?, false)?) };
    Ok(TrainData { train, val, tokenizer })
}

/// Makes the folder of the first number below `runs` that is not taken. Making it is what takes it: two runs that
/// start at once get two folders.
fn next_run(runs: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(runs).with_context(|| format!("{}: cannot create", runs.display()))?;
    let mut number = 1_u32;
    loop {
        let path = runs.join(format!("{number:04}"));
        match std::fs::create_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            made => return made.with_context(|| format!("{}: cannot create", path.display())).map(|()| path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn runs_that_start_at_once_get_folders_of_their_own() {
        let place = tempfile::tempdir().unwrap();
        let runs = place.path().join("runs");
        let made: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| next_run(&runs).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let different: BTreeSet<&PathBuf> = made.iter().collect();
        assert_eq!(different.len(), 8, "{made:?}");
        assert_eq!(different.last().unwrap().file_name().unwrap(), "0008");
    }
}
