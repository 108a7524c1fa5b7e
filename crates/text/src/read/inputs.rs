//! What was asked for, as a list of files in a fixed order.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::{Error, Result};

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text: one document, or several with a delimiter between them.
    Text,
    /// A JSON object on every line.
    Jsonl,
    /// Parquet.
    Parquet,
}

impl Format {
    /// The format with this name in settings and file names.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "text" | "txt" | "md" => Self::Text,
            "jsonl" | "ndjson" => Self::Jsonl,
            "parquet" => Self::Parquet,
            _ => return None,
        })
    }
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// The file is not compressed.
    Plain,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its name; `-` is standard input.
    pub path: PathBuf,
    /// What it holds.
    pub format: Format,
    /// How it is compressed.
    pub packing: Packing,
    /// Its size in bytes; 0 for standard input.
    pub bytes: u64,
    /// When it was last changed, in nanoseconds since 1970; 0 if that is not known.
    pub modified: u64,
}

/// The name of standard input.
pub const STDIN: &str = "-";

impl Input {
    /// Whether this is standard input.
    pub fn is_stdin(&self) -> bool {
        self.path == Path::new(STDIN)
    }

    fn new(path: &Path, format: Option<Format>) -> Result<Self> {
        let (by_name, packing) = by_name(path);
        if path == Path::new(STDIN) {
            let format = format.unwrap_or(Format::Text);
            return Ok(Self { path: path.to_owned(), format, packing, bytes: 0, modified: 0 });
        }
        let meta = std::fs::metadata(path).map_err(|source| Error::io(path, "open", source))?;
        let format = format.or(by_name).ok_or_else(|| {
            let expected =
                ".txt, .md, .jsonl or .parquet, also with .gz or .zst; --format says what it is otherwise";
            Error::input(path, format!("its name does not say what it holds, expected {expected}"))
        })?;
        if format == Format::Parquet && packing != Packing::Plain {
            return Err(Error::input(path, "a parquet file cannot be read compressed; unpack it first"));
        }
        let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let modified = modified.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        Ok(Self { path: path.to_owned(), format, packing, bytes: meta.len(), modified })
    }
}

fn by_name(path: &Path) -> (Option<Format>, Packing) {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("").to_ascii_lowercase();
    let packings = [(".gz", Packing::Gzip), (".zst", Packing::Zstd)];
    let (name, packing) = packings
        .iter()
        .find_map(|&(end, packing)| Some((name.strip_suffix(end)?, packing)))
        .unwrap_or((&name, Packing::Plain));
    (name.rsplit_once('.').and_then(|(_, end)| Format::parse(end)), packing)
}

/// Whether the name of a file, or a pattern, is one of text, JSON lines or parquet.
pub fn is_data_name(path: &Path) -> bool {
    by_name(path).0.is_some()
}

/// The files that were asked for: names, folders with all that they hold, patterns, `-` for standard input. In the
/// order given, sorted by name within a folder or pattern, each file once. `format` overrides what names say.
pub fn resolve(asked: &[PathBuf], format: Option<Format>) -> Result<Vec<Input>> {
    let mut inputs: Vec<Input> = Vec::new();
    for path in asked {
        let mut found = Vec::new();
        if path == Path::new(STDIN) || path.is_file() {
            found.push(path.clone());
        } else if path.is_dir() {
            walk(path, format.is_some(), &mut found)?;
            if found.is_empty() {
                let expected = "at least one .txt, .md, .jsonl or .parquet, also with .gz or .zst";
                return Err(Error::input(path, format!("the folder holds no data, expected {expected}")));
            }
        } else {
            found = ironhorse_train::data::expand_globs(&[path])?;
        }
        for path in found {
            if !inputs.iter().any(|known| known.path == path) {
                inputs.push(Input::new(&path, format)?);
            }
        }
    }
    if inputs.is_empty() {
        return Err(Error::Setting("no input was given, expected files, folders, patterns or -".into()));
    }
    Ok(inputs)
}

/// All files below a folder whose names say what they hold, sorted; hidden ones are left out.
fn walk(folder: &Path, all: bool, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::io(folder, "list", source))?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry.map_err(|source| Error::io(folder, "list", source))?.path());
    }
    paths.sort();
    for path in paths {
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if hidden {
            continue;
        }
        if path.is_dir() {
            walk(&path, all, found)?;
        } else if path.is_file() && (all || by_name(&path).0.is_some()) {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_folders_and_patterns() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("sub/.hidden")).unwrap();
        for name in
            ["b.txt", "a.jsonl.gz", "sub/c.MD", "sub/d.parquet", "sub/.hidden/e.txt", "image.png", "odd"]
        {
            std::fs::write(at(name), "x").unwrap();
        }
        let names = |asked: &[PathBuf]| -> Vec<_> {
            let found = resolve(asked, None).unwrap();
            found
                .into_iter()
                .map(|input| (input.path.strip_prefix(folder.path()).unwrap().to_owned(), input.format))
                .collect()
        };
        let all = names(&[folder.path().to_owned()]);
        let want = [
            ("a.jsonl.gz", Format::Jsonl),
            ("b.txt", Format::Text),
            ("sub/c.MD", Format::Text),
            ("sub/d.parquet", Format::Parquet),
        ];
        assert_eq!(all, want.map(|(name, format)| (name.into(), format)));
        // each once, in the order given
        assert_eq!(names(&[at("sub"), at("*.txt"), at("sub/c.MD")]).len(), 3);
        assert_eq!(names(&[at("b.txt"), folder.path().to_owned()])[0].0, Path::new("b.txt"));
        let error = |asked: &str| resolve(&[at(asked)], None).unwrap_err().to_string();
        assert!(error("odd").contains("its name does not say what it holds"));
        assert!(error("none.txt").contains("none.txt"));
        assert!(resolve(&[at("odd")], Some(Format::Text)).is_ok());
        std::fs::write(at("x.parquet.gz"), "x").unwrap();
        assert!(error("x.parquet.gz").contains("unpack it first"));
        std::fs::create_dir(at("empty")).unwrap();
        assert!(error("empty").contains("holds no data"));
        assert!(resolve(&[], None).is_err());
        assert_eq!(resolve(&["-".into()], None).unwrap()[0].format, Format::Text);
    }
}
