//! `ironhorse bench`

mod generate;

use super::workload::{
    Inputs, Packed, Utilization, Workload, flops_before, limits_after, memory_map, parameters_text,
};
use crate::args::{AttentionArg, Dtype, FlagValue, RecomputeArg, StateArgs, heading, json_help};
use crate::hardware::{MadeBy, human_bytes, peak_memory};
use crate::{Outcome, number, out};
use anyhow::Result;
use clap::Args;
use ironhorse::core::{DType, EngineExt, Limits};
use ironhorse::train::bench::{Timing, time_steps};
use ironhorse::train::session::Session;
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Times whole training steps: forward, backward, gradient norm, optimizer
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse bench --model d12 --batch 4 --seq 64 --threads 2\n  \
                        ironhorse bench --device cuda --model d12 --batch 64 --seq 1024 --fast --seconds 5\n  \
                        ironhorse bench --device cuda --model d12 --batch 16 --seq 1024 --documents 200\n  \
                        ironhorse bench --device cuda --model qwen2.5-0.5b --batch 32 --seq 1024 --accumulate 16\n  \
                        ironhorse bench --device cuda --model d48 --generate --batch 1 --seq 256\n  \
                        ironhorse bench --model n_layer=4,n_head=4,n_embd=128,vocab_size=256,max_seq_len=128 --json b.json")]
pub struct BenchArgs {
    #[command(flatten)]
    work: Workload,
    /// Micro-steps per step: gradients accumulate over N batches before each update
    #[arg(long, help_heading = heading::STEPS, default_value_t = 1, value_name = "N", value_parser = number::count::<u32>)]
    accumulate: u32,
    /// Time generating --seq tokens one after the other instead of training steps, for --batch sequences at a time
    #[arg(long, help_heading = heading::STEPS, conflicts_with_all = ["documents", "accumulate"])]
    generate: bool,
    #[arg(long, help = json_help!("the results"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct BenchReport {
    model: String,
    parameters: usize,
    /// Parameters used for one token: all except the experts it is not sent to. `None` where that is all of them.
    active_parameters: Option<usize>,
    device: String,
    /// The GPU's name.
    gpu: Option<String>,
    dtype: Dtype,
    /// How master weights and moments are stored.
    #[serde(flatten)]
    state: StateArgs,
    recompute: RecomputeArg,
    fast: bool,
    attention: AttentionArg,
    threads: usize,
    batch: usize,
    seq: usize,
    /// Micro-steps of a step.
    accumulate: u32,
    steps: usize,
    ms_per_step: f64,
    ms_mean: f64,
    ms_fastest: f64,
    /// Every timed step, in order.
    step_ms: Vec<f64>,
    /// From the start of the command to the end of the first step.
    startup_s: f64,
    first_step_ms: f64,
    /// Tokens per second, padding not counted.
    tokens_per_s: f64,
    /// How the documents were packed, with `--documents`.
    #[serde(skip_serializing_if = "Option::is_none")]
    packed: Option<Packed>,
    /// All operations of a step per second, those of the optimizer and of recomputation included.
    gflops: f64,
    gflops_possible: f64,
    gb_per_s_possible: f64,
    #[serde(flatten)]
    utilization: Utilization,
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
    #[serde(flatten)]
    made_by: MadeBy,
}

pub fn run(args: &BenchArgs) -> Result<Outcome> {
    let start = Instant::now();
    out::check_json(args.json.as_deref())?;
    let work = &args.work;
    if args.generate {
        return generate::run(work, args.json.as_deref());
    }
    let dtype = work.element()?;
    let (mut session, inputs) = work.prepare(args.accumulate)?;
    let measuring = Instant::now();
    let before = flops_before(session.engine(), dtype)?;
    let measuring = measuring.elapsed();
    let timing = time_steps(&mut session, inputs.batch(), &work.scalars(), &work.repeat(args.accumulate))?;
    let startup = timing.first_done.map_or(Duration::ZERO, |done| (done - start).saturating_sub(measuring));
    let peak = peak_memory(); // before the limits are measured, which take memory of their own
    let memory = session.engine().memory().by_category;
    let limits = limits_after(session.engine(), dtype, before)?;
    let measured = Measured { inputs: &inputs, startup, peak, memory, limits, dtype };
    let report = report(args, &mut session, &timing, measured)?;
    print(&report)?;
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

/// What the steps are of, and what is measured beside them.
struct Measured<'a> {
    inputs: &'a Inputs,
    startup: Duration,
    peak: Option<u64>,
    memory: Vec<(String, usize)>,
    limits: Limits,
    dtype: DType,
}

fn report(
    args: &BenchArgs,
    session: &mut Session,
    timing: &Timing,
    measured: Measured<'_>,
) -> Result<BenchReport> {
    let (work, accumulate) = (&args.work, args.accumulate);
    let Measured { inputs, startup, peak, memory, limits, dtype } = measured;
    let program = session.train_program()?;
    let (planned_bytes, flops) = (program.layout().total(), inputs.step_flops(program, accumulate));
    let model_flops = f64::from(accumulate) * inputs.model_flops(session)?;
    let (parameters, active_parameters) = (session.config().told_params(), session.config().active_params());
    let engine = session.engine();
    let gpu = engine.device().product.clone();
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
        fast: work.engine.cuda.fast,
        attention: work.engine.cuda.attention,
        threads: work.engine.thread_count(),
        batch: work.batch,
        seq: work.seq,
        accumulate,
        steps: timing.steps.len(),
        ms_per_step: seconds * 1e3,
        ms_mean: ms(timing.mean()),
        ms_fastest: ms(timing.steps.iter().min().copied().unwrap_or_default()),
        step_ms: timing.steps.iter().map(|&step| ms(step)).collect(),
        startup_s: startup.as_secs_f64(),
        first_step_ms: ms(timing.first),
        tokens_per_s: f64::from(accumulate) * inputs.tokens() as f64 / seconds,
        packed: inputs.packing(),
        gflops: flops / seconds / 1e9,
        gflops_possible: limits.flops_per_s / 1e9,
        gb_per_s_possible: limits.bytes_per_s / 1e9,
        utilization: Utilization::new(model_flops / seconds, engine.device().datasheet_flops(dtype), &limits),
        peak_bytes,
        peak_source,
        peak_device_bytes: on_device,
        memory_use: memory_map(&memory),
        startup_peak_bytes: on_device.map(|bytes| bytes + engine.memory().freed as u64),
        planned_bytes,
        loss: timing.losses.last().copied().unwrap_or(f32::NAN),
        losses: timing.losses.clone(),
        made_by: MadeBy::detect(),
    })
}

fn print(report: &BenchReport) -> Result<()> {
    let with = match &report.gpu {
        Some(gpu) => gpu.clone(),
        None => format!("{} threads", report.threads),
    };
    let micro_steps = match report.accumulate {
        1 => String::new(),
        count => format!(" × {count} micro-steps"),
    };
    out::line(format!(
        "{}  {}  batch {} × {}{}  {} {}{}  {with}",
        report.model,
        parameters_text(report.parameters, report.active_parameters),
        report.batch,
        report.seq,
        micro_steps,
        report.device,
        report.dtype.name(),
        report.state.text(),
    ))?;
    out::line(format!(
        "step      {:.1} ms (median of {}; mean {:.1}, fastest {:.1})",
        report.ms_per_step, report.steps, report.ms_mean, report.ms_fastest
    ))?;
    let padding = report.packed.map_or_else(String::new, |packed| {
        let Packed { documents, tokens, padding } = packed;
        let padding = 100.0 * padding;
        format!(": {tokens} tokens of {documents} documents a step, {padding:.1} % of positions are padding")
    });
    out::line(format!("speed     {:.0} tokens/s{padding}", report.tokens_per_s))?;
    out::line(format!(
        "compute   {:.0} GFLOP/s: {} ({:.0} GFLOP/s)",
        report.gflops,
        report.utilization.text(),
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
