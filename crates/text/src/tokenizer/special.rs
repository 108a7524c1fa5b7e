//! The special tokens that a model's folder names, and whether its tokenizer begins texts with one.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::{CONFIG_NAME, JSON_NAME};
use crate::{Error, Result};

/// The file in which older folders name their special tokens.
const MAP_NAME: &str = "special_tokens_map.json";

/// The special tokens of a folder.
#[derive(Debug, Default)]
pub struct SpecialTokens {
    /// `tokenizer_config.json`; null if there is none.
    pub config: Value,
    /// `bos_token`, `eos_token` and so on.
    named: Vec<(String, String)>,
    /// The token with which the tokenizer begins a text.
    pub added_bos: Option<String>,
}

impl SpecialTokens {
    /// The special tokens of a folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = json(&folder.join(CONFIG_NAME))?;
        let map = json(&folder.join(MAP_NAME))?;
        let mut named: Vec<(String, String)> = Vec::new();
        for (name, value) in [&config, &map].into_iter().filter_map(Value::as_object).flatten() {
            let token = value.as_str().or_else(|| value["content"].as_str());
            if let Some(token) =
                token.filter(|_| name.ends_with("_token") && !named.iter().any(|(n, _)| n == name))
            {
                named.push((name.clone(), token.to_owned()));
            }
        }
        let mut all = Self { named, added_bos: None, config };
        let bos = all.get("bos_token").map(str::to_owned);
        all.added_bos = match all.config["add_bos_token"].as_bool() {
            Some(adds) => bos.filter(|_| adds),
            None => first_added(&folder.join(JSON_NAME)),
        };
        Ok(all)
    }

    /// A token by its name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(known, _)| known == name).map(|(_, token)| token.as_str())
    }

    /// All named tokens, each with its name.
    pub fn named(&self) -> impl Iterator<Item = &(String, String)> {
        self.named.iter()
    }
}

/// A file of JSON; null if it is not there.
fn json(path: &Path) -> Result<Value> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|error| Error::input(path, format!("is not JSON ({error})"))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(Error::io(path, "read", error)),
    }
}

/// The token that a `tokenizer.json` puts before a text.
fn first_added(path: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct File {
        post_processor: Option<Value>,
    }
    fn first(processor: &Value) -> Option<String> {
        match processor["type"].as_str()? {
            "TemplateProcessing" => Some(processor["single"][0]["SpecialToken"]["id"].as_str()?.to_owned()),
            "Sequence" => processor["processors"].as_array()?.iter().find_map(first),
            _ => None,
        }
    }
    let file: File = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    first(&file.post_processor?)
}
