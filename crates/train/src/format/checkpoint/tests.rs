use serde_json::json;

use super::*;
use crate::model::Gpt2Config;

const CONFIG: ModelConfig = ModelConfig::Gpt2(Gpt2Config {
    max_seq_len: 3,
    vocab_size: 256,
    padded_vocab_size: 257,
    n_layer: 1,
    n_head: 1,
    n_embd: 2,
});

fn fill(part: Part, spec: &TensorSpec, out: &mut [f32]) -> Result<()> {
    let held = if spec.name == "wte.weight" { 512 } else { out.len() };
    let start = part.name(spec).len();
    (0..held).for_each(|n| out[n] = (n + start) as f32);
    Ok(())
}

fn state() -> TrainerState {
    TrainerState {
        step: 42,
        data: json!({"shard": 1, "position": u64::MAX}),
        rng: json!([1, 2]),
        settings: json!({"lr": 0.1 + 0.2}),
    }
}

fn write(folder: &Path, trainer: &TrainerState) -> Result<()> {
    let tokenizer = Tokenizer::bytes();
    let parts = CheckpointParts { config: &CONFIG, elem: Elem::F32, trainer, tokenizer: Some(&tokenizer) };
    write_checkpoint(folder, &parts, fill)
}

#[test]
fn a_checkpoint_round_trips_and_is_replaced() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("step_42");
    write(&folder, &TrainerState::default()).unwrap();
    write(&folder, &state()).unwrap();
    let mut checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(checkpoint.trainer(), &state());
    assert_eq!(checkpoint.config(), &CONFIG);
    assert_eq!(checkpoint.tokenizer(), Some(&Tokenizer::bytes()));
    for spec in CONFIG.tensors() {
        for part in [Part::Weight, Part::M, Part::V] {
            let (mut want, mut got) = (vec![0.0; spec.shape.numel()], vec![9.0; spec.shape.numel()]);
            fill(part, &spec, &mut want).unwrap();
            checkpoint.read_part(part, &spec, &mut got).unwrap();
            assert_eq!(got, want, "{part:?} {}", spec.name);
        }
    }
    assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 1);
}

#[test]
fn a_checkpoint_of_a_mixture_keeps_what_config_json_cannot_say() {
    let top = tempfile::tempdir().unwrap();
    let config = ModelConfig::parse(
        "hidden=6,layers=1,heads=2,head_dim=4,ffn=5,vocab=9,context=7,experts=3,top_k=1,rope_alpha=2.5",
    )
    .unwrap();
    let parts = CheckpointParts { config: &config, elem: Elem::F32, trainer: &state(), tokenizer: None };
    write_checkpoint(&top.path().join("c"), &parts, |_, _, _| Ok(())).unwrap();
    let mut checkpoint = Checkpoint::open(&top.path().join("c")).unwrap();
    assert_eq!(checkpoint.config(), &config);
    let mut values = vec![1.0; 128 * 6];
    checkpoint.read_tensor("lm_head.weight", &mut values).unwrap();
    assert!(values.iter().all(|&value| value == 0.0));
}

#[test]
fn a_failed_write_leaves_the_earlier_one() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("last");
    write(&folder, &state()).unwrap();
    let parts = CheckpointParts {
        config: &CONFIG,
        elem: Elem::F32,
        trainer: &TrainerState::default(),
        tokenizer: None,
    };
    let failed = write_checkpoint(&folder, &parts, |part, spec, out| {
        if part == Part::V { Err(Error::Config("device lost".into())) } else { fill(part, spec, out) }
    });
    assert_eq!(failed.unwrap_err().to_string(), "device lost");
    assert_eq!(Checkpoint::open(&folder).unwrap().trainer().step, 42);
    assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 1);
}

#[test]
fn damage_is_named() {
    let top = tempfile::tempdir().unwrap();
    let refusal = |file: &str, change: fn(&mut Vec<u8>)| {
        let folder = top.path().join("c");
        write(&folder, &state()).unwrap();
        let mut bytes = std::fs::read(folder.join(file)).unwrap();
        change(&mut bytes);
        std::fs::write(folder.join(file), bytes).unwrap();
        Checkpoint::open(&folder).unwrap_err().to_string()
    };
    for file in [HF_WEIGHTS, HF_CONFIG, STATE, TOKENIZER] {
        let text = refusal(file, |bytes| *bytes.last_mut().unwrap() ^= 1);
        assert!(text.contains(file) && text.contains("crc32 is"), "{text}");
    }
    assert!(refusal(TRAINER, |bytes| bytes.truncate(20)).contains("trainer.json: content is not valid"));
    assert!(refusal(TRAINER, |bytes| bytes.clear()).contains("trainer.json: content is not valid"));
    let version = |bytes: &mut Vec<u8>| {
        *bytes = String::from_utf8(std::mem::take(bytes))
            .unwrap()
            .replace("\"version\": 1", "\"version\": 9")
            .into();
    };
    assert!(refusal(TRAINER, version).contains("version is 9, expected 1"));
    let vocabulary = |bytes: &mut Vec<u8>| {
        *bytes = String::from_utf8(std::mem::take(bytes))
            .unwrap()
            .replace("\"max_seq_len\": 3", "\"max_seq_len\": 4")
            .into();
    };
    assert!(refusal(TRAINER, vocabulary).contains("expected that of config.json"));
    let outside = |bytes: &mut Vec<u8>| {
        *bytes = String::from_utf8(std::mem::take(bytes))
            .unwrap()
            .replace("\"crc32\": {", "\"crc32\": {\"../x\": 1,")
            .into();
    };
    assert!(refusal(TRAINER, outside).contains("crc32 is of \"../x\""));
    let folder = top.path().join("c");
    std::fs::remove_file(folder.join(TRAINER)).unwrap();
    assert!(Checkpoint::open(&folder).unwrap_err().to_string().contains("trainer.json: cannot read"));
}
