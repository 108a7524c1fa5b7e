//! The builds of `cargo xtask kernels` and their tables.

use crate::ptxas::Resources;
use std::collections::BTreeMap;

/// The architecture whose registers have a column: the one that the kernels are tuned for.
const MAIN: &str = "sm_90a";

/// One specialisation on one architecture.
pub struct Build {
    pub file: &'static str,
    /// `C=768 T=bf16`
    pub defines: String,
    pub arch: String,
    /// Its kernels, or why the build failed.
    pub outcome: Result<Vec<Resources>, String>,
    pub warnings: Vec<String>,
    /// How long the compiler took; `None` if the log is that of an earlier run.
    pub seconds: Option<f64>,
}

/// A row for each kernel: the worst of its builds.
pub fn worst(builds: &[Build]) -> String {
    #[derive(Default)]
    struct Row {
        builds: usize,
        main_registers: u32,
        worst: Resources,
        spilling: usize,
    }
    let mut rows: BTreeMap<(&str, &str), Row> = BTreeMap::new();
    for (build, kernel) in each(builds) {
        let row = rows.entry((build.file, &kernel.kernel)).or_default();
        row.builds += 1;
        if build.arch == MAIN {
            row.main_registers = row.main_registers.max(kernel.registers);
        }
        let worst = &mut row.worst;
        worst.registers = worst.registers.max(kernel.registers);
        worst.shared = worst.shared.max(kernel.shared);
        worst.stack = worst.stack.max(kernel.stack);
        worst.spill_stores = worst.spill_stores.max(kernel.spill_stores);
        worst.spill_loads = worst.spill_loads.max(kernel.spill_loads);
        row.spilling += usize::from(kernel.spills());
    }
    let wide = rows.keys().map(|(_, kernel)| kernel.len()).max().unwrap_or(0).max(6);
    let mut text = format!(
        "{:<wide$}  {:<20}{:>7}{:>12}{:>8}{:>9}{:>8}  spills\n",
        "kernel", "file", "builds", "regs sm_90a", "most", "shared", "stack"
    );
    for ((file, kernel), row) in rows {
        let worst = row.worst;
        let main = if row.main_registers == 0 { "-".into() } else { row.main_registers.to_string() };
        let spills = match row.spilling {
            0 => "none".into(),
            n => format!("{} stored, {} loaded in {n} builds", worst.spill_stores, worst.spill_loads),
        };
        text += &format!(
            "{kernel:<wide$}  {file:<20}{:>7}{main:>12}{:>8}{:>9}{:>8}  {spills}\n",
            row.builds, worst.registers, worst.shared, worst.stack
        );
    }
    text
}

/// A row for each kernel of each build.
pub fn all(builds: &[Build]) -> String {
    let wide = each(builds).map(|(_, kernel)| kernel.kernel.len()).max().unwrap_or(0).max(6);
    let mut text = format!(
        "{:<wide$}  {:<8}{:>6}{:>9}{:>8}{:>8}{:>8}  of\n",
        "kernel", "arch", "regs", "shared", "stack", "out", "back"
    );
    for (build, kernel) in each(builds) {
        text += format!(
            "{:<wide$}  {:<8}{:>6}{:>9}{:>8}{:>8}{:>8}  {} {}",
            kernel.kernel,
            build.arch,
            kernel.registers,
            kernel.shared,
            kernel.stack,
            kernel.spill_stores,
            kernel.spill_loads,
            build.file,
            build.defines
        )
        .trim_end();
        text.push('\n');
    }
    text
}

/// Everything, for `--json`.
pub fn json(builds: &[Build], nvrtc: &str) -> serde_json::Value {
    let builds: Vec<_> = builds
        .iter()
        .map(|build| {
            let kernels: Vec<_> = build.outcome.iter().flatten().map(kernel_json).collect();
            let error = build.outcome.as_ref().err();
            serde_json::json!({
                "file": build.file, "defines": build.defines, "arch": build.arch, "error": error, "kernels": kernels,
                "seconds": build.seconds,
            })
        })
        .collect();
    serde_json::json!({ "nvrtc": nvrtc, "builds": builds })
}

fn kernel_json(kernel: &Resources) -> serde_json::Value {
    serde_json::json!({
        "kernel": kernel.kernel,
        "registers": kernel.registers,
        "shared_bytes": kernel.shared,
        "stack_bytes": kernel.stack,
        "spill_store_bytes": kernel.spill_stores,
        "spill_load_bytes": kernel.spill_loads,
    })
}

fn each(builds: &[Build]) -> impl Iterator<Item = (&Build, &Resources)> {
    builds.iter().flat_map(|build| build.outcome.iter().flatten().map(move |kernel| (build, kernel)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(file: &'static str, defines: &str, arch: &str, outcome: Result<Vec<Resources>, String>) -> Build {
        let (defines, arch) = (defines.to_owned(), arch.to_owned());
        Build { file, defines, arch, outcome, warnings: Vec::new(), seconds: Some(0.5) }
    }

    fn build(arch: &str, registers: u32, spill_stores: u32) -> Build {
        let kernel = Resources {
            kernel: "gelu_fwd".into(),
            registers,
            spill_stores,
            stack: spill_stores,
            ..Resources::default()
        };
        made("gelu.cu", "C=768", arch, Ok(vec![kernel]))
    }

    #[test]
    fn the_worst_of_all_builds_is_shown() {
        let builds = [build("sm_80", 40, 0), build("sm_90a", 32, 0), build("sm_120", 255, 16)];
        let want = "\
kernel    file                 builds regs sm_90a    most   shared   stack  spills
gelu_fwd  gelu.cu                   3          32     255        0      16  16 stored, 0 loaded in 1 builds
";
        assert_eq!(worst(&builds), want);
        assert_eq!(all(&builds).lines().count(), 4);
        assert!(all(&builds).ends_with("16       0  gelu.cu C=768\n"));
    }

    #[test]
    fn json_has_errors_and_kernels() {
        let failed = made("x.cu", "", "sm_80", Err("no".into()));
        let json = json(&[build("sm_90a", 32, 0), failed], "13.0");
        assert_eq!(json["builds"][0]["kernels"][0]["registers"], 32);
        assert_eq!(json["builds"][1]["error"], "no");
    }
}
