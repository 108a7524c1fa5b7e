//! `ironhorse verify` on files that PyTorch wrote. What it finds in larger models is tested from Python.

use super::Place;
use std::path::Path;

/// Two channels: layernorm there is so badly conditioned that PyTorch's own gradients have only three digits.
const LOOSE: &str = "--tolerance 1e-2 --loss-tolerance 1e-5";

fn with_fixtures() -> Place {
    let place = Place::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/fixtures");
    for file in ["tiny_custom.bin", "tiny_custom_debug_state.bin", "tiny_custom.key.safetensors"] {
        std::fs::copy(fixtures.join(file), place.path(file)).unwrap();
    }
    place
}

#[test]
fn what_agrees_passes() {
    let place = with_fixtures();
    let state = "--model tiny_custom.bin --state tiny_custom_debug_state.bin";
    for recompute in ["none", "gelu", "full"] {
        let done = place.does(&format!("verify {state} {LOOSE} --recompute {recompute} --json v.json"));
        assert!(done.text().contains("PASS"), "{}", done.text());
        assert_eq!(place.json("v.json")["verdict"], "pass");
    }
    let whole = place.does(&format!("verify {state} {LOOSE}")).text();
    let quiet = place.does(&format!("verify {state} {LOOSE} --quiet")).text();
    assert!(quiet.lines().count() < 3 && whole.contains(quiet.trim_end()), "{quiet}");
}

#[test]
fn a_changed_logit_fails_with_exit_code_1() {
    let place = with_fixtures();
    let mut bytes = place.read("tiny_custom_debug_state.bin");
    let at = 1024 + 2 * 6 * 4 + 4 * 7; // header, x and y, then logit 7: token (0, 1), vocabulary entry 2
    bytes[at..at + 4].copy_from_slice(&9.5_f32.to_le_bytes());
    place.write("changed_debug_state.bin", bytes);
    let line =
        format!("verify --model tiny_custom.bin --state changed_debug_state.bin {LOOSE} --json v.json");
    let done = place.runs(&line);
    assert_eq!((done.code, &*done.stderr), (Some(1), ""));
    assert!(done.text().contains("FAIL") && done.text().contains("logits"), "{}", done.text());
    let first = &place.json("v.json")["first_wrong"];
    assert_eq!((&first["tensor"], &first["index"]), (&"logits".into(), &serde_json::json!([0, 1, 2])));
}

#[test]
fn files_that_cannot_be_compared_are_refused() {
    let place = with_fixtures();
    place.refuses(
        "verify --model tiny_custom.bin --state tiny_custom.bin",
        &["tiny_custom.bin: magic is 20240326, expected 20240327"],
    );
    place.refuses("verify --model tiny_custom.bin", &["--state FILE with --model, or --key FILE"]);
    place.refuses("verify --key tiny_custom.bin", &["tiny_custom.bin: "]);
    place.refuses(
        "verify --key tiny_custom.key.safetensors --state tiny_custom_debug_state.bin --model tiny_custom.bin",
        &["cannot be used with"],
    );
    let mut bytes = place.read("tiny_custom_debug_state.bin");
    bytes.truncate(bytes.len() - 4);
    place.write("cut_debug_state.bin", bytes);
    place.refuses(
        "verify --model tiny_custom.bin --state cut_debug_state.bin",
        &["cut_debug_state.bin: file size is 2848 bytes, expected 2852"],
    );
}
