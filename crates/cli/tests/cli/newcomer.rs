//! What people try first: the names of other programs, the flags they know, and what they are told then.

use super::Place;
use super::place::TINY;
use serde_json::Value;

const SMALL: &str =
    "--model n_layer=1,n_head=2,n_embd=32,vocab_size=100,max_seq_len=16 --batch 2 --seq 8 --threads 1";

#[test]
fn flags_of_other_programs_get_a_tip() {
    let place = Place::new();
    for (line, tip) in [
        ("generate --max-new-tokens 3", "here it is --tokens"),
        ("generate --max_new_tokens=3", "here it is --tokens"),
        ("train --batch_size 3", "here it is --batch"),
        ("train --block_size 3", "here it is --seq"),
        ("train --learning_rate 3", "here it is --lr"),
        ("train --max_iters 3", "here it is --steps"),
        ("train --n_layer 3", "--model n_layer=12,n_head=12,n_embd=768"),
        ("train --weight_decay 3", "--weight-decay"),
        ("train --per_device_train_batch_size 3", "here it is --batch"),
        ("train --num_train_epochs 3", "here it is --steps, counted in optimizer steps, not in epochs"),
        ("train -i data", "here it is --data"),
        ("train -b 3", "here it is --batch"),
        ("train -t 3", "here it is --seq"),
        ("train -l 3", "here it is --lr"),
        ("bench -b 3", "here it is --batch"),
        ("generate hello", "did you mean --prompt hello?"),
    ] {
        place.refuses(line, &["unexpected argument", tip, "(see --help)"]);
    }
    // the tip is for the command that has such a flag
    let done = place.runs("doctor --batch_size 3");
    assert!(done.code == Some(2) && !done.stderr.contains("tip"), "{}", done.stderr);
    place.write("c.toml", "batch_size = 3\n");
    place.refuses("train --config c.toml", &["c.toml: key `batch_size`", "here it is --batch"]);
}

#[test]
fn a_report_goes_to_standard_output_alone() {
    let place = Place::with_run();
    for (line, field) in [
        (format!("bench {SMALL} --steps 1 --warmup 0"), "ms_per_step"),
        (format!("profile {SMALL} --steps 1 --warmup 0"), "by_kind"),
        (format!("plan {SMALL}"), "total_bytes"),
        ("doctor --threads 1".into(), "auto"),
        ("generate --model run --tokens 5".into(), "text"),
        (format!("train {TINY} --out more"), "checkpoint"),
        ("selftest --quick --device cpu --dtype f32 --op add".into(), "version"),
    ] {
        let done = place.does(&format!("{line} --json -"));
        let report: Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{line}: {e}"));
        assert!(!report[field].is_null(), "{line}: {report}");
        assert!(!done.stderr.is_empty(), "{line}: people read along on standard error");
    }
    assert!(!place.path("-").exists());
}

#[test]
fn help_is_grouped_and_in_the_words_of_the_field() {
    let place = Place::new();
    let headings = |text: &str| -> Vec<String> {
        let is_heading = |line: &&str| line.ends_with(':') && !line.starts_with(' ');
        text.lines().filter(is_heading).map(str::to_owned).collect()
    };
    for (command, want) in [
        ("train", &["Model:", "Data:", "Batches and steps:", "Optimizer:", "Validation and samples:"][..]),
        ("train", &["Sampling:", "Memory:", "Device:", "Checkpoints, stopping and resuming:", "Output:"]),
        ("bench", &["Model:", "Data:", "Batches and steps:", "Optimizer:", "Memory:", "Device:", "Output:"]),
        ("verify", &["What to compare:", "Batches and steps:", "Memory:", "Device:", "Output:"]),
        ("generate", &["Model:", "Sampling:", "Device:", "Output:"]),
        ("plan", &["Model:", "Batches and steps:", "Memory:", "Device:", "Output:"]),
    ] {
        let text = place.does(&format!("{command} --help")).text();
        let found = headings(&text);
        for heading in want {
            assert!(found.iter().any(|line| line == heading), "{command}: {heading} in {found:?}");
        }
        assert_eq!(found.iter().filter(|line| *line == "Options:").count(), 0, "{command}: {found:?}");
        let general = found.iter().position(|line| line == "General:").unwrap();
        assert!(found[general + 1..].iter().all(|line| line == "Examples:"), "{command}: {found:?}");
    }
    let text = place.does("train --help").text();
    for words in ["Weight decay", "Activation checkpointing", "Gradient accumulation", "Micro-batch"] {
        assert!(text.contains(words), "{words}");
    }
}

#[test]
fn general_flags_go_before_the_command_too() {
    let place = Place::with_run();
    for line in ["-v train --config run/config.toml", "--config run/config.toml -v train"] {
        let done = place.does(&format!("{line} --out again --overwrite"));
        assert!(done.stderr.contains("saved "), "-v shows saves: {}", done.stderr);
        assert_eq!(place.weights("again"), place.weights("run"));
    }
}

#[test]
fn a_warm_up_longer_than_the_run_is_shortened() {
    let place = Place::new();
    let done = place.does(&format!("train {TINY} --warmup 12 --out run"));
    let said = "--warmup 12 is longer than the run of 6 steps: 3 are used";
    assert!(done.stderr.contains(said), "{}", done.stderr);
    let config: toml::Table = String::from_utf8(place.read("run/config.toml")).unwrap().parse().unwrap();
    assert_eq!(config["warmup"].as_integer(), Some(3));
    place.does(&format!("train {TINY} --warmup 6 --out whole"));
    let done = place.does("train --config whole/config.toml --steps 3 --out short");
    assert!(
        done.stderr.contains("--warmup 6 is longer than the run of 3 steps: 1 are used"),
        "{}",
        done.stderr
    );
}

#[test]
fn weights_of_a_text_vocabulary_need_data() {
    let place = Place::new();
    place.does("train --model n_layer=1,n_head=2,n_embd=32,vocab_size=300,max_seq_len=32 --batch 2 --seq 16 --steps 1 --out run");
    place.does("convert run hf");
    std::fs::remove_file(place.path("hf/tokenizer.bin")).unwrap();
    place.refuses(
        "train --init hf --steps 1 --out new",
        &["vocabulary of 300 tokens", "built-in stories are bytes", "--data", "--tokenizer"],
    );
    // its own tokens were bytes
    place.does("train --init run --batch 2 --seq 16 --steps 1 --out new");
}

#[test]
fn generate_names_the_checkpoint_it_took() {
    let place = Place::with_run();
    let done = place.does("generate --model run --tokens 3");
    assert!(done.stderr.contains("model: run/checkpoints/step-000006\n"), "{}", done.stderr);
    place.does(&format!("train {TINY} --steps 5 --save-every 2 --out part"));
    // as of a run that was stopped: its newest checkpoint is not the last
    std::fs::remove_dir_all(place.path("part/checkpoints/step-000005")).unwrap();
    let done = place.does("generate --model part --tokens 3");
    let said = "model: part/checkpoints/step-000004, of a run that was stopped after 4 of 5 steps";
    assert!(done.stderr.contains(said), "{}", done.stderr);
    place.does(&format!("train {TINY} --init part --out from-part"));
}

#[test]
fn the_end_of_a_run_says_how_to_write_and_how_to_train_on() {
    let place = Place::new();
    let text = place.does(&format!("train {TINY} --out run")).text();
    assert!(text.contains("write text ironhorse generate --model run\n"), "{text}");
    assert!(text.contains("train on   ironhorse train --resume run --steps 12\n"), "{text}");
    place.does("train --resume run --steps 12");
}

#[test]
fn without_a_gpu_doctor_says_so_in_one_line() {
    let place = Place::new();
    let text = place.does("doctor --threads 1").text();
    let about: Vec<&str> =
        text.lines().filter(|line| line.contains("GPU") || line.contains("NVIDIA")).collect();
    if text.contains("device       cuda:") {
        return; // a GPU that CUDA_VISIBLE_DEVICES does not hide
    }
    assert_eq!(about.len(), 1, "{text}");
    assert!(about[0].contains("no NVIDIA GPU: everything runs on the CPU"), "{text}");
    assert!(!text.contains("looked for lib"), "{text}");
    let verbose = place.does("doctor -v --threads 1").text();
    assert!(verbose.lines().count() > text.lines().count(), "{verbose}");
}

#[test]
fn plan_recommends_one_line() {
    let place = Place::new();
    let advice = |flags: &str| -> String {
        let text = place.does(&format!("plan --threads 1 {flags}")).text();
        assert!(!text.contains("wastes") && text.contains("legend: > is what was asked for"), "{text}");
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("recommended: ")).collect();
        assert_eq!(lines.len(), 1, "{text}");
        lines[0].to_owned()
    };
    assert_eq!(advice("--model d12"), "recommended: --recompute none (what was asked for: it fits)");
    let moe = "--model moe-6.9b --batch 16 --seq 1024 --dtype bf16";
    assert_eq!(advice(&format!("{moe} --memory 139GiB")), "recommended: --recompute experts, which fits");
    let tight = advice(&format!("{moe} --memory 75GiB"));
    assert_eq!(tight, "recommended: --recompute experts --master residual --moments bf16, which fits");
    // 6 GiB of logits in 8 parts
    let logits = advice("--model d12 --batch 64 --seq 1024 --dtype bf16 --memory 24GiB");
    assert_eq!(logits, "recommended: --recompute none --head-chunks 8, which fits");
    let none = advice(&format!("{moe} --memory 20GiB"));
    assert_eq!(none, "recommended: a smaller --batch, --seq or --model; no row fits");
}

#[test]
fn a_profile_can_be_drawn() {
    let place = Place::new();
    let text = place.does(&format!("profile {SMALL} --steps 1 --warmup 0 --svg p.svg")).text();
    assert!(text.contains("p.svg: the longest ops as bars"), "{text}");
    let svg = String::from_utf8(place.read("p.svg")).unwrap();
    for part in ["linear_bwd_weight", "milliseconds of a step", "of the measured peak"] {
        assert!(svg.contains(part), "{part}");
    }
    place.refuses(&format!("profile {SMALL} --svg no/p.svg"), &["no/p.svg"]);
}

#[test]
fn the_c_examples_say_how_the_library_is_found() {
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/c");
    let mut count = 0;
    for entry in std::fs::read_dir(&examples).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "c") {
            let text = std::fs::read_to_string(&path).unwrap();
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert!(
                text.contains("-Wl,-rpath,\"$PWD/target/release\"") && text.contains(&format!("./{name}\n"))
            );
            count += 1;
        }
    }
    assert!(count >= 3);
    let Ok(python) = std::process::Command::new("python3").arg(examples.join("ctypes_demo.py")).output()
    else {
        return; // no Python here
    };
    let said = String::from_utf8_lossy(&python.stderr).into_owned();
    assert!(
        !python.status.success() && said.contains("usage: ") && said.contains("libironhorse.so"),
        "{said}"
    );
}
