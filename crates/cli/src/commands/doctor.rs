//! `ironhorse doctor`

mod ranks;

use crate::args::{heading, json_help};
use crate::hardware::{MadeBy, human_bytes};
use crate::{Outcome, number, out};
use anyhow::Result;
use clap::Args;
use ironhorse::Device;
use ironhorse::cpu::{CpuEngine, Limits};
use ironhorse::cuda;
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;

/// Shows devices, versions, measured limits, and what will be used and why
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse doctor\n  ironhorse doctor --json doctor.json\n  \
                        ironhorse doctor --ranks 4\n  \
                        torchrun --no-python --nproc-per-node 8 ironhorse doctor --ranks --device cuda")]
pub struct DoctorArgs {
    /// Threads to measure with; 0 means one for each core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    threads: usize,
    #[arg(long, help = json_help!("the results"), value_name = "FILE")]
    json: Option<PathBuf>,
    /// Check several processes instead: who they are, how they reach each other, and how fast. With N they are started here;
    /// without, by a launcher such as torchrun or srun
    #[arg(long, help_heading = heading::RANKS, value_name = "N", num_args = 0..=1, value_parser = number::count::<usize>)]
    ranks: Option<Option<usize>>,
    /// With --ranks: where they compute: auto, cpu, cuda (the GPU of their number) or cuda:N
    #[arg(long, help_heading = heading::RANKS, default_value = "auto", value_name = "DEVICE", requires = "ranks")]
    device: String,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    made_by: MadeBy,
    threads: usize,
    gflops_possible: f64,
    gb_per_s_possible: f64,
    devices: Vec<DeviceReport>,
    libraries: Vec<LibraryReport>,
    /// What the CUDA engine will use, where there is a GPU.
    choices: Vec<(&'static str, String)>,
    kernel_cache: Option<PathBuf>,
    auto: String,
    /// Why `auto` is not the GPU that is there.
    auto_why: Option<String>,
}

#[derive(Serialize)]
struct DeviceReport {
    device: String,
    available: bool,
    why: String,
}

#[derive(Serialize)]
struct LibraryReport {
    name: &'static str,
    purpose: &'static str,
    version: Option<String>,
    path: Option<String>,
    error: Option<String>,
}

/// Adds the GPUs as far as the CUDA engine can use them, its libraries, and what it will choose. Gives whether there is a
/// GPU at all.
fn look_for_gpus(report: &mut Report) -> bool {
    let libraries = cuda::report::libraries();
    let (gpus, why) = match cuda::devices() {
        Ok(gpus) => (gpus, "the driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?)".into()),
        Err(error) => (Vec::new(), error.to_string()),
    };
    for gpu in &gpus {
        let usable = cuda::usable(gpu.index);
        if gpu.index == 0 {
            report.auto_why = usable.as_ref().err().map(|error| format!("the GPU is not used: {error}"));
        }
        let what = format!(
            "{}, {}, compute capability {}.{}, {} multiprocessors",
            gpu.name,
            human_bytes(gpu.memory as u64),
            gpu.compute.0,
            gpu.compute.1,
            gpu.sms
        );
        report.devices.push(DeviceReport {
            device: Device::Cuda(gpu.index).to_string(),
            available: usable.is_ok(),
            why: usable.err().map_or(what, |error| error.to_string()),
        });
    }
    match gpus.first() {
        Some(gpu) => report.choices = cuda::report::choices(gpu, &libraries),
        None => report.devices.push(DeviceReport { device: "cuda".into(), available: false, why }),
    }
    report.libraries = libraries
        .into_iter()
        .map(|library| {
            let (found, error) = match library.found {
                Ok(found) => (Some(found), None),
                Err(error) => (None, Some(error.to_string())),
            };
            let (version, path) = found.unzip();
            LibraryReport { name: library.name, purpose: library.purpose, version, path, error }
        })
        .collect();
    !gpus.is_empty()
}

/// The libraries. Without a GPU those that are missing are shown only with `-v`: nothing needs them.
fn print_libraries(report: &Report) -> Result<()> {
    let has_gpu = report.devices.iter().any(|device| device.device.starts_with("cuda:"));
    for library in &report.libraries {
        let what = match (&library.version, &library.path) {
            (Some(version), Some(path)) => format!("{version}, {path}"),
            _ if !has_gpu && !out::is_verbose() => continue,
            _ => format!(
                "missing, needed for {}: {}",
                library.purpose,
                library.error.as_deref().unwrap_or("not found")
            ),
        };
        out::line(format!("library      {:<17} {what}", library.name))?;
    }
    Ok(())
}

pub fn run(args: &DoctorArgs, line: &[OsString]) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    if let Some(asked) = args.ranks {
        return ranks::run(args, asked, line);
    }
    let engine = CpuEngine::new(args.threads);
    let limits = Limits::measure(args.threads);
    let mut report = Report {
        made_by: MadeBy::detect(),
        threads: engine.threads(),
        gflops_possible: limits.flops_per_s / 1e9,
        gb_per_s_possible: limits.bytes_per_s / 1e9,
        devices: vec![DeviceReport {
            device: "cpu".into(),
            available: true,
            why: format!("{} threads, {} instructions", engine.threads(), engine.isa().name()),
        }],
        libraries: Vec::new(),
        choices: Vec::new(),
        kernel_cache: cuda::Cache::open(None).folder().map(PathBuf::from),
        auto: Device::Auto.resolve().to_string(),
        auto_why: None,
    };
    let gpu_is_there = look_for_gpus(&mut report);
    let MadeBy { version, commit, hardware: h } = &report.made_by;
    out::line(format!("ironhorse    {version} ({commit})"))?;
    out::line(format!("system       {}", h.system))?;
    out::line(format!("processor    {}, {} cores", h.cpu, h.cores))?;
    out::line(format!("memory       {}", h.memory_bytes.map_or("unknown".into(), human_bytes)))?;
    out::line(format!("instructions {}", h.isa))?;
    out::line(format!(
        "measured     {:.0} GFLOP/s f32 multiply-add, {:.1} GB/s memory, {} threads",
        report.gflops_possible, report.gb_per_s_possible, report.threads
    ))?;
    for device in report.devices.iter().filter(|device| device.available || gpu_is_there) {
        let mark = if device.available { "yes" } else { "no " };
        out::line(format!("device       {:<7} {mark}  {}", device.device, device.why))?;
    }
    if !gpu_is_there {
        out::line(
            "device       cuda    no   no NVIDIA GPU: everything runs on the CPU (-v shows what was looked for)",
        )?;
    }
    print_libraries(&report)?;
    for (choice, what) in &report.choices {
        out::line(format!("gpu          {choice:<10} {what}"))?;
    }
    match &report.kernel_cache {
        Some(folder) => out::line(format!("kernel cache {}", folder.display()))?,
        None => out::line("kernel cache no folder can be written: kernels are compiled again in every run")?,
    }
    if let Some(why) = &report.auto_why {
        out::line(why)?;
    }
    out::line(format!("--device auto means {}", report.auto))?;
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}
