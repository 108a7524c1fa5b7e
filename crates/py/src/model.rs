//! Descriptions of models: names, sizes, `config.json` and parameter tables, all read and written by `ironhorse::train`.
//! Sizes cross the border as JSON objects; what is wrong with them is a `ConfigError`.

use crate::error;
use ironhorse::train::Error;
use ironhorse::train::format::Elem;
use ironhorse::train::format::hf::{TextTokens, config_json, parse_config_json};
use ironhorse::train::model::{ModelConfig, Notation};
use pyo3::prelude::*;
use std::path::Path;

/// A parameter: its name, its shape without padding, and whether weight decay applies.
type Tensor = (String, Vec<usize>, bool);

fn raise(py: Python<'_>, error: &Error) -> PyErr {
    error::named(py, "ConfigError", &error.to_string())
}

fn notation(name: &str) -> Result<Notation, Error> {
    match name {
        "line" => Ok(Notation::Line),
        "toml" => Ok(Notation::Toml),
        "json" => Ok(Notation::Json),
        _ => Err(Error::unknown("notation", name, "line, toml or json")),
    }
}

/// A model's kind, and its sizes as a JSON object.
pub type Described = (&'static str, String);

/// A description under its kind.
pub fn told(config: &ModelConfig) -> Described {
    (config.kind(), config.to_json().to_string())
}

/// The kind and the sizes that a text describes. With a `kind` only models of its family are accepted.
#[pyfunction]
#[pyo3(signature = (text, notation, kind=None, /))]
pub fn model_read(py: Python<'_>, text: &str, notation: &str, kind: Option<&str>) -> PyResult<Described> {
    let config = self::notation(notation).and_then(|notation| ModelConfig::from_text(text, notation, kind));
    config.map(|config| told(&config)).map_err(|error| raise(py, &error))
}

/// The kind and the sizes in a Hugging Face `config.json`; errors name it as `path`.
#[pyfunction]
#[pyo3(signature = (text, path, /))]
pub fn model_read_hf(py: Python<'_>, text: &str, path: &str) -> PyResult<Described> {
    let config = parse_config_json(text.as_bytes(), Path::new(path));
    config.map(|config| told(&config)).map_err(|error| raise(py, &error))
}

fn config_of(py: Python<'_>, kind: &str, sizes: &str) -> PyResult<ModelConfig> {
    ModelConfig::from_text(sizes, Notation::Json, Some(kind)).map_err(|error| raise(py, &error))
}

/// The `config.json` of a model; `dtype` is F32, BF16 or F16. `tokens` are `bos_token_id` and `eos_token_id` as the
/// `config.json` of another says them; without it both are the last of the vocabulary.
#[pyfunction]
#[pyo3(signature = (kind, sizes, dtype, tokens=None, /))]
pub fn model_write_hf(
    py: Python<'_>,
    kind: &str,
    sizes: &str,
    dtype: &str,
    tokens: Option<&str>,
) -> PyResult<String> {
    let elem = match dtype {
        "F32" => Elem::F32,
        "BF16" => Elem::BF16,
        "F16" => Elem::F16,
        _ => return Err(raise(py, &Error::unknown("dtype", dtype, "F32, BF16 or F16"))),
    };
    let config = config_of(py, kind, sizes)?;
    let tokens = tokens.map_or(TextTokens::Last, |text| TextTokens::parse(text.as_bytes()));
    Ok(format!("{:#}\n", config_json(&config, elem, &tokens)))
}

/// The parameter table in model order.
#[pyfunction]
#[pyo3(signature = (kind, sizes, /))]
pub fn model_tensors(py: Python<'_>, kind: &str, sizes: &str) -> PyResult<Vec<Tensor>> {
    let config = config_of(py, kind, sizes)?;
    let row = |spec: ironhorse::train::model::TensorSpec| {
        let shape = config.unpadded_shape(&spec);
        (spec.name, shape, spec.decay)
    };
    Ok(config.tensors().into_iter().map(row).collect())
}

/// How many parameters there are, and how many of them a token uses: all except the experts it is not sent to; without padding.
#[pyfunction]
#[pyo3(signature = (kind, sizes, /))]
pub fn model_params(py: Python<'_>, kind: &str, sizes: &str) -> PyResult<(usize, usize)> {
    let config = config_of(py, kind, sizes)?;
    let padding = match config {
        ModelConfig::Gpt2(gpt2) => (gpt2.padded_vocab_size - gpt2.vocab_size) * gpt2.n_embd,
        ModelConfig::Moe(_) => 0,
    };
    let total = config.told_params() - padding;
    Ok((total, config.active_params().unwrap_or(total)))
}

/// The named models: all names of each, its kind and its sizes.
#[pyfunction]
pub fn model_names(py: Python<'_>) -> PyResult<Vec<(Vec<&'static str>, &'static str, String)>> {
    let named = |names: &[&'static str]| {
        let config = ModelConfig::parse(names[0]).map_err(|error| raise(py, &error))?;
        let (kind, sizes) = told(&config);
        Ok((names.to_vec(), kind, sizes))
    };
    ModelConfig::names().map(named).collect()
}

/// The keys of a description of this kind, each with its other spellings after it.
#[pyfunction]
#[pyo3(signature = (kind, /))]
pub fn model_keys(kind: &str) -> Vec<Vec<&'static str>> {
    ModelConfig::keys(kind).into_iter().map(<[_]>::to_vec).collect()
}
