//! `--chat`: lines of chat data as training data, packed, in memory as ids.

use super::super::data::open_chat;
use super::super::model::{beside, check_tokenizer, open_tokenizer};
use super::data::{Opened, tasks};
use super::{TrainArgs, pairs};
use crate::out;
use anyhow::{Context, Result, bail};
use ironhorse::text::chat::{Chat, ChatFiles, Counts};
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::text::tokenizer::bpe::Special;
use ironhorse::train::Error as TrainError;
use ironhorse::train::data::survey::facts_of_memory;
use ironhorse::train::data::{LoaderConfig, PackStats, PackedLoader, Sample, SourceFacts};
use ironhorse::train::format::WeightSource;
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::run::{Control, Prompt, TrainData};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many chats samples are drawn of.
const PROMPTS: usize = 2;
/// The part of the samples that is for validation, where no other data are.
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
        Read { facts: train.facts.clone(), ..train.split(args.val_fraction.unwrap_or(0.0)) }
    } else {
        reading.read(&args.val_data)?
    };
    if train.units.is_empty() {
        bail!("{}: all samples were chosen for validation; give --val-data", args.data[0].display());
    }
    Ok(Chats { chat, tokenizer, train, val })
}

impl Chats {
    /// How many samples are trained on.
    pub fn samples(&self) -> u64 {
        self.train.units.len() as u64
    }

    /// The tokens of the longest sample, or pair of them.
    pub fn longest(&self) -> usize {
        self.train.units.iter().chain(&self.val.units).map(|unit| length(unit)).max().unwrap_or(1)
    }

    /// About how many rows of `seq` tokens the samples fill.
    pub fn rows(&self, seq: usize) -> usize {
        let tokens: usize = self.train.units.iter().map(|unit| length(unit).min(seq)).sum();
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
        // none where nothing is left to learn
        let loader = |read: &mut Read, shuffle: bool| -> Result<Option<PackedLoader>> {
            let (batch, vocab, seed) = (args.batch.unwrap_or(1), config.vocab_size(), args.seed);
            let config = LoaderConfig { batch, seq, vocab, seed, shuffle };
            if args.dpo {
                return Ok(Some(PackedLoader::of_pairs(read.cut_pairs(seq)?, config)?));
            }
            let samples = read.cut(seq);
            Ok(if samples.is_empty() { None } else { Some(PackedLoader::new(samples, config)?) })
        };
        let Some(packed) = loader(&mut self.train, true)? else {
            let (path, counts) = (args.data[0].display(), self.train.counts);
            if counts.truncated == counts.samples {
                bail!(
                    "{path}: every sample is longer than {seq} tokens and is cut before an answer; give a larger --seq"
                );
            }
            let (samples, mask) = (counts.samples, args.template.mask().name());
            bail!(
                "{path}: of {samples} samples nothing is learned with --mask {mask}; look at them with: ironhorse data show"
            );
        };
        let stats = packed.stats();
        let val = if self.validates() { loader(&mut self.val, false)? } else { None };
        say(args, &self.train, stats, val.as_ref());
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
        for sample in units.iter().filter_map(|unit| unit.first()) {
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

/// The tokens of a sample or a pair.
fn length(unit: &[Sample]) -> usize {
    unit.iter().map(|sample| sample.ids.len()).sum()
}

/// One line about the samples.
fn say(args: &TrainArgs, read: &Read, stats: PackStats, val: Option<&PackedLoader>) {
    let counts = read.counts.text(args.seq.filter(|_| !args.dpo));
    let mut counts = if args.dpo { format!("{} pairs of {counts}", stats.samples) } else { counts };
    if args.dpo && read.counts.truncated > 0 {
        let Counts { truncated, cut, .. } = read.counts;
        counts += &format!("; {truncated} of pairs longer than a row were cut by {cut} in all");
    }
    if read.counts.unlearned > 0 && !args.dpo {
        counts += ", and they are left out";
    }
    if read.left_out > 0 {
        counts += &format!("; {} pairs are left out: of an answer nothing is left to learn", read.left_out);
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

/// What chats are read with.
struct Reading<'a> {
    chat: &'a Chat,
    args: &'a TrainArgs,
    control: &'a Control,
}

/// Chats that were read.
#[derive(Default)]
struct Read {
    /// Samples or, of preferences, pairs of them, the chosen one first.
    units: Vec<Vec<Sample>>,
    counts: Counts,
    /// Pairs that cannot be used.
    left_out: u64,
    facts: Vec<SourceFacts>,
}

impl Reading<'_> {
    fn read(&self, paths: &[PathBuf]) -> Result<Read> {
        let files = ChatFiles::new(paths)?;
        let mut read = Read::default();
        let mask = self.args.template.mask();
        if self.args.dpo {
            for line in files.pairs(self.chat, mask) {
                let line = line?;
                self.add(&mut read, &line.path, line.pair.into())?;
            }
        } else {
            for line in files.samples(self.chat, mask, None) {
                let line = line?;
                self.add(&mut read, &line.path, vec![line.sample])?;
            }
        }
        for facts in &mut read.facts {
            facts.path = std::path::absolute(&facts.path).unwrap_or_else(|_| facts.path.clone());
        }
        Ok(read)
    }

    /// Adds what a line of a file holds.
    fn add(&self, read: &mut Read, path: &Path, unit: Vec<Sample>) -> Result<()> {
        if self.control.stop_reason().is_some() {
            return Err(TrainError::Stopped.into());
        }
        if read.facts.last().is_none_or(|facts| facts.path != path) {
            let bytes = std::fs::read(path).with_context(|| format!("{}: cannot read", path.display()))?;
            read.facts.push(SourceFacts { tokens: 0, max_token: 0, ..facts(path, &bytes) });
        }
        if let Some(facts) = read.facts.last_mut() {
            facts.tokens += length(&unit) as u64;
            let largest = unit.iter().flat_map(|sample| &sample.ids).copied().max().unwrap_or(0);
            facts.max_token = facts.max_token.max(largest.unsigned_abs());
        }
        if unit.iter().all(|sample| !sample.ids.is_empty()) {
            read.units.push(unit);
        }
        Ok(())
    }
}

fn facts(path: &Path, bytes: &[u8]) -> SourceFacts {
    SourceFacts { path: path.to_owned(), ..facts_of_memory("chat", bytes) }
}

impl Read {
    /// Takes out a part for validation. What a sample holds decides, of a pair the question, so that the part is the same in every
    /// run and no sample is on both sides. A fraction above 0 takes at least one of several samples.
    fn split(&mut self, fraction: f64) -> Self {
        if fraction <= 0.0 || self.units.len() < 2 {
            return Self::default();
        }
        let least = self.units.iter().map(|unit| lot(unit)).fold(f64::INFINITY, f64::min);
        let all = std::mem::take(&mut self.units);
        let (val, train): (Vec<_>, Vec<_>) = all.into_iter().partition(|unit| {
            let lot = lot(unit);
            lot < fraction || lot <= least
        });
        self.units = train;
        Self { units: val, ..Self::default() }
    }

    /// The samples, none longer than `seq`, counted. One of which nothing is learned would only cost time.
    fn cut(&mut self, seq: usize) -> Vec<Sample> {
        let mut samples: Vec<Sample> = self.units.drain(..).flatten().collect();
        for sample in &mut samples {
            let cut = sample.cut(seq);
            self.counts.add_sample(sample, cut);
        }
        samples.retain(|sample| sample.targets() > 0);
        samples
    }

    /// The pairs, none longer than `seq` together, counted. A pair one of whose answers is all cut off says nothing about it.
    fn cut_pairs(&mut self, seq: usize) -> Result<Vec<[Sample; 2]>> {
        let mut made = Vec::with_capacity(self.units.len());
        for mut unit in self.units.drain(..) {
            let cut = pairs::cut(&mut unit, seq);
            if unit.iter().any(|sample| sample.targets() == 0) {
                self.left_out += 1;
                continue;
            }
            unit.iter().zip(cut).for_each(|(sample, cut)| self.counts.add_sample(sample, cut));
            made.extend(<[Sample; 2]>::try_from(unit));
        }
        if made.is_empty() {
            bail!(
                "of none of {} pairs anything is left to learn in rows of {seq} tokens; give a larger --seq",
                self.left_out
            );
        }
        Ok(made)
    }
}

/// A number from 0 to 1: of a sample its own, of a pair that of its question, which several pairs may share.
fn lot(unit: &[Sample]) -> f64 {
    match unit {
        [chosen, _] => {
            let ids: Vec<i32> = chosen.prompt().into_iter().map(|id| id as i32).collect();
            Sample { learned: vec![false; ids.len()], ids }.lot()
        }
        unit => unit.first().map_or(0.0, Sample::lot),
    }
}
