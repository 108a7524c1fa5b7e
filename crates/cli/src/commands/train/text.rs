//! `--data` as text: prepared once into a cache folder beside the runs, then trained on as shards.

use super::super::model::{RUNS, beside, check_tokenizer, open_tokenizer};
use super::super::prepare::{Shown, left_out};
use super::TrainArgs;
use crate::out;
use anyhow::{Result, bail};
use ironhorse::text::Error as TextError;
use ironhorse::text::prepare::{Manifest, Settings, ShardFacts, identity, prepare};
use ironhorse::text::read::{Format, Input, ReadSettings, is_data_name, resolve};
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::train::Error as TrainError;
use ironhorse::train::format::WeightSource;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::run::Control;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Where prepared text is kept, below the folder of the runs.
const CACHE: &str = ".data";
/// With at most this many text files the end of each is for validation; with more, and with other data, some documents are.
const FEW: usize = 20;
const TAIL: f64 = 0.1;
const DOCUMENTS: f64 = 0.01;

/// Replaces text in `--data` and `--val-data` by shards, and a folder of `prepare` by what its manifest lists. Chooses the
/// tokenizer where none was given: the one of that folder, the one beside the weights, bytes for a vocabulary of 256, GPT-2's if
/// it fits.
pub fn replace(
    args: &mut TrainArgs,
    config: &ModelConfig,
    weights: Option<&dyn WeightSource>,
    control: &Control,
) -> Result<()> {
    prepared_folder(args)?;
    let is_text = |paths: &[PathBuf]| paths.iter().any(|path| is_data_name(path));
    let (train, val) = (is_text(&args.data), is_text(&args.val_data));
    if args.tokenizer.is_none()
        && !args.data.is_empty()
        && let Some(weights) = weights
        && let Some(found) = beside(weights, weights.path())?
        && found.vocab_size() <= config.vocab_size()
    {
        args.tokenizer = Some(PathBuf::from(found.name()));
    }
    if !train && !val {
        return Ok(());
    }
    let tokenizer = choose(args.tokenizer.as_deref(), config)?;
    let mut cache = None;
    if val {
        let made = cached(&args.val_data, &tokenizer, false, control)?;
        args.val_data = made.paths(&made.manifest.train);
        cache = Some(made.folder);
    }
    if train {
        let made = cached(&args.data, &tokenizer, args.val_data.is_empty(), control)?;
        if made.manifest.train.is_empty() {
            bail!("{}: all documents were chosen for validation; give --val-data", args.data[0].display());
        }
        args.data = made.paths(&made.manifest.train);
        if args.val_data.is_empty() {
            args.val_data = made.paths(&made.manifest.val);
        }
        cache = Some(made.folder);
    }
    args.tokenizer = cache; // with the files of the tokenizer: the run can be repeated when the original is gone
    Ok(())
}

/// Text as shards, without a part for validation, prepared once into the cache.
pub fn text_as_shards(paths: &[PathBuf], tokenizer: &Tokenizer) -> Result<Vec<PathBuf>> {
    let made = cached(paths, tokenizer, false, &Control::default())?;
    Ok(made.paths(&made.manifest.train))
}

/// `--data FOLDER` that `prepare` has made.
fn prepared_folder(args: &mut TrainArgs) -> Result<()> {
    let [folder] = &args.data[..] else { return Ok(()) };
    let Some(manifest) = folder.is_dir().then(|| Manifest::read(folder)).transpose()?.flatten() else {
        return Ok(());
    };
    let made = Made { folder: folder.clone(), manifest };
    if args.val_data.is_empty() {
        args.val_data = made.paths(&made.manifest.val);
    }
    args.data = made.paths(&made.manifest.train);
    args.tokenizer.get_or_insert(made.folder);
    Ok(())
}

/// The tokenizer for text.
fn choose(given: Option<&Path>, config: &ModelConfig) -> Result<Tokenizer> {
    let vocab = config.vocab_size();
    match given {
        Some(name) => check_tokenizer(open_tokenizer(name)?, vocab),
        None if vocab == 256 => Ok(Tokenizer::bytes()),
        None => {
            let gpt2 = Tokenizer::open("gpt2")?;
            if gpt2.vocab_size() > vocab {
                bail!(
                    "the model has {vocab} tokens, fewer than the tokenizer gpt2 with {}; give --tokenizer",
                    gpt2.vocab_size()
                );
            }
            Ok(gpt2)
        }
    }
}

/// A folder of shards.
struct Made {
    folder: PathBuf,
    manifest: Manifest,
}

impl Made {
    fn paths(&self, shards: &[ShardFacts]) -> Vec<PathBuf> {
        shards.iter().map(|shard| self.folder.join(&shard.file)).collect()
    }
}

/// Prepares text into the cache, unless it is there.
fn cached(asked: &[PathBuf], tokenizer: &Tokenizer, split: bool, control: &Control) -> Result<Made> {
    let inputs = resolve(asked, None)?;
    let folder = Path::new(RUNS).join(CACHE);
    let few = inputs.len() <= FEW && inputs.iter().all(|input| input.format == Format::Text);
    let read = ReadSettings { val_tail: (split && few).then_some(TAIL), ..ReadSettings::default() };
    let val = if split && !few { DOCUMENTS } else { 0.0 };
    // of runs that start at once one prepares, and the others wait for it
    let mut settings = Settings { val, read, wait: true, ..Settings::new(&folder, "text") };
    settings.out = folder.join(&identity(&inputs, tokenizer, &settings)[..16]);
    let mut shown = Shown::new();
    let prepared = prepare(&inputs, tokenizer, &settings, &mut |progress| {
        shown.show(progress);
        if control.stop_reason().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    shown.finish();
    let prepared = match prepared {
        Err(TextError::Stopped) => return Err(TrainError::Stopped.into()),
        prepared => prepared?,
    };
    let made = Made { folder: settings.out, manifest: prepared.manifest };
    tell(asked, &inputs, tokenizer, &made, prepared.unchanged);
    Ok(made)
}

/// Says in a line what was prepared, and where it is.
fn tell(asked: &[PathBuf], inputs: &[Input], tokenizer: &Tokenizer, made: &Made, before: bool) {
    let counts = &made.manifest.counts;
    let more = if inputs.len() > 1 { format!(" and {} more", inputs.len() - 1) } else { String::new() };
    let val = match counts.val_tokens {
        0 => String::new(),
        val => format!(", {val} for validation"),
    };
    out::note(format_args!(
        "{}{more}: {} tokens of {}{val}, {} in {}",
        asked[0].display(),
        counts.train_tokens,
        tokenizer.name(),
        if before { "prepared before" } else { "prepared" },
        made.folder.display()
    ));
    if let Some(left) = left_out(counts) {
        out::note(left);
    }
}
