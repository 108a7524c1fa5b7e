//! Flags that make no sense: exit code 2 and one line that says what would have been right.

use super::Place;
use super::place::TINY;

#[test]
fn without_a_command_the_whole_help_is_shown() {
    let done = Place::new().runs("");
    assert_eq!(done.code, Some(2));
    for text in ["Usage:", "train", "generate", "verify", "doctor", "Start here:", "Exit code:"] {
        assert!(done.stderr.contains(text), "{text}: {}", done.stderr);
    }
}

#[test]
fn usage_errors_are_one_line() {
    let place = Place::new();
    for (line, text) in [
        (
            "trian",
            "error: unrecognized subcommand 'trian'; tip: a similar subcommand exists: 'train' (see --help)\n",
        ),
        (
            "train --step 3",
            "error: unexpected argument '--step' found; tip: a similar argument exists: '--steps' (see --help)\n",
        ),
        (
            "train extra",
            "error: unexpected argument 'extra' found; tip: did you mean --model extra? (see --help)\n",
        ),
        ("convert a b c", "error: unexpected argument 'c' found (see --help)\n"),
        ("convert", "error: the following required arguments were not provided: <FROM>, <TO> (see --help)\n"),
        ("convert a", "error: the following required arguments were not provided: <TO> (see --help)\n"),
        (
            "train --steps",
            "error: a value is required for '--steps <N>' but none was supplied (see --help)\n",
        ),
        ("train --config", "error: --config needs a file\n"),
    ] {
        place.refuses(line, &[text]);
    }
    place.refuses(
        "train --dtype f8",
        &["'f8'", "[possible values: f32, tf32, bf16-products, bf16, fp8, fp8-head]"],
    );
    place.refuses("verify", &["--state FILE with --model, or --key FILE"]);
    place.refuses("verify --state x", &["not provided: --model <FILE>"]);
}

#[test]
fn numbers_out_of_range_are_refused_by_their_flag() {
    let place = Place::new();
    for (line, expected) in [
        ("train --lr nan", "a number of at least 0"),
        ("train --lr -1", "a number of at least 0"),
        ("train --lr inf", "a number of at least 0"),
        ("train --lr 1e39", "a number of at least 0"),
        ("train --lr fast", "a number of at least 0"),
        ("train --grad-clip -1", "a number of at least 0"),
        ("train --weight-decay nan", "a number of at least 0"),
        ("train --eps -1", "a number above 0"),
        ("train --eps 0", "a number above 0"),
        ("train --beta1 1.5", "at least 0 and below 1"),
        ("train --beta2 1", "at least 0 and below 1"),
        ("train --beta2 -0.1", "at least 0 and below 1"),
        ("train --final-fraction 2", "a number from 0 to 1"),
        ("train --batch 0", "a whole number of at least 1"),
        ("train --batch -3", "a whole number of at least 1"),
        ("train --batch 1.5", "a whole number of at least 1"),
        ("train --batch 99999999999999999999", "a whole number of at least 1"),
        ("train --seq 0", "a whole number of at least 1"),
        ("train --steps 0", "a whole number from 1"),
        ("train --steps 9999999999", "a whole number from 1"),
        ("train --accumulate 0", "a whole number of at least 1"),
        ("train --warmup -1", "a whole number of at least 0"),
        ("train --val-every -1", "a whole number of at least 0"),
        // TOML's whole numbers end at 2⁶³ - 1, and config.toml must be able to hold every flag
        ("train --val-every 9223372036854775808", "at most 9223372036854775807"),
        ("train --warmup 18446744073709551615", "at most 9223372036854775807"),
        ("train --batch 9223372036854775808", "at most 9223372036854775807"),
        ("train --accumulate 4294967296", "at most 4294967295"),
        ("train --val-batches -1", "a whole number of at least 0"),
        ("train --sample-tokens x", "a whole number of at least 0"),
        ("train --seed -1", "a whole number from 0 to 9223372036854775807"),
        ("train --seed 9223372036854775808", "a whole number from 0 to 9223372036854775807"),
        ("train --threads 100000", "a whole number from 0 to 1024"),
        ("train --temperature -1", "a number of at least 0"),
        ("generate --temperature -1", "a number of at least 0"),
        ("generate --temperature nan", "a number of at least 0"),
        ("generate --top-k 0", "a whole number of at least 1"),
        ("generate --top-p 0", "a number above 0, at most 1"),
        ("generate --top-p 1.1", "a number above 0, at most 1"),
        ("generate --tokens -1", "a whole number of at least 0"),
        ("verify --tolerance -1", "a number of at least 0"),
        ("verify --loss-tolerance nan", "a number of at least 0"),
        ("bench --steps 0", "a whole number from 1"),
        ("bench --steps 18446744073709551615", "a whole number from 1"),
        ("bench --warmup 18446744073709551615", "a whole number from 0"),
        ("bench --batch 0", "a whole number of at least 1"),
        ("bench --documents 0", "a whole number of at least 1"),
        ("profile --lr nan", "a number of at least 0"),
        ("plan --seq 0", "a whole number of at least 1"),
        ("plan --threads 100000", "a whole number from 0 to 1024"),
        ("doctor --threads -1", "a whole number from 0 to 1024"),
    ] {
        let (flag, value) = line.split_once(' ').unwrap().1.split_once(' ').unwrap();
        place.refuses(line, &[&format!("invalid value '{value}' for '{flag} <"), expected]);
    }
}

#[test]
fn numbers_that_do_not_go_together_are_refused() {
    let place = Place::new();
    place.refuses(&format!("train {TINY} --seq 33"), &["--seq 33", "context of 32"]);
    place.refuses("bench --model d12 --seq 1025", &["1025", "context of 1024"]);
    place.refuses(
        "train --model n_layer=1,n_head=3,n_embd=32",
        &["n_head is 3, expected a divisor of n_embd, 32"],
    );
    place.refuses(
        "train --model n_layer=1,n_head=1,n_embd=8,vocab_size=100",
        &["256 tokens, the model only 100"],
    );
    place.refuses("plan --model n_layer=1025,n_head=1,n_embd=8", &["n_layer is 1025, expected at most 1024"]);
    place.refuses("plan --model n_layer=1,n_heads=3", &["unknown key `n_heads`"]);
    place.refuses("plan --model n_layer=x,n_head=1,n_embd=8", &["n_layer is \"x\""]);
    place.refuses(
        "plan --model d13",
        &["unknown model `d13`", "d12|gpt2, d24|gpt2-medium, d36|gpt2-large, d48|gpt2-xl"],
    );
    place.refuses("bench --dtype fp8", &["cpu engine computes in f32 and bf16, not fp8"]);
    place.refuses("bench --dtype bf16 --master residual", &["goes with bf16 weights, not bf16-products"]);
    for command in ["train", "bench", "profile", "plan", "verify --lockstep --model d12"] {
        let what = ["--master residual goes with bf16 weights, not f32", "--dtype bf16"];
        place.refuses(&format!("{command} --master residual"), &what);
        place.refuses(
            &format!("{command} --moments bf16"),
            &["--moments bf16 goes with bf16 weights, not f32"],
        );
        place.refuses(&format!("{command} --master i16"), &["possible values: f32, residual"]);
    }
    place.refuses("plan --memory 80", &["'80'", "expected bytes such as 139GiB or 80GB"]);
    place.refuses("bench --dtype tf32", &["cpu engine computes in f32 and bf16, not tf32"]);
    for device in ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA"] {
        place.refuses(&format!("bench --device {device}"), &["expected auto, cpu, cuda or cuda:N"]);
    }
}

#[test]
fn what_no_machine_can_hold_is_refused() {
    let place = Place::new();
    for command in ["plan", "bench", "profile", "train --model d12"] {
        place.refuses(
            &format!("{command} --batch 1000000000000 --seq 1024"),
            &["batch 1000000000000 × sequence 1024", "smaller"],
        );
        place.refuses(&format!("{command} --batch 9223372036854775807 --seq 1024"), &["smaller"]);
    }
    place.refuses(
        "plan --model n_layer=1,n_head=1,n_embd=10000000",
        &["number of parameters", "at most 2^40"],
    );
}

#[cfg(target_os = "linux")]
#[test]
fn what_this_machine_cannot_hold_is_refused_before_it_is_tried() {
    let place = Place::new();
    for command in ["bench", "profile", "train --model d12"] {
        place.refuses(
            &format!("{command} --batch 1000000 --seq 1024"),
            &["this run needs", "TiB of memory and the machine has", "ironhorse plan"],
        );
    }
    let plan = place.does("plan --batch 1000000 --seq 1024 --threads 1").text();
    assert!(plan.contains("does not fit: cpu has"), "{plan}");
}

/// `Place` hides all GPUs, so this holds on every machine.
#[test]
fn without_a_gpu_every_command_that_asks_for_one_says_so() {
    let place = Place::new();
    place.write("key.safetensors", b"never opened");
    for command in
        ["train", "bench", "profile", "plan", "selftest", "verify --lockstep", "verify --key key.safetensors"]
    {
        for device in ["cuda", "cuda:0", "cuda:7"] {
            place.refuses(&format!("{command} --device {device}"), &["error: cuda engine: "]);
        }
    }
    let doctor = place.does("doctor").text();
    assert!(doctor.contains("--device auto means cpu"), "{doctor}");
    assert!(doctor.contains("device       cuda    no "), "{doctor}");
}
