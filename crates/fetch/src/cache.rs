//! Hugging Face's cache, as huggingface_hub lays it out:
//!
//! ```text
//! hub/models--owner--name/blobs/HASH                      the contents, named by the hub's hash
//!                        /refs/main                       the commit of a branch
//!                        /snapshots/COMMIT/config.json    a relative link to a blob
//! hub/.locks/models--owner--name/HASH.lock                held while a blob is downloaded
//! ```

use crate::{Error, Repo, Result, Settings};
use ironhorse_train::format::atomic::write_bytes;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The part of the cache that belongs to a repository.
#[derive(Clone, Debug)]
pub struct RepoCache {
    hub: PathBuf,
    name: String,
}

impl RepoCache {
    /// The part of the cache in which the repository is or would be.
    pub fn new(settings: &Settings, repo: &Repo) -> Result<Self> {
        let Some(hub) = settings.hub.clone() else {
            let problem =
                "has no place: neither HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME nor HOME is set".into();
            return Err(Error::Name { name: repo.text(), problem });
        };
        Ok(Self { hub, name: format!("{}--{}", repo.kind.plural(), repo.id.replace('/', "--")) })
    }

    /// `models--owner--name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn folder(&self) -> PathBuf {
        self.hub.join(&self.name)
    }

    /// The commit that a revision was when it was last downloaded; a revision without one stands for itself.
    pub fn commit(&self, revision: &str) -> String {
        let noted = std::fs::read_to_string(self.folder().join("refs").join(revision)).ok();
        let noted = noted.map(|text| text.trim().to_owned()).filter(|text| is_plain_name(text));
        noted.unwrap_or_else(|| revision.to_owned())
    }

    /// Notes what a revision is.
    pub fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit || self.commit(revision) == commit {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        make_parent(&path)?;
        write_bytes(&path, commit.as_bytes())?;
        Ok(())
    }

    /// The folder of the files of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    /// The blob of a hash.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(etag)
    }

    /// The lock of a hash.
    pub fn lock(&self, etag: &str) -> PathBuf {
        self.hub.join(".locks").join(&self.name).join(format!("{etag}.lock"))
    }

    /// The paths of all files of a commit that are there, sorted.
    pub fn files(&self, commit: &str) -> Vec<String> {
        let snapshot = self.snapshot(commit);
        let mut found = Vec::new();
        let mut folders = vec![snapshot.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.is_file()
                    && let Some(name) = path.strip_prefix(&snapshot).ok().and_then(Path::to_str)
                {
                    found.push(name.replace('\\', "/"));
                }
            }
        }
        found.sort();
        found
    }

    /// Makes a file of a commit a link to its blob.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<()> {
        let path = self.snapshot(commit).join(file);
        make_parent(&path)?;
        let up = "../".repeat(2 + file.split('/').count() - 1);
        static LINKS: AtomicU64 = AtomicU64::new(0);
        let number = LINKS.fetch_add(1, Ordering::Relaxed);
        let aside = path.with_file_name(format!(".{etag}.{}-{number}.link", std::process::id()));
        let _ = std::fs::remove_file(&aside); // of a process of the same number that was killed
        let made = symlink(&PathBuf::from(format!("{up}blobs/{etag}")), &aside, &self.blob(etag));
        // renaming replaces a link whose blob is gone
        made.and_then(|()| std::fs::rename(&aside, &path)).map_err(|error| Error::io(&path, "link", error))
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path, _blob: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Copies the file, as huggingface_hub does: not everybody may make symbolic links on these systems.
#[cfg(not(unix))]
fn symlink(_target: &Path, link: &Path, blob: &Path) -> std::io::Result<()> {
    std::fs::copy(blob, link).map(|_| ())
}

pub fn make_parent(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|error| Error::io(folder, "create", error))
}

/// Whether a name from a server is a name of a file and no path.
pub fn is_plain_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && name.len() <= 128 && !name.starts_with('.') && name.bytes().all(plain)
}

/// Whether a path from a server stays below the folder it is joined to.
pub fn is_inside(path: &str) -> bool {
    let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
    !path.is_empty()
        && !path.contains(['\\', '\0', ':'])
        && !path.contains("//")
        && Path::new(path).components().all(normal)
        && !path.ends_with('/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn paths_of_a_server_stay_inside() {
        for good in ["a", "a/b.c", ".gitattributes", "a b/ü"] {
            assert!(is_inside(good), "{good}");
        }
        for bad in ["", "/a", "../a", "a/../../b", "a\\b", "c:a", "a//b", "a/", "./a", "a\0"] {
            assert!(!is_inside(bad), "{bad}");
        }
        assert!(
            is_plain_name("abc-2") && !is_plain_name("../a") && !is_plain_name("") && !is_plain_name("a/b")
        );
    }

    #[cfg(unix)]
    #[test]
    fn links_are_relative_and_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = Settings::of(&|_| None, None);
        settings.hub = Some(folder.path().to_owned());
        let repo = Repo { kind: Kind::Model, id: "a/b".into(), revision: "main".into() };
        let cache = RepoCache::new(&settings, &repo).unwrap();
        assert_eq!(cache.commit("main"), "main");
        cache.set_commit("main", "c0ffee").unwrap();
        assert_eq!(std::fs::read(folder.path().join("models--a--b/refs/main")).unwrap(), b"c0ffee");
        assert_eq!(cache.commit("main"), "c0ffee");
        for (file, link) in [("x.json", "../../blobs/e1"), ("d/x.json", "../../../blobs/e1")] {
            cache.link("c0ffee", file, "e0").unwrap();
            cache.link("c0ffee", file, "e1").unwrap();
            assert_eq!(std::fs::read_link(cache.snapshot("c0ffee").join(file)).unwrap(), Path::new(link));
        }
        assert!(cache.files("c0ffee").is_empty(), "their blob is not there");
        make_parent(&cache.blob("e1")).unwrap();
        std::fs::write(cache.blob("e1"), "x").unwrap();
        assert_eq!(cache.files("c0ffee"), ["d/x.json", "x.json"]);
    }
}
