//! `ironhorse selftest`: the table, the exit code, what is refused.

use super::Place;

#[test]
fn the_cpu_engine_passes_and_shows_a_table() {
    let place = Place::new();
    let text = place.does("selftest --device cpu --threads 1 --quick --json s.json").text();
    for op in ["embedding_fwd", "linear_bwd_weight", "attention_bwd", "adamw", "copy"] {
        let line = text.lines().find(|line| line.starts_with(op)).unwrap_or_else(|| panic!("{op}: {text}"));
        let fields: Vec<&str> = line.split_whitespace().collect();
        assert_eq!((fields[1], fields[3]), ("f32", "0"), "{line}");
    }
    assert!(text.lines().last().unwrap().contains("cases passed on cpu"), "{text}");
    let report = place.json("s.json");
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(report["passed"], cases.len());
    assert!(cases.len() > 80 && cases.iter().all(|case| case["passed"] == true && case["error"].is_number()));
    assert_eq!((&report["failed"], &report["device"]), (&0.into(), &"cpu".into()));
}

#[test]
fn one_op_can_be_picked() {
    let place = Place::new();
    let text = place.does("selftest --device cpu --threads 1 --quick --op add --op fill").text();
    let ops: Vec<&str> = text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(ops[..2], ["add", "fill"], "{text}");
    assert_eq!(text.lines().count(), 4, "{text}");
}

#[test]
fn what_cannot_be_tested_is_refused() {
    let place = Place::new();
    place.refuses("selftest --device cpu --op softmax", &["unknown op `softmax`", "attention_fwd"]);
    place.refuses("selftest --device cpu --dtype tf32", &["--dtype tf32: cpu has no such products"]);
    let text = place.does("selftest --device cpu --threads 1 --quick --op linear_fwd --dtype bf16").text();
    assert!(text.contains("bf16-products"), "{text}");
    place.refuses("selftest --device gpu", &["unknown device `gpu`"]);
    if ironhorse::cuda::usable(0).is_err() {
        place.refuses("selftest --device cuda --quick", &[]);
    }
}
