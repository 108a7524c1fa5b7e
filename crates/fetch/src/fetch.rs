//! A name to files on the disk: first the caches, then the network.

use crate::ask::Asker;
use crate::cache::RepoCache;
use crate::check::{Check, has_sha256};
use crate::download::{Target, download};
use crate::http::Client;
use crate::hub::{self, Facts, Listing, NOTHING};
use crate::watch::{Progress, Watch};
use crate::{Error, KnownFile, Name, Repo, Result, Settings, Wanted};
use ironhorse_train::format::atomic::write_bytes;
use ironhorse_train::format::disk::free_bytes;
use ironhorse_train::host::human_bytes;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The folder of our cache that is for downloads.
const FOLDER: &str = "fetch";

/// Files of a name.
#[derive(Clone, Debug, Serialize)]
pub struct Fetched {
    /// The name, as given on the command line.
    pub name: String,
    /// The commit, for repositories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The folder of the files.
    pub folder: PathBuf,
    /// The files.
    pub files: Vec<File>,
    /// Bytes that came over the network now.
    pub received: u64,
}

/// A file that was fetched.
#[derive(Clone, Debug, Serialize)]
pub struct File {
    /// Its path in the folder.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

impl Fetched {
    fn of(name: String, commit: Option<String>, folder: PathBuf, paths: Vec<String>) -> Result<Self> {
        let mut files = Vec::new();
        for path in paths {
            let at = folder.join(&path);
            let bytes = std::fs::metadata(&at).map_err(|error| Error::io(&at, "read", error))?.len();
            files.push(File { path, bytes });
        }
        Ok(Self { name, commit, folder, files, received: 0 })
    }

    /// The full paths of the files.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|file| self.folder.join(&file.path)).collect()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// Finds the files of a name in the caches, or downloads them.
pub struct Fetcher {
    settings: Settings,
}

impl Fetcher {
    /// A fetcher with these settings.
    pub fn new(settings: Settings) -> Self {
        Self { settings }
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is in the caches of a name, if that is all that is wanted. Uses no network.
    pub fn find(&self, name: &Name, wanted: Wanted<'_>) -> Result<Option<Fetched>> {
        match name {
            Name::File(file) => self.find_file(file),
            Name::Repo(repo, _) => self.find_repo(repo, wanted, false),
        }
    }

    /// What is in the caches, or else what is downloaded now.
    pub fn find_or_fetch(&self, name: &Name, wanted: Wanted<'_>, watch: &mut dyn Watch) -> Result<Fetched> {
        match self.find(name, wanted)? {
            Some(found) => Ok(found),
            None => self.fetch(name, wanted, watch),
        }
    }

    /// Downloads what is not in the caches, or is newer at the hub. Without a network what is there must do.
    pub fn fetch(&self, name: &Name, wanted: Wanted<'_>, watch: &mut dyn Watch) -> Result<Fetched> {
        match name {
            Name::File(file) => self.fetch_file(file, watch),
            Name::Repo(repo, _) => self.fetch_repo(repo, wanted, watch),
        }
    }

    fn client(&self) -> Result<Client> {
        Client::new(&self.settings).map_err(|problem| Error::Name { name: "the network".into(), problem })
    }

    fn own_file(&self, file: &KnownFile) -> Result<PathBuf> {
        let own = self.settings.own.as_ref().ok_or_else(|| Error::Name {
            name: file.name.clone(),
            problem: "has no place: there is no cache folder; set IRONHORSE_CACHE to one that is yours alone"
                .into(),
        })?;
        Ok(own.join(FOLDER).join(&file.file))
    }

    fn find_file(&self, file: &KnownFile) -> Result<Option<Fetched>> {
        let path = self.own_file(file)?;
        if !path.is_file() || !has_sha256(&path, &file.sha256)? {
            return Ok(None);
        }
        let folder = path.parent().unwrap_or(Path::new(".")).to_owned();
        Fetched::of(file.name.clone(), None, folder, vec![file.file.clone()]).map(Some)
    }

    fn fetch_file(&self, file: &KnownFile, watch: &mut dyn Watch) -> Result<Fetched> {
        if let Some(found) = self.find_file(file)? {
            return Ok(found);
        }
        let path = self.own_file(file)?;
        let advice = format!("put {} at {}", file.address, path.display());
        if self.settings.offline {
            return Err(Error::Missing { what: file.name.clone(), reason: OFFLINE.into(), advice });
        }
        if path.exists() {
            watch.note(&format!("{}: what is there has another SHA-256 and is replaced", path.display()));
            std::fs::remove_file(&path).map_err(|error| Error::io(&path, "remove", error))?;
        }
        watch.note(&format!("fetch: {}, {}, from {}", file.name, human_bytes(file.bytes), file.address));
        let done = download(
            &Asker { settings: &self.settings, client: &self.client()? },
            &Target {
                what: &file.name,
                repo: None,
                url: &file.address,
                path: &path,
                lock: &path.with_file_name(format!(".{}.lock", file.file)),
                size: Some(file.bytes),
                check: Check::Sha256(file.sha256.clone()),
                before: Progress { file: &file.file, done: 0, total: file.bytes },
            },
            watch,
        );
        let received = done.map_err(|error| advised(error, advice))?.received;
        match self.find_file(file)? {
            Some(found) => Ok(Fetched { received, ..found }),
            None => Err(Error::Name {
                name: file.name.clone(),
                problem: "is gone since it was downloaded".into(),
            }),
        }
    }

    /// Looks in the cache of Hugging Face, under either name of a repository that was renamed. `lenient`: if the list of a
    /// repository's files is not known, those in the cache count as all.
    fn find_repo(&self, repo: &Repo, wanted: Wanted<'_>, lenient: bool) -> Result<Option<Fetched>> {
        for repo in [Some(repo.clone()), repo.other_name()].into_iter().flatten() {
            let cache = RepoCache::new(&self.settings, &repo)?;
            let commit = cache.commit(&repo.revision);
            let have = cache.files(&commit);
            if have.is_empty() {
                continue;
            }
            let listing = self.read_listing(&cache, &commit);
            let Ok(files) = wanted.of(listing.as_ref().unwrap_or(&have)) else { continue };
            let snapshot = cache.snapshot(&commit);
            let complete = match &listing {
                Some(_) => files.iter().all(|file| have.binary_search(file).is_ok()),
                None => lenient || wanted.is_all(&files, &snapshot),
            };
            if complete {
                return Fetched::of(repo.text(), Some(commit), snapshot, files).map(Some);
            }
        }
        Ok(None)
    }

    fn fetch_repo(&self, repo: &Repo, wanted: Wanted<'_>, watch: &mut dyn Watch) -> Result<Fetched> {
        let asked = match self.settings.offline {
            true => Err(Error::Missing { what: repo.text(), reason: OFFLINE.into(), advice: String::new() }),
            false => self.download_repo(repo, wanted, watch),
        };
        match asked {
            Err(Error::Missing { what, reason, .. }) => match self.find_repo(repo, wanted, true)? {
                Some(found) => {
                    watch.note(&format!("{what}: {reason}; taking what is in {}", found.folder.display()));
                    Ok(found)
                }
                None => {
                    let advice = self.advice(repo, wanted)?;
                    Err(Error::Missing { what: repo.text(), reason, advice })
                }
            },
            done => done,
        }
    }

    fn download_repo(&self, repo: &Repo, wanted: Wanted<'_>, watch: &mut dyn Watch) -> Result<Fetched> {
        let client = self.client()?;
        let asker = Asker { settings: &self.settings, client: &client };
        let cache = RepoCache::new(&self.settings, repo)?;
        let Listing { commit, files } = hub::listing(&asker, repo, watch)?;
        let wanted = wanted.of(&files).map_err(|problem| Error::Name { name: repo.text(), problem })?;
        let have = cache.files(&commit);
        let mut missing: Vec<(&String, Facts)> = Vec::new();
        for file in wanted.iter().filter(|file| have.binary_search(file).is_err()) {
            missing.push((file, hub::facts(&asker, repo, (&commit, file), watch)?));
        }
        let mut before =
            Progress { total: missing.iter().filter_map(|(_, facts)| facts.size).sum(), ..NOTHING };
        self.check_space(&cache, &missing)?;
        if !missing.is_empty() {
            let (count, size, from) = (missing.len(), human_bytes(before.total), &self.settings.endpoint);
            let into = cache.snapshot(&commit);
            watch.note(&format!(
                "fetch: {}, {count} files, {size}, from {from} into {}",
                repo.text(),
                into.display()
            ));
        }
        let mut received = 0;
        for (file, facts) in &missing {
            let done = download(
                &asker,
                &Target {
                    what: &format!("{}: {file}", repo.text()),
                    repo: Some(repo),
                    url: &hub::address(&self.settings, repo, &commit, file),
                    path: &cache.blob(&facts.etag),
                    lock: &cache.lock(&facts.etag),
                    size: facts.size,
                    check: Check::of_etag(&facts.etag),
                    before: Progress { file: file.as_str(), ..before },
                },
                watch,
            )?;
            cache.link(&commit, file, &facts.etag)?;
            before.done += done.bytes;
            received += done.received;
        }
        self.write_listing(&cache, &Listing { commit: commit.clone(), files });
        // last: until all is there, the revision is what it was before
        cache.set_commit(&repo.revision, &commit)?;
        let fetched = Fetched::of(repo.text(), Some(commit.clone()), cache.snapshot(&commit), wanted)?;
        Ok(Fetched { received, ..fetched })
    }

    /// Refuses what the disk has no room for.
    fn check_space(&self, cache: &RepoCache, missing: &[(&String, Facts)]) -> Result<()> {
        let there = |facts: &Facts| {
            let blob = cache.blob(&facts.etag);
            let part = blob.with_file_name(format!("{}.incomplete", facts.etag));
            [blob, part].iter().filter_map(|path| Some(path.metadata().ok()?.len())).max().unwrap_or(0)
        };
        let needs: u64 =
            missing.iter().map(|(_, facts)| facts.size.unwrap_or(0).saturating_sub(there(facts))).sum();
        let blobs = cache.blob("");
        let free = free_bytes(&blobs)?;
        if needs <= free || free == 0 {
            return Ok(()); // some file systems say nothing; writing will tell
        }
        let more = format!(": {} are needed, {} free", human_bytes(needs), human_bytes(free));
        Err(Error::Full { path: blobs, more, variable: "HF_HOME" })
    }

    /// The files of a commit never change, so the list that the hub gave once tells without asking whether a part of a
    /// data set is all of it.
    fn listing_path(&self, cache: &RepoCache, commit: &str) -> Option<PathBuf> {
        Some(
            self.settings
                .own
                .as_ref()?
                .join(FOLDER)
                .join("lists")
                .join(cache.name())
                .join(format!("{commit}.json")),
        )
    }

    fn read_listing(&self, cache: &RepoCache, commit: &str) -> Option<Vec<String>> {
        let bytes = std::fs::read(self.listing_path(cache, commit)?).ok()?;
        let listing: Listing = serde_json::from_slice(&bytes).ok()?;
        (listing.commit == commit).then_some(listing.files)
    }

    /// Keeps the list of files. Errors are ignored: without the list the hub is asked again, and nothing else depends on it.
    fn write_listing(&self, cache: &RepoCache, listing: &Listing) {
        let Some(path) = self.listing_path(cache, &listing.commit) else { return };
        if let (Ok(()), Ok(text)) = (crate::cache::make_parent(&path), serde_json::to_vec(listing)) {
            let _ = write_bytes(&path, &text);
        }
    }

    /// Which files to put where.
    fn advice(&self, repo: &Repo, wanted: Wanted<'_>) -> Result<String> {
        let cache = RepoCache::new(&self.settings, repo)?;
        let commit = cache.commit(&repo.revision);
        let (have, folder) = (cache.files(&commit), cache.snapshot(&commit));
        let mut files = wanted.usual(&folder);
        files.retain(|file| !have.contains(file));
        let address = |file: &str| hub::address(&self.settings, repo, &repo.revision, file);
        Ok(match &files[..] {
            [] => format!(
                "put its files from {}/{} into {}",
                self.settings.endpoint,
                repo.page(),
                folder.display()
            ),
            [file] => format!("put {} at {}", address(file), folder.join(file).display()),
            [most @ .., last] => {
                let base = address("");
                format!("put {} and {last} from {base} into {}", most.join(", "), folder.display())
            }
        })
    }
}

/// Why the network is not used.
const OFFLINE: &str = "HF_HUB_OFFLINE is set";

/// A missing file with what to do about it.
fn advised(error: Error, advice: String) -> Error {
    match error {
        Error::Missing { what, reason, .. } => Error::Missing { what, reason, advice },
        other => other,
    }
}
