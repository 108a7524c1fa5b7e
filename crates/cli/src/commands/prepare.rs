//! `ironhorse prepare`

use super::fetch::names;
use super::model::open_tokenizer;
use crate::args::heading;
use crate::hardware::human_bytes;
use crate::progress::{LINE_EVERY, bar};
use crate::signals::Handlers;
use crate::{Outcome, number, out};
use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::ProgressBar;
use ironhorse::text::prepare::{Counts, Manifest, Progress, Settings, prepare};
use ironhorse::text::read::{Format, ReadSettings, resolve};
use ironhorse::train::run::Control;
use serde::Serialize;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Turns text into token shards to train on
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse prepare book.txt --out data/book\n  \
    ironhorse prepare 'web/*.jsonl.zst' --field text --tokenizer cl100k_base --out data/web --dedup\n  \
    ironhorse prepare part-*.parquet --tokenizer Qwen3-0.6B/ --shard-tokens 100M\n  \
    zcat dump.gz | ironhorse prepare - --delimiter '<|endoftext|>' --out data/dump\n  \
    ironhorse train --model d12 --data data/web\n\n\
    Inputs are .txt, .md (a document each, or several with --delimiter), .jsonl and .parquet (a document for each line\n\
    or row), plain, .gz or .zst. The folder gets NAME_train_000000.bin, ..., NAME_val_000000.bin, ..., the tokenizer, and\n\
    manifest.json, written last. The shards are the same bytes for any number of threads. After Ctrl-C, a full disk or\n\
    a crash the same command goes on.\n\n\
    Exit code: 0 done, 2 could not run, 3 stopped early, can be resumed.")]
pub struct PrepareArgs {
    /// Files, folders or patterns; - means standard input
    #[arg(required = true, value_name = "INPUT", num_args = 1..)]
    inputs: Vec<PathBuf>,
    /// bytes, gpt2, p50k_base, cl100k_base, o200k_base, a tokenizer.json, a rank file, a tokenizer.bin, or a folder with one
    #[arg(long, help_heading = heading::DATA, default_value = "gpt2", value_name = "NAME")]
    tokenizer: String,
    /// The token before every document [default: the tokenizer's end-of-text token]
    #[arg(long, help_heading = heading::DATA, value_name = "TOKEN")]
    separator: Option<String>,
    /// The field of JSON lines, or the column of parquet files, that has the text
    #[arg(long, help_heading = heading::DATA, default_value = "text", value_name = "NAME")]
    field: String,
    /// What the inputs hold, whatever their names say: text, jsonl or parquet
    #[arg(long, help_heading = heading::DATA, value_name = "FORMAT", value_parser = format)]
    format: Option<Format>,
    /// What stands between the documents of a text file [default: a file is one document]
    #[arg(long, help_heading = heading::DATA, value_name = "TEXT")]
    delimiter: Option<String>,
    /// Leave out documents whose bytes came before
    #[arg(long, help_heading = heading::DATA)]
    dedup: bool,
    /// Leave out lines that are invalid and files that are not text, and count them, instead of stopping
    #[arg(long, help_heading = heading::DATA)]
    skip_bad: bool,
    /// The part of the documents that is for validation, chosen by the hash of each
    #[arg(long, help_heading = heading::VALIDATION, default_value_t = 0.005, value_name = "X", value_parser = number::below_1::<f64>)]
    val: f64,
    /// The part at the end of every text file that is for validation, for a corpus of few documents
    #[arg(long, help_heading = heading::VALIDATION, value_name = "X", value_parser = number::below_1::<f64>)]
    val_tail: Option<f64>,
    /// Tokens per shard, such as 100M
    #[arg(long, help_heading = heading::OUTPUT, default_value = "100M", value_name = "N", value_parser = tokens)]
    shard_tokens: usize,
    /// The folder of the shards
    #[arg(long, help_heading = heading::OUTPUT, default_value = "data", value_name = "DIR")]
    out: PathBuf,
    /// The start of the names of the shards [default: the name of the folder]
    #[arg(long, help_heading = heading::OUTPUT, value_name = "NAME")]
    name: Option<String>,
    /// Replace what the folder holds of an earlier preparation
    #[arg(long, help_heading = heading::OUTPUT)]
    overwrite: bool,
    /// Threads that encode; 0 means one for each core
    #[arg(long, help_heading = heading::DEVICE, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    threads: usize,
    /// Also write the manifest and the speed to this file as JSON; - means standard output, and the text for people goes to standard error
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn format(text: &str) -> Result<Format, String> {
    Format::parse(text).ok_or_else(|| "expected text, jsonl or parquet".to_owned())
}

/// A number of tokens that a shard can have: plain, or with K, M or B.
fn tokens(text: &str) -> Result<usize, String> {
    let factors = [('K', 1e3), ('M', 1e6), ('B', 1e9)];
    let (digits, factor) = factors
        .iter()
        .find_map(|&(unit, factor)| Some((text.strip_suffix([unit, unit.to_ascii_lowercase()])?, factor)))
        .unwrap_or((text, 1.0));
    let number = digits.parse::<f64>().map_or(0.0, |digits| digits * factor);
    match number {
        1.0..=2_147_483_647.0 => Ok(number as usize),
        _ => Err("expected 1 to 2147483647, such as 100M".into()),
    }
}

#[derive(Serialize)]
struct PrepareReport<'a> {
    #[serde(flatten)]
    manifest: &'a Manifest,
    /// Whether the shards were there already.
    unchanged: bool,
    resumed: bool,
    seconds: f64,
    /// Megabytes of the input files, as they are on the disk, read per second.
    mb_per_s: f64,
}

pub fn run(args: &PrepareArgs) -> Result<Outcome> {
    out::check_json_in(args.json.as_deref(), Some(&args.out))?;
    let mut tokenizer = open_tokenizer(args.tokenizer.as_ref())?;
    if let Some(token) = &args.separator {
        tokenizer.set_eot(token)?;
    }
    let control = Control::default();
    let _handlers = Handlers::install(&control).context("cannot listen to signals")?;
    let inputs = resolve(&names::data(&args.inputs, &control)?, args.format)?;
    let settings = Settings {
        val: if args.val_tail.is_some() { 0.0 } else { args.val },
        shard_tokens: args.shard_tokens,
        dedup: args.dedup,
        threads: args.threads,
        overwrite: args.overwrite,
        read: ReadSettings {
            field: args.field.clone(),
            skip_bad: args.skip_bad,
            delimiter: args.delimiter.clone(),
            val_tail: args.val_tail,
            ..ReadSettings::default()
        },
        ..Settings::new(&args.out, &name(args)?)
    };
    let started = Instant::now();
    let mut shown = Shown::new();
    let prepared = prepare(&inputs, &tokenizer, &settings, &mut |progress| {
        shown.show(progress);
        if control.stop_reason().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    shown.finish();
    let prepared = match prepared {
        Err(ironhorse::text::Error::Stopped) => {
            let out = args.out.display();
            out::note(format_args!("stopped; the same command goes on from here (in {out})"));
            return Ok(Outcome::Stopped);
        }
        prepared => prepared?,
    };
    let seconds = started.elapsed().as_secs_f64();
    let bytes: u64 = prepared.manifest.inputs.iter().map(|input| input.bytes).sum();
    let mb_per_s = shown.rate.unwrap_or(bytes as f64 / seconds.max(1e-9)) / 1e6;
    report(&prepared.manifest, &args.out, (!prepared.unchanged).then_some((seconds, mb_per_s)))?;
    out::json(
        args.json.as_deref(),
        &PrepareReport {
            manifest: &prepared.manifest,
            unchanged: prepared.unchanged,
            resumed: prepared.resumed,
            seconds,
            mb_per_s,
        },
    )?;
    Ok(Outcome::Done)
}

/// The start of the names of the shards.
fn name(args: &PrepareArgs) -> Result<String> {
    if let Some(name) = &args.name {
        return Ok(name.clone());
    }
    let absolute = std::path::absolute(&args.out).unwrap_or_else(|_| args.out.clone());
    match absolute.file_name().and_then(|name| name.to_str()) {
        Some(name) => Ok(name.to_owned()),
        None => bail!("--out {} has no name in UTF-8 to name the shards by; give --name", args.out.display()),
    }
}

/// What came out, for people.
fn report(manifest: &Manifest, out: &Path, speed: Option<(f64, f64)>) -> Result<()> {
    let counts = &manifest.counts;
    let mut text = format!(
        "{} documents, {} tokens in {} training and {} validation shards → {}",
        counts.train_documents + counts.val_documents,
        counts.train_tokens + counts.val_tokens,
        manifest.train.len(),
        manifest.val.len(),
        out.display()
    );
    match speed {
        Some((seconds, rate)) => text += &format!(" ({seconds:.1} s, {rate:.1} MB/s)"),
        None => text += " (prepared before; nothing to do)",
    }
    out::line(text)?;
    if let Some(left) = left_out(counts) {
        out::line(left)?;
    }
    if manifest.val.is_empty() {
        out::line(
            "no document was chosen for validation; with few documents use --val-tail 0.1 (the end of every text file), or a larger --val",
        )?;
    }
    if manifest.train.is_empty() {
        out::line("all documents were chosen for validation; use a smaller --val, or --val-tail 0.1")?;
    }
    Ok(())
}

/// What was left out or changed, if anything.
pub fn left_out(counts: &Counts) -> Option<String> {
    let all = [
        (counts.empty, "empty documents left out"),
        (counts.duplicates, "duplicates left out"),
        (counts.bad, "invalid lines left out"),
        (counts.not_text, "files left out that are not text"),
        (counts.missing, "rows without text left out"),
        (counts.replaced, "invalid UTF-8 sequences replaced by U+FFFD"),
        (counts.forced_cuts, "cuts inside words of more than 64 MiB, where tokens may differ"),
    ];
    let told: Vec<_> =
        all.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    (!told.is_empty()).then(|| told.join(", "))
}

/// Progress on standard error: a bar on a terminal, lines elsewhere.
pub struct Shown {
    bar: Option<ProgressBar>,
    started: Instant,
    /// What was read when this run began.
    first: Option<u64>,
    last_line: Instant,
    /// Bytes per second so far.
    pub rate: Option<f64>,
}

impl Shown {
    pub fn new() -> Self {
        let bar = std::io::stderr()
            .is_terminal()
            .then(|| bar(Some(0), "{bar:30.cyan/dim} {bytes}/{total_bytes}  {msg}  ETA {eta}"));
        Self { bar, started: Instant::now(), first: None, last_line: Instant::now(), rate: None }
    }

    pub fn show(&mut self, progress: &Progress) {
        if self.first.is_none() {
            self.first = Some(progress.read);
            if let Some(bar) = &self.bar {
                bar.set_position(progress.read);
                bar.reset_eta();
            }
        }
        let first = self.first.unwrap_or(0);
        let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
        let rate = (progress.read - first) as f64 / seconds;
        self.rate = Some(rate);
        let message = format!("{} tokens  {:.1} MB/s", progress.tokens, rate / 1e6);
        if let Some(bar) = &self.bar {
            bar.set_length(progress.total.max(progress.read));
            bar.set_position(progress.read);
            bar.set_message(message);
        } else if self.last_line.elapsed() >= LINE_EVERY {
            let read = human_bytes(progress.read);
            if progress.total == 0 {
                out::note(format_args!("{read}  {message}")); // standard input
            } else {
                let left = progress.total.saturating_sub(progress.read) as f64 / rate.max(1.0);
                out::note(format_args!(
                    "{read} of {}  {message}  ETA {left:.0}s",
                    human_bytes(progress.total)
                ));
            }
            self.last_line = Instant::now();
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_shard() {
        assert_eq!(tokens("100M"), Ok(100_000_000));
        assert_eq!(tokens("1.5k"), Ok(1500));
        assert_eq!(tokens("1B"), Ok(1_000_000_000));
        assert_eq!(tokens("7"), Ok(7));
        for wrong in ["", "0", "M", "3B", "-1", "1e99", "10MB", "nan"] {
            assert!(tokens(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_was_left_out_is_told() {
        assert_eq!(left_out(&Counts::default()), None);
        let counts = Counts { empty: 2, replaced: 1, ..Counts::default() };
        let told = "2 empty documents left out, 1 invalid UTF-8 sequences replaced by U+FFFD";
        assert_eq!(left_out(&counts).unwrap(), told);
    }
}
