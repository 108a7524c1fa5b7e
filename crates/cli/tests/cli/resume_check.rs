//! `ironhorse resume-check`
#![cfg(unix)]

use super::Place;
use super::running::leftovers;

/// A few hundred milliseconds, enough to be interrupted.
const SMALL: &str = "--model n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32 --batch 2 --seq 16 --val-batches 4 \
                     --threads 1 --device cpu";

#[test]
fn an_interrupted_run_with_muon_is_proved_equal() {
    let place = Place::new();
    let done = place.does(&format!("resume-check {SMALL} --optimizer muon --steps 40 --json report.json"));
    assert!(done.text().contains("PASS"), "{}", done.text());
    assert_eq!(place.json("report.json")["settings"]["optimizer"], "muon");
}

#[test]
fn an_interrupted_run_is_proved_equal() {
    let place = Place::new();
    let done = place.does(&format!("resume-check {SMALL} --steps 60 --folder work --json report.json"));
    let text = done.text();
    assert!(text.contains("PASS") && text.contains("SIGTERM") && text.contains("SIGKILL"), "{text}");
    let report = place.json("report.json");
    assert_eq!((&report["passed"], &report["settings"]["steps"]), (&true.into(), &60.into()));
    let runs = report["runs"].as_array().unwrap();
    for (run, times) in runs.iter().zip([1, 3]) {
        assert_eq!(run["at_steps"].as_array().unwrap().len(), times, "{run}");
        assert_eq!(run["resumed_from"].as_array().unwrap().len(), times, "{run}");
        assert_eq!(
            (run["bytes_differ"].as_u64(), run["fields_differ"].as_u64()),
            (Some(0), Some(0)),
            "{run}"
        );
        assert!(run["files"].as_u64() >= Some(6) && run["fields"].as_u64() >= Some(240), "{run}");
    }
    assert!(place.path("work/uninterrupted/metrics.jsonl").exists(), "--folder is kept");
    place.refuses("resume-check --folder work", &["work: is not empty"]);
}

#[test]
fn what_it_decides_by_itself_is_refused() {
    let place = Place::new();
    for flag in ["--out x", "--resume", "--overwrite", "--max-time 3s", "--save-batches b"] {
        let name = flag.split(' ').next().unwrap();
        place.refuses(&format!("resume-check {flag}"), &[name, "cannot be used with resume-check"]);
    }
    place.refuses("resume-check --steps 2", &["--steps is 2, expected at least 5"]);
    place.refuses("resume-check --steps 9 --save-every 6", &["--save-every is 6, expected at most 5"]);
    // a training process that cannot run is reported, and the folder with its output is kept
    let mut command = place.command(&format!("resume-check {SMALL} --steps 8 --model d99"));
    let done: super::place::Done = command.env("TMPDIR", place.path("")).output().unwrap().into();
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(done.stderr.contains("d99") && done.stderr.contains("the runs are kept in"), "{}", done.stderr);
}

#[test]
fn a_few_rounds_of_torture_pass() {
    let place = Place::new();
    let mut command =
        place.command("resume-check --torture 3 --torture-seed 5 --threads 1 --device cpu --json t.json");
    let done: super::place::Done = command.env("TMPDIR", place.path("")).output().unwrap().into();
    assert_eq!(done.code, Some(0), "{} {}", done.text(), done.stderr);
    assert_eq!(done.text().lines().last(), Some("3 passed, 0 failed"));
    let report = place.json("t.json");
    assert_eq!((report["rounds"].as_u64(), report["failed"].as_u64()), (Some(3), Some(0)), "{report}");
    assert_eq!(place.files().len(), 1, "only the report is left: {:?}", place.files().keys());
    assert!(leftovers(&place).is_empty());
}

#[test]
fn inside_python_the_interpreter_is_started_again() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    // what an interpreter does with `-m ironhorse._command train ...`
    let binary = super::place::ironhorse().get_program().to_str().unwrap().to_owned();
    place.write("python", format!("#!/bin/sh\n[ \"$1 $2\" = '-m ironhorse._command' ] || exit 9\necho started >>starts\nshift 2\nexec '{binary}' \"$@\"\n"));
    std::fs::set_permissions(place.path("python"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = place.command(&format!("resume-check {SMALL} --steps 40 --folder work"));
    let done: super::place::Done =
        command.env("IRONHORSE_PYTHON", place.path("python")).output().unwrap().into();
    assert_eq!(done.code, Some(0), "{} {}", done.text(), done.stderr);
    assert!(
        String::from_utf8(place.read("starts")).unwrap().lines().count() >= 7,
        "every process of every run"
    );
}
