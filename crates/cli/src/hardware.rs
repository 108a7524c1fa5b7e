//! What this machine is, as far as the system tells.

use serde::Serialize;

/// A machine, for benchmark records and `doctor`.
#[derive(Clone, Debug, Serialize)]
pub struct Hardware {
    /// The processor's name.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    /// The instruction set the CPU engine chose.
    pub isa: &'static str,
    /// Memory in bytes, where the system tells.
    pub memory_bytes: Option<u64>,
    /// Operating system and architecture.
    pub system: String,
}

impl Hardware {
    /// Looks at this machine.
    pub fn detect() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
            line.split_once(':').map(|(_, value)| value.trim().to_owned())
        };
        Self {
            cpu: field("model name").or_else(|| field("CPU part")).unwrap_or_else(|| "unknown".into()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            isa: ironhorse::cpu::isa::Isa::detect().name(),
            memory_bytes: kibibytes("/proc/meminfo", "MemTotal"),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

/// The most memory this process ever held, where the system tells.
pub fn peak_rss() -> Option<u64> {
    kibibytes("/proc/self/status", "VmHWM")
}

fn kibibytes(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// Bytes for people.
pub fn human_bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// The commit this binary was built from.
pub const COMMIT: &str = env!("IRONHORSE_COMMIT");
/// The version of this binary.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
