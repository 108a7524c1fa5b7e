//! Flags that need each other: what does not fit together is refused, by the names of the flags; and room on the disk.

use super::TrainArgs;
use crate::args::{FlagValue, OptimizerArg};
use crate::hardware::human_bytes;
use crate::out;
use anyhow::{Result, bail};
use ironhorse::core::Precision;
use ironhorse::train::format::checkpoint::checkpoint_bytes;
use ironhorse::train::format::disk::free_bytes;
use ironhorse::train::model::{Adapted, ModelConfig};
use ironhorse::train::run::rampup::Rampup;
use ironhorse::train::run::schedule::{Decay, LrSchedule};
use std::path::Path;

/// Refuses a learning rate that cannot be, and says if a flag of it is not used.
pub fn schedule(args: &TrainArgs, schedule: &LrSchedule) -> Result<()> {
    let wsd = schedule.kind == Decay::Wsd;
    if let (true, Err(error)) = (wsd, schedule.validate()) {
        bail!("--schedule wsd: {error}; give a smaller --warmup or --decay-fraction");
    }
    if !wsd && args.decay_fraction.is_some() {
        let name = args.schedule.name();
        out::note(format_args!("--decay-fraction goes with --schedule wsd, and is not used with {name}"));
    }
    Ok(schedule.validate()?)
}

/// The batch-size ramp-up that was asked for.
pub fn rampup(args: &TrainArgs, steps: u64) -> Result<Option<Rampup>> {
    let Some(length) = args.rampup_steps else { return Ok(None) };
    let (from, most) = (args.rampup_from.unwrap_or(1), args.accumulate);
    if most < 2 {
        bail!("--rampup-steps {length} needs --accumulate of at least 2: it is what the ramp-up grows to");
    }
    if from >= most {
        bail!("--rampup-from is {from}, expected fewer than --accumulate {most}, which it grows to");
    }
    if length > steps {
        bail!(
            "--rampup-steps is {length}, expected at most --steps {steps}: the run would end before its full batch size"
        );
    }
    Ok(Some(Rampup { from, steps: length }))
}

/// Refuses adapters that have nothing to stand beside, or that the model cannot have.
pub fn adapters(args: &TrainArgs, config: &ModelConfig, has_weights: bool) -> Result<()> {
    let Some(rank) = args.adapters.lora else { return Ok(()) };
    if !has_weights {
        bail!("--lora {rank} trains adapters beside weights; give those with --init");
    }
    if args.state.optimizer != OptimizerArg::AdamW {
        bail!("--optimizer {} cannot train adapters; leave it out with --lora", args.state.optimizer.name());
    }
    args.adapters.lora(config).map(|_| ())
}

/// Refuses patience that nothing is measured for.
pub fn patience(args: &TrainArgs, has_val: bool) -> Result<()> {
    let missing = match args.patience {
        0 => return Ok(()),
        _ if args.val_every == Some(0) => "--val-every of at least 1, not 0",
        _ if args.val_batches == 0 => "--val-batches of at least 1, not 0",
        _ if !has_val => "data to validate on; give --val-data",
        _ => return Ok(()),
    };
    bail!("--patience {} needs {missing}", args.patience)
}

/// Refuses a run whose first checkpoint the disk has no room for; warns if it has none for all that are kept.
pub fn space(path: &Path, args: &TrainArgs, model: &Adapted, precision: Precision) -> Result<()> {
    let (one, free) = (checkpoint_bytes(model, precision), free_bytes(path)?);
    if free == 0 {
        return Ok(()); // a full disk, or a file system that says nothing: making the folder will tell
    }
    if one > free {
        bail!(
            "{}: the disk has {} free, a checkpoint of this run takes {}; choose another --out",
            path.display(),
            human_bytes(free),
            human_bytes(one)
        );
    }
    // those kept, the best, and the one being written
    let most = if args.keep == 0 { u64::MAX } else { one.saturating_mul(args.keep as u64 + 2) };
    if args.keep > 0 && most > free {
        out::note(format_args!(
            "the disk has {} free; with --keep {} this run's checkpoints may take {}",
            human_bytes(free),
            args.keep,
            human_bytes(most)
        ));
    }
    Ok(())
}
