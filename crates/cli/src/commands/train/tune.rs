//! `ironhorse tune`: `ironhorse train --chat` from weights, with settings that suit the model, the chats and the memory. What is
//! given stays as it is.

use super::chat::{self, Chats};
use super::{Prepared, TrainArgs, spec_of};
use crate::args::{FlagValue, MasterArg, MomentsArg, RecomputeArg, StateArgs, heading};
use crate::hardware::{check_fits, human_bytes, room};
use anyhow::{Result, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, FromArgMatches};
use indicatif::HumanDuration;
use ironhorse::core::{Engine, EngineExt, Section};
use ironhorse::train::data::PackStats;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::session::SessionSpec;
use std::path::{Path, PathBuf};
use std::time::Duration;

const ABOUT: &str = "Fine-tunes a model on chats, with settings that suit its size and this machine";
const EXAMPLES: &str = "Examples:
  ironhorse tune Qwen/Qwen3-0.6B --data chat.jsonl           all weights
  ironhorse tune Qwen/Qwen3-8B --data chat.jsonl --lora 16   adapters only
  ironhorse tune runs/0001 --data chat.jsonl --epochs 2 --lr 1e-5 --out runs/tuned
  ironhorse tune runs/tuned --data preferences.jsonl --dpo   learns which of two answers is better
  ironhorse tune --resume                                    resumes the newest run

Lines of chat data are those of `ironhorse data show`, which shows what is learned of them. Learning rate, sequence length, batch,
recomputation, 16-bit state, warm-up, validation and samples are chosen for the model, the chats and the memory, and said before the
first step; every flag of `ironhorse train` changes them. The run folder, stopping, resuming and exit codes are those of `train`.";

const DATA: &str = "Lines of chat data, or with --dpo of preferences: files, folders or patterns of .jsonl, also .gz and .zst, or a data \
                    set of the hub such as datasets/org/name";
const VAL_DATA: &str = "The same to validate on [default: a part of --data, see --val-fraction]";
const TOKENIZER: &str = "Name, file or folder of a tokenizer [default: the one beside the model]";
/// What is chosen where a flag is not given, in place of the defaults of `train`.
const CHOSEN: [(&str, &str); 15] = [
    ("batch", "the largest that fits into memory"),
    ("seq", "the longest sample, at most 2048 and the model's context"),
    ("accumulate", "32,768 tokens a step, fewer where a run would have less than 100 steps"),
    ("steps", "those of --epochs"),
    ("epochs", "3 with fewer than 1,000 samples, else 1"),
    ("lr", "by the size of the model, 1e-4 to 1e-5; of adapters 2e-4 or 1e-4; with --dpo a tenth"),
    ("warmup", "3 % of the steps, at most 100"),
    ("final_fraction", "0.1"),
    ("weight_decay", "0"),
    ("recompute", "nothing if the run fits into memory so, else as little as it takes"),
    ("master", "f32 if the run fits into memory so, else residual"),
    ("moments", "f32 if the run fits into memory so, else bf16"),
    ("val_every", "ten times in a run"),
    ("sample_every", "four times in a run"),
    ("sample_tokens", "64"),
];

/// Tokens of a step, where there are many chats.
const STEP_TOKENS: usize = 32_768;
/// Steps of a run, where there are few.
const FEW_STEPS: f64 = 100.0;
/// Longer samples are cut, unless --seq says otherwise.
const MOST_SEQ: usize = 2048;
/// Sequences are a multiple of so many tokens.
const SEQ_STEP: usize = 64;
/// Tokens that keep a GPU busy: a micro-step has as many, if need be by recomputing.
const BUSY_TOKENS: usize = 4096;
/// The part of a machine's memory that is used where nobody says how much of it is free.
const HOST_SHARE: f64 = 0.7;
/// The part of the limits that training reaches, as measured: 50 to 70 %.
const REACHED: f64 = 0.6;

/// The settings of a run that may be chosen: those that have a default and were not given. Of others a missing value tells.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    accumulate: bool,
    recompute: bool,
    state: bool,
    weight_decay: bool,
}

/// The flags of `train`, with the model in front.
pub struct TuneArgs(TrainArgs);

impl TuneArgs {
    /// The same flags as those of `train`.
    pub fn into_train(self) -> TrainArgs {
        self.0
    }
}

impl Args for TuneArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        let base = Arg::new("base").value_name("MODEL").help_heading(heading::MODEL);
        let base = base.value_parser(clap::value_parser!(PathBuf)).help(
            "What to tune: a model of the hub such as org/name, a Hugging Face folder, a run, a checkpoint or a model .bin",
        );
        let command = TrainArgs::augment_args(command).arg(base.conflicts_with("init"));
        // MODEL and the chats are what this command is about
        let hidden = |arg: Arg| arg.hide(true);
        let command = CHOSEN.iter().fold(command, |command, (id, chosen)| {
            command.mut_arg(id, |arg| {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                let what = help.split(" [default").next().unwrap_or_default();
                arg.help(format!("{what} [chosen: {chosen}]")).hide_default_value(true)
            })
        });
        command
            .mut_arg("data", |arg| arg.help(DATA))
            .mut_arg("val_data", |arg| arg.help(VAL_DATA))
            .mut_arg("tokenizer", |arg| arg.help(TOKENIZER))
            .mut_arg("init", hidden)
            .mut_arg("model", hidden)
            .mut_arg("chat", hidden)
            .about(ABOUT)
            .after_help(EXAMPLES)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for TuneArgs {
    fn from_arg_matches(found: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = TrainArgs::from_arg_matches(found)?;
        if let Some(base) = found.get_one::<PathBuf>("base") {
            args.init = Some(base.clone());
        }
        args.chat = true;
        let free = |id: &str| found.value_source(id) != Some(ValueSource::CommandLine);
        args.tuning = Some(Tuning {
            accumulate: free("accumulate"),
            recompute: free("recompute"),
            state: free("master") && free("moments"),
            weight_decay: free("weight_decay"),
        });
        Ok(Self(args))
    }

    fn update_from_arg_matches(&mut self, found: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(found)?;
        Ok(())
    }
}

/// Refuses what cannot be tuned before anything is fetched.
pub fn check(args: &TrainArgs) -> Result<()> {
    if args.init.is_none() && args.model == super::BUILTIN {
        bail!("tune needs a model, such as `ironhorse tune Qwen/Qwen3-0.6B --data chat.jsonl`");
    }
    if args.data.is_empty() {
        bail!("tune needs the chats to learn: --data chat.jsonl");
    }
    let is_text = |path: &&PathBuf| {
        path.extension().is_some_and(|end| ["txt", "md", "bin", "parquet"].iter().any(|text| end == *text))
    };
    if let Some(path) = args.data.iter().chain(&args.val_data).find(is_text) {
        bail!(
            "{}: chats are lines of JSON (.jsonl); a text is trained on with: ironhorse train --init {} --data {}",
            path.display(),
            args.init.as_deref().unwrap_or(Path::new("MODEL")).display(),
            path.display()
        );
    }
    Ok(())
}

impl Tuning {
    /// Chooses the sizes of a batch, the learning rate, and what is kept in memory.
    pub fn settle(
        self,
        args: &mut TrainArgs,
        config: &ModelConfig,
        chats: &Chats,
        engine: &dyn Engine,
    ) -> Result<()> {
        let longest = chats.longest().next_multiple_of(SEQ_STEP).min(MOST_SEQ);
        let seq = *args.seq.get_or_insert(longest.min(config.max_seq_len()));
        args.adapters.settle(config);
        args.lr.get_or_insert(learning_rate(args, config));
        if self.weight_decay {
            args.weight_decay = 0.0;
        }
        let epochs = args.epochs.unwrap_or_else(|| chat::epochs(chats.samples()));
        let rows = rows_of_step(seq, chats.rows(seq) as f64 * epochs);
        self.fit(args, config, Wanted { rows, validates: chats.validates() }, engine)
    }

    /// Chooses what goes by the number of steps.
    pub fn settle_steps(self, args: &mut TrainArgs) {
        let steps = args.steps.unwrap_or(1);
        args.warmup.get_or_insert((steps * 3 / 100).clamp(1, 100).min(steps / 2));
        args.final_fraction.get_or_insert(0.1);
        args.val_every.get_or_insert((steps / 10).max(1));
        args.sample_every.get_or_insert((steps / 4).max(1));
        args.sample_tokens.get_or_insert(64);
    }

    /// The micro-batch and the way to keep state that fit into memory: no recomputation and f32 state if a micro-step is
    /// large enough with them, else the first way with which it is, else the one with the largest.
    fn fit(
        self,
        args: &mut TrainArgs,
        config: &ModelConfig,
        wanted: Wanted,
        engine: &dyn Engine,
    ) -> Result<()> {
        let seq = args.seq.unwrap_or(1);
        let most = match (args.batch, self.accumulate) {
            (Some(batch), _) => batch,
            (None, true) => wanted.rows,
            (None, false) => (wanted.rows / args.accumulate as usize).max(1),
        };
        let least = if args.batch.is_some() { most } else { 1 };
        let enough = most.min(BUSY_TOKENS.div_ceil(seq));
        let has = room(engine).map(|has| match engine.memory().free {
            Some(_) => has,
            None => (has as f64 * HOST_SHARE) as u64,
        });
        let mut best: Option<TrainArgs> = None;
        let mut smallest = u64::MAX;
        'ways: for (state, recompute) in self.ways(args, config)? {
            let mut batch = most;
            loop {
                let mut tried = TrainArgs { batch: Some(batch), state, recompute, ..args.clone() };
                if self.accumulate {
                    tried.accumulate = u32::try_from(wanted.rows.div_ceil(batch))?;
                }
                let needs = wanted.spec(&tried, config)?.on(engine.device()).layout(config)?.total() as u64;
                smallest = smallest.min(needs);
                if has.is_none_or(|has| needs <= has) {
                    if best.as_ref().is_none_or(|best| best.batch < Some(batch)) {
                        best = Some(tried);
                    }
                    if batch >= enough {
                        break 'ways;
                    }
                    break;
                }
                if batch <= least {
                    break;
                }
                batch = (batch / 2).max(least);
            }
        }
        match best {
            Some(best) => *args = best,
            None => check_fits(engine, smallest, |_| match args.adapters.lora {
                None => "train adapters with --lora 16, or give a smaller --seq".into(),
                Some(_) => "give a smaller --seq or --batch".into(),
            })?,
        }
        Ok(())
    }

    /// Ways to keep less in memory, from the fastest and most exact on.
    fn ways(self, args: &TrainArgs, config: &ModelConfig) -> Result<Vec<(StateArgs, RecomputeArg)>> {
        let less = StateArgs { master: MasterArg::Residual, moments: MomentsArg::Bf16, ..args.state };
        let has_less = self.state && args.engine.dtype()?.is_bf16() && args.adapters.lora.is_none();
        let states = [args.state, less].into_iter().take(if has_less { 2 } else { 1 });
        let levels = match self.recompute {
            false => vec![args.recompute],
            true if config.has_experts() => {
                vec![RecomputeArg::None, RecomputeArg::Gelu, RecomputeArg::Full, RecomputeArg::Experts]
            }
            true => vec![RecomputeArg::None, RecomputeArg::Gelu, RecomputeArg::Full],
        };
        Ok(states.flat_map(|state| levels.iter().map(move |&level| (state, level))).collect())
    }
}

/// What a run should have.
#[derive(Clone, Copy)]
struct Wanted {
    /// Rows of a step.
    rows: usize,
    validates: bool,
}

impl Wanted {
    /// What such a run computes, validation and samples included.
    fn spec(self, args: &TrainArgs, config: &ModelConfig) -> Result<SessionSpec> {
        let spec = spec_of(args, config)?;
        let evaluates = self.validates || args.dpo; // which needs the losses of the start
        Ok(SessionSpec { eval: spec.train.filter(|_| evaluates), decode: Some(1), ..spec })
    }
}

/// The rows of a step, a power of two: fewer where a run would have few steps, `all` rows together.
fn rows_of_step(seq: usize, all: f64) -> usize {
    let rows = (STEP_TOKENS / seq).min((all / FEW_STEPS) as usize).max(1);
    1 << rows.ilog2()
}

/// The peak learning rate that suits a model: to learn preferences a tenth of that for chats.
pub fn learning_rate(args: &TrainArgs, config: &ModelConfig) -> f32 {
    let rate = chat_rate(config.told_params(), args.adapters.lora.is_some());
    if args.dpo { rate / 10.0 } else { rate }
}

/// The peak learning rate for chats that suits a model with so many parameters.
fn chat_rate(parameters: usize, adapters: bool) -> f32 {
    match (adapters, parameters) {
        (true, ..10_000_000_000) => 2e-4,
        (true, _) => 1e-4,
        (false, ..100_000_000) => 1e-4,
        (false, ..1_000_000_000) => 4e-5,
        (false, ..4_000_000_000) => 2e-5,
        (false, _) => 1e-5,
    }
}

/// What will be trained, how much of it counts, the memory and the expected time, in one line.
pub fn line(args: &TrainArgs, stats: PackStats, prepared: &mut Prepared) -> Result<String> {
    let model = *prepared.session.model();
    let (all, count) = (model.config.told_params(), model.trained_params());
    let trained = match model.lora {
        Some(lora) => {
            format!("{count} parameters beside {all}, adapters of rank {} on {}", lora.rank, lora.targets)
        }
        None => format!("all {all} parameters"),
    };
    let epochs = prepared.settings.all_micro_steps() as f64 * args.batch.unwrap_or(1) as f64
        / (stats.rows as f64).max(1.0);
    let seconds = expected_seconds(prepared)?;
    let precision = format!("{}{}", args.engine.dtype()?.name(), args.state.text());
    let recompute = match args.recompute {
        RecomputeArg::None => String::new(),
        level => format!(", recomputing {}", level.name()),
    };
    let engine = prepared.session.engine();
    let needs = prepared.spec.on(engine.device()).layout(&model.config)?.total() as u64;
    let has = room(engine).map_or_else(String::new, |has| format!(" of {}", human_bytes(has)));
    Ok(format!(
        "tunes {trained}, {precision}{recompute}, at --lr {:e}; {:.0} tokens count in {epochs:.1} epochs of {} samples, {} x {} x {} a step; \
         {}{has}; about {}",
        args.lr.unwrap_or(0.0),
        stats.counted as f64 * epochs,
        stats.samples,
        args.accumulate,
        args.batch.unwrap_or(1),
        args.seq.unwrap_or(1),
        human_bytes(needs),
        HumanDuration(Duration::from_secs_f64(seconds))
    ))
}

/// How long the steps will take, by the limits of the device.
fn expected_seconds(prepared: &mut Prepared) -> Result<f64> {
    let program = prepared.session.train_program()?.clone();
    let limits = prepared.session.engine().measure_limits(prepared.spec.precision.weights)?;
    let least = |sections: &[Section]| -> f64 {
        let ranges = sections.iter().map(|&section| program.range(section));
        let nodes = ranges.flat_map(|range| &program.nodes()[range]);
        nodes.map(|node| limits.least_seconds(node.op.flops(), node.op.bytes())).sum()
    };
    let micro_step = least(&[Section::Forward, Section::Backward]);
    let all: f64 = least(&Section::ALL);
    let (steps, micro_steps) = (prepared.settings.steps as f64, prepared.settings.all_micro_steps() as f64);
    Ok((micro_step * micro_steps + (all - micro_step) * steps) / REACHED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_chats_make_large_steps_and_few_make_many() {
        assert_eq!(rows_of_step(1024, 1e6), 32);
        assert_eq!(rows_of_step(2048, 1e6), 16);
        assert_eq!(rows_of_step(1024, 300.0), 2);
        assert_eq!(rows_of_step(1024, 7.0), 1);
        assert_eq!(rows_of_step(100_000, 1e6), 1);
    }

    /// Help speaks of what is chosen, and of no default of `train` that does not hold here.
    #[test]
    fn help_says_what_is_chosen() {
        let mut command = TuneArgs::augment_args(clap::Command::new("tune").term_width(0));
        let help = command.render_long_help().to_string();
        assert_eq!(help.matches("[chosen: ").count(), CHOSEN.len());
        for arg in command.get_arguments().filter(|arg| CHOSEN.iter().any(|(id, _)| arg.get_id() == *id)) {
            let said = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(arg.is_hide_default_value_set() && !said.contains("[default"), "{said}");
        }
        assert!(!help.contains("built-in stories"));
        let train =
            TrainArgs::augment_args(clap::Command::new("train").term_width(0)).render_long_help().to_string();
        assert!(train.contains("built-in stories") && !train.contains("[chosen: "));
    }

    #[test]
    fn larger_models_learn_slower_and_adapters_faster() {
        let sizes = [1_000_000, 500_000_000, 1_500_000_000, 8_000_000_000];
        let rates = sizes.map(|size| chat_rate(size, false));
        assert!(rates.windows(2).all(|pair| pair[0] > pair[1]), "{rates:?}");
        assert!(sizes.iter().all(|&size| chat_rate(size, true) > chat_rate(size, false)));
    }
}
