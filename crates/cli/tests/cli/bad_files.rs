//! Files that are missing, damaged, of the wrong kind or cannot be written: named in one line, nothing left behind.

use super::Place;
use super::place::TINY;

/// The newest checkpoint of [`Place::with_run`].
const LAST: &str = "run/checkpoints/step-000006";

#[test]
fn a_damaged_checkpoint_is_refused_whatever_file_is_needed() {
    // state.safetensors is neither read nor needed here: `text_needs_the_weights_of_a_checkpoint_only`
    for file in ["model.safetensors", "config.json", "tokenizer.bin", "trainer.json"] {
        let place = Place::with_run();
        let path = format!("{LAST}/{file}");
        let sound = place.read(&path);
        let mut flipped = sound.clone();
        flipped[sound.len() / 2] ^= 0x10;
        let damages = [("shorter", &sound[..sound.len() - 9]), ("empty", &[]), ("flipped", &flipped)];
        for (damage, bytes) in damages {
            if file == "trainer.json" && damage == "flipped" {
                continue; // the file of the checksums has none itself: a changed setting is still JSON
            }
            place.write(&path, bytes);
            for command in ["generate --model", "train --out next --init"] {
                place.refuses(&format!("{command} {LAST}"), &[&format!("{path}: "), "expected"]);
            }
        }
        std::fs::remove_file(place.path(&path)).unwrap();
        if file != "trainer.json" {
            // without that one it is a Hugging Face folder
            place.refuses(&format!("generate --model {LAST}"), &[&path, "No such file"]);
        }
    }
}

#[test]
fn files_of_the_wrong_kind_are_refused() {
    let place = Place::with_run();
    place.write("empty", "");
    place.write("text.txt", "these are not the weights you are looking for");
    std::fs::create_dir(place.path("folder")).unwrap();
    for (file, texts) in [
        ("nope", "nope: cannot open: No such file or directory (os error 2)\n"),
        ("empty", "empty: kind of file is 0 bytes long, expected"),
        ("text.txt", "text.txt: kind of file is not known"),
        ("folder", "folder: folder is without config.json, expected a run, a checkpoint"),
        ("run/checkpoints/step-000006/tokenizer.bin", "kind of file is a tokenizer, expected weights"),
    ] {
        place.refuses(&format!("generate --model {file}"), &[texts]);
        place.refuses(&format!("train --init {file} --out next"), &[texts]);
        place.refuses(&format!("convert {file} out.bin"), &[texts]);
        place.refuses(&format!("verify --model {file} --state empty"), &[texts]);
        place.refuses(&format!("verify --key {file}"), &[&format!("{file}: ")]);
        if file != "nope" {
            place.refuses(&format!("bench --model {file}"), &[texts]);
        }
        if file != "text.txt" {
            place.refuses(&format!("train {TINY} --data {file} --out next"), &[file]);
        }
        if !file.ends_with("tokenizer.bin") {
            place.refuses(&format!("train {TINY} --tokenizer {file} --out next"), &[file]);
        }
        if file != "empty" {
            place.refuses(&format!("train --config {file}"), &[file]);
        }
    }
}

#[test]
fn weights_of_other_sizes_are_refused() {
    let place = Place::with_run();
    place.refuses(&format!("train {TINY} --model d12 --init run"), &["other sizes than --model d12"]);
}

#[test]
fn weights_that_are_not_numbers_are_refused() {
    let place = Place::with_run();
    place.does("convert run w.bin");
    let mut bytes = place.read("w.bin");
    bytes[1024 + 4 * 77..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    place.write("w.bin", bytes);
    for command in ["generate --model w.bin", "train --init w.bin --out next", "convert w.bin hf"] {
        place.refuses(command, &["w.bin: wte.weight", "NaN"]);
    }
}

#[test]
fn data_is_checked() {
    let place = Place::new();
    let mut tokens = vec![5; 400];
    place.shard("short.bin", &tokens[..16]);
    tokens[200] = 256;
    place.shard("wide.bin", &tokens);
    // found before the first step; no run folder is made
    for out in ["", "--out run"] {
        let before = place.files();
        let done = place.runs(&format!("train {TINY} --seq 32 --batch 12 --data wide.bin {out}"));
        let error =
            "error: wide.bin: token at position 200 is 256, expected a token of the vocabulary, 0 to 255\n";
        assert_eq!((done.code, done.stderr.as_str()), (Some(2), error));
        assert_eq!(place.files(), before);
    }
    place.refuses(&format!("train {TINY} --data short.bin"), &["16 tokens", "at least 17", "smaller seq"]);
    place.refuses(&format!("train {TINY} --data nowhere/*.bin"), &["nowhere/: no such folder"]);
    place.refuses(&format!("train {TINY} --data *.txt"), &["no file matches `*.txt`"]);
    let mut shorter = place.read("wide.bin");
    shorter.pop();
    place.write("cut.bin", shorter);
    place.refuses(
        &format!("train {TINY} --data cut.bin"),
        &["cut.bin: file size is 1823 bytes, expected 1824"],
    );
}

#[test]
fn places_that_cannot_be_written_are_found_before_the_work() {
    let place = Place::with_run();
    place.write("file", "");
    place.refuses(&format!("train {TINY} --out file"), &["file"]);
    place.refuses(&format!("train {TINY} --out file/run"), &["file/run: cannot create"]);
    for (json, text) in [
        ("nowhere/x.json", "nowhere/x.json: cannot create: No such file"),
        ("file/x.json", "file/x.json: cannot create"),
        ("run", "run: path is a folder, expected a file"),
    ] {
        for command in [
            format!("train {TINY} --out next"),
            "generate --model run".into(),
            "bench".into(),
            "profile".into(),
            "plan".into(),
            "doctor".into(),
            "verify --key k".into(),
        ] {
            place.refuses(&format!("{command} --json {json}"), &[text]);
        }
    }
    place.refuses("convert run nowhere/w.bin", &["nowhere/w.bin: cannot create"]);
    place.refuses("convert run file", &["file: path is a file, expected a folder"]);
    place.refuses("convert run run", &["run: folder is not replaced because it holds"]);
}

/// A file system where nobody may write, not even root.
#[cfg(target_os = "linux")]
#[test]
fn places_where_nobody_may_write_are_named() {
    let place = Place::with_run();
    place.refuses(&format!("train {TINY} --out /proc/ironhorse"), &["/proc/ironhorse", "cannot create"]);
    place.refuses("doctor --json /proc/ironhorse.json", &["/proc/ironhorse.json", "cannot create"]);
    place.refuses("convert run /proc/ironhorse.bin", &["/proc/ironhorse.bin", "cannot create"]);
}

/// The same by permissions, for users whom they bind.
#[cfg(unix)]
#[test]
fn permissions_are_respected() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::with_run();
    let forbid = |name: &str, mode| {
        std::fs::set_permissions(place.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    std::fs::create_dir(place.path("locked")).unwrap();
    forbid("locked", 0o500);
    if std::fs::write(place.path("locked/probe"), "").is_ok() {
        println!(
            "not checked: this user may write anywhere; places_where_nobody_may_write_are_named covers it"
        );
        return;
    }
    place.refuses(
        &format!("train {TINY} --out locked/run"),
        &["locked/run: cannot create: Permission denied"],
    );
    place.refuses("doctor --json locked/d.json", &["locked/d.json: cannot create: Permission denied"]);
    let weights = place.weights("run");
    place.write("w.safetensors", weights);
    forbid("w.safetensors", 0o000);
    let done = place.runs("generate --model w.safetensors");
    assert_eq!(done.code, Some(2));
    assert_eq!(done.stderr, "error: w.safetensors: cannot open: Permission denied (os error 13)\n");
}
