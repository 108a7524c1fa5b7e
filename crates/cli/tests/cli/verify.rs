//! `ironhorse verify` on files that PyTorch wrote. What it finds in larger models is tested from Python.

use super::Place;
use std::path::Path;

const STATE: &str = "--model small_custom.bin --state small_custom_debug_state.bin";
const KEY: &str = "small_custom.key.safetensors";

/// `small_custom`: one layer, two heads, 32 channels, 40 tokens, batch 2 × 6, two optimizer steps.
/// `tiny_custom` has two channels, which is badly conditioned; it is for files, not for numbers.
fn with_fixtures() -> Place {
    let place = Place::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/fixtures");
    for stem in ["tiny_custom", "small_custom"] {
        for end in [".bin", "_debug_state.bin", ".key.safetensors"] {
            let file = format!("{stem}{end}");
            std::fs::copy(fixtures.join(&file), place.path(&file)).unwrap();
        }
    }
    place
}

/// The key with other text in its header.
fn with_header(place: &Place, changes: &[(&str, &str)]) -> String {
    let bytes = place.read(KEY);
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = String::from_utf8(bytes[8..end].to_vec()).unwrap();
    for (from, to) in changes {
        assert!(header.contains(from), "{from} in {header}");
        header = header.replacen(from, to, 1);
    }
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let changed = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[end..]].concat();
    place.write("changed.safetensors", changed);
    "changed.safetensors".into()
}

/// Two processes share the rows of the batch; what they compute together is held against the key of one.
#[test]
fn ranks_are_verified_with_the_key_of_one() {
    let place = with_fixtures();
    for shard in ["none", "state", "grads"] {
        let done =
            place.does(&format!("verify --key {KEY} --ranks 2 --shard {shard} --threads 1 --json v.json"));
        assert!(done.stderr.contains("2 ranks on "), "{}", done.stderr);
        let text = done.text();
        for part in ["PASS: 34 tensors agree", "grad.wte.weight", "losses", "after.ln_f.bias"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(text.matches("PASS").count(), 1, "one of them prints");
        assert!(place.json("v.json")["tensors"].as_array().is_some_and(|rows| rows.len() == 34));
    }
    // a verdict of rank 0 is that of all
    let wrong = place.runs(&format!("verify --key {KEY} --ranks 2 --threads 1 --tolerance 0 --steps 0"));
    assert_eq!(wrong.code, Some(1), "{}", wrong.stderr);
    assert!(wrong.text().contains("FAIL") && wrong.text().contains("grad."), "{}", wrong.text());
    for (flags, text) in [
        (
            format!("--key {KEY} --ranks 3"),
            "the rows of the key's batch is 2, expected a multiple of the 3 ranks",
        ),
        (format!("--key {KEY} --ranks 1"), "--ranks 1 is one process"),
        (format!("--key {KEY} --shard none"), "--shard goes with --ranks N"),
        (format!("--key {KEY} --ranks 2 --lockstep"), "--lockstep"),
        ("--key none.safetensors --ranks 2".to_owned(), "none.safetensors"),
    ] {
        place.refuses(&format!("verify --threads 1 {flags}"), &[text]);
    }
}

#[test]
fn what_agrees_passes() {
    let place = with_fixtures();
    for what in [STATE.to_owned(), format!("--key {KEY}"), format!("--key {KEY} --model small_custom.bin")] {
        for recompute in ["none", "gelu", "full"] {
            let done = place.does(&format!("verify {what} --recompute {recompute} --json v.json"));
            assert!(done.text().contains("PASS"), "{}", done.text());
            assert_eq!(place.json("v.json")["verdict"], "pass");
        }
    }
    let parts = place.does(&format!("verify {STATE} --head-chunks 2 --json v.json"));
    assert!(parts.text().contains("PASS"), "{}", parts.text());
    let whole = place.does(&format!("verify {STATE}")).text();
    let quiet = place.does(&format!("verify {STATE} --quiet")).text();
    assert!(quiet.lines().count() < 3 && whole.contains(quiet.trim_end()), "{quiet}");
}

#[test]
fn steps_are_compared_or_said_not_to_be() {
    let place = with_fixtures();
    let done = place.does(&format!("verify {STATE} --json v.json"));
    assert!(!done.text().contains("not compared"), "{}", done.text());
    assert_eq!(place.json("v.json")["losses"].as_array().unwrap().len(), 1, "a state has no later losses");
    let done = place.does(&format!("verify {STATE} --steps 3 --json v.json"));
    assert!(done.text().contains("\nlosses, not compared: 3.67583"), "{}", done.text());
    assert_eq!(place.json("v.json")["losses"].as_array().unwrap().len(), 3);
    let done = place.does(&format!("verify --key {KEY} --steps 1"));
    assert!(!done.text().contains("not compared"), "{}", done.text());
    place.refuses(
        &format!("verify --key {KEY} --steps 3"),
        &["--steps is 3, expected at most 2, which the answer key records"],
    );
}

#[test]
fn a_changed_weight_beside_the_key_is_named() {
    let place = with_fixtures();
    let mut bytes = place.read("small_custom.bin");
    let at = 1024 + 4 * (32 * 5 + 7); // the padded token table comes first
    let was = f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    bytes[at..at + 4].copy_from_slice(&3.5_f32.to_le_bytes());
    place.write("small_custom.bin", bytes);
    let done = place.runs(&format!("verify {STATE} --json v.json"));
    assert_eq!((done.code, &*done.stderr), (Some(1), ""));
    assert!(done.text().contains("first wrong: param.wte.weight in the file"), "{}", done.text());
    let first = &place.json("v.json")["first_wrong"];
    assert_eq!((&first["section"], &first["tensor"]), (&"file".into(), &"param.wte.weight".into()));
    assert_eq!((&first["index"], &first["got"]), (&serde_json::json!([5, 7]), &3.5.into()));
    assert_eq!(first["expected"].as_f64().unwrap() as f32, was);
    // without a usable key the earlier result remains
    place.write(KEY, "no key");
    let done = place.runs(&format!("verify {STATE} --json v.json"));
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(
        done.stderr.starts_with("the answer key beside the state could not be used: small_custom.key"),
        "{}",
        done.stderr
    );
    assert_eq!(place.json("v.json")["first_wrong"]["tensor"], "logits");
}

#[test]
fn keys_of_other_tools_may_say_more() {
    let place = with_fixtures();
    let key = with_header(
        &place,
        &[
            (r#"\"decay\""#, r#"\"grouping\""#),
            (r#"\"n_layer\""#, r#"\"activation\": \"gelu_tanh\", \"n_layer\""#),
        ],
    );
    place.does(&format!("verify --key {key}"));
    let key = with_header(&place, &[(r#""dtype":"f32""#, r#""dtype":"bf16""#)]);
    place.refuses(
        &format!("verify --key {key}"),
        &["metadata `dtype` is \"bf16\", expected \"f32\": this engine compares f32 keys"],
    );
}

#[test]
fn weights_that_are_no_numbers_are_refused() {
    let place = with_fixtures();
    let mut bytes = place.read(KEY);
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    let at = end + header["param.ln_f.bias"]["data_offsets"][0].as_u64().unwrap() as usize + 4;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    place.write("nan.safetensors", bytes);
    place.refuses("verify --key nan.safetensors", &["param.ln_f.bias[1] is NaN, expected a finite number"]);
}

#[test]
fn a_key_cannot_allow_itself_everything() {
    let place = with_fixtures();
    let key = with_header(
        &place,
        &[
            ("2.482720740995319e-08", "2.482720740995319e+08"), // of `losses`
            ("0.0002467528478674247", "9.0002467528478674"),    // of after.h.0.attn.c_attn.bias
        ],
    );
    let done = place.does(&format!("verify --key {key} --json v.json"));
    let tolerance = |name: &str| {
        let report = place.json("v.json");
        let row = report["tensors"].as_array().unwrap().iter().find(|row| row["name"] == name).cloned();
        row.unwrap()["tolerance"].as_f64().unwrap()
    };
    assert_eq!((tolerance("losses"), tolerance("after.h.0.attn.c_attn.bias")), (1e-4, 1e-2));
    assert_eq!((tolerance("loss"), tolerance("after.wte.weight")), (1e-6, 1e-5));
    assert!(done.text().lines().next().unwrap().contains("allowed"), "{}", done.text());
}

#[test]
fn a_changed_logit_fails_with_exit_code_1() {
    let place = with_fixtures();
    let mut bytes = place.read("small_custom_debug_state.bin");
    let at = 1024 + 2 * 12 * 4 + 4 * 42; // header, x and y, then logit 42: token (0, 1), vocabulary entry 2
    bytes[at..at + 4].copy_from_slice(&9.5_f32.to_le_bytes());
    place.write("changed_debug_state.bin", bytes);
    let line = "verify --model small_custom.bin --state changed_debug_state.bin --json v.json";
    let done = place.runs(line);
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

const SIZES: &str = "n_layer=2,n_head=2,n_embd=24,vocab_size=50,max_seq_len=16";

#[test]
fn the_cpu_in_lockstep_with_itself_is_exact() {
    let place = with_fixtures();
    let random = format!("--model {SIZES} --batch 2 --seq 9");
    for what in [random, format!("--key {KEY}"), STATE.to_owned(), "--model small_custom.bin --seq 8".into()]
    {
        let done = place.does(&format!("verify --lockstep --device cpu {what} --json v.json"));
        assert!(done.text().contains("PASS: cpu agrees with cpu"), "{}", done.text());
        let report = place.json("v.json");
        assert_eq!((&report["verdict"], &report["first_wrong"]), (&"pass".into(), &serde_json::Value::Null));
        let kinds = report["kinds"].as_array().unwrap();
        assert!(kinds.iter().all(|kind| kind["worst"] == 0.0), "{kinds:?}");
        let adamw = kinds.iter().find(|kind| kind["op"] == "adamw").unwrap();
        assert_eq!(adamw["count"], 2, "two passes");
    }
    let packed = format!("verify --lockstep --device cpu --model {SIZES} --batch 1 --seq 8 --documents 2");
    assert!(place.does(&packed).text().contains("PASS"));
    place.refuses(
        &format!("verify --key {KEY} --documents 2"),
        &["--documents", "cannot be used with", "--key"],
    );
    let quiet = place
        .does(&format!("verify --lockstep --device cpu --model {SIZES} --batch 1 --seq 3 --quiet"))
        .text();
    assert_eq!(quiet.lines().count(), 1, "{quiet}");
}

#[test]
fn lockstep_needs_a_model_and_only_it_takes_a_batch() {
    let place = with_fixtures();
    place.refuses("verify --lockstep --device cpu", &["give --model NAME or --key FILE with --lockstep"]);
    place.refuses("verify --lockstep --device cpu --model d99", &["unknown model `d99`"]);
    place.refuses("verify --model small_custom.bin --batch 2", &["--lockstep"]);
    place.refuses(&format!("verify --lockstep --key {KEY} --batch 2"), &["cannot be used with"]);
    place.refuses(
        &format!("verify --lockstep --device cpu --dtype fp8 --key {KEY}"),
        &["the cpu engine computes in f32 and bf16, not fp8; use --dtype bf16"],
    );
    place.refuses(
        &format!("verify --lockstep --device cpu --model {SIZES} --batch 1 --seq 17"),
        &["sequence length 17 is beyond the model's context of 16"],
    );
    let done = place.runs(&format!("verify --lockstep --device cpu --model {SIZES} --seq 4 --steps 0"));
    assert_eq!((done.code, done.text().contains("nothing was compared")), (Some(1), true));
}

#[test]
fn every_row_says_what_it_is_allowed_and_why() {
    let place = with_fixtures();
    let text = place.does(&format!("verify {STATE}")).text();
    let rows = text.lines().skip(1).take_while(|line| !line.is_empty());
    assert!(rows.clone().count() > 3 && rows.clone().all(|row| row.contains("  fixed  ")), "{text}");
    assert!(text.contains("allowed, fixed: 1e-5 of a tensor's norm, 1e-6 of the loss"), "{text}");
    assert!(!text.contains("allowed, steps"), "{text}");
    let text = place.does("verify --key small_custom.key.safetensors --json v.json").text();
    let row = text.lines().find(|line| line.starts_with("after.h.0.attn.c_attn.bias")).unwrap();
    assert!(row.contains("  steps  "), "{row}");
    for says in
        ["allowed, fixed: ", "allowed, steps: 3 times PyTorch's own f32 error", "% of what is allowed used"]
    {
        assert!(text.contains(says), "{text}");
    }
    let largest = text.lines().find(|line| line.starts_with("PASS")).unwrap();
    assert!(largest.contains("largest relative error") && largest.contains(", allowed "), "{largest}");
    let report = place.json("v.json");
    assert!(report["tensors"].as_array().unwrap().iter().all(|row| row["reason"].is_string()), "{report}");
}
