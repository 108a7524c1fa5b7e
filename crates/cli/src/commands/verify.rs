//! `ironhorse verify`

mod ranks;
mod replay;

use super::workload::{Inputs, session_of};
use crate::args::{
    Dtype, EngineArgs, FlagValue, OptimizerArg, RecomputeArg, ShardArg, StateArgs, heading, json_help,
};
use crate::hardware::check_memory;
use crate::{Outcome, number, out};
use anyhow::{Result, bail};
use clap::Args;
use ironhorse::core::{Engine, EngineExt, Scalars};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::format::answer_key::AnswerKey;
use ironhorse::train::format::debug_state::DebugState;
use ironhorse::train::format::{ModelChoice, open_weights};
use ironhorse::train::session::{Batch, Session, SessionSpec};
use ironhorse::train::verify::{
    Damage, KeyReference, Lockstep, LockstepReport, Options, Reference, Report, StateReference, Tolerance,
    load_answers, session_spec, verify,
};
use serde::Serialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The most steps: the optimizer counts them in 32 bits.
const MOST_STEPS: u64 = u32::MAX as u64;

/// How often `--lockstep` runs the step, and the seed of its weights and tokens.
const PASSES: u32 = 2;
const SEED: u64 = 1;

/// Runs the training step of an answer key and compares every tensor with PyTorch's
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    python -m ironhorse.export gpt2 --model d12 --batch 4 --seq 64 --seed 1 --out answers\n  \
    ironhorse verify --model answers/gpt2_d12.bin --state answers/gpt2_d12_debug_state.bin\n  \
    ironhorse verify --key answers/gpt2_d12.key.safetensors --json verify.json\n  \
    python -m ironhorse.export moe --model moe-tiny --batch 2 --seq 32 --out answers\n  \
    ironhorse verify --key answers/moe-tiny.key.safetensors\n  \
    ironhorse verify --key answers/gpt2_d12.key.safetensors --ranks 2 --shard grads\n  \
    ironhorse verify --lockstep --device cuda --dtype bf16 --model d12 --batch 4 --seq 64\n  \
    ironhorse verify --lockstep --device cuda --dtype bf16 --model d12 --batch 2 --seq 512 --documents 100\n  \
    ironhorse verify --replay runs/0001/bad/step-000073\n\n\
    Exit code: 0 all agree, 1 something is wrong, 2 could not run.")]
pub struct VerifyArgs {
    /// Weights: a run, a checkpoint, a Hugging Face folder or a model .bin; with --lockstep also a model's name or
    /// sizes, for random weights
    #[arg(long, help_heading = heading::CHECKS, value_name = "FILE")]
    model: Option<PathBuf>,
    /// llm.c's debug state of that model: one batch with its logits, loss and gradients
    #[arg(long, help_heading = heading::CHECKS, value_name = "FILE", conflicts_with = "key", requires = "model")]
    state: Option<PathBuf>,
    /// An answer key. If --model is given too, its weights must equal those of the key
    #[arg(long, help_heading = heading::CHECKS, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Compute the key's step with N processes, which share the rows of its batch as micro-steps; loss, gradients and updated
    /// weights must be those of the key. All run on the CPU, or on the GPU of --device
    #[arg(long, help_heading = heading::RANKS, value_name = "N", value_parser = number::count::<usize>, requires = "key", conflicts_with_all = ["lockstep", "replay"])]
    ranks: Option<usize>,
    /// What each process of --ranks keeps, as `train --shard` [default: state; none for a key of Muon]
    #[arg(long, help_heading = heading::RANKS, value_enum, requires = "key")]
    shard: Option<ShardArg>,
    /// Compare with the CPU engine instead, op by op from the same inputs
    #[arg(long, help_heading = heading::CHECKS)]
    lockstep: bool,
    /// Run a bad step of a training run again, from its black box RUN/bad/step-N: on the device it ran on (or --device), in
    /// f32 on the CPU and in f64; says whether the data, the numerics or the hardware is at fault
    #[arg(long, help_heading = heading::CHECKS, value_name = "FOLDER", conflicts_with_all = [
        "model", "state", "key", "lockstep", "steps", "tolerance", "loss_tolerance", "recompute", "head_chunks", "dtype", "optimizer", "master",
        "moments",        "fast", "attention", "no_graphs",
    ])]
    replay: Option<PathBuf>,
    /// With --replay: skip the run in f64, which is slow for large models
    #[arg(long, help_heading = heading::CHECKS, requires = "replay")]
    no_oracle: bool,
    /// With --lockstep, without --key and --state: batch size, in sequences of random tokens
    #[arg(long, help_heading = heading::STEPS, value_name = "B", default_value_t = 4, value_parser = number::count::<usize>, requires = "lockstep", conflicts_with_all = ["key", "state"])]
    batch: usize,
    /// With --lockstep, without --key and --state: sequence length in tokens
    #[arg(long, help_heading = heading::STEPS, value_name = "T", default_value_t = 64, value_parser = number::count::<usize>, requires = "lockstep", conflicts_with_all = ["key", "state"])]
    seq: usize,
    /// With --lockstep, without --key and --state: documents of N tokens on average, packed into the sequences
    #[arg(long, help_heading = heading::STEPS, value_name = "N", value_parser = number::count::<usize>, requires = "lockstep", conflicts_with_all = ["key", "state"])]
    documents: Option<usize>,
    /// With --lockstep, without --key and --state: dropout of GPT-2, as `train --dropout`; a key says how often it drops
    #[arg(long, help_heading = heading::STEPS, value_name = "P", default_value_t = 0.0, value_parser = number::below_1::<f64>, requires = "lockstep", conflicts_with_all = ["key", "state"])]
    dropout: f64,
    /// Optimizer steps to run. With a key: how many of its steps to check [default: all]; with a debug state: how
    /// many to take, their losses are printed; with --lockstep: how often to run the step [default: 2]
    #[arg(long, help_heading = heading::STEPS, value_name = "N", value_parser = number::whole::<usize>(0..=MOST_STEPS))]
    steps: Option<usize>,
    /// Tolerance of each tensor in f32, relative by norm; in tf32 and bf16 it is derived from the rounding error of
    /// the precision
    #[arg(long, help_heading = heading::CHECKS, value_name = "X", default_value_t = 1e-5, value_parser = number::at_least_0::<f64>)]
    tolerance: f64,
    /// Largest relative error of the loss
    #[arg(long, help_heading = heading::CHECKS, value_name = "X", default_value_t = 1e-6, value_parser = number::at_least_0::<f64>)]
    loss_tolerance: f64,
    /// Activation checkpointing: what the backward pass recomputes instead of keeping it in memory
    #[arg(long, help_heading = heading::MEMORY, value_enum, default_value_t = RecomputeArg::None)]
    recompute: RecomputeArg,
    /// Into how many parts the tokens of a micro-batch are cut for the output head and the loss: the logits of one part only need memory
    #[arg(long, help_heading = heading::MEMORY, default_value_t = 1, value_name = "N", value_parser = number::count::<usize>)]
    head_chunks: usize,
    #[command(flatten)]
    state_kept: StateArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Only the verdict, not the table
    #[arg(long, help_heading = heading::OUTPUT)]
    quiet: bool,
    #[arg(long, help = json_help!("the table"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What a verification found, and how it ran.
#[derive(Serialize)]
pub struct Verified {
    /// The engine that was checked.
    engine: String,
    dtype: Dtype,
    /// How long the command took, from reading the files to the verdict.
    seconds: f64,
    report: Found,
    /// What to do next.
    hints: Vec<String>,
    /// Optional files that could not be used.
    warnings: Vec<String>,
}

/// Compared with an answer key or debug state, or op by op with the CPU engine.
#[derive(Serialize)]
#[serde(tag = "compared_with", rename_all = "lowercase")]
enum Found {
    Answers(Report),
    Cpu(LockstepReport),
}

impl Verified {
    fn new(report: Found, (engine, dtype): (String, Dtype)) -> Self {
        Self { engine, dtype, seconds: 0.0, report, hints: Vec::new(), warnings: Vec::new() }
    }

    fn passed(&self) -> bool {
        match &self.report {
            Found::Answers(report) => report.passed(),
            Found::Cpu(report) => report.passed(),
        }
    }

    /// The table, or only its last lines.
    pub fn text(&self, quiet: bool) -> String {
        match (&self.report, quiet) {
            (Found::Answers(report), false) => report.to_string(),
            (Found::Answers(report), true) => report.verdict().to_string(),
            (Found::Cpu(report), false) => report.to_string(),
            (Found::Cpu(report), true) => report.verdict().to_string(),
        }
    }
}

pub fn run(args: &VerifyArgs, line: &[OsString]) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    if let Some(path) = &args.replay {
        return replay::run(path, args);
    }
    if let Some(outcome) = ranks::run(args, line)? {
        return Ok(outcome);
    }
    show(args, &compute(args, args.engine()?)?)
}

/// Prints what was found.
fn show(args: &VerifyArgs, done: &Verified) -> Result<Outcome> {
    for warning in &done.warnings {
        out::note(warning);
    }
    match &done.report {
        Found::Answers(report) => out::json(args.json.as_deref(), report)?,
        Found::Cpu(report) => out::json(args.json.as_deref(), report)?,
    }
    out::line(done.text(args.quiet))?;
    for hint in &done.hints {
        out::line(hint)?;
    }
    Ok(if done.passed() { Outcome::Done } else { Outcome::Failed })
}

impl VerifyArgs {
    /// The engine to check; checks nothing else.
    pub fn engine(&self) -> Result<Box<dyn Engine>> {
        self.engine.engine()
    }
}

/// Verifies and prints nothing.
pub fn compute(args: &VerifyArgs, engine: Box<dyn Engine>) -> Result<Verified> {
    let begin = Instant::now();
    if args.replay.is_some() {
        bail!("--replay works only on the command line: ironhorse verify --replay FOLDER");
    }
    if args.ranks.is_some() {
        bail!("--ranks works only on the command line: ironhorse verify --key FILE --ranks N");
    }
    let dtype = args.engine.exact_dtype()?;
    let options = options(args, dtype, 1)?;
    let how = (engine.name().to_owned(), dtype);
    let mut done = if args.lockstep {
        Verified::new(Found::Cpu(lockstep_report(args, engine, &options)?), how)
    } else {
        with_answers(args, engine, &options, how)?
    };
    done.seconds = begin.elapsed().as_secs_f64();
    Ok(done)
}

/// What was asked for, of a step of so many micro-steps.
fn options(args: &VerifyArgs, dtype: Dtype, micro_steps: u32) -> Result<Options> {
    Ok(Options {
        tolerance: Tolerance { tensor: args.tolerance, loss: args.loss_tolerance },
        steps: args.steps,
        recompute: args.recompute.into(),
        head_chunks: args.head_chunks,
        precision: args.state_kept.precision(dtype, micro_steps)?,
        operands: dtype.operands(),
    })
}

fn with_answers(
    args: &VerifyArgs,
    engine: Box<dyn Engine>,
    options: &Options,
    how: (String, Dtype),
) -> Result<Verified> {
    let mut reference = open(args)?;
    check_optimizer(args, reference.as_ref())?;
    check_memory(engine.as_ref(), &reference.config(), &session_spec(reference.as_ref(), options))?;
    let mut report = verify(engine, reference.as_mut(), options, &mut || cpu(args))?;
    let (mut hints, mut warnings) = (Vec::new(), Vec::new());
    if args.key.is_none() && !report.passed() {
        match explain_state(args, &mut report) {
            Ok(hint) => hints.extend(hint),
            Err(error) => warnings.push(format!(
                "the answer key beside the state could not be used: {}",
                crate::failure::one_line(&error)
            )),
        }
    }
    if args.state.is_some() && args.steps > Some(0) {
        let losses: Vec<String> = report.losses.iter().map(|loss| format!("{loss:.6}")).collect();
        hints.push(format!("losses, not compared: {}", losses.join(" ")));
    }
    Ok(Verified { hints, warnings, ..Verified::new(Found::Answers(report), how) })
}

/// The optimizer of a key is the one that its steps were made with.
fn check_optimizer(args: &VerifyArgs, reference: &dyn Reference) -> Result<()> {
    let (asked, has) = (args.state_kept.optimizer, reference.optimizer().optimizer);
    if asked != OptimizerArg::AdamW && has != asked.into() {
        bail!(
            "--optimizer {}: the answers are of {}; leave it out, or export a key with it",
            asked.name(),
            has.name()
        );
    }
    Ok(())
}

fn cpu(args: &VerifyArgs) -> Box<dyn Engine> {
    Box::new(CpuEngine::new(args.engine.threads))
}

fn lockstep_report(args: &VerifyArgs, engine: Box<dyn Engine>, options: &Options) -> Result<LockstepReport> {
    if args.key.is_some() || args.state.is_some() {
        lockstep_with_answers(args, engine, options)
    } else {
        lockstep_with_random(args, engine, options)
    }
}

/// The weights, batch and optimizer of an answer key or debug state.
fn lockstep_with_answers(
    args: &VerifyArgs,
    engine: Box<dyn Engine>,
    options: &Options,
) -> Result<LockstepReport> {
    let mut reference = open(args)?;
    check_optimizer(args, reference.as_ref())?;
    let spec = session_spec(reference.as_ref(), options);
    check_memory(engine.as_ref(), &reference.config(), &spec)?;
    let mut session = Session::new(engine, reference.config(), &spec)?;
    load_answers(&mut session, reference.as_mut())?;
    let (inputs, scalars) = (reference.inputs()?, reference.optimizer().scalars);
    Ok(lockstep(args, inputs.get(), scalars)?.run(&mut session, cpu(args))?)
}

/// Random tokens, and random weights where the model is only sizes.
fn lockstep_with_random(
    args: &VerifyArgs,
    engine: Box<dyn Engine>,
    options: &Options,
) -> Result<LockstepReport> {
    let Some(model) = &args.model else { bail!("give --model NAME or --key FILE with --lockstep") };
    let choice = ModelChoice::parse_os(model.as_os_str())?;
    let config = choice.config();
    let Options { recompute, head_chunks, precision, .. } = *options;
    let train = Some((args.batch, args.seq));
    let dropout = number::drop_rate(args.dropout)?;
    let packed = args.documents.is_some();
    let spec =
        SessionSpec { train, recompute, head_chunks, dropout, packed, precision, ..SessionSpec::default() };
    let mut session = session_of(choice, engine, &spec, SEED)?;
    let inputs = Inputs::random(args.documents, [args.batch, args.seq], &config, SEED)?;
    let scalars = Scalars { lr: 1e-3, weight_decay: 0.1, grad_clip: 1.0, ..Scalars::default() };
    Ok(lockstep(args, inputs.batch(), scalars)?.run(&mut session, cpu(args))?)
}

fn lockstep<'a>(args: &VerifyArgs, batch: Batch<'a>, scalars: Scalars) -> Result<Lockstep<'a>> {
    let passes = args.steps.map_or(PASSES, |steps| u32::try_from(steps).unwrap_or(u32::MAX));
    Ok(Lockstep { batch, scalars, passes, operands: args.engine.exact_dtype()?.operands() })
}

fn open(args: &VerifyArgs) -> Result<Box<dyn Reference>> {
    let model = args.model.as_deref().map(open_weights).transpose()?;
    if let Some(key) = &args.key {
        return Ok(Box::new(KeyReference::new(AnswerKey::open(key)?, model)?));
    }
    let (Some(model), Some(state)) = (model, &args.state) else {
        bail!("give --state FILE with --model, or --key FILE");
    };
    let state = DebugState::open(state, model.config().gpt2("a debug state", "use an answer key")?)?;
    Ok(Box::new(StateReference::new(model, state)))
}

/// A debug state holds no weights and no activations, so it cannot tell a wrong weight from a wrong op. The answer key
/// that our exporter writes beside it can: weights that are not the key's go into the report. Gives what to do next; an
/// error is about that key only, and what was found is valid without it.
fn explain_state(args: &VerifyArgs, report: &mut Report) -> Result<Option<String>> {
    let (Some(model), Some(state)) = (args.model.as_deref(), args.state.as_deref()) else { return Ok(None) };
    let Some(key) = key_beside(state) else {
        return Ok(Some("a debug state has no activations; verify with --key to find the op".into()));
    };
    report.add_damage(weight_damage(model, &key)?);
    Ok(Some(format!("ironhorse verify --key {} --model {} shows the op", key.display(), model.display())))
}

fn weight_damage(model: &Path, key: &Path) -> Result<Vec<Damage>> {
    Ok(KeyReference::new(AnswerKey::open(key)?, Some(open_weights(model)?))?.weight_damage()?)
}

fn key_beside(state: &Path) -> Option<PathBuf> {
    let stem = state.file_name()?.to_str()?.strip_suffix("_debug_state.bin")?;
    let key = state.with_file_name(format!("{stem}.key.safetensors"));
    key.is_file().then_some(key)
}
