//! `ironhorse train`

use super::Place;
use super::place::TINY;
use ironhorse::train::format::answer_key::{AnswerKeySpec, write_answer_key};
use ironhorse::train::format::open_weights;
use std::path::Path;

#[test]
fn a_run_leaves_everything_behind() {
    let place = Place::new();
    let done = place.does(&format!("train {TINY} --out run --json summary.json"));
    assert!(done.text().contains("ironhorse generate --model run"), "{}", done.text());

    let metrics = place.metrics("run");
    assert_eq!(metrics.iter().map(|m| m.step).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    for m in &metrics {
        assert_eq!(m.val_loss.is_some(), [0, 3, 5].contains(&m.step), "{m:?}");
        assert!(m.loss.is_finite() && m.lr > 0.0 && m.grad_norm.unwrap() > 0.0, "{m:?}");
        assert!(m.ms > 0.0 && m.tokens_per_s > 0.0, "{m:?}");
    }
    assert!(metrics[5].val_loss < metrics[0].val_loss);
    assert!(metrics[5].loss < metrics[0].loss);

    let svg = String::from_utf8(place.read("run/loss.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert!(!place.read("run/samples/step-000006.txt").is_empty());
    for file in ["model.safetensors", "config.json", "state.safetensors", "trainer.json", "tokenizer.bin"] {
        assert!(!place.read(&format!("run/checkpoints/step-000006/{file}")).is_empty(), "{file}");
    }
    let config: toml::Table = String::from_utf8(place.read("run/config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["steps"].as_integer(), Some(6));
    assert_eq!(["master", "moments"].map(|key| config[key].as_str()), [Some("f32"); 2]);

    let summary = place.json("summary.json");
    assert_eq!(summary["steps"], 6);
    assert_eq!(summary["checkpoint"], "run/checkpoints/step-000006");
    assert_eq!((&summary["ending"], &summary["saves"]["failed"]), (&"done".into(), &0.into()));
    assert_eq!(place.json("run/run.json")["started"]["device"], "cpu");
    let last = f64::from(metrics[5].val_loss.unwrap());
    assert!((summary["last_val_loss"].as_f64().unwrap() - last).abs() < 1e-6);
}

#[test]
fn muon_trains_resumes_and_its_weights_are_those_of_any_run() {
    let place = Place::new();
    let done = place.does(&format!("train {TINY} --optimizer muon --out run --json summary.json"));
    assert!(done.text().contains("ironhorse generate --model run"), "{}", done.text());
    let metrics = place.metrics("run");
    assert!(metrics[5].loss < metrics[0].loss, "{metrics:?}");
    let config: toml::Table = String::from_utf8(place.read("run/config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["optimizer"].as_str(), Some("muon"));
    let manifest = place.json("run/checkpoints/step-000006/trainer.json");
    assert_eq!(manifest["precision"]["optimizer"], "muon");
    let state =
        String::from_utf8_lossy(&place.read("run/checkpoints/step-000006/state.safetensors")).into_owned();
    assert!(state.contains("\"m.h.0.attn.c_attn.weight\"") && state.contains("\"v.wte.weight\""));
    assert!(!state.contains("\"v.h.0.attn.c_attn.weight\""), "Muon has no second moments");
    place.does("train --resume run --steps 8");
    assert_eq!(place.metrics("run").len(), 8);
    place.does("convert run folder");
    place.does("generate --model run --tokens 4 --greedy");
    place.does("train --init run --batch 2 --seq 16 --steps 1 --out again");
}

#[test]
fn runs_are_numbered_and_the_newest_is_found() {
    let place = Place::new();
    place.does(&format!("train {TINY} --steps 1"));
    place.does(&format!("train {TINY} --steps 2"));
    assert_eq!((place.metrics("runs/0001").len(), place.metrics("runs/0002").len()), (1, 2));
    let newest = place.does("generate --tokens 8 --greedy");
    let named = place.does("generate --tokens 8 --greedy --model runs/0002");
    assert_eq!(newest.stdout, named.stdout);
}

#[test]
fn a_run_is_not_overwritten_unasked() {
    let place = Place::with_run();
    place.refuses(&format!("train {TINY} --out run"), &["run: holds a run already", "--overwrite"]);
    place.does(&format!("train {TINY} --steps 1 --out run --overwrite"));
    let onto_itself = "train --init run --batch 2 --seq 16 --steps 1 --out run --overwrite";
    place.refuses(onto_itself, &["--init is inside --out"]);
    assert_eq!(place.metrics("run").len(), 1);
    assert!(!place.path("run/samples/step-000006.txt").exists(), "a sample of the run before");
    assert!(!place.path("run/previous").exists(), "the new run has a checkpoint");
    // a folder that is not a run is not changed
    std::fs::create_dir_all(place.path("mine/checkpoints")).unwrap();
    place.write("mine/checkpoints/notes.txt", "mine");
    let refused = format!("train {TINY} --steps 1 --out mine --overwrite");
    place.refuses(&refused, &["mine: folder is not a run and holds checkpoints"]);
    assert_eq!(place.read("mine/checkpoints/notes.txt"), b"mine");
}

#[test]
fn a_tokenizer_smaller_than_the_vocabulary_loses_nothing() {
    let place = Place::new();
    // 39 of 40 tokens are not bytes, and the temperature makes all of them equally likely
    let model = "n_layer=1,n_head=1,n_embd=8,vocab_size=10000,max_seq_len=16";
    let flags = "--batch 1 --seq 8 --steps 2 --sample-every 1 --sample-tokens 40 --temperature 100";
    let done = place.does(&format!("train --model {model} {flags} --out run"));
    assert!(!done.stderr.contains("no sample"), "{}", done.stderr);
    place.does("generate --model run --tokens 40 --temperature 100 --json g.json");
    let report = place.json("g.json");
    let tokens = report["tokens"].as_array().unwrap();
    assert!(!tokens.is_empty() && tokens.iter().all(|token| token.as_u64().unwrap() < 256), "{tokens:?}");
}

#[test]
fn a_sample_that_cannot_be_kept_does_not_lose_the_run() {
    let place = Place::with_run();
    std::fs::create_dir_all(place.path("run/samples/step-000008.txt")).unwrap();
    std::fs::remove_file(place.path("run/loss.svg")).unwrap();
    std::fs::create_dir_all(place.path("run/loss.svg")).unwrap();
    let done = place.does("train --resume run --steps 8");
    assert!(done.stderr.contains("the sample after step 8 is not kept: run/samples/"), "{}", done.stderr);
    assert!(done.stderr.contains("no loss curve after step 8: run/loss.svg"), "{}", done.stderr);
    assert!(!place.weights("run").is_empty());
}

#[test]
fn a_run_without_one_finite_loss_says_that_it_diverged() {
    let place = Place::with_run();
    place.does("convert run w.bin");
    let mut bytes = place.read("w.bin");
    // finite weights whose products overflow
    for (i, value) in bytes[1024..1024 + 256 * 32 * 4].chunks_exact_mut(4).enumerate() {
        value.copy_from_slice(&(if i % 3 == 0 { 3e38_f32 } else { -3e38 }).to_le_bytes());
    }
    place.write("w.bin", bytes);
    let done = place.runs("train --init w.bin --batch 2 --seq 16 --steps 2 --sample-tokens 0 --out bad");
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(
        done.stderr.lines().last().unwrap().starts_with("error: training diverged at step 0"),
        "{}",
        done.stderr
    );
}

#[test]
fn memory_for_samples_is_counted() {
    let place = Place::new();
    let sizes = |seq: u64| {
        let model = format!("n_layer=250,n_head=1,n_embd=32,vocab_size=256,max_seq_len={seq}");
        format!("--model {model} --batch 1 --seq {seq} --recompute full --threads 1")
    };
    let planned = |seq: u64| {
        place.does(&format!("plan {} --json plan.json", sizes(seq)));
        let plan = place.json("plan.json");
        [&plan["total_bytes"], &plan["machine_bytes"]].map(serde_json::Value::as_u64)
    };
    let few = 4096;
    let [Some(needs), Some(machine)] = planned(few) else { return };
    // training alone takes nine tenths of the machine; the keys and values of samples, as long as its sequences, another fifth
    let seq = machine / 20 * 19 / (needs / few);
    assert!(planned(seq)[0].unwrap() < machine, "training alone fits");
    place.write("text.txt", "A line of the text.\n".repeat(seq as usize / 10));
    let data = "--data text.txt --val-data text.txt --tokenizer bytes";
    let done = place.runs(&format!("train {} {data}", sizes(seq)));
    let said = done.stderr.lines().last().unwrap_or_default();
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(
        said.starts_with("error: this run needs") && said.contains("of memory and the machine has"),
        "{said}"
    );
}

#[test]
fn the_config_of_a_run_reproduces_it() {
    let place = Place::with_run();
    place.does("train --config run/config.toml --out again");
    assert_eq!(place.losses("again"), place.losses("run"));
    assert_eq!(place.weights("again"), place.weights("run"));
    assert_eq!(place.read("again/config.toml"), place.read("run/config.toml"));
    assert_eq!(place.read("again/samples/step-000006.txt"), place.read("run/samples/step-000006.txt"));
}

#[test]
fn the_keys_of_a_config_are_the_flags_and_older_spellings_are_read() {
    let place = Place::with_run();
    let text = String::from_utf8(place.read("run/config.toml")).unwrap();
    let keys: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once(" = ")?.0)).collect();
    assert!(keys.contains(&"no-graphs") && keys.contains(&"grad-clip"), "{keys:?}");
    assert!(!keys.iter().any(|key| key.contains('_')), "{keys:?}");
    place.write("old.toml", text.replace("no-graphs = false", "no_graphs = true"));
    place.does("train --config old.toml --out again");
    let again = String::from_utf8(place.read("again/config.toml")).unwrap();
    assert_eq!(again, text.replace("no-graphs = false", "no-graphs = true"));
}

#[test]
fn the_config_of_a_run_from_weights_reproduces_it() {
    let place = Place::with_run();
    // weights may be given with either flag; the configuration must name them in both cases
    for flag in ["--model", "--init"] {
        place.does(&format!("train {flag} run --batch 2 --seq 16 --steps 2 --lr 1e-3 --out a --overwrite"));
        place.does("train --config a/config.toml --out b --overwrite");
        assert_eq!(place.losses("a"), place.losses("b"), "{flag}");
        assert_eq!(place.weights("a"), place.weights("b"), "{flag}");
    }
}

#[test]
fn flags_on_the_line_win_over_the_config() {
    let place = Place::with_run();
    place.does("train --config run/config.toml --steps 2 --out again");
    assert_eq!(place.metrics("again").len(), 2);
    place.does("train --steps 3 --config=run/config.toml --out again --overwrite");
    assert_eq!(place.metrics("again").len(), 3);
}

/// Small, but large enough that several threads have work and that recomputation has something to recompute.
const WIDER: &str = "--model n_layer=2,n_head=4,n_embd=64,vocab_size=256,max_seq_len=48 \
                     --batch 3 --seq 48 --steps 3 --val-batches 0 --sample-tokens 0";

#[test]
fn the_bits_do_not_depend_on_threads_or_recomputation() {
    let place = Place::new();
    place.does(&format!("train {WIDER} --threads 1 --out one"));
    for (name, flags) in [
        ("again", "--threads 1"),
        ("three", "--threads 3"),
        ("gelu", "--recompute gelu"),
        ("full", "--recompute full --threads 2"),
    ] {
        place.does(&format!("train {WIDER} {flags} --out {name}"));
        assert_eq!(place.losses(name), place.losses("one"), "{name}");
        assert!(place.weights(name) == place.weights("one"), "{name}: other weights");
        let state = |run: &str| place.read(&format!("{}/state.safetensors", place.last(run)));
        assert!(state(name) == state("one"), "{name}: other moments");
    }
    place.does(&format!("train {WIDER} --seed 2 --out other"));
    assert!(place.weights("other") != place.weights("one"));
    assert_ne!(place.losses("other"), place.losses("one"));
}

/// 144 tokens in parts of 64: sums of the head's gradient have another order, and nothing else is different.
#[test]
fn a_head_in_parts_trains_as_a_whole_one() {
    let place = Place::new();
    place.does(&format!("train {WIDER} --threads 1 --out whole"));
    place.does(&format!("train {WIDER} --threads 1 --head-chunks 3 --out parts"));
    place.does(&format!("train {WIDER} --threads 3 --head-chunks 3 --out threads"));
    assert!(place.weights("parts") == place.weights("threads"), "the bits depend on threads");
    let (whole, parts) = (place.metrics("whole"), place.metrics("parts"));
    for (whole, parts) in whole.iter().zip(&parts) {
        assert!((parts.loss / whole.loss - 1.0).abs() <= 1e-5, "{} {}", parts.loss, whole.loss);
    }
    assert!(place.read("parts/config.toml").windows(15).any(|text| text == b"head-chunks = 3"));
    let said = place.does("train --resume parts --steps 4 --head-chunks 1").stderr;
    assert!(said.contains("will differ from the uninterrupted one: head-chunks: 3 → 1"), "{said}");
    let plan = "plan --model d12 --dtype fp8-head --head-chunks 2";
    place.refuses(
        plan,
        &["--head-chunks is 2, expected 1 with an output head in 8 bits", "--dtype fp8 has the head in bf16"],
    );
}

#[test]
fn accumulated_micro_steps_are_one_larger_batch() {
    let place = Place::new();
    place.does(&format!("train {TINY} --batch 2 --accumulate 2 --out two"));
    place.does(&format!("train {TINY} --batch 4 --out four"));
    let (two, four) = (place.metrics("two"), place.metrics("four"));
    assert!((two[0].loss / four[0].loss - 1.0).abs() <= 1e-5, "{} {}", two[0].loss, four[0].loss);
    let norms = [two[0].grad_norm.unwrap(), four[0].grad_norm.unwrap()];
    assert!((norms[0] / norms[1] - 1.0).abs() <= 1e-4, "{norms:?}");
    assert!((two[5].loss / four[5].loss - 1.0).abs() <= 1e-3, "{} {}", two[5].loss, four[5].loss);
}

#[test]
fn training_starts_from_weights_of_every_kind() {
    let place = Place::with_run();
    let ended = place.metrics("run")[5].val_loss.unwrap();
    place.does("convert run w.bin");
    place.does("convert run w_bf16.bin --dtype bf16");
    place.does("convert run hf");
    write_key(&place.path("run"), &place.path("w.key.safetensors"));
    for weights in ["run", "w.bin", "hf", "hf/model.safetensors", "w.key.safetensors", "w_bf16.bin"] {
        place.does(&format!(
            "train --init {weights} --batch 2 --seq 16 --steps 1 --sample-tokens 0 --out next --overwrite"
        ));
        let starts = place.metrics("next")[0].clone();
        assert_eq!(starts.step, 0);
        // one step: the first validation is replaced by the last, so compare the training loss
        assert!((starts.loss - ended).abs() < 0.2, "{weights}: {} after {ended}", starts.loss);
    }
    place.does("train --init run --batch 2 --seq 16 --steps 2 --sample-tokens 0 --out two");
    assert_eq!(place.metrics("two")[0].val_loss, Some(ended), "the same weights on the same data");
    place.does("train --init w_bf16.bin --batch 2 --seq 16 --steps 2 --sample-tokens 0 --out bf16");
    let rounded = place.metrics("bf16")[0].val_loss.unwrap();
    assert!(rounded != ended && (rounded - ended).abs() < 1e-2, "{rounded} {ended}");
}

/// An answer key as the source of the weights; training reads nothing else from it.
fn write_key(weights: &Path, key: &Path) {
    let mut source = open_weights(weights).unwrap();
    let config = source.config();
    let spec = AnswerKeySpec {
        config,
        batch: 1,
        seq: 2,
        x: &[1, 2],
        y: &[2, 3],
        dtype: "f32",
        seed: 1,
        acts: &[],
        with_dacts: false,
        optimizer: None,
        extra: &[],
    };
    write_answer_key(key, &spec, |name, values| match name.strip_prefix("param.") {
        Some(param) => source.read_tensor(param, values),
        None => Ok(()),
    })
    .unwrap();
}

#[test]
fn shards_are_found_by_patterns() {
    let place = Place::new();
    let tokens: Vec<u32> = (0..2000).map(|i| i * i % 251).collect();
    place.shard("a_train_1.bin", &tokens);
    place.shard("a_train_2.bin", &tokens[..700]);
    place.shard("a_val.bin", &tokens[700..]);
    place.does(&format!("train {TINY} --data a_train_*.bin --val-data a_val.bin --out globs"));
    place.does(&format!("train {TINY} --data a_train_1.bin a_train_2.bin --val-data *_val.bin --out list"));
    assert_eq!(place.weights("globs"), place.weights("list"));
    let metrics = place.metrics("globs");
    assert!(metrics[5].val_loss < metrics[0].val_loss);
    place.does(&format!("train {TINY} --data a_train_2.bin --out short"));
    assert_ne!(place.weights("short"), place.weights("list"));
    assert!(place.metrics("short").iter().all(|m| m.val_loss.is_none()), "no data to validate on");
}

#[test]
fn every_step_has_its_own_time() {
    let place = Place::with_run();
    let times: Vec<f32> = place.metrics("run").iter().map(|m| m.ms).collect();
    let mut sorted = times.clone();
    sorted.sort_by(f32::total_cmp);
    let median = sorted[sorted.len() / 2];
    // a step logged with the time of another took microseconds; a busy machine makes others ten times slower
    assert!(times.iter().all(|ms| *ms > 0.01 * median), "{times:?}");
}

#[test]
fn a_run_that_diverges_fails_and_keeps_its_log() {
    let place = Place::new();
    let done = place.runs(&format!("train {TINY} --lr 1e9 --warmup 1 --out run"));
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    let last = done.stderr.lines().last().unwrap();
    // step 0 makes the weights huge; two steps are skipped, then the validation shows it
    assert!(last.starts_with("error: training diverged at step 3: loss NaN"), "{last}");
    assert!(last.contains("lower --lr"), "{last}");
    assert!(done.stderr.contains("first not finite: "), "{}", done.stderr);
    let bad: Vec<bool> = place.metrics("run").iter().map(|metrics| metrics.bad).collect();
    assert_eq!(bad, [false, true, true]);
    assert!(place.path("run/loss.svg").exists());
    assert_eq!(place.last("run"), "run/checkpoints/step-000003");
    place.does("convert run kept.bin");
}

#[test]
fn a_mixture_that_diverges_says_so_too() {
    let place = Place::new();
    let model = "hidden=16,layers=1,heads=2,experts=3,top_k=1,ffn=8,vocab=256,context=16";
    let flags = "--batch 2 --seq 16 --steps 5 --lr 1e15 --grad-clip 0 --sample-tokens 0";
    let done = place.runs(&format!("train --model {model} {flags} --out run"));
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    let last = done.stderr.lines().last().unwrap();
    assert!(last.starts_with("error: training diverged at step 4: loss NaN"), "{last}");
    assert!(done.stderr.contains("first not finite: "), "{}", done.stderr);
    place.refuses("convert run kept.bin", &["holds a GPT-2 only", "folder"]);
    place.does("convert run kept");
}

/// The router rejects non-finite numbers in the validation too, which may come before the next step.
#[test]
fn a_mixture_whose_validation_diverges_says_so_too() {
    let place = Place::new();
    let model = "hidden=16,layers=1,heads=2,experts=3,top_k=1,ffn=8,vocab=256,context=16";
    let flags = "--batch 2 --seq 16 --lr 1e15 --grad-clip 0 --sample-tokens 0 --val-batches 1";
    for steps in ["--steps 1", "--steps 5 --val-every 1"] {
        let done = place.runs(&format!("train --model {model} {flags} {steps} --out run --overwrite"));
        assert_eq!(done.code, Some(1), "{}", done.stderr);
        let last = done.stderr.lines().last().unwrap();
        assert!(last.starts_with("error: training diverged at step "), "{last}");
        assert!(last.contains("first not finite: ") && last.contains("lower --lr"), "{last}");
        place.does("convert run kept");
        std::fs::remove_dir_all(place.path("kept")).unwrap();
    }
}

/// A token outside the vocabulary is found before the first step, wherever it is.
#[test]
fn bad_data_are_refused_before_the_first_step() {
    let place = Place::new();
    let mut tokens: Vec<u32> = (0..2000).map(|i| i * 7 % 256).collect();
    tokens[1999] = 300;
    place.shard("bad.bin", &tokens);
    let line = format!("train {TINY} --data bad.bin --out run");
    place.refuses(
        &line,
        &["bad.bin: token at position 1999 is 300, expected a token of the vocabulary, 0 to 255"],
    );
    assert!(!place.path("run").exists());
}

#[test]
fn a_mixture_writes_how_its_tokens_spread() {
    let place = Place::new();
    let model = "hidden=16,layers=2,heads=2,experts=4,top_k=2,ffn=8,vocab=256,context=16";
    let flags = "--batch 2 --seq 16 --steps 3 --accumulate 2 --sample-tokens 4";
    place.does(&format!("train --model {model} {flags} --out run"));
    for step in place.metrics("run") {
        assert_eq!(step.router.len(), 2);
        for layer in step.router {
            assert!((layer.load.iter().sum::<f32>() - 2.0).abs() < 1e-5, "{:?}", layer.load);
            assert!(layer.entropy > 1.0 && layer.entropy <= 4_f32.ln() + 1e-5, "{}", layer.entropy);
            // alpha·K for an even load; the mean over the micro-steps
            assert!((0.015..0.04).contains(&layer.aux), "{}", layer.aux);
        }
    }
    assert!(place.path("run/experts.svg").exists());
    let text = place.does("generate --model run --tokens 5 --json g.json");
    assert_eq!(text.stderr, "model: run/checkpoints/step-000003\n");
}

#[test]
fn the_sequence_fits_a_short_context_by_itself() {
    let place = Place::new();
    let model = "n_layer=1,n_head=1,n_embd=8,vocab_size=256,max_seq_len=12";
    place.does(&format!("train --model {model} --steps 1 --batch 2 --sample-tokens 0 --out run"));
    place.refuses(
        &format!("train --model {model} --seq 13 --out other"),
        &["--seq 13", "the model's context of 12"],
    );
}
