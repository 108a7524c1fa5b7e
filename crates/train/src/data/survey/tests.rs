//! Tests of the survey.

use super::*;
use crate::format::shards::ShardWriter;

fn write(path: &Path, kind: ShardKind, tokens: &[u32]) {
    let mut writer = ShardWriter::create(path, kind).unwrap();
    writer.push(tokens).unwrap();
    writer.finish().unwrap();
}

/// Runs a survey and also returns the number of bytes read.
fn run(paths: &[PathBuf], vocab: usize, cache: Option<&Path>) -> (Result<Vec<SourceFacts>>, u64) {
    let (mut last, mut whole) = (0, 0);
    let facts = survey(paths, vocab, cache, &mut |done, all| {
        assert!(done > last && done <= all);
        (last, whole) = (done, all);
        ControlFlow::Continue(())
    });
    assert!(facts.is_err() || last == whole);
    (facts, last)
}

#[test]
fn hashes_are_those_of_sha256sum() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.bin"), folder.path().join("b.bin"));
    write(&a, ShardKind::U16, &[5, 6, 65535, 7]);
    // more than one piece
    let many: Vec<u32> = (0..3_000_000).collect();
    write(&b, ShardKind::U32, &many);
    let facts = run(&[a.clone(), b.clone()], 1 << 22, None).0.unwrap();
    assert_eq!((facts[0].tokens, facts[0].bytes, facts[0].max_token), (4, 1032, 65535));
    assert_eq!((facts[1].tokens, facts[1].bytes, facts[1].max_token), (3_000_000, 12_001_024, 2_999_999));
    assert_eq!((&facts[0].path, &facts[1].path), (&a, &b));
    for (facts, path) in facts.iter().zip([&a, &b]) {
        assert_eq!(facts.sha256, hex(&Sha256::digest(std::fs::read(path).unwrap())));
        if let Ok(output) = std::process::Command::new("sha256sum").arg(path).output() {
            assert!(String::from_utf8(output.stdout).unwrap().starts_with(&facts.sha256));
        }
    }
    assert!(run(&[], 10, None).0.unwrap().is_empty());
}

#[test]
fn the_first_token_outside_the_vocabulary_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache.json");
    let paths: Vec<PathBuf> = (0..40).map(|n| folder.path().join(format!("s_{n:02}.bin"))).collect();
    for (n, path) in paths.iter().enumerate() {
        let mut tokens = vec![1; 100];
        if n >= 20 {
            (tokens[7], tokens[9]) = (60, 70);
        }
        write(path, ShardKind::U16, &tokens);
    }
    let want = format!(
        "{}: token at position 7 is 60, expected a token of the vocabulary, 0 to 49",
        paths[20].display()
    );
    for cache in [None, Some(cache.as_path())] {
        for _ in 0..5 {
            assert_eq!(run(&paths, 50, cache).0.unwrap_err().to_string(), want);
        }
    }
    // a cache that was filled with a larger vocabulary does not hide it
    assert!(run(&paths, 71, Some(&cache)).0.is_ok());
    assert_eq!(run(&paths, 71, Some(&cache)).1, 0);
    assert_eq!(run(&paths, 50, Some(&cache)).0.unwrap_err().to_string(), want);
    // in the second piece of a file, at its own position
    let long = folder.path().join("long.bin");
    let mut tokens = vec![1; 4_500_000];
    tokens[4_200_000] = 99;
    write(&long, ShardKind::U16, &tokens);
    let text = run(&[long], 99, None).0.unwrap_err().to_string();
    assert!(text.contains("token at position 4200000 is 99"), "{text}");
}

#[test]
fn the_cache_spares_the_reading() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache.json");
    let paths = [folder.path().join("a.bin"), folder.path().join("b.bin")];
    paths.iter().for_each(|path| write(path, ShardKind::U16, &[1, 2, 3]));
    let (first, read) = run(&paths, 10, Some(&cache));
    let first = first.unwrap();
    assert_eq!(read, 2 * 1030);
    let (second, read) = run(&paths, 10, Some(&cache));
    assert_eq!((second.unwrap(), read), (first.clone(), 0));
    // one file is replaced by another of the same length: only that one is read
    write(&paths[1], ShardKind::U16, &[1, 2, 4]);
    let (third, read) = run(&paths, 10, Some(&cache));
    let third = third.unwrap();
    assert_eq!((read, &third[0]), (1030, &first[0]));
    assert_ne!(third[1].sha256, first[1].sha256);
    // the entries of other files are kept
    run(&paths[..1], 10, Some(&cache)).0.unwrap();
    assert_eq!(run(&paths, 10, Some(&cache)).1, 0);
}

#[test]
fn a_damaged_or_unwritable_cache_costs_only_time() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache.json");
    let paths = [folder.path().join("a.bin")];
    write(&paths[0], ShardKind::U16, &[1, 2, 3]);
    let want = run(&paths, 10, None).0.unwrap();
    run(&paths, 10, Some(&cache)).0.unwrap();
    let good = std::fs::read_to_string(&cache).unwrap();
    let damaged = [
        String::new(),
        "{".into(),
        "[1, 2]".into(),
        good[..good.len() / 2].into(),
        good.replace("\"version\": 1", "\"version\": 2"),
        good.replace(&want[0].sha256, "beef"),
    ];
    for text in damaged {
        std::fs::write(&cache, &text).unwrap();
        let (found, read) = run(&paths, 10, Some(&cache));
        assert_eq!((found.unwrap(), read), (want.clone(), 1030), "{text}");
        assert_eq!(std::fs::read_to_string(&cache).unwrap(), good);
    }
    // a folder, and a file in a folder that is missing
    for cache in [folder.path(), &folder.path().join("no/such/cache.json")] {
        assert_eq!(run(&paths, 10, Some(cache)).0.unwrap(), want);
    }
}

#[test]
fn bad_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (good, cut) = (folder.path().join("good.bin"), folder.path().join("cut.bin"));
    write(&good, ShardKind::U16, &[1, 2, 3]);
    std::fs::write(&cut, &std::fs::read(&good).unwrap()[..1028]).unwrap();
    for (path, said) in [
        (cut, "cut.bin: file size is 1028 bytes, expected 1030 bytes"),
        (folder.path().to_owned(), "path is a folder, expected a file"),
        (folder.path().join("gone.bin"), "gone.bin: cannot open"),
    ] {
        let text = run(&[good.clone(), path], 10, None).0.unwrap_err().to_string();
        assert!(text.contains(said), "{text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn names_need_not_be_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(std::ffi::OsStr::from_bytes(b"a\xff.bin"));
    write(&path, ShardKind::U16, &[1, 2, 3]);
    let facts = run(std::slice::from_ref(&path), 10, Some(&folder.path().join("cache.json"))).0.unwrap();
    assert_eq!(facts[0].path, path);
    assert!(serde_json::to_string(&facts).unwrap().contains("a\u{fffd}.bin"));
}

#[test]
fn the_fingerprint_is_of_the_contents() {
    let facts = |name: &str, text: &str| facts_of_memory(name, text.as_bytes());
    let one = facts("stories", "abc");
    assert_eq!((one.tokens, one.bytes, one.max_token), (3, 3, 99));
    assert_eq!(one.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    let print = |list: &[(&str, &str)]| {
        fingerprint(&list.iter().map(|(name, text)| facts(name, text)).collect::<Vec<_>>())
    };
    assert_eq!(print(&[("a", "x"), ("b", "y")]), print(&[("c", "x"), ("d", "y")]));
    assert_ne!(print(&[("a", "x"), ("b", "y")]), print(&[("a", "y"), ("b", "x")]));
    assert_ne!(print(&[("a", "x")]), print(&[("a", "x"), ("b", "")]));
    assert_eq!(print(&[("a", "x")]).len(), 64);
}

#[test]
fn a_survey_that_is_broken_off_says_so_and_reads_no_further() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|i| folder.path().join(format!("{i}.bin"))).collect();
    paths.iter().for_each(|path| write(path, ShardKind::U16, &[1, 2, 3]));
    let mut calls = 0;
    let stopped = survey(&paths, 10, None, &mut |_, _| {
        calls += 1;
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(Error::Stopped)), "{stopped:?}");
    assert_eq!(calls, 1);
}
