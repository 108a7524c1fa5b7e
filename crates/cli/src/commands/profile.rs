//! `ironhorse profile`

mod group;
mod ranks;
mod trace;

use super::workload::{Inputs, Utilization, Workload, flops_before, limits_after, memory_map};
use crate::args::{Dtype, FlagValue, ShardArg, StateArgs, heading, json_help};
use crate::hardware::{MadeBy, human_bytes};
use crate::{Outcome, number, out};
use anyhow::Result;
use clap::Args;
use group::{Group, Style, Work, groups, idle, joined, kinds, of_kernels, of_ops, size, table};
use ironhorse::core::{EngineExt, Limits, Program, Section};
use ironhorse::train::bench::{Recording, profile_steps, time_steps};
use ironhorse::train::picture::{Bar, Bars, bars_svg};
use ironhorse::train::session::Session;
use ranks::Exchanged;
use serde::Serialize;
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Times each op and kernel of a training step and shows where the time goes, compared with the limits of the device
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse profile --model d12 --batch 4 --seq 64\n  \
                        ironhorse profile --model d12 --seq 1024 --batch 1 --json profile.json\n  \
                        ironhorse profile --model d12 --svg profile.svg\n  \
                        ironhorse profile --device cuda --batch 64 --seq 1024 --trace step.json\n  \
                        ironhorse profile --model d12 --batch 4 --seq 64 --ranks 2\n\n\
                        Open the trace at ui.perfetto.dev.")]
pub struct ProfileArgs {
    #[command(flatten)]
    work: Workload,
    /// N processes make the steps together, a micro-step each: shows what they exchange, and how much of it is hidden behind the
    /// backward. On the CPU, or all on the GPU of --device
    #[arg(long, help_heading = heading::RANKS, value_name = "N", value_parser = number::count::<usize>)]
    ranks: Option<usize>,
    /// What each process of --ranks keeps, as `train --shard` [default: state; none with --optimizer muon]
    #[arg(long, help_heading = heading::RANKS, value_enum)]
    shard: Option<ShardArg>,
    /// Rows of each table
    #[arg(long, help_heading = heading::OUTPUT, default_value_t = 30, value_name = "N", value_parser = number::count::<usize>)]
    top: usize,
    /// Write one step as a Chrome trace: what ran when
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write an SVG with the longest ops (on a GPU: kernels) as bars
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[arg(long, help = json_help!("the results, op by op,"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// An op, or several that the engine joined; these come from where the last of them does.
#[derive(Serialize)]
struct OpReport {
    op: String,
    origin: String,
    section: &'static str,
    ms: f64,
    gflops: f64,
    gb_per_s: f64,
    of_possible: f64,
}

/// How busy the device is.
#[derive(Serialize)]
struct Busy {
    /// All kernels of a step.
    kernel_ms: f64,
    /// Part of a normal step in which no kernel runs.
    idle_share: f64,
    /// The recorded step, whose kernels are launched one by one: its length, and the part in which none runs.
    recorded_ms: f64,
    recorded_idle_share: f64,
}

#[derive(Serialize)]
struct ProfileReport {
    model: String,
    device: String,
    gpu: Option<String>,
    dtype: Dtype,
    /// How master weights and moments are stored.
    #[serde(flatten)]
    state: StateArgs,
    batch: usize,
    seq: usize,
    /// A step: on a GPU as training runs it, else the sum of its ops.
    ms: f64,
    tokens_per_s: f64,
    gflops_possible: f64,
    gb_per_s_possible: f64,
    #[serde(flatten)]
    utilization: Utilization,
    top_kernel: Option<String>,
    top_kernel_share: f64,
    busy: Option<Busy>,
    exchanged: Option<Exchanged>,
    memory_use: Map<String, Value>,
    by_kernel: Vec<Group>,
    by_kind: Vec<Group>,
    by_section: Vec<Group>,
    by_layer: Vec<Group>,
    ops: Vec<OpReport>,
    #[serde(flatten)]
    made_by: MadeBy,
}

pub fn run(args: &ProfileArgs, line: &[OsString]) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    out::check_file(args.trace.as_deref())?;
    out::check_file(args.svg.as_deref())?;
    if let Some(outcome) = ranks::run(args, line)? {
        return Ok(outcome);
    }
    let (session, inputs) = args.work.prepare(1)?;
    report(args, session, &inputs)
}

/// Runs the steps and tells about them.
fn report(args: &ProfileArgs, mut session: Session, inputs: &Inputs) -> Result<Outcome> {
    let work = &args.work;
    let (dtype, place) = (work.element()?, session.place());
    let before = flops_before(session.engine(), dtype)?;
    let gpu = session.engine().device().product.clone();
    // Normal steps first: a profiler, once attached, slows them down.
    let step = match gpu {
        Some(_) => Some(time_steps(&mut session, inputs.batch(), &work.scalars(), &work.repeat(1))?.median()),
        None => None,
    };
    let recording = profile_steps(&mut session, inputs.batch(), &work.scalars(), [work.warmup, work.steps])?;
    let memory = session.engine().memory().by_category;
    let limits = limits_after(session.engine(), dtype, before)?;
    let datasheet = session.engine().device().datasheet_flops(dtype);
    let device = session.engine().name().to_owned();
    let program = session.train_program()?;
    let figures =
        Figures { program, recording: &recording, limits, step: step.map(|t| t.as_secs_f64() * 1e3) };
    let (ms, model_flops) = (figures.ms(), inputs.model_flops(&session)?);
    let by_kernel = figures.by_kernel();
    let top = by_kernel.iter().find(|group| group.calls > 0);
    let report = ProfileReport {
        model: work.model_name(),
        device,
        dtype: work.engine.dtype()?,
        state: work.state,
        batch: work.batch,
        seq: work.seq,
        ms,
        tokens_per_s: (place.world * inputs.tokens()) as f64 / ms * 1e3,
        gflops_possible: limits.flops_per_s / 1e9,
        gb_per_s_possible: limits.bytes_per_s / 1e9,
        utilization: Utilization::new(model_flops / (ms / 1e3), datasheet, &limits),
        top_kernel: top.map(|group| group.name.clone()),
        top_kernel_share: top.map_or(0.0, |group| group.share),
        busy: gpu.is_some().then(|| figures.busy()),
        exchanged: Exchanged::new(place, &recording, program),
        memory_use: memory_map(&memory),
        by_kind: figures.by(|ops| kinds(program, ops)),
        by_section: figures.by(|ops| program.nodes()[ops.end - 1].section.name().to_owned()),
        by_layer: figures.by_layer(),
        ops: figures.ops(),
        gpu,
        by_kernel,
        made_by: MadeBy::detect(),
    };
    if !place.leads() {
        return Ok(Outcome::Done);
    }
    print(&report, work, args.top)?;
    if let Some(path) = &args.trace {
        write_trace(path, &report, program, &recording)?;
    }
    if let Some(path) = &args.svg {
        draw(path, &report, args.top)?;
    }
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

/// Draws the longest kernels, or ops where the engine does not tell kernels apart.
fn draw(path: &Path, report: &ProfileReport, top: usize) -> Result<()> {
    let (what, groups) = match report.gpu {
        Some(_) => ("kernel", &report.by_kernel),
        None => ("op", &report.by_kind),
    };
    let bar = |group: &Group| Bar {
        name: group.name.clone(),
        ms: group.ms,
        of_possible: group.known_part(),
        note: format!("{:.1} %", group.share * 100.0),
    };
    let device = report.gpu.as_ref().unwrap_or(&report.device);
    let picture = Bars {
        title: format!("{}: time of a training step by {what}", report.model),
        subtitle: format!(
            "batch {} × {}, {} on {device}, {:.1} ms a step, {}",
            report.batch,
            report.seq,
            report.dtype.name(),
            report.ms,
            report.utilization.text()
        ),
        bars: groups.iter().take(top).map(bar).collect(),
    };
    bars_svg(path, &picture)?;
    out::line(format!("\n{}: the longest {what}s as bars", path.display()))
}

fn write_trace(path: &Path, report: &ProfileReport, program: &Program, recording: &Recording) -> Result<()> {
    let title = format!("{} {}", report.model, report.device);
    let trace = trace::trace(&title, program, &recording.timeline, report.gpu.is_some());
    out::json(Some(path), &trace)?;
    out::line(format!("\n{}: one step, to open at ui.perfetto.dev", path.display()))
}

/// What the tables are made from.
struct Figures<'a> {
    program: &'a Program,
    recording: &'a Recording,
    limits: Limits,
    /// Milliseconds of a normal step, where it was timed.
    step: Option<f64>,
}

impl Figures<'_> {
    fn op_ns(&self) -> Vec<u64> {
        self.recording.op_ns(self.program.range(Section::Update).end)
    }

    fn joined(&self) -> Vec<Range<usize>> {
        joined(&self.recording.kernels, self.op_ns().len())
    }

    fn kernel_ms(&self) -> f64 {
        self.recording.kernels.iter().map(|kernel| kernel.ns as f64 / 1e6).sum()
    }

    fn ms(&self) -> f64 {
        self.step.unwrap_or_else(|| self.kernel_ms())
    }

    /// The whole of which shares are computed. Kernels timed one by one may take longer than a step in which they overlap.
    fn whole_ms(&self) -> f64 {
        self.ms().max(self.kernel_ms())
    }

    /// Adds up by a name of each op, or of several that are joined.
    fn by(&self, name: impl Fn(Range<usize>) -> String) -> Vec<Group> {
        let work = of_ops(self.program, self.joined(), &self.op_ns(), name);
        self.with_idle(groups(work, &self.limits, Some(self.whole_ms())))
    }

    fn by_kernel(&self) -> Vec<Group> {
        let work = of_kernels(self.program, &self.recording.kernels, &self.op_ns(), &self.limits);
        self.with_idle(groups(work, &self.limits, Some(self.whole_ms())))
    }

    fn by_layer(&self) -> Vec<Group> {
        let op_ns = self.op_ns();
        let layers = self.joined().into_iter().flat_map(|ops| {
            let ns: u64 = op_ns[ops.clone()].iter().sum();
            self.of_layers(ops, ns as f64 * 1e-9)
        });
        let mut groups = self.with_idle(groups(layers, &self.limits, Some(self.whole_ms())));
        groups.sort_by_key(|group| layer_order(&group.name));
        groups
    }

    /// The work of joined ops, layer by layer: what a layer adds to those before it, and the same part of the time as it has of the least time
    /// for each.
    fn of_layers(&self, ops: Range<usize>, seconds: f64) -> Vec<(String, Work)> {
        let layer = |op: &usize| layer_of(self.program.origin(&self.program.nodes()[*op]));
        let indices: Vec<usize> = ops.clone().collect();
        let layers: Vec<&[usize]> = indices.chunk_by(|a, b| layer(a) == layer(b)).collect();
        let sizes = layers.iter().map(|of| {
            let [before, with] = [of[0], of[0] + of.len()].map(|end| size(self.program, ops.start..end));
            (with.0 - before.0, with.1 - before.1)
        });
        let sizes: Vec<(u64, u64)> = sizes.collect();
        let least = |(flops, bytes): &(u64, u64)| self.limits.least_seconds(*flops, *bytes);
        let whole: f64 = sizes.iter().map(least).sum();
        let part = |size| if whole > 0.0 { least(size) / whole } else { 1.0 / sizes.len() as f64 };
        let work = |size| Work { seconds: seconds * part(size), size: Some(*size) };
        layers.iter().zip(&sizes).map(|(of, size)| (layer(&of[0]).to_owned(), work(size))).collect()
    }

    /// Adds a row for the rest of the step, if a whole step was timed, so that the rows add up to it.
    fn with_idle(&self, mut groups: Vec<Group>) -> Vec<Group> {
        if self.step.is_some() {
            groups.push(idle(self.whole_ms() - self.kernel_ms(), self.whole_ms()));
        }
        groups
    }

    fn busy(&self) -> Busy {
        let (kernels, step) = (self.kernel_ms(), self.ms());
        let (busy, span) = self.recording.busy_and_span();
        let idle_share =
            |busy: f64, whole: f64| if whole > 0.0 { (1.0 - busy / whole).max(0.0) } else { 0.0 };
        Busy {
            kernel_ms: kernels,
            idle_share: idle_share(kernels, step),
            recorded_ms: span as f64 / 1e6,
            recorded_idle_share: idle_share(busy as f64, span as f64),
        }
    }

    fn ops(&self) -> Vec<OpReport> {
        let times = self.op_ns();
        self.joined()
            .into_iter()
            .map(|ops| {
                let (node, ns) = (&self.program.nodes()[ops.end - 1], times[ops.clone()].iter().sum::<u64>());
                let seconds = ns as f64 * 1e-9;
                let rate = |amount: f64| if ns > 0 { amount / seconds } else { 0.0 };
                let (flops, bytes) = size(self.program, ops.clone());
                OpReport {
                    op: kinds(self.program, ops),
                    origin: self.program.origin(node).to_owned(),
                    section: node.section.name(),
                    ms: seconds * 1e3,
                    gflops: rate(flops as f64 / 1e9),
                    gb_per_s: rate(bytes as f64 / 1e9),
                    of_possible: rate(self.limits.least_seconds(flops, bytes)),
                }
            })
            .collect()
    }
}

/// `h.3.mlp.c_fc` belongs to `h.3`, `layers.3.attn` to `layers.3`; any other origin is its own group.
fn layer_of(origin: &str) -> &str {
    let mut dots = origin.match_indices('.').map(|(at, _)| at);
    let end = dots.next().and_then(|_| dots.next()).unwrap_or(origin.len());
    if layer_number(&origin[..end]).is_some() { &origin[..end] } else { origin }
}

/// The number of `h.3` or `layers.3`.
fn layer_number(name: &str) -> Option<usize> {
    let (stack, number) = name.split_once('.')?;
    number.parse().ok().filter(|_| ["h", "layers"].contains(&stack))
}

/// Model order: embedding, layers by number, then the rest, idle time last.
fn layer_order(name: &str) -> (usize, usize, String) {
    match (name, layer_number(name)) {
        (_, Some(layer)) => (1, layer, String::new()),
        ("embed", _) => (0, 0, String::new()),
        ("idle", _) => (3, 0, String::new()),
        (other, _) => (2, 0, other.to_owned()),
    }
}

fn print(report: &ProfileReport, work: &Workload, top: usize) -> Result<()> {
    let head = format!("{}  batch {} × {}", report.model, report.batch, report.seq);
    let style = Style { tera: report.gpu.is_some(), top };
    match (&report.gpu, &report.busy) {
        (Some(gpu), Some(busy)) => print_gpu(report, &head, gpu, busy)?,
        _ => {
            out::line(format!("{head}  {:.1} ms a step, op by op (median of {})", report.ms, work.steps))?;
            out::line(format!(
                "{}; measured peaks: {:.0} GFLOP/s, {:.1} GB/s\n",
                report.utilization.text(),
                report.gflops_possible,
                report.gb_per_s_possible
            ))?;
        }
    }
    if let Some(exchanged) = &report.exchanged {
        out::line(exchanged.text() + "\n")?;
    }
    if report.gpu.is_some() {
        table("kernel", &report.by_kernel, style)?;
        out::line("")?;
    }
    table("op", &report.by_kind, style)?;
    if report.gpu.is_some() {
        out::line("")?;
        table("section", &report.by_section, style)?;
    }
    out::line("")?;
    table("layer", &report.by_layer, Style { top: usize::MAX, ..style })?;
    if report.gpu.is_some() {
        out::line("\nmemory on the device")?;
        for (name, bytes) in &report.memory_use {
            let bytes = bytes.as_u64().unwrap_or(0);
            out::line(format!("{name:<24} {:>12}", human_bytes(bytes)))?;
        }
        let all = report.memory_use.values().filter_map(Value::as_u64).sum();
        out::line(format!("{:<24} {:>12}", "all", human_bytes(all)))?;
    }
    Ok(())
}

fn print_gpu(report: &ProfileReport, head: &str, gpu: &str, busy: &Busy) -> Result<()> {
    out::line(format!("{head}  {} {}  {gpu}", report.device, report.dtype.name()))?;
    out::line(format!(
        "{:.2} ms a step  {:.0} tokens/s  {}  top kernel {:.1} %",
        report.ms,
        report.tokens_per_s,
        report.utilization.text(),
        report.top_kernel_share * 100.0
    ))?;
    out::line(format!(
        "GPU busy {:.2} ms of a {:.2} ms step: {:.1} % idle; launched one by one {:.2} ms, {:.1} % idle",
        busy.kernel_ms,
        report.ms,
        busy.idle_share * 100.0,
        busy.recorded_ms,
        busy.recorded_idle_share * 100.0
    ))?;
    out::line(format!(
        "measured peaks: {:.0} TFLOP/s, {:.2} TB/s\n",
        report.gflops_possible / 1e3,
        report.gb_per_s_possible / 1e3
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse::core::{Builder, DType, Timed, op::CopySlot};

    #[test]
    fn ops_belong_to_layers_of_every_family_in_the_order_of_the_model() {
        let origins = [
            "lm_head",
            "layers.10.attn",
            "h.2.mlp.c_fc",
            "layers.2.experts.w2",
            "layers.x.y",
            "embed",
            "idle",
            "h.0",
        ];
        let mut layers = origins.map(layer_of);
        assert_eq!(layers, ["lm_head", "layers.10", "h.2", "layers.2", "layers.x.y", "embed", "idle", "h.0"]);
        layers.sort_by_key(|name| layer_order(name));
        assert_eq!(layers, ["embed", "h.0", "h.2", "layers.2", "layers.10", "layers.x.y", "lm_head", "idle"]);
    }

    /// Three ops of one size, of which the last two are one kernel; the third only reads what the second wrote, so that half of its
    /// bytes are spared.
    #[test]
    fn layers_share_the_time_of_ops_that_are_joined() {
        let mut b = Builder::new();
        let [x, mid, out] = ["x", "mid", "out"].map(|name| b.io(name, [64, 64], DType::F32));
        for (layer, inp, to) in [("h.1.mlp", out, x), ("h.1.ln_1", x, mid), ("h.0.mlp", mid, out)] {
            b.at(layer);
            b.push(CopySlot { out: to, inp }).unwrap();
        }
        let program = b.finish().unwrap();
        let kernel = |first, op, ns| Timed { op, first, name: "kernel".into(), start_ns: 0, ns };
        let recording =
            Recording { kernels: vec![kernel(0, 0, 10_000), kernel(1, 2, 30_000)], timeline: Vec::new() };
        let limits = Limits { flops_per_s: 1e9, bytes_per_s: 1e9 };
        let figures = Figures { program: &program, recording: &recording, limits, step: None };
        let found = figures.by_layer();
        let microseconds = |group: &Group| (group.ms * 1e3).round() as u64;
        let found: Vec<_> = found.iter().map(|group| (group.name.as_str(), microseconds(group))).collect();
        assert_eq!(found, [("h.0", 10), ("h.1", 30)]);
    }
}
