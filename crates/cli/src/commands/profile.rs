//! `ironhorse profile`

use super::bench::Workload;
use crate::hardware::{COMMIT, Hardware, VERSION};
use crate::{Outcome, out};
use anyhow::Result;
use clap::Args;
use ironhorse::core::Program;
use ironhorse::cpu::Limits;
use ironhorse::train::bench::{OpTime, time_ops};
use serde::Serialize;
use std::path::PathBuf;

/// Times each op of a training step and shows where the time goes, beside what this machine could do
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse profile --model d12 --batch 4 --seq 64\n  \
                        ironhorse profile --model d12 --seq 1024 --batch 1 --json profile.json")]
pub struct ProfileArgs {
    #[command(flatten)]
    work: Workload,
    /// Also write the figures, op by op, to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Ops that share a name or a layer.
#[derive(Clone, Serialize)]
struct Group {
    name: String,
    calls: usize,
    ms: f64,
    share: f64,
    gflops: f64,
    gb_per_s: f64,
    /// Time the group would need at the machine's limits, over the time it took.
    of_possible: f64,
    #[serde(skip)]
    flops: f64,
    #[serde(skip)]
    bytes: f64,
    #[serde(skip)]
    least: f64,
}

#[derive(Serialize)]
struct OpReport {
    op: &'static str,
    origin: String,
    section: &'static str,
    ms: f64,
    gflops: f64,
    gb_per_s: f64,
    of_possible: f64,
}

#[derive(Serialize)]
struct ProfileReport {
    model: String,
    batch: usize,
    seq: usize,
    ms: f64,
    gflops_possible: f64,
    gb_per_s_possible: f64,
    by_kind: Vec<Group>,
    by_layer: Vec<Group>,
    ops: Vec<OpReport>,
    version: &'static str,
    commit: &'static str,
    hardware: Hardware,
}

pub fn run(args: &ProfileArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let work = &args.work;
    let (mut session, x, y) = work.prepare()?;
    let before = Limits::measure_flops(work.engine.threads);
    let times = time_ops(&mut session, [&x, &y], &work.scalars(), [work.warmup, work.steps])?;
    let mut limits = Limits::measure(work.engine.threads);
    limits.flops_per_s = limits.flops_per_s.max(before);
    let program = session.train_program()?;
    let by_kind = groups(program, &times, &limits, |program, op| program.nodes()[op].op.name().to_owned());
    let mut by_layer = groups(program, &times, &limits, layer_of);
    by_layer.sort_by_key(|group| layer_order(&group.name));
    let report = ProfileReport {
        model: work.model.clone(),
        batch: work.batch,
        seq: work.seq,
        ms: times.iter().map(|t| t.time.as_secs_f64() * 1e3).sum(),
        gflops_possible: limits.flops_per_s / 1e9,
        gb_per_s_possible: limits.bytes_per_s / 1e9,
        by_kind,
        by_layer,
        ops: times.iter().map(|t| op_report(program, t, &limits)).collect(),
        version: VERSION,
        commit: COMMIT,
        hardware: Hardware::detect(),
    };
    out::line(format!(
        "{}  batch {} × {}  {:.1} ms a step, op by op (median of {})",
        report.model, report.batch, report.seq, report.ms, work.steps
    ))?;
    out::line(format!(
        "possible here: {:.0} GFLOP/s, {:.1} GB/s (measured)\n",
        report.gflops_possible, report.gb_per_s_possible
    ))?;
    table("op", &report.by_kind)?;
    out::line("")?;
    table("layer", &report.by_layer)?;
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

fn groups(
    program: &Program,
    times: &[OpTime],
    limits: &Limits,
    name: impl Fn(&Program, usize) -> String,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for time in times {
        let (op, name) = (&program.nodes()[time.op].op, name(program, time.op));
        let at = groups.iter().position(|group| group.name == name).unwrap_or_else(|| {
            groups.push(Group {
                name,
                calls: 0,
                ms: 0.0,
                share: 0.0,
                gflops: 0.0,
                gb_per_s: 0.0,
                of_possible: 0.0,
                flops: 0.0,
                bytes: 0.0,
                least: 0.0,
            });
            groups.len() - 1
        });
        let group = &mut groups[at];
        group.calls += 1;
        group.ms += time.time.as_secs_f64() * 1e3;
        group.flops += op.flops() as f64;
        group.bytes += op.bytes() as f64;
        group.least += limits.least_seconds(op.flops(), op.bytes());
    }
    let total: f64 = groups.iter().map(|group| group.ms).sum();
    for group in &mut groups {
        let seconds = group.ms / 1e3;
        group.share = group.ms / total;
        group.gflops = group.flops / seconds / 1e9;
        group.gb_per_s = group.bytes / seconds / 1e9;
        group.of_possible = group.least / seconds;
    }
    groups.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    groups
}

fn op_report(program: &Program, time: &OpTime, limits: &Limits) -> OpReport {
    let node = &program.nodes()[time.op];
    let seconds = time.time.as_secs_f64();
    OpReport {
        op: node.op.name(),
        origin: program.origin(node).to_owned(),
        section: node.section.name(),
        ms: seconds * 1e3,
        gflops: node.op.flops() as f64 / seconds / 1e9,
        gb_per_s: node.op.bytes() as f64 / seconds / 1e9,
        of_possible: limits.least_seconds(node.op.flops(), node.op.bytes()) / seconds,
    }
}

/// `h.3.mlp.c_fc` belongs to `h.3`; everything else stands for itself.
fn layer_of(program: &Program, op: usize) -> String {
    let origin = program.origin(&program.nodes()[op]);
    match origin.strip_prefix("h.").and_then(|rest| rest.split_once('.')) {
        Some((layer, _)) => format!("h.{layer}"),
        None => origin.to_owned(),
    }
}

/// Model order: embedding, layers by number, then the rest.
fn layer_order(name: &str) -> (usize, usize, String) {
    match name.strip_prefix("h.").and_then(|layer| layer.parse().ok()) {
        Some(layer) => (1, layer, String::new()),
        None => (if name == "embed" { 0 } else { 2 }, 0, name.to_owned()),
    }
}

fn table(first: &str, groups: &[Group]) -> Result<()> {
    out::line(format!(
        "{first:<24} {:>5} {:>9} {:>6} {:>9} {:>7} {:>12}",
        "calls", "ms", "share", "GFLOP/s", "GB/s", "of possible"
    ))?;
    for g in groups {
        out::line(format!(
            "{:<24} {:>5} {:>9.2} {:>5.1}% {:>9.1} {:>7.1} {:>11.0}%",
            g.name,
            g.calls,
            g.ms,
            g.share * 100.0,
            g.gflops,
            g.gb_per_s,
            g.of_possible * 100.0
        ))?;
    }
    Ok(())
}
