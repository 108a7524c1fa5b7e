use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use ironhorse_train::format::shards::{ShardKind, ShardReader};

use super::*;
use crate::read::{Format, resolve};

fn settings(out: &Path) -> Settings {
    let read = ReadSettings { unit_bytes: 256, large_bytes: 2048, ..ReadSettings::default() };
    Settings { val: 0.2, shard_tokens: 700, threads: 2, read, ..Settings::new(out, "data") }
}

fn run(inputs: &[PathBuf], tokenizer: &str, settings: &Settings) -> Result<Prepared> {
    let inputs = resolve(inputs, None)?;
    prepare(&inputs, &Tokenizer::open(tokenizer)?, settings, &mut |_| ControlFlow::Continue(()))
}

/// All files of a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap()))
        .collect()
}

fn tokens(folder: &Path, shards: &[ShardFacts]) -> Vec<u32> {
    let mut all = Vec::new();
    for facts in shards {
        let mut shard = ShardReader::open(&folder.join(&facts.file)).unwrap();
        assert_eq!(shard.num_tokens(), facts.tokens);
        let mut tokens = vec![0; facts.tokens];
        shard.read_at(0, &mut tokens).unwrap();
        all.extend(tokens);
    }
    all
}

/// Inputs of every kind: small texts, a large one, lines with bad UTF-8 and duplicates.
fn corpus(folder: &Path) -> Vec<PathBuf> {
    let at = |name: &str| folder.join(name);
    std::fs::create_dir(at("texts")).unwrap();
    for n in 0..20 {
        let text = format!("Text {n}: it's a dog's life, isn't it?\n\n  été 中文 😀\n").repeat(n % 4 + 1);
        std::fs::write(at("texts").join(format!("{n:02}.txt")), text).unwrap();
    }
    std::fs::write(at("large.md"), "A long document, in parts; 1234 of it's words.\n".repeat(200)).unwrap();
    let lines: Vec<u8> = (0..150u32)
        .flat_map(|n| {
            let mut line =
                format!("{{\"id\": {n}, \"text\": \"Line {} of some\\u00e9 text\"}}\n", n % 120).into_bytes();
            if n % 50 == 7 {
                line[30] = 0xff;
            }
            line
        })
        .collect();
    std::fs::write(at("lines.jsonl"), lines).unwrap();
    vec![at("texts"), at("large.md"), at("lines.jsonl")]
}

#[test]
fn the_same_bytes_for_any_number_of_threads_and_what_was_read() {
    let top = tempfile::tempdir().unwrap();
    let inputs = corpus(top.path());
    let mut all = Vec::new();
    for threads in [1, 2, 7] {
        let out = top.path().join(format!("out{threads}"));
        let done = run(&inputs, "gpt2", &Settings { threads, ..settings(&out) }).unwrap();
        let counts = &done.manifest.counts;
        assert_eq!(counts.train_documents + counts.val_documents, 20 + 1 + 150);
        assert_eq!(counts.replaced, 3);
        assert!(
            counts.val_documents > 10 && done.manifest.train.len() + done.manifest.val.len() > 6,
            "{counts:?}"
        );
        assert_eq!(done.manifest.inputs.len(), 22);
        all.push(files(&out));
    }
    assert!(all[0] == all[1] && all[0] == all[2]);
    let names: Vec<_> = all[0].keys().map(String::as_str).collect();
    assert!(names.contains(&"data_train_000000.bin") && names.contains(&"manifest.json"), "{names:?}");
    assert!(names.iter().all(|&name| name == ".prepare.lock" || !name.starts_with('.')), "{names:?}");
}

#[test]
fn documents_come_back_out_of_the_shards() {
    let top = tempfile::tempdir().unwrap();
    let inputs = corpus(top.path());
    let out = top.path().join("out");
    for (name, kind) in [("gpt2", ShardKind::U16), ("cl100k_base", ShardKind::U32), ("bytes", ShardKind::U16)]
    {
        let done = run(&inputs[..2], name, &Settings { overwrite: true, ..settings(&out) }).unwrap().manifest;
        let tokenizer = Tokenizer::open(name).unwrap();
        let shard = ShardReader::open(&out.join(&done.train[0].file)).unwrap();
        assert_eq!(shard.kind(), kind);
        let eot = tokenizer.eot().unwrap();
        let mut documents = Vec::new();
        for part in [&done.train, &done.val] {
            let all = tokens(&out, part);
            assert_eq!(all[0], eot);
            documents.extend(all[1..].split(|&id| id == eot).map(|ids| tokenizer.decode(ids).unwrap()));
        }
        let mut want: Vec<_> = resolve(&inputs[..2], None)
            .unwrap()
            .iter()
            .map(|input| std::fs::read(&input.path).unwrap())
            .collect();
        want.sort();
        documents.sort();
        assert!(documents == want, "{name}");
    }
}

#[test]
fn stopped_anywhere_it_goes_on_and_gives_the_same_bytes() {
    let top = tempfile::tempdir().unwrap();
    let inputs = corpus(top.path());
    let whole = top.path().join("whole");
    let dedup = |out: &Path| Settings { dedup: true, ..settings(out) };
    let done = run(&inputs, "gpt2", &dedup(&whole)).unwrap();
    assert_eq!((done.manifest.counts.duplicates, done.resumed), (29, false));
    let tokenizer = Tokenizer::open("gpt2").unwrap();
    let found = resolve(&inputs, None).unwrap();
    for patience in [0, 1, 3, 8] {
        let out = top.path().join(format!("out{patience}"));
        let mut runs = 0;
        loop {
            runs += 1;
            let mut calls = 0;
            let result = prepare(&found, &tokenizer, &dedup(&out), &mut |_| {
                calls += 1;
                if calls > patience + runs % 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            match result {
                Ok(done) => {
                    assert!(done.resumed && runs > 2, "{runs}");
                    break;
                }
                Err(Error::Stopped) => assert!(!out.join(MANIFEST).exists()),
                Err(error) => panic!("{error}"),
            }
            assert!(runs < 2000);
        }
        assert!(files(&out) == files(&whole), "{patience}");
    }
    let again = run(&inputs, "gpt2", &dedup(&whole)).unwrap();
    assert!(again.unchanged);
}

/// The process may die at any moment after the last save: files are longer, or have their names already.
#[test]
fn what_was_written_after_the_last_save_is_forgotten() {
    let top = tempfile::tempdir().unwrap();
    let inputs = corpus(top.path());
    let whole = top.path().join("whole");
    run(&inputs, "gpt2", &settings(&whole)).unwrap();
    let out = top.path().join("out");
    let mut calls = 0;
    let stopped = prepare(
        &resolve(&inputs, None).unwrap(),
        &Tokenizer::open("gpt2").unwrap(),
        &settings(&out),
        &mut |_| {
            calls += 1;
            if calls > 12 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    );
    assert!(matches!(stopped, Err(Error::Stopped)));
    for (name, mut bytes) in files(&out) {
        if let Some(shard) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".partial")) {
            bytes.extend([7; 999]);
            std::fs::remove_file(out.join(&name)).unwrap();
            std::fs::write(out.join(shard), bytes).unwrap();
        }
    }
    assert!(run(&inputs, "gpt2", &settings(&out)).unwrap().resumed);
    assert!(files(&out) == files(&whole));
}

#[test]
fn a_bad_line_is_named_and_can_be_skipped_later() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("a.jsonl");
    let line = |n: usize| format!("{{\"text\": \"line {n}\"}}\n");
    let text: String = (1..=60).map(|n| if n == 41 { "{oops\n".to_owned() } else { line(n) }).collect();
    std::fs::write(&path, &text).unwrap();
    let out = top.path().join("out");
    let error = run(std::slice::from_ref(&path), "gpt2", &settings(&out)).unwrap_err().to_string();
    assert!(
        error.contains("a.jsonl: line 41 is not JSON (key must be a string at column 2); --skip-bad leaves"),
        "{error}"
    );
    assert!(!out.join(MANIFEST).exists());
    let mut skipping = settings(&out);
    skipping.read.skip_bad = true;
    let done = run(std::slice::from_ref(&path), "gpt2", &skipping).unwrap();
    assert!(done.resumed);
    let counts = &done.manifest.counts;
    assert_eq!((counts.bad, counts.train_documents + counts.val_documents), (1, 59));
    let other = top.path().join("other");
    skipping.out = other.clone();
    run(&[path], "gpt2", &skipping).unwrap();
    assert!(files(&out) == files(&other));
}

#[test]
fn empty_documents_and_inputs_without_text() {
    let top = tempfile::tempdir().unwrap();
    let at = |name: &str| top.path().join(name);
    std::fs::write(at("a.jsonl"), "{\"text\": \"\"}\n\n{\"text\": \" \\n\"}\n{\"text\": \"x\"}\n").unwrap();
    std::fs::write(at("empty.txt"), "").unwrap();
    let done = run(&[at("a.jsonl"), at("empty.txt")], "bytes", &settings(&at("out"))).unwrap();
    let counts = done.manifest.counts;
    assert_eq!((counts.empty, counts.train_documents + counts.val_documents, counts.bytes), (2, 1, 1));
    let error = run(&[at("empty.txt")], "bytes", &settings(&at("none"))).unwrap_err().to_string();
    assert!(error.contains("empty.txt: no document has any text"), "{error}");
    assert!(!at("none").join(MANIFEST).exists());
}

#[test]
fn a_folder_of_something_else_is_not_replaced() {
    let top = tempfile::tempdir().unwrap();
    let at = |name: &str| top.path().join(name);
    std::fs::write(at("a.txt"), "some text").unwrap();
    let (inputs, out) = ([at("a.txt")], at("out"));
    run(&inputs, "gpt2", &settings(&out)).unwrap();
    let error = run(&inputs, "bytes", &settings(&out)).unwrap_err().to_string();
    assert!(
        error.contains(
            "holds shards of other settings or another tokenizer; use another --out, or --overwrite"
        ),
        "{error}"
    );
    std::fs::write(at("a.txt"), "other text, longer").unwrap();
    let error = run(&inputs, "gpt2", &settings(&out)).unwrap_err().to_string();
    assert!(error.contains("of other inputs, or inputs that have changed since"), "{error}");
    std::fs::write(out.join("keep.bin"), "not ours").unwrap();
    run(&inputs, "bytes", &Settings { overwrite: true, ..settings(&out) }).unwrap();
    assert!(out.join("keep.bin").exists());
    std::fs::write(out.join(MANIFEST), "{").unwrap();
    let error = run(&inputs, "bytes", &settings(&out)).unwrap_err().to_string();
    assert!(error.contains("manifest.json: is not what `prepare` writes"), "{error}");
}

#[test]
fn settings_out_of_range_are_named() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("a.txt");
    std::fs::write(&path, "x").unwrap();
    let base = || settings(&top.path().join("out"));
    let tail =
        |tail| Settings { read: ReadSettings { val_tail: Some(tail), ..ReadSettings::default() }, ..base() };
    let wrong = [
        (Settings { val: 1.0, ..base() }, "--val is 1, expected at least 0 and less than 1"),
        (Settings { val: f64::NAN, ..base() }, "--val is NaN"),
        (Settings { shard_tokens: 0, ..base() }, "--shard-tokens is 0, expected 1 to 2147483647"),
        (Settings { name: "a/b".into(), ..base() }, "--name is a/b"),
        (tail(1.0), "--val-tail is 1"),
    ];
    for (settings, want) in wrong {
        let error = run(std::slice::from_ref(&path), "bytes", &settings).unwrap_err().to_string();
        assert!(error.starts_with(want), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_named_and_the_run_goes_on_later() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("a.txt");
    std::fs::write(&path, "words and words ".repeat(300_000)).unwrap();
    let out = top.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let full = out.join(".data_train_000000.bin.partial");
    std::os::unix::fs::symlink("/dev/full", &full).unwrap();
    let large = Settings { shard_tokens: 100_000_000, val: 0.0, ..Settings::new(&out, "data") };
    let error = run(std::slice::from_ref(&path), "bytes", &large).unwrap_err().to_string();
    assert!(error.contains("data_train_000000.bin.partial: cannot write: "), "{error}");
    assert!(!out.join(MANIFEST).exists());
    std::fs::remove_file(full).unwrap();
    let done = run(&[path], "bytes", &large).unwrap();
    assert!(done.resumed);
    assert_eq!(done.manifest.counts.train_tokens, 4_800_001);
}

#[test]
fn two_at_once_in_one_folder_are_kept_apart() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("a.txt");
    std::fs::write(&path, "x").unwrap();
    let out = top.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let lock = || Lock::take(&settings(&out), &mut |_| ControlFlow::Continue(())).unwrap();
    let held = lock();
    let error = run(std::slice::from_ref(&path), "bytes", &settings(&out)).unwrap_err().to_string();
    assert!(error.contains("another process prepares data in this folder"), "{error}");
    let inputs = resolve(std::slice::from_ref(&path), None).unwrap();
    let waiting = Settings { wait: true, ..settings(&out) };
    let stopped =
        prepare(&inputs, &Tokenizer::open("bytes").unwrap(), &waiting, &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(Error::Stopped)), "who waits can be stopped: {stopped:?}");
    drop(held);
    run(std::slice::from_ref(&path), "bytes", &settings(&out)).unwrap();
    // what is complete needs no lock
    let _held = lock();
    assert!(run(&[path], "bytes", &settings(&out)).unwrap().unchanged);
}

#[test]
fn of_ten_that_start_at_once_one_prepares_and_the_others_wait() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("a.txt");
    std::fs::write(&path, "some text of a few words\n".repeat(2000)).unwrap();
    let waiting = Settings { wait: true, ..settings(&top.path().join("out")) };
    let all: Vec<Prepared> = std::thread::scope(|scope| {
        let start = || run(std::slice::from_ref(&path), "bytes", &waiting).unwrap();
        let threads: Vec<_> = (0..10).map(|_| scope.spawn(start)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.iter().all(|prepared| prepared.manifest == all[0].manifest));
    assert_eq!(all.iter().filter(|prepared| !prepared.unchanged).count(), 1);
}

#[test]
fn formats_by_name() {
    assert_eq!(Format::parse("ndjson"), Some(Format::Jsonl));
    assert_eq!(Format::parse("csv"), None);
}
