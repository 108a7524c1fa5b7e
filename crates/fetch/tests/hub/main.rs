//! Downloads from a server on this machine that behaves as the hub does, well and badly.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod faults;
mod place;
#[path = "../server/mod.rs"]
mod server;

use ironhorse_fetch::{Fetched, KnownFile, Wanted, list};
use place::{Noted, Place};
use server::{COMMIT, Fault, git_blob, sha256};
use std::path::Path;

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
