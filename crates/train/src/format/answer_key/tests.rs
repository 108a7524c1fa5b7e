use std::path::{Path, PathBuf};

use super::*;
use crate::Result;
use crate::format::safetensors::{Header, SafeTensors, TensorInfo, Writer};
use crate::format::{Sink, Source};
use crate::model::{Gpt2Config, ModelConfig};

const CONFIG: ModelConfig = ModelConfig::Gpt2(Gpt2Config::new(4, 5, 1, 1, 2));
const X: [i32; 6] = [0, 1, 2, 3, 4, 0];
const Y: [i32; 6] = [1, 2, 3, 4, 0, 1];

fn optimizer() -> KeyOptimizer {
    KeyOptimizer {
        name: "adamw".into(),
        lr: 1e-4,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        steps: 3,
        decay: "matrices".into(),
    }
}

fn fill(name: &str, out: &mut [f32]) -> Result<()> {
    out.iter_mut().enumerate().for_each(|(n, value)| *value = (n + name.len()) as f32);
    Ok(())
}

fn write(folder: &Path) -> PathBuf {
    let path = folder.join("small.key.safetensors");
    let acts = [("emb".to_owned(), vec![2, 3, 2]), ("h.0.ln_1".to_owned(), vec![2, 3, 2])];
    let spec = AnswerKeySpec {
        config: CONFIG,
        batch: 2,
        seq: 3,
        x: &X,
        y: &Y,
        dtype: "f32",
        seed: 7,
        acts: &acts,
        with_dacts: true,
        optimizer: Some(optimizer()),
        extra: &[
            ("torch".into(), "none".into()),
            ("torch_error".into(), r#"{"losses":1e-7}"#.into()),
            ("torch_error_bf16".into(), r#"{"losses":1e-3}"#.into()),
        ],
    };
    write_answer_key(&path, &spec, fill).unwrap();
    path
}

#[test]
fn a_key_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path());
    let mut key = AnswerKey::open(&path).unwrap();
    assert_eq!((key.batch(), key.seq(), *key.config()), (2, 3, CONFIG));
    assert_eq!(key.acts(), ["emb", "h.0.ln_1"]);
    assert_eq!(key.optimizer(), Some(&optimizer()));
    assert_eq!(key.meta().seed, Some(7));
    assert_eq!(key.meta().torch_error["losses"], 1e-7);
    assert_eq!(key.meta().torch_error_bf16["losses"], 1e-3);
    assert_eq!((key.x().unwrap(), key.y().unwrap()), (X.to_vec(), Y.to_vec()));
    assert!(key.has("dact.emb") && !key.has("dact.nothing"));
    assert_eq!(key.read("losses").unwrap(), [6.0, 7.0, 8.0]);
    assert_eq!(key.read("loss").unwrap(), [4.0]);
    assert_eq!(key.read("param.wte.weight").unwrap().len(), 10);
    let mut padded = [9.0; 256];
    key.read_tensor("wte.weight", &mut padded).unwrap();
    assert_eq!(padded[9], 16.0 + 9.0);
    assert!(padded[10..].iter().all(|&value| value == 0.0));
    key.read_into("grad.wte.weight", &mut padded).unwrap();
    key.read_into("after.wte.weight", &mut padded[..10]).unwrap();
    assert!(key.read_into("after.wte.weight", &mut padded[..11]).is_err());
    assert!(key.read_tensor("wte.weight", &mut padded[..10]).is_err());
    assert!(key.read("act.none").unwrap_err().to_string().contains("tensor `act.none` is missing"));
    assert_eq!(key.crc_mismatches().unwrap(), Vec::<String>::new());
}

#[test]
fn a_copy_is_byte_identical_and_damage_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path());
    let copy = folder.path().join("copy");
    AnswerKey::open(&path).unwrap().copy(&copy).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    assert!(bytes == std::fs::read(&copy).unwrap());
    *bytes.last_mut().unwrap() ^= 1; // the last number of after.ln_f.bias
    let mut key = AnswerKey::new(SafeTensors::new(Source::memory(bytes, "k")).unwrap()).unwrap();
    assert_eq!(key.crc_mismatches().unwrap(), ["after.ln_f.bias"]);
}

type Pairs = Vec<(String, String)>;

/// The key with another header; its data are zeros.
fn refusal(change: impl FnOnce(&mut Pairs, &mut Vec<TensorInfo>)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let key = AnswerKey::open(&write(folder.path())).unwrap();
    let header = key.file().header();
    let mut pairs = header.metadata().to_vec();
    let mut infos: Vec<_> =
        header.entries().iter().map(|e| TensorInfo::new(&*e.name, e.dtype, e.shape.clone())).collect();
    change(&mut pairs, &mut infos);
    let header = Header::build(&pairs, &infos).unwrap();
    let data = header.data_len() as usize;
    let mut bytes = Vec::new();
    let _ = Writer::new(&mut Sink::new(&mut bytes, Path::new("x")), header).unwrap();
    bytes.resize(bytes.len() + data, 0);
    AnswerKey::new(SafeTensors::new(Source::memory(bytes, "k")).unwrap()).unwrap_err().to_string()
}

fn set(pairs: &mut Pairs, key: &str, value: &str) {
    pairs.iter_mut().find(|pair| pair.0 == key).unwrap().1 = value.into();
}

#[test]
fn broken_metadata_is_named() {
    assert_eq!(
        refusal(|p, _| p.clear()),
        "k: metadata `format` is missing, expected \"ironhorse-answer-key\""
    );
    assert_eq!(refusal(|p, _| set(p, "version", "2")), "k: metadata `version` is \"2\", expected \"1\"");
    assert_eq!(
        refusal(|p, _| set(p, "model", "bert")),
        "k: metadata `model` is \"bert\", expected \"gpt2\", \"moe\", \"llama\", \"mistral\", \
         \"qwen2\", \"qwen3\", \"qwen3_moe\" or \"gemma3_text\""
    );
    assert!(refusal(|p, _| set(p, "model", "moe")).contains("expected sizes of a mixture of experts"));
    assert!(refusal(|p, _| set(p, "config", "{\"n_layer\":1}")).contains("n_head|heads|NH is missing"));
    assert!(refusal(|p, _| set(p, "config", "3")).contains("metadata `config` is wrong"));
    assert!(
        refusal(|p, _| set(p, "seed", "x")).contains("metadata `seed` is \"x\", expected a whole number")
    );
    assert!(refusal(|p, _| set(p, "acts", "[1]")).contains("metadata `acts` is not valid"));
    assert!(refusal(|p, _| set(p, "acts", "[\"none\"]")).contains("tensor `act.none` is missing"));
    assert!(refusal(|p, _| set(p, "optimizer", "{}")).contains("metadata `optimizer` is not valid"));
    assert!(refusal(|p, _| set(p, "crc32", r#"{"a":1}"#)).contains("tensor `a` is missing"));
    assert!(
        refusal(|p, _| p.retain(|pair| pair.0 != "optimizer")).contains("metadata `optimizer` is missing")
    );
    let many = r#"{"n_layer":1024,"n_head":1,"n_embd":2,"vocab_size":5,"max_seq_len":4}"#;
    assert!(refusal(|p, _| set(p, "config", many)).contains("expected at least 24 for each of 1024 layers"));
    let steps = serde_json::to_string(&KeyOptimizer { steps: 4, ..optimizer() }).unwrap();
    assert_eq!(refusal(|p, _| set(p, "optimizer", &steps)), "k: shape of `losses` is [3], expected [4]");
    let sgd = serde_json::to_string(&KeyOptimizer { name: "sgd".into(), ..optimizer() }).unwrap();
    assert_eq!(
        refusal(|p, _| set(p, "optimizer", &sgd)),
        "k: optimizer `name` is \"sgd\", expected \"adamw\" or \"muon\""
    );
}

#[test]
fn wrong_tensors_are_named() {
    let index = |infos: &[TensorInfo], name: &str| infos.iter().position(|info| info.name == name).unwrap();
    let reshape = |name: &'static str, shape: &'static [usize]| {
        refusal(move |_, infos| {
            let at = index(infos, name);
            infos[at].shape = shape.to_vec();
        })
    };
    assert_eq!(reshape("x", &[6]), "k: shape of `x` is [6], expected [B, T] with T from 1 to max_seq_len, 4");
    assert!(reshape("x", &[1, 5]).starts_with("k: shape of `x` is [1, 5]"));
    assert_eq!(reshape("y", &[3, 2]), "k: shape of `y` is [3, 2], expected [2, 3]");
    assert_eq!(reshape("logits", &[2, 3, 128]), "k: shape of `logits` is [2, 3, 128], expected [2, 3, 5]");
    assert_eq!(reshape("loss", &[2]), "k: shape of `loss` is [2], expected [1]");
    assert_eq!(reshape("dact.emb", &[3]), "k: shape of `dact.emb` is [3], expected [2, 3, 2]");
    assert_eq!(
        reshape("param.wte.weight", &[128, 2]),
        "k: shape of `param.wte.weight` is [128, 2], expected [5, 2]"
    );
    let gone = refusal(|_, infos| drop(infos.remove(index(infos, "grad.ln_f.bias"))));
    assert_eq!(gone, "k: tensor `grad.ln_f.bias` is missing, expected in the file");
    let typed = refusal(|_, infos| infos[0].dtype = crate::format::safetensors::Dtype::F32);
    assert_eq!(typed, "k: dtype of `x` is F32, expected I32");
}
