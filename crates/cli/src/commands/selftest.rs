//! `ironhorse selftest`

use crate::args::{CudaArgs, json_help};
use crate::hardware::MadeBy;
use crate::progress::{LINE_EVERY, bar};
use crate::{Outcome, number, out};
use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use ironhorse::Device;
use ironhorse::core::op::Op;
use ironhorse::core::{Engine, Operands, Precision};
use ironhorse::cpu::CpuSettings;
use ironhorse_testkit::{Fault, Mode, Suite, Summary};
use serde::Serialize;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Instant;

/// Runs every op of the engine on many shapes and compares the results with f64
#[derive(Args)]
#[command(
    after_help = "Examples:\n  ironhorse selftest\n  ironhorse selftest --device cuda:1 --json selftest.json\n  \
    ironhorse selftest --device cuda --dtype bf16 --op attention_fwd --op attention_bwd\n\n\
    Results are computed twice and must agree to the bit, unless --fast is given.\n\
    Exit code: 0 all agree, 1 something is wrong, 2 could not run."
)]
pub struct SelftestArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: String,
    /// Threads of the CPU engine; 0 means one for each core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    threads: usize,
    /// Precision to test
    #[arg(long, value_enum, default_value_t = DtypeArg::All)]
    dtype: DtypeArg,
    /// Test only this op; may be repeated
    #[arg(long, value_name = "NAME")]
    op: Vec<String>,
    /// Test only a few small cases of each op
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    cuda: CudaArgs,
    #[arg(long, help = json_help!("every case"), value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Precisions to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DtypeArg {
    /// IEEE single precision
    F32,
    /// f32 whose products round their operands to 10 bits (GPU)
    Tf32,
    /// f32 whose linear layers, and with AMX attention, round their operands to bf16 (CPU)
    Bf16Products,
    /// bfloat16 with f32 sums (GPU)
    Bf16,
    /// the ops of 8-bit numbers (GPU of compute capability 8.9 or newer)
    Fp8,
    /// every precision that the engine supports
    All,
}

#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    made_by: MadeBy,
    device: String,
    quick: bool,
    passed: usize,
    failed: usize,
    seconds: f64,
    stopped: Option<&'a str>,
    cases: Vec<CaseReport<'a>>,
}

#[derive(Serialize)]
struct CaseReport<'a> {
    op: &'static str,
    case: &'a str,
    dtype: &'static str,
    gradients: &'static str,
    passed: bool,
    slot: Option<&'static str>,
    error: Option<f64>,
    allowed: Option<f64>,
    fault: Option<String>,
}

pub fn run(args: &SelftestArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let device = args.device.parse::<Device>()?.resolve();
    let modes = modes(args, device)?;
    if let Some(unknown) = args.op.iter().find(|op| !Op::NAMES.contains(&op.as_str())) {
        bail!("unknown op `{unknown}`: expected one of {}", Op::NAMES.join(", "));
    }
    let started = Instant::now();
    let mut summaries = Vec::new();
    let mut engine: Option<(Operands, Box<dyn Engine>)> = None;
    for mode in modes {
        let operands = mode.operands();
        if engine.as_ref().is_none_or(|(has, _)| *has != operands) {
            drop(engine.take()); // its memory goes before the next one asks for some
            let cpu = CpuSettings { threads: args.threads, operands };
            let cuda = args.cuda.settings(mode == Mode::Tf32);
            engine = Some((operands, device.engine(cpu, &cuda)?));
        }
        let Some((_, engine)) = &mut engine else { continue };
        let suite = Suite {
            ops: args.op.clone(),
            quick: args.quick,
            large: !args.quick,
            twice: !args.cuda.fast,
            wide_fp8: device == Device::Cpu,
            ..Suite::new(mode)
        };
        let mut progress = Progress::new(mode.name());
        let summary = suite.run(engine.as_mut(), &mut |done, total| progress.show(done, total));
        progress.finish();
        let lost = summary.stopped.is_some();
        summaries.push(summary);
        if lost {
            break;
        }
    }
    finish(args, device, &summaries, started.elapsed().as_secs_f64())
}

/// Prints the table last, writes the file.
fn finish(args: &SelftestArgs, device: Device, summaries: &[Summary], seconds: f64) -> Result<Outcome> {
    let passed = summaries.iter().map(|summary| summary.passed.len()).sum();
    let failed = summaries.iter().map(|summary| summary.failed.len()).sum();
    let stopped = summaries.iter().find_map(|summary| summary.stopped.as_deref());
    let report = Report {
        made_by: MadeBy::detect(),
        device: device.to_string(),
        quick: args.quick,
        passed,
        failed,
        seconds,
        stopped,
        cases: summaries.iter().flat_map(cases).collect(),
    };
    out::json(args.json.as_deref(), &report)?;
    for mismatch in summaries.iter().flat_map(|summary| &summary.failed) {
        out::line(format!("FAILED {mismatch}"))?;
    }
    out::line(table(summaries))?;
    if let Some(why) = stopped {
        out::line(format!("stopped early, {device} no longer answers: {why}"))?;
    }
    out::line(format!("{passed} of {} cases passed on {device} in {seconds:.1} s", passed + failed))?;
    Ok(if failed == 0 && stopped.is_none() { Outcome::Done } else { Outcome::Failed })
}

/// What can be tested on this device.
fn modes(args: &SelftestArgs, device: Device) -> Result<Vec<Mode>> {
    let modes = match args.dtype {
        DtypeArg::F32 => vec![Mode::F32],
        DtypeArg::Tf32 => vec![Mode::Tf32],
        DtypeArg::Bf16Products => vec![Mode::Bf16Products],
        DtypeArg::Bf16 if device == Device::Cpu => vec![Mode::Bf16Products],
        DtypeArg::Bf16 => vec![Mode::Bf16],
        DtypeArg::Fp8 => vec![Mode::Fp8],
        DtypeArg::All if device == Device::Cpu => vec![Mode::F32, Mode::Bf16Products],
        DtypeArg::All if has_fp8(device) => vec![Mode::F32, Mode::Bf16, Mode::Tf32, Mode::Fp8],
        DtypeArg::All => vec![Mode::F32, Mode::Bf16, Mode::Tf32],
    };
    for mode in &modes {
        let there = match mode {
            Mode::F32 => true,
            Mode::Bf16Products => device == Device::Cpu,
            Mode::Tf32 | Mode::Bf16 | Mode::Fp8 => device != Device::Cpu,
        };
        ensure!(there, "--dtype {}: {device} has no such products; use --dtype f32 or bf16", mode.name());
    }
    Ok(modes)
}

/// Whether a GPU multiplies 8-bit numbers.
fn has_fp8(device: Device) -> bool {
    let Device::Cuda(index) = device else { return false };
    ironhorse::cuda::devices().is_ok_and(|all| all.iter().any(|gpu| gpu.index == index && gpu.has_fp8()))
}

/// One line for each op and precision.
fn table(summaries: &[Summary]) -> String {
    let mut text = format!(
        "{:24}{:>14}{:>7}{:>8}  {:>9}  {:>9}  nearest to what is allowed",
        "op", "dtype", "cases", "failed", "error", "allowed"
    );
    for &op in Op::NAMES {
        for summary in summaries {
            for row in summary.rows().into_iter().filter(|row| row.op == op) {
                text += &format!("\n{op:24}{:>14}{:>7}{:>8}", summary.mode.name(), row.cases, row.failed);
                if let Some(worst) = row.worst {
                    let place = format!("{}, {}", worst.slot, worst.case);
                    text += &format!("  {:>9.2e}  {:>9.2e}  {place}", worst.error, worst.tolerance);
                }
            }
        }
    }
    text
}

fn cases(summary: &Summary) -> impl Iterator<Item = CaseReport<'_>> {
    let dtype = summary.mode.name();
    let gradients = |precision: Precision| precision.grads.name();
    let passed = summary.passed.iter().map(move |report| CaseReport {
        op: report.op,
        case: &report.case,
        dtype,
        gradients: gradients(report.precision),
        passed: true,
        slot: Some(report.slot).filter(|slot| !slot.is_empty()),
        error: Some(report.error),
        allowed: Some(report.tolerance),
        fault: None,
    });
    let failed = summary.failed.iter().map(move |mismatch| {
        let (slot, error, allowed) = match mismatch.fault {
            Fault::Value { slot, error, tolerance, .. } => (Some(slot), Some(error), Some(tolerance)),
            _ => (None, None, None),
        };
        CaseReport {
            op: mismatch.op,
            case: &mismatch.case,
            dtype,
            gradients: gradients(mismatch.precision),
            passed: false,
            slot,
            error,
            allowed,
            fault: Some(mismatch.to_string()),
        }
    });
    passed.chain(failed)
}

/// A bar on a terminal, a line now and then elsewhere.
struct Progress {
    dtype: &'static str,
    bar: Option<ProgressBar>,
    last_line: Instant,
}

impl Progress {
    fn new(dtype: &'static str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = bar(None, "{bar:30.cyan/dim} {pos}/{len}  {msg}  ETA {eta}");
            bar.set_message(dtype);
            bar
        });
        Self { dtype, bar, last_line: Instant::now() }
    }

    fn show(&mut self, done: usize, total: usize) {
        match &self.bar {
            Some(bar) => {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
            None if self.last_line.elapsed() >= LINE_EVERY => {
                out::note(format_args!("{}: {done} of {total} cases", self.dtype));
                self.last_line = Instant::now();
            }
            None => {}
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
