//! `ironhorse fetch`
//!
//! ```text
//! names.rs    the names in other commands' flags     shown.rs  progress on a terminal and elsewhere
//! ```

pub mod names;
mod shown;

use crate::args::{heading, json_help};
use crate::hardware::human_bytes;
use crate::signals::Handlers;
use crate::{Outcome, out};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use ironhorse::cuda::Cache;
use ironhorse::train::format::atomic::AtomicFile;
use ironhorse::train::run::Control;
use ironhorse_fetch::{Error, Fetched, Fetcher, Kind, Listed, Name, Settings, Wanted, list};
use serde::Serialize;
use shown::Shown;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Downloads models and data by name, into the cache that Hugging Face's libraries use, too
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse fetch tinyshakespeare\n  \
    ironhorse fetch gpt2                                  GPT-2 124M: configuration, weights, tokenizer\n  \
    ironhorse fetch Qwen/Qwen2.5-0.5B@main                any model of the hub, at any revision\n  \
    ironhorse fetch datasets/roneneldan/TinyStories --file 'TinyStories-*.txt'\n  \
    ironhorse fetch org/gated-model --out model           also copies the files to a folder\n  \
    ironhorse fetch --list\n\n\
    Names also work where a model, data or a tokenizer is asked for, and what is not in the cache is then fetched:\n  \
    ironhorse train --init gpt2 --data tinyshakespeare\n  \
    ironhorse generate --model org/name --prompt 'The train'\n\n\
    A download that was interrupted goes on where it ended. HF_TOKEN (or `hf auth login`) is for models whose licence one has to\n\
    agree to; HF_HOME and HF_HUB_CACHE move the cache, HF_ENDPOINT names another hub, HF_HUB_OFFLINE=1 keeps off the network.\n\n\
    Exit code: 0 done, 2 could not run, 3 stopped early, can be resumed.")]
pub struct FetchArgs {
    /// tinyshakespeare, hellaswag, gpt2, or a model of the hub as org/name, a data set as datasets/org/name; with @ a revision
    #[arg(value_name = "NAME", required_unless_present = "list")]
    names: Vec<String>,
    /// Only files whose paths match this pattern; can be given several times [default: for a model the configuration, weights
    /// as safetensors and tokenizer; for a data set all of one format]
    #[arg(long, help_heading = heading::DATA, value_name = "PATTERN")]
    file: Vec<String>,
    /// The names are those of data sets
    #[arg(long, help_heading = heading::DATA)]
    dataset: bool,
    /// List the known names and what is in the cache
    #[arg(long, help_heading = heading::OUTPUT, conflicts_with_all = ["names", "file", "dataset", "out"])]
    list: bool,
    /// Also copy the files to this folder
    #[arg(long, help_heading = heading::OUTPUT, value_name = "DIR")]
    out: Option<PathBuf>,
    #[arg(long, help = json_help!("what is where"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Finds and downloads, with the settings of the environment.
fn fetcher() -> Fetcher {
    Fetcher::new(Settings::from_env(Cache::open(None).folder().map(Path::to_owned)))
}

#[derive(Serialize)]
struct Report {
    fetched: Vec<Fetched>,
    bytes: u64,
    received: u64,
    seconds: f64,
}

pub fn run(args: &FetchArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let fetcher = fetcher();
    if args.list {
        let all = list(fetcher.settings())?;
        table(&all)?;
        out::json(args.json.as_deref(), &all)?;
        return Ok(Outcome::Done);
    }
    ensure!(args.out.is_none() || args.names.len() == 1, "--out is for one name; give one at a time");
    let control = Control::default();
    let _handlers = Handlers::install(&control).context("cannot listen to signals")?;
    let started = Instant::now();
    let mut fetched = Vec::new();
    for name in &args.names {
        match one(args, &fetcher, name, &control) {
            Ok(done) => fetched.push(done),
            Err(error) if matches!(error.downcast_ref(), Some(Error::Stopped)) => {
                out::note("stopped; the same command goes on from here");
                return Ok(Outcome::Stopped);
            }
            Err(error) => return Err(error),
        }
    }
    if let (Some(out), [fetched]) = (&args.out, &fetched[..]) {
        copy(fetched, out)?;
    }
    let sum = |of: fn(&Fetched) -> u64| -> u64 { fetched.iter().map(of).sum() };
    let (bytes, received) = (sum(Fetched::bytes), sum(|fetched| fetched.received));
    let report = Report { bytes, received, seconds: started.elapsed().as_secs_f64(), fetched };
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

/// Fetches a name and says where it is.
fn one(args: &FetchArgs, fetcher: &Fetcher, text: &str, control: &Control) -> Result<Fetched> {
    let name = Name::parse(text, args.dataset, fetcher.settings())?;
    let wanted = match &name {
        Name::File(_) if !args.file.is_empty() => bail!("{text} is a single file; leave --file out"),
        Name::Repo(_, Some(_)) if !args.file.is_empty() => bail!("{text} names files; leave --file out"),
        Name::Repo(_, Some(files)) => Wanted::Files(std::slice::from_ref(files)),
        Name::Repo(..) if !args.file.is_empty() => Wanted::Files(&args.file),
        Name::Repo(repo, None) if repo.kind == Kind::Model => Wanted::Model,
        Name::File(_) | Name::Repo(..) => Wanted::Dataset,
    };
    let mut shown = Shown::new(control);
    let done = fetcher.fetch(&name, wanted, &mut shown);
    shown.finish();
    let done = done?;
    let how = match done.received {
        0 => "was there already".to_owned(),
        received => shown.summary(received),
    };
    let place = match &done.paths()[..] {
        [path] => path.display().to_string(),
        _ => done.folder.display().to_string(),
    };
    let (count, size) = (done.files.len(), human_bytes(done.bytes()));
    out::note(format_args!("{text}: {count} {}, {size}, {how}", if count == 1 { "file" } else { "files" }));
    out::line(place)?;
    Ok(done)
}

/// Copies the files; each is whole or absent. Not links: an edited copy must not change the cache.
fn copy(fetched: &Fetched, to: &Path) -> Result<()> {
    for file in &fetched.files {
        let (from, to) = (fetched.folder.join(&file.path), to.join(&file.path));
        let folder = to.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot create", folder.display()))?;
        let mut source =
            std::fs::File::open(&from).with_context(|| format!("{}: cannot open", from.display()))?;
        let mut copy = AtomicFile::create(&to)?;
        let mut bytes = vec![0; 1 << 20];
        loop {
            let count =
                source.read(&mut bytes).with_context(|| format!("{}: cannot read", from.display()))?;
            if count == 0 {
                break;
            }
            copy.sink().put(&bytes[..count])?;
        }
        copy.commit()?;
    }
    out::note(format_args!("copied to {}", to.display()));
    Ok(())
}

fn table(all: &[Listed]) -> Result<()> {
    out::line(format_args!("{:<40} {:>10}   what, where", "name", "in cache"))?;
    for listed in all {
        let size = if listed.bytes == 0 { "-".into() } else { human_bytes(listed.bytes) };
        let mut told: Vec<String> = listed.about.iter().cloned().collect();
        told.extend(listed.revisions.iter().map(|(name, commit)| format!("{name} is {commit:.8}")));
        if listed.unfinished > 0 {
            told.push(format!("{} unfinished", human_bytes(listed.unfinished)));
        }
        told.extend(listed.folder.as_ref().map(|folder| folder.display().to_string()));
        out::line(format_args!("{:<40} {size:>10}   {}", listed.name, told.join(", ")))?;
    }
    out::line("\nany other model of the hub: org/name, a data set: datasets/org/name")
}
