//! `ironhorse doctor`

use crate::hardware::{COMMIT, Hardware, VERSION, human_bytes};
use crate::{Outcome, number, out};
use anyhow::Result;
use clap::Args;
use ironhorse::cpu::{CpuEngine, Limits};
use serde::Serialize;
use std::path::PathBuf;

/// Shows devices, versions, measured limits, and what will be used and why
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse doctor\n  ironhorse doctor --json doctor.json")]
pub struct DoctorArgs {
    /// Threads to measure with; 0 means one for each core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    threads: usize,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    commit: &'static str,
    hardware: Hardware,
    threads: usize,
    gflops_possible: f64,
    gb_per_s_possible: f64,
    devices: Vec<DeviceReport>,
    auto: &'static str,
}

#[derive(Serialize)]
struct DeviceReport {
    device: &'static str,
    available: bool,
    why: String,
}

pub fn run(args: &DoctorArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let hardware = Hardware::detect();
    let engine = CpuEngine::new(args.threads);
    let limits = Limits::measure(args.threads);
    let report = Report {
        version: VERSION,
        commit: COMMIT,
        threads: engine.threads(),
        gflops_possible: limits.flops_per_s / 1e9,
        gb_per_s_possible: limits.bytes_per_s / 1e9,
        devices: vec![
            DeviceReport {
                device: "cpu",
                available: true,
                why: format!("{} threads, {} instructions", engine.threads(), engine.isa().name()),
            },
            DeviceReport { device: "cuda", available: false, why: "this version has no CUDA engine".into() },
        ],
        auto: "cpu",
        hardware,
    };
    let h = &report.hardware;
    out::line(format!("ironhorse    {} ({})", report.version, report.commit))?;
    out::line(format!("system       {}", h.system))?;
    out::line(format!("processor    {}, {} cores", h.cpu, h.cores))?;
    out::line(format!("memory       {}", h.memory_bytes.map_or("unknown".into(), human_bytes)))?;
    out::line(format!("instructions {}", h.isa))?;
    out::line(format!(
        "measured     {:.0} GFLOP/s f32 multiply-add, {:.1} GB/s memory, {} threads",
        report.gflops_possible, report.gb_per_s_possible, report.threads
    ))?;
    for device in &report.devices {
        let mark = if device.available { "yes" } else { "no " };
        out::line(format!("device       {:<5} {mark}  {}", device.device, device.why))?;
    }
    out::line(format!("--device auto means {}", report.auto))?;
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}
