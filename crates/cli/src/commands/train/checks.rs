//! Flags that need each other: what does not fit together is refused, by the names of the flags.

use super::TrainArgs;
use crate::args::FlagValue;
use crate::out;
use anyhow::{Result, bail};
use ironhorse::train::run::rampup::Rampup;
use ironhorse::train::run::schedule::{Decay, LrSchedule};

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
