//! Headers, alignment, numbers, names and refusals. That another program reads the same is tested in `python/tests/test_gguf.py`.

use std::path::Path;

use ironhorse_core::{f16_to_f32, f32_to_f16};

use super::header::{ALIGNMENT, TensorInfo, Value, encode};
use super::numbers::{GgufType, quantize};
use super::sizes::rope_factors;
use super::tensors::{Content, Stored, pair_rows, tensors};
use super::*;
use crate::Result;
use crate::model::ModelConfig;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn the_head_is_laid_out_as_the_format_says() {
    let keys = [
        ("a".to_owned(), Value::U32(7)),
        ("bc".to_owned(), Value::Texts(vec!["x".into(), "".into()])),
        ("d".to_owned(), Value::Bool(true)),
    ];
    let tensor = |name: &str, dims: &[usize], kind| TensorInfo { name: name.into(), dims: dims.into(), kind };
    let infos = [tensor("t", &[3, 5], GgufType::F32), tensor("u", &[2, 64], GgufType::Q8_0)];
    let bytes = encode(&keys, &infos);
    assert_eq!(&bytes[..4], b"GGUF");
    assert_eq!((u32_at(&bytes, 4), u64_at(&bytes, 8), u64_at(&bytes, 16)), (3, 2, 3));
    let mut at = 24;
    assert_eq!((u64_at(&bytes, at), bytes[at + 8], u32_at(&bytes, at + 9)), (1, b'a', 4));
    assert_eq!(u32_at(&bytes, at + 13), 7);
    at += 17;
    // the key, 9 for an array, 8 for texts, their number, then each with its length
    assert_eq!((u64_at(&bytes, at), &bytes[at + 8..at + 10]), (2, &b"bc"[..]));
    assert_eq!((u32_at(&bytes, at + 10), u32_at(&bytes, at + 14), u64_at(&bytes, at + 18)), (9, 8, 2));
    assert_eq!((u64_at(&bytes, at + 26), bytes[at + 34], u64_at(&bytes, at + 35)), (1, b'x', 0));
    at += 43;
    assert_eq!((u32_at(&bytes, at + 9), bytes[at + 13]), (7, 1));
    at += 14;
    // the name, two dimensions, innermost first, the type, the place
    assert_eq!((u64_at(&bytes, at), bytes[at + 8], u32_at(&bytes, at + 9)), (1, b't', 2));
    assert_eq!((u64_at(&bytes, at + 13), u64_at(&bytes, at + 21)), (5, 3));
    assert_eq!((u32_at(&bytes, at + 29), u64_at(&bytes, at + 33)), (0, 0));
    at += 41;
    assert_eq!((u32_at(&bytes, at + 29), u64_at(&bytes, at + 33)), (8, 64)); // 60 bytes before it, padded
    at += 41;
    assert_eq!(bytes.len() as u64, (at as u64).next_multiple_of(ALIGNMENT));
    assert!(bytes[at..].iter().all(|&byte| byte == 0));
    assert_eq!((infos[1].bytes(), infos[1].padding()), (4 * 34, 24));
}

#[test]
fn blocks_are_rounded_half_away_from_zero() {
    let mut values = [0f32; 64];
    values[..5].copy_from_slice(&[127.0, -0.5, 0.5, 2.5, -126.5]); // scale 1
    let mut bytes = Vec::new();
    quantize(&values, &mut bytes);
    assert_eq!(bytes.len(), 68);
    assert_eq!(u16::from_le_bytes([bytes[0], bytes[1]]), f32_to_f16(1.0));
    assert_eq!(bytes[2..7].iter().map(|&byte| byte as i8).collect::<Vec<_>>(), [127, -1, 1, 3, -127]);
    assert!(bytes[7..].iter().all(|&byte| byte == 0), "a block of zeros has the scale 0");

    // half a step of the scale, and half an ulp of the scale itself in f16 for each of 127 steps
    let values: Vec<f32> = (0..256).map(|n| ((n * n * 37 + 11) % 1009) as f32 / 311.0 - 1.7).collect();
    let mut bytes = Vec::new();
    quantize(&values, &mut bytes);
    for (block, stored) in values.chunks(32).zip(bytes.chunks(34)) {
        let scale = f16_to_f32(u16::from_le_bytes([stored[0], stored[1]]));
        for (value, byte) in block.iter().zip(&stored[2..]) {
            let error = (value - scale * f32::from(*byte as i8)).abs();
            assert!(error <= scale * (0.5 + 127.0 / 2048.0) * 1.001, "{value} {error} {scale}");
        }
    }

    // what is too small for a scale in f16 becomes 0, not NaN
    let mut bytes = Vec::new();
    quantize(&[f32::from_bits(3); 32], &mut bytes);
    assert_eq!(bytes[..2], [0, 0]);
}

#[test]
fn halves_of_heads_become_pairs() {
    // two heads of four rows of two numbers
    let mut rows: Vec<f32> = (0..16).map(|n| n as f32).collect();
    pair_rows(&mut rows, 4, 2);
    let firsts: Vec<f32> = rows.chunks(2).map(|row| row[0] / 2.0).collect();
    assert_eq!(firsts, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
}

const MODELS: [&str; 7] = [
    "n_layer=2,n_head=2,n_embd=32,vocab=99,context=16",
    "kind=llama,C=32,L=2,NH=2,NKV=1,HD=16,F=64,V=99,maxT=16,rope_type=llama3,rope_factor=8,tied=true",
    "kind=mistral,C=32,L=2,NH=2,HD=16,F=64,V=99,maxT=16",
    "kind=moe,C=32,L=2,NH=2,HD=16,F=64,E=3,K=2,V=99,maxT=16",
    "kind=qwen2,C=32,L=2,NH=2,HD=16,F=64,V=99,maxT=16",
    "kind=qwen3,C=32,L=2,NH=2,HD=32,F=64,V=99,maxT=16",
    "kind=qwen3_moe,C=32,L=2,NH=2,HD=16,F=64,E=3,K=2,V=99,maxT=16",
];

fn stored(model: &str, kind: GgufType) -> Result<Vec<Stored>> {
    tensors(&ModelConfig::parse(model).unwrap(), kind, Path::new("m.gguf"))
}

#[test]
fn every_parameter_is_in_one_tensor() {
    for model in MODELS {
        let config = ModelConfig::parse(model).unwrap();
        let found = stored(model, GgufType::Q8_0).unwrap();
        let mut names: Vec<&str> = found.iter().map(|tensor| &*tensor.info.name).collect();
        let mut numel = 0;
        for Stored { info, content } in &found {
            let Content::Parameters { specs, paired } = content else { continue };
            numel += info.dims.iter().product::<usize>();
            let is_vector =
                info.dims.len() == 1 || info.name.contains("gate_inp") || info.name.contains("position");
            assert_eq!(info.kind, if is_vector { GgufType::F32 } else { GgufType::Q8_0 }, "{}", info.name);
            let turned = info.name.contains("attn_q.w") || info.name.contains("attn_k.w");
            let llama = ["llama", "mistral", "moe"].contains(&config.kind());
            assert_eq!(paired.is_some(), turned && llama, "{model}: {}", info.name);
            assert_eq!(specs.len(), if info.name.contains("_exps") { 3 } else { 1 });
        }
        let stored_params: usize =
            config.tensors().iter().map(|spec| config.unpadded_shape(spec).iter().product::<usize>()).sum();
        assert_eq!(numel, stored_params, "{model}");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), found.len());
    }
    let experts = stored(MODELS[3], GgufType::F16).unwrap();
    let down = experts.iter().find(|tensor| tensor.info.name == "blk.1.ffn_down_exps.weight").unwrap();
    assert_eq!(down.info.dims, [3, 32, 64]);
    let Content::Parameters { specs, .. } = &down.content else { panic!("constants") };
    assert_eq!(specs[2].name, "model.layers.1.block_sparse_moe.experts.2.w2.weight");
}

#[test]
fn scaled_frequencies_are_a_tensor_of_factors() {
    let factors = rope_factors(&ModelConfig::parse(MODELS[1]).unwrap()).unwrap();
    // base 10000, 8 pairs, original 8192: pair 4 turns 13 times, pair 6 1.3 times of 1 to 4, pair 7 0.4 times
    assert_eq!((factors.len(), &factors[..5], factors[7]), (8, &[1.0; 5][..], 8.0));
    assert!(factors[6] > 1.0 && factors[6] < 8.0, "{factors:?}");
    assert!(rope_factors(&ModelConfig::parse(MODELS[2]).unwrap()).is_none());
}

#[test]
fn a_window_shortens_the_context() {
    let config = |window: usize| {
        ModelConfig::parse(&format!("kind=mistral,C=32,L=1,NH=2,HD=16,F=64,V=99,maxT=64,window={window}"))
            .unwrap()
    };
    for (window, context) in [(0, 64), (24, 24), (64, 64)] {
        let keys = super::sizes::keys(&config(window));
        assert!(keys.contains(&("llama.context_length".into(), Value::U32(context))), "{window}");
        assert_eq!(note(&config(window)).is_some(), context < 64);
    }
}

#[test]
fn what_cannot_be_held_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let refusal = |model: &str, kind: GgufType, value: f32| {
        let config = ModelConfig::parse(model).unwrap();
        let options = GgufOptions { kind, name: "m".into(), tokenizer: Vec::new() };
        let error = write_gguf(&path, &config, &options, |_, out| {
            out.fill(value);
            Ok(())
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        error.unwrap_err().to_string().replace(&format!("{}: ", path.display()), "")
    };
    let odd = "kind=llama,C=48,L=1,NH=2,HD=16,F=64,V=99,maxT=16";
    assert_eq!(
        refusal(odd, GgufType::Q8_0, 0.0),
        "width of `token_embd.weight` is 48, expected a multiple of 32 for q8_0, or another type"
    );
    let relu2 = "n_layer=1,n_head=2,n_embd=32,vocab=99,act=relu2";
    assert_eq!(
        refusal(relu2, GgufType::F32, 0.0),
        "activation is relu2, expected gelu in a GGUF file of GPT-2"
    );
    let scaled = "kind=qwen2,C=32,L=1,NH=2,HD=16,F=64,V=99,maxT=16,rope_type=llama3,rope_factor=8";
    assert_eq!(
        refusal(scaled, GgufType::F32, 0.0),
        "rope_type is llama3, expected default or linear in a GGUF file of the family qwen2"
    );
    let wide = "kind=qwen2,C=32,L=1,NH=2,HD=32,F=64,V=99,maxT=16";
    assert_eq!(
        refusal(wide, GgufType::F32, 0.0),
        "head_dim is 32, expected 32 / 2 in a GGUF file of the family qwen2"
    );
    let gemma3 = "kind=gemma3_text,C=32,L=1,NH=2,HD=16,F=64,V=99,maxT=16";
    assert_eq!(
        refusal(gemma3, GgufType::F32, 0.0),
        "model of kind is gemma3_text, expected one that GGUF files are written of: gpt2, llama, mistral, moe, qwen2, qwen3 or \
         qwen3_moe"
    );
    assert_eq!(
        refusal(MODELS[0], GgufType::F16, -65520.0),
        "a weight of `token_embd.weight` is -65520, expected a magnitude below 65520, which f16 can hold"
    );
    assert!(refusal(MODELS[0], GgufType::Q8_0, 1e7).contains("which q8_0 can hold"));
    assert!(refusal(MODELS[0], GgufType::Bf16, f32::MAX).contains("which bf16 can hold"));
    assert!(refusal(MODELS[0], GgufType::F32, f32::NAN).contains("is NaN"));
}

#[test]
fn a_file_is_as_long_as_its_head_says_and_kinds_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    for model in MODELS {
        for kind in [GgufType::F32, GgufType::F16, GgufType::Bf16, GgufType::Q8_0] {
            let config = ModelConfig::parse(model).unwrap();
            let options = GgufOptions { kind, name: "m".into(), tokenizer: Vec::new() };
            write_gguf(&path, &config, &options, |_, out| {
                out.fill(1.0);
                Ok(())
            })
            .unwrap();
            let data: u64 = stored(model, kind)
                .unwrap()
                .iter()
                .map(|tensor| tensor.info.bytes().next_multiple_of(ALIGNMENT))
                .sum();
            let len = std::fs::metadata(&path).unwrap().len();
            assert!(len > data && (len - data).is_multiple_of(ALIGNMENT), "{model}: {len} {data}");
        }
    }
    let text = crate::format::open_weights(&path).err().unwrap().to_string();
    assert!(text.contains("kind of file is a GGUF file, which is written and not read"), "{text}");
}
