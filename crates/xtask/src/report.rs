//! The final report of `cargo xtask test`: every stage with its result, times and counts.

use crate::counts::Counts;
use serde_json::{Value, json};
use std::time::Duration;

/// A stage that was run.
pub struct Done {
    /// Its name.
    pub name: &'static str,
    /// Whether all of it passed.
    pub passed: bool,
    /// The time from its start to its end.
    pub time: Duration,
    /// The CPU time of its processes over all cores, if the system reports it. The time of a stage that runs beside others is
    /// counted with theirs.
    pub cpu: Option<Duration>,
    /// Whether it ran beside other stages.
    pub beside: bool,
    /// The tests in it.
    pub counts: Counts,
}

/// User and system time of all child processes that have ended (Linux).
pub fn children_cpu() -> Option<Duration> {
    /// Clock ticks per second in /proc, the same on every Linux.
    const TICKS: u64 = 100;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The program name is in parentheses and may contain any character; cutime and cstime are fields 16 and 17.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: Vec<u64> =
        fields.split_whitespace().skip(13).take(2).map(str::parse).collect::<Result<_, _>>().ok()?;
    (ticks.len() == 2).then(|| Duration::from_millis(ticks.iter().sum::<u64>() * 1000 / TICKS))
}

/// A table with a row for each stage, including those that were not reached. `total` is from start to end.
pub fn table(done: &[Done], stages: &[&'static str], total: Duration) -> String {
    let mut text = format!("\n{:<15}{:<10}{:>10}{:>10}   tests\n", "stage", "result", "time", "cpu");
    let cpu = |time: Option<Duration>| time.map_or_else(String::new, seconds);
    for &stage in stages {
        let row = match done.iter().find(|one| one.name == stage) {
            Some(one) => {
                let verdict = if one.passed { "passed" } else { "FAILED" };
                let tests =
                    if one.counts == Counts::default() { String::new() } else { one.counts.to_string() };
                let cpu = if one.beside { "beside".into() } else { cpu(one.cpu) };
                format!("{stage:<15}{verdict:<10}{:>10}{cpu:>10}   {tests}", seconds(one.time))
            }
            None => format!("{stage:<15}{:<10}", "not run"),
        };
        text += row.trim_end();
        text.push('\n');
    }
    let used = done.iter().filter(|one| !one.beside).map(|one| one.cpu).sum();
    text += format!("{:<25}{:>10}{:>10}", "total", seconds(total), cpu(used)).trim_end();
    text
}

/// The report as JSON.
pub fn json(done: &[Done], stages: &[&'static str], total: Duration) -> Value {
    let stage = |&name: &&'static str| match done.iter().find(|one| one.name == name) {
        Some(one) => json!({
            "stage": name,
            "result": if one.passed { "passed" } else { "failed" },
            "seconds": one.time.as_secs_f64(),
            "cpu_seconds": one.cpu.map(|time| time.as_secs_f64()),
            "beside": one.beside,
            "passed": one.counts.passed,
            "failed": one.counts.failed,
            "skipped": one.counts.skipped - one.counts.waiting,
            "only_with_all": one.counts.waiting,
        }),
        None => json!({ "stage": name, "result": "not run" }),
    };
    json!({ "seconds": total.as_secs_f64(), "stages": stages.iter().map(stage).collect::<Vec<_>>() })
}

/// `62.0 s`
pub fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> [Done; 3] {
        let counts = Counts { passed: 5, failed: 1, ..Counts::default() };
        let time = Duration::from_millis(1500);
        let cpu = Some(Duration::from_secs(100));
        let fine =
            Done { name: "fmt", passed: true, time, cpu: None, beside: false, counts: Counts::default() };
        [
            Done { name: "mypy", beside: true, ..fine },
            fine,
            Done { name: "test", passed: false, time: Duration::from_secs(62), cpu, beside: false, counts },
        ]
    }

    #[test]
    fn the_table_shows_what_was_not_reached() {
        let want = "
stage          result          time       cpu   tests
fmt            passed         1.5 s
mypy           passed         1.5 s    beside
test           FAILED        62.0 s   100.0 s   5 passed, 1 failed
pytest         not run
total                        63.5 s";
        assert_eq!(table(&done(), &["fmt", "mypy", "test", "pytest"], Duration::from_millis(63500)), want);
    }

    #[test]
    fn json_has_every_stage() {
        let json = json(&done(), &["fmt", "test", "pytest"], Duration::from_secs(64));
        assert_eq!(json["stages"][1]["cpu_seconds"], 100.0);
        assert_eq!(json["stages"][1]["failed"], 1);
        assert_eq!(json["stages"][2]["result"], "not run");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_time_of_children_grows() {
        let before = children_cpu().unwrap();
        let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
        assert!(std::process::Command::new("sh").args(["-c", busy]).status().unwrap().success());
        assert!(children_cpu().unwrap() > before);
    }
}
