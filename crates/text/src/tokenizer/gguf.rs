//! A tokenizer as metadata of a GGUF file, which llama.cpp encodes by: tokens, their types, merges or scores, markers, chat
//! template. What llama.cpp has no name for is refused.

mod markers;
mod pre;
mod template;

use std::collections::{HashMap, HashSet};

use ironhorse_train::format::Source;
use ironhorse_train::format::gguf::Value as Meta;
use ironhorse_train::format::tokenizer::{NamedFiles, TOKENIZER as BIN_NAME, Tokenizer as BinTokenizer};
use serde_json::{Map, Value, json};

use super::alphabet::spell;
use super::split::Pattern;
use super::{CONFIG_NAME, JSON_NAME, export, ranks};
use crate::{Error, Result};

/// What the model says about tokens.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Rows of its token table: ids without a token get a name that no text has.
    pub vocab_size: usize,
    /// The tokens before and after a text, where the tokenizer does not say.
    pub ids: [Option<u32>; 2],
}

/// A tokenizer as metadata.
#[derive(Debug)]
pub struct GgufTokenizer {
    /// Keys and values.
    pub keys: Vec<(String, Meta)>,
    /// In what llama.cpp differs from this tokenizer, if it does.
    pub note: Option<&'static str>,
}

/// llama.cpp's types of tokens.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The tokenizer in these files, which are beside a model's weights; `None` if there is none.
pub fn gguf_tokenizer(files: &NamedFiles, told: Told) -> Result<Option<GgufTokenizer>> {
    let Some((name, json)) = described(files)? else { return Ok(None) };
    let config = file(files, CONFIG_NAME).map(parsed).transpose();
    let config = config.map_err(|problem| Error::tokenizer(CONFIG_NAME, problem))?.unwrap_or_default();
    let found = build(&json, &config, told).and_then(|mut found| {
        found.keys.extend(template::keys(files, &config)?);
        Ok(found)
    });
    found.map(Some).map_err(|problem| Error::tokenizer(name, problem))
}

fn file<'a>(files: &'a NamedFiles, name: &str) -> Option<&'a [u8]> {
    files.iter().find(|(file, _)| file == name).map(|(_, bytes)| &bytes[..])
}

fn parsed(bytes: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("is not JSON ({error})"))
}

/// The tokenizer as a `tokenizer.json` has it, and the name of the file it is from.
fn described(files: &NamedFiles) -> Result<Option<(&'static str, Value)>> {
    let of = |name: &'static str, json: Result<Value, String>| {
        json.map(|json| Some((name, json))).map_err(|problem| Error::tokenizer(name, problem))
    };
    if let Some(bytes) = file(files, JSON_NAME) {
        return of(JSON_NAME, parsed(bytes));
    }
    if let Some((vocab, merges)) = file(files, "vocab.json").zip(file(files, "merges.txt")) {
        let config = file(files, CONFIG_NAME).and_then(|bytes| parsed(bytes).ok());
        return of("vocab.json", of_vocab(vocab, merges, config.as_ref()));
    }
    if let Some(bytes) = file(files, BIN_NAME) {
        let bin = BinTokenizer::read(&mut Source::memory(bytes.to_vec(), BIN_NAME))?;
        return of(BIN_NAME, of_bin(&bin));
    }
    match file(files, "tokenizer.model") {
        None => Ok(None),
        Some(_) => {
            let problem = "has no tokenizer.json beside it, which transformers writes";
            Err(Error::tokenizer("tokenizer.model", problem))
        }
    }
}

fn of_vocab(vocab: &[u8], merges: &[u8], config: Option<&Value>) -> Result<Value, String> {
    let (pattern, _) = super::open::pattern_of_class(config)?;
    let merges = std::str::from_utf8(merges).map_err(|_| "merges.txt is not UTF-8".to_owned())?;
    let lines = super::open::merge_lines(merges).map(|(_, line)| line);
    let added = config.and_then(|config| config["added_tokens_decoder"].as_object()).into_iter().flatten();
    let added = added.filter_map(|(id, token)| {
        Some(json!({"id": id.parse::<u32>().ok()?, "content": token["content"], "special": token["special"]}))
    });
    let vocab = parsed(vocab)?;
    let mut added: Vec<Value> = added.collect();
    let end = "<|endoftext|>";
    if let Some(id) = vocab.get(end).filter(|_| added.is_empty()) {
        added.push(json!({"id": id, "content": end, "special": true}));
    }
    Ok(json!({
        "added_tokens": added,
        "pre_tokenizer": export::pre_tokenizer(pattern),
        "model": {"type": "BPE", "vocab": vocab, "merges": lines.collect::<Vec<_>>()},
    }))
}

fn of_bin(bin: &BinTokenizer) -> Result<Value, String> {
    if *bin == BinTokenizer::bytes() {
        let vocab: Map<String, Value> = (0..=u8::MAX).map(|byte| (spell(&[byte]), byte.into())).collect();
        return Ok(json!({
            "pre_tokenizer": export::pre_tokenizer(Pattern::Gpt2),
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }));
    }
    let bpe = ranks::of_bin(bin).ok_or("is not byte-level BPE, which is what llama.cpp encodes by")?;
    parsed(export::tokenizer_json(&bpe).as_bytes())
}

/// An entry of `added_tokens`.
struct Added<'a> {
    id: usize,
    content: &'a str,
    special: bool,
}

fn added_tokens(json: &Value) -> Vec<Added<'_>> {
    let tokens = json["added_tokens"].as_array().into_iter().flatten();
    let found = tokens.filter_map(|token| {
        let (id, content) = (usize::try_from(token["id"].as_u64()?).ok()?, token["content"].as_str()?);
        Some(Added { id, content, special: token["special"] == true })
    });
    found.collect()
}

fn build(json: &Value, config: &Value, told: Told) -> Result<GgufTokenizer, String> {
    let model = &json["model"];
    if let Some(kind) = model.get("type").filter(|kind| *kind != "BPE") {
        return Err(format!(
            "its model is {kind}, expected BPE, which llama.cpp knows by merges or by scores"
        ));
    }
    let is_pieces = model["byte_fallback"] == true;
    let (name, note) = if is_pieces { ("default", None) } else { pre::name(json)? };
    let (tokens, types) = tokens(json, told.vocab_size, is_pieces)?;
    let mut keys =
        vec![("model", if is_pieces { "llama".into() } else { "gpt2".into() }), ("pre", name.into())];
    if is_pieces {
        keys.push(("scores", Meta::F32s(scores(&merges(model)?, &tokens))));
        keys.push(("add_space_prefix", Meta::Bool(pre::adds_space(json))));
    } else {
        let lines = merges(model)?.into_iter().map(|(left, right)| format!("{left} {right}"));
        keys.push(("merges", Meta::Texts(lines.collect())));
    }
    keys.extend(markers::keys(json, config, told, &tokens));
    keys.push(("tokens", Meta::Texts(tokens)));
    keys.push(("token_type", Meta::I32s(types)));
    let keys = keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
    Ok(GgufTokenizer { keys, note })
}

/// The text and the type of every id.
fn tokens(json: &Value, vocab_size: usize, is_pieces: bool) -> Result<(Vec<String>, Vec<i32>), String> {
    let model = &json["model"];
    let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; vocab_size];
    let mut put = |id: usize, text: &str, kind: i32| {
        if id >= vocab_size {
            return Err(format!("has the id {id} ({text:?}), but the model has {vocab_size} tokens only"));
        }
        (tokens[id], types[id]) = (text.to_owned(), kind);
        Ok(())
    };
    let vocab = model["vocab"].as_object().ok_or("has no model.vocab")?;
    for (text, id) in vocab {
        let id = id.as_u64().ok_or_else(|| format!("the id of {text:?} is {id}, expected a number"))?;
        let kind = match text {
            _ if is_pieces && model["unk_token"] == text.as_str() => UNKNOWN,
            _ if is_pieces && is_byte(text) => BYTE,
            _ => NORMAL,
        };
        put(id as usize, text, kind)?;
    }
    for token in added_tokens(json) {
        match token.special {
            true if is_pieces && model["unk_token"] == token.content => {}
            true => put(token.id, token.content, CONTROL)?,
            // the tokens of pieces are compared with text whose spaces are still spaces
            false if is_pieces => put(token.id, &token.content.replace('▁', " "), USER_DEFINED)?,
            false => put(token.id, token.content, USER_DEFINED)?,
        }
    }
    let mut seen = HashSet::new();
    match tokens.iter().find(|token| !seen.insert(token.as_str())) {
        Some(token) => Err(format!("has the token {token:?} twice, which llama.cpp does not load")),
        None => Ok((tokens, types)),
    }
}

/// A piece that stands for a byte: `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Merges in order.
fn merges(model: &Value) -> Result<Vec<(&str, &str)>, String> {
    let list = model["merges"].as_array().ok_or("has no model.merges")?;
    let pairs = list.iter().map(|merge| match merge {
        Value::String(line) => line.split_once(' '),
        pair => pair[0].as_str().zip(pair[1].as_str()),
    });
    pairs.collect::<Option<Vec<_>>>().ok_or_else(|| "a merge is not two tokens".to_owned())
}

/// llama.cpp merges the pair whose result has the highest score; here the results of the earliest merges have.
fn scores(merges: &[(&str, &str)], tokens: &[String]) -> Vec<f32> {
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (rank, (left, right)) in merges.iter().enumerate() {
        ranks.entry(format!("{left}{right}")).or_insert(rank);
    }
    let score =
        |(id, token): (usize, &String)| -(ranks.get(token).copied().unwrap_or(merges.len() + id) as f32);
    tokens.iter().enumerate().map(score).collect()
}

#[cfg(test)]
mod tests;
