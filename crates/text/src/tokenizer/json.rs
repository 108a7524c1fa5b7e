//! Byte-level BPE out of a `tokenizer.json` (GPT-2, Llama 3, Qwen and their like) or of `vocab.json` and `merges.txt`.
//! What a `tokenizer.json` says that our encoder does not do is left to the crate `tokenizers`.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use super::alphabet::bytes_of;
use super::bpe::{Added, Bpe, BpeParts, Source};
use super::split::Pattern;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    model: Model,
}

/// An entry of `added_tokens`.
#[derive(Clone, Debug, Deserialize)]
pub struct AddedToken {
    /// Its id.
    #[serde(default)]
    pub id: u32,
    /// Its text.
    pub content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    special: bool,
}

impl AddedToken {
    /// A special token.
    pub fn marker(content: &str, id: u32) -> Self {
        let content = content.to_owned();
        Self { id, content, single_word: false, lstrip: false, rstrip: false, special: true }
    }
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

/// A merge: two tokens, or two tokens with a space between them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Line(String),
}

impl Merge {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Line(line) => line.split_once(' '),
        }
    }
}

/// The tokenizer of a `tokenizer.json`, or why our encoder does not do what it says.
pub fn byte_level(json: &[u8]) -> Result<Bpe, String> {
    let file: File =
        serde_json::from_slice(json).map_err(|error| format!("not a byte-level BPE: {error}"))?;
    let model = &file.model;
    if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Err(format!("its model is {}", model.kind.as_deref().unwrap_or("")));
    }
    let given = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    let unusual = [
        (model.dropout.is_some_and(|p| p > 0.0), "dropout"),
        (given(&model.continuing_subword_prefix), "continuing_subword_prefix"),
        (given(&model.end_of_word_suffix), "end_of_word_suffix"),
        (model.byte_fallback, "byte_fallback"),
    ];
    if let Some((_, name)) = unusual.iter().find(|(given, _)| *given) {
        return Err(format!("it has {name}"));
    }
    let merges: Vec<_> = model.merges.iter().filter_map(Merge::parts).collect();
    if merges.len() < model.merges.len() {
        return Err("a merge is not two tokens".into());
    }
    build(Vocabulary {
        vocab: &model.vocab,
        merges: &merges,
        whole: model.ignore_merges,
        pattern: pattern(file.pre_tokenizer.as_ref())?,
        nfc: is_nfc(file.normalizer.as_ref())?,
        added: &file.added_tokens,
    })
}

/// What a tokenizer is made of, in the spelling of [`super::alphabet`].
pub struct Vocabulary<'a> {
    /// Tokens and their ids.
    pub vocab: &'a HashMap<String, u32>,
    /// Merges in order.
    pub merges: &'a [(&'a str, &'a str)],
    /// Whether a word that is a token is never split.
    pub whole: bool,
    /// How text is split.
    pub pattern: Pattern,
    /// Whether text is normalised to NFC first.
    pub nfc: bool,
    /// Tokens that are not made by merges.
    pub added: &'a [AddedToken],
}

/// Ids without a token that a vocabulary may have; memory is proportional to the largest id.
pub(super) const MOST_GAPS: usize = 1 << 16;

/// Builds the tables.
pub fn build(of: Vocabulary<'_>) -> Result<Bpe, String> {
    let most = of.vocab.values().chain(of.added.iter().map(|token| &token.id)).max().copied().unwrap_or(0);
    let expected = of.vocab.len() + of.added.len() + MOST_GAPS;
    if most as usize >= expected {
        return Err(format!("it has the id {most}, expected less than {expected}"));
    }
    let mut added = Vec::new();
    for token in of.added {
        let rules = [
            ("lstrip", token.lstrip),
            ("rstrip", token.rstrip),
            ("single_word", token.single_word),
            ("white space", token.content.contains(char::is_whitespace)),
        ];
        // markers are looked for only where they are asked for, and then as they are
        if let Some((rule, _)) = rules.into_iter().find(|(_, given)| *given && !token.special) {
            return Err(format!(
                "added token {:?} has {rule}, which is supported in special tokens only",
                token.content
            ));
        }
        added.push(Added { content: token.content.clone(), id: token.id, special: token.special });
    }
    let mut tokens = vec![Vec::new(); most as usize + 1];
    for (spelled, &id) in of.vocab {
        match bytes_of(spelled) {
            Some(bytes) => tokens[id as usize] = bytes,
            None if of.added.iter().any(|token| token.id == id) => {}
            None => return Err(format!("token {spelled:?} is not spelled in bytes")),
        }
    }
    let id = |spelled: &str| {
        of.vocab
            .get(spelled)
            .copied()
            .ok_or_else(|| format!("{spelled:?} of a merge is not in the vocabulary"))
    };
    let mut merges = Vec::with_capacity(of.merges.len());
    for (left, right) in of.merges {
        merges.push((id(left)?, id(right)?, id(&format!("{left}{right}"))?));
    }
    let merges = Source::List { merges, whole: of.whole };
    Bpe::new(BpeParts { tokens, merges, pattern: of.pattern, nfc: of.nfc, added })
}

/// The split pattern of a `pre_tokenizer`.
pub(super) fn pattern(pre_tokenizer: Option<&Value>) -> Result<Pattern, String> {
    let unknown = || format!("its pre_tokenizer is {}", pre_tokenizer.unwrap_or(&Value::Null));
    let pre_tokenizer = pre_tokenizer.ok_or_else(unknown)?;
    let kind = |value: &Value| value["type"].as_str().map(str::to_owned);
    let byte_level = |value: &Value, regex: bool| {
        kind(value).as_deref() == Some("ByteLevel")
            && value["add_prefix_space"] == Value::Bool(false)
            && value["use_regex"].as_bool().unwrap_or(true) == regex
    };
    if byte_level(pre_tokenizer, true) {
        return Ok(Pattern::Gpt2);
    }
    let parts = pre_tokenizer["pretokenizers"].as_array().ok_or_else(unknown)?;
    let [split, last] = &parts[..] else { return Err(unknown()) };
    let plain = kind(split).as_deref() == Some("Split")
        && split["behavior"] == "Isolated"
        && split["invert"] == Value::Bool(false)
        && byte_level(last, false);
    let regex = split["pattern"]["Regex"].as_str().filter(|_| plain).ok_or_else(unknown)?;
    Pattern::of_regex(regex).ok_or_else(unknown)
}

/// Whether a `normalizer` is NFC; it may also be absent.
fn is_nfc(normalizer: Option<&Value>) -> Result<bool, String> {
    match normalizer {
        None | Some(Value::Null) => Ok(false),
        Some(value) if value["type"] == "NFC" => Ok(true),
        Some(value) => Err(format!("its normalizer is {value}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::bpe::{Encoder, Special};
    use super::*;
    use serde_json::json;

    fn letters() -> HashMap<String, u32> {
        (0..=255u8).map(|byte| (super::super::alphabet::spell(&[byte]), u32::from(byte))).collect()
    }

    fn file(change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let mut vocab = letters();
        vocab.extend([("ab".into(), 256), ("Ġab".into(), 257), ("<end>".into(), 258)]);
        let mut json = json!({
            "added_tokens": [{"id": 258, "content": "<end>", "special": true},
                             {"id": 259, "content": "<tool>", "special": false}],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", ["Ġ", "ab"]], "ignore_merges": false},
        });
        change(&mut json);
        json.to_string().into_bytes()
    }

    fn ids(bpe: &Bpe, text: &str, special: Special) -> Vec<u32> {
        let mut out = Vec::new();
        Encoder::once(bpe, special).encode(text, &mut out);
        out
    }

    #[test]
    fn merges_in_both_spellings_and_added_tokens() {
        let bpe = byte_level(&file(|_| ())).unwrap();
        assert_eq!(ids(&bpe, "ab abc", Special::Ordinary), [256, 257, u32::from(b'c')]);
        assert_eq!(ids(&bpe, "<end>", Special::Ordinary).len(), 5);
        assert_eq!(ids(&bpe, "a<end><tool>", Special::Tokens), [97, 258, 259]);
        assert_eq!(ids(&bpe, "a<tool>b", Special::Ordinary), [97, 259, 98]);
        assert_eq!(bpe.decode(&[257, 258, 259]).unwrap(), b" ab<end><tool>");
        assert_eq!(bpe.vocab_size(), 260);
        assert!(bpe.decode(&[260]).is_err());
    }

    #[test]
    fn what_we_do_not_do_is_said() {
        let why = |change: fn(&mut Value)| byte_level(&file(change)).unwrap_err();
        assert!(why(|json| json["model"]["type"] = "WordPiece".into()).contains("WordPiece"));
        assert!(why(|json| json["model"]["byte_fallback"] = true.into()).contains("byte_fallback"));
        assert!(why(|json| json["model"]["dropout"] = 0.1.into()).contains("dropout"));
        assert!(why(|json| json["normalizer"] = json!({"type": "Lowercase"})).contains("Lowercase"));
        assert!(
            why(|json| json["pre_tokenizer"]["add_prefix_space"] = true.into()).contains("pre_tokenizer")
        );
        assert!(why(|json| json["pre_tokenizer"] = Value::Null).contains("pre_tokenizer"));
        assert!(why(|json| json["model"]["merges"] = json!(["zz zz"])).contains("zz"));
        assert!(why(|json| json["model"]["merges"] = json!(["zz"])).contains("two tokens"));
        assert!(why(|json| json["model"]["vocab"]["中"] = 300.into()).contains('中'));
        assert!(why(|json| json["model"]["vocab"]["x"] = u32::MAX.into()).contains("4294967295"));
        assert!(why(|json| json["added_tokens"][1]["lstrip"] = true.into()).contains("<tool>"));
        assert!(why(|json| json["model"]["vocab"] = json!({"a": 0})).contains("merge"));
        assert!(byte_level(b"{").is_err());
    }

    #[test]
    fn text_is_normalised_where_the_file_says_so() {
        let bpe = byte_level(&file(|json| json["normalizer"] = json!({"type": "NFC"}))).unwrap();
        assert_eq!(ids(&bpe, "e\u{301}", Special::Ordinary), ids(&bpe, "é", Special::Ordinary));
        let plain = byte_level(&file(|_| ())).unwrap();
        assert_eq!(ids(&plain, "e\u{301}", Special::Ordinary).len(), 3);
    }
}
