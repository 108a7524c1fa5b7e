//! `ironhorse bench`

use crate::args::EngineArgs;
use crate::hardware::{COMMIT, Hardware, VERSION, check_memory, human_bytes, peak_rss};
use crate::{Outcome, number, out};
use anyhow::{Result, bail};
use clap::Args;
use ironhorse::core::{Layout, Pool, Scalars, Section};
use ironhorse::cpu::Limits;
use ironhorse::train::bench::time_steps;
use ironhorse::train::format::ModelChoice;
use ironhorse::train::format::debug_state::DebugState;
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Session, SessionSpec};
use serde::Serialize;
use std::path::PathBuf;

/// The most steps to time.
const MOST_STEPS: u64 = 1_000_000;

/// What `bench` and `profile` run.
#[derive(Args)]
pub struct Workload {
    /// d12, d24, d36, d48, sizes such as n_layer=2,n_head=4,n_embd=64, a TOML file, or weights
    #[arg(long, default_value = "d12", value_name = "NAME")]
    pub model: String,
    /// A debug state whose tokens to train on; random tokens if not given
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// B: sequences per step
    #[arg(long, default_value_t = 4, value_name = "B", value_parser = number::count::<usize>)]
    pub batch: usize,
    /// T: tokens per sequence
    #[arg(long, default_value_t = 64, value_name = "T", value_parser = number::count::<usize>)]
    pub seq: usize,
    /// Steps to time
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = number::whole::<usize>(1..=MOST_STEPS))]
    pub steps: usize,
    /// Steps before timing starts
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = number::whole::<usize>(0..=MOST_STEPS))]
    pub warmup: usize,
    /// Largest gradient norm; 0 turns clipping off
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = number::at_least_0::<f32>)]
    pub grad_clip: f32,
    /// Learning rate
    #[arg(long, default_value_t = 1e-4, value_name = "X", value_parser = number::at_least_0::<f32>)]
    pub lr: f32,
    /// Seed of random weights and tokens
    #[arg(long, default_value_t = 1, value_name = "S", value_parser = number::seed)]
    pub seed: u64,
    /// Compute again in the backward instead of keeping
    #[arg(long, value_enum, default_value_t = super::verify::RecomputeArg::None)]
    pub recompute: super::verify::RecomputeArg,
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl Workload {
    /// The model on the engine, with weights, and a batch of (x, y).
    pub fn prepare(&self) -> Result<(Session, Vec<i32>, Vec<i32>)> {
        let engine = self.engine.engine()?;
        let choice = ModelChoice::parse(&self.model)?;
        let config = *choice.config();
        let spec = SessionSpec {
            train: Some((self.batch, self.seq)),
            recompute: self.recompute.into(),
            precision: self.engine.dtype()?.precision(1),
            ..SessionSpec::default()
        };
        check_memory(engine.as_ref(), &config, &spec)?;
        let (x, y) = self.tokens(&config)?;
        let mut session = Session::new(engine, config, &spec)?;
        match choice {
            ModelChoice::Sizes(_) => session.init(self.seed)?,
            ModelChoice::Weights(mut source) => {
                session.load(Pool::Params, |name, values| source.read_tensor(name, values))?;
            }
        }
        Ok((session, x, y))
    }

    fn tokens(&self, config: &ironhorse::train::model::Gpt2Config) -> Result<(Vec<i32>, Vec<i32>)> {
        if let Some(path) = &self.data {
            let mut state = DebugState::open(path, config)?;
            if (state.batch(), state.seq()) != (self.batch, self.seq) {
                bail!(
                    "{}: holds a batch of {} × {}, expected --batch {} --seq {}",
                    path.display(),
                    state.batch(),
                    state.seq(),
                    self.batch,
                    self.seq
                );
            }
            return Ok((state.x()?, state.y()?));
        }
        let mut rng = Rng::new(self.seed).fork(u64::MAX);
        let count = self.batch * self.seq; // `check_memory` has counted them
        let stream: Vec<i32> = (0..=count).map(|_| rng.index(config.vocab_size) as i32).collect();
        Ok((stream[..count].to_vec(), stream[1..].to_vec()))
    }

    /// The optimizer's numbers.
    pub fn scalars(&self) -> Scalars {
        Scalars { lr: self.lr, grad_clip: self.grad_clip, ..Scalars::default() }
    }
}

/// Times whole training steps: forward, backward, gradient norm, AdamW
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse bench --model d12 --batch 4 --seq 64 --threads 2\n  \
                        ironhorse bench --model n_layer=4,n_head=4,n_embd=128,vocab_size=256,max_seq_len=128 --json b.json")]
pub struct BenchArgs {
    #[command(flatten)]
    work: Workload,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct BenchReport {
    model: String,
    parameters: usize,
    device: String,
    dtype: crate::args::Dtype,
    threads: usize,
    batch: usize,
    seq: usize,
    steps: usize,
    ms_per_step: f64,
    ms_fastest: f64,
    /// Every timed step, in order.
    step_ms: Vec<f64>,
    tokens_per_s: f64,
    gflops: f64,
    gflops_possible: f64,
    mfu: f64,
    peak_bytes: u64,
    /// Where the peak comes from: `process` (what the system says it held at most) or `plan`.
    peak_source: &'static str,
    planned_bytes: usize,
    loss: f32,
    losses: Vec<f32>,
    version: &'static str,
    commit: &'static str,
    hardware: Hardware,
}

pub fn run(args: &BenchArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let work = &args.work;
    let (mut session, x, y) = work.prepare()?;
    let before = Limits::measure_flops(work.engine.threads);
    let timing = time_steps(&mut session, [&x, &y], &work.scalars(), [work.warmup, work.steps])?;
    let peak = peak_rss(); // before the limits are measured, which take memory of their own
    let mut limits = Limits::measure(work.engine.threads);
    limits.flops_per_s = limits.flops_per_s.max(before);
    let program = session.train_program()?;
    let planned: &Layout = program.layout();
    let planned_bytes = planned.total();
    let flops: u64 = Section::ALL.iter().map(|&section| program.flops(section)).sum();
    let parameters = program.num_params();
    let seconds = timing.median().as_secs_f64();
    let fastest = timing.steps.iter().min().copied().unwrap_or_default();
    let report = BenchReport {
        model: std::path::Path::new(&work.model)
            .file_name()
            .map_or_else(|| work.model.clone(), |name| name.to_string_lossy().into_owned()),
        parameters,
        device: session.engine().name().to_owned(),
        dtype: work.engine.dtype()?,
        threads: work.engine.thread_count(),
        batch: work.batch,
        seq: work.seq,
        steps: work.steps,
        ms_per_step: seconds * 1e3,
        ms_fastest: fastest.as_secs_f64() * 1e3,
        step_ms: timing.steps.iter().map(|step| step.as_secs_f64() * 1e3).collect(),
        tokens_per_s: x.len() as f64 / seconds,
        gflops: flops as f64 / seconds / 1e9,
        gflops_possible: limits.flops_per_s / 1e9,
        mfu: flops as f64 / seconds / limits.flops_per_s,
        peak_bytes: peak.unwrap_or(planned_bytes as u64),
        peak_source: if peak.is_some() { "process" } else { "plan" },
        planned_bytes,
        loss: timing.losses.last().copied().unwrap_or(f32::NAN),
        losses: timing.losses,
        version: VERSION,
        commit: COMMIT,
        hardware: Hardware::detect(),
    };
    out::line(format!(
        "{}  {} parameters  batch {} × {}  {} {}  {} threads",
        report.model,
        report.parameters,
        report.batch,
        report.seq,
        report.device,
        report.dtype.name(),
        report.threads
    ))?;
    out::line(format!(
        "step      {:.1} ms (median of {}; fastest {:.1})",
        report.ms_per_step, report.steps, report.ms_fastest
    ))?;
    out::line(format!("speed     {:.0} tokens/s", report.tokens_per_s))?;
    out::line(format!(
        "compute   {:.0} GFLOP/s, {:.0} % of the {:.0} measured as possible",
        report.gflops,
        report.mfu * 100.0,
        report.gflops_possible
    ))?;
    out::line(format!(
        "memory    {} at the peak, {} planned",
        human_bytes(report.peak_bytes),
        human_bytes(report.planned_bytes as u64)
    ))?;
    out::line(format!("loss      {:.6}", report.loss))?;
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}
