//! `ironhorse bench --generate`

use crate::args::{Dtype, FlagValue};
use crate::commands::workload::{Workload, session_of};
use crate::hardware::MadeBy;
use crate::{Outcome, out};
use anyhow::{Result, bail};
use ironhorse::core::{DType, EngineExt, Limit, Timed};
use ironhorse::train::bench::time_decoding;
use ironhorse::train::format::ModelChoice;
use ironhorse::train::session::SessionSpec;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The fewest tokens before timing starts: kernels are compiled for the first, and the second is recorded as a graph.
const WARMUP: usize = 4;

#[derive(Serialize)]
struct GenerateReport {
    model: String,
    parameters: usize,
    device: String,
    gpu: Option<String>,
    dtype: Dtype,
    batch: usize,
    /// How many were timed.
    tokens: usize,
    ms_per_token: f64,
    ms_mean: f64,
    ms_fastest: f64,
    /// For all sequences together.
    tokens_per_s: f64,
    /// Bytes of the weights that one token is multiplied with.
    weight_bytes: usize,
    gb_per_s: f64,
    gb_per_s_possible: f64,
    of_copy_bandwidth: f64,
    /// The tokens of a single sequence, warm-up included.
    written: Vec<u32>,
    kernels: Vec<KernelTime>,
    #[serde(flatten)]
    made_by: MadeBy,
}

/// All launches of one kernel for one token at the last position, without a graph.
#[derive(Serialize)]
struct KernelTime {
    name: String,
    calls: usize,
    ms: f64,
}

/// Times `--seq` tokens, each of which depends on the one before.
pub(super) fn run(work: &Workload, json: Option<&Path>) -> Result<Outcome> {
    let dtype = work.engine.dtype()?;
    let precision = dtype.precision(1);
    let choice = ModelChoice::parse(&work.model)?;
    let (warmup, context) = (work.warmup.max(WARMUP), choice.config().max_seq_len());
    let positions = warmup.saturating_add(work.seq);
    if positions > context {
        bail!(
            "--seq {} and {warmup} tokens of warm-up are more than the {context} positions of the model; use a smaller --seq",
            work.seq
        );
    }
    let (decode, decode_context) = (Some(work.batch), Some(positions));
    let spec = SessionSpec { decode, decode_context, precision, ..SessionSpec::default() };
    let mut session = session_of(choice, work.engine.engine()?, &spec, work.seed)?;
    let decoding = time_decoding(&mut session, work.batch, [warmup, work.seq])?;
    let timing = decoding.timing;
    let parameters = session.config().told_params();
    let active = session.config().active_params().unwrap_or(parameters);
    let engine = session.engine();
    let possible = engine.measure(Limit::Bandwidth)?;
    let seconds = timing.median().as_secs_f64();
    let weight_bytes = active * if precision.weights == DType::BF16 { 2 } else { 4 };
    let report = GenerateReport {
        model: work.model_name(),
        parameters,
        device: engine.name().to_owned(),
        gpu: engine.device().product.clone(),
        dtype,
        batch: work.batch,
        tokens: timing.steps.len(),
        ms_per_token: seconds * 1e3,
        ms_mean: timing.mean().as_secs_f64() * 1e3,
        ms_fastest: timing.steps.iter().min().map_or(0.0, |time| time.as_secs_f64() * 1e3),
        tokens_per_s: work.batch as f64 / seconds,
        weight_bytes,
        gb_per_s: weight_bytes as f64 / seconds / 1e9,
        gb_per_s_possible: possible / 1e9,
        of_copy_bandwidth: weight_bytes as f64 / seconds / possible,
        written: decoding.written,
        kernels: by_kernel(&decoding.kernels),
        made_by: MadeBy::detect(),
    };
    print(&report)?;
    out::json(json, &report)?;
    Ok(Outcome::Done)
}

/// The kernels by name, the longest first.
fn by_kernel(kernels: &[Timed]) -> Vec<KernelTime> {
    let mut groups = BTreeMap::<&str, (usize, u64)>::new();
    for kernel in kernels {
        let (calls, ns) = groups.entry(&kernel.name).or_default();
        (*calls, *ns) = (*calls + 1, *ns + kernel.ns);
    }
    let time = |(name, (calls, ns)): (&str, (usize, u64))| KernelTime {
        name: name.into(),
        calls,
        ms: ns as f64 / 1e6,
    };
    let mut all: Vec<KernelTime> = groups.into_iter().map(time).collect();
    all.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    all
}

fn print(report: &GenerateReport) -> Result<()> {
    let GenerateReport { model, parameters, batch, device, .. } = report;
    let dtype = report.dtype.name();
    let gpu = report.gpu.as_ref().map_or_else(String::new, |gpu| format!("  {gpu}"));
    out::line(format!("{model}  {parameters} parameters  batch {batch}  {device} {dtype}{gpu}"))?;
    out::line(format!(
        "token     {:.3} ms (median of {}; mean {:.3}, fastest {:.3})",
        report.ms_per_token, report.tokens, report.ms_mean, report.ms_fastest
    ))?;
    out::line(format!("speed     {:.0} tokens/s", report.tokens_per_s))?;
    out::line(format!(
        "memory    {:.0} GB/s of weights, {:.1} % of the {:.0} GB/s of a copy",
        report.gb_per_s,
        report.of_copy_bandwidth * 100.0,
        report.gb_per_s_possible
    ))?;
    for KernelTime { name, calls, ms } in report.kernels.iter().take(8) {
        out::line(format!("          {ms:.3} ms in {calls} of {name}, without a graph"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_add_up_by_name() {
        let timed = |name: &str, ns| Timed { op: 0, first: 0, name: name.into(), start_ns: 0, ns };
        let groups = by_kernel(&[timed("a", 1000), timed("b", 5000), timed("a", 2000)]);
        let found: Vec<_> = groups.iter().map(|group| (group.name.as_str(), group.calls, group.ms)).collect();
        assert_eq!(found, [("b", 1, 0.005), ("a", 2, 0.003)]);
    }
}
