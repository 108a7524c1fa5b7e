//! `ironhorse bench`

use crate::args::{EngineArgs, StateArgs};
use crate::hardware::{COMMIT, Hardware, VERSION, check_memory, human_bytes, peak_rss};
use crate::{Outcome, number, out};
use anyhow::{Result, bail};
use clap::Args;
use ironhorse::core::{DType, Engine, Limits, Pool, Program, Scalars, Section};
use ironhorse::train::bench::{Repeat, Timing, time_steps};
use ironhorse::train::format::ModelChoice;
use ironhorse::train::format::debug_state::DebugState;
use ironhorse::train::format::safetensors::SafeTensors;
use ironhorse::train::format::{Kind, sniff};
use ironhorse::train::model::ModelConfig;
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Session, SessionSpec};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The most steps to time.
const MOST_STEPS: u64 = 1_000_000;

/// What `bench` and `profile` run.
#[derive(Args)]
pub struct Workload {
    /// d12, d24, d36, d48, moe-tiny, moe-6.9b, sizes such as n_layer=2,n_head=4,n_embd=64, a TOML file, or weights
    #[arg(long, default_value = "d12", value_name = "NAME")]
    pub model: String,
    /// A debug state or a safetensors file whose tokens, x and y, to train on; random tokens if not given
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// B: sequences per step
    #[arg(long, default_value_t = 4, value_name = "B", value_parser = number::count::<usize>)]
    pub batch: usize,
    /// T: tokens per sequence
    #[arg(long, default_value_t = 64, value_name = "T", value_parser = number::count::<usize>)]
    pub seq: usize,
    /// Steps to time, at least
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = number::whole::<usize>(1..=MOST_STEPS))]
    pub steps: usize,
    /// Seconds to time, at least: a GPU slows down once it is warm
    #[arg(long, default_value_t = 0.0, value_name = "S", value_parser = number::at_least_0::<f32>)]
    pub seconds: f32,
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
    pub state: StateArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl Workload {
    /// The model on the engine, with weights, and a batch of (x, y).
    pub fn prepare(&self) -> Result<(Session, Vec<i32>, Vec<i32>)> {
        let engine = self.engine.engine()?;
        let choice = ModelChoice::parse(&self.model)?;
        let config = choice.config();
        let spec = SessionSpec {
            train: Some((self.batch, self.seq)),
            recompute: self.recompute.into(),
            precision: self.state.precision(self.engine.dtype()?, 1)?,
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

    fn tokens(&self, config: &ModelConfig) -> Result<(Vec<i32>, Vec<i32>)> {
        if let Some(path) = &self.data {
            if matches!(sniff(path)?, Kind::SafeTensors | Kind::AnswerKey) {
                return self.tokens_of(&mut SafeTensors::open(path)?, config.vocab_size());
            }
            let mut state = DebugState::open(path, config.gpt2("a debug state", "use an answer key")?)?;
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
        let stream: Vec<i32> = (0..=count).map(|_| rng.index(config.vocab_size()) as i32).collect();
        Ok((stream[..count].to_vec(), stream[1..].to_vec()))
    }

    /// `x` and `y` of a safetensors file, both (B, T).
    fn tokens_of(&self, file: &mut SafeTensors, vocab: usize) -> Result<(Vec<i32>, Vec<i32>)> {
        let mut read = |name: &str| {
            let shape = file.entry(name)?.shape.clone();
            if shape != [self.batch, self.seq] {
                let expected = format!("[{}, {}], --batch and --seq", self.batch, self.seq);
                return Err(file.field(format!("shape of `{name}`"), format!("{shape:?}"), expected));
            }
            let tokens = file.read_i32(name)?;
            match tokens.iter().find(|&&token| usize::try_from(token).map_or(true, |token| token >= vocab)) {
                None => Ok(tokens),
                Some(token) => {
                    Err(file.field(format!("tokens `{name}`"), token, format!("0 to {}", vocab - 1)))
                }
            }
        };
        Ok((read("x")?, read("y")?))
    }

    /// The optimizer's numbers.
    pub fn scalars(&self) -> Scalars {
        Scalars { lr: self.lr, grad_clip: self.grad_clip, ..Scalars::default() }
    }

    /// How often to run.
    pub fn repeat(&self) -> Repeat {
        let time = Duration::try_from_secs_f32(self.seconds).unwrap_or(Duration::MAX);
        Repeat { warmup: self.warmup, steps: self.steps, time }
    }

    /// The name of the model without folders.
    pub fn model_name(&self) -> String {
        std::path::Path::new(&self.model)
            .file_name()
            .map_or_else(|| self.model.clone(), |name| name.to_string_lossy().into_owned())
    }

    /// The element type whose limits count.
    pub fn element(&self) -> Result<DType> {
        Ok(self.engine.dtype()?.precision(1).weights)
    }
}

/// The rate of arithmetic before the work is timed. A machine shared with others is faster at one moment than at
/// another; a GPU is ours alone, and loading its libraries belongs to the time it takes to start.
pub fn flops_before(engine: &mut dyn Engine, dtype: DType) -> Result<f64> {
    if engine.device_name().is_some() { Ok(0.0) } else { Ok(engine.measure_flops(dtype)?) }
}

/// The limits, once the work has been timed.
pub fn limits_after(engine: &mut dyn Engine, dtype: DType, before: f64) -> Result<Limits> {
    let mut limits = engine.measure_limits(dtype)?;
    limits.flops_per_s = limits.flops_per_s.max(before);
    Ok(limits)
}

/// Operations of a whole step.
pub fn step_flops(program: &Program) -> f64 {
    Section::ALL.iter().map(|&section| program.flops(section)).sum::<u64>() as f64
}

/// Memory by category, for JSON.
pub fn memory_map(memory: &[(String, usize)]) -> Map<String, Value> {
    memory.iter().map(|(name, bytes)| (name.clone(), (*bytes).into())).collect()
}

/// Times whole training steps: forward, backward, gradient norm, AdamW
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse bench --model d12 --batch 4 --seq 64 --threads 2\n  \
                        ironhorse bench --device cuda --model d12 --batch 64 --seq 1024 --fast --seconds 5\n  \
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
    /// Those that one token meets, where that is not all of them.
    active_parameters: Option<usize>,
    device: String,
    /// The GPU's name.
    gpu: Option<String>,
    dtype: crate::args::Dtype,
    /// How masters and moments are kept.
    #[serde(flatten)]
    state: StateArgs,
    recompute: super::verify::RecomputeArg,
    fast: bool,
    attention: crate::args::AttentionArg,
    threads: usize,
    batch: usize,
    seq: usize,
    steps: usize,
    ms_per_step: f64,
    ms_mean: f64,
    ms_fastest: f64,
    /// Every timed step, in order.
    step_ms: Vec<f64>,
    /// From the start of the command to the end of the first step.
    startup_s: f64,
    first_step_ms: f64,
    tokens_per_s: f64,
    gflops: f64,
    gflops_possible: f64,
    gb_per_s_possible: f64,
    /// Of what was measured as possible.
    mfu: f64,
    /// Of what the maker of the GPU promises.
    mfu_datasheet: Option<f64>,
    peak_bytes: u64,
    /// Where the peak comes from: `device` (the GPU's memory), `process` (what the system says it held at most) or
    /// `plan`.
    peak_source: &'static str,
    peak_device_bytes: Option<u64>,
    memory_use: Map<String, Value>,
    /// What the engine held at most before the first step was done, while it chose algorithms.
    startup_peak_bytes: Option<u64>,
    planned_bytes: usize,
    loss: f32,
    losses: Vec<f32>,
    version: &'static str,
    commit: &'static str,
    hardware: Hardware,
}

pub fn run(args: &BenchArgs) -> Result<Outcome> {
    let start = Instant::now();
    out::check_json(args.json.as_deref())?;
    let work = &args.work;
    let dtype = work.element()?;
    let (mut session, x, y) = work.prepare()?;
    let measuring = Instant::now();
    let before = flops_before(session.engine(), dtype)?;
    let measuring = measuring.elapsed();
    let timing = time_steps(&mut session, [&x, &y], &work.scalars(), &work.repeat())?;
    let startup = timing.first_done.map_or(Duration::ZERO, |done| (done - start).saturating_sub(measuring));
    let peak = peak_rss(); // before the limits are measured, which take memory of their own
    let memory = session.engine().memory_use();
    let limits = limits_after(session.engine(), dtype, before)?;
    let report = report(work, &mut session, &timing, Measured { startup, peak, memory, limits, dtype })?;
    print(&report)?;
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

/// What is measured beside the steps.
struct Measured {
    startup: Duration,
    peak: Option<u64>,
    memory: Vec<(String, usize)>,
    limits: Limits,
    dtype: DType,
}

fn report(
    work: &Workload,
    session: &mut Session,
    timing: &Timing,
    measured: Measured,
) -> Result<BenchReport> {
    let Measured { startup, peak, memory, limits, dtype } = measured;
    let program = session.train_program()?;
    let (planned_bytes, flops) = (program.layout().total(), step_flops(program));
    let (parameters, active_parameters) = (session.config().told_params(), session.config().active_params());
    let engine = session.engine();
    let gpu = engine.device_name();
    let on_device = memory.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>();
    let on_device = gpu.is_some().then_some(on_device);
    let (peak_bytes, peak_source) = match (on_device, peak) {
        (Some(bytes), _) => (bytes, "device"),
        (None, Some(bytes)) => (bytes, "process"),
        (None, None) => (planned_bytes as u64, "plan"),
    };
    let seconds = timing.median().as_secs_f64();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    Ok(BenchReport {
        model: work.model_name(),
        parameters,
        active_parameters,
        device: engine.name().to_owned(),
        gpu,
        dtype: work.engine.dtype()?,
        state: work.state,
        recompute: work.recompute,
        fast: work.engine.fast,
        attention: work.engine.attention,
        threads: work.engine.thread_count(),
        batch: work.batch,
        seq: work.seq,
        steps: timing.steps.len(),
        ms_per_step: seconds * 1e3,
        ms_mean: ms(timing.mean()),
        ms_fastest: ms(timing.steps.iter().min().copied().unwrap_or_default()),
        step_ms: timing.steps.iter().map(|&step| ms(step)).collect(),
        startup_s: startup.as_secs_f64(),
        first_step_ms: ms(timing.first),
        tokens_per_s: (work.batch * work.seq) as f64 / seconds,
        gflops: flops / seconds / 1e9,
        gflops_possible: limits.flops_per_s / 1e9,
        gb_per_s_possible: limits.bytes_per_s / 1e9,
        mfu: flops / seconds / limits.flops_per_s,
        mfu_datasheet: engine.datasheet_flops(dtype).map(|peak| flops / seconds / peak),
        peak_bytes,
        peak_source,
        peak_device_bytes: on_device,
        memory_use: memory_map(&memory),
        startup_peak_bytes: on_device.map(|bytes| bytes + engine.memory_freed() as u64),
        planned_bytes,
        loss: timing.losses.last().copied().unwrap_or(f32::NAN),
        losses: timing.losses.clone(),
        version: VERSION,
        commit: COMMIT,
        hardware: Hardware::detect(),
    })
}

fn print(report: &BenchReport) -> Result<()> {
    let with = match &report.gpu {
        Some(gpu) => gpu.clone(),
        None => format!("{} threads", report.threads),
    };
    out::line(format!(
        "{}  {} parameters{}  batch {} × {}  {} {}{}  {with}",
        report.model,
        report.parameters,
        report.active_parameters.map_or_else(String::new, |active| format!(" ({active} active)")),
        report.batch,
        report.seq,
        report.device,
        report.dtype.name(),
        report.state.text(),
    ))?;
    out::line(format!(
        "step      {:.1} ms (median of {}; mean {:.1}, fastest {:.1})",
        report.ms_per_step, report.steps, report.ms_mean, report.ms_fastest
    ))?;
    out::line(format!("speed     {:.0} tokens/s", report.tokens_per_s))?;
    let datasheet = report
        .mfu_datasheet
        .map_or_else(String::new, |mfu| format!("; MFU {:.1} % of the datasheet's peak", mfu * 100.0));
    out::line(format!(
        "compute   {:.0} GFLOP/s, {:.0} % of the {:.0} measured as possible{datasheet}",
        report.gflops,
        report.mfu * 100.0,
        report.gflops_possible
    ))?;
    let searching = report.startup_peak_bytes.filter(|&bytes| bytes > report.peak_bytes);
    let searching = searching
        .map_or_else(String::new, |bytes| format!("; {} while algorithms were chosen", human_bytes(bytes)));
    out::line(format!(
        "memory    {} at the peak of the steps, {} planned{searching}",
        human_bytes(report.peak_bytes),
        human_bytes(report.planned_bytes as u64)
    ))?;
    out::line(format!(
        "start     {:.1} s to the end of the first step, which took {:.1} s",
        report.startup_s,
        report.first_step_ms / 1e3
    ))?;
    out::line(format!("loss      {:.6}", report.loss))
}
