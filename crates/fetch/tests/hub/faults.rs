//! Downloads that go wrong: cut, stopped, answered badly.

use crate::place::{Noted, Place};
use crate::server::{Fault, git_blob, sha256};
use ironhorse_fetch::{Error, Wanted};
use std::time::Duration;

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
