//! `ironhorse verify --replay`: runs a bad step again from its black box.

use super::VerifyArgs;
use crate::args::AttentionArg;
use crate::failure::one_line;
use crate::hardware::{check_memory, human_bytes, memory};
use crate::{Outcome, out};
use anyhow::{Result, bail};
use clap::ValueEnum;
use ironhorse::Device;
use ironhorse::core::{Engine, EngineExt, HostSliceMut, Section, Slot};
use ironhorse::cpu::CpuEngine;
use ironhorse::cuda::{Attention, Settings};
use ironhorse::train::run::{BAD, read_algorithms};
use ironhorse::train::verify::replay::{Place, Replay, ReplayReport, Rerun, Role};
use ironhorse_testkit::{Hook, OracleEngine, Wrapped};
use serde_json::Value;
use std::path::Path;

/// From how many operations on the f64 oracle is worth a warning: about a minute.
const SLOW: u64 = 20_000_000_000;

pub fn run(path: &Path, args: &VerifyArgs) -> Result<Outcome> {
    if path.join(BAD).is_dir() {
        bail!("{}: is a run; name one of the black boxes in {}", path.display(), path.join(BAD).display());
    }
    let replay = Replay::open(path)?;
    let bad = replay.bad().clone();
    out::note(format_args!(
        "step {} of {} parameters, {} x {} tokens{}: loss {}, gradient norm {} on {} in {}",
        bad.step,
        replay.config().told_params(),
        bad.batch,
        bad.seq,
        if bad.accumulate > 1 { format!(" in {} micro-steps", bad.accumulate) } else { String::new() },
        bad.loss,
        bad.norm,
        bad.device,
        bad.dtype
    ));
    let mut again = Again { replay: &replay, only: None, reruns: Vec::new(), left_out: Vec::new() };
    let named = &args.engine.device;
    let device = if named == "auto" { &bad.device } else { named }.parse::<Device>()?.resolve();
    let role = if kind(&device.to_string()) == kind(&bad.device) { Role::Same } else { Role::Other };
    if device == Device::Cpu && role == Role::Other {
        again.left_out.push((format!("{} in {}", bad.device, bad.dtype), "--device cpu".into()));
    } else {
        again.run(&device.to_string(), &bad.dtype, role, || {
            let mut engine = device.engine(args.engine.threads, &settings(replay.settings(), &bad.dtype))?;
            engine.set_choices(&algorithms(path))?;
            Ok(engine)
        });
    }
    if !(device == Device::Cpu && role == Role::Same) {
        again.only = again.only.or(bad.micro_step);
        again.run("cpu", "f32", Role::F32, || Ok(Box::new(CpuEngine::new(args.engine.threads))));
    }
    again.only = again.only.or(bad.micro_step);
    if args.no_oracle {
        again.left_out.push(("oracle in f64".into(), "--no-oracle".into()));
    } else {
        again.say_how_long()?;
        again.run("oracle", "f64", Role::F64, || Ok(Box::new(Wrapped::new(OracleEngine::new(), Unrounded))));
    }
    let Again { reruns, left_out, .. } = again;
    if reruns.is_empty() {
        let reasons = left_out.iter().map(|(place, why)| format!("{place}: {why}"));
        bail!("the step could not be run anywhere: {}", reasons.collect::<Vec<_>>().join("; "));
    }
    let report = ReplayReport::new(bad, reruns, left_out);
    out::json(args.json.as_deref(), &report)?;
    out::line(if args.quiet { report.verdict.clone() } else { report.to_string() })?;
    Ok(if report.finite { Outcome::Done } else { Outcome::Failed })
}

/// "cuda" of "cuda:0".
fn kind(device: &str) -> &str {
    device.split(':').next().unwrap_or_default()
}

/// The runs so far.
struct Again<'a> {
    replay: &'a Replay,
    /// The micro-step that was NaN or infinite somewhere: the others need not be run.
    only: Option<u32>,
    reruns: Vec<Rerun>,
    left_out: Vec<(String, String)>,
}

impl Again<'_> {
    /// Runs the step somewhere, or says why not: what one place cannot do, another may.
    fn run(&mut self, name: &str, dtype: &str, role: Role, engine: impl FnOnce() -> Result<Box<dyn Engine>>) {
        let run = || -> Result<Rerun> {
            let engine = engine()?;
            let spec = self.replay.spec(role);
            check_memory(engine.as_ref(), self.replay.config(), &spec)?;
            let needs = 2 * spec.layout(self.replay.config())?.total() as u64;
            if let Some(has) = memory().filter(|&has| role == Role::F64 && needs > has) {
                bail!("needs {} of memory and the machine has {}", human_bytes(needs), human_bytes(has));
            }
            Ok(self.replay.run(Place { engine, role, dtype: dtype.to_owned() }, self.only)?)
        };
        match run() {
            Ok(rerun) => {
                if !rerun.finite {
                    self.only = Some(rerun.micro_steps.0);
                }
                self.reruns.push(rerun);
            }
            Err(error) => self.left_out.push((format!("{name} in {dtype}"), one_line(&error))),
        }
    }

    /// Warns if the oracle, plain loops on one core, will take long.
    fn say_how_long(&self) -> Result<()> {
        let (replay, spec) = (self.replay, self.replay.spec(Role::F64));
        let Some(batch) = spec.train else { return Ok(()) };
        let program = replay.model().training(batch, spec.step_options(), spec.precision)?;
        let micro_steps = if self.only.is_some() { 1 } else { u64::from(replay.bad().accumulate) };
        let flops =
            (program.flops(Section::Forward) + program.flops(Section::Backward)).saturating_mul(micro_steps);
        if flops > SLOW {
            let count = flops as f64 / 1e9;
            out::note(format_args!(
                "now in f64, {count:.0} GFLOP in plain loops on one core, which can take hours; --no-oracle leaves it out"
            ));
        }
        Ok(())
    }
}

/// What the run said about the CUDA engine.
fn settings(said: &Value, dtype: &str) -> Settings {
    Settings {
        tf32: dtype == "tf32",
        fast: said["fast"] == true,
        attention: said["attention"]
            .as_str()
            .and_then(|name| AttentionArg::from_str(name, false).ok())
            .map_or(Attention::Auto, Attention::from),
        graphs: said["no-graphs"] != true,
        ..Settings::default()
    }
}

/// The algorithms of the run that the black box RUN/bad/step-N belongs to; without them the engine chooses for itself.
fn algorithms(path: &Path) -> Vec<(String, String)> {
    let file = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = if path.is_dir() { Some(file.as_path()) } else { file.parent() };
    let run = folder.and_then(|folder| folder.parent()?.parent());
    run.and_then(|run| read_algorithms(run).ok()).unwrap_or_default()
}

/// Keeps the oracle's numbers finite when they are read as f32: one that overflows f32 but not f64 is finite.
struct Unrounded;

impl Hook<OracleEngine> for Unrounded {
    fn read(
        &mut self,
        oracle: &mut OracleEngine,
        slot: Slot,
        out: HostSliceMut<'_>,
    ) -> ironhorse::core::Result<()> {
        let HostSliceMut::F32(out) = out else { return oracle.read(slot, out) };
        oracle.read_f32(slot, out)?;
        if out.iter().all(|value| value.is_finite()) {
            return Ok(());
        }
        for (to, from) in out.iter_mut().zip(oracle.read_f64(slot)?) {
            if from.is_finite() {
                *to = to.clamp(f32::MIN, f32::MAX);
            }
        }
        Ok(())
    }
}
