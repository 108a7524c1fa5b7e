//! The hash of a download. The hub names a large file by the SHA-256 of its bytes, and a small one as git does: by the
//! SHA-1 of a header and its bytes.

use crate::{Error, Result};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// What is known of the content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Check {
    /// Its SHA-256.
    Sha256(String),
    /// The name that git gives it.
    GitBlob(String),
    /// Nothing is known but the file's size.
    Size,
}

impl Check {
    /// What the name of a file at the hub says: 64 or 40 hexadecimal digits.
    pub fn of_etag(etag: &str) -> Self {
        let hex = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        match etag.len() {
            64 if hex => Self::Sha256(etag.to_ascii_lowercase()),
            40 if hex => Self::GitBlob(etag.to_ascii_lowercase()),
            _ => Self::Size,
        }
    }

    /// How errors call it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::GitBlob(_) => "git's SHA-1",
            Self::Size => "size",
        }
    }
}

/// Hashes bytes as they arrive.
pub struct Hasher {
    check: Check,
    sha256: Sha256,
}

impl Hasher {
    /// The hasher of a file of which no byte has come yet.
    pub fn new(check: &Check) -> Self {
        Self { check: check.clone(), sha256: Sha256::new() }
    }

    /// The hasher of a file that has bytes already: those in `path`.
    pub fn resumed(check: &Check, path: &Path) -> Result<Self> {
        let mut hasher = Self::new(check);
        if matches!(check, Check::Sha256(_)) {
            read(path, &mut |bytes| hasher.add(bytes))?;
        }
        Ok(hasher)
    }

    /// The next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        if matches!(self.check, Check::Sha256(_)) {
            self.sha256.update(bytes);
        }
    }

    /// The hash that was found and the one that was expected, if they differ. Git's needs the size first, so the file,
    /// which is small, is read again.
    pub fn wrong(self, path: &Path) -> Result<Option<(String, String)>> {
        let (found, expected) = match self.check {
            Check::Sha256(expected) => (format!("{:x}", self.sha256.finalize()), expected),
            Check::GitBlob(expected) => (git_blob(path)?, expected),
            Check::Size => return Ok(None),
        };
        Ok((found != expected).then_some((found, expected)))
    }
}

/// Whether a file on the disk has this SHA-256.
pub fn has_sha256(path: &Path, sha256: &str) -> Result<bool> {
    let hasher = Hasher::resumed(&Check::Sha256(sha256.to_ascii_lowercase()), path)?;
    Ok(hasher.wrong(path)?.is_none())
}

fn git_blob(path: &Path) -> Result<String> {
    let size = std::fs::metadata(path).map_err(|error| Error::io(path, "read", error))?.len();
    let mut hash = Sha1::new_with_prefix(format!("blob {size}\0"));
    read(path, &mut |bytes| hash.update(bytes))?;
    Ok(format!("{:x}", hash.finalize()))
}

fn read(path: &Path, each: &mut dyn FnMut(&[u8])) -> Result<()> {
    let failed = |error| Error::io(path, "read", error);
    let mut file = File::open(path).map_err(failed)?;
    let mut bytes = vec![0; 1 << 18];
    loop {
        match file.read(&mut bytes).map_err(failed)? {
            0 => return Ok(()),
            count => each(&bytes[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git_and_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, "hello\n").unwrap();
        // `git hash-object` and `sha256sum` of the same file
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        for etag in [git, sha] {
            let check = Check::of_etag(etag);
            assert_eq!(Hasher::resumed(&check, &path).unwrap().wrong(&path).unwrap(), None);
        }
        let other = Check::of_etag(&sha.replace('5', "6"));
        let (found, _) = Hasher::resumed(&other, &path).unwrap().wrong(&path).unwrap().unwrap();
        assert_eq!(found, sha);
        assert_eq!(Check::of_etag("abc-2"), Check::Size);
        assert!(has_sha256(&path, sha).unwrap() && !has_sha256(&path, git).unwrap());
    }
}
