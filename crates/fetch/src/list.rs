//! What the caches hold.

use crate::cache::is_plain_name;
use crate::known::KNOWN_MODELS;
use crate::{Fetcher, Kind, Name, Result, Settings};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A name and what is there of it.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// The name as it is given on the command line.
    pub name: String,
    /// What it is, for names that are known without the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// Bytes on the disk, unfinished downloads included; 0 if nothing is there.
    pub bytes: u64,
    /// The part of `bytes` that belongs to unfinished downloads.
    pub unfinished: u64,
    /// The revisions and their commits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub revisions: Vec<(String, String)>,
    /// The folder it is in, if anything is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
}

/// The known names, then what else Hugging Face's cache holds, by name.
pub fn list(settings: &Settings) -> Result<Vec<Listed>> {
    let mut repos = settings.hub.as_deref().map(repositories).unwrap_or_default();
    let mut all = Vec::new();
    let fetcher = Fetcher::new(settings.clone());
    for file in &settings.known {
        let own =
            settings.own.is_some().then(|| fetcher.find(&Name::File(file.clone()), crate::Wanted::Dataset));
        let found = own.transpose()?.flatten();
        all.push(Listed {
            name: file.name.clone(),
            about: Some(file.about.clone()),
            bytes: found.as_ref().map_or(0, |found| found.bytes()),
            unfinished: 0,
            revisions: Vec::new(),
            folder: found.map(|found| found.folder),
        });
    }
    for (name, moved, about) in KNOWN_MODELS {
        let at = repos
            .iter()
            .position(|repo| repo.name == name)
            .or_else(|| repos.iter().position(|repo| repo.name == moved));
        let found = at.map(|at| repos.remove(at));
        let nothing = Listed {
            name: name.into(),
            about: None,
            bytes: 0,
            unfinished: 0,
            revisions: Vec::new(),
            folder: None,
        };
        all.push(Listed { name: name.into(), about: Some(about.into()), ..found.unwrap_or(nothing) });
    }
    all.extend(repos);
    Ok(all)
}

/// The repositories of the cache, sorted by name.
fn repositories(hub: &Path) -> Vec<Listed> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(hub).into_iter().flatten().flatten() {
        let folder_name = entry.file_name();
        let Some((kind, id)) = folder_name.to_str().and_then(|name| name.split_once("--")) else { continue };
        let kind = [Kind::Model, Kind::Dataset].into_iter().find(|known| known.plural() == kind);
        let Some(kind) = kind else { continue };
        let start = if kind == Kind::Dataset { "datasets/" } else { "" };
        let (mut bytes, mut unfinished) = (0, 0);
        for blob in std::fs::read_dir(entry.path().join("blobs")).into_iter().flatten().flatten() {
            let size = blob.metadata().map_or(0, |meta| meta.len());
            bytes += size;
            if blob.file_name().to_string_lossy().ends_with(".incomplete") {
                unfinished += size;
            }
        }
        let mut revisions = Vec::new();
        for reference in std::fs::read_dir(entry.path().join("refs")).into_iter().flatten().flatten() {
            let commit = std::fs::read_to_string(reference.path()).unwrap_or_default().trim().to_owned();
            if is_plain_name(&commit) {
                revisions.push((reference.file_name().to_string_lossy().into_owned(), commit));
            }
        }
        revisions.sort();
        found.push(Listed {
            name: format!("{start}{}", id.replacen("--", "/", 1)),
            about: None,
            bytes,
            unfinished,
            revisions,
            folder: Some(entry.path()),
        });
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}
