//! Every kind of file is recognised, and every kind of weights is read through the same trait.

use std::path::Path;

use super::answer_key::{AnswerKeySpec, write_answer_key};
use super::checkpoint::{CheckpointParts, TrainerState, write_checkpoint};
use super::debug_state::{DebugStateParts, write_debug_state};
use super::hf::{HfOptions, write_hf};
use super::llmc_model::{ModelOptions, write_model};
use super::shards::{ShardKind, ShardWriter};
use super::tokenizer::Tokenizer;
use super::*;
use crate::Result;
use crate::model::{Gpt2Config, ModelConfig, TensorSpec};
use ironhorse_core::Precision;

fn config() -> Gpt2Config {
    Gpt2Config::new(3, 5, 1, 1, 4)
}

fn value(name: &str, index: usize) -> f32 {
    if name == "wte.weight" && index >= 5 * 4 { 0.0 } else { (index + name.len()) as f32 }
}

fn fill(spec: &TensorSpec, out: &mut [f32]) -> Result<()> {
    out.iter_mut().enumerate().for_each(|(n, out)| *out = value(&spec.name, n));
    Ok(())
}

/// One file or folder of each kind.
fn write_all(folder: &Path) -> Result<()> {
    let config = config();
    let at = |name: &str| folder.join(name);
    write_model(&at("model.bin"), &config, &ModelOptions { elem: Elem::F32, header: None }, fill)?;
    let parts = DebugStateParts {
        config: &config,
        batch: 1,
        seq: 2,
        x: &[0, 1],
        y: &[1, 2],
        logits: &[0.0; 10],
        loss: 1.0,
        header: None,
    };
    write_debug_state(&at("state.bin"), &parts, fill)?;
    Tokenizer::bytes().write(&at("tokenizer.bin"))?;
    for (name, kind) in [("u16.bin", ShardKind::U16), ("u32.bin", ShardKind::U32)] {
        let mut shard = ShardWriter::create(&at(name), kind)?;
        shard.push(&[1, 2, 3])?;
        shard.finish()?;
    }
    let spec = AnswerKeySpec {
        config: config.into(),
        batch: 1,
        seq: 2,
        x: &[0, 1],
        y: &[1, 2],
        dtype: "f32",
        seed: 1,
        acts: &[],
        with_dacts: false,
        optimizer: None,
        extra: &[],
    };
    write_answer_key(&at("a.key.safetensors"), &spec, |name, out| {
        let name = name.split_once('.').map_or(name, |pair| pair.1);
        out.iter_mut().enumerate().for_each(|(n, out)| *out = value(name, n));
        Ok(())
    })?;
    write_hf(&at("hf"), &config.into(), &HfOptions::new(Elem::F32), fill)?;
    let trainer = TrainerState::default();
    let sizes = config.into();
    let parts = CheckpointParts::new(&sizes, Precision::F32, &trainer);
    let table = config.tensors();
    let read = |_, index: usize, bytes: &mut Vec<u8>| {
        let mut values = vec![0.0; table[index].shape.numel()];
        fill(&table[index], &mut values)?;
        *bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(())
    };
    write_checkpoint(&at("checkpoint"), &parts, read)?;
    // a run with a torn checkpoint and the whole one
    std::fs::create_dir_all(at("run/checkpoints")).unwrap();
    for name in ["step-000007", "step-000009"] {
        write_checkpoint(&at("run/checkpoints").join(name), &parts, read)?;
    }
    std::fs::write(at("run/checkpoints/step-000009/model.safetensors"), "torn").unwrap();
    std::fs::write(at("run/config.toml"), "").unwrap();
    std::fs::write(at("run/metrics.jsonl"), "").unwrap();
    std::fs::write(at("sizes.toml"), "n_layer = 1\nn_head = 1\nn_embd = 4\n").unwrap();
    Ok(())
}

#[test]
fn every_kind_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path()).unwrap();
    let kinds = [
        ("model.bin", Kind::Model),
        ("state.bin", Kind::DebugState),
        ("tokenizer.bin", Kind::Tokenizer),
        ("u16.bin", Kind::Shard),
        ("u32.bin", Kind::Shard),
        ("a.key.safetensors", Kind::AnswerKey),
        ("hf", Kind::HfFolder),
        ("hf/model.safetensors", Kind::HfFile),
        ("checkpoint", Kind::Checkpoint),
        ("checkpoint/state.safetensors", Kind::SafeTensors),
        ("run", Kind::Run),
        ("run/checkpoints/step-000007", Kind::Checkpoint),
        ("sizes.toml", Kind::Toml),
    ];
    for (name, kind) in kinds {
        assert_eq!(sniff(&folder.path().join(name)).unwrap(), kind, "{name}");
    }
}

#[test]
fn all_weights_read_alike() {
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path()).unwrap();
    for name in ["model.bin", "a.key.safetensors", "hf", "hf/model.safetensors", "checkpoint", "run"] {
        let choice = ModelChoice::parse(folder.path().join(name).to_str().unwrap()).unwrap();
        assert_eq!(choice.config(), config().into(), "{name}");
        let ModelChoice::Weights(mut source) = choice else { panic!("{name} has weights") };
        for spec in config().tensors() {
            let mut out = vec![9.0; spec.shape.numel()];
            source.read_tensor(&spec.name, &mut out).unwrap();
            assert!(
                out.iter().enumerate().all(|(n, &got)| got == value(&spec.name, n)),
                "{name} {}",
                spec.name
            );
        }
        assert!(source.read_tensor("h.1.ln_1.weight", &mut [0.0; 4]).is_err());
        assert!(source.read_tensor("ln_f.weight", &mut [0.0; 3]).is_err());
    }
}

#[test]
fn what_is_no_model_is_said() {
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path()).unwrap();
    let refusal = |name: &str| {
        let text = folder.path().join(name).display().to_string();
        ModelChoice::parse(&text).err().unwrap().to_string()
    };
    assert!(refusal("u16.bin").contains("kind of file is a token shard, expected weights"));
    assert!(refusal("checkpoint/state.safetensors").contains("without a config.json beside it"));
    assert!(refusal("gone.bin").ends_with("gone.bin: no such file or folder"));
    assert!(refusal("gone.toml").ends_with("gone.toml: no such file or folder"));
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    assert!(refusal("empty").contains("folder is without config.json, expected a run, a checkpoint or"));
    std::fs::write(folder.path().join("short"), [1, 2, 3]).unwrap();
    assert!(refusal("short").contains("kind of file is 3 bytes long"));
    std::fs::write(folder.path().join("text"), "some text here").unwrap();
    assert!(refusal("text").contains("kind of file is not known"));
    assert!(ModelChoice::parse("d99").err().unwrap().to_string().contains("unknown model `d99`"));
    assert_eq!(ModelChoice::parse("d12").unwrap().config().layers(), 12);
    for name in ModelConfig::names().flatten() {
        let config = ModelConfig::parse(name).unwrap();
        assert_eq!(ModelChoice::parse(name).unwrap().config(), config, "{name}");
    }
    let toml = folder.path().join("sizes.toml").display().to_string();
    assert_eq!(ModelChoice::parse(&toml).unwrap().config().width(), 4);
}

#[test]
fn weights_that_are_no_numbers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.bin");
    write_model(&path, &config(), &ModelOptions { elem: Elem::BF16, header: None }, |spec, out| {
        match spec.name.as_str() {
            "ln_f.bias" => out[3] = f32::INFINITY,
            "wpe.weight" => out[6] = f32::NAN,
            _ => {}
        }
        Ok(())
    })
    .unwrap();
    let text = open_weights(&path).unwrap().read_tensor("ln_f.bias", &mut [0.0; 4]).unwrap_err().to_string();
    assert!(text.ends_with("m.bin: ln_f.bias[3] is inf, expected a finite number"), "{text}");
    let text =
        open_weights(&path).unwrap().read_tensor("wpe.weight", &mut [0.0; 12]).unwrap_err().to_string();
    assert!(text.ends_with("m.bin: wpe.weight[1, 2] is NaN, expected a finite number"), "{text}");
}
