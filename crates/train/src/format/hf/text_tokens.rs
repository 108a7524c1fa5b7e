//! What a `config.json` says that we do not compute from: the tokens before and after a text, at the second of which
//! `transformers` stops generating, and whatever else another file said.

use serde_json::{Map, Value, json};

use super::without_bom;

const KEYS: [&str; 2] = ["bos_token_id", "eos_token_id"];

/// The tokens before and after a text, and the rest of another file.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum TextTokens {
    /// The last of the vocabulary for both, as in GPT-2.
    #[default]
    Last,
    /// A tokenizer's end-of-text token for both.
    Eot(u32),
    /// All of another `config.json`. Of the tokens it may say a number, a list or null, or nothing.
    Said(Map<String, Value>),
}

impl TextTokens {
    /// Those of a `config.json`.
    pub fn parse(bytes: &[u8]) -> Self {
        Self::Said(serde_json::from_slice(without_bom(bytes)).unwrap_or_default())
    }

    /// The tokens before and after a text; the first where a file has a list of them.
    pub fn ids(&self, vocab_size: usize) -> [Option<u32>; 2] {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        match self {
            Self::Last => [u32::try_from(vocab_size.saturating_sub(1)).ok(); 2],
            Self::Eot(eot) => [Some(*eot); 2],
            Self::Said(said) => {
                KEYS.map(|key| said.get(key).and_then(|found| id(found.get(0).unwrap_or(found))))
            }
        }
    }

    /// Puts them into a file, except what is `decided` by the model itself; tokens that another file does not say are
    /// removed.
    pub(super) fn put(&self, json: &mut Value, vocab_size: usize, decided: impl Fn(&str) -> bool) {
        let both = |id: usize| KEYS.map(|key| (key.to_owned(), json!(id))).into_iter().collect();
        let said: Map<String, Value> = match self {
            Self::Last => both(vocab_size.saturating_sub(1)),
            Self::Eot(id) => both(*id as usize),
            Self::Said(said) => said.clone(),
        };
        let Some(map) = json.as_object_mut() else { return };
        for key in KEYS.iter().filter(|key| !said.contains_key(**key)) {
            map.shift_remove(*key); // keeps the order of the others
        }
        // what the settings of another family mean is not known here
        let same = said.get("model_type").is_none_or(|kind| map.get("model_type") == Some(kind));
        for (key, value) in said {
            if !decided(&key) && (same || KEYS.contains(&key.as_str())) {
                map.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HF_CONFIG, HfFolder, HfOptions, write_hf};
    use super::*;
    use crate::format::tokenizer::{TOKENIZER, Tokenizer};
    use crate::format::{Elem, open_weights};
    use crate::generate::codec::Codec;
    use crate::model::ModelConfig;

    #[test]
    fn a_folder_written_from_a_folder_says_the_same() {
        let top = tempfile::tempdir().unwrap();
        let (from, to) = (top.path().join("from"), top.path().join("to"));
        for sizes in
            ["n_layer=1,n_head=1,n_embd=4,vocab=9", "kind=llama,hidden=4,layers=1,heads=2,ffn=5,vocab=9"]
        {
            let config = ModelConfig::parse(sizes).unwrap();
            for said in [
                [Some(json!(1)), Some(json!(2))],
                [Some(Value::Null), Some(json!([2, 7]))],
                [None, Some(json!(50256))],
                [Some(json!(0)), None],
            ] {
                let both = KEYS.into_iter().zip(said.clone());
                let both = both.filter_map(|(key, value)| Some((key.to_owned(), value?)));
                let tokens = TextTokens::Said(both.collect());
                write_hf(&from, &config, &HfOptions { tokens, ..HfOptions::new(Elem::F32) }, |_, _| Ok(()))
                    .unwrap();
                let mut source = open_weights(&from).unwrap();
                let options = HfOptions { tokens: source.text_tokens(), ..HfOptions::new(Elem::BF16) };
                write_hf(&to, &config, &options, |spec, out| source.read_tensor(&spec.name, out)).unwrap();
                let text = std::fs::read(to.join(HF_CONFIG)).unwrap();
                let json: Value = serde_json::from_slice(&text).unwrap();
                assert_eq!(KEYS.map(|key| json.get(key).cloned()), said);
                assert_eq!(*HfFolder::open(&to).unwrap().text_tokens(), TextTokens::parse(&text));
            }
        }
    }

    #[test]
    fn a_tokenizer_goes_along_and_is_only_replaced_by_another() {
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join("hf");
        let config = ModelConfig::parse("n_layer=1,n_head=1,n_embd=4,vocab=256").unwrap();
        let without = HfOptions::new(Elem::F32);
        let files = Tokenizer::bytes().files().unwrap();
        let with = HfOptions { tokenizer: files.clone(), ..without.clone() };
        for _ in 0..2 {
            write_hf(&folder, &config, &with, |_, _| Ok(())).unwrap();
            assert_eq!(open_weights(&folder).unwrap().tokenizer_files().unwrap(), files);
        }
        let text = write_hf(&folder, &config, &without, |_, _| Ok(())).unwrap_err().to_string();
        assert!(text.contains(&format!("not replaced because it holds {TOKENIZER}")), "{text}");
    }
}
