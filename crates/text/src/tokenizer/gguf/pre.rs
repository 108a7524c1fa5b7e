//! How text is cut before merges: llama.cpp has a name for each way that it knows.

use serde_json::Value;

use super::super::json;
use super::super::split::{Cl100k, Pattern};

/// The pattern of Mistral's Tekken, which our own encoder does not have.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What is said about `cl100k_base` as tiktoken has it.
const TAIL: &str = "llama.cpp cuts white space with line breaks at the end of a text differently";

/// llama.cpp's name of the way a byte-level tokenizer cuts text, and what it does differently.
pub fn name(json: &Value) -> Result<(&'static str, Option<&'static str>), String> {
    let normalizer = json.get("normalizer").filter(|found| !found.is_null());
    if let Some(other) = normalizer.filter(|found| found["type"] != "NFC") {
        return Err(format!(
            "its normalizer is {other}, expected none or NFC: llama.cpp does not change text"
        ));
    }
    let found = json.get("pre_tokenizer");
    let is_whole = json["model"]["ignore_merges"] == true;
    match json::pattern(found) {
        Ok(Pattern::Gpt2) => Ok(("gpt-2", None)),
        Ok(Pattern::O200k) => Ok(("gpt-4o", None)),
        Ok(Pattern::Cl100k(Cl100k { marks: true, .. })) => Ok(("qwen35", None)),
        Ok(Pattern::Cl100k(Cl100k { digits: 1, .. })) => Ok(("qwen2", None)),
        Ok(Pattern::Cl100k(Cl100k { tail, .. })) => {
            Ok((if is_whole { "llama-bpe" } else { "dbrx" }, tail.then_some(TAIL)))
        }
        Err(problem) => other(found).map(|name| (name, None)).ok_or_else(|| {
            format!("{problem}, for which llama.cpp has no name; without the tokenizer's files the weights can be written")
        }),
    }
}

/// Ways of cutting that our own encoder leaves to the crate `tokenizers`.
fn other(pre_tokenizer: Option<&Value>) -> Option<&'static str> {
    let [first, last] = &pre_tokenizer?["pretokenizers"].as_array()?[..] else { return None };
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return None;
    }
    let regex = last["use_regex"].as_bool().unwrap_or(true);
    let is_tekken = first["pattern"]["Regex"] == TEKKEN && first["behavior"] == "Isolated" && !regex;
    let is_digits = first["type"] == "Digits" && first["individual_digits"] == true && regex;
    if is_tekken { Some("tekken") } else { is_digits.then_some("smollm") }
}

/// Whether a space is put before the text of a tokenizer of pieces.
pub fn adds_space(json: &Value) -> bool {
    let parts =
        |value: &Value, list: &str| value[list].as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
    let prepends = parts(&json["normalizer"], "normalizers").iter().any(|part| part["type"] == "Prepend");
    let pre_tokenizers = parts(&json["pre_tokenizer"], "pretokenizers");
    let metaspace = pre_tokenizers.iter().find(|part| part["type"] == "Metaspace");
    let puts = metaspace.is_some_and(|part| match part["prepend_scheme"].as_str() {
        Some(scheme) => scheme != "never",
        None => part["add_prefix_space"] != false,
    });
    prepends || puts
}
