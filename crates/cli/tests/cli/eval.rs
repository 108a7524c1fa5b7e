//! `ironhorse eval`

use super::Place;
use ironhorse::train::format::shards::{ShardKind, ShardWriter};

/// Writes a shard of this text's bytes.
fn shard(place: &Place, name: &str, text: &str) {
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let mut writer = ShardWriter::create(&place.path(name), ShardKind::U16).unwrap();
    writer.push(&tokens).unwrap();
    writer.finish().unwrap();
}

const QUESTION: &str = r#"{"question": "Ivy was", "choices": [" happy.", " zqx", "?"], "label": 0}"#;

#[test]
fn every_token_counts_once_whatever_the_batch() {
    let place = Place::with_run();
    let text = "Ivy was happy. ".repeat(20);
    shard(&place, "v.bin", &text);
    let mut losses = Vec::new();
    for flags in ["", "--batch-tokens 32", "--batch-tokens 100000", "--threads 2"] {
        place.does(&format!("eval --model run --data v.bin --json e.json {flags}"));
        let report = place.json("e.json");
        assert_eq!(report["n-samples"]["data"]["effective"], text.len() - 1, "{flags}");
        let result = report["results"]["data"].clone();
        let figure = |name: &str| result[name].as_f64().unwrap();
        assert!((figure("perplexity,none") - figure("loss,none").exp()).abs() < 1e-9);
        // a token is a byte
        let bits = figure("loss,none") / std::f64::consts::LN_2;
        assert!((figure("bits_per_byte,none") - bits).abs() < 1e-9);
        assert!(figure("loss_stderr,none") > 0.0);
        losses.push(figure("loss,none"));
    }
    // other shapes sum in other orders
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-5), "{losses:?}");
}

#[test]
fn questions_are_graded_by_three_definitions() {
    let place = Place::with_run();
    std::fs::write(place.path("q.jsonl"), format!("{QUESTION}\n{QUESTION}\n")).unwrap();
    place.does("eval --model run --choices ivy=q.jsonl --json e.json --samples s.jsonl");
    let report = place.json("e.json");
    for name in ["acc", "acc_norm", "acc_token"] {
        let figure = report["results"]["ivy"][format!("{name},none")].as_f64().unwrap();
        assert!(figure == 0.0 || figure == 1.0, "the two questions are the same: {name} {figure}");
    }
    assert_eq!(report["n-samples"]["ivy"]["original"], 2);
    let samples = std::fs::read_to_string(place.path("s.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> =
        samples.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["log_likelihoods"], lines[1]["log_likelihoods"]);
    assert_eq!(lines[0]["log_likelihoods"].as_array().unwrap().len(), 3);
    place.does("eval --model run --choices ivy=q.jsonl --limit 1 --form plain --json e.json");
    assert_eq!(place.json("e.json")["n-samples"]["ivy"]["original"], 1);
}

#[test]
fn what_cannot_be_graded_is_named() {
    let place = Place::with_run();
    place.refuses("eval --model run", &["nothing to grade", "--data or --choices"]);
    place.refuses("eval --data x.bin", &["no run below runs/"]);
    place.refuses("eval --model run --data none*.bin", &["none*.bin"]);
    place.refuses("eval --model run --choices x=none.jsonl", &["none.jsonl", "No such file"]);
    place.refuses("eval --model run --choices =x", &["expected NAME=FILE"]);
    std::fs::write(place.path("q.jsonl"), "{}\n").unwrap();
    place.refuses("eval --model run --choices q.jsonl", &["q.jsonl: line 1: the context is not there"]);
    std::fs::write(place.path("q.jsonl"), QUESTION).unwrap();
    place.refuses("eval --model run --choices q.jsonl --choices q=q.jsonl", &["two are called q"]);
    shard(&place, "one.bin", "x");
    place.refuses("eval --model run --data one.bin", &["shorter than 2 tokens"]);
    std::fs::write(place.path("q.bin"), "short").unwrap();
    place.refuses("eval --model run --choices q.bin", &["q.bin: file size is 5 bytes"]);
}
