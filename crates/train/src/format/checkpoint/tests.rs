use std::path::Path;

use ironhorse_core::{DType, Precision, f32_to_bf16, join_master};
use serde_json::json;

use super::*;
use crate::format::hf::HF_WEIGHTS;
use crate::format::tokenizer::{TOKENIZER, Tokenizer};
use crate::generate::codec::Codec;
use crate::model::{Gpt2Config, ModelConfig};
use crate::{Error, Result};

const CONFIG: ModelConfig =
    ModelConfig::Gpt2(Gpt2Config { padded_vocab_size: 257, ..Gpt2Config::new(3, 256, 1, 1, 2) });

const PRECISIONS: [Precision; 4] = [
    Precision::F32,
    Precision::BF16,
    Precision::BF16_F32_GRADS.with_residual(),
    Precision::BF16.with_residual().with_bf16_moments(),
];

/// Bytes that are different in every tensor; rows beyond the vocabulary are 0.
fn bytes_of(precision: Precision, pool: Pool, spec: &TensorSpec) -> Vec<u8> {
    let held = if spec.name == "wte.weight" { 512 } else { spec.shape.numel() };
    let start = pool.index() + spec.name.len();
    let value = |n: usize| if n < held { (n + start) as f32 } else { 0.0 };
    let values = (0..spec.shape.numel()).map(value);
    match precision.of(pool) {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::BF16 => values.flat_map(|value| f32_to_bf16(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| (-37 * value as i16).to_le_bytes()).collect(),
    }
}

fn read(precision: Precision) -> impl Fn(Pool, usize, &mut Vec<u8>) -> Result<()> {
    move |pool, index, bytes| {
        *bytes = bytes_of(precision, pool, &CONFIG.tensors()[index]);
        Ok(())
    }
}

fn state() -> TrainerState {
    TrainerState {
        step: 42,
        data: json!({"shard": 1, "position": u64::MAX}),
        rng: json!([1, 2]),
        best: Some(Best { step: 40, val_loss: 0.1 }),
        validated: Some(Best { step: 42, val_loss: 0.2 }),
        bad_in_a_row: 2,
        rolled_back_from: Some(39),
        scale_bits: vec![0x3f80_0000, 0x0000_0001],
        settings: json!({"lr": 0.1 + 0.2}),
    }
}

fn write(folder: &Path, trainer: &TrainerState) -> Result<Written> {
    let tokenizer = Tokenizer::bytes().kept().unwrap();
    let parts = CheckpointParts {
        tokenizer: Some(&tokenizer),
        ..CheckpointParts::new(&CONFIG, Precision::F32, trainer)
    };
    write_checkpoint(folder, &parts, read(Precision::F32))
}

#[test]
fn a_checkpoint_round_trips_and_is_replaced() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("step_42");
    write(&folder, &TrainerState::default()).unwrap();
    assert_eq!(write(&folder, &state()).unwrap().non_finite, Vec::<String>::new());
    let mut checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(checkpoint.trainer(), &state());
    assert_eq!(checkpoint.config(), &CONFIG);
    assert_eq!(checkpoint.tokenizer_files().unwrap(), Tokenizer::bytes().kept().unwrap().files);
    let mut bytes = Vec::new();
    for spec in CONFIG.tensors() {
        let mut values = vec![9.0; spec.shape.numel()];
        checkpoint.read_tensor(&spec.name, &mut values).unwrap();
        let stored: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(stored, bytes_of(Precision::F32, Pool::Params, &spec), "{}", spec.name);
        for pool in CheckpointParts::pools(Precision::F32) {
            checkpoint.read_pool(pool, &spec, &mut bytes).unwrap();
            assert_eq!(bytes, bytes_of(Precision::F32, pool, &spec), "{pool:?} {}", spec.name);
        }
    }
    assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 1);
}

#[test]
fn every_pool_comes_back_byte_for_byte_in_files_of_any_size() {
    let top = tempfile::tempdir().unwrap();
    for (number, precision) in PRECISIONS.into_iter().enumerate() {
        for part_bytes in [PART_BYTES, 1000, 1] {
            let folder = top.path().join(format!("{number}-{part_bytes}"));
            let state = state();
            let parts = CheckpointParts { part_bytes, ..CheckpointParts::new(&CONFIG, precision, &state) };
            let written = write_checkpoint(&folder, &parts, read(precision)).unwrap();
            let mut checkpoint = Checkpoint::open(&folder).unwrap();
            assert_eq!(checkpoint.precision().unwrap(), precision);
            let sizes = |name: &str| std::fs::metadata(folder.join(name)).unwrap().len();
            let manifest = Checkpoint::manifest(&folder).unwrap();
            assert_eq!(manifest.bytes.keys().map(|name| sizes(name)).sum::<u64>(), written.bytes);
            assert_eq!(manifest.bytes.len() > 5, part_bytes < PART_BYTES);
            let mut bytes = Vec::new();
            for spec in CONFIG.tensors() {
                for pool in CheckpointParts::pools(precision) {
                    checkpoint.read_pool(pool, &spec, &mut bytes).unwrap();
                    assert_eq!(
                        bytes,
                        bytes_of(precision, pool, &spec),
                        "{precision:?} {pool:?} {}",
                        spec.name
                    );
                    // a rank reads what it has of it
                    let (size, count) = (precision.of(pool).size(), spec.shape.numel());
                    for elements in [0..1, count / 3..count / 2, count - 1..count] {
                        let part = bytes[elements.start * size..elements.end * size].to_vec();
                        let mut read = Vec::new();
                        checkpoint.read_part(pool, &spec, elements, &mut read).unwrap();
                        assert_eq!(read, part, "{precision:?} {pool:?} {}", spec.name);
                    }
                }
            }
        }
    }
}

/// What each of so many processes writes: whole tensors of the weights, a range of every other one.
fn shares_of(precision: Precision, world: usize) -> Vec<Vec<Share>> {
    let mut all = vec![Vec::new(); world];
    for pool in CheckpointParts::pools(precision) {
        for (index, spec) in CONFIG.tensors().iter().enumerate() {
            let count = spec.shape.numel();
            if pool == Pool::Params {
                all[index % world].push(Share { pool, index, elements: 0..count });
                continue;
            }
            for (rank, shares) in all.iter_mut().enumerate() {
                let elements = count * rank / world..count * (rank + 1) / world;
                shares.push(Share { pool, index, elements });
            }
        }
    }
    all
}

fn write_shares(
    layout: &SharedLayout,
    at: &Path,
    parts: &CheckpointParts<'_>,
    shares: &[Share],
) -> Result<Report> {
    let bytes = |share: &Share| {
        let size = parts.precision.of(share.pool).size();
        let all = bytes_of(parts.precision, share.pool, &CONFIG.tensors()[share.index]);
        all[share.elements.start * size..share.elements.end * size].to_vec()
    };
    layout.write(at, parts, shares, |number| Ok(bytes(&shares[number]).into()))
}

fn contents(folder: &Path) -> Vec<(std::ffi::OsString, Vec<u8>)> {
    let files = std::fs::read_dir(folder).unwrap().flatten();
    let mut all: Vec<_> = files.map(|file| (file.file_name(), std::fs::read(file.path()).unwrap())).collect();
    all.sort();
    all
}

#[test]
fn processes_that_write_together_write_what_one_writes() {
    let (top, state) = (tempfile::tempdir().unwrap(), state());
    let tokenizer = Tokenizer::bytes().kept().unwrap();
    for (number, precision) in PRECISIONS.into_iter().enumerate() {
        for (part_bytes, world) in [(PART_BYTES, 1), (PART_BYTES, 3), (1000, 2), (1, 4)] {
            let name = format!("{number}-{part_bytes}-{world}");
            let [one, many] = ["one", "many"].map(|who| top.path().join(format!("{name}-{who}")));
            let parts = CheckpointParts {
                part_bytes,
                tokenizer: Some(&tokenizer),
                ..CheckpointParts::new(&CONFIG, precision, &state)
            };
            let expected = write_checkpoint(&one, &parts, read(precision)).unwrap();
            let layout = SharedLayout::new(&parts).unwrap();
            let folder = layout.begin(&many).unwrap();
            let shares = shares_of(precision, world);
            let write = |shares: &Vec<Share>| write_shares(&layout, folder.at(), &parts, shares).unwrap();
            // in any order
            let reports: Vec<Report> = shares.iter().rev().map(write).collect();
            assert!(!many.exists());
            assert_eq!(layout.finish(folder, &parts, &reports).unwrap(), expected);
            assert!(contents(&one) == contents(&many), "{name}");
            Checkpoint::open(&many).unwrap();
        }
    }
}

/// A process that does not report leaves the checkpoint that was there.
#[test]
fn what_not_all_have_written_is_no_checkpoint() {
    let (top, state) = (tempfile::tempdir().unwrap(), state());
    let folder = top.path().join("step");
    write(&folder, &TrainerState::default()).unwrap();
    let before = contents(&folder);
    let parts = CheckpointParts::new(&CONFIG, Precision::F32, &state);
    let layout = SharedLayout::new(&parts).unwrap();
    let shares = shares_of(Precision::F32, 2);
    for (reporting, twice) in
        [(&shares[..1], false), (&shares[1..], false), (&shares[..], true), (&[], false)]
    {
        let new = layout.begin(&folder).unwrap();
        let write = |shares: &Vec<Share>| write_shares(&layout, new.at(), &parts, shares).unwrap();
        let mut reports: Vec<Report> = reporting.iter().map(write).collect();
        reports.extend(twice.then(|| reports[0].clone()));
        let error = layout.finish(new, &parts, &reports).unwrap_err().to_string();
        assert!(error.contains("each byte once"), "{error}");
        assert!(contents(&folder) == before);
    }
    assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 1, "nothing else is left");
    // memory that ends too early
    let new = layout.begin(&folder).unwrap();
    let error =
        layout.write(new.at(), &parts, &shares[0], |_| Ok(vec![0; 100].into())).unwrap_err().to_string();
    assert!(error.contains("the copy of the state has 100 bytes of"), "{error}");
}

#[test]
fn weights_are_read_from_the_master() {
    let top = tempfile::tempdir().unwrap();
    let state = state();
    for precision in PRECISIONS.into_iter().skip(1) {
        let folder = top.path().join(format!("{}-{}", precision.master, precision.moments));
        write_checkpoint(&folder, &CheckpointParts::new(&CONFIG, precision, &state), read(precision))
            .unwrap();
        let mut checkpoint = Checkpoint::open_weights(&folder).unwrap();
        for spec in CONFIG.tensors() {
            let (weights, master) =
                (bytes_of(precision, Pool::Params, &spec), bytes_of(precision, Pool::Master, &spec));
            let want: Vec<f32> = match precision.has_residual() {
                false => master.as_chunks().0.iter().map(|&cell| f32::from_le_bytes(cell)).collect(),
                true => std::iter::zip(weights.as_chunks().0, master.as_chunks().0)
                    .map(|(&w, &m)| join_master(u16::from_le_bytes(w), i16::from_le_bytes(m)))
                    .collect(),
            };
            let mut got = vec![9.0; want.len()];
            checkpoint.read_tensor(&spec.name, &mut got).unwrap();
            assert_eq!(got, want, "{precision:?} {}", spec.name);
            // the optimizer's state is not opened
            assert!(checkpoint.read_pool(Pool::Moment1, &spec, &mut Vec::new()).is_err());
        }
    }
}

#[test]
fn numbers_that_are_not_finite_are_named_and_kept() {
    let top = tempfile::tempdir().unwrap();
    let state = state();
    let parts = CheckpointParts::new(&CONFIG, Precision::F32, &state);
    let written = write_checkpoint(&top.path().join("c"), &parts, |pool, index, bytes| {
        read(Precision::F32)(pool, index, bytes)?;
        if pool == Pool::Moment2 && index == 3 {
            bytes[4..8].copy_from_slice(&f32::INFINITY.to_le_bytes());
        }
        Ok(())
    });
    assert_eq!(written.unwrap().non_finite, [format!("v.{}", CONFIG.tensors()[3].name)]);
    Checkpoint::open(&top.path().join("c")).unwrap();
}

#[test]
fn a_checkpoint_of_a_mixture_keeps_what_config_json_cannot_say() {
    let top = tempfile::tempdir().unwrap();
    let config = ModelConfig::parse(
        "hidden=6,layers=1,heads=2,head_dim=4,ffn=5,vocab=9,context=7,experts=3,top_k=1,rope_alpha=2.5",
    )
    .unwrap();
    let state = state();
    let parts = CheckpointParts::new(&config, Precision::F32, &state);
    let table = config.tensors();
    let zeros = |_, index: usize, bytes: &mut Vec<u8>| {
        *bytes = vec![0; 4 * table[index].shape.numel()];
        Ok(())
    };
    write_checkpoint(&top.path().join("c"), &parts, zeros).unwrap();
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
    let other = TrainerState::default();
    let parts = CheckpointParts::new(&CONFIG, Precision::F32, &other);
    let failed = write_checkpoint(&folder, &parts, |pool, index, bytes| match pool {
        Pool::Moment2 => Err(Error::Unsupported("device lost".into())),
        _ => read(Precision::F32)(pool, index, bytes),
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
    for file in [HF_WEIGHTS, HF_CONFIG, "state.safetensors", TOKENIZER] {
        let text = refusal(file, |bytes| *bytes.last_mut().unwrap() ^= 1);
        assert!(text.contains(file) && text.contains("crc32 is"), "{text}");
    }
    assert!(refusal(TRAINER, |bytes| bytes.truncate(20)).contains("trainer.json: content is not valid"));
    assert!(refusal(TRAINER, |bytes| bytes.clear()).contains("trainer.json: content is not valid"));
    let version = |bytes: &mut Vec<u8>| {
        *bytes = String::from_utf8(std::mem::take(bytes))
            .unwrap()
            .replace("\"version\": 2", "\"version\": 9")
            .into();
    };
    assert!(refusal(TRAINER, version).contains("version is 9, expected 1 to 2"));
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

#[test]
fn what_is_whole_counts_and_not_what_a_name_says() {
    let run = tempfile::tempdir().unwrap();
    let at = |name: &str| run.path().join(CHECKPOINTS).join(name);
    std::fs::create_dir(run.path().join(CHECKPOINTS)).unwrap();
    for step in [5, 20, 100, 1_000_000] {
        write(&at(&step_name(step)), &TrainerState { step, ..state() }).unwrap();
    }
    std::fs::create_dir(at("step-000200")).unwrap(); // no manifest
    write(&at(".step-000300.tmp-0"), &state()).unwrap();
    write(&at("step-x"), &state()).unwrap();
    let steps = || checkpoints_of(run.path()).into_iter().map(|(step, _)| step).collect::<Vec<_>>();
    assert_eq!(steps(), [1_000_000, 100, 20, 5]);
    std::fs::write(at("step-1000000").join("state.safetensors"), "torn").unwrap();
    let mut flipped = std::fs::read(at("step-000100").join("model.safetensors")).unwrap();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(at("step-000100").join("model.safetensors"), flipped).unwrap();
    let mut passed_over = 0;
    let latest = open_latest(run.path(), Checkpoint::open, |_| passed_over += 1).unwrap().unwrap();
    assert_eq!((latest.trainer().step, passed_over), (20, 2));
    assert!(
        Checkpoint::manifest(&at("step-1000000")).unwrap_err().to_string().contains("file size is 4 bytes")
    );
    // only its state is torn
    assert_eq!(Checkpoint::of_run(run.path()).unwrap().trainer().step, 1_000_000);
    let empty = tempfile::tempdir().unwrap();
    assert!(Checkpoint::of_run(empty.path()).unwrap_err().to_string().contains("without a checkpoint"));
}

#[test]
fn the_best_checkpoint_is_the_best_that_was_saved() {
    let top = tempfile::tempdir().unwrap();
    std::fs::create_dir(top.path().join(CHECKPOINTS)).unwrap();
    let at = |step: u64| top.path().join(CHECKPOINTS).join(step_name(step));
    let save = |step: u64, best: (u64, f32), own: Option<f32>| {
        let best = Some(Best { step: best.0, val_loss: best.1 });
        let validated = own.map(|val_loss| Best { step, val_loss });
        write(&at(step), &TrainerState { step, best, validated, ..state() }).unwrap();
    };
    save(11, (11, 3.1), None); // of an earlier version
    assert_eq!(best_checkpoint(top.path()).unwrap().0.step, 11);
    save(66, (60, 1.4), None); // its own loss is not known
    assert_eq!(best_checkpoint(top.path()).unwrap().0.step, 11);
    save(117, (60, 1.4), Some(1.5));
    let (best, path) = best_checkpoint(top.path()).unwrap();
    assert_eq!((best, path), (Best { step: 117, val_loss: 1.5 }, at(117)));
}
