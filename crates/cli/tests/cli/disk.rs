//! Disks that are small, full, broken or read-only, and processes that die in the middle of a write.
#![cfg(target_os = "linux")]

use super::Place;
use super::place::{Done, ironhorse};
use super::running::{assert_equal, checkpoints, leftovers};
use ironhorse::train::format::checkpoint::{Checkpoint, checkpoints_of};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

/// A checkpoint of about 1.6 MiB.
const SMALL: &str = "--model n_layer=1,n_head=2,n_embd=96,vocab_size=256,max_seq_len=32 --batch 2 --seq 16 --threads 1 \
                     --schedule constant --warmup 0 --val-batches 2 --val-every 0 --sample-tokens 4";

/// Runs a script with a file system in memory at `disk`, which only the script sees; `None` where nobody may mount one.
/// `$BIN` is the binary. What the script leaves on that disk it must copy elsewhere itself.
pub fn on_a_disk(place: &Place, options: &str, script: &str) -> Option<Done> {
    std::fs::create_dir_all(place.path("disk")).unwrap();
    std::fs::create_dir_all(place.path("home")).unwrap();
    for flags in [&["--mount"][..], &["--mount", "--map-root-user"]] {
        let mount = format!("mount -t tmpfs -o {options} none disk || exit 99\n");
        let mut command = Command::new("unshare");
        command.args(flags).args(["sh", "-c", &(mount + script)]).current_dir(place.path(""));
        command
            .env("BIN", ironhorse().get_program())
            .env("CUDA_VISIBLE_DEVICES", "")
            .env("HOME", place.path("home"));
        let Ok(output) = command.output() else { continue };
        let done: Done = output.into();
        if done.code != Some(99) && !done.stderr.starts_with("unshare:") {
            return Some(done);
        }
    }
    eprintln!("SKIPPED: this system lets nobody mount a file system");
    None
}

/// What is left of a run on a disk that took nothing more: whole checkpoints only.
fn assert_whole(place: &Place, run: &str) {
    let run = place.path(run);
    assert_eq!(checkpoints(&run).len(), checkpoints_of(&run).len());
    let entries = std::fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(entries.count(), checkpoints_of(&run).len(), "nothing in part");
}

/// A checkpoint saved to another folder equals that of a run with enough disk space.
fn assert_rescued(place: &Place, steps: u64) {
    place.does(&format!("train {SMALL} --keep 0 --save-every 2 --steps {steps} --out whole"));
    let rescued = place.path(&format!("home/ironhorse-rescued-run-step-{steps:06}"));
    Checkpoint::open(&rescued).unwrap();
    let target = place.path(&format!("kept/checkpoints/step-{steps:06}"));
    super::place::copy_folder(&rescued, &target);
    assert_equal(&place.path("kept"), &place.path("whole"), steps);
}

#[test]
fn a_disk_of_3_mib_loses_nothing() {
    let place = Place::new();
    let script = format!(
        "$BIN train {SMALL} --keep 0 --save-every 2 --steps 12 --out disk/run; code=$?; cp -r disk/run kept; exit $code"
    );
    let Some(done) = on_a_disk(&place, "size=3m", &script) else { return };
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(done.stderr.contains("not saved, will retry in a minute: disk/run: disk is "), "{}", done.stderr);
    assert!(
        done.stderr.contains("the checkpoint is at ") && done.stderr.contains("to resume from it"),
        "{}",
        done.stderr
    );
    assert_whole(&place, "kept");
    assert_eq!(place.metrics("kept").len(), 12, "the log had room");
    assert_rescued(&place, 12);
    assert!(leftovers(&place).is_empty(), "{:?}", leftovers(&place));
}

#[test]
fn a_disk_that_is_too_small_is_refused_before_the_first_step() {
    let place = Place::new();
    let Some(done) = on_a_disk(
        &place,
        "size=1200k",
        &format!("$BIN train {SMALL} --out disk/run; code=$?; ls disk; exit $code"),
    ) else {
        return;
    };
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(
        done.stderr.contains("disk/run: the disk has ") && done.stderr.contains("choose another --out"),
        "{}",
        done.stderr
    );
    assert_eq!(done.text(), "", "nothing is left on it");
}

#[test]
fn a_disk_that_fills_in_the_middle_of_a_save_leaves_nothing_in_part() {
    let place = Place::new();
    // enough bytes, but only for a few files: saves fail between two of their files
    let script = format!(
        "$BIN train {SMALL} --keep 0 --save-every 2 --steps 12 --out disk/run; code=$?; cp -r disk/run kept; exit $code"
    );
    let mut failed_midway = 0;
    for inodes in 17..23 {
        let place = Place::new();
        let Some(done) = on_a_disk(&place, &format!("size=64m,nr_inodes={inodes}"), &script) else { return };
        assert_eq!(done.code, Some(0), "{inodes}: {}", done.stderr);
        let midway = |line: &str| {
            line.contains("not saved") && line.contains("No space left") && line.contains(".safetensors")
        };
        failed_midway += done.stderr.lines().filter(|line| midway(line)).count();
        assert_whole(&place, "kept");
        assert_rescued(&place, 12);
        assert!(leftovers(&place).is_empty(), "{:?}", leftovers(&place));
    }
    assert!(failed_midway > 0, "the disk was never full in the middle of a save");
    drop(place);
}

#[test]
fn a_run_on_a_read_only_disk_is_read_but_not_resumed() {
    let place = Place::new();
    let script = format!(
        "$BIN train {SMALL} --steps 3 --out disk/run >&2 || exit 98\n\
         mount -o remount,ro none disk || exit 99\n\
         $BIN generate --model disk/run --tokens 4 >generated || exit 97\n\
         $BIN train --resume disk/run --steps 5; code=$?\n\
         $BIN train {SMALL} --out disk/other && exit 96\n\
         exit $code"
    );
    let Some(done) = on_a_disk(&place, "size=16m", &script) else { return };
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    let errors: Vec<&str> = done.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 2, "{}", done.stderr);
    assert!(
        errors[0].starts_with("error: disk/run/lock: cannot create: Read-only file system"),
        "{errors:?}"
    );
    assert!(errors[1].starts_with("error: disk/other: cannot create: Read-only file system"), "{errors:?}");
    assert!(!place.read("generated").is_empty());
}

/// The run in which every fault is injected: short, with a save in the middle and one at the end. Its data come from a
/// file, so that it starts quickly.
const STRUCK: &str = "train --model n_layer=1,n_head=1,n_embd=8,vocab_size=256,max_seq_len=8 --batch 1 --seq 8 --threads 1 \
                      --data tokens.bin --val-data tokens.bin --val-batches 1 --val-every 0 --sample-tokens 3 --prompt ab --greedy --steps 2 \
                      --save-every 1 --keep 1";

/// Runs [`STRUCK`] with a fault at its operation of this number.
fn struck(place: &Place, run: &str, number: u64, kind: &str) -> Done {
    let mut command = place.command(&format!("{STRUCK} --out {run}"));
    command.env("IRONHORSE_FAULT", format!("{number}:{kind}")).output().unwrap().into()
}

/// The number of disk operations of a run, found as the first operation number at which it does not die.
fn operations(place: &Place) -> u64 {
    let dies = |number: u64| {
        let run = format!("count{number}");
        let done = struck(place, &run, number, "abort");
        std::fs::remove_dir_all(place.path(&run)).unwrap();
        done.code.is_none()
    };
    let (mut most, mut least) = (64, 0);
    while dies(most) {
        (least, most) = (most, most * 2);
    }
    while most - least > 1 {
        let middle = least + (most - least) / 2;
        if dies(middle) { least = middle } else { most = middle }
    }
    least
}

/// Injects one kind of fault into every operation of a run, one after the other.
fn strike_all(kind: &str, after: impl Fn(&Place, &str, &Done) + Sync) {
    let place = Place::new();
    let tokens: Vec<u32> = (0..400).map(|i| i * 7 % 251).collect();
    place.shard("tokens.bin", &tokens);
    place.does(&format!("{STRUCK} --out whole"));
    let (next, all) = (AtomicU64::new(1), operations(&place));
    assert!(all > 60, "{all} operations: a save alone has more");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number > all {
                        break;
                    }
                    let run = format!("run{number}");
                    let done = struck(&place, &run, number, kind);
                    after(&place, &run, &done);
                    std::fs::remove_dir_all(place.path(&run)).unwrap();
                }
            });
        }
    });
}

/// After any fault all checkpoints are complete, and the run can be resumed and then equals a run without faults.
fn assert_goes_on(place: &Place, run: &str) {
    let path = place.path(run);
    let line = match (checkpoints(&path).is_empty(), path.exists()) {
        (false, _) => format!("train --resume {run}"),
        (true, true) => format!("{STRUCK} --out {run} --overwrite"),
        (true, false) => format!("{STRUCK} --out {run}"),
    };
    place.does(&line);
    assert_equal(&path, &place.path("whole"), 2);
    let left = hidden_below(&path);
    assert!(left.is_empty(), "{left:?}");
    let sample = |run: &str| place.read(&format!("{run}/samples/step-000002.txt"));
    assert_eq!(sample(run), sample("whole"));
    assert!(!path.join("previous").exists());
}

fn hidden_below(path: &Path) -> Vec<std::path::PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![path.to_owned()]);
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.file_name().unwrap().to_string_lossy().starts_with('.') {
                found.push(path);
            } else if path.is_dir() {
                folders.push(path);
            }
        }
    }
    found
}

#[test]
fn a_process_that_dies_at_any_write_loses_nothing() {
    strike_all("abort", |place, run, done| {
        assert!(matches!(done.code, None | Some(0)), "{run}: {:?} {}", done.code, done.stderr);
        assert_goes_on(place, run);
    });
}

#[test]
fn a_disk_that_refuses_any_write_once_loses_nothing() {
    for kind in ["enospc", "eio"] {
        strike_all(kind, |place, run, done| {
            // rejected before the first step, or completed
            assert!(matches!(done.code, Some(0 | 2)), "{run}: {kind}: {:?} {}", done.code, done.stderr);
            if done.code == Some(2) {
                assert!(!place.path(run).exists(), "{run}: {kind}: {}", done.stderr);
            }
            assert_goes_on(place, run);
        });
    }
}
