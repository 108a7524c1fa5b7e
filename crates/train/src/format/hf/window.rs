//! The window of attention in a `config.json`: how many keys a query reaches at most, and in which layers.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::model::MoeConfig;
use crate::model::describe::MAX_SIZE;
use crate::{Error, Result};

/// The key of the window.
pub(super) const WINDOW: &str = "sliding_window";
/// The key of Qwen's switch: its files have a window even where it is not used.
pub(super) const USED: &str = "use_sliding_window";
/// The key of Qwen's first layer with the window.
pub(super) const FROM: &str = "max_window_layers";
/// The key of a word for each layer, which decides where it is there.
pub(super) const LAYERS: &str = "layer_types";

/// The word of a layer that reaches all keys.
pub(super) const FULL: &str = "full_attention";
/// The word of a layer with the window.
pub(super) const SLIDING: &str = "sliding_attention";

/// Takes over a window that all layers have.
pub(super) fn of_all_layers(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
    config.window = size(map, path)?;
    Ok(())
}

/// Takes over a window that layers have from one of them on.
pub(super) fn of_last_layers(map: &Map<String, Value>, config: &mut MoeConfig, path: &Path) -> Result<()> {
    let window = size(map, path)?;
    let from = match map.get(LAYERS).filter(|layers| !layers.is_null()) {
        Some(layers) => by_words(layers, config.n_layer, window > 0, path)?,
        None if window == 0 => config.n_layer,
        None => match map.get(FROM) {
            None => 28, // what transformers takes
            Some(from) => number(from).ok_or_else(|| Error::field(path, FROM, from, "a whole number"))?,
        },
    };
    if from < config.n_layer {
        (config.window, config.window_from) = (window, from);
    }
    Ok(())
}

/// The window of a file; 0 where it has none.
fn size(map: &Map<String, Value>, path: &Path) -> Result<usize> {
    match map.get(USED) {
        None | Some(Value::Bool(true)) => {}
        Some(Value::Bool(false)) => return Ok(0),
        Some(used) => return Err(Error::field(path, USED, used, "true or false")),
    }
    let Some(window) = map.get(WINDOW).filter(|window| !window.is_null()) else { return Ok(0) };
    number(window)
        .filter(|size| (1..=MAX_SIZE).contains(size))
        .ok_or_else(|| Error::field(path, WINDOW, window, format!("null or from 1 to {MAX_SIZE}")))
}

/// The window of a file that must have one.
pub(super) fn needed(map: &Map<String, Value>, path: &Path) -> Result<usize> {
    match size(map, path)? {
        0 => Err(Error::field(path, WINDOW, Value::Null, format!("from 1 to {MAX_SIZE}"))),
        window => Ok(window),
    }
}

/// A whole number.
pub(super) fn number(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|value| usize::try_from(value).ok())
}

/// The first layer with the window by a word for each of `count` layers; `count` if no layer has it.
fn by_words(layers: &Value, count: usize, has_window: bool, path: &Path) -> Result<usize> {
    let words = layers.as_array().filter(|words| words.len() == count);
    let from = words.and_then(|words| {
        let from = words.iter().position(|word| word == SLIDING).unwrap_or(count);
        let (before, after) = words.split_at(from);
        let fits = before.iter().all(|word| word == FULL) && after.iter().all(|word| word == SLIDING);
        (fits && (has_window || from == count)).then_some(from)
    });
    from.ok_or_else(|| {
        let mut expected = format!("{FULL:?} for each of {count} layers");
        if has_window {
            expected += &format!(", or {SLIDING:?} from one of them on");
        }
        Error::field(path, LAYERS, layers, expected)
    })
}

/// The window as a file says it.
pub(super) fn value(config: &MoeConfig) -> Value {
    match config.window {
        0 => Value::Null,
        window => json!(window),
    }
}

/// A word for each layer.
pub(super) fn words(config: &MoeConfig) -> Vec<&'static str> {
    (0..config.n_layer).map(|layer| if config.is_windowed(layer) { SLIDING } else { FULL }).collect()
}

/// Adds Qwen's keys to `own`.
pub(super) fn put(config: &MoeConfig, mut own: Value) -> Value {
    own[USED] = json!(config.window > 0);
    own[WINDOW] = value(config);
    own
}
