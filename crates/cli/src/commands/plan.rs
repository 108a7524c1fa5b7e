//! `ironhorse plan`

use crate::hardware::{human_bytes, memory};
use crate::{Outcome, number, out};
use anyhow::Result;
use clap::Args;
use ironhorse::core::{Pool, Precision, Section};
use ironhorse::cpu::Limits;
use ironhorse::train::format::ModelChoice;
use ironhorse::train::model::gpt2;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Says how much memory and time a training step needs, without running it
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse plan --model d12 --batch 4 --seq 1024\n  \
                        ironhorse plan --model d48 --batch 1 --seq 1024 --recompute full")]
pub struct PlanArgs {
    /// d12, d24, d36, d48, sizes, a TOML file, or weights
    #[arg(long, default_value = "d12", value_name = "NAME")]
    model: String,
    /// B: sequences per step
    #[arg(long, default_value_t = 4, value_name = "B", value_parser = number::count::<usize>)]
    batch: usize,
    /// T: tokens per sequence
    #[arg(long, default_value_t = 64, value_name = "T", value_parser = number::count::<usize>)]
    seq: usize,
    /// Compute again in the backward instead of keeping
    #[arg(long, value_enum, default_value_t = super::verify::RecomputeArg::None)]
    recompute: super::verify::RecomputeArg,
    /// Threads to measure this machine's limits with; 0 means one for each core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    threads: usize,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct PlanReport {
    model: String,
    parameters: usize,
    batch: usize,
    seq: usize,
    ops: usize,
    bytes: BTreeMap<&'static str, usize>,
    total_bytes: usize,
    machine_bytes: Option<u64>,
    activation_lower_bound: usize,
    flops: u64,
    least_ms: f64,
}

pub fn run(args: &PlanArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let choice = ModelChoice::parse(&args.model)?;
    let program =
        gpt2::training(choice.config(), (args.batch, args.seq), args.recompute.into(), Precision::F32)?;
    let limits = Limits::measure(args.threads);
    let layout = program.layout();
    let least: f64 =
        program.nodes().iter().map(|node| limits.least_seconds(node.op.flops(), node.op.bytes())).sum();
    let report = PlanReport {
        model: args.model.clone(),
        parameters: program.num_params(),
        batch: args.batch,
        seq: args.seq,
        ops: program.nodes().len(),
        bytes: Pool::ALL.iter().map(|&pool| (pool.name(), layout.bytes(pool))).collect(),
        total_bytes: layout.total(),
        machine_bytes: memory(),
        activation_lower_bound: program.activation_lower_bound(),
        flops: Section::ALL.iter().map(|&section| program.flops(section)).sum(),
        least_ms: least * 1e3,
    };
    out::line(format!("{}  {} parameters  {} ops", report.model, report.parameters, report.ops))?;
    for pool in Pool::ALL.into_iter().filter(|&pool| layout.bytes(pool) > 0) {
        out::line(format!("{:<20} {:>12}", pool.name(), human_bytes(layout.bytes(pool) as u64)))?;
    }
    let fits = match report.machine_bytes {
        Some(has) if report.total_bytes as u64 > has => {
            format!("  does not fit: this machine has {}", human_bytes(has))
        }
        Some(has) => format!("  of this machine's {}", human_bytes(has)),
        None => String::new(),
    };
    out::line(format!("{:<20} {:>12}{fits}", "all", human_bytes(report.total_bytes as u64)))?;
    out::line(format!(
        "activations: {} are alive at the fullest op, so the plan wastes {}",
        human_bytes(report.activation_lower_bound as u64),
        human_bytes((layout.bytes(Pool::Activations) - report.activation_lower_bound) as u64)
    ))?;
    out::line(format!(
        "a step needs {:.1} GFLOP; at this machine's {:.0} GFLOP/s and {:.1} GB/s no less than {:.0} ms",
        report.flops as f64 / 1e9,
        limits.flops_per_s / 1e9,
        limits.bytes_per_s / 1e9,
        report.least_ms
    ))?;
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}
