//! `config.json`: the sizes of a model, and the settings for which our arithmetic equals that of `transformers`. Each
//! model family is one file next to this one.

use std::path::Path;

use serde_json::{Map, Value};

use super::family::Family;
use super::gemma3::Gemma3;
use super::metadata::METADATA;
use super::mistral::Mistral;
use super::qwen::{Qwen2, Qwen3, Qwen3Moe};
use super::{TextTokens, gpt2::Gpt2, llama::Llama, mixtral::Mixtral, without_bom};
use crate::error::one_of;
use crate::format::{Elem, parse_json};
use crate::model::ModelConfig;
use crate::model::describe::{Described, Filling};
use crate::{Error, Result};

/// The file's name in the folder.
pub const HF_CONFIG: &str = "config.json";

/// A [`Family`] as a value.
struct Entry {
    model_type: &'static str,
    architecture: &'static str,
    read: fn(&Map<String, Value>, &Path) -> Result<ModelConfig>,
    /// `None` for a model of another family.
    write: fn(&ModelConfig) -> Option<Value>,
    /// Whether the value of a key follows from our configuration.
    decides: fn(&str) -> bool,
}

impl Entry {
    const fn of<F: Family>() -> Self {
        let (model_type, architecture) = (F::MODEL_TYPE, F::ARCHITECTURE);
        Self { model_type, architecture, read: read::<F>, write: write::<F>, decides: decides::<F> }
    }
}

const FAMILIES: [Entry; 8] = [
    Entry::of::<Gpt2>(),
    Entry::of::<Mixtral>(),
    Entry::of::<Llama>(),
    Entry::of::<Mistral>(),
    Entry::of::<Qwen2>(),
    Entry::of::<Qwen3>(),
    Entry::of::<Qwen3Moe>(),
    Entry::of::<Gemma3>(),
];

/// Keys that every file has and that are written from our configuration or from the weights.
const WRITTEN: [&str; 7] =
    ["architectures", "model_type", "torch_dtype", "dtype", "rope_theta", "rope_scaling", "rope_parameters"];

/// The value of `architectures` for such a model.
pub(super) fn architecture(config: &ModelConfig) -> &'static str {
    FAMILIES.iter().find(|family| (family.write)(config).is_some()).map_or("", |family| family.architecture)
}

/// Reads the sizes, and rejects settings for which transformers computes something different from us.
pub fn parse_config_json(bytes: &[u8], path: &Path) -> Result<ModelConfig> {
    let wrong = |what: String| Error::field(path, "content", format!("not valid ({what})"), "a JSON object");
    let map = match parse_json(without_bom(bytes)).map_err(|error| wrong(error.to_string()))? {
        Value::Object(map) => map,
        other => return Err(wrong(format!("it begins with {:.1}", other.to_string()))),
    };
    let family = match map.get("model_type") {
        // old files of GPT-2 have no model_type, but only GPT-2 has this size
        None if map.contains_key("n_embd") => FAMILIES.first(),
        kind => FAMILIES.iter().find(|family| kind.is_some_and(|kind| kind == family.model_type)),
    };
    let Some(family) = family else {
        let found = map.get("model_type").map_or("missing".into(), Value::to_string);
        let known = FAMILIES.iter().map(|family| format!("{:?}", family.model_type));
        return Err(Error::field(path, "model_type", found, one_of(known)));
    };
    (family.read)(&map, path)
}

/// Rejects keys that we neither obey nor know to be harmless: they may change what transformers computes.
fn check_known<F: Family>(map: &Map<String, Value>, path: &Path) -> Result<()> {
    let settings = F::settings();
    let known = |key: &str| {
        WRITTEN.contains(&key)
            || METADATA.contains(&key)
            || F::READ.contains(&key)
            || settings.iter().any(|(name, _)| *name == key)
            || F::Config::FIELDS.iter().any(|field| F::keys(field).contains(&key))
    };
    match map.iter().find(|(key, _)| !known(key)) {
        None => Ok(()),
        Some((key, value)) => {
            let kind = F::MODEL_TYPE;
            let expected =
                format!("no such field in a {kind}; remove it if it changes nothing that is computed");
            Err(Error::field(path, key.as_str(), value, expected))
        }
    }
}

/// Whether a key's value follows from our configuration.
fn decides<F: Family>(key: &str) -> bool {
    WRITTEN.contains(&key) || F::Config::FIELDS.iter().any(|field| F::keys(field).contains(&key))
}

fn read<F: Family>(map: &Map<String, Value>, path: &Path) -> Result<ModelConfig> {
    check_known::<F>(map, path)?;
    for (key, allowed) in F::settings() {
        if let Some(value) = map.get(key).filter(|value| !allowed.contains(value)) {
            return Err(Error::field(path, key, value, one_of(allowed)));
        }
    }
    let mut map = map.clone();
    F::prepare(&mut map, path)?;
    let mut filling = Filling::<F::Config>::new();
    filling.set_kind(F::KIND);
    let mut names = Vec::new();
    for (at, field) in F::Config::FIELDS.iter().enumerate() {
        let (ours, theirs) = (field.names, F::keys(field));
        if theirs.is_empty() {
            continue;
        }
        let key = *theirs.iter().find(|key| map.contains_key(**key)).unwrap_or(&theirs[0]);
        let value = map.get(key);
        let value = value.ok_or_else(|| Error::field(path, key, "missing", (field.expected)()))?;
        filling.set(at, key, &value.into()).map_err(|error| error.in_file(path))?;
        for other in theirs {
            if let Some(found) = map.get(*other).filter(|found| *found != value) {
                return Err(Error::field(path, *other, found, format!("{value}, as {key} says")));
            }
        }
        names.push((ours[0], key));
    }
    let mut config = filling.finish().map_err(|error| in_words_of_the_file(error, &names).in_file(path))?;
    F::finish(&map, &mut config, path)?;
    Ok(config.into())
}

/// An error about our fields, with the keys of the file instead; `names` are pairs of both.
fn in_words_of_the_file(error: Error, names: &[(&str, &str)]) -> Error {
    let Error::Input { field, found, expected } = error else { return error };
    let theirs = |word: &str| {
        let found = names.iter().find(|(ours, _)| *ours == word);
        found.map_or(word, |(_, theirs)| theirs).to_owned()
    };
    let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let expected: String = expected
        .split_inclusive(|c: char| !in_name(c))
        .map(|part| {
            let word = part.trim_end_matches(|c: char| !in_name(c));
            format!("{}{}", theirs(word), &part[word.len()..])
        })
        .collect();
    Error::Input { field: theirs(&field), found, expected }
}

fn write<F: Family>(config: &ModelConfig) -> Option<Value> {
    let config = F::of(config)?;
    let mut json = F::template(config);
    let map = json.as_object_mut()?;
    map.insert("architectures".into(), vec![F::ARCHITECTURE].into());
    map.insert("model_type".into(), F::MODEL_TYPE.into());
    for field in F::Config::FIELDS {
        for key in F::keys(field) {
            if let Some(value) = map.get_mut(*key).filter(|value| value.is_null()) {
                *value = (field.get)(config);
            }
        }
    }
    Some(json)
}

/// The `config.json` of a model with these sizes.
pub fn config_json(config: &ModelConfig, elem: Elem, tokens: &TextTokens) -> Value {
    let families = FAMILIES.iter();
    let found = families.filter_map(|family| Some((family, (family.write)(config)?))).next();
    let Some((family, mut json)) = found else { return Value::Null }; // every model has a family
    json["torch_dtype"] = match elem {
        Elem::F32 => "float32",
        Elem::BF16 => "bfloat16",
        Elem::F16 => "float16",
    }
    .into();
    tokens.put(&mut json, config.vocab_size(), |key| (family.decides)(key));
    json
}
