//! `--chat`: lines of chat data as training data, packed, in memory as ids.

use super::super::data::open_chat;
use super::super::model::{beside, check_tokenizer, open_tokenizer};
use super::data::{Opened, tasks};
use super::samples::{Read, Reading, Tally, Unit};
use super::{TrainArgs, pairs};
use crate::out;
use anyhow::{Context, Result, bail};
use ironhorse::text::chat::Chat;
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::text::tokenizer::bpe::Special;
use ironhorse::train::data::{LoaderConfig, PackStats, PackedLoader};
use ironhorse::train::format::WeightSource;
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::run::{Control, Prompt, TrainData};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;

/// How many chats give their beginnings as prompts to the samples of a run.
const PROMPTS: usize = 2;
/// The part of the samples to validate on where there are no other data for it.
const VAL_FRACTION: f64 = 0.05;

/// Refuses flags that go with chats only, or that chats lack; chooses the tokenizer beside the weights.
pub fn settle(args: &mut TrainArgs, config: &ModelConfig, weights: Option<&dyn WeightSource>) -> Result<()> {
    if args.data.is_empty() {
        bail!("--chat needs the chats; give --data FILE");
    }
    pairs::check(args)?;
    if let Some(path) = args.data.iter().chain(&args.val_data).find(|path| path.as_os_str() == "-") {
        bail!("--data {}: a run reads its data again when it is resumed; give a file", path.display());
    }
    if args.tokenizer.is_none() {
        let found = weights.map(|weights| beside(weights, weights.path())).transpose()?.flatten();
        args.tokenizer = match found {
            Some(found) => Some(PathBuf::from(found.name())),
            None if config.vocab_size() == 256 => Some("bytes".into()),
            None => bail!(
                "{}: has no tokenizer beside it; give --tokenizer, such as a folder or a tokenizer.json",
                weights.map_or_else(|| args.model.clone(), |weights| weights.path().display().to_string())
            ),
        };
    }
    args.template.mask.get_or_insert(crate::args::MaskArg::Assistant);
    if args.val_data.is_empty() && args.val_batches > 0 {
        args.val_fraction.get_or_insert(VAL_FRACTION);
    }
    Ok(())
}

/// Refuses flags of chats without chats.
pub fn refuse_flags(args: &TrainArgs) -> Result<()> {
    let flags = [
        ("--mask", args.template.mask.is_some()),
        ("--template", args.template.template.is_some()),
        ("--val-fraction", args.val_fraction.is_some()),
        ("--epochs", args.epochs.is_some()),
        ("--dpo", args.dpo),
        ("--beta", args.beta.is_some()),
    ];
    match flags.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => bail!("{flag} goes with --chat: lines of chat data"),
        None => Ok(()),
    }
}

/// The chats of a run, which any sequence length may be chosen for.
pub struct Chats {
    chat: Chat,
    tokenizer: Tokenizer,
    train: Read,
    val: Read,
}

/// Reads the chats of a run.
pub fn read(args: &TrainArgs, config: &ModelConfig, control: &Control) -> Result<Chats> {
    let name = args.tokenizer.as_deref().context("--chat needs --tokenizer")?;
    let mut tokenizer = check_tokenizer(open_tokenizer(name)?, config.vocab_size())?;
    if let Some(file) = &args.template.template {
        // it goes where the weights go
        let source =
            std::fs::read_to_string(file).with_context(|| format!("{}: cannot read", file.display()))?;
        tokenizer.set_template(&source)?;
    }
    let chat = open_chat(name, args.template.template.as_deref())?;
    let reading = Reading { chat: &chat, args, control };
    let mut train = reading.read(&args.data)?;
    let val = if args.val_data.is_empty() {
        train.split(args.val_fraction.unwrap_or(0.0))
    } else {
        reading.read(&args.val_data)?
    };
    if train.units.is_empty() {
        bail!("{}: all samples were chosen for validation; give --val-data", args.data[0].display());
    }
    Ok(Chats { chat, tokenizer, train, val })
}

/// One line about roles that do not follow each other as usual, where the template takes them.
pub fn note_disorder<'a>(tallies: impl IntoIterator<Item = &'a Tally>) {
    let tallies: Vec<&Tally> = tallies.into_iter().filter(|tally| tally.count > 0).collect();
    let Some(first) = tallies.first() else { return };
    let all: u64 = tallies.iter().map(|tally| tally.count).sum();
    let lines = if all == 1 { "1 line has".to_owned() } else { format!("{all} lines have") };
    out::note(format_args!(
        "{}; {lines} roles out of order, which the template takes as they are",
        first.first
    ));
}

impl Chats {
    /// How many samples are trained on.
    pub fn samples(&self) -> u64 {
        self.train.units.len() as u64
    }

    /// The tokens of the longest sample, or pair of them.
    pub fn longest(&self) -> usize {
        self.train.units.iter().chain(&self.val.units).map(Unit::length).max().unwrap_or(1)
    }

    /// About how many rows of `seq` tokens the samples fill.
    pub fn rows(&self, seq: usize) -> usize {
        let tokens: usize = self.train.units.iter().map(|unit| unit.length().min(seq)).sum();
        tokens.div_ceil(seq).max(1)
    }

    /// Whether there is something to validate on.
    pub fn validates(&self) -> bool {
        !self.val.units.is_empty()
    }

    /// Packs the samples into rows.
    pub fn open(mut self, args: &TrainArgs, config: &ModelConfig) -> Result<Opened> {
        let seq = args.seq.unwrap_or(1);
        let prompts = self.prompts(args, seq)?;
        // `None` where nothing is left to learn
        let loader = |read: &mut Read, shuffle: bool| -> Result<Option<PackedLoader>> {
            let (batch, vocab, seed) = (args.batch.unwrap_or(1), config.vocab_size(), args.seed);
            let config = LoaderConfig { batch, seq, vocab, seed, shuffle };
            let made = match args.dpo {
                true => some(read.cut_pairs(seq)).map(|pairs| PackedLoader::of_pairs(pairs, config)),
                false => some(read.cut(seq)).map(|samples| PackedLoader::new(samples, config)),
            };
            Ok(made.transpose()?)
        };
        let Some(packed) = loader(&mut self.train, true)? else {
            self.train.refuse_useless(&args.data)?;
            let (path, counts) = (args.data[0].display(), self.train.counts);
            if counts.truncated == counts.samples {
                bail!(
                    "{path}: every sample is longer than {seq} tokens and is cut before an answer; give a larger --seq"
                );
            }
            let (samples, mask) = (counts.samples, args.template.mask().name());
            bail!(
                "{path}: --mask {mask} leaves nothing to learn in any sample (samples: {samples}); look at them with: ironhorse data show"
            );
        };
        let stats = packed.stats();
        let val = if self.validates() { loader(&mut self.val, false)? } else { None };
        say(args, &self.train, stats, val.as_ref());
        self.chat.doubts(args.template.mask()).iter().for_each(out::note);
        note_disorder([&self.train.disorder, &self.val.disorder]);
        let stop = self.chat.ends();
        let tokenizer: Arc<dyn Codec> = Arc::new(self.tokenizer);
        let tasks = tasks(args, config, Some(tokenizer.as_ref()))?;
        let (train, val, tokenizer) = (packed.into(), val.map(Into::into), Some(tokenizer));
        let data = TrainData { train, val, tokenizer, tasks, prompts, stop };
        Ok(Opened { data, train: self.train.facts, val: self.val.facts, packed: Some(stats) })
    }

    /// What samples continue: `--prompt` as a message to the model, or what comes before the first answer in chats of the
    /// validation data.
    fn prompts(&self, args: &TrainArgs, seq: usize) -> Result<Vec<Prompt>> {
        let tokenizer = self.chat.tokenizer();
        if !args.prompt.is_empty() {
            if self.chat.template().is_none() {
                return Ok(vec![Prompt::of_text(tokenizer, &args.prompt)?]);
            }
            let text = self.chat.prompt(&[json!({"role": "user", "content": args.prompt})], true)?;
            let ids = tokenizer.encode_as(text.as_bytes(), Special::Tokens)?;
            return Ok(vec![Prompt { text, ids }]);
        }
        let units = if self.validates() { &self.val.units } else { &self.train.units };
        let mut prompts = Vec::new();
        for sample in units.iter().filter_map(|unit| unit.samples.first()) {
            let ids = sample.prompt();
            if prompts.len() == PROMPTS {
                break;
            }
            if (1..seq).contains(&ids.len()) && prompts.iter().all(|prompt: &Prompt| prompt.ids != ids) {
                prompts.push(Prompt { text: tokenizer.decode_lossy(&ids)?, ids });
            }
        }
        Ok(prompts)
    }
}

/// A list that has something in it.
fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    Some(list).filter(|list| !list.is_empty())
}

/// One line about the samples.
fn say(args: &TrainArgs, read: &Read, stats: PackStats, val: Option<&PackedLoader>) {
    let counts = read.counts.text(args.seq.filter(|_| !args.dpo));
    let mut counts = if args.dpo { format!("{} pairs of {counts}", stats.samples) } else { counts };
    if args.dpo {
        counts += &read.pairs_text();
    } else if read.counts.unlearned > 0 {
        counts += ", and they are left out";
    }
    let val = val.map_or_else(String::new, |val| format!("; {} more for validation", val.stats().samples));
    out::note(format_args!(
        "{}: {}; in {} rows of {}, {:.1} % padding{val}",
        args.data[0].display(),
        counts,
        stats.rows,
        args.seq.unwrap_or(1),
        stats.padding() * 100.0
    ));
}

/// Optimizer steps in which a run sees its samples so many times.
pub fn steps(args: &TrainArgs, stats: PackStats, epochs: f64) -> u64 {
    let rows = args.batch.unwrap_or(1) as f64 * f64::from(args.accumulate);
    ((stats.rows as f64 * epochs / rows).ceil() as u64).clamp(1, u64::from(u32::MAX))
}

/// How often few samples are seen, and how often many are.
pub fn epochs(samples: u64) -> f64 {
    if samples < 1000 { 3.0 } else { 1.0 }
}
