//! How a training run handles steps with a non-finite loss or gradient norm: it skips them, goes back to a checkpoint,
//! or ends.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

mod engine;
pub mod job;

use engine::{Fault, MARK};
use ironhorse::train::Error;
use ironhorse::train::format::checkpoint::Checkpoint;
use ironhorse::train::run::rampup::Rampup;
use ironhorse::train::run::{BlackBox, Ending};
use ironhorse_testkit::crc32;
use job::{BATCH, Meanwhile, SEQ, Spec, files, log, metrics, saved, tensors, train};
use std::path::Path;

fn last_line(run: &Path, step: usize) -> String {
    std::fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().nth(step).unwrap().to_owned()
}

#[test]
fn a_bad_step_changes_nothing_and_the_run_goes_on() {
    for (fault, nulls) in [
        (Fault::Loss(f32::NAN.to_bits()), "\"loss\":null"),
        (Fault::Loss(f32::INFINITY.to_bits()), "\"loss\":null"),
        (Fault::Gradient(f32::NAN.to_bits()), "\"grad_norm\":null"),
        (Fault::Gradient(f32::NEG_INFINITY.to_bits()), "\"grad_norm\":null"),
    ] {
        let top = tempfile::tempdir().unwrap();
        let run = top.path().join("run");
        let spec = Spec { steps: 6, every: 1, marked: vec![3], fault, ..Spec::default() };
        let done = train(&run, &spec, Meanwhile::Nothing);
        let summary = done.summary();
        assert_eq!((summary.steps, summary.bad_steps, &summary.ending), (6, 1, &Ending::Done));
        assert_eq!(saved(&run), [1, 2, 3, 4, 5, 6]);
        assert!(tensors(&run, 3) == tensors(&run, 4), "{fault:?}: the step changed something");
        assert!(tensors(&run, 2) != tensors(&run, 3) && tensors(&run, 4) != tensors(&run, 5));
        let line = last_line(&run, 3);
        assert!(line.contains("\"bad\":true") && line.contains(nulls), "{line}");
        assert_eq!(metrics(&run).iter().filter(|line| line.bad).count(), 1);
        assert!(
            metrics(&run)[5].val_loss.is_some(),
            "the last line has the last validation: {}",
            last_line(&run, 5)
        );
        assert!(done.says("skipped, nothing was changed"), "{:#?}", done.notes);
    }
}

#[test]
fn the_black_box_holds_the_step() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    // micro-steps 6 to 9 are those of the steps 3 and 4
    let spec = Spec { steps: 8, accumulate: 2, marked: vec![7, 8], every: 1, ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::Nothing);
    assert_eq!(done.summary().bad_steps, 2);
    for (step, marked_at) in [(3, BATCH * SEQ + 1), (4, 1)] {
        let folder = run.join(format!("bad/step-{step:06}"));
        let found = BlackBox::open(&folder).unwrap();
        assert_eq!((found.bad.step, found.bad.accumulate, found.bad.loss.as_str()), (step, 2, "NaN"));
        assert_eq!(found.x.iter().position(|&token| token == MARK), Some(marked_at));
        assert_eq!(found.bad.samples, (step * 4, step * 4 + 4));
        // the second step of a row ran on the same weights
        let weights = found.weights.canonicalize().unwrap();
        assert!(weights.ends_with("bad/step-000003/weights"), "{}", weights.display());
        let json = std::fs::read(weights.join("trainer.json")).unwrap();
        assert_eq!(found.bad.weights_crc32, crc32(&json));
        let model = std::fs::read(weights.join("model.safetensors")).unwrap();
        assert!(model == tensors(&run, step)[0], "not the weights the step ran on");
        assert_eq!((found.bad.device.as_str(), found.bad.dtype.as_str()), ("cpu", "f32"));
        Checkpoint::open(&weights).unwrap();
    }
}

#[test]
fn as_many_as_tolerated_are_skipped() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let spec = Spec { marked: vec![4, 5, 6], ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::Nothing);
    assert_eq!((done.summary().steps, done.summary().bad_steps), (12, 3));
    let bad: Vec<u64> = metrics(&run).iter().filter(|line| line.bad).map(|line| line.step).collect();
    assert_eq!(bad, [4, 5, 6]);
    assert!(!done.says("going back"), "{:#?}", done.notes);
}

#[test]
fn one_more_goes_back_past_those_batches() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let spec = Spec { marked: vec![4, 5, 6, 7], ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::Nothing);
    assert_eq!((done.summary().steps, done.summary().bad_steps), (12, 4));
    assert!(done.says("going back to the checkpoint of step 4 and past those batches"), "{:#?}", done.notes);
    let steps: Vec<(u64, bool)> = metrics(&run).iter().map(|line| (line.step, line.bad)).collect();
    assert_eq!(steps, (0..12).map(|step| (step, false)).collect::<Vec<_>>());
    assert_eq!(saved(&run), [2, 4, 6, 8, 10, 12]);
    let state = Checkpoint::manifest(&run.join("checkpoints/step-000012")).unwrap().state;
    assert_eq!(state.rolled_back_from, Some(7));
    assert_eq!(state.data["samples"], (12 + 4) * BATCH);

    // the same as a run whose data never had those batches
    let clean = top.path().join("clean");
    train(&clean, &Spec { marked: vec![], without: vec![4, 5, 6, 7], ..spec }, Meanwhile::Nothing).summary();
    for step in saved(&run) {
        assert!(tensors(&run, step) == tensors(&clean, step), "step {step}");
    }
    assert_eq!(log(&run), log(&clean));
}

/// Steps of 1, 1, 1, 1, 2, 2, 2, 2 and then 3 micro-steps.
fn ramped() -> Spec {
    Spec { accumulate: 3, rampup: Some(Rampup { from: 1, steps: 8 }), ..Spec::default() }
}

#[test]
fn a_ramp_up_skips_and_keeps_the_batches_of_its_steps() {
    for queued in [false, true] {
        let top = tempfile::tempdir().unwrap();
        let [run, clean] = ["run", "clean"].map(|name| top.path().join(name));
        // one batch of each of the steps 4 to 7
        let spec = Spec { marked: vec![5, 6, 9, 10], queued, ..ramped() };
        let done = train(&run, &spec, Meanwhile::Nothing);
        assert_eq!((done.summary().steps, done.summary().bad_steps), (12, 4));
        assert!(done.says("going back to the checkpoint of step 4"), "{:#?}", done.notes);
        let tokens: Vec<u64> = metrics(&run).iter().map(|line| line.tokens.unwrap()).collect();
        let of = |micro_steps: usize| (micro_steps * BATCH * SEQ) as u64;
        assert_eq!(tokens, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3].map(of));
        let state = Checkpoint::manifest(&run.join("checkpoints/step-000012")).unwrap().state;
        assert_eq!(state.data["samples"], (4 + 2 * 8 + 3 * 4) * BATCH, "the bad steps and the good ones");
        for (step, marked_at) in [(4, BATCH * SEQ + 1), (5, 1)] {
            let found = BlackBox::open(&run.join(format!("bad/step-{step:06}"))).unwrap();
            assert_eq!((found.bad.accumulate, found.x.len()), (2, 2 * BATCH * SEQ));
            assert_eq!(found.x.iter().position(|&token| token == MARK), Some(marked_at));
            let first = 2 * (step - 2) * BATCH as u64;
            assert_eq!(found.bad.samples, (first, first + 4));
            assert_eq!(found.bad.scalars.loss_scale, 1.0 / (2 * BATCH * SEQ) as f32);
        }
        let spec = Spec { marked: vec![], without: (4..12).collect(), ..spec };
        train(&clean, &spec, Meanwhile::Nothing).summary();
        for step in saved(&run) {
            assert!(tensors(&run, step) == tensors(&clean, step), "step {step}");
        }
        assert_eq!(log(&run), log(&clean));
    }
}

#[test]
fn a_second_time_ends_the_run_with_everything_kept() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let marked = (4..8).chain(12..16).collect();
    let spec = Spec { steps: 20, marked, ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::Nothing);
    let error = done.result.as_ref().unwrap_err();
    // batch 12 is that of step 8: four batches were skipped
    assert!(matches!(error, Error::Diverged { step: 11, .. }), "{error}");
    assert!(error.to_string().contains("training diverged at step 11"), "{error}");
    assert_eq!(saved(&run), [2, 4, 6, 8, 10, 12]);
    assert!(tensors(&run, 8) == tensors(&run, 12), "what the bad steps ran on is kept");
    assert_eq!(metrics(&run).len(), 12);
    assert!(done.says("the run as it was after step 12 is kept in"), "{:#?}", done.notes);
    assert!(run.join("bad/step-000011/batch.safetensors").is_file());

    // when resumed it continues after those batches, with all its retries available again
    let again = train(&run, &spec, Meanwhile::Nothing);
    assert_eq!((again.summary().steps, again.summary().bad_steps), (20, 0));
}

#[test]
fn after_enough_good_steps_it_may_go_back_again() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let marked = (4..8).chain(120..124).collect();
    let spec = Spec { steps: 130, every: 10, marked, ..Spec::default() };
    // the first row is before the first checkpoint
    let ended = train(&run, &spec, Meanwhile::Nothing);
    assert!(matches!(ended.result, Err(Error::Diverged { step: 7, .. })));
    let marked = (14..18).chain(130..134).collect();
    let run = top.path().join("other");
    let done = train(&run, &Spec { steps: 140, every: 10, marked, ..Spec::default() }, Meanwhile::Nothing);
    assert_eq!((done.summary().steps, done.summary().bad_steps), (140, 8));
}

#[test]
fn without_a_checkpoint_it_ends_likewise() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let spec = Spec { marked: vec![0, 1, 2, 3], ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::Nothing);
    assert!(matches!(done.result, Err(Error::Diverged { step: 3, .. })));
    // the checkpoint of step 2 is from the middle of the row
    assert_eq!(saved(&run), [2, 4]);
    assert!(Checkpoint::open(&run.join("checkpoints/step-000004")).is_ok());
    assert_eq!(metrics(&run).len(), 4);
    let done = train(&run, &spec, Meanwhile::Nothing);
    assert_eq!((done.summary().steps, done.summary().bad_steps), (12, 0));
}

#[test]
fn results_that_arrive_late_change_nothing() {
    for marked in
        [vec![], vec![3], vec![4, 5, 6, 7], (4..8).chain(12..16).collect(), vec![11], vec![9, 10, 11]]
    {
        let top = tempfile::tempdir().unwrap();
        let [sync, queued] = ["sync", "queued"].map(|name| top.path().join(name));
        let spec = Spec { marked: marked.clone(), ..Spec::default() };
        let one = train(&sync, &spec, Meanwhile::Nothing);
        let two = train(&queued, &Spec { queued: true, ..spec }, Meanwhile::Nothing);
        let ends = |done: &job::Done| {
            done.result.as_ref().map(|s| (s.steps, s.bad_steps)).map_err(ToString::to_string)
        };
        assert_eq!(ends(&one), ends(&two), "{marked:?}");
        assert_eq!(saved(&sync), saved(&queued), "{marked:?}");
        for step in saved(&sync) {
            assert!(files(&sync, step) == files(&queued, step), "{marked:?}: step {step}");
        }
        assert_eq!(log(&sync), log(&queued), "{marked:?}");
    }
}

#[test]
fn interrupted_anywhere_it_comes_to_the_same_end() {
    let steady = Spec { marked: vec![1, 4, 5, 6, 7, 10], ..Spec::default() };
    // the same steps where the first four have one micro-step, the next four two, and then three
    let ramped = Spec { marked: vec![1, 4, 6, 8, 10, 16], ..ramped() };
    for spec in [steady.clone(), Spec { queued: true, ..steady }, Spec { queued: true, ..ramped }] {
        let top = tempfile::tempdir().unwrap();
        let whole = top.path().join("whole");
        let kills = top.path().join("kills");
        let done = train(&whole, &spec, Meanwhile::CopyTo(kills.clone()));
        assert_eq!((done.summary().steps, done.summary().bad_steps), (12, 6));
        let (end, lines) = (files(&whole, 12), log(&whole));
        let check = |run: &Path| {
            let done = train(run, &spec, Meanwhile::Nothing);
            assert_eq!(done.summary().steps, 12);
            assert!(files(run, 12) == end, "{}: {:#?}", run.display(), done.notes);
            assert_eq!(log(run), lines, "{}", run.display());
        };
        // killed: what the folder held after each line of the log
        let mut copies: Vec<_> =
            std::fs::read_dir(&kills).unwrap().map(|entry| entry.unwrap().path()).collect();
        copies.sort();
        for run in copies.iter().filter(|run| !saved(run).is_empty()) {
            check(run);
        }
        // stopped cleanly; the steps 4 to 7 come twice
        for (step, times) in [(1, 1), (3, 1), (4, 1), (6, 1), (7, 1), (11, 1), (4, 2), (6, 2), (7, 2)] {
            let run = top.path().join(format!("stop-{step}-{times}"));
            let done = train(&run, &spec, Meanwhile::StopAt(step, times));
            if done.summary().ending != Ending::Done {
                check(&run);
            }
        }
    }
}

/// A run goes back only to a checkpoint with finite weights; validation may be the first to notice non-finite ones.
#[test]
fn spoilt_checkpoints_are_passed_over() {
    for (poisoned, without) in [(5, vec![5, 6, 7, 8, 9]), (4, vec![4])] {
        for queued in [false, true] {
            let top = tempfile::tempdir().unwrap();
            let [run, clean] = ["run", "clean"].map(|name| top.path().join(name));
            let spec = Spec { poisoned: vec![poisoned], every: 1, queued, ..Spec::default() };
            let done = train(&run, &spec, Meanwhile::Nothing);
            assert_eq!(done.summary().steps, 12);
            let back = format!("going back to the checkpoint of step {poisoned} and past those batches");
            assert!(done.says(&back), "{:#?}", done.notes);
            let spec = Spec { poisoned: vec![], without: without.clone(), ..spec };
            train(&clean, &spec, Meanwhile::Nothing).summary();
            assert!(tensors(&run, 12) == tensors(&clean, 12), "batch {poisoned}");
            assert_eq!(log(&run), log(&clean));
        }
    }
}

#[test]
fn stopped_right_after_going_back_it_does_not_forget_that() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let spec = Spec { marked: vec![4, 5, 6, 7], ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::StopAt(7, 1));
    assert_eq!(done.summary().steps, 4, "{:#?}", done.notes);
    let state = Checkpoint::manifest(&run.join("checkpoints/step-000004")).unwrap().state;
    assert_eq!((state.rolled_back_from, &state.data["samples"]), (Some(7), &(8 * BATCH).into()));
}

#[test]
fn a_spike_is_noted_with_its_samples() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let spec = Spec { steps: 170, every: 0, garbage: vec![160], ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::Nothing);
    done.summary();
    let spikes: Vec<u64> =
        metrics(&run).iter().filter(|line| line.spike.is_some()).map(|line| line.step).collect();
    assert_eq!(spikes, [160], "{:#?}", done.notes);
    assert!(done.says("step   160  the loss jumps to"), "{:#?}", done.notes);
    assert!(done.says("samples 320 to 321: data.bin token 2560, data.bin token 2568"), "{:#?}", done.notes);
}

#[test]
fn an_overflowed_second_moment_is_saved_and_named() {
    let top = tempfile::tempdir().unwrap();
    let run = top.path().join("run");
    let spec = Spec { overflow: true, ..Spec::default() };
    let done = train(&run, &spec, Meanwhile::StopAt(5, 1));
    assert!(done.says("saved with NaN or infinity in `v."), "{:#?}", done.notes);
    assert_eq!(done.summary().bad_steps, 0, "{:#?}", done.notes);
    let whole = top.path().join("whole");
    train(&whole, &spec, Meanwhile::Nothing).summary();
    let resumed = train(&run, &Spec { overflow: false, ..spec }, Meanwhile::Nothing);
    assert_eq!(resumed.summary().steps, 12);
    assert!(files(&run, 12) == files(&whole, 12));
}
