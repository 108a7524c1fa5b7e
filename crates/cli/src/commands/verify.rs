//! `ironhorse verify`

use crate::args::EngineArgs;
use crate::hardware::check_memory;
use crate::{Outcome, number, out};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ironhorse::train::format::answer_key::AnswerKey;
use ironhorse::train::format::debug_state::DebugState;
use ironhorse::train::format::open_weights;
use ironhorse::train::model::gpt2::Recompute;
use ironhorse::train::verify::{
    Damage, KeyReference, Options, Reference, Report, StateReference, Tolerance, session_spec, verify,
};
use std::path::{Path, PathBuf};

/// The most steps: the optimizer counts them in 32 bits.
const MOST_STEPS: u64 = u32::MAX as u64;

/// Computes what an answer key asks and compares every number with PyTorch's
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    python -m ironhorse.export gpt2 --model d12 --batch 4 --seq 64 --seed 1 --out answers\n  \
    ironhorse verify --model answers/gpt2_d12.bin --state answers/gpt2_d12_debug_state.bin\n  \
    ironhorse verify --key answers/gpt2_d12.key.safetensors --json verify.json\n\n\
    Exit code: 0 all agree, 1 something is wrong, 2 could not run.")]
pub struct VerifyArgs {
    /// Weights: a model .bin, a Hugging Face folder, a checkpoint
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// A debug state made from the model
    #[arg(long, value_name = "FILE", conflicts_with = "key", requires = "model")]
    state: Option<PathBuf>,
    /// An answer key; its weights are used unless --model is given, and then both must agree
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Optimizer steps: those of a key to check (all if not given), or of a state to take, for their losses
    #[arg(long, value_name = "N", value_parser = number::whole::<usize>(0..=MOST_STEPS))]
    steps: Option<usize>,
    /// Largest relative error of a tensor, by norm
    #[arg(long, value_name = "X", default_value_t = 1e-5, value_parser = number::at_least_0::<f64>)]
    tolerance: f64,
    /// Largest relative error of the loss
    #[arg(long, value_name = "X", default_value_t = 1e-6, value_parser = number::at_least_0::<f64>)]
    loss_tolerance: f64,
    /// Compute again in the backward instead of keeping
    #[arg(long, value_enum, default_value_t = RecomputeArg::None)]
    recompute: RecomputeArg,
    #[command(flatten)]
    engine: EngineArgs,
    /// Only the verdict, not the table
    #[arg(long)]
    quiet: bool,
    /// Also write the table to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What the backward computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeArg {
    /// Nothing: keep every activation
    None,
    /// GELU
    Gelu,
    /// GELU and layernorm
    Full,
}

impl From<RecomputeArg> for Recompute {
    fn from(arg: RecomputeArg) -> Self {
        match arg {
            RecomputeArg::None => Self::None,
            RecomputeArg::Gelu => Self::Gelu,
            RecomputeArg::Full => Self::Full,
        }
    }
}

pub fn run(args: &VerifyArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let engine = args.engine.engine()?;
    let mut reference = open(args)?;
    let options = Options {
        tolerance: Tolerance { tensor: args.tolerance, loss: args.loss_tolerance },
        steps: args.steps,
        recompute: args.recompute.into(),
        precision: args.engine.exact_dtype()?.precision(1),
    };
    check_memory(engine.as_ref(), reference.config(), &session_spec(reference.as_ref(), &options))?;
    let mut report = verify(engine, reference.as_mut(), &options)?;
    let hint = if args.key.is_none() && !report.passed() { explain_state(args, &mut report) } else { None };
    out::json(args.json.as_deref(), &report)?;
    if args.quiet {
        out::line(report.verdict())?;
    } else {
        out::line(&report)?;
    }
    if let Some(hint) = hint {
        out::line(hint)?;
    }
    if args.state.is_some() && args.steps > Some(0) {
        let losses: Vec<String> = report.losses.iter().map(|loss| format!("{loss:.6}")).collect();
        out::line(format!("losses, not compared: {}", losses.join(" ")))?;
    }
    Ok(if report.passed() { Outcome::Done } else { Outcome::Failed })
}

fn open(args: &VerifyArgs) -> Result<Box<dyn Reference>> {
    let model = args.model.as_deref().map(open_weights).transpose()?;
    if let Some(key) = &args.key {
        return Ok(Box::new(KeyReference::new(AnswerKey::open(key)?, model)?));
    }
    let (Some(model), Some(state)) = (model, &args.state) else {
        bail!("give --state FILE with --model, or --key FILE");
    };
    let state = DebugState::open(state, model.config())?;
    Ok(Box::new(StateReference::new(model, state)))
}

/// A debug state holds no weights and no activations, so it cannot tell a wrong weight from a wrong op. The answer key
/// that our exporter writes beside it can: weights that are not the key's go into the report. Gives what to do next.
fn explain_state(args: &VerifyArgs, report: &mut Report) -> Option<String> {
    let (model, state) = (args.model.as_deref()?, args.state.as_deref()?);
    let Some(key) = key_beside(state) else {
        return Some("a debug state has no activations; verify with --key to find the op".into());
    };
    match weight_damage(model, &key) {
        Ok(damage) => report.add_damage(damage),
        // what was found stands without it
        Err(error) => {
            out::note(format_args!(
                "the answer key beside the state does not help: {}",
                crate::one_line(&error)
            ));
            return None;
        }
    }
    Some(format!("ironhorse verify --key {} --model {} shows the op", key.display(), model.display()))
}

fn weight_damage(model: &Path, key: &Path) -> Result<Vec<Damage>> {
    Ok(KeyReference::new(AnswerKey::open(key)?, Some(open_weights(model)?))?.weight_damage()?)
}

fn key_beside(state: &Path) -> Option<PathBuf> {
    let stem = state.file_name()?.to_str()?.strip_suffix("_debug_state.bin")?;
    let key = state.with_file_name(format!("{stem}.key.safetensors"));
    key.is_file().then_some(key)
}
