//! What depends on the operating system: the memory of this machine, as far as it is known, and names of files.

use std::ffi::OsString;

/// Memory in bytes that this process may use: that of the machine, or of the container it runs in.
pub fn memory() -> Option<u64> {
    let machine = kibibytes("/proc/meminfo", "MemTotal")?;
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    Some(machine.min(limits.into_iter().find_map(number).unwrap_or(u64::MAX)))
}

/// Memory in bytes that can be taken now.
pub(crate) fn available_memory() -> Option<u64> {
    let machine = kibibytes("/proc/meminfo", "MemAvailable")?;
    let container = number("/sys/fs/cgroup/memory.max").zip(number("/sys/fs/cgroup/memory.current"));
    Some(container.map_or(machine, |(most, now)| machine.min(most.saturating_sub(now))))
}

/// The most memory that this process has held.
pub fn peak_memory() -> Option<u64> {
    kibibytes("/proc/self/status", "VmHWM")
}

fn number(file: &str) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn kibibytes(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// Bytes as text, such as `1.5 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// A name or argument from bytes of its encoding; `None` if this system cannot have it.
pub fn os_string(bytes: &[u8]) -> Option<OsString> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        Some(std::ffi::OsStr::from_bytes(bytes).to_owned())
    }
    #[cfg(not(unix))]
    std::str::from_utf8(bytes).ok().map(OsString::from)
}
