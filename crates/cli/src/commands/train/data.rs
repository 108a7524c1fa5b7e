//! Training data: shards or the built-in stories, checked before the first step.

use super::super::choices::Named;
use super::super::model::{check_tokenizer, open_tokenizer};
use super::TrainArgs;
use crate::progress;
use anyhow::{Result, bail};
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::train::data::corpus::{Split, corpus};
use ironhorse::train::data::survey::{facts_of_memory, fingerprint};
use ironhorse::train::data::{
    Loader, LoaderConfig, MemoryTokens, PackStats, SourceFacts, Tokens, expand_globs, open_shards, survey,
};
use ironhorse::train::eval::{PromptForm, Task, TaskFile};
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::run::{Control, Prompt, TrainData};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes of built-in stories: more than the default run reads.
const TRAIN_BYTES: usize = 4 << 20;
const VAL_BYTES: usize = 1 << 17;

/// The bar that is shown while shards are read for the first time.
const CHECKING: &str =
    "checking the data {bar:30.cyan/dim} {bytes}/{total_bytes}  {bytes_per_sec}  ETA {eta}";

/// The data of a run, and what they are.
pub struct Opened {
    pub data: TrainData,
    /// How the samples were packed, if they are.
    pub packed: Option<PackStats>,
    pub train: Vec<SourceFacts>,
    pub val: Vec<SourceFacts>,
}

/// Opens the data; every token of every shard is checked against the vocabulary, unless `control` stops it.
pub fn open(args: &TrainArgs, config: &ModelConfig, control: &Control) -> Result<Opened> {
    if args.chat {
        return super::chat::read(args, config, control)?.open(args, config);
    }
    let tokenizer = match &args.tokenizer {
        Some(name) => Some(open_tokenizer(name)?),
        None if args.data.is_empty() || config.vocab_size() == 256 => Some(Tokenizer::bytes()),
        None => None,
    };
    let tokenizer = tokenizer.map(|found| check_tokenizer(found, config.vocab_size())).transpose()?;
    let own = args.data.is_empty();
    let (train, train_facts) = match own {
        true => stories(args, config, Split::Train)?,
        false => shards((args, config), &args.data, true, control)?,
    };
    let (val, val_facts) = match (args.val_data.is_empty(), own) {
        (true, true) => {
            stories(args, config, Split::Validation).map(|(loader, facts)| (Some(loader), facts))?
        }
        (true, false) => (None, Vec::new()),
        (false, _) => shards((args, config), &args.val_data, false, control)
            .map(|(loader, facts)| (Some(loader), facts))?,
    };
    let tokenizer = tokenizer.map(|found| Arc::new(found) as Arc<dyn Codec>);
    let tasks = tasks(args, config, tokenizer.as_deref())?;
    let (train, val) = (train.into(), val.map(Into::into));
    // a prompt that cannot be encoded is refused now, not after hours
    let prompts = tokenizer.iter().map(|tokenizer| Prompt::of_text(tokenizer.as_ref(), &args.prompt));
    let prompts = prompts.collect::<Result<_, _>>()?;
    let stop = tokenizer.as_ref().map_or_else(Vec::new, |tokenizer| tokenizer.ends());
    let data = TrainData { train, val, tokenizer, tasks, prompts, stop };
    Ok(Opened { data, packed: None, train: train_facts, val: val_facts })
}

/// The questions of `--eval`. Their tokens, those of the tokenizer's text included, must be in the vocabulary.
pub fn tasks(args: &TrainArgs, config: &ModelConfig, tokenizer: Option<&dyn Codec>) -> Result<Vec<Task>> {
    Named::check_names("--eval", &args.eval)?;
    let mut tasks = Vec::new();
    for Named { name, file } in &args.eval {
        let (form, limit, vocab) = (PromptForm::Harness, args.eval_limit, config.vocab_size());
        let source = TaskFile { name, path: file, form, limit, vocab };
        if source.needs_tokenizer() && tokenizer.is_none() {
            bail!(
                "--eval {name}: {} is text, and there is no tokenizer to cut it into tokens; give --tokenizer, such as gpt2 or a \
                 tokenizer.json",
                file.display()
            );
        }
        tasks.push(source.read(tokenizer)?);
    }
    Ok(tasks)
}

fn loader(
    args: &TrainArgs,
    config: &ModelConfig,
    sources: Vec<Box<dyn Tokens>>,
    shuffle: bool,
    facts: &[SourceFacts],
) -> Result<Loader> {
    let config = LoaderConfig {
        batch: args.batch.unwrap_or(1),
        seq: args.seq.unwrap_or(1),
        vocab: config.vocab_size(),
        seed: args.seed,
        shuffle,
    };
    let mut loader = Loader::new(sources, config)?;
    loader.set_content(&fingerprint(facts));
    Ok(loader)
}

fn stories(args: &TrainArgs, config: &ModelConfig, split: Split) -> Result<(Loader, Vec<SourceFacts>)> {
    let (name, bytes, shuffle) = match split {
        Split::Train => ("built-in stories", TRAIN_BYTES, true),
        Split::Validation => ("built-in stories, validation", VAL_BYTES, false),
    };
    let text = corpus(args.seed, split, bytes);
    let facts = vec![facts_of_memory(name, &text)];
    let sources: Vec<Box<dyn Tokens>> = vec![Box::new(MemoryTokens::from_bytes("built-in stories", text))];
    Ok((loader(args, config, sources, shuffle, &facts)?, facts))
}

fn shards(
    (args, config): (&TrainArgs, &ModelConfig),
    patterns: &[PathBuf],
    shuffle: bool,
    control: &Control,
) -> Result<(Loader, Vec<SourceFacts>)> {
    let sources = open_shards(patterns)?;
    let mut bar = None;
    let cache = cache_file();
    let facts = survey(&expand_globs(patterns)?, config.vocab_size(), cache.as_deref(), &mut |done, all| {
        bar.get_or_insert_with(|| progress::bar(Some(all), CHECKING)).set_position(done);
        if control.stop_reason().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let facts = facts?;
    Ok((loader(args, config, sources, shuffle, &facts)?, facts))
}

/// The cache of shards that were checked already.
fn cache_file() -> Option<PathBuf> {
    let folder = ironhorse::cuda::Cache::open(None).folder()?.to_owned();
    Some(folder.join("data.json"))
}
