//! `--chat`: lines of chat data as training data, packed, in memory as ids.

use super::super::data::open_chat;
use super::super::model::{beside, check_tokenizer, open_tokenizer};
use super::TrainArgs;
use super::data::{Opened, tasks};
use crate::out;
use anyhow::{Context, Result, bail};
use ironhorse::text::chat::{Chat, ChatFiles, ChatLine, Counts};
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
    if train.lines.is_empty() {
        bail!("{}: all samples were chosen for validation; give --val-data", args.data[0].display());
    }
    Ok(Chats { chat, tokenizer, train, val })
}

impl Chats {
    /// How many samples are trained on.
    pub fn samples(&self) -> u64 {
        self.train.lines.len() as u64
    }

    /// The tokens of the longest sample.
    pub fn longest(&self) -> usize {
        let lines = self.train.lines.iter().chain(&self.val.lines);
        lines.map(|line| line.sample.ids.len()).max().unwrap_or(1)
    }

    /// About how many rows of `seq` tokens the samples fill.
    pub fn rows(&self, seq: usize) -> usize {
        let tokens: usize = self.train.lines.iter().map(|line| line.sample.ids.len().min(seq)).sum();
        tokens.div_ceil(seq).max(1)
    }

    /// Whether there is something to validate on.
    pub fn validates(&self) -> bool {
        !self.val.lines.is_empty()
    }

    /// Packs the samples into rows.
    pub fn open(mut self, args: &TrainArgs, config: &ModelConfig) -> Result<Opened> {
        let seq = args.seq.unwrap_or(1);
        let prompts = self.prompts(args, seq)?;
        let loader = |read: &mut Read, shuffle: bool| -> Result<PackedLoader> {
            let (batch, vocab, seed) = (args.batch.unwrap_or(1), config.vocab_size(), args.seed);
            let config = LoaderConfig { batch, seq, vocab, seed, shuffle };
            Ok(PackedLoader::new(read.cut(seq), config)?)
        };
        let (packed, counts) = (loader(&mut self.train, true)?, self.train.counts);
        if counts.learned == 0 {
            bail!(
                "{}: of {} samples nothing is learned with --mask {}; look at them with: ironhorse data show",
                args.data[0].display(),
                counts.samples,
                args.template.mask().name()
            );
        }
        let stats = packed.stats();
        let val = if self.validates() { Some(loader(&mut self.val, false)?) } else { None };
        say(args, &counts, stats, val.as_ref());
        let stop = self.chat.end();
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
        let lines = if self.validates() { &self.val.lines } else { &self.train.lines };
        let mut prompts = Vec::new();
        for line in lines {
            let ids = line.sample.prompt();
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

/// One line about the samples.
fn say(args: &TrainArgs, counts: &Counts, stats: PackStats, val: Option<&PackedLoader>) {
    let val = val.map_or_else(String::new, |val| format!("; {} more for validation", val.stats().samples));
    out::note(format_args!(
        "{}: {}; in {} rows of {}, {:.1} % padding{val}",
        args.data[0].display(),
        counts.text(args.seq),
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
    lines: Vec<ChatLine>,
    counts: Counts,
    facts: Vec<SourceFacts>,
}

impl Reading<'_> {
    fn read(&self, paths: &[PathBuf]) -> Result<Read> {
        let files = ChatFiles::new(paths)?;
        let mut read = Read::default();
        for line in files.samples(self.chat, self.args.template.mask(), None) {
            if self.control.stop_reason().is_some() {
                return Err(TrainError::Stopped.into());
            }
            let line = line?;
            if read.facts.last().is_none_or(|facts| facts.path != line.path) {
                let bytes = std::fs::read(&line.path)
                    .with_context(|| format!("{}: cannot read", line.path.display()))?;
                read.facts.push(SourceFacts { tokens: 0, max_token: 0, ..facts(&line.path, &bytes) });
            }
            if let Some(facts) = read.facts.last_mut() {
                facts.tokens += line.sample.ids.len() as u64;
                let largest = line.sample.ids.iter().copied().max().unwrap_or(0);
                facts.max_token = facts.max_token.max(largest.unsigned_abs());
            }
            if !line.sample.ids.is_empty() {
                read.lines.push(line);
            }
        }
        for facts in &mut read.facts {
            facts.path = std::path::absolute(&facts.path).unwrap_or_else(|_| facts.path.clone());
        }
        Ok(read)
    }
}

fn facts(path: &Path, bytes: &[u8]) -> SourceFacts {
    SourceFacts { path: path.to_owned(), ..facts_of_memory("chat", bytes) }
}

impl Read {
    /// Takes out a part for validation. What a sample holds decides, so that the part is the same in every run and no
    /// sample is on both sides. A fraction above 0 takes at least one of several samples.
    fn split(&mut self, fraction: f64) -> Self {
        if fraction <= 0.0 || self.lines.len() < 2 {
            return Self::default();
        }
        let least = self.lines.iter().map(|line| line.sample.lot()).fold(f64::INFINITY, f64::min);
        let all = std::mem::take(&mut self.lines);
        let (val, train): (Vec<_>, Vec<_>) = all.into_iter().partition(|line| {
            let lot = line.sample.lot();
            lot < fraction || lot <= least
        });
        self.lines = train;
        Self { lines: val, ..Self::default() }
    }

    /// The samples, none longer than `seq`, counted.
    fn cut(&mut self, seq: usize) -> Vec<Sample> {
        let mut samples = Vec::with_capacity(self.lines.len());
        for mut line in self.lines.drain(..) {
            line.cut = line.sample.ids.len().saturating_sub(seq);
            line.sample.ids.truncate(seq);
            line.sample.learned.truncate(seq);
            self.counts.add(&line);
            samples.push(line.sample);
        }
        samples
    }
}
