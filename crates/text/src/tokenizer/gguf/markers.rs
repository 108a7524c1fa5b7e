//! Tokens with a meaning of their own, and whether they are put around a text.

use ironhorse_train::format::gguf::Value as Meta;
use serde_json::Value;

use super::{Told, added_tokens};

/// Names in `tokenizer_config.json` and keys of the file.
const MARKERS: [(&str, &str); 4] = [
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("unk_token", "unknown_token_id"),
    ("pad_token", "padding_token_id"),
];

/// The keys, without their prefix.
pub fn keys(json: &Value, config: &Value, told: Told, tokens: &[String]) -> Vec<(&'static str, Meta)> {
    let added = added_tokens(json);
    let text = |name: &str| config[name].as_str().or_else(|| config[name]["content"].as_str());
    let id = |text: &str| {
        let marker = added.iter().find(|token| token.content == text).map(|token| token.id);
        let id = marker.or_else(|| tokens.iter().position(|token| token == text))?;
        u32::try_from(id).ok()
    };
    let in_range = |id: &u32| (*id as usize) < tokens.len();
    let ids = told.ids.map(|id| id.filter(in_range));
    let others = ids.into_iter().chain([None, None]); // what the model says about the first two
    let found = MARKERS
        .iter()
        .zip(others)
        .filter_map(|((name, key), other)| Some((*key, text(name).and_then(id).or(other)?)));
    let found: Vec<(&'static str, u32)> = found.collect();
    let around = [("add_bos_token", 0, true), ("add_eos_token", 1, false)].map(|(key, which, is_first)| {
        let said = config[key].as_bool();
        let marker = found.iter().find(|(name, _)| *name == MARKERS[which].1).map(|(_, id)| *id as usize);
        let put = || marker.is_some_and(|id| puts(&json["post_processor"], &tokens[id], is_first));
        (key, Meta::Bool(said.unwrap_or_else(put)))
    });
    found.into_iter().map(|(key, id)| (key, Meta::U32(id))).chain(around).collect()
}

/// Whether a `post_processor` puts this token first or last.
fn puts(post_processor: &Value, token: &str, is_first: bool) -> bool {
    let parts = post_processor["processors"].as_array();
    let mut parts = parts.map_or(std::slice::from_ref(post_processor), |parts| &parts[..]).iter();
    parts.any(|part| {
        let template = part["single"].as_array().map_or(&[][..], |template| &template[..]);
        let place = if is_first { template.first() } else { template.last() };
        place.is_some_and(|place| place["SpecialToken"]["id"] == token)
    })
}
