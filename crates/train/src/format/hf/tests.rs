use std::path::Path;

use super::*;
use crate::format::safetensors::{Dtype, Header, SafeTensors, TensorInfo, Writer};
use crate::format::{Elem, Sink, Source};
use crate::model::Gpt2Config;
use ironhorse_core::op::Act;

const CONFIG: ModelConfig = ModelConfig::Gpt2(Gpt2Config::new(3, 5, 2, 1, 4));
const F32: HfOptions = HfOptions::new(Elem::F32);

/// Small integers that bf16 represents exactly; 0 in the padding.
fn fill(spec: &TensorSpec, out: &mut [f32]) -> crate::Result<()> {
    let held = if spec.name == "wte.weight" { 5 * 4 } else { out.len() };
    (0..held).for_each(|n| out[n] = ((n * 7 + spec.name.len() * 13) % 251) as f32);
    Ok(())
}

#[test]
fn a_folder_round_trips() {
    let top = tempfile::tempdir().unwrap();
    for elem in [Elem::F32, Elem::BF16] {
        let folder = top.path().join("hf");
        write_hf(&folder, &CONFIG, &HfOptions { tokens: TextTokens::Eot(2), ..HfOptions::new(elem) }, fill)
            .unwrap();
        let mut hf = HfFolder::open(&folder).unwrap();
        assert_eq!(*hf.config(), CONFIG);
        for spec in CONFIG.tensors() {
            let (mut want, mut got) = (vec![0.0; spec.shape.numel()], vec![9.0; spec.shape.numel()]);
            fill(&spec, &mut want).unwrap();
            hf.read_tensor(&spec.name, &mut got).unwrap();
            assert_eq!(got, want, "{}", spec.name);
        }
        assert!(hf.read_tensor("h.9.ln_1.bias", &mut [0.0; 4]).is_err());
        assert!(hf.read_tensor("ln_f.bias", &mut [0.0; 5]).is_err());
    }
}

#[test]
fn linear_layers_are_stored_in_by_out() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("hf");
    write_hf(&folder, &CONFIG, &F32, fill).unwrap();
    let mut file = SafeTensors::open(&folder.join(HF_WEIGHTS)).unwrap();
    let name = "transformer.h.1.attn.c_attn.weight";
    assert_eq!(file.entry(name).unwrap().shape, [4, 12]);
    assert_eq!(file.entry("transformer.wte.weight").unwrap().shape, [5, 4]);
    assert_eq!(file.header().meta("format"), Some("pt"));
    let stored = file.read_f32_vec(name).unwrap();
    let spec = CONFIG.tensors().into_iter().find(|spec| name.ends_with(&spec.name)).unwrap();
    let mut ours = vec![0.0; 48];
    fill(&spec, &mut ours).unwrap();
    assert_eq!(stored[12 + 7], ours[7 * 4 + 1]); // in 1, out 7
}

/// A file of the bare model, with the buffers old files carry.
fn bare(change: impl FnOnce(&mut Vec<TensorInfo>)) -> crate::Result<HfFolder<std::io::Cursor<Vec<u8>>>> {
    let shapes = CONFIG.tensors();
    let mut infos: Vec<TensorInfo> = shapes
        .iter()
        .map(|spec| TensorInfo::new(&*spec.name, Dtype::F32, reader::stored_shape(&CONFIG, spec)))
        .collect();
    infos.push(TensorInfo::new("h.0.attn.bias", Dtype::U8, [1, 1, 4, 4]));
    infos.push(TensorInfo::new("h.0.attn.masked_bias", Dtype::F32, []));
    infos.push(TensorInfo::new("lm_head.weight", Dtype::F32, [5, 4]));
    change(&mut infos);
    let header = Header::build(&[], &infos).unwrap();
    let data = header.data_len() as usize;
    let mut bytes = Vec::new();
    let _ = Writer::new(&mut Sink::new(&mut bytes, Path::new("x")), header).unwrap();
    bytes.resize(bytes.len() + data, 0);
    HfFolder::new(Path::new("hf"), CONFIG, SafeTensors::new(Source::memory(bytes, "w")).unwrap())
}

#[test]
fn names_without_prefix_and_buffers_are_understood() {
    let mut hf = bare(|_| {}).unwrap();
    hf.read_tensor("h.1.mlp.c_proj.weight", &mut [0.0; 64]).unwrap();
    let refusal = |change: fn(&mut Vec<TensorInfo>)| bare(change).unwrap_err().to_string();
    assert_eq!(refusal(|infos| infos[0].shape[0] = 6), "w: shape of `wte.weight` is [6, 4], expected [5, 4]");
    assert_eq!(
        refusal(|infos| infos[1].name.push('s')),
        "w: tensor `wpe.weight` is missing, expected in the file"
    );
    assert_eq!(
        refusal(|infos| infos[1].dtype = Dtype::I32),
        "w: dtype of `wpe.weight` is I32, expected F32, BF16 or F16"
    );
    let adapter = refusal(|infos| infos.push(TensorInfo::new("adapter", Dtype::F32, [1])));
    assert_eq!(adapter, "w: tensor is `adapter`, expected only those of GPT2LMHeadModel");
    assert!(
        refusal(|infos| infos.truncate(20))
            .contains("number of tensors is 20, expected at least 12 for each of 2")
    );
}

#[test]
fn settings_we_do_not_compute_are_refused() {
    let parse = |change: fn(&mut serde_json::Value)| {
        let mut json = config_json(&CONFIG, Elem::F32, &TextTokens::Eot(4));
        change(&mut json);
        parse_config_json(json.to_string().as_bytes(), Path::new("c")).map_err(|error| error.to_string())
    };
    assert_eq!(parse(|_| {}).unwrap(), CONFIG);
    let refusal = |change| parse(change).unwrap_err();
    let known = |name: &&str| *name != "gelu"; // transformers calls it gelu_new
    let known: Vec<_> = Act::ALL.iter().map(|act| act.name()).filter(known).collect();
    let activation = refusal(|j| j["activation_function"] = "relu".into());
    assert!(
        activation.starts_with("c: activation_function is \"relu\", expected \"gelu_new\", "),
        "{activation}"
    );
    assert!(known.iter().all(|name| activation.contains(&format!(", {name:?}"))), "{activation}");
    assert!(activation.ends_with(" or \"gelu_pytorch_tanh\""), "{activation}");
    assert_eq!(
        refusal(|j| j["model_type"] = "bert".into()),
        "c: model_type is \"bert\", expected \"gpt2\", \"mixtral\", \"llama\", \"mistral\", \"qwen2\", \"qwen3\", \"qwen3_moe\" or \"gemma3_text\""
    );
    assert_eq!(
        refusal(|j| j["tie_word_embeddings"] = false.into()),
        "c: tie_word_embeddings is false, expected true"
    );
    assert_eq!(
        refusal(|j| j["layer_norm_epsilon"] = 1e-6.into()),
        "c: layer_norm_epsilon is 1e-6, expected 0.00001"
    );
    assert_eq!(refusal(|j| j["n_inner"] = 17.into()), "c: n_inner is 17, expected null or 16");
    assert_eq!(refusal(|j| j["n_layer"] = (-1).into()), "c: n_layer is -1, expected a whole number");
    assert_eq!(refusal(|j| j["n_head"] = 3.into()), "c: n_head is 3, expected a divisor of n_embd, 4");
    assert_eq!(
        refusal(|j| drop(j.as_object_mut().unwrap().remove("n_embd"))),
        "c: n_embd is missing, expected a whole number"
    );
    assert!(parse_config_json(b"[1]", Path::new("c")).is_err());
    let top = tempfile::tempdir().unwrap();
    assert!(
        write_hf(&top.path().join("h"), &CONFIG, &HfOptions { tokens: TextTokens::Eot(5), ..F32 }, fill)
            .is_err()
    );
    assert!(
        HfFolder::open(&top.path().join("none"))
            .unwrap_err()
            .to_string()
            .contains("config.json: cannot read")
    );
}

/// A mixture and a Llama in which all sizes differ.
fn mixtures() -> [ModelConfig; 2] {
    let sizes =
        "hidden=6,layers=2,heads=4,kv_heads=2,head_dim=8,ffn=5,vocab=9,context=7,rms_eps=2e-6,rope_alpha=3";
    ["kind=llama", "experts=3,top_k=2,aux_alpha=0.25"]
        .map(|more| ModelConfig::parse(&format!("{sizes},{more}")).unwrap())
}

#[test]
fn mixtures_round_trip_under_their_own_names() {
    let top = tempfile::tempdir().unwrap();
    for config in mixtures() {
        let folder = top.path().join(config.kind());
        let start = |name: &str| name.bytes().map(usize::from).sum::<usize>() % 1000;
        let fill = |spec: &TensorSpec, out: &mut [f32]| {
            let held: usize = config.unpadded_shape(spec).iter().product();
            out[..held].iter_mut().enumerate().for_each(|(n, value)| *value = (n + start(&spec.name)) as f32);
            Ok(())
        };
        write_hf(&folder, &config, &F32, fill).unwrap();
        let mut hf = HfFolder::open(&folder).unwrap();
        assert!(hf.config().computes_as(&config) && config.computes_as(hf.config()));
        for spec in config.tensors() {
            let [mut got, mut want] = [9.0, 0.0].map(|value| vec![value; spec.shape.numel()]);
            hf.read_tensor(&spec.name, &mut got).unwrap();
            fill(&spec, &mut want).unwrap();
            assert_eq!(got, want, "{}", spec.name);
        }
        let file = SafeTensors::open(&folder.join(HF_WEIGHTS)).unwrap();
        assert_eq!(file.entry("lm_head.weight").unwrap().shape, [9, 6]);
        assert_eq!(file.entry("model.layers.1.self_attn.k_proj.weight").unwrap().shape, [16, 6]);
        let tensor = hf.read_tensor("wte.weight", &mut []).unwrap_err().to_string();
        assert!(tensor.ends_with("ForCausalLM"), "{tensor}");
    }
}

#[test]
fn a_missing_expert_is_named() {
    let [_, config] = mixtures();
    let mut infos: Vec<_> = config
        .tensors()
        .iter()
        .map(|spec| TensorInfo::new(&*spec.name, Dtype::F32, reader::stored_shape(&config, spec)))
        .collect();
    let name = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
    infos.retain(|info| info.name != name);
    let mut bytes = Vec::new();
    let mut sink = Sink::new(&mut bytes, Path::new("w"));
    let mut writer = Writer::new(&mut sink, Header::build(&[], &infos).unwrap()).unwrap();
    for info in &infos {
        writer.put_f32(&info.name, &vec![0.0; info.shape.iter().product()]).unwrap();
    }
    writer.finish().unwrap();
    let file = SafeTensors::new(Source::memory(bytes, "w")).unwrap();
    let text = HfFolder::new(Path::new("hf"), config, file).unwrap_err().to_string();
    assert_eq!(text, format!("w: tensor `{name}` is missing, expected in the file"));
}

#[test]
fn settings_of_mixtures_that_we_do_not_compute_are_refused() {
    let [llama, mixtral] = mixtures();
    let parse = |config: &ModelConfig, change: fn(&mut serde_json::Value)| {
        let mut json = config_json(config, Elem::F32, &TextTokens::Eot(4));
        change(&mut json);
        parse_config_json(json.to_string().as_bytes(), Path::new("c")).map_err(|error| error.to_string())
    };
    for config in [&llama, &mixtral] {
        assert!(parse(config, |_| {}).unwrap().computes_as(config));
        let old = parse(config, |j| j["rope_parameters"] = serde_json::Value::Null).unwrap();
        assert!(old.computes_as(config), "as versions before 5 write it");
        let refusal = |change| parse(config, change).unwrap_err();
        assert_eq!(
            refusal(|j| j["hidden_act"] = "gelu".into()),
            "c: hidden_act is \"gelu\", expected \"silu\""
        );
        assert!(refusal(|j| j["rope_parameters"]["rope_type"] = "yarn".into()).contains(
            "rope_parameters.rope_type is \"yarn\", expected \"default\", \"linear\" or \"llama3\""
        ));
        assert!(
            refusal(|j| j["rope_parameters"] = 3.into()).contains("rope_parameters is 3, expected null or")
        );
        for (rope, says) in [
            (
                serde_json::json!({"type": "linear"}),
                "factor is missing, expected a number with the type \"linear\"",
            ),
            (
                serde_json::json!({"factor": 2.0}),
                "factor is 2.0, expected no such field with the type \"default\"",
            ),
            (
                serde_json::json!({"partial_rotary_factor": 0.5}),
                "partial_rotary_factor is 0.5, expected null or 1",
            ),
            (
                serde_json::json!({"full_attention": {}}),
                "full_attention is {}, expected no such field with the type \"default\"",
            ),
            (serde_json::json!({"rope_theta": "much"}), "rope_theta is \"much\", expected a number"),
        ] {
            for key in ["rope_parameters", "rope_scaling"] {
                let mut json = config_json(config, Elem::F32, &TextTokens::Eot(4));
                json[key] = rope.clone();
                let text = parse_config_json(json.to_string().as_bytes(), Path::new("c")).unwrap_err();
                assert_eq!(text.to_string(), format!("c: {key}.{says}"));
            }
        }
        assert!(
            refusal(|j| j["quantization_config"] = serde_json::json!({"bits": 4}))
                .contains("quantization_config is {")
        );
        assert!(
            refusal(|j| j["rms_norm_eps"] = "x".into()).contains("rms_norm_eps is \"x\", expected a number")
        );
        assert!(
            refusal(|j| j["num_key_value_heads"] = 3.into()).contains("a divisor of num_attention_heads, 4")
        );
        assert!(refusal(|j| j["num_attention_heads"] = 0.into()).contains("c: num_attention_heads is 0"));
        assert_eq!(
            refusal(|j| j["tie_word_embeddings"] = 3.into()),
            "c: tie_word_embeddings is 3, expected true or false"
        );
    }
    assert!(!parse(&mixtral, |j| j["sliding_window"] = 6.into()).unwrap().computes_as(&mixtral));
    assert!(parse(&mixtral, |j| j["sliding_window"] = 7.into()).unwrap().computes_as(&mixtral));
    let heads = |change| parse(&mixtral, change).unwrap();
    let ModelConfig::Moe(null) = heads(|j| j["num_key_value_heads"] = serde_json::Value::Null) else {
        panic!("a mixture")
    };
    assert_eq!(null.n_kv_head, 4);
    let absent = parse(&mixtral, |j| drop(j.as_object_mut().unwrap().remove("num_key_value_heads")));
    assert!(
        absent
            .unwrap_err()
            .contains("num_key_value_heads is 8, expected a divisor of num_attention_heads, 4")
    );
    assert!(
        parse(&mixtral, |j| j["num_experts_per_tok"] = 4.into())
            .unwrap_err()
            .ends_with("c: num_experts_per_tok is 4, expected from 1 to num_local_experts, 3")
    );
}

/// Names of the files, and their bytes.
fn files(folder: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

fn numbered(spec: &TensorSpec, out: &mut [f32]) -> crate::Result<()> {
    let start = spec.name.bytes().map(usize::from).sum::<usize>() % 1000;
    out.iter_mut().enumerate().for_each(|(n, value)| *value = ((n + start) % 251) as f32);
    Ok(())
}

/// A mixture in several files, of at most 400 bytes of weights each where a tensor is not larger.
fn sharded(folder: &Path, elem: Elem) -> ModelConfig {
    let [_, config] = mixtures();
    write_hf(folder, &config, &HfOptions { shard: 400, ..HfOptions::new(elem) }, numbered).unwrap();
    config
}

#[test]
fn several_files_hold_what_one_does() {
    let top = tempfile::tempdir().unwrap();
    for elem in [Elem::F32, Elem::BF16] {
        let folder = top.path().join("hf");
        let config = sharded(&folder, elem);
        let names: Vec<String> = files(&folder).into_keys().collect();
        let parts = names.len() - 2;
        assert!(parts > 5 && names.contains(&HF_INDEX.to_owned()) && !names.contains(&HF_WEIGHTS.to_owned()));
        assert_eq!(names[1], format!("model-00001-of-{parts:05}.safetensors"));
        let index: serde_json::Value = serde_json::from_slice(&files(&folder)[HF_INDEX]).unwrap();
        let numel: usize =
            config.tensors().iter().map(|s| config.unpadded_shape(s).iter().product::<usize>()).sum();
        assert_eq!(index["metadata"]["total_size"], numel * elem.size());
        assert_eq!(index["metadata"]["total_parameters"], numel);
        let mut hf = HfFolder::open(&folder).unwrap();
        for spec in config.tensors() {
            let [mut got, mut want] = [9.0, 0.0].map(|value| vec![value; spec.shape.numel()]);
            hf.read_tensor(&spec.name, &mut got).unwrap();
            numbered(&spec, &mut want).unwrap();
            let held: usize = config.unpadded_shape(&spec).iter().product();
            assert_eq!(got[..held], want[..held], "{}", spec.name);
        }
        for name in [&names[1], HF_INDEX] {
            let source = crate::format::open_weights(&folder.join(name)).unwrap();
            assert_eq!(source.path(), folder, "{name}");
        }
        // one file again replaces the many
        write_hf(&folder, &config, &HfOptions::new(elem), numbered).unwrap();
        assert_eq!(files(&folder).len(), 2);
    }
}

#[test]
fn a_failed_write_of_several_files_leaves_what_was_there() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("hf");
    let config = sharded(&folder, Elem::F32);
    let before = files(&folder);
    let mut left = 9;
    let failed = write_hf(&folder, &config, &HfOptions { shard: 100, ..F32 }, |_, _| {
        left -= 1;
        if left == 0 { Err(crate::Error::Unsupported("no more".into())) } else { Ok(()) }
    });
    assert!(failed.is_err());
    assert_eq!(files(&folder), before);
    assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 1, "nothing is left beside");
}

#[test]
fn what_is_wrong_with_several_files_is_named() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("hf");
    let config = sharded(&folder, Elem::F32);
    let good = files(&folder);
    let [first, second] = [1, 2].map(|n| good.keys().nth(n).unwrap().clone());
    let refusal = |change: &dyn Fn()| {
        change();
        let text = HfFolder::open(&folder).unwrap_err().to_string();
        for (name, bytes) in &good {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
        HfFolder::open(&folder).unwrap();
        text.replace(folder.to_str().unwrap(), "hf")
    };
    let index = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = serde_json::from_slice(&good[HF_INDEX]).unwrap();
        change(&mut json);
        std::fs::write(folder.join(HF_INDEX), json.to_string()).unwrap();
    };
    let table = config.tensors();
    let name = &table[0].name;
    let missing = refusal(&|| std::fs::remove_file(folder.join(&second)).unwrap());
    assert!(
        missing.starts_with(&format!("hf/{second}: file is missing, expected in the folder")),
        "{missing}"
    );
    let elsewhere = refusal(&|| index(&|j| j["weight_map"][name] = second.clone().into()));
    assert!(elsewhere.contains(&format!("tensor `{name}` is in this file, but {HF_INDEX} says {second}")));
    let unknown = refusal(&|| index(&|j| drop(j["weight_map"].as_object_mut().unwrap().remove(name))));
    assert!(unknown.contains(&format!("tensor `{name}` is in this file, but {HF_INDEX} says nowhere")));
    let promised = refusal(&|| index(&|j| j["weight_map"]["more"] = first.clone().into()));
    assert!(promised.contains(&format!("tensor `more` is missing, expected in {first}")), "{promised}");
    let other = refusal(&|| index(&|j| j["weight_map"]["more"] = "other.safetensors".into()));
    assert!(other.starts_with("hf/other.safetensors: file is missing"), "{other}");
    let twice = refusal(&|| std::fs::write(folder.join(&second), &good[&first]).unwrap());
    assert!(
        twice.contains(&format!("{second}: tensor `{name}` is also in hf/{first}, expected in one")),
        "{twice}"
    );
    let short = refusal(&|| std::fs::write(folder.join(&first), &good[&first][..80]).unwrap());
    assert!(short.starts_with(&format!("hf/{first}: ")), "{short}");
    let lost = refusal(&|| std::fs::remove_file(folder.join(HF_INDEX)).unwrap());
    assert!(lost.starts_with(&format!("hf/{HF_INDEX}: file is missing, expected in the folder")), "{lost}");
    assert!(lost.ends_with(&format!("because {first} is there")), "{lost}");
    // an expert that is nowhere, neither in the files nor in the index
    let expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
    let gone = refusal(&|| {
        let json: serde_json::Value = serde_json::from_slice(&good[HF_INDEX]).unwrap();
        let path = folder.join(json["weight_map"][expert].as_str().unwrap());
        let mut file = SafeTensors::open(&path).unwrap();
        let kept: Vec<_> = file.header().entries().iter().filter(|e| e.name != expert).cloned().collect();
        let infos: Vec<_> =
            kept.iter().map(|e| TensorInfo::new(&*e.name, e.dtype, e.shape.clone())).collect();
        let mut bytes = Vec::new();
        let mut sink = Sink::new(&mut bytes, &path);
        let mut writer = Writer::new(&mut sink, Header::build(&[], &infos).unwrap()).unwrap();
        kept.iter().for_each(|entry| file.copy_tensor(&entry.name, &mut writer).unwrap());
        writer.finish().unwrap();
        std::fs::write(&path, bytes).unwrap();
        index(&|j| drop(j["weight_map"].as_object_mut().unwrap().remove(expert)));
    });
    assert_eq!(gone, format!("hf: tensor `{expert}` is missing, expected in one of its files"));
}
