//! `ironhorse generate`

use super::Place;
use ironhorse::train::format::tokenizer::Tokenizer;

const MODEL: &str = "generate --model run --tokens 40";

#[test]
fn a_seed_decides_the_text() {
    let place = Place::with_run();
    let text = |flags: &str| place.does(&format!("{MODEL} {flags}")).stdout;
    assert_eq!(text("--seed 7"), text("--seed 7"));
    assert_ne!(text("--seed 7"), text("--seed 8"));
    assert_eq!(text("--seed 7"), text("--seed 7 --threads 3"));
    assert_eq!(text("--greedy --seed 7"), text("--greedy --seed 8"));
    assert_eq!(text("--greedy"), text("--temperature 0"));
}

#[test]
fn the_choice_can_be_narrowed() {
    let place = Place::with_run();
    let text = |flags: &str| place.does(&format!("{MODEL} {flags}")).stdout;
    assert_eq!(text("--top-k 1"), text("--greedy"));
    assert_eq!(text("--top-p 1e-6"), text("--greedy"));
    assert_ne!(text("--top-k 3 --top-p 0.5 --temperature 1.5"), text(""));
}

#[test]
fn the_prompt_comes_first_whatever_its_bytes() {
    let place = Place::with_run();
    for prompt in ["Zoë – 東京 ", "--- and then", "-1", "a\nb"] {
        let mut command = place.command(MODEL);
        let output = command.args(["--prompt", prompt]).output().unwrap();
        assert!(output.status.success(), "{prompt}");
        assert!(output.stdout.starts_with(prompt.as_bytes()), "{prompt}");
        assert!(output.stdout.len() > prompt.len() + 1, "{prompt}");
    }
}

#[test]
fn text_goes_on_beyond_the_context() {
    let place = Place::with_run();
    place.does("generate --model run --tokens 150 --seed 3 --json g.json");
    let report = place.json("g.json");
    let tokens = report["tokens"].as_array().unwrap();
    assert!(tokens.len() > 32, "the context is 32, got {}", tokens.len());
    assert!(report["tokens_per_s"].as_f64().unwrap() > 0.0 && report["text"].is_string());
    assert_eq!(place.does("generate --model run --tokens 0").stdout, b"\n");
}

/// The cache has room for what is read and written: that of this context would be 128 GB.
#[test]
fn a_long_context_needs_no_memory_before_it_is_used() {
    let place = Place::new();
    let model = "hidden=32,layers=1,heads=2,kv_heads=1,ffn=32,vocab=256,context=1000000000";
    place.does(&format!("train --model {model} --steps 1 --seq 16 --sample-tokens 0 --out run"));
    place.does("convert run folder");
    place.does("generate --model folder --prompt some --tokens 5");
    place.does(&format!("bench --model {model} --generate --seq 8 --batch 2 --threads 1"));
}

#[test]
fn weights_of_every_kind_write_the_same() {
    let place = Place::with_run();
    place.does("convert run w.bin");
    place.does("convert run hf");
    // a checkpoint alone knows how long the sequences were that it was trained with
    let own = place.does(&format!("{MODEL} --context 32")).stdout;
    for model in ["w.bin", "hf", "run/checkpoints/step-000006/model.safetensors"] {
        let text = place.does(&format!("generate --tokens 40 --context 32 --model {model}")).stdout;
        assert_eq!(text, own, "{model}");
    }
}

#[test]
fn what_is_missing_is_said() {
    let place = Place::with_run();
    place.refuses("generate", &["no run below runs/", "ironhorse train"]);
    std::fs::rename(place.path("run/checkpoints"), place.path("aside")).unwrap();
    place.refuses("generate --model run", &["run: run is without a checkpoint"]);
    std::fs::rename(place.path("aside"), place.path("run/checkpoints")).unwrap();
    place.refuses("generate --model nope", &["nope: cannot open: No such file"]);
    place.refuses("generate --model run/config.toml", &["run/config.toml", "TOML", "expected weights"]);
    place.refuses(
        "generate --model run/checkpoints/step-000006/tokenizer.bin",
        &["a tokenizer, expected weights"],
    );
    place.refuses(
        &format!("{MODEL} --tokenizer run/loss.svg"),
        &["run/loss.svg", "expected a tokenizer.json"],
    );
}

#[test]
fn a_prompt_that_is_not_cut_by_bpe_is_said_to_be() {
    let place = Place::with_run();
    let mut tokenizer = Tokenizer::bytes();
    tokenizer.tokens[255] = b"the".to_vec();
    tokenizer.write(&place.path("words.bin")).unwrap();
    let note = |flags: &str| place.does(&format!("{MODEL} {flags}")).stderr;
    assert!(note("--tokenizer words.bin --prompt the").contains("longest tokens"));
    assert!(!note("--tokenizer words.bin").contains("longest tokens"));
    assert!(!note("--prompt the").contains("longest tokens"), "bytes are exact");
}

/// A model may have more context than it was trained with; longer texts would use positions that were never trained.
#[test]
fn text_looks_back_as_far_as_the_training_did() {
    let place = Place::new();
    let model = "--model hidden=16,layers=1,heads=2,kv_heads=1,experts=2,top_k=1,ffn=16,vocab=256,context=64";
    place
        .does(&format!("train {model} --seq 16 --batch 2 --steps 2 --sample-tokens 0 --threads 1 --out run"));
    let line = "generate --model run --tokens 60 --seed 4 --threads 1 --temperature 1";
    let text = |flags: &str| place.does(&format!("{line} {flags}")).stdout;
    assert_eq!(text(""), text("--context 16"));
    assert_ne!(text(""), text("--context 64"), "the model's own context is not what it was trained with");
    assert_eq!(text("--context 64"), text("--context 4000"), "never more than the model has");
    let told = place.does(&format!("{line} --context 4000")).stderr;
    assert!(told.contains("--context is 4000; the model looks back 64 tokens at most"), "{told}");
}

/// The optimizer's state is twice as large as the weights; writing text needs none of it.
#[test]
fn text_needs_the_weights_of_a_checkpoint_only() {
    let place = Place::with_run();
    let text = place.does(&format!("{MODEL} --seed 3")).stdout;
    place.write("run/checkpoints/step-000006/state.safetensors", "spoilt");
    assert_eq!(place.does(&format!("{MODEL} --seed 3")).stdout, text);
    std::fs::remove_file(place.path("run/checkpoints/step-000006/state.safetensors")).unwrap();
    assert_eq!(place.does(&format!("{MODEL} --seed 3")).stdout, text);
    place.write("run/checkpoints/step-000006/tokenizer.bin", "spoilt");
    let newest = "generate --model run/checkpoints/step-000006 --tokens 40";
    place.refuses(newest, &["tokenizer.bin", "file size"]);
    place.does(MODEL); // the run has an earlier checkpoint that is complete
}
