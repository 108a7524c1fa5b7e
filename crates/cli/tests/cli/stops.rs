//! Stops, saves on demand, and two processes that use the same folder.
#![cfg(target_os = "linux")]

use super::Place;
use super::running::{ENDLESS, Running, assert_equal, checkpoints, leftovers, steps_logged};
use rustix::process::Signal;

/// The number of steps that a stopped run reports.
fn steps_made(text: &str) -> u64 {
    let (_, rest) = text.split_once(" after ").unwrap_or_else(|| panic!("{text}"));
    rest.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_signal_stops_the_run_which_then_goes_on_as_if_nothing_was() {
    for (signal, name) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::USR1, "SIGUSR1")] {
        let place = Place::new();
        let mut running = Running::start(&place, &format!("train {ENDLESS} --out run"));
        running.wait_for_step(&place.path("run"), 3);
        running.signal(signal);
        let done = running.end();
        let text = done.text();
        assert_eq!(done.code, Some(3), "{name}: {text} {}", done.stderr);
        assert!(text.contains(&format!("stopped by {name} after ")), "{text}");
        assert!(text.contains("resume     ironhorse train --resume run\n"), "{text}");
        let made = steps_made(&text);
        assert_eq!(steps_logged(&place.path("run")) as u64, made, "every step that was made is in the log");
        assert_eq!(checkpoints(&place.path("run"))[0], made);

        let steps = made + 5;
        let done = place.does(&format!("train --resume run --steps {steps}"));
        assert!(done.stderr.contains(&format!("{steps} steps from step {made} →")), "{}", done.stderr);
        place.does(&format!("train {ENDLESS} --steps {steps} --out whole"));
        assert_equal(&place.path("run"), &place.path("whole"), steps);
        assert!(leftovers(&place).is_empty(), "{:?}", leftovers(&place));
    }
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let place = Place::new();
    // one step of a million micro-steps: only a second signal can end it in time
    let mut running = Running::start(&place, &format!("train {ENDLESS} --accumulate 1000000 --out run"));
    running.wait_for_handlers();
    let done = running.signal_until_it_ends(Signal::INT);
    assert_eq!(done.code, Some(130), "{}", done.stderr);
    assert_eq!(steps_logged(&place.path("run")), 0);
}

#[test]
fn a_save_is_made_when_asked_and_the_run_goes_on() {
    let place = Place::new();
    let run = place.path("run");
    let mut running = Running::start(&place, &format!("train {ENDLESS} --out run --keep 0"));
    running.wait_for_step(&run, 1);
    assert!(checkpoints(&run).is_empty(), "none is due in the first ten minutes");
    running.signal(Signal::USR2);
    running.wait_for("a checkpoint after SIGUSR2", || checkpoints(&run).len() == 1);
    place.write("run/SAVE", "");
    running.wait_for("a checkpoint after SAVE", || checkpoints(&run).len() == 2);
    running.wait_for("SAVE is taken away", || !place.path("run/SAVE").exists());
    let logged = steps_logged(&run);
    running.wait_for_step(&run, logged + 1);
    running.signal(Signal::TERM);
    let done = running.end();
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    assert_eq!(checkpoints(&run).len(), 3);
}

#[test]
fn time_that_is_over_stops_the_run() {
    let place = Place::new();
    let done = place.runs(&format!("train {ENDLESS} --max-time 1s --out run --json summary.json"));
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    assert!(done.text().contains("stopped by --max-time after "), "{}", done.text());
    assert!(done.text().contains("ironhorse train --resume run"), "{}", done.text());
    let summary = place.json("summary.json");
    assert_eq!((&summary["ending"], &summary["stopped_by"]), (&"stopped".into(), &"--max-time".into()));
    let made = summary["steps"].as_u64().unwrap();
    let done = place.runs("train --resume run --max-time 1s --json again.json");
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    let made_again = place.json("again.json")["steps"].as_u64().unwrap();
    assert!(made_again >= made);
    // the limit is that of one start: config.toml does not keep it, and that of an earlier version is not taken
    let config = std::fs::read_to_string(place.path("run/config.toml")).unwrap();
    assert!(!config.contains("max-time"), "{config}");
    std::fs::write(place.path("run/config.toml"), format!("max-time = \"1s\"\n{config}")).unwrap();
    let steps = made_again + 3 * made.max(10);
    let done = place.runs(&format!("train --resume run --steps {steps} --json end.json"));
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(place.json("end.json")["steps"].as_u64(), Some(steps));
}

/// A model whose validation takes minutes.
const SLOW: &str = "--model n_layer=4,n_head=4,n_embd=256,vocab_size=256,max_seq_len=64 --batch 4 --seq 64 --threads 1 \
                    --schedule constant --warmup 0 --sample-tokens 0 --val-every 0";

#[test]
fn a_validation_is_interrupted() {
    let place = Place::new();
    let line = format!("train {SLOW} --steps 9 --val-batches 1000000 --out run --json summary.json");
    let mut running = Running::start(&place, &line);
    running.wait_for_handlers();
    running.signal(Signal::TERM);
    let done = running.end();
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    let summary = place.json("summary.json");
    assert_eq!((summary["steps"].as_u64(), summary["first_val_loss"].as_f64()), (Some(0), None));
}

#[test]
fn a_stop_in_the_last_validation_changes_nothing() {
    let place = Place::new();
    let line = format!("train {SLOW} --steps 2 --val-batches 40");
    place.does(&format!("{line} --out whole"));
    // retried if the machine is so busy that the signal arrives too late, or before the last step began
    let stopped = (0..20).find(|i| {
        let run = format!("run{i}");
        let mut running = Running::start(&place, &format!("{line} --out {run}"));
        running.wait_for_step(&place.path(&run), 0);
        running.signal(Signal::TERM);
        // all steps are done, only the validation is missing
        running.end().code == Some(3) && checkpoints(&place.path(&run))[0] == 2
    });
    let run = format!("run{}", stopped.unwrap());
    place.does(&format!("train --resume {run}"));
    assert_equal(&place.path(&run), &place.path("whole"), 2);
    let done = place.does(&format!("train --resume {run}"));
    assert!(done.text().contains("all 2 steps are done"), "{}", done.text());
}

#[test]
fn a_sample_is_interrupted_and_drawn_again() {
    let place = Place::new();
    let line = format!("train {ENDLESS} --steps 4 --sample-every 2");
    let mut running = Running::start(&place, &format!("{line} --sample-tokens 100000000 --out run"));
    running.wait_for_step(&place.path("run"), 1);
    running.signal(Signal::TERM);
    let done = running.end();
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    assert_eq!(checkpoints(&place.path("run")), [2]);
    assert!(!place.path("run/samples/step-000002.txt").exists());
    place.does("train --resume run --sample-tokens 5");
    place.does(&format!("{line} --sample-tokens 5 --out whole"));
    for sample in ["step-000002.txt", "step-000004.txt"] {
        assert_eq!(
            place.read(&format!("run/samples/{sample}")),
            place.read(&format!("whole/samples/{sample}"))
        );
    }
    assert_equal(&place.path("run"), &place.path("whole"), 4);
}

/// A second process on a folder that is in use fails, and the first continues.
fn second_is_refused(
    place: &Place,
    mut first: Running,
    command: impl Fn(&str) -> std::process::Command,
    who: &str,
) {
    let run = place.path("run");
    first.wait_for("its first checkpoint", || !checkpoints(&run).is_empty());
    let kept = || ["config.toml", "run.json", "lock"].map(|name| place.read(&format!("run/{name}")));
    let before = kept();
    for line in ["train --resume run".to_owned(), format!("train {ENDLESS} --seed 5 --out run --overwrite")] {
        let done: super::place::Done = command(&line).output().unwrap().into();
        assert_eq!(done.code, Some(2), "{line}: {}", done.stderr);
        let last = done.stderr.lines().last().unwrap();
        assert!(
            last.starts_with("error: run: run is in use by process ") && last.contains(who),
            "{line}: {last}"
        );
    }
    assert_eq!(kept(), before);
    let logged = steps_logged(&run);
    first.wait_for_step(&run, logged + 1);
}

#[test]
fn two_processes_never_share_a_folder() {
    let place = Place::new();
    let line = format!("train {ENDLESS} --save-every 1000 --out run");
    let first = Running::start(&place, &line);
    let who = format!("process {} on ", first.id());
    second_is_refused(&place, first, |line| place.command(line), &who);
    // the lock was released when the process was killed
    place.refuses(&line, &["holds a run already; resume it with --resume run"]);
    let newest = checkpoints(&place.path("run"))[0];
    let done = place.does(&format!("train --resume run --steps {}", newest + 1));
    assert!(done.stderr.contains(&format!("from step {newest} →")), "{}", done.stderr);
    assert!(leftovers(&place).is_empty());
}

#[test]
fn two_processes_with_the_same_number_never_share_a_folder() {
    let inside = |place: &Place, line: &str| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child"]).arg(super::place::ironhorse().get_program());
        command.args(line.split_whitespace()).current_dir(place.path("")).env("CUDA_VISIBLE_DEVICES", "");
        command
    };
    let place = Place::new();
    let allowed = inside(&place, "--version").output().is_ok_and(|output| output.status.success());
    if !allowed {
        eprintln!("SKIPPED: this system lets nobody make a PID namespace");
        return;
    }
    let line = format!("train {ENDLESS} --save-every 1000 --out run");
    let first = Running::spawn(&place, inside(&place, &line));
    second_is_refused(&place, first, |line| inside(&place, line), "process 1 on ");
}

#[test]
fn of_many_that_start_at_once_in_one_folder_one_trains() {
    let place = Place::new();
    let line = format!("train {ENDLESS} --steps 2000 --out run");
    let all: Vec<Running> = (0..6).map(|_| Running::start(&place, &line)).collect();
    let codes: Vec<Option<i32>> = all.into_iter().map(|running| running.end().code).collect();
    assert_eq!(codes.iter().filter(|code| **code == Some(0)).count(), 1, "{codes:?}");
    assert!(codes.iter().all(|code| matches!(code, Some(0 | 2))), "{codes:?}");
    assert_eq!(steps_logged(&place.path("run")), 2000);
    assert_eq!(checkpoints(&place.path("run")), [2000]);
}

#[test]
fn a_signal_before_the_first_step_leaves_a_run_that_can_be_resumed() {
    for signal in [Signal::TERM, Signal::INT, Signal::USR1] {
        let place = Place::new();
        let mut running = Running::start(&place, &format!("train {ENDLESS} --out run"));
        running.wait_for_handlers();
        running.signal(signal);
        let done = running.end();
        assert_eq!(done.code, Some(3), "{} {}", done.text(), done.stderr);
        let made = steps_made(&done.text());
        let steps = made + 3;
        place.does(&format!("train --resume run --steps {steps}"));
        place.does(&format!("train {ENDLESS} --steps {steps} --out whole"));
        assert_equal(&place.path("run"), &place.path("whole"), steps);
    }
}
