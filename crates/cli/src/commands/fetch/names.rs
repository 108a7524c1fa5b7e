//! Names where a path was expected: `--init gpt2`, `--data tinyshakespeare`, `--model org/name`. A path that exists is what
//! it is. What is not there and can only be a name is looked up in the caches, and downloaded if it is not in them; nothing
//! else ever uses the network.

use super::fetcher;
use super::shown::Shown;
use anyhow::{Result, anyhow, bail};
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::train::Error as TrainError;
use ironhorse::train::run::Control;
use ironhorse_fetch::{Error, Fetched, Kind, Name, Settings, Wanted};
use std::path::{Path, PathBuf};

/// A file or folder of weights: the path itself, or that of a name.
pub fn weights(given: &Path, control: &Control) -> Result<PathBuf> {
    match name(given) {
        None => Ok(given.to_owned()),
        Some(name @ Name::Repo(_, None)) if is(&name, Kind::Model) => {
            Ok(files(given, &name, Wanted::Model, control)?.folder)
        }
        Some(_) => bail!("{} is data, expected a model", given.display()),
    }
}

/// The value of a flag that also takes sizes, of which `gpt2` is one: only names with an owner are weights.
pub fn weights_or_sizes(given: &str, control: &Control) -> Result<PathBuf> {
    let has_owner = given.contains('/');
    if has_owner { weights(Path::new(given), control) } else { Ok(given.into()) }
}

/// Data: the paths and patterns themselves, and the files of names. Of a data set the part to train on, or the files that
/// `datasets/org/name/PATTERN` asks for.
pub fn data(given: &[PathBuf], control: &Control) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for path in given {
        match name(path) {
            Some(name @ Name::File(_)) => all.extend(files(path, &name, Wanted::Dataset, control)?.paths()),
            Some(name) if is(&name, Kind::Dataset) => {
                let wanted = match &name {
                    Name::Repo(_, Some(pattern)) => Wanted::Files(std::slice::from_ref(pattern)),
                    _ => Wanted::Train,
                };
                all.extend(files(path, &name, wanted, control)?.paths());
            }
            _ => all.push(path.clone()), // also a model's name: only paths look like one
        }
    }
    Ok(all)
}

/// The path of one file of data.
pub fn one_file(given: &Path, control: &Control) -> Result<PathBuf> {
    match &data(&[given.to_owned()], control)?[..] {
        [path] => Ok(path.clone()),
        several => bail!("{} is {} files, expected one", given.display(), several.len()),
    }
}

/// The tokenizer of a name; a name that is part of the program, or a path, is what it is.
pub fn tokenizer(given: &Path) -> Result<PathBuf> {
    if given.to_str().is_some_and(Tokenizer::is_name) {
        return Ok(given.to_owned());
    }
    match name(given) {
        Some(name @ Name::Repo(_, None)) if is(&name, Kind::Model) => {
            Ok(files(given, &name, Wanted::Tokenizer, &Control::default())?.folder)
        }
        _ => Ok(given.to_owned()),
    }
}

fn is(name: &Name, kind: Kind) -> bool {
    matches!(name, Name::Repo(repo, _) if repo.kind == kind)
}

/// The name that a path stands for which does not exist.
fn name(given: &Path) -> Option<Name> {
    if given.exists() {
        return None;
    }
    Name::guess(given.to_str()?, &Settings::from_env(None))
}

fn files(given: &Path, name: &Name, wanted: Wanted<'_>, control: &Control) -> Result<Fetched> {
    let mut shown = Shown::new(control);
    let done = fetcher().find_or_fetch(name, wanted, &mut shown);
    shown.finish();
    done.map_err(|error| match error {
        Error::Stopped => TrainError::Stopped.into(),
        Error::Train(error) => error.into(),
        error @ Error::NotFound { .. } => {
            anyhow!("{error}; there is no file or folder {} either", given.display())
        }
        other => other.into(),
    })
}
