//! The machine: processor, memory, and whether a run fits into it.

use anyhow::Result;
use ironhorse::core::{Engine, EngineExt, Precision};
use ironhorse::train::model::{ModelConfig, Recompute};
use ironhorse::train::session::SessionSpec;
use serde::Serialize;

pub use ironhorse::train::host::{human_bytes, memory, peak_memory};

/// A machine, for benchmark records and `doctor`.
#[derive(Clone, Debug, Serialize)]
pub struct Hardware {
    /// The processor's name.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    /// The instruction set the CPU engine chose.
    pub isa: &'static str,
    /// Memory in bytes; `None` where the system does not say.
    pub memory_bytes: Option<u64>,
    /// Operating system and architecture.
    pub system: String,
}

impl Hardware {
    /// Describes this machine.
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
            memory_bytes: memory(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

/// Device memory that the CUDA engine needs beside its pools, about: its context, and workspaces of the libraries.
pub const BESIDE_POOLS: u64 = 1 << 30;
/// The parts of an output head that are tried where memory is short: enough that logits are no longer what takes most.
pub const HEAD_CHUNKS: usize = 8;

/// How many of a GPU's free bytes a run may use.
pub fn usable_of_gpu(free: u64) -> u64 {
    free.saturating_sub(BESIDE_POOLS)
}

/// Refuses a run that does not fit into memory, and says what would fit. Otherwise the system would often grant the
/// memory and kill the process later.
pub fn check_memory(engine: &dyn Engine, config: &ModelConfig, spec: &SessionSpec) -> Result<()> {
    let spec = &spec.on(engine.device());
    check_fits(engine, spec.layout(config)?.total() as u64, |has| match what_fits(config, spec, has) {
        Some(fits) => format!("{fits} would fit (ironhorse plan shows what takes it)"),
        None => "use a smaller batch, sequence or model (ironhorse plan shows what takes it)".into(),
    })
}

/// How many bytes a run may use on an engine's device; `None` where the system does not say.
pub fn room(engine: &dyn Engine) -> Option<u64> {
    match engine.memory().free {
        Some(free) => Some(usable_of_gpu(free as u64)),
        None => memory(),
    }
}

/// Refuses what `needs` more bytes than there are; `advice` is given how many there are.
pub fn check_fits(engine: &dyn Engine, needs: u64, advice: impl FnOnce(u64) -> String) -> Result<()> {
    let Some(has) = room(engine).filter(|&has| needs > has) else { return Ok(()) };
    let whose = match engine.memory().free {
        Some(free) => format!("{} has {} free", engine.name(), human_bytes(free as u64)),
        None => format!("the machine has {}", human_bytes(has)),
    };
    let (needs, advice) = (human_bytes(needs), advice(has));
    Err(NotEnough(format!("this run needs {needs} of memory and {whose}; {advice}")).into())
}

/// A run that does not fit into memory.
#[derive(Debug)]
pub struct NotEnough(String);

impl std::fmt::Display for NotEnough {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotEnough {}

/// The settings nearest to those asked for that need no more than `has` bytes: the output head in parts first, which costs the least
/// time, then recomputing, then state in 16 bits where weights have them, then smaller batches.
fn what_fits(config: &ModelConfig, spec: &SessionSpec, has: u64) -> Option<String> {
    let (batch, seq) = spec.train?;
    let fits_in = |batch: usize, recompute: Recompute, precision: Precision| {
        let train = Some((batch, seq));
        let score = spec.score.map(|(longest, _)| (longest, batch * seq));
        let spec = SessionSpec { train, eval: spec.eval.and(train), score, recompute, precision, ..*spec };
        spec.layout(config).is_ok_and(|layout| layout.total() as u64 <= has)
    };
    let parts = SessionSpec { head_chunks: HEAD_CHUNKS, ..*spec };
    if spec.head_chunks <= 1 && parts.layout(config).is_ok_and(|layout| layout.total() as u64 <= has) {
        return Some(format!("--head-chunks {HEAD_CHUNKS}"));
    }
    let fits = |batch, recompute| fits_in(batch, recompute, spec.precision);
    let experts = config.has_experts().then_some(("experts", Recompute::Experts));
    let levels = [("gelu", Recompute::Gelu), ("full", Recompute::Full)].into_iter().chain(experts);
    for (flag, recompute) in levels {
        if spec.recompute != recompute && fits(batch, recompute) {
            return Some(format!("--recompute {flag}"));
        }
    }
    let residual = spec.precision.with_residual();
    for (flags, precision) in
        [("--master residual", residual), ("--master residual --moments bf16", residual.with_bf16_moments())]
    {
        if spec.precision.has_master()
            && spec.precision != precision
            && fits_in(batch, spec.recompute, precision)
        {
            return Some(flags.into());
        }
    }
    let halves =
        std::iter::successors(Some(batch / 2), |batch| Some(batch / 2)).take_while(|&batch| batch > 0);
    halves.filter(|&batch| fits(batch, spec.recompute)).map(|batch| format!("--batch {batch}")).next()
}

/// What made a report: this binary and this machine.
#[derive(Serialize)]
pub struct MadeBy {
    pub version: &'static str,
    pub commit: &'static str,
    pub hardware: Hardware,
}

impl MadeBy {
    /// This binary and the hardware of this machine.
    pub fn detect() -> Self {
        Self { version: VERSION, commit: COMMIT, hardware: Hardware::detect() }
    }
}

/// The commit this binary was built from.
pub const COMMIT: &str = env!("IRONHORSE_COMMIT");
/// The version of this binary.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_fit_recomputes_first_then_keeps_less_state_then_cuts_the_batch() {
        let config = ModelConfig::parse("moe-tiny").unwrap();
        let spec = |recompute, precision| SessionSpec {
            train: Some((8, 64)),
            recompute,
            precision,
            ..SessionSpec::default()
        };
        let needs = |recompute, precision| spec(recompute, precision).layout(&config).unwrap().total() as u64;
        let bf16 = Precision::BF16;
        let advice = |recompute, precision, has| what_fits(&config, &spec(recompute, precision), has);
        let all = Recompute::Experts;
        let less = needs(Recompute::Gelu, bf16);
        assert_eq!(advice(Recompute::None, bf16, less).as_deref(), Some("--recompute gelu"));
        let residual = bf16.with_residual();
        assert_eq!(advice(all, bf16, needs(all, residual)).as_deref(), Some("--master residual"));
        let least = needs(all, residual.with_bf16_moments());
        assert_eq!(advice(all, bf16, least).as_deref(), Some("--master residual --moments bf16"));
        // f32 weights have no such choice
        let f32 = needs(all, Precision::F32);
        assert_eq!(advice(all, Precision::F32, f32 - 1).as_deref(), Some("--batch 4"));
        assert_eq!(advice(all, bf16, 1), None);
    }
}
