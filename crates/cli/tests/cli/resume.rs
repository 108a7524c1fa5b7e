//! `ironhorse train --resume`: which run, which checkpoint, which flags.

use super::Place;
use super::place::TINY;
use super::running::{assert_equal, checkpoint, checkpoints};

/// A run whose learning rate does not depend on the number of steps.
fn tiny() -> String {
    format!("{TINY} --schedule constant --warmup 0 --threads 1")
}

#[test]
fn flags_that_would_make_another_run_are_refused_and_others_taken() {
    let place = Place::new();
    place.does(&format!("train {} --out run", tiny()));
    for (flag, text) in [
        ("--seq 8", "--seq cannot change when a run is resumed (seq: 16 → 8)"),
        ("--batch 4", "--batch cannot change"),
        ("--seed 2", "--seed cannot change"),
        ("--accumulate 2", "--accumulate cannot change"),
        ("--beta2 0.5", "--beta2 cannot change"),
        ("--model d12", "--model cannot change"),
        (
            "--optimizer muon",
            "--optimizer cannot change when a run is resumed (optimizer: \"adamw\" → \"muon\")",
        ),
    ] {
        let line = format!("train --resume run --steps 8 {flag}");
        let done = place.runs(&line);
        assert_eq!((done.code, done.stderr.lines().count()), (Some(2), 1), "{line}: {}", done.stderr);
        assert!(done.stderr.contains(text) && done.stderr.contains("--init run"), "{}", done.stderr);
    }
    for (flags, refused) in [
        ("--resume run --out other", "--out"),
        ("--resume run --overwrite", "--overwrite"),
        ("--resume run --config run/config.toml", "--config cannot be used with --resume"),
        ("--resume run --steps 3", "has made 6 steps already"),
        ("--resume nothing", "nothing: no such run"),
        ("--resume run/checkpoints/step-000006", "is inside a run; resume the run with --resume run"),
        ("--resume", "no run below runs/"),
    ] {
        let done = place.runs(&format!("train {flags}"));
        assert_eq!((done.code, done.stderr.contains(refused)), (Some(2), true), "{flags}: {}", done.stderr);
    }
    let done = place.does("train --resume run");
    assert!(done.text().contains("run: all 6 steps are done; give a larger --steps"), "{}", done.text());

    // flags that do not change the run, or repeat its settings, are accepted
    let done = place.does("train --resume run --steps 9 --threads 2 --seq 16 --save-every 4 --keep 0");
    for text in
        ["will differ from the uninterrupted one: steps: 6 → 9", "changed: threads: 1 → 2", "from step 6 →"]
    {
        assert!(done.stderr.contains(text), "{}", done.stderr);
    }
    assert_eq!(place.metrics("run").len(), 9);
    let done = place.does("train --resume run --steps 11 --lr 1e-5");
    assert!(done.stderr.contains("will differ from the uninterrupted one: lr: "), "{}", done.stderr);
    assert!((place.metrics("run")[10].lr - 1e-5).abs() < 1e-9 && place.metrics("run")[8].lr > 1e-4);
    let json = place.json("run/run.json");
    let steps: Vec<u64> =
        json["resumes"].as_array().unwrap().iter().map(|r| r["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [6, 9]);
    assert!(json["resumes"][1]["changes"].to_string().contains("lr: "), "{json}");
}

#[test]
fn the_newest_run_is_the_one_that_saved_last() {
    let place = Place::new();
    for _ in 0..2 {
        place.does(&format!("train {}", tiny()));
    }
    place.does("train --resume runs/0001 --steps 7");
    let done = place.does("train --resume --steps 8");
    assert!(done.stderr.contains("from step 7 → runs/0001"), "{}", done.stderr);
    assert_eq!((place.metrics("runs/0001").len(), place.metrics("runs/0002").len()), (8, 6));
}

#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let made = Place::new();
    made.does(&format!("train {} --save-every 2 --keep 0 --out run", tiny()));
    made.does(&format!("train {} --save-every 2 --keep 0 --steps 8 --out whole", tiny()));
    assert_eq!(checkpoints(&made.path("run")), [6, 4, 2]);
    let newest = "run/checkpoints/step-000006";
    let damage: [(&str, &dyn Fn()); 4] = [
        ("flipped", &|| {
            let name = format!("{newest}/model.safetensors");
            let mut bytes = made.read(&name);
            let last = bytes.len() - 7;
            bytes[last] ^= 1;
            made.write(&name, bytes);
        }),
        ("cut", &|| {
            let name = format!("{newest}/state.safetensors");
            let bytes = made.read(&name);
            made.write(&name, &bytes[..bytes.len() / 2]);
        }),
        ("without manifest", &|| std::fs::remove_file(made.path(&format!("{newest}/trainer.json"))).unwrap()),
        ("nonsense", &|| made.write(&format!("{newest}/trainer.json"), "{")),
    ];
    for (name, spoil) in damage {
        let whole = checkpoint(&made.path("run"), 6);
        spoil();
        let place = Place::new();
        super::place::copy_folder(&made.path("run"), &place.path("run"));
        // only the weights are needed here, and the earlier checkpoint has them
        let done = place.does("generate --model run --tokens 4 --greedy");
        assert!(!done.stdout.is_empty(), "{name}");
        let done = place.does("train --resume run --steps 8");
        assert!(done.stderr.contains("8 steps from step 4 → run"), "{name}: {}", done.stderr);
        let said = done.stderr.contains("skipped a damaged checkpoint: run/checkpoints/step-000006");
        assert_eq!(said, name != "without manifest", "{name}: {}", done.stderr);
        assert_equal(&place.path("run"), &made.path("whole"), 8);
        // the damaged checkpoint has been replaced by a complete one
        assert_eq!(checkpoints(&place.path("run")), [8, 6, 4, 2], "{name}");
        for (file, bytes) in whole {
            made.write(&format!("{newest}/{file}"), bytes);
        }
    }
    // all of them
    for step in [2, 4, 6] {
        made.write(&format!("run/checkpoints/step-{step:06}/trainer.json"), "{");
    }
    let done = made.runs("train --resume run --steps 8");
    assert_eq!(done.code, Some(2));
    let last = done.stderr.lines().last().unwrap();
    assert!(
        last.contains("run: no valid checkpoint to resume from; start again with: ironhorse train --config"),
        "{last}"
    );
}

#[test]
fn a_run_is_taken_wherever_a_checkpoint_is() {
    let place = Place::new();
    place.does(&format!("train {} --save-every 2 --keep 0 --out run", tiny()));
    let newest = "run/checkpoints/step-000006";
    let both = |line: &str| {
        [line.replace("RUN", "run"), line.replace("RUN", newest)].map(|line| place.does(&line).stdout)
    };
    let [run, checkpoint] = both("generate --model RUN --tokens 8 --greedy");
    assert_eq!(run, checkpoint);
    place.does("convert run a.bin");
    place.does(&format!("convert {newest} b.bin"));
    assert_eq!(place.read("a.bin"), place.read("b.bin"));
    place.does("train --init run --batch 2 --seq 16 --steps 2 --out a");
    place.does(&format!("train --init {newest} --batch 2 --seq 16 --steps 2 --out b"));
    let model = |run: &str| super::running::checkpoint(&place.path(run), 2)["model.safetensors"].clone();
    assert_eq!(model("a"), model("b"));
}
