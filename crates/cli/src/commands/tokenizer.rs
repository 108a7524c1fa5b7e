//! `ironhorse tokenizer train` and `ironhorse tokenizer show`

use super::fetch::names;
use super::model::open_tokenizer;
use crate::args::heading;
use crate::{Outcome, number, out};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ironhorse::text::read::{ReadSettings, documents, resolve};
use ironhorse::text::tokenizer::bpe::Special;
use ironhorse::text::tokenizer::show::Shown;
use ironhorse::text::tokenizer::train::{TrainSettings, train};
use ironhorse::text::tokenizer::{CONFIG_NAME, JSON_NAME};
use ironhorse::train::format::atomic::write_file;
use ironhorse::train::run::Control;
use serde::Serialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Trains a BPE vocabulary, or shows how a text is cut into tokens
#[derive(Args)]
pub struct TokenizerArgs {
    #[command(subcommand)]
    command: TokenizerCommand,
}

#[derive(Subcommand)]
enum TokenizerCommand {
    Train(TrainTokenizerArgs),
    Show(ShowArgs),
}

/// Trains a byte-level BPE vocabulary on text; transformers loads the result as it is
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse tokenizer train book.txt --vocab-size 4096 --out tok\n  \
    ironhorse tokenizer train 'web/*.jsonl.zst' --vocab-size 32000 --split o200k --special '<|endoftext|>' --special '<|im_start|>'\n\n\
    Writes tokenizer.json and tokenizer_config.json into the folder.")]
struct TrainTokenizerArgs {
    /// Files, folders or patterns, as of `prepare`; - means standard input
    #[arg(required = true, value_name = "INPUT", num_args = 1..)]
    inputs: Vec<PathBuf>,
    /// The number of tokens, the 256 bytes and the special tokens included
    #[arg(long, help_heading = heading::MODEL, default_value_t = 32000, value_name = "N", value_parser = number::count::<usize>)]
    vocab_size: usize,
    /// How text is split into words: gpt2, cl100k, llama3, o200k, qwen2, or a regular expression that matches the words
    #[arg(long, help_heading = heading::MODEL, default_value = "gpt2", value_name = "PATTERN")]
    split: String,
    /// A special token; can be given several times, the first stands between documents [default: <|endoftext|>]
    #[arg(long, help_heading = heading::MODEL, value_name = "TOKEN")]
    special: Vec<String>,
    /// Pairs that are rarer are not merged
    #[arg(long, help_heading = heading::MODEL, default_value_t = 2, value_name = "N", value_parser = number::count::<u64>)]
    min_frequency: u64,
    /// The field of JSON lines, or the column of parquet files, that has the text
    #[arg(long, help_heading = heading::DATA, default_value = "text", value_name = "NAME")]
    field: String,
    /// Leave out lines that are invalid and files that are not text instead of stopping
    #[arg(long, help_heading = heading::DATA)]
    skip_bad: bool,
    /// Stop reading after so many bytes of text, such as 1GB: more rarely changes the vocabulary
    #[arg(long, help_heading = heading::DATA, value_name = "SIZE", value_parser = number::bytes)]
    most: Option<u64>,
    /// The folder of the tokenizer
    #[arg(long, help_heading = heading::OUTPUT, default_value = "tokenizer", value_name = "DIR")]
    out: PathBuf,
    /// Also write a report to this file as JSON; - means standard output, and the text for people goes to standard error
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Shows a text token by token: coloured, with ids and bytes per token
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse tokenizer show 'Hello, world!'\n  \
    ironhorse tokenizer show --tokenizer cl100k_base --file notes.md\n  \
    echo 'a b' | ironhorse tokenizer show --file - --ids")]
struct ShowArgs {
    /// The text
    #[arg(value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "file")]
    text: Option<String>,
    /// Read the text from this file; - means standard input
    #[arg(long, help_heading = heading::DATA, value_name = "FILE")]
    file: Option<PathBuf>,
    /// bytes, gpt2, p50k_base, cl100k_base, o200k_base, a tokenizer.json, a rank file, a tokenizer.bin, a folder with one, or a model of the hub such as org/name
    #[arg(long, help_heading = heading::DATA, default_value = "gpt2", value_name = "NAME")]
    tokenizer: String,
    /// Markers such as <|endoftext|> in the text are tokens, not text
    #[arg(long, help_heading = heading::DATA)]
    special: bool,
    /// List every token with its id and bytes
    #[arg(long, help_heading = heading::OUTPUT)]
    ids: bool,
    /// Also write the tokens to this file as JSON; - means standard output, and the text for people goes to standard error
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: &TokenizerArgs) -> Result<Outcome> {
    match &args.command {
        TokenizerCommand::Train(args) => run_train(args),
        TokenizerCommand::Show(args) => run_show(args),
    }
}

#[derive(Serialize)]
struct TrainReport {
    vocab_size: usize,
    bytes: u64,
    seconds: f64,
}

fn run_train(args: &TrainTokenizerArgs) -> Result<Outcome> {
    out::check_json_in(args.json.as_deref(), Some(&args.out))?;
    let inputs = resolve(&names::data(&args.inputs, &Control::default())?, None)?;
    let read = ReadSettings { field: args.field.clone(), skip_bad: args.skip_bad, ..ReadSettings::default() };
    let mut settings = TrainSettings {
        vocab_size: args.vocab_size,
        split: args.split.clone(),
        min_frequency: args.min_frequency,
        ..TrainSettings::default()
    };
    if !args.special.is_empty() {
        settings.special = args.special.clone();
    }
    let started = Instant::now();
    let (mut bytes, mut failed) = (0, None);
    let most = args.most.unwrap_or(u64::MAX);
    let texts = documents(&inputs, &read)
        .map_while(|text| text.map_err(|error| failed = Some(error)).ok())
        .take_while(|text| {
            let wanted = bytes < most;
            bytes += text.len() as u64;
            wanted
        });
    let trained = train(&settings, texts);
    if let Some(error) = failed {
        return Err(error.into());
    }
    let trained = trained?;
    std::fs::create_dir_all(&args.out).with_context(|| format!("{}: cannot create", args.out.display()))?;
    for (name, text) in [(JSON_NAME, &trained.json), (CONFIG_NAME, &trained.config)] {
        write_file(&args.out.join(name), |sink| sink.put(text.as_bytes()))?;
    }
    let (vocab_size, seconds) = (trained.vocab_size, started.elapsed().as_secs_f64());
    out::line(format_args!("{vocab_size} tokens → {} ({seconds:.1} s)", args.out.join(JSON_NAME).display()))?;
    if vocab_size < args.vocab_size {
        out::line(format_args!(
            "fewer than the {} asked for: no other pair occurs at least {} times",
            args.vocab_size, args.min_frequency
        ))?;
    }
    out::json(args.json.as_deref(), &TrainReport { vocab_size, bytes, seconds })?;
    Ok(Outcome::Done)
}

fn run_show(args: &ShowArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let text = match (&args.text, &args.file) {
        (Some(text), _) => text.clone().into_bytes(),
        (None, Some(path)) => read_file(path)?,
        (None, None) => bail!("there is no text to show; give it as an argument, or a file with --file"),
    };
    let tokenizer = open_tokenizer(args.tokenizer.as_ref())?;
    let special = if args.special { Special::Tokens } else { Special::Ordinary };
    let shown = Shown::new(&tokenizer, &text, special)?;
    out::line(shown.text(out::colours()))?;
    if args.ids {
        for token in &shown.tokens {
            out::line(format_args!("{:>8}  {:>3} bytes  {:?}", token.id, token.bytes.len(), token.text))?;
        }
    }
    out::line(format_args!(
        "{} tokens, {} bytes, {:.2} bytes per token; {} with {} tokens ({})",
        shown.tokens.len(),
        shown.bytes,
        shown.bytes_per_token,
        shown.tokenizer,
        shown.vocab_size,
        shown.method
    ))?;
    out::json(args.json.as_deref(), &shown)?;
    Ok(Outcome::Done)
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    if path == Path::new("-") {
        let mut text = Vec::new();
        std::io::stdin().read_to_end(&mut text).context("cannot read standard input")?;
        return Ok(text);
    }
    std::fs::read(path).with_context(|| format!("{}: cannot read", path.display()))
}
