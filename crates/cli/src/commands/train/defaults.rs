//! Settings that depend on the model and on the number of steps.

use super::args::ScheduleArg;
use super::{TrainArgs, tune};
use crate::out;
use ironhorse::train::model::{Gpt2Config, ModelConfig};
use ironhorse::train::run::schedule::DECAY_FRACTION;

/// A small model with the default learning rate spikes if the rate rises by more than this part of it in a step: 60 steps
/// with a warm-up of 12 went from a loss of 4.0 to 5.9, with a warm-up of 30 they fell all the way.
const LEAST_WARMUP: u64 = 40;

/// The learning rate of adapters.
const LORA_LR: f32 = 2e-4;

/// The model of `ironhorse train` without flags: learns the built-in stories in less than 90 s on two cores.
pub fn builtin_model() -> ModelConfig {
    Gpt2Config::new(128, 256, 4, 4, 128).into()
}

/// Fills in the sizes of a batch.
pub fn settle_batch(args: &mut TrainArgs, config: &ModelConfig) {
    let small = config.width() <= 256;
    args.batch.get_or_insert(if small { 8 } else { 4 });
    args.seq.get_or_insert(if small { 128 } else { 64 }.min(config.max_seq_len()));
}

/// Fills in every setting that was not given; serialised, the result reproduces the run.
pub fn settle(mut args: TrainArgs, config: &ModelConfig) -> TrainArgs {
    let small = config.width() <= 256;
    let pick = |a: u64, b: u64| if small { a } else { b };
    settle_batch(&mut args, config);
    args.steps.get_or_insert(pick(2200, 100));
    let steps = args.steps.unwrap_or(1);
    let warmup = pick(100, 20).min(steps / 2);
    // a run too short for a gentle warm-up gets a lower peak instead
    let peak = if small && args.warmup.is_none() {
        4e-3 * (warmup.clamp(1, LEAST_WARMUP) as f32 / LEAST_WARMUP as f32)
    } else if small {
        4e-3
    } else {
        3e-4
    };
    args.adapters.settle(config);
    let peak = match args.adapters.lora {
        _ if args.dpo => tune::learning_rate(&args, config),
        Some(_) => LORA_LR,
        None => peak,
    };
    args.lr.get_or_insert(peak);
    args.final_fraction.get_or_insert(if small { 0.02 } else { 0.1 });
    if args.schedule == ScheduleArg::Wsd {
        args.decay_fraction.get_or_insert(DECAY_FRACTION);
    }
    args.beta2.get_or_insert(if small { 0.98 } else { 0.95 });
    args.warmup.get_or_insert(warmup);
    shorten_warmup(&mut args);
    args.val_every.get_or_insert(pick(200, 50));
    args.sample_every.get_or_insert(pick(500, 0));
    args.sample_tokens.get_or_insert(pick(700, 64) as usize);
    // The built-in stories are bytes, whatever the model's vocabulary.
    args.sampling.settle(if args.data.is_empty() { 256 } else { config.vocab_size() });
    args
}

/// A warm-up longer than the whole run, such as that of a longer run's config.toml, becomes half of it.
pub fn shorten_warmup(args: &mut TrainArgs) {
    if let (Some(steps), Some(warmup)) = (args.steps, args.warmup)
        && warmup > steps
    {
        args.warmup = Some(steps / 2);
        let half = steps / 2;
        out::note(format_args!("--warmup {warmup} is longer than the run of {steps} steps: {half} are used"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Asked, Command, parse};

    fn settled(flags: &str) -> (u64, f32, u64) {
        let line = format!("ironhorse train {flags}");
        let Ok(Asked::Run(cli)) = parse(line.split_whitespace().map(Into::into)) else { panic!("{flags}") };
        let Command::Train(args) = cli.command else { panic!("{flags}") };
        let args = settle(*args, &builtin_model());
        (args.steps.unwrap(), args.lr.unwrap(), args.warmup.unwrap())
    }

    #[test]
    fn the_schedule_scales_with_the_steps() {
        // the default run, whose bits are promised
        assert_eq!(settled(""), (2200, 4e-3, 100));
        assert_eq!(settled("--steps 200"), (200, 4e-3, 100));
        assert_eq!(settled("--steps 60"), (60, 3e-3, 30));
        for steps in [1_u64, 2, 3, 10, 59, 79, 80, 150, 1000] {
            let (_, lr, warmup) = settled(&format!("--steps {steps}"));
            assert!(
                lr / warmup.max(1) as f32 <= 1.001 * 4e-3 / LEAST_WARMUP as f32,
                "{steps}: {lr} in {warmup}"
            );
            assert!(lr > 0.0 && warmup <= steps / 2, "{steps}");
        }
        // what is given stays
        assert_eq!(settled("--steps 60 --lr 1e-2"), (60, 1e-2, 30));
        assert_eq!(settled("--steps 60 --warmup 3"), (60, 4e-3, 3));
    }
}
