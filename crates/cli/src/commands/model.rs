//! The model a command is given, the tokenizer that belongs to it, and how far back it looks.

use super::fetch::names;
use crate::out;
use anyhow::{Context, Result, bail};
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::train::format::WeightSource;
use ironhorse::train::format::checkpoint::newest_run;
use ironhorse::train::run::Control;
use std::path::{Path, PathBuf};

/// The folder of the runs.
pub const RUNS: &str = "runs";

/// The model named by `--model`, fetched if need be, or the newest run.
pub fn given_or_newest(given: Option<&Path>) -> Result<PathBuf> {
    match given {
        Some(path) => names::weights(path, &Control::default()),
        None => newest_run(Path::new(RUNS))
            .context("no run below runs/ has a checkpoint; run `ironhorse train` first, or give --model"),
    }
}

/// Tokens that are scored at a time, if nothing else is asked for.
pub fn batch_tokens(is_cpu: bool) -> usize {
    if is_cpu { 2048 } else { 16384 }
}

/// How far back to look: as far as `flag` asks for, or as long as the sequences were that a checkpoint was trained with; at
/// most the model's context.
pub fn context(flag: &str, asked: Option<usize>, source: &dyn WeightSource) -> usize {
    let own = source.config().max_seq_len();
    if let Some(asked) = asked.filter(|&asked| asked > own) {
        out::note(format_args!("{flag} is {asked}; the model looks back {own} tokens at most"));
    }
    let trained = || source.trainer()?.settings.get("seq")?.as_u64().map(|seq| seq as usize);
    asked.or_else(trained).map_or(own, |context| context.clamp(1, own))
}

/// The one given, the one beside the weights, or bytes for a model of 256 tokens.
pub fn find_tokenizer(given: Option<&Path>, source: &dyn WeightSource, model: &Path) -> Result<Tokenizer> {
    let vocab = source.config().vocab_size();
    let found = match given {
        Some(name) => Some(open_tokenizer(name)?),
        None => beside(source, model)?,
    };
    match found {
        Some(found) => check_tokenizer(found, vocab),
        None if vocab == 256 => Ok(Tokenizer::bytes()),
        None => bail!(
            "{}: has no tokenizer beside it; give --tokenizer, such as gpt2 or a tokenizer.json",
            model.display()
        ),
    }
}

/// The tokenizer of `--tokenizer`: a name, a file or a folder; one of the hub is fetched if need be.
pub fn open_tokenizer(name: &Path) -> Result<Tokenizer> {
    let name = names::tokenizer(name)?;
    Ok(match name.to_str() {
        Some(name) => Tokenizer::open(name)?,
        None => Tokenizer::open_path(&name)?,
    })
}

/// The tokenizer in the folder of the weights.
pub fn beside(source: &dyn WeightSource, model: &Path) -> Result<Option<Tokenizer>> {
    let folder =
        |path: &Path| if path.is_dir() { Some(path.to_owned()) } else { path.parent().map(Path::to_owned) };
    for folder in [folder(source.path()), folder(model)].into_iter().flatten() {
        let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
        if let Some(found) = Tokenizer::beside(&folder)? {
            return Ok(Some(found.of_model(source.text_tokens())));
        }
        let bin = folder.join("gpt2_tokenizer.bin");
        if bin.is_file() {
            return Ok(Some(Tokenizer::open_path(&bin)?));
        }
    }
    Ok(None)
}

/// Refuses a tokenizer that has more tokens than the model.
pub fn check_tokenizer(tokenizer: Tokenizer, vocab: usize) -> Result<Tokenizer> {
    if tokenizer.vocab_size() > vocab {
        bail!(
            "{}: the tokenizer has {} tokens, the model only {vocab}; give the model's own",
            tokenizer.name(),
            tokenizer.vocab_size()
        );
    }
    Ok(tokenizer)
}
