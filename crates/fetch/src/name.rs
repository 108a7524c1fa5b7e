//! What a name on the command line stands for.

use crate::known::KNOWN_MODELS;
use crate::{Error, KnownFile, Result, Settings};

/// Whether a repository holds a model or data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl Kind {
    /// How the hub's addresses and Hugging Face's cache name this kind.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

/// A repository of the hub at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repo {
    /// What it holds.
    pub kind: Kind,
    /// `owner/name`, or one word for some old models.
    pub id: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

/// The revision that is meant when none is given.
const MAIN: &str = "main";
/// What names of data sets begin with.
const DATASETS: &str = "datasets/";
/// Endings of files: `owner/name` with one of them is a path that was mistyped, not a repository.
const FILES: [&str; 16] = [
    "bin",
    "gz",
    "json",
    "jsonl",
    "key",
    "md",
    "model",
    "npy",
    "npz",
    "parquet",
    "pt",
    "pth",
    "safetensors",
    "toml",
    "txt",
    "zst",
];

impl Repo {
    fn new(kind: Kind, text: &str) -> Self {
        let (id, revision) = text.split_once('@').unwrap_or((text, MAIN));
        Self { kind, id: id.to_owned(), revision: revision.to_owned() }
    }

    /// The same repository under the name it has moved to or was known by before.
    pub(crate) fn other_name(&self) -> Option<Self> {
        let other = KNOWN_MODELS.iter().find_map(|&(old, new, _)| match self.id.as_str() {
            id if id == old => Some(new),
            id if id == new => Some(old),
            _ => None,
        });
        other.filter(|_| self.kind == Kind::Model).map(|id| Self { id: id.to_owned(), ..self.clone() })
    }

    /// The name as it is given on the command line.
    pub fn text(&self) -> String {
        let start = if self.kind == Kind::Dataset { DATASETS } else { "" };
        let revision = if self.revision == MAIN { String::new() } else { format!("@{}", self.revision) };
        format!("{start}{}{revision}", self.id)
    }

    /// Its page on the hub, below the hub's address.
    pub(crate) fn page(&self) -> String {
        let start = if self.kind == Kind::Dataset { DATASETS } else { "" };
        format!("{start}{}", self.id)
    }

    /// The hub's rules for names, which also keep a name from leaving the cache.
    fn check(&self) -> Result<(), &'static str> {
        let part = |part: &str| {
            !part.is_empty()
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
                && !part.starts_with(['.', '-'])
                && !part.ends_with(['.', '-'])
                && !part.contains("--")
                && !part.contains("..")
        };
        let parts: Vec<&str> = self.id.split('/').collect();
        if parts.len() > 2 || self.id.len() > 96 || !parts.iter().all(|text| part(text)) {
            return Err("is not a repository of the hub, expected owner/name");
        }
        let revision = &self.revision;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
        let whole = |part: &str| !part.is_empty() && !part.starts_with('.');
        if !revision.bytes().all(plain) || !revision.split('/').all(whole) || revision.len() > 200 {
            return Err("has an invalid revision, expected a branch, a tag or a commit after @");
        }
        Ok(())
    }
}

/// What a name stands for.
#[derive(Clone, Debug)]
pub enum Name {
    /// A file outside the hub.
    File(KnownFile),
    /// A repository, and for data sets which of its files: `datasets/owner/name/data/train-*.parquet`.
    Repo(Repo, Option<String>),
}

impl Name {
    /// The name given to `fetch`: any known name, any repository. `dataset` says that it is one of data.
    pub fn parse(text: &str, dataset: bool, settings: &Settings) -> Result<Self> {
        let wrong = |problem: &str| Error::Name { name: text.to_owned(), problem: problem.to_owned() };
        if let Some(file) = settings.known.iter().find(|file| file.name == text).filter(|_| !dataset) {
            return Ok(Self::File(file.clone()));
        }
        let (kind, rest) = match text.strip_prefix(DATASETS) {
            Some(rest) => (Kind::Dataset, rest),
            None if dataset => (Kind::Dataset, text),
            None => (Kind::Model, text),
        };
        let (id, files) = match kind {
            Kind::Dataset => split_files(rest),
            Kind::Model => (rest, None),
        };
        let repo = Repo::new(kind, id);
        repo.check().map_err(wrong)?;
        Ok(Self::Repo(repo, files.map(str::to_owned)))
    }

    /// What a name stands for where a path was expected and there is no such path. Only known names and those that can be
    /// nothing but a repository: a mistyped path must not become a question to a server.
    pub fn guess(text: &str, settings: &Settings) -> Option<Self> {
        let known = settings.known.iter().any(|file| file.name == text);
        let model = text.split_once('@').map_or(text, |(id, _)| id);
        if known || KNOWN_MODELS.iter().any(|(name, ..)| *name == model) {
            return Self::parse(text, false, settings).ok();
        }
        let (first, rest) = text.split_once('/')?;
        let ending = rest.rsplit_once('.').map(|(_, ending)| ending.to_ascii_lowercase());
        let like_a_file = ending.is_some_and(|ending| FILES.contains(&ending.as_str()));
        let dataset = text.starts_with(DATASETS) && rest.contains('/');
        if (like_a_file && !dataset) || std::path::Path::new(first).exists() {
            return None;
        }
        Self::parse(text, false, settings).ok()
    }
}

/// `owner/name@revision/data/*.parquet`: the files begin after the second slash, or the first one behind a revision.
fn split_files(text: &str) -> (&str, Option<&str>) {
    let start = text.find('@').unwrap_or(0);
    let slashes = if start > 0 { 1 } else { 2 };
    let cut = text.match_indices('/').filter(|(at, _)| *at >= start).nth(slashes - 1);
    match cut {
        Some((at, _)) => (&text[..at], Some(&text[at + 1..]).filter(|files| !files.is_empty())),
        None => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings::of(&|_| None, None)
    }

    fn repo(text: &str) -> Option<(String, String, Kind, Option<String>)> {
        match Name::parse(text, false, &settings()) {
            Ok(Name::Repo(repo, files)) => Some((repo.id, repo.revision, repo.kind, files)),
            _ => None,
        }
    }

    fn of(
        id: &str,
        revision: &str,
        kind: Kind,
        files: Option<&str>,
    ) -> Option<(String, String, Kind, Option<String>)> {
        Some((id.into(), revision.into(), kind, files.map(str::to_owned)))
    }

    #[test]
    fn names_of_repositories() {
        assert_eq!(repo("gpt2"), of("gpt2", "main", Kind::Model, None));
        assert_eq!(repo("Qwen/Qwen2.5-0.5B@v1.0"), of("Qwen/Qwen2.5-0.5B", "v1.0", Kind::Model, None));
        assert_eq!(repo("datasets/a/b"), of("a/b", "main", Kind::Dataset, None));
        assert_eq!(repo("datasets/a/b/c/*.txt"), of("a/b", "main", Kind::Dataset, Some("c/*.txt")));
        assert_eq!(repo("datasets/a/b@v1/c.txt"), of("a/b", "v1", Kind::Dataset, Some("c.txt")));
        for wrong in [
            "", "a/b/c", "../a", "a/..", "a/-b", "a/b@", "a/b@../x", "a b", "a/b--c", "/a", "a//b", "~/x",
            "a/b@x y",
        ] {
            assert!(repo(wrong).is_none(), "{wrong}");
        }
        assert!(matches!(Name::parse("tinyshakespeare", false, &settings()), Ok(Name::File(_))));
        assert!(matches!(
            Name::parse("a/b", true, &settings()),
            Ok(Name::Repo(Repo { kind: Kind::Dataset, .. }, None))
        ));
        assert_eq!(Repo::new(Kind::Dataset, "a/b@v1").text(), "datasets/a/b@v1");
    }

    #[test]
    fn a_mistyped_path_is_not_a_name() {
        let guessed = |text: &str| Name::guess(text, &settings()).is_some();
        for name in [
            "gpt2",
            "gpt2-xl",
            "tinyshakespeare",
            "hellaswag",
            "Qwen/Qwen2.5-0.5B",
            "a/b@main",
            "datasets/a/b/c.txt",
        ] {
            assert!(guessed(name), "{name}");
        }
        // `src` is a folder where this test runs
        for path in [
            "none",
            "d12",
            "x.bin",
            "a/b.bin",
            "a/b.txt",
            "a/b.safetensors",
            "src/none",
            "./a",
            "../a/b",
            "a/*",
            "/a/b",
            "a/b/c",
        ] {
            assert!(!guessed(path), "{path}");
        }
    }
}
