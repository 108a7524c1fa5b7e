//! What the machine says of the process that trains: its memory, and its GPU by NVML, which is loaded if it is there.

use crate::figures::whole;
use crate::hardware::human_bytes;
use ironhorse::train::run::host;
use ironhorse::train::run::view::{Life, RunView};
use nvml_wrapper::{Device, Nvml};

/// Reads GPUs, if the driver's library is there.
pub struct Machine(Option<Nvml>);

impl Machine {
    /// Loads the library; without it nothing is said of GPUs.
    pub fn open() -> Self {
        Self(Nvml::init().ok())
    }

    /// What is known of a run's process and device, if it runs here.
    pub fn facts(&self, run: &RunView) -> Vec<(&'static str, String)> {
        let Life::Process(process) = run.life else { return Vec::new() };
        let mut facts = Vec::new();
        facts.extend(resident(process).map(|bytes| ("memory", human_bytes(bytes))));
        if let Some(device) = self.device(run, process) {
            facts.extend(gpu_facts(&device));
        }
        facts
    }

    /// The GPU of a run: the one that its process uses, or that its `run.json` names.
    fn device(&self, run: &RunView, process: u32) -> Option<Device<'_>> {
        let nvml = self.0.as_ref()?;
        let origin = run.origin.as_ref()?.last_start();
        let named: u32 = origin.device.strip_prefix("cuda:")?.parse().ok()?;
        if origin.host != host() {
            return None;
        }
        let uses = |device: &Device<'_>| {
            let processes = device.running_compute_processes().unwrap_or_default();
            processes.iter().any(|one| one.pid == process)
        };
        let all = (0..nvml.device_count().unwrap_or(0)).filter_map(|at| nvml.device_by_index(at).ok());
        all.into_iter().find(uses).or_else(|| nvml.device_by_index(named).ok())
    }
}

fn gpu_facts(device: &Device<'_>) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    if let Ok(rates) = device.utilization_rates() {
        facts.push(("GPU busy", format!("{} %", rates.gpu)));
    }
    if let Ok(memory) = device.memory_info() {
        facts.push(("GPU memory", format!("{} of {}", human_bytes(memory.used), human_bytes(memory.total))));
    }
    if let Ok(milliwatts) = device.power_usage() {
        let watts = |milliwatts: u32| whole(f64::from(milliwatts) / 1e3);
        let limit = device
            .enforced_power_limit()
            .map_or_else(|_| String::new(), |most| format!(" of {}", watts(most)));
        facts.push(("GPU power", format!("{}{limit} W", watts(milliwatts))));
    }
    facts
}

/// Bytes of memory that a process holds now.
fn resident(process: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
