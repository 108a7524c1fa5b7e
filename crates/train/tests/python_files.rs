//! Files written by the Python side, read and written again here. They were made by
//!
//! ```text
//! python -m ironhorse.export gpt2 --model n_layer=2,n_head=1,n_embd=2,vocab_size=5,max_seq_len=3 \
//!     --batch 2 --seq 3 --steps 2 --seed 1 --stem tiny --out crates/train/tests/fixtures
//! ```
#![allow(clippy::unwrap_used)]

mod exercise;

use std::path::{Path, PathBuf};

use ironhorse_train::format::answer_key::AnswerKey;
use ironhorse_train::format::debug_state::DebugState;
use ironhorse_train::format::llmc_model::ModelFile;
use ironhorse_train::format::safetensors::SafeTensors;
use ironhorse_train::format::{Kind, Sink, sniff};
use ironhorse_train::model::Gpt2Config;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[test]
fn model_state_and_key_tell_the_same_story() {
    let mut key = AnswerKey::open(&fixture("tiny_custom.key.safetensors")).unwrap();
    let config = Gpt2Config::new(3, 5, 2, 1, 2);
    assert_eq!(*key.config(), config.into());
    assert_eq!((key.batch(), key.seq()), (2, 3));
    assert!(key.crc_mismatches().unwrap().is_empty());
    assert_eq!(key.optimizer().unwrap().steps, 2);
    assert_eq!(key.read("losses").unwrap().len(), 2);
    assert!(key.acts().iter().all(|name| key.has(&format!("act.{name}"))));
    assert!(!key.acts().is_empty());

    let mut model = ModelFile::open(&fixture("tiny_custom.bin")).unwrap();
    let mut rounded = ModelFile::open(&fixture("tiny_custom_bf16.bin")).unwrap();
    let mut state = DebugState::open(&fixture("tiny_custom_debug_state.bin"), &config).unwrap();
    assert_eq!((key.x().unwrap(), key.y().unwrap()), (state.x().unwrap(), state.y().unwrap()));
    assert_eq!(key.read("loss").unwrap(), [state.loss().unwrap()]);
    let mut logits = vec![0.0; state.num_logits()];
    state.read_logits(0, &mut logits).unwrap();
    assert_eq!(key.read("logits").unwrap(), logits);
    for spec in config.tensors() {
        let numel = spec.shape.numel();
        let (mut a, mut b) = (vec![0.0; numel], vec![0.0; numel]);
        model.read_tensor(&spec.name, &mut a).unwrap();
        key.read_tensor(&spec.name, &mut b).unwrap();
        assert_eq!(a, b, "{}", spec.name);
        rounded.read_tensor(&spec.name, &mut b).unwrap();
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= a.abs() / 256.0), "{}", spec.name);
        state.read_grad(&spec.name, &mut a).unwrap();
        key.read_into(&format!("grad.{}", spec.name), &mut b).unwrap();
        assert_eq!(a, b, "gradient of {}", spec.name);
    }
}

#[test]
fn copies_are_byte_identical() {
    for name in ["tiny_custom.bin", "tiny_custom_bf16.bin"] {
        assert_eq!(sniff(&fixture(name)).unwrap(), Kind::Model);
        assert!(exercise::model(&std::fs::read(fixture(name)).unwrap()), "{name}");
    }
    let path = fixture("tiny_custom.key.safetensors");
    assert_eq!(sniff(&path).unwrap(), Kind::AnswerKey);
    let mut copy = Vec::new();
    SafeTensors::open(&path).unwrap().copy_to(&mut Sink::new(&mut copy, &path)).unwrap();
    assert!(copy == std::fs::read(&path).unwrap());
    assert_eq!(sniff(&fixture("tiny_custom_debug_state.bin")).unwrap(), Kind::DebugState);
}
