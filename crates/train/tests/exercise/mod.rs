//! Reads everything in the given bytes with each reader and writes it again. Shared by the mutation test and the fuzz
//! targets. Each function returns whether the bytes were accepted, and panics if a reader is inconsistent.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use ironhorse_train::eval::{PromptForm, read_questions};
use ironhorse_train::format::answer_key::AnswerKey;
use ironhorse_train::format::checkpoint::TrainerJson;
use ironhorse_train::format::debug_state::{DebugState, DebugStateParts, write_debug_state_to};
use ironhorse_train::format::hf::{HfFolder, parse_config_json, parse_index};
use ironhorse_train::format::llmc_model::{ModelFile, ModelOptions, write_model_to};
use ironhorse_train::format::multiple_choice::{self, Example};
use ironhorse_train::format::peft::AdapterFolder;
use ironhorse_train::format::safetensors::SafeTensors;
use ironhorse_train::format::shards::ShardReader;
use ironhorse_train::format::tokenizer::Tokenizer;
use ironhorse_train::format::{Elem, Sink, Source};
use ironhorse_train::model::{Gpt2Config, Lora, ModelConfig, Targets};
use ironhorse_train::{Error, Result};

/// The sizes of every small model below.
pub const CONFIG: Gpt2Config = Gpt2Config::new(4, 5, 1, 2, 2);

const NAME: &str = "mutated";

/// Checks that an error is about the content, in one line that names the file.
fn refused(error: Error) -> bool {
    let text = error.to_string();
    assert!(text.lines().count() == 1, "more than one line: {text}");
    assert!(text.len() < 1500, "too long: {text}");
    assert!(
        matches!(
            error,
            Error::Field { .. } | Error::Input { .. } | Error::Unknown { .. } | Error::InFile { .. }
        ),
        "not about content: {text}"
    );
    false
}

fn source(bytes: &[u8]) -> Source<std::io::Cursor<Vec<u8>>> {
    Source::memory(bytes.to_vec(), NAME)
}

fn rewritten(write: impl FnOnce(&mut Sink<'_>) -> Result<()>) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut Sink::new(&mut bytes, Path::new(NAME))).expect("what was read can be written");
    bytes
}

pub fn model(bytes: &[u8]) -> bool {
    let mut model = match ModelFile::new(source(bytes)) {
        Ok(model) => model,
        Err(error) => return refused(error),
    };
    let (mut count, mut nan) = (0, false);
    for spec in model.config().tensors() {
        let mut values = vec![0.0; spec.shape.numel()];
        model.read_tensor(&spec.name, &mut values).expect("an accepted file can be read");
        count += values.len();
        nan |= values.iter().any(|value| value.is_nan());
    }
    let (config, elem) = (*model.config(), model.elem());
    assert_eq!(count, config.num_params());
    let options = ModelOptions { elem, header: Some(model.header().clone()) };
    let again = rewritten(|sink| {
        write_model_to(sink, &config, &options, |spec, out| model.read_tensor(&spec.name, out))
    });
    // converting to bf16 makes NaN quiet, which is the only change a copy may have
    assert!(again == bytes || (nan && elem == Elem::BF16), "the copy differs");
    true
}

pub fn debug_state(bytes: &[u8]) -> bool {
    let mut state = match DebugState::new(source(bytes), &CONFIG) {
        Ok(state) => state,
        Err(error) => return refused(error),
    };
    let (x, y, loss) = (state.x().unwrap(), state.y().unwrap(), state.loss().unwrap());
    let mut logits = vec![0.0; state.num_logits()];
    state.read_logits(0, &mut logits).unwrap();
    let header = state.header().clone();
    let parts = DebugStateParts {
        config: &CONFIG,
        batch: state.batch(),
        seq: state.seq(),
        x: &x,
        y: &y,
        logits: &logits,
        loss,
        header: Some(&header),
    };
    let again =
        rewritten(|sink| write_debug_state_to(sink, &parts, |spec, out| state.read_grad(&spec.name, out)));
    assert!(again == bytes, "the copy differs");
    true
}

pub fn tokenizer(bytes: &[u8]) -> bool {
    let tokenizer = match Tokenizer::read(&mut source(bytes)) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return refused(error),
    };
    let ids: Vec<u32> = (0..tokenizer.vocab_size() as u32).collect();
    let text = tokenizer.decode(&ids).unwrap();
    if let Ok(ids) = tokenizer.encode(&text) {
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
    let again = rewritten(|sink| tokenizer.write_to(sink));
    // the unnamed fields are not kept
    assert!(again[..16] == bytes[..16] && again[1024..] == bytes[1024..], "the copy differs");
    true
}

pub fn shard(bytes: &[u8]) -> bool {
    let mut shard = match ShardReader::new(source(bytes)) {
        Ok(shard) => shard,
        Err(error) => return refused(error),
    };
    let mut all = vec![0; shard.num_tokens()];
    shard.read_at(0, &mut all).unwrap();
    let mut last = [0];
    shard.read_at(all.len() - 1, &mut last).unwrap();
    assert_eq!(all.last(), last.last());
    assert!(shard.read_at(all.len(), &mut last).is_err());
    true
}

/// Checks questions that were accepted, or that the error is about the content.
fn examples(read: Result<Vec<Example>>) -> bool {
    let examples = match read {
        Ok(examples) => examples,
        Err(error) => return refused(error),
    };
    for Example { choices, label } in examples {
        assert!(choices.len() >= 2 && label < choices.len(), "no such choice");
        assert!(
            choices.iter().all(|choice| (1..choice.tokens.len()).contains(&choice.from)),
            "nothing to grade"
        );
    }
    true
}

pub fn multiple_choice(bytes: &[u8]) -> bool {
    examples(multiple_choice::read(&mut source(bytes)))
}

/// Questions as JSON lines, in both forms.
pub fn questions(bytes: &[u8]) -> bool {
    let encode = |text: &str| Ok(text.bytes().map(u32::from).collect());
    let read = |form| read_questions(bytes, Path::new(NAME), (form, 0), &encode);
    let [plain, harness] = [PromptForm::Plain, PromptForm::Harness].map(|form| examples(read(form)));
    plain && harness
}

pub fn safetensors(bytes: &[u8]) -> bool {
    let mut file = match SafeTensors::new(source(bytes)) {
        Ok(file) => file,
        Err(error) => return refused(error),
    };
    let names: Vec<String> = file.header().entries().iter().map(|entry| entry.name.clone()).collect();
    for name in names {
        let numel = file.entry(&name).unwrap().numel();
        if let Ok(values) = file.read_f32_vec(&name) {
            assert_eq!(values.len(), numel);
        }
        if let Ok(values) = file.read_i32(&name) {
            assert_eq!(values.len(), numel);
        }
        file.crc32(&name).unwrap();
    }
    assert!(rewritten(|sink| file.copy_to(sink)) == bytes, "the copy differs");
    true
}

pub fn answer_key(bytes: &[u8]) -> bool {
    let mut key = match SafeTensors::new(source(bytes)).and_then(AnswerKey::new) {
        Ok(key) => key,
        Err(error) => return refused(error),
    };
    assert_eq!(key.x().unwrap().len(), key.batch() * key.seq());
    for spec in key.tensors() {
        let mut out = vec![0.0; spec.shape.numel()];
        key.read_tensor(&spec.name, &mut out).unwrap();
        key.read_into(&format!("grad.{}", spec.name), &mut out).unwrap();
    }
    for name in key.acts().to_vec() {
        key.read(&format!("act.{name}")).unwrap();
    }
    assert_eq!(key.read("loss").unwrap().len(), 1);
    key.crc_mismatches().unwrap();
    true
}

pub fn hf_weights(bytes: &[u8]) -> bool {
    let folder =
        SafeTensors::new(source(bytes)).and_then(|file| HfFolder::new(Path::new(NAME), CONFIG, file));
    let mut folder = match folder {
        Ok(folder) => folder,
        Err(error) => return refused(error),
    };
    for spec in CONFIG.tensors() {
        let mut out = vec![0.0; spec.shape.numel()];
        folder.read_tensor(&spec.name, &mut out).unwrap();
    }
    true
}

pub fn hf_config(bytes: &[u8]) -> bool {
    match parse_config_json(bytes, Path::new(NAME)) {
        Ok(config) => config.validate().is_ok() || panic!("accepted but not valid"),
        Err(error) => refused(error),
    }
}

pub fn hf_index(bytes: &[u8]) -> bool {
    match parse_index(bytes, Path::new(NAME)) {
        Ok(places) => {
            places.values().all(|file| Path::new(file).components().count() == 1) || panic!("elsewhere")
        }
        Err(error) => refused(error),
    }
}

/// Settings of an adapter of PEFT whose experts are modules of their own.
pub const ADAPTER: &str = r#"{"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2, "lora_alpha": 3,
"target_modules": ["q_proj", "w2"], "bias": "none", "use_rslora": false, "lora_dropout": 0.1}"#;

/// Settings of one whose experts are stacked, with a rank of their own.
pub const STACKED_ADAPTER: &str = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 3, "target_modules": ["q_proj"],
"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
"rank_pattern": {".*\\.gate_up_proj": 2}, "alpha_pattern": {".*\\.gate_up_proj": 4}}"#;

/// The model that both are for.
fn adapted() -> ModelConfig {
    ModelConfig::parse("kind=moe,C=4,L=1,NH=2,NKV=1,HD=2,E=2,K=1,F=3,V=11,maxT=16").unwrap()
}

/// The tensors of one of these adapters, as a safetensors file.
pub fn adapter_tensors(stacked: bool) -> Vec<u8> {
    let (rank, targets) = if stacked { (1, "q") } else { (2, "q,down") };
    let lora = Lora { rank, alpha: 3.0, targets: Targets::parse(targets).unwrap() };
    let table = lora.tensors(&adapted());
    let mut tensors: Vec<(String, [usize; 2])> =
        table.into_iter().map(|spec| (spec.name, [spec.shape.rows(), spec.shape.cols()])).collect();
    if stacked {
        let parts = [
            (".base_layer.lora_A", [4, 4]),
            (".base_layer.lora_B", [6, 4]),
            (".lora_A", [2, 3]),
            (".lora_B", [4, 2]),
        ];
        tensors
            .extend(parts.map(|(part, shape)| (format!("model.layers.0.mlp.experts{part}.weight"), shape)));
    }
    let (mut header, mut end) = (r#"{"__metadata__":{"format":"pt"}"#.to_owned(), 0);
    for (name, [rows, cols]) in tensors {
        let start = end;
        end += 4 * rows * cols;
        header += &format!(
            r#","base_model.model.{name}":{{"dtype":"F32","shape":[{rows},{cols}],"data_offsets":[{start},{end}]}}"#
        );
    }
    header.push('}');
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + end, 7);
    bytes
}

/// Opens an adapter for the model above and reads all of it.
fn adapter_of(settings: &[u8], tensors: &[u8]) -> bool {
    let config = adapted();
    let read = || -> Result<()> {
        let file = SafeTensors::new(source(tensors))?;
        let mut adapter = AdapterFolder::new(Path::new(NAME), settings, file)?;
        adapter.check(&config)?;
        for spec in adapter.lora().tensors(&config) {
            // numbers that are not finite are refused only here
            adapter.read_tensor(&spec.name, &mut vec![0.0; spec.shape.numel()])?;
        }
        Ok(())
    };
    read().map_or_else(refused, |()| true)
}

/// `adapter_model.safetensors` beside settings that are sound.
pub fn adapter(bytes: &[u8]) -> bool {
    [ADAPTER, STACKED_ADAPTER].map(|settings| adapter_of(settings.as_bytes(), bytes)).contains(&true)
}

/// `adapter_config.json` beside tensors that are sound.
pub fn adapter_config(bytes: &[u8]) -> bool {
    [false, true].map(|stacked| adapter_of(bytes, &adapter_tensors(stacked))).contains(&true)
}

pub fn trainer_json(bytes: &[u8]) -> bool {
    match TrainerJson::parse(bytes, Path::new(NAME)) {
        Ok(trainer) => trainer.config.validate().is_ok() || panic!("accepted but not valid"),
        Err(error) => refused(error),
    }
}

/// All three ways to write sizes.
pub fn sizes(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let parsers: [fn(&str) -> Result<ModelConfig>; 3] =
        [ModelConfig::from_toml, ModelConfig::parse, ModelConfig::from_json];
    let accepted = parsers.map(|parse| match parse(&text) {
        Ok(config) => {
            config.validate().expect("accepted, so valid");
            assert_eq!(ModelConfig::from_json(&config.to_json().to_string()).unwrap(), config);
            assert_eq!(ModelConfig::parse(&config.to_line()).unwrap(), config);
            true
        }
        Err(error) => refused(error),
    });
    accepted.contains(&true)
}
