//! `ironhorse plan`

mod choices;
mod cluster;
mod disk;

use self::choices::{Asked, PlanChoice, advice, table};
use self::cluster::{Cluster, ClusterArgs, Workload};
use self::disk::Disk;
use super::workload::parameters_text;
use crate::args::{Dtype, FlagValue, LoraArgs, RecomputeArg, StateArgs, heading, json_help, model_help};
use crate::hardware::{BESIDE_POOLS, human_bytes, memory, usable_of_gpu};
use crate::{Outcome, number, out};
use anyhow::Result;
use clap::Args;
use ironhorse::Device;
use ironhorse::core::{EngineExt, Limits, Node, Pool, Section};
use ironhorse::cpu::CpuSettings;
use ironhorse::cuda::Settings;
use ironhorse::train::format::ModelChoice;
use ironhorse::train::model::{Adapted, StepOptions};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What a step of one micro-step runs; sums are between several.
const IN_A_MICRO_STEP: [Section; 3] = [Section::Forward, Section::Backward, Section::Update];

/// Prints the memory and time that a training step needs, without running it
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse plan --model d12 --batch 4 --seq 1024\n  \
                        ironhorse plan --model d12 --batch 64 --seq 1024 --dtype bf16\n  \
                        ironhorse plan --model d12 --batch 64 --seq 1024 --dtype bf16 --optimizer muon\n  \
                        ironhorse plan --model d48 --batch 1 --seq 1024 --recompute full\n  \
                        ironhorse plan --model moe-6.9b --batch 8 --seq 1024 --dtype bf16 --recompute experts\n  \
                        ironhorse plan --model qwen3-8b --batch 8 --seq 2048 --dtype bf16 --lora 16 --memory 139GiB\n  \
                        ironhorse plan --model moe-6.9b --batch 16 --seq 1024 --dtype bf16 --master residual --moments bf16 --memory 139GiB\n  \
                        ironhorse plan --model llama3.1-8b --batch 2 --seq 4096 --gpus 8 --nodes 8 --accumulate 64 --memory 139GiB")]
pub struct PlanArgs {
    #[arg(long, help = model_help("or weights"), help_heading = heading::MODEL, default_value = "d12", value_name = "NAME")]
    model: String,
    /// Micro-batch size: sequences of one forward and backward pass
    #[arg(long, help_heading = heading::STEPS, default_value_t = 4, value_name = "B", value_parser = number::count::<usize>)]
    batch: usize,
    /// Sequence length in tokens
    #[arg(long, help_heading = heading::STEPS, default_value_t = 64, value_name = "T", value_parser = number::count::<usize>)]
    seq: usize,
    /// Activation checkpointing: what the backward pass recomputes instead of keeping it in memory
    #[arg(long, help_heading = heading::MEMORY, value_enum, default_value_t = RecomputeArg::None)]
    recompute: RecomputeArg,
    /// Into how many parts the tokens of a micro-batch are cut for the output head and the loss: the logits of one part only need memory
    #[arg(long, help_heading = heading::MEMORY, default_value_t = 1, value_name = "N", value_parser = number::count::<usize>)]
    head_chunks: usize,
    /// Dropout of GPT-2, as `train --dropout`
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 0.0, value_name = "P", value_parser = number::below_1::<f64>)]
    dropout: f64,
    /// Gradient accumulation: micro-steps that make up one optimizer step, of all GPUs together; with bf16 weights gradients
    /// are then f32 [default: 1, or one for each of --gpus]
    #[arg(long, help_heading = heading::STEPS, value_name = "N", value_parser = number::count::<u32>)]
    accumulate: Option<u32>,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    adapters: LoraArgs,
    #[command(flatten)]
    state: StateArgs,
    /// Checkpoints that are kept besides the best one, as `train --keep`; 0 keeps all
    #[arg(long, help_heading = heading::CHECKPOINTS, default_value_t = 2, value_name = "K", value_parser = number::count_or_0::<usize>)]
    keep: usize,
    /// Memory of the device to plan for, such as 139GiB [default: that of the device here]
    #[arg(long, help_heading = heading::DEVICE, value_name = "SIZE", value_parser = number::bytes)]
    memory: Option<u64>,
    /// Where it would run: auto, cpu, cuda or cuda:N
    #[arg(long, help_heading = heading::DEVICE, default_value = "auto", value_name = "DEVICE")]
    device: String,
    /// Precision to plan for; this machine need not support it [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, help_heading = heading::DEVICE, value_enum)]
    dtype: Option<Dtype>,
    /// Threads to measure this machine's limits with; 0 means one for each core
    #[arg(long, help_heading = heading::DEVICE, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    threads: usize,
    #[arg(long, help = json_help!("the results"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct PlanReport {
    model: String,
    device: String,
    dtype: Dtype,
    recompute: RecomputeArg,
    head_chunks: usize,
    #[serde(flatten)]
    state: StateArgs,
    parameters: usize,
    /// Parameters used for one token: all except the experts it is not sent to. `None` where that is all of them.
    active_parameters: Option<usize>,
    /// Parameters that are trained: all, or those of the adapters.
    trained_parameters: usize,
    batch: usize,
    seq: usize,
    ops: usize,
    bytes: BTreeMap<&'static str, usize>,
    total_bytes: usize,
    /// What a run holds: that and, on a GPU, about what its libraries need.
    held_bytes: u64,
    /// What the device has, or `--memory`.
    machine_bytes: Option<u64>,
    /// The part of it that a run may use; the rest is for the GPU's libraries.
    usable_bytes: Option<u64>,
    activation_lower_bound: usize,
    flops: u64,
    disk: Disk,
    /// What each way to keep state and each level of recomputation would need, for the rest of what was asked for.
    choices: Vec<PlanChoice>,
    /// The time at the limits measured on this machine; absent if it has no engine for the precision.
    least_ms: Option<f64>,
    /// With `--gpus`: what a rank needs, and how long a step takes.
    ranks: Option<Cluster>,
}

/// The device's memory and, if it can compute in this precision, its limits.
fn look(args: &PlanArgs, device: Device, dtype: Dtype) -> Result<(Option<u64>, Option<Limits>)> {
    let cpu = CpuSettings { threads: args.threads, operands: dtype.operands() };
    let mut engine = device.engine(cpu, &Settings { tf32: dtype == Dtype::Tf32, ..Settings::default() })?;
    let has = args.memory.or(engine.memory().free.map(|free| free as u64)).or_else(memory);
    let runs = device != Device::Cpu || is_of_cpu(dtype);
    let limits = runs.then(|| engine.measure_limits(dtype.precision(1).weights)).transpose()?;
    Ok((has, limits))
}

/// Whether the CPU engine computes in exactly this precision. (What it makes of `bf16` is another one, which needs other memory.)
fn is_of_cpu(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::Bf16Products)
}

/// What a GPU's libraries take of its memory, in words.
fn besides(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(", {} of which its libraries need", human_bytes(bytes)) }
}

pub fn run(args: &PlanArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let choice = ModelChoice::parse(&args.model)?;
    let device = args.device.parse::<Device>()?.resolve();
    let on_cpu = device == Device::Cpu && args.cluster.gpus.is_none();
    let dtype = args.dtype.unwrap_or(if on_cpu { Dtype::F32 } else { Dtype::Bf16 });
    let config = choice.config();
    let accumulate =
        args.accumulate.unwrap_or_else(|| u32::try_from(args.cluster.world()).unwrap_or(u32::MAX));
    let precision = args.state.precision(dtype, accumulate)?;
    let batch = (args.batch, args.seq);
    let dropout = number::drop_rate(args.dropout)?;
    let model = Adapted { config, lora: args.adapters.lora(&config)? };
    let sums = Some(args.cluster.sums(0, accumulate, precision.optimizer));
    let (recompute, head_chunks) = (args.recompute.into(), args.head_chunks);
    let options = StepOptions { recompute, head_chunks, dropout, sums, ..StepOptions::default() };
    let program = model.training(batch, options, precision)?;
    let (machine_bytes, limits) = look(args, device, dtype)?;
    // what this machine has no engine for is planned for a GPU
    let on_gpu = !on_cpu || !is_of_cpu(dtype);
    let usable_bytes = machine_bytes.map(|has| if on_gpu { usable_of_gpu(has) } else { has });
    let (optimizer, fp8, room) = (args.state.optimizer, args.state.fp8, usable_bytes);
    let asked =
        Asked { model: &model, batch, accumulate, sums, head_chunks, dtype, optimizer, fp8, dropout, room };
    let asked_for = (args.recompute, head_chunks, args.state);
    let work = Workload { model: &model, batch, accumulate, precision, options, limits };
    let ranks = args.cluster.plan(&work)?;
    let layout = program.layout();
    let least = |limits: &Limits| -> f64 {
        let seconds = |node: &Node| limits.least_seconds(node.op.flops(), node.op.bytes());
        1e3 * IN_A_MICRO_STEP
            .iter()
            .flat_map(|&part| &program.nodes()[program.range(part)])
            .map(seconds)
            .sum::<f64>()
    };
    let report = PlanReport {
        model: args.model.clone(),
        device: device.to_string(),
        dtype,
        recompute: args.recompute,
        head_chunks,
        state: args.state,
        parameters: config.told_params(),
        active_parameters: config.active_params(),
        trained_parameters: model.trained_params(),
        batch: args.batch,
        seq: args.seq,
        ops: program.nodes().len(),
        bytes: Pool::ALL.iter().map(|&pool| (pool.name(), layout.bytes(pool))).collect(),
        total_bytes: layout.total(),
        held_bytes: layout.total() as u64 + if on_gpu { BESIDE_POOLS } else { 0 },
        machine_bytes,
        usable_bytes,
        activation_lower_bound: program.activation_lower_bound(),
        flops: IN_A_MICRO_STEP.iter().map(|&section| program.flops(section)).sum(),
        disk: Disk::new(&model, precision, layout, args.keep),
        choices: asked.choices()?,
        least_ms: limits.as_ref().map(least),
        ranks,
    };
    out::line(format!(
        "{}  {}  {} ops  {} {}{}",
        report.model,
        parameters_text(report.parameters, report.active_parameters),
        report.ops,
        report.device,
        dtype.name(),
        args.state.text() + &args.adapters.text()
    ))?;
    for pool in Pool::ALL.into_iter().filter(|&pool| layout.bytes(pool) > 0) {
        out::line(format!("{:<20} {:>12}", pool.name(), human_bytes(layout.bytes(pool) as u64)))?;
    }
    let whose = if args.memory.is_some() { "--memory".into() } else { device.to_string() };
    let fits = match (report.machine_bytes, report.usable_bytes) {
        (Some(has), Some(room)) if report.total_bytes as u64 > room => {
            format!("  does not fit: {whose} has {}{}", human_bytes(has), besides(has - room))
        }
        (Some(has), Some(room)) => format!("  of the {} of {whose}{}", human_bytes(has), besides(has - room)),
        _ => String::new(),
    };
    out::line(format!("{:<20} {:>12}{fits}", "total", human_bytes(report.total_bytes as u64)))?;
    if on_gpu {
        let with = format!("with about {} of the GPU's libraries", human_bytes(BESIDE_POOLS));
        out::line(format!("{:<20} {:>12}  {with}", "held", human_bytes(report.held_bytes)))?;
    }
    let unused = layout.bytes(Pool::Activations) - report.activation_lower_bound;
    if unused > 0 {
        out::line(format!(
            "activations: at most {} are needed at once, the layout adds {}",
            human_bytes(report.activation_lower_bound as u64),
            human_bytes(unused as u64)
        ))?;
    }
    out::line("")?;
    table(&report.choices, asked_for).into_iter().try_for_each(out::line)?;
    out::line(advice(&report.choices, asked_for))?;
    out::line("")?;
    report.disk.lines().into_iter().try_for_each(out::line)?;
    let time = match (&limits, report.least_ms) {
        (Some(limits), Some(ms)) => format!(
            "at the measured {:.0} GFLOP/s and {:.1} GB/s of {device} it takes at least {ms:.0} ms",
            limits.flops_per_s / 1e9,
            limits.bytes_per_s / 1e9
        ),
        _ if dtype == Dtype::Bf16 => "its time was not measured: this plan is for a GPU, which is not here; --dtype bf16-products is what the \
                                      CPU makes of bf16"
            .into(),
        _ => format!("its time was not measured: {device} does not compute in {}", dtype.name()),
    };
    out::line(format!("a step needs {:.1} GFLOP; {time}", report.flops as f64 / 1e9))?;
    if let Some(ranks) = &report.ranks {
        out::line("")?;
        ranks.lines().into_iter().try_for_each(out::line)?;
    }
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}
