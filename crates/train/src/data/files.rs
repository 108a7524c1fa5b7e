//! Resolves a list of file names and patterns to files.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The files that match the patterns, sorted, each once. The name of an existing file means that file, whatever
/// characters it contains; other patterns match only names in UTF-8. A pattern that matches nothing, or whose folder is
/// missing, is an error, because a misspelt path must not silently reduce the training data.
pub fn expand_globs<P: AsRef<OsStr>>(patterns: &[P]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for pattern in patterns {
        let pattern = pattern.as_ref();
        if Path::new(pattern).is_file() {
            files.push(pattern.into());
            continue;
        }
        let Some(pattern) = pattern.to_str() else {
            let field = format!("`{}`", pattern.display());
            return Err(Error::input(field, "not the name of a file", "one, or a pattern in UTF-8"));
        };
        expand(pattern, &mut files)?;
    }
    if files.is_empty() {
        return Err(Error::input("number of data files", 0, "at least one path or pattern"));
    }
    files.sort();
    files.dedup();
    Ok(files)
}

/// Adds the files that match a pattern.
fn expand(pattern: &str, files: &mut Vec<PathBuf>) -> Result<()> {
    let paths = glob::glob(pattern).map_err(|error| {
        let found = format!("not a file pattern ({error})");
        Error::input(format!("`{pattern}`"), found, "a path, or a pattern with *, ? and [...]")
    })?;
    let before = files.len();
    for path in paths {
        let path = path.map_err(|e| {
            let at = e.path().to_owned();
            Error::io(&at, "list", e.into())
        })?;
        if path.is_file() {
            files.push(path);
        }
    }
    if files.len() == before { Err(no_match(pattern)) } else { Ok(()) }
}

/// Why a pattern matched no file: it is a folder, its folder is missing, or no name in the folder matches.
fn no_match(pattern: &str) -> Error {
    if Path::new(pattern).is_dir() {
        return Error::field(pattern.as_ref(), "path", "a folder", "files, such as its *.bin");
    }
    let plain = &pattern[..pattern.find(['*', '?', '[']).unwrap_or(pattern.len())];
    let folder = plain.rfind(std::path::is_separator).map_or(Path::new("."), |end| Path::new(&plain[..=end]));
    if folder.is_dir() {
        Error::NoMatch { pattern: pattern.to_owned() }
    } else {
        Error::NotFound { path: folder.to_owned(), kind: "folder" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_and_once() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b_1.bin", "a_2.bin", "a_1.bin", "a.txt"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        std::fs::create_dir(dir.path().join("a_folder.bin")).unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let files = expand_globs(&[at("b_1.bin"), at("a_*.bin"), at("*_1.bin")]).unwrap();
        let want: Vec<PathBuf> = ["a_1.bin", "a_2.bin", "b_1.bin"].map(|n| dir.path().join(n)).into();
        assert_eq!(files, want);
    }

    #[test]
    fn what_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_str().unwrap();
        for (pattern, text) in [
            (format!("{root}/*.bin"), "*.bin`"),
            (format!("{root}/train.bin"), "train.bin`"),
            (format!("{root}/nowhere/*.bin"), "nowhere/: no such folder"),
            (format!("{root}/nowhere/train.bin"), "nowhere/: no such folder"),
            (format!("{root}/[a.bin"), "not a file pattern"),
        ] {
            let error = expand_globs(std::slice::from_ref(&pattern)).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(expand_globs::<String>(&[]).is_err());
    }

    #[test]
    fn the_name_of_a_file_is_no_pattern() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run[1].bin");
        std::fs::write(&path, "").unwrap();
        assert_eq!(expand_globs(&[&path]).unwrap(), [path]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn names_need_not_be_utf8() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(OsStr::from_bytes(b"a\xff.bin"));
        let text = expand_globs(&[&path]).unwrap_err().to_string();
        assert!(text.contains("is not the name of a file"), "{text}");
        std::fs::write(&path, "").unwrap();
        assert_eq!(expand_globs(&[&path]).unwrap(), std::slice::from_ref(&path));
        assert!(expand_globs(&[dir.path().join("*.bin")]).is_err(), "a pattern matches names in UTF-8");
    }
}
