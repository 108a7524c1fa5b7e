//! Closed pipes and full disks.
#![cfg(target_os = "linux")]

use super::Place;
use super::place::{Done, TINY, ironhorse};
use std::fs::{File, OpenOptions};
use std::process::{Command, Stdio};

fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

/// A pipe whose reader is closed.
fn closed() -> Stdio {
    std::io::pipe().unwrap().1.into()
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = Place::with_run();
    // a checkpoint named itself is not named again
    let generate = "generate --model run/checkpoints/step-000006";
    for line in ["doctor --threads 1", "plan --threads 1", "--help", generate] {
        let done: Done = place.command(line).stdout(closed()).output().unwrap().into();
        assert_eq!((done.code, &*done.stderr), (Some(0), ""), "{line}");
    }
    let mut command = place.command(&format!("train {TINY} --out quiet --json q.json"));
    assert_eq!(command.stdout(closed()).stderr(closed()).status().unwrap().code(), Some(0));
    assert_eq!(place.weights("quiet"), place.weights("run"));
    assert_eq!(place.json("q.json")["steps"], 6);
    let mut command = place.command("generate --model run --tokens 9 --json g.json");
    assert_eq!(command.stdout(closed()).status().unwrap().code(), Some(0));
    assert!(place.json("g.json")["text"].is_string());
}

#[test]
fn a_check_that_fails_fails_even_when_nobody_reads() {
    let place = Place::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../train/tests/fixtures/tiny_custom");
    let line = format!("verify --model {fixtures}.bin --state {fixtures}_debug_state.bin --tolerance 0");
    let done: Done = place.command(&line).stdout(closed()).output().unwrap().into();
    assert_eq!(done.code, Some(1), "{}", done.stderr);
}

#[test]
fn output_that_cannot_be_written_is_said() {
    let place = Place::with_run();
    let error = "error: standard output: cannot write: No space left on device (os error 28)\n";
    for line in ["doctor --threads 1", "generate --model run/checkpoints/step-000006"] {
        let done: Done = place.command(line).stdout(full()).output().unwrap().into();
        assert_eq!((done.code, &*done.stderr), (Some(2), error), "{line}");
    }
    let done = place.runs("plan --threads 1 --json /dev/full");
    assert_eq!(done.code, Some(2));
    assert_eq!(done.stderr, "error: /dev/full: cannot write: No space left on device (os error 28)\n");
    // a full standard error stops nothing
    let mut command = place.command(&format!("train {TINY} --out run2"));
    let status = command.stdout(Stdio::null()).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(place.command("nope").stderr(full()).status().unwrap().code(), Some(2));
}

#[test]
fn json_can_go_to_standard_output() {
    let done = Place::new().does("plan --threads 1 --json /dev/stdout");
    assert!(done.text().contains("\"total_bytes\": "), "{}", done.text());
}

/// Files may grow to `blocks` of 512 bytes and no further, as on a disk that is full.
fn on_a_full_disk(place: &Place, blocks: u32, line: &str) -> Done {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" {line}");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(ironhorse().get_program()).current_dir(place.path(""));
    command.output().unwrap().into()
}

#[test]
fn a_full_disk_leaves_no_half_checkpoint() {
    let place = Place::new();
    let done = on_a_full_disk(&place, 60, &format!("train {TINY} --out run"));
    let last = done.stderr.lines().last().unwrap();
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(
        last.starts_with(
            "error: run/checkpoints/step-000006/model.safetensors: cannot write: File too large"
        ),
        "{last}"
    );
    assert_eq!(place.metrics("run").len(), 6, "the log was small enough");
    let left = place.files();
    assert!(left.keys().all(|path| !path.to_string_lossy().contains("step-")), "{:?}", left.keys());
    let done = on_a_full_disk(&place, 0, &format!("train {TINY} --out nothing"));
    assert_eq!((done.code, place.path("nothing").exists()), (Some(2), false), "{}", done.stderr);
}

#[test]
fn a_full_disk_leaves_other_files_alone() {
    let place = Place::with_run();
    let before = place.files();
    let done = on_a_full_disk(&place, 60, &format!("train {TINY} --seed 5 --out other"));
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(before.iter().all(|(path, content)| place.files().get(path) == Some(content)));
    let done = on_a_full_disk(&place, 60, "convert run w.bin");
    assert_eq!((done.code, place.path("w.bin").exists()), (Some(2), false), "{}", done.stderr);
    assert!(done.stderr.starts_with("error: w.bin: cannot write: File too large"), "{}", done.stderr);
}
