//! `ironhorse train` over its steps: the learning rate of wsd, the batch-size ramp-up, and the end by patience; each of them
//! also interrupted and resumed.

use super::Place;
use super::place::{TINY, copy_folder};
use super::running::{assert_equal, checkpoint, checkpoints, metrics};
use ironhorse::train::format::checkpoint::{Checkpoint, checkpoints_of};
use ironhorse::train::format::safetensors::SafeTensors;

/// Keeps every checkpoint, so that a run can be cut off at one of them.
const SAVED: &str = "--save-every 1 --keep 0 --threads 1";

/// A copy of a run as it was when it had made so many steps.
fn cut(place: &Place, run: &str, steps: u64, copy: &str) {
    copy_folder(&place.path(run), &place.path(copy));
    for (_, path) in checkpoints_of(&place.path(copy)).into_iter().filter(|(step, _)| *step > steps) {
        std::fs::remove_dir_all(path).unwrap();
    }
}

#[test]
fn wsd_warms_up_stays_and_decays() {
    let place = Place::new();
    let flags = "--schedule wsd --lr 1e-2 --warmup 2 --final-fraction 0.1";
    place.does(&format!("train {TINY} {flags} --steps 10 --decay-fraction 0.3 --out run"));
    let rates: Vec<f32> = place.metrics("run").iter().map(|line| line.lr).collect();
    let expected = [5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2, 7e-3, 4e-3, 1e-3];
    for (found, expected) in rates.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-8, "{rates:?}");
    }
    // a fifth of the steps, unless another part is given; config.toml says which
    place.does(&format!("train {TINY} {flags} --steps 10 --out usual"));
    assert!(place.metrics("usual")[7].lr == 1e-2 && place.metrics("usual")[8].lr < 1e-2);
    let config = String::from_utf8(place.read("usual/config.toml")).unwrap();
    assert!(config.contains("schedule = \"wsd\"") && config.contains("decay-fraction = 0.2"), "{config}");

    let wsd = format!("train {TINY} --schedule wsd --out other");
    place.refuses(&format!("{wsd} --decay-fraction 1.5"), &["--decay-fraction"]);
    place.refuses(
        &format!("{wsd} --decay-fraction 0.5 --warmup 4"),
        &["--schedule wsd", "0.5, which is 3 steps", "the 2 steps after the warm-up", "a smaller --warmup"],
    );
    let done = place.does(&format!("train {TINY} --decay-fraction 0.5 --out other"));
    assert!(done.stderr.contains("--decay-fraction goes with --schedule wsd"), "{}", done.stderr);
}

#[test]
fn wsd_is_extended_and_cut_short_before_its_decay() {
    let place = Place::new();
    let line = format!("train {TINY} {SAVED} --schedule wsd --warmup 2");
    place.does(&format!("{line} --steps 10 --out run"));
    // of 10 steps the last two decay; of 20 the last four, of 7 the last one
    for (steps, made) in [(20, 8), (20, 5), (7, 6)] {
        cut(&place, "run", made, &format!("run-{steps}-{made}"));
        let done = place.does(&format!("train --resume run-{steps}-{made} --steps {steps}"));
        let said = format!("changed, as if the run had started with it: steps: 10 → {steps}");
        assert!(done.stderr.contains(&said), "{}", done.stderr);
        assert!(done.stderr.contains(&format!("from step {made} →")), "{}", done.stderr);
        let whole = format!("whole-{steps}-{made}");
        place.does(&format!("{line} --steps {steps} --out {whole}"));
        assert_equal(&place.path(&format!("run-{steps}-{made}")), &place.path(&whole), steps);
    }
    // neither is a decay taken back, nor begun in its middle
    let fails = |line: &str, texts: &[&str]| {
        let done = place.runs(line);
        assert_eq!((done.code, done.stderr.lines().count()), (Some(2), 1), "{line}: {}", done.stderr);
        assert!(texts.iter().all(|text| done.stderr.contains(text)), "{line}: {}", done.stderr);
    };
    cut(&place, "run", 9, "late");
    for flags in ["--steps 20", "--steps 9", "--decay-fraction 0.3"] {
        let texts = ["cannot change any longer", "began at step 8", "has made 9;", "--init"];
        fails(&format!("train --resume late {flags}"), &texts);
    }
    fails("train --resume run --steps 20", &["began at step 8", "has made 10;"]);
    cut(&place, "run", 6, "early");
    let texts = ["begins its decay at step 3,", "has made 6 steps", "more --steps"];
    fails("train --resume early --steps 7 --decay-fraction 0.5", &texts);
    place.does("train --resume early");
    assert_equal(&place.path("early"), &place.path("run"), 10);
    // with another schedule it is no longer the same run, and says so
    let done = place.does("train --resume run --steps 12 --schedule constant");
    assert!(
        done.stderr.contains("will differ from the uninterrupted one: steps: 10 → 12"),
        "{}",
        done.stderr
    );
}

#[test]
fn the_hint_after_wsd_is_one_that_works() {
    let place = Place::new();
    let done = place.does(&format!("train {TINY} --schedule wsd --out run"));
    let text = done.text();
    let hint = text.lines().find_map(|line| line.strip_prefix("train on   ironhorse ")).unwrap();
    place.does(&format!("{hint} --out more"));
    assert_eq!(place.metrics("more").len(), 6);
    assert!(place.losses("more") != place.losses("run"), "it starts from the weights");
}

/// Data on which the validation loss first falls and then rises: all training tokens are the same, half of the others are not.
fn overfitting(place: &Place) -> String {
    place.shard("train.bin", &[1; 2000]);
    let mixed: Vec<u32> = (0..400_u32).map(|i| if i * 7 % 10 < 5 { 1 } else { 2 }).collect();
    place.shard("val.bin", &mixed);
    format!(
        "train {TINY} --data train.bin --val-data val.bin --schedule constant --warmup 0 --lr 3e-3 --steps 60 --val-every 2 \
         --threads 1"
    )
}

/// The lowest validation loss before `patience` in vain, and the step at which they are over.
fn expected_end(log: &[serde_json::Value], patience: usize) -> (u64, f64, u64) {
    let mut best = (0, f64::INFINITY);
    let mut in_vain = 0;
    for line in log {
        let (step, Some(loss)) = (line["step"].as_u64().unwrap(), line["val_loss"].as_f64()) else {
            continue;
        };
        if loss < best.1 {
            (best, in_vain) = ((step, loss), 0);
        } else {
            in_vain += 1;
        }
        if in_vain == patience {
            return (best.0, best.1, step);
        }
    }
    panic!("the loss never stops falling");
}

#[test]
fn patience_ends_the_run_and_keeps_the_best() {
    let place = Place::new();
    let line = overfitting(&place);
    place.does(&format!("{line} --out whole"));
    let whole = metrics(&place.path("whole"));
    let (best, loss, end) = expected_end(&whole, 3);
    assert!(best > 0 && end < 60, "{best} {end}");

    let done = place.does(&format!("{line} --patience 3 --out run --json summary.json"));
    let text = done.text();
    assert!(
        text.contains(&format!("after {end} of 60 steps: no new lowest validation loss in 3 valid")),
        "{text}"
    );
    let kept = format!("run/checkpoints/step-{best:06}");
    assert!(
        text.contains(&format!("best       validation loss {loss:.4} after {best} steps: {kept}")),
        "{text}"
    );
    assert!(text.contains("ironhorse generate --model run/best\n"), "{text}");
    let summary = place.json("summary.json");
    assert_eq!((&summary["ending"], &summary["steps"]), (&"patience".into(), &end.into()));
    assert_eq!(
        (&summary["best"]["step"], &summary["best_checkpoint"]),
        (&best.into(), &kept.as_str().into())
    );
    assert!(place.path(&format!("run/samples/step-{end:06}.txt")).exists(), "the last sample is written");

    // the same steps as without it; the last line says why
    let mut log = metrics(&place.path("run"));
    let ended = log.last_mut().unwrap().as_object_mut().unwrap().remove("ended").unwrap();
    assert_eq!(log, whole[..end as usize]);
    assert_eq!((&ended["by"], &ended["best"]["step"]), (&"patience".into(), &best.into()));
    assert_eq!(ended["val_loss"], whole[end as usize]["val_loss"], "of the weights after the last step");
    let (_, rest) = checkpoints(&place.path("run")).split_first().map(|(a, b)| (*a, b.to_vec())).unwrap();
    assert!(rest.contains(&best), "{rest:?}");

    // RUN/best is that checkpoint, wherever weights are taken
    let both =
        |line: &str| [line.replace("BEST", "run/best"), line.replace("BEST", &kept)].map(|l| place.does(&l));
    let [by_name, by_path] = both("generate --model BEST --tokens 8 --greedy");
    assert_eq!(by_name.stdout, by_path.stdout);
    assert!(
        by_name.stderr.contains(&format!("{kept}, the best of its run, after {best} of 60")),
        "{}",
        by_name.stderr
    );
    both("eval --model BEST --data val.bin --json e.json");
    place.does("convert run/best a.bin");
    place.does(&format!("convert {kept} b.bin"));
    assert_eq!(place.read("a.bin"), place.read("b.bin"));
    place.does(
        "train --init run/best --data train.bin --batch 2 --seq 16 --steps 1 --sample-tokens 0 --out next",
    );
    place.refuses("train --resume run/best", &["is inside a run; resume the run with --resume run"]);
}

#[test]
fn patience_counts_on_when_a_run_is_resumed() {
    let place = Place::new();
    let line = overfitting(&place);
    let all = "--save-every 1 --keep 0";
    place.does(&format!("{line} {all} --patience 3 --out run"));
    let run = place.path("run");
    let end = checkpoints(&run)[0];
    let best =
        Checkpoint::manifest(&run.join(format!("checkpoints/step-{end:06}"))).unwrap().state.best.unwrap();
    // before, at and after the best, and at and after validations that were in vain
    for made in best.step - 1..end {
        let part = format!("part-{made}");
        cut(&place, "run", made, &part);
        place.does(&format!("train --resume {part}"));
        assert_equal(&place.path(&part), &run, end);
    }
    // resumed as it is, it is over; with more patience it is the run that had it from the start
    let before = (metrics(&run), checkpoints(&run));
    let done = place.does("train --resume run");
    assert!(done.text().contains(&format!("run: ended after {end} steps")), "{}", done.text());
    assert!(done.text().contains("give a larger --patience"), "{}", done.text());
    assert_eq!((metrics(&run), checkpoints(&run)), before);
    place.does("train --resume run --patience 5");
    place.does(&format!("{line} {all} --patience 5 --out longer"));
    let end = checkpoints(&place.path("longer"))[0];
    assert_equal(&run, &place.path("longer"), end);
    // and without any it makes all its steps
    place.does("train --resume run --patience 0");
    place.does(&format!("{line} {all} --out whole"));
    assert_equal(&run, &place.path("whole"), 60);
}

#[test]
fn patience_without_validations_is_refused() {
    let place = Place::new();
    place.shard("train.bin", &[1; 200]);
    let line = format!("train {TINY} --patience 2 --out run");
    place.refuses(&format!("{line} --val-every 0"), &["--patience 2 needs --val-every of at least 1"]);
    place.refuses(&format!("{line} --val-batches 0"), &["--patience 2 needs --val-batches"]);
    place.refuses(
        &format!("{line} --data train.bin"),
        &["--patience 2 needs data to validate on", "--val-data"],
    );
    place.refuses(&format!("train {TINY} --patience -1"), &["--patience"]);
    place.does(&format!("train {TINY} --val-batches 0 --out never"));
    place.refuses("generate --model never/best", &["never: run is without a checkpoint that was the best"]);
}

#[test]
fn a_ramp_up_grows_the_batch_and_counts_its_tokens() {
    let place = Place::new();
    let line = format!("train {TINY} {SAVED} --schedule constant --warmup 0 --steps 10");
    let ramp = format!("{line} --accumulate 4 --rampup-steps 6");
    let done = place.does(&format!("{ramp} --save-batches batches.safetensors --out run"));
    assert!(
        done.stderr.contains("32 tokens a step that grow to 128 in 6 steps, 10 steps"),
        "{}",
        done.stderr
    );
    let counts = [1, 1, 2, 2, 3, 3, 4, 4, 4, 4];
    let log = place.metrics("run");
    assert_eq!(
        log.iter().map(|line| line.tokens.unwrap()).collect::<Vec<_>>(),
        counts.map(|count| 32 * count)
    );
    for line in &log {
        let tokens = line.tokens_per_s * line.ms / 1e3;
        assert!((tokens / line.tokens.unwrap() as f32 - 1.0).abs() < 1e-3, "{line:?}");
    }
    let state = |run: &str| Checkpoint::manifest(&place.path(&place.last(run))).unwrap().state;
    assert_eq!(state("run").data["samples"], 2 * counts.iter().sum::<u64>());
    let batches = SafeTensors::open(&place.path("batches.safetensors")).unwrap();
    let shapes: Vec<Vec<usize>> = batches.spans().map(|span| span.shape).collect();
    assert_eq!(shapes, [[28, 2, 16]; 2]);

    // the first steps are those of a run without accumulation, to the bit: loss, gradient and position in the data
    place.does(&format!("{line} --out small"));
    let (small, run) = (metrics(&place.path("small")), metrics(&place.path("run")));
    assert_eq!(small[..2], run[..2]);
    let weights = |run: &str, step| checkpoint(&place.path(run), step)["model.safetensors"].clone();
    assert!(weights("small", 2) == weights("run", 2) && weights("small", 4) != weights("run", 4));
    // two micro-steps in the first four steps are those of --accumulate 2
    place.does(&format!("{line} --accumulate 3 --rampup-from 2 --rampup-steps 4 --out from2"));
    place.does(&format!("{line} --accumulate 2 --out two"));
    assert_eq!(metrics(&place.path("from2"))[..4], metrics(&place.path("two"))[..4]);
    assert!(weights("from2", 4) == weights("two", 4) && weights("from2", 6) != weights("two", 6));

    // the same for any number of threads, and when it is resumed anywhere on the way
    place.does(&format!("{ramp} --threads 2 --out threads"));
    assert!(metrics(&place.path("threads")) == run && weights("threads", 10) == weights("run", 10));
    for made in [2, 4, 8] {
        let part = format!("part-{made}");
        cut(&place, "run", made, &part);
        place.does(&format!("train --resume {part}"));
        assert_equal(&place.path(&part), &place.path("run"), 10);
    }
    place.refuses("train --resume part-2 --rampup-steps 3", &["--rampup-steps cannot change"]);
}

#[test]
fn a_ramp_up_that_cannot_be_is_refused() {
    let place = Place::new();
    for (flags, texts) in [
        ("--rampup-steps 4", ["--rampup-steps 4 needs --accumulate", "at least 2"]),
        (
            "--rampup-steps 4 --accumulate 4 --rampup-from 4",
            ["--rampup-from is 4", "fewer than --accumulate 4"],
        ),
        ("--rampup-steps 7 --accumulate 4", ["--rampup-steps is 7", "at most --steps 6"]),
        ("--rampup-steps 0 --accumulate 4", ["--rampup-steps", "at least 1"]),
        ("--rampup-from 2 --accumulate 4", ["--rampup-steps", "required"]),
    ] {
        place.refuses(&format!("train {TINY} {flags} --out run"), &texts);
    }
}
