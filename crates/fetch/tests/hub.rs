//! Downloads from a server on this machine that behaves as the hub does, well and badly.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod server;

use ironhorse_fetch::{Error, Fetched, Fetcher, KnownFile, Name, Progress, Settings, Wanted, Watch, list};
use server::{COMMIT, Fault, Hub, git_blob, sha256};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Notes what is said, does not wait, and stops when asked to.
#[derive(Default)]
struct Noted {
    notes: Vec<String>,
    pauses: Vec<Duration>,
    stop_at: Option<u64>,
    last: (u64, u64),
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
struct Place {
    hub: Hub,
    folder: tempfile::TempDir,
    settings: Settings,
    weights: Vec<u8>,
}

impl Place {
    fn new() -> Self {
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

    fn fetcher(&self) -> Fetcher {
        Fetcher::new(self.settings.clone())
    }

    fn name(&self, text: &str) -> Name {
        Name::parse(text, false, &self.settings).unwrap()
    }

    fn fetch(&self, text: &str, wanted: Wanted<'_>) -> (Result<Fetched, Error>, Noted) {
        let mut noted = Noted::default();
        (self.fetcher().fetch(&self.name(text), wanted, &mut noted), noted)
    }

    fn model(&self) -> Fetched {
        self.fetch("org/name", Wanted::Model).0.unwrap()
    }

    fn repo(&self) -> PathBuf {
        self.folder.path().join("hub/models--org--name")
    }

    fn blob(&self, name: &str) -> PathBuf {
        self.repo().join("blobs").join(name)
    }

    fn part(&self) -> PathBuf {
        self.blob(&format!("{}.incomplete", sha256(&self.weights)))
    }

    /// Every file below a folder, without the lists and locks.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
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

#[test]
fn a_model_lies_as_huggingface_hub_lays_it() {
    let place = Place::new();
    let (fetched, noted) = place.fetch("org/name", Wanted::Model);
    let fetched = fetched.unwrap();
    assert_eq!(fetched.received as usize, place.weights.len() + 2 + 8);
    assert_eq!(noted.last, (fetched.received, fetched.received));
    let [told] = &noted.notes[..] else { panic!("{:?}", noted.notes) };
    assert!(
        told.starts_with("fetch: org/name, 3 files, ") && told.contains(&place.settings.endpoint),
        "{told}"
    );
    let repo = place.repo();
    assert_eq!(std::fs::read(repo.join("refs/main")).unwrap(), COMMIT.as_bytes());
    let snapshot = repo.join("snapshots").join(COMMIT);
    assert_eq!(fetched.folder, snapshot);
    let sha = sha256(&place.weights);
    let links = [
        ("config.json", git_blob(b"{}")),
        ("tokenizer.json", git_blob(b"{\"a\": 1}")),
        ("model.safetensors", sha),
    ];
    for (name, blob) in &links {
        assert_eq!(std::fs::read_link(snapshot.join(name)).unwrap(), Path::new("../../blobs").join(blob));
    }
    assert!(std::fs::read(snapshot.join("model.safetensors")).unwrap() == place.weights);
    // blobs, links and the reference: no other weights, nothing unfinished
    assert_eq!(place.files().len(), 3 + 3 + 1, "{:?}", place.files().keys());
}

#[test]
fn what_is_there_is_used_without_asking() {
    let place = Place::new();
    let first = place.model();
    place.hub.seen();
    let name = place.name("org/name");
    let found = place.fetcher().find(&name, Wanted::Model).unwrap().unwrap();
    assert_eq!((found.paths(), found.received), (first.paths(), 0));
    // as from huggingface_hub, which leaves no list
    std::fs::remove_dir_all(place.folder.path().join("own")).unwrap();
    let mut noted = Noted::default();
    let found = place.fetcher().find_or_fetch(&name, Wanted::Model, &mut noted).unwrap();
    assert_eq!(found.paths(), first.paths());
    assert!(place.fetcher().find(&name, Wanted::Tokenizer).unwrap().is_some());
    assert!(place.hub.seen().is_empty() && noted.notes.is_empty());
    // asked for, the hub is asked; nothing is downloaded twice
    let again = place.model();
    assert_eq!(again.received, 0);
    let lines: Vec<String> = place.hub.seen().into_iter().map(|seen| seen.line).collect();
    assert_eq!(lines, ["GET /api/models/org/name/revision/main"]);
}

#[test]
fn a_model_in_part_is_not_taken_for_a_whole_one() {
    let place = Place::new();
    place.fetch("org/name", Wanted::Tokenizer).0.unwrap();
    let find = |wanted| place.fetcher().find(&place.name("org/name"), wanted).unwrap();
    assert!(find(Wanted::Tokenizer).is_some() && find(Wanted::Model).is_none());
    // of several files of weights one is missing
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    place.hub.file("models/org/parts", "config.json", "{}");
    place.hub.file("models/org/parts", "model.safetensors.index.json", index);
    for part in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        place.hub.file("models/org/parts", part, part);
    }
    let fetched = place.fetch("org/parts", Wanted::Model).0.unwrap();
    assert_eq!(fetched.files.len(), 4);
    std::fs::remove_dir_all(place.folder.path().join("own")).unwrap();
    let find = || place.fetcher().find(&place.name("org/parts"), Wanted::Model).unwrap();
    assert!(find().is_some());
    std::fs::remove_file(fetched.folder.join("model-00002-of-00002.safetensors")).unwrap();
    assert!(find().is_none());
}

#[test]
fn a_cut_connection_is_resumed_with_the_rest_only() {
    let place = Place::new();
    let all = place.weights.len();
    place.hub.fails("/blob/", [Fault::Cut(300_000), Fault::Cut(200_000)]);
    let (fetched, noted) = place.fetch("org/name", Wanted::Model);
    assert_eq!(fetched.unwrap().received as usize, all + 2 + 8);
    let blobs: Vec<_> =
        place.hub.seen().into_iter().filter(|seen| seen.line.starts_with("GET /blob/")).collect();
    let asked: Vec<_> = blobs.iter().map(|seen| seen.headers.get("range").cloned()).collect();
    assert_eq!(asked, [None, Some("bytes=300000-".into()), Some("bytes=500000-".into())]);
    assert_eq!(blobs.iter().map(|seen| seen.sent).collect::<Vec<_>>(), [300_000, 200_000, all - 500_000]);
    assert!(std::fs::read(place.blob(&sha256(&place.weights))).unwrap() == place.weights);
    assert_eq!(noted.pauses, [Duration::from_secs(1); 2], "progress makes patience new");
    assert!(
        noted.notes[1].contains("after 300000 of 900000 bytes; trying again in 1 s"),
        "{:?}",
        noted.notes
    );
}

#[test]
fn a_stopped_download_goes_on_in_another_process() {
    let place = Place::new();
    place.hub.fails("/blob/", [Fault::Hang(400_000)]);
    let mut noted = Noted { stop_at: Some(400_000 + 2 + 8), ..Noted::default() };
    let stopped = place.fetcher().fetch(&place.name("org/name"), Wanted::Model, &mut noted);
    assert!(matches!(stopped, Err(Error::Stopped)), "{stopped:?}");
    assert_eq!(std::fs::read(place.part()).unwrap(), place.weights[..400_000]);
    assert!(!place.repo().join("refs/main").exists(), "the revision is not there before all of it is");
    assert!(place.fetcher().find(&place.name("org/name"), Wanted::Model).unwrap().is_none());
    place.hub.seen();
    let fetched = place.model();
    assert_eq!(fetched.received as usize, place.weights.len() - 400_000);
    let blob = place.hub.seen().into_iter().find(|seen| seen.line.starts_with("GET /blob/")).unwrap();
    assert_eq!((blob.headers["range"].as_str(), blob.sent), ("bytes=400000-", 500_000));
    assert!(!place.part().exists());
}

#[test]
fn a_server_that_ignores_ranges_starts_again() {
    let place = Place::new();
    place.hub.fails("/blob/", [Fault::Cut(300_000), Fault::IgnoreRange]);
    assert_eq!(place.model().received as usize, 300_000 + place.weights.len() + 2 + 8);
    assert!(std::fs::read(place.blob(&sha256(&place.weights))).unwrap() == place.weights);
}

#[test]
fn a_part_of_something_else_is_thrown_away() {
    for (part, whole) in [(vec![7; 1000], true), (vec![7; 2_000_000], false)] {
        let place = Place::new();
        std::fs::create_dir_all(place.part().parent().unwrap()).unwrap();
        std::fs::write(place.part(), part).unwrap();
        let (fetched, noted) = place.fetch("org/name", Wanted::Model);
        fetched.unwrap();
        let said = noted.notes.iter().any(|note| note.contains("the part that was there does not fit"));
        assert_eq!(said, whole, "{:?}", noted.notes);
        assert!(std::fs::read(place.blob(&sha256(&place.weights))).unwrap() == place.weights);
    }
}

#[test]
fn wrong_content_is_refused_and_nothing_of_it_is_left() {
    let small = |place: &Place| place.fetch("org/name", Wanted::Tokenizer).0.unwrap_err().to_string();
    let large = |place: &Place| place.fetch("org/name", Wanted::Model).0.unwrap_err().to_string();
    let place = Place::new();
    let mut damaged = place.weights.clone();
    damaged[123_456] ^= 1;
    place.hub.fails("/blob/", [Fault::Wrong(damaged.clone()), Fault::Wrong(vec![0; 1_000_000])]);
    let error = large(&place);
    let (found, expected) = (sha256(&damaged), sha256(&place.weights));
    assert!(
        error.contains(&format!(
            "model.safetensors: SHA-256 is {found}, expected {expected}; nothing of it was kept"
        )),
        "{error}"
    );
    let kept = |place: &Place| place.files().into_keys().filter(|name| name.contains(&expected)).count();
    assert_eq!(kept(&place), 0, "{:?}", place.files().keys());
    assert!(!place.repo().join("refs").exists());
    let error = large(&place);
    assert!(error.contains("size is more than 900000 bytes, expected 900000 bytes"), "{error}");
    assert_eq!(kept(&place), 0);
    let place = Place::new();
    place.hub.fails("GET /org/name/resolve", [Fault::Wrong(b"{\"b\": 1}".to_vec())]);
    let error = small(&place);
    assert!(error.contains("git's SHA-1 is ") && error.contains(&git_blob(b"{\"a\": 1}")), "{error}");
    assert!(place.files().is_empty(), "{:?}", place.files().keys());
}

#[test]
fn what_passes_by_itself_is_tried_again() {
    let place = Place::new();
    place.hub.fails("/api/", [Fault::Status(503, ""), Fault::Status(429, "Retry-After: 0\r\n")]);
    place.hub.fails("HEAD /org/name/resolve", [Fault::Status(500, "")]);
    place.hub.fails("/blob/", [Fault::Status(429, "Retry-After: 17\r\n"), Fault::Cut(0)]);
    let (fetched, noted) = place.fetch("org/name", Wanted::Model);
    fetched.unwrap();
    let seconds: Vec<u64> = noted.pauses.iter().map(Duration::as_secs).collect();
    assert_eq!(seconds, [1, 0, 1, 17, 2]);
    assert!(
        noted.notes[0].ends_with("org/name: the server answers 503; trying again in 1 s"),
        "{:?}",
        noted.notes
    );
}

#[test]
fn patience_ends() {
    let place = Place::new();
    place.hub.fails("/api/", vec![Fault::Status(502, ""); 20]);
    let (failed, noted) = place.fetch("org/name", Wanted::Model);
    let error = failed.unwrap_err().to_string();
    assert!(
        error.contains("org/name: the server answers 502, 6 times")
            && error.contains("/api/models/org/name/"),
        "{error}"
    );
    assert_eq!(noted.pauses.iter().map(Duration::as_secs).collect::<Vec<_>>(), [1, 2, 4, 8, 16]);
    let place = Place::new();
    place.hub.fails("/api/", [Fault::Status(429, "Retry-After: 3600\r\n")]);
    let (failed, noted) = place.fetch("org/name", Wanted::Model);
    assert!(failed.unwrap_err().to_string().contains("asks to wait 3600 s") && noted.pauses.is_empty());
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let mut place = Place::new();
    place.hub.wants_token("hf_secret");
    let error = place.fetch("org/name", Wanted::Model).0.unwrap_err().to_string();
    let page = format!("{}/org/name", place.hub.address());
    for text in
        ["org/name: the hub refuses access (401, GatedRepo of the test)", "HF_TOKEN", "licence", &page]
    {
        assert!(error.contains(text), "{error} should say {text}");
    }
    place.settings.token = Some("hf_secret".into());
    place.hub.seen();
    place.model();
    let seen = place.hub.seen();
    for request in &seen {
        let token = request.headers.get("authorization").map(String::as_str);
        assert_eq!(token, (request.port == "hub").then_some("Bearer hf_secret"), "{request:?}");
    }
    assert!(seen.iter().any(|request| request.port == "cdn"));
}

#[test]
fn what_the_hub_does_not_have_is_named() {
    let mut place = Place::new();
    let error = |place: &Place, name: &str, wanted| place.fetch(name, wanted).0.unwrap_err().to_string();
    let text = error(&place, "org/none", Wanted::Model);
    assert!(
        text.starts_with("org/none: the hub has no such repository, or it is private")
            && text.contains("/api/models/org/none/"),
        "{text}"
    );
    place.settings.token = Some("hf_x".into());
    assert!(error(&place, "org/none", Wanted::Model).contains("no such repository"));
    assert!(
        error(&place, "org/name@v9", Wanted::Model)
            .starts_with("org/name@v9: the repository has no such revision")
    );
    let files = ["x.txt".to_owned()];
    let text = error(&place, "org/name", Wanted::Files(&files));
    assert!(text.contains("`org/name` has no file x.txt, it has a b/more.json, config.json"), "{text}");
    place.hub.fails("HEAD ", [Fault::Status(404, "X-Error-Code: EntryNotFound\r\n")]);
    let text = error(&place, "org/name", Wanted::Model);
    assert!(
        text.starts_with("org/name: config.json: there is no such file")
            && text.contains("/org/name/resolve/"),
        "{text}"
    );
    place.hub.fails("/api/", [Fault::Wrong(b"<html>".to_vec())]);
    assert!(error(&place, "org/name", Wanted::Model).contains("is HF_ENDPOINT a hub?"));
    place.hub.file("models/org/bad", "../../x", "");
    assert!(error(&place, "org/bad", Wanted::Model).contains("which is not a path inside a folder"));
}

#[test]
fn offline_says_which_file_to_put_where() {
    let mut place = Place::new();
    place.settings.offline = true;
    let error = |place: &Place, name: &str, wanted| place.fetch(name, wanted).0.unwrap_err().to_string();
    let text = error(&place, "org/name", Wanted::Model);
    let folder = place.repo().join("snapshots/main");
    let base = format!("{}/org/name/resolve/main/", place.hub.address());
    let advice = format!(
        "put config.json, model.safetensors and tokenizer.json from {base} into {}",
        folder.display()
    );
    assert_eq!(text, format!("org/name is not in the cache, and HF_HUB_OFFLINE is set; {advice}"));
    let text = error(&place, "org/name", Wanted::Tokenizer);
    assert!(
        text.ends_with(&format!("put {base}tokenizer.json at {}", folder.join("tokenizer.json").display())),
        "{text}"
    );
    assert!(place.hub.seen().is_empty());
    // done as told
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::write(folder.join(name), "{}").unwrap();
    }
    assert_eq!(place.model().folder, folder);
    // nobody answers
    let mut place = Place::new();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    place.settings.endpoint = format!("http://{closed}");
    let text = error(&place, "org/name", Wanted::Model);
    assert!(
        text.contains(&format!("http://{closed} cannot be reached")) && text.contains("put config.json"),
        "{text}"
    );
}

#[test]
fn a_host_that_nobody_knows_is_not_asked_again() {
    let mut place = Place::new();
    place.settings.endpoint = "http://name.invalid".into();
    let (failed, noted) = place.fetch("org/name", Wanted::Model);
    let text = failed.unwrap_err().to_string();
    assert!(
        text.contains("http://name.invalid cannot be reached") && text.contains("put config.json"),
        "{text}"
    );
    assert!(noted.pauses.is_empty(), "{:?}", noted.notes);
}

#[test]
fn without_a_network_what_is_there_must_do() {
    let mut place = Place::new();
    let first = place.model();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    place.settings.endpoint = format!("http://{closed}");
    let (found, noted) = place.fetch("org/name", Wanted::Model);
    assert_eq!(found.unwrap().paths(), first.paths());
    assert!(
        noted.notes[0].contains("cannot be reached") && noted.notes[0].contains("taking what is in"),
        "{:?}",
        noted.notes
    );
}

#[test]
fn old_names_are_followed_and_both_are_looked_for() {
    let place = Place::new();
    place.hub.moved("models/gpt2", "models/org/name");
    let fetched = place.fetch("gpt2", Wanted::Model).0.unwrap();
    assert!(fetched.folder.ends_with(format!("models--gpt2/snapshots/{COMMIT}")));
    let find = |place: &Place, name: &str| place.fetcher().find(&place.name(name), Wanted::Model).unwrap();
    assert_eq!(find(&place, "openai-community/gpt2").unwrap().folder, fetched.folder);
    assert!(find(&place, "gpt2-xl").is_none());
}

#[test]
fn data_sets_by_split_by_pattern_and_in_part() {
    let place = Place::new();
    for name in
        ["README.md", "data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet", "all.txt"]
    {
        place.hub.file("datasets/org/data", name, name.repeat(3));
    }
    let paths = |fetched: Fetched| fetched.files.into_iter().map(|file| file.path).collect::<Vec<_>>();
    let one = ["data/train-0*".to_owned()];
    let fetched = place.fetch("datasets/org/data", Wanted::Files(&one)).0.unwrap();
    assert!(fetched.folder.ends_with(format!("datasets--org--data/snapshots/{COMMIT}")));
    assert_eq!(
        std::fs::read_link(fetched.folder.join("data/train-0.parquet")).unwrap().components().count(),
        5
    );
    let find = |wanted| place.fetcher().find(&place.name("datasets/org/data"), wanted).unwrap();
    assert!(find(Wanted::Files(&one)).is_some());
    assert!(find(Wanted::Train).is_none(), "a part must not pass for all");
    assert_eq!(
        paths(place.fetch("datasets/org/data", Wanted::Train).0.unwrap()),
        ["data/train-0.parquet", "data/train-1.parquet"]
    );
    assert!(find(Wanted::Train).is_some() && find(Wanted::Dataset).is_none());
    assert_eq!(place.fetch("datasets/org/data", Wanted::Dataset).0.unwrap().files.len(), 3);
}

/// A file outside the hub.
fn known(place: &Place, content: &[u8]) -> KnownFile {
    place.hub.file("", "/raw/input.txt", content);
    KnownFile {
        name: "verses".into(),
        file: "verses.txt".into(),
        address: format!("{}/raw/input.txt", place.hub.address()),
        bytes: content.len() as u64,
        sha256: sha256(content),
        about: "text".into(),
    }
}

#[test]
fn a_known_file_is_kept_in_our_cache() {
    let mut place = Place::new();
    let content = b"To be, or not to be".repeat(1000);
    place.settings.known = vec![known(&place, &content)];
    let path = place.folder.path().join("own/fetch/verses.txt");
    place.settings.offline = true;
    let error = place.fetch("verses", Wanted::Dataset).0.unwrap_err().to_string();
    assert!(
        error.ends_with(&format!("put {}/raw/input.txt at {}", place.hub.address(), path.display())),
        "{error}"
    );
    place.settings.offline = false;
    place.hub.fails("/raw/", [Fault::Cut(5000)]);
    let fetched = place.fetch("verses", Wanted::Dataset).0.unwrap();
    assert_eq!((fetched.paths(), fetched.received), (vec![path.clone()], content.len() as u64));
    assert!(std::fs::read(&path).unwrap() == content);
    place.hub.seen();
    assert!(place.fetcher().find(&place.name("verses"), Wanted::Dataset).unwrap().is_some());
    assert_eq!(place.fetch("verses", Wanted::Dataset).0.unwrap().received, 0);
    assert!(place.hub.seen().is_empty());
    // damaged on the disk
    std::fs::write(&path, "x").unwrap();
    assert!(place.fetcher().find(&place.name("verses"), Wanted::Dataset).unwrap().is_none());
    assert_eq!(place.fetch("verses", Wanted::Dataset).0.unwrap().received, content.len() as u64);
    // another file at the address
    std::fs::remove_file(&path).unwrap();
    place.hub.file("", "/raw/input.txt", vec![b'x'; content.len()]);
    let error = place.fetch("verses", Wanted::Dataset).0.unwrap_err().to_string();
    assert!(error.contains("verses: SHA-256 is ") && !path.exists(), "{error}");
    assert!(!path.with_file_name("verses.txt.incomplete").exists());
}

#[test]
fn two_processes_do_not_download_the_same_twice() {
    let place = Place::new();
    let fetchers = [(); 3].map(|()| {
        let (fetcher, name) = (place.fetcher(), place.name("org/name"));
        std::thread::spawn(move || {
            fetcher.fetch(&name, Wanted::Model, &mut Noted::default()).unwrap().received
        })
    });
    let received: u64 = fetchers.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(received as usize, place.weights.len() + 2 + 8);
    assert!(std::fs::read(place.blob(&sha256(&place.weights))).unwrap() == place.weights);
}

#[test]
fn the_list_has_known_names_and_the_cache() {
    let place = Place::new();
    place.model();
    std::fs::write(place.blob("abc.incomplete"), "12345").unwrap();
    let all = list(&place.settings).unwrap();
    let names: Vec<&str> = all.iter().map(|listed| listed.name.as_str()).collect();
    assert_eq!(
        names,
        ["tinyshakespeare", "hellaswag", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "org/name"]
    );
    assert!(
        all[..6].iter().all(|listed| listed.bytes == 0 && listed.folder.is_none() && listed.about.is_some())
    );
    assert_eq!((all[6].bytes as usize, all[6].unfinished), (place.weights.len() + 2 + 8 + 5, 5));
    assert_eq!(all[6].revisions, [("main".to_owned(), COMMIT.to_owned())]);
}
