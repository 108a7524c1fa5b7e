//! Thousands of damaged files per format: none may panic, and what is accepted must read consistently. Seeded, so a
//! failure repeats; its message names the case.
#![allow(clippy::unwrap_used, clippy::panic)]

mod exercise;

use std::path::Path;

use exercise::CONFIG;
use ironhorse_core::Precision;
use ironhorse_train::format::answer_key::{AnswerKeySpec, KeyOptimizer, write_answer_key};
use ironhorse_train::format::checkpoint::{CheckpointParts, TrainerState, write_checkpoint};
use ironhorse_train::format::debug_state::{DebugStateParts, write_debug_state_to};
use ironhorse_train::format::hf::{TextTokens, config_json};
use ironhorse_train::format::llmc_model::{ModelOptions, write_model_to};
use ironhorse_train::format::tokenizer::Tokenizer;
use ironhorse_train::format::{Elem, Sink};
use ironhorse_train::model::{ModelConfig, TensorSpec};

const CASES: u64 = 12_000;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn extreme(&mut self) -> u64 {
        const EXTREMES: [u64; 14] = [
            0,
            1,
            2,
            0x7f,
            0xff,
            0xffff,
            0x7fff_ffff,
            0x8000_0000,
            0xffff_ffff,
            0x1_0000_0000,
            0x7fff_ffff_ffff_ffff,
            0x8000_0000_0000_0000,
            0xffff_ffff_ffff_fff0,
            0xffff_ffff_ffff_ffff,
        ];
        EXTREMES[self.below(EXTREMES.len())]
    }
}

/// One change. `head` bytes are the part worth damaging most: the header.
fn mutate(bytes: &mut Vec<u8>, head: usize, random: &mut Random) {
    if bytes.is_empty() {
        bytes.push(random.next() as u8);
        return;
    }
    let in_head = random.below(3) > 0;
    let end = if in_head { head.min(bytes.len()) } else { bytes.len() };
    let at = random.below(end);
    match random.below(10) {
        0 | 1 => bytes[at] ^= 1 << random.below(8),
        2 => bytes.truncate(at),
        3 => {
            let count = 1 + random.below(40);
            bytes.extend((0..count).map(|_| random.next() as u8));
        }
        4 => {
            let stop = (at + 1 + random.below(16)).min(bytes.len());
            bytes[at..stop].iter_mut().for_each(|byte| *byte = random.next() as u8);
        }
        5 => {
            let (start, value) = (at & !3, random.extreme() as u32);
            overwrite(bytes, start, &value.to_le_bytes());
        }
        6 => {
            let value = random.extreme();
            overwrite(bytes, at & !7, &value.to_le_bytes());
        }
        7 => replace_number(bytes, at, random),
        8 => {
            let stop = (at + random.below(32)).min(bytes.len());
            bytes.drain(at..stop);
        }
        _ => {
            let stop = (at + random.below(32)).min(bytes.len());
            let copy = bytes[at..stop].to_vec();
            bytes.splice(at..at, copy);
        }
    }
}

fn overwrite(bytes: &mut [u8], start: usize, value: &[u8]) {
    bytes.iter_mut().skip(start).zip(value).for_each(|(byte, new)| *byte = *new);
}

/// Another number in a JSON or TOML text: with the same number of digits, so that lengths still hold, or an extreme.
fn replace_number(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let Some(start) = (at..bytes.len()).find(|&i| bytes[i].is_ascii_digit()) else { return };
    let stop = (start..bytes.len()).find(|&i| !bytes[i].is_ascii_digit()).unwrap_or(bytes.len());
    if random.below(2) == 0 {
        bytes[start..stop].iter_mut().for_each(|byte| *byte = b'0' + (random.next() % 10) as u8);
    } else {
        let number = random.extreme().to_string();
        bytes.splice(start..stop, number.bytes());
    }
}

/// Damages `base` in many ways. Both some accepted and some refused are wanted: else the test tests nothing.
fn run(name: &str, base: &[u8], head: usize, exercise: fn(&[u8]) -> bool) {
    assert!(exercise(base), "{name}: the sound file is refused");
    let mut accepted = 0;
    for case in 0..CASES {
        let mut random = Random(case ^ 0x1505_2024);
        let mut bytes = base.to_vec();
        for _ in 0..1 + random.below(3) {
            mutate(&mut bytes, head, &mut random);
        }
        match std::panic::catch_unwind(|| exercise(&bytes)) {
            Ok(yes) => accepted += u64::from(yes),
            Err(_) => panic!("{name}: case {case} panicked"),
        }
    }
    assert!(accepted > 0 && accepted < CASES, "{name}: {accepted} of {CASES} accepted");
}

fn fill(spec: &TensorSpec, out: &mut [f32]) -> ironhorse_train::Result<()> {
    out.iter_mut().enumerate().for_each(|(n, out)| *out = (n * 3 + spec.name.len()) as f32 / 7.0);
    Ok(())
}

fn model_bytes(elem: Elem) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut sink = Sink::new(&mut bytes, Path::new("base"));
    write_model_to(&mut sink, &CONFIG, &ModelOptions { elem, header: None }, fill).unwrap();
    bytes
}

#[test]
fn model_f32() {
    run("model v3", &model_bytes(Elem::F32), 32, exercise::model);
}

#[test]
fn model_bf16() {
    run("model v5", &model_bytes(Elem::BF16), 32, exercise::model);
}

#[test]
fn debug_state() {
    let parts = DebugStateParts {
        config: &CONFIG,
        batch: 2,
        seq: 3,
        x: &[0, 1, 2, 3, 4, 0],
        y: &[1, 2, 3, 4, 0, 1],
        logits: &[0.5; 30],
        loss: 1.5,
        header: None,
    };
    let mut bytes = Vec::new();
    write_debug_state_to(&mut Sink::new(&mut bytes, Path::new("base")), &parts, fill).unwrap();
    run("debug state", &bytes, 16, exercise::debug_state);
}

#[test]
fn tokenizer() {
    let tokens = ["a", "b", "ab", "é", "<|end|>", "a long token of many bytes"];
    let tokenizer = Tokenizer { tokens: tokens.map(|token| token.as_bytes().to_vec()).to_vec(), eot: 4 };
    let mut bytes = Vec::new();
    tokenizer.write_to(&mut Sink::new(&mut bytes, Path::new("base"))).unwrap();
    run("tokenizer", &bytes, 16, exercise::tokenizer);
}

fn shard_bytes(magic: i32, version: i32, count: i32, body: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = [magic, version, count].iter().flat_map(|field| field.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.resize(1024 + body, 3);
    bytes
}

#[test]
fn shards() {
    run("shard u16", &shard_bytes(20240520, 1, 50, 100), 12, exercise::shard);
    run("shard u32", &shard_bytes(20240801, 7, 25, 100), 12, exercise::shard);
}

#[test]
fn questions() {
    let one: [u16; 12] = [u16::MAX, 24, 0, 1, 2, 2, 7, 8, 1, 9, 1, 10];
    let mut bytes: Vec<u8> = [20240522_i32, 1, 2, 2].iter().flat_map(|field| field.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend([one, one].as_flattened().iter().flat_map(|word| word.to_le_bytes()));
    run("multiple choice", &bytes, 16, exercise::multiple_choice);
    let swag = concat!(
        r#"{"ctx": "A man [x] sits. he", "ctx_a": "A man sits.", "ctx_b": "he", "activity_label": "Sitting", "#,
        r#""endings": ["stands [step] up.", "sings."], "label": 1}"#,
    );
    let arc = r#"{"question": "q ", "choices": {"text": ["a", "é"], "label": ["A", "B"]}, "answerKey": "B"}"#;
    let lines = format!("{swag}\n\n{arc}\r\n");
    run("questions", lines.as_bytes(), lines.len(), exercise::questions);
}

fn key_bytes() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    let optimizer = KeyOptimizer {
        name: "adamw".into(),
        lr: 1e-4,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        steps: 2,
        decay: "matrices".into(),
    };
    let spec = AnswerKeySpec {
        config: CONFIG.into(),
        batch: 2,
        seq: 3,
        x: &[0, 1, 2, 3, 4, 0],
        y: &[1, 2, 3, 4, 0, 1],
        dtype: "f32",
        seed: 1,
        acts: &[("emb".into(), vec![2, 3, 2]), ("h.0.ln_1".into(), vec![2, 3, 2])],
        with_dacts: true,
        optimizer: Some(optimizer),
        extra: &[],
    };
    write_answer_key(&path, &spec, |name, out| {
        out.fill(name.len() as f32);
        Ok(())
    })
    .unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn answer_key() {
    let bytes = key_bytes();
    let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    run("answer key", &bytes, head, exercise::answer_key);
}

#[test]
fn safetensors() {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"#,
        r#""b":{"dtype":"I32","shape":[1],"data_offsets":[16,20]},"c":{"dtype":"BF16","shape":[3],"data_offsets":[20,26]},"#,
        r#""d":{"dtype":"U8","shape":[2],"data_offsets":[26,28]}}    "#,
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&[7; 28]);
    run("safetensors", &bytes, 8 + header.len(), exercise::safetensors);
}

#[test]
fn hf_and_checkpoint() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("c");
    let trainer = TrainerState { step: 3, ..TrainerState::default() };
    let sizes = CONFIG.into();
    let parts = CheckpointParts::new(&sizes, Precision::F32, &trainer);
    let table = CONFIG.tensors();
    let read = |_, index: usize, bytes: &mut Vec<u8>| {
        let mut values = vec![0.0; table[index].shape.numel()];
        fill(&table[index], &mut values)?;
        *bytes = values.iter().flat_map(|value: &f32| value.to_le_bytes()).collect();
        Ok(())
    };
    write_checkpoint(&folder, &parts, read).unwrap();
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let weights = read("model.safetensors");
    let head = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    run("hf weights", &weights, head, exercise::hf_weights);
    let json = read("config.json");
    run("hf config", &json, json.len(), exercise::hf_config);
    let mixture = config_json(&mixture(), Elem::F32, &TextTokens::Eot(3)).to_string().into_bytes();
    run("hf config of a mixture", &mixture, mixture.len(), exercise::hf_config);
    let index = br#"{"metadata":{"total_size":8},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"b.safetensors"}}"#;
    run("hf index", index, index.len(), exercise::hf_index);
    let json = read("trainer.json");
    run("trainer.json", &json, json.len(), exercise::trainer_json);
}

#[test]
fn adapters() {
    for (stacked, settings) in [(false, exercise::ADAPTER), (true, exercise::STACKED_ADAPTER)] {
        let tensors = exercise::adapter_tensors(stacked);
        let head = 8 + u64::from_le_bytes(tensors[..8].try_into().unwrap()) as usize;
        run("adapter", &tensors, head, exercise::adapter);
        run("adapter_config.json", settings.as_bytes(), settings.len(), exercise::adapter_config);
    }
}

fn mixture() -> ModelConfig {
    let sizes =
        "hidden=16,layers=2,heads=4,kv_heads=2,ffn=5,vocab=9,context=7,experts=3,top_k=2,rope_alpha=1.7";
    ModelConfig::parse(sizes).unwrap()
}

#[test]
fn sizes() {
    let toml = b"# a small model\nkind = \"gpt2\"\nn_layer = 3\nheads = 5\nC = 40\nvocab = 300\nmaxT = 16\n";
    run("toml", toml, toml.len(), exercise::sizes);
    let inline = b"n_layer=3,n_head=5,n_embd=40,vocab_size=300,max_seq_len=16";
    run("inline", inline, inline.len(), exercise::sizes);
    let json = ModelConfig::from(CONFIG).to_json().to_string().into_bytes();
    run("json", &json, json.len(), exercise::sizes);
    let line = mixture().to_line().into_bytes();
    run("inline mixture", &line, line.len(), exercise::sizes);
    let json = mixture().to_json().to_string().into_bytes();
    run("json mixture", &json, json.len(), exercise::sizes);
}
