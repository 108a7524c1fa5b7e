//! A hub with a model, folders for the caches, and somebody who watches.

use crate::server::{Hub, sha256};
use ironhorse_fetch::{Error, Fetched, Fetcher, Name, Progress, Settings, Wanted, Watch};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

/// Notes what is said, does not wait, and stops when asked to.
#[derive(Default)]
pub struct Noted {
    pub notes: Vec<String>,
    pub pauses: Vec<Duration>,
    pub stop_at: Option<u64>,
    pub last: (u64, u64),
}

impl Watch for Noted {
    fn progress(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        assert!(progress.total == 0 || progress.done <= progress.total, "{progress:?}");
        self.last = (progress.done, progress.total);
        if self.stop_at.is_some_and(|at| progress.done >= at) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    fn note(&mut self, text: &str) {
        assert!(!text.contains('\n'), "{text}");
        self.notes.push(text.into());
    }

    fn pause(&mut self, time: Duration, _progress: Progress<'_>) -> ControlFlow<()> {
        self.pauses.push(time);
        ControlFlow::Continue(())
    }
}

/// A hub with a model and a folder for the caches.
pub struct Place {
    pub hub: Hub,
    pub folder: tempfile::TempDir,
    pub settings: Settings,
    pub weights: Vec<u8>,
}

impl Place {
    pub fn new() -> Self {
        let (hub, folder) = (Hub::start(), tempfile::tempdir().unwrap());
        // several parts of the client's
        let weights: Vec<u8> =
            (0..900_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for (name, content) in [
            ("config.json", &b"{}"[..]),
            ("tokenizer.json", b"{\"a\": 1}"),
            ("model.safetensors", &weights),
            ("pytorch_model.bin", b"not this"),
            ("a b/more.json", b"[]"),
        ] {
            hub.file("models/org/name", name, content);
        }
        let mut settings = Settings::from_env(Some(folder.path().join("own")));
        settings.hub = Some(folder.path().join("hub"));
        settings.endpoint = hub.address();
        (settings.token, settings.offline, settings.proxies) = (None, false, Default::default());
        Self { hub, folder, settings, weights }
    }

    pub fn fetcher(&self) -> Fetcher {
        Fetcher::new(self.settings.clone())
    }

    pub fn name(&self, text: &str) -> Name {
        Name::parse(text, false, &self.settings).unwrap()
    }

    pub fn fetch(&self, text: &str, wanted: Wanted<'_>) -> (Result<Fetched, Error>, Noted) {
        let mut noted = Noted::default();
        (self.fetcher().fetch(&self.name(text), wanted, &mut noted), noted)
    }

    pub fn model(&self) -> Fetched {
        self.fetch("org/name", Wanted::Model).0.unwrap()
    }

    pub fn repo(&self) -> PathBuf {
        self.folder.path().join("hub/models--org--name")
    }

    pub fn blob(&self, name: &str) -> PathBuf {
        self.repo().join("blobs").join(name)
    }

    pub fn part(&self) -> PathBuf {
        self.blob(&format!("{}.incomplete", sha256(&self.weights)))
    }

    /// Every file below a folder, without the lists and locks.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                let name = path.strip_prefix(self.folder.path()).unwrap().to_str().unwrap().to_owned();
                if path.is_dir() {
                    folders.push(path);
                } else if !name.ends_with(".lock") && !name.contains("/lists/") {
                    found.insert(name, std::fs::read(&path).unwrap());
                }
            }
        }
        found
    }
}
