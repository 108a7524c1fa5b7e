//! The tokens before and after a text: `bos_token_id` and `eos_token_id` of a `config.json`. We do not use them, but
//! `transformers` stops generating at the second.

use serde_json::{Map, Value, json};

use super::without_bom;

const KEYS: [&str; 2] = ["bos_token_id", "eos_token_id"];

/// The tokens before and after a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum TextTokens {
    /// The last of the vocabulary for both, as in GPT-2.
    #[default]
    Last,
    /// A tokenizer's end-of-text token for both.
    Eot(u32),
    /// bos and eos of another `config.json`: a number, a list or null; `None` if the key is absent.
    Said([Option<Value>; 2]),
}

impl TextTokens {
    /// Those of a `config.json`.
    pub fn parse(bytes: &[u8]) -> Self {
        let map: Map<String, Value> = serde_json::from_slice(without_bom(bytes)).unwrap_or_default();
        Self::Said(KEYS.map(|key| map.get(key).cloned()))
    }

    /// Sets both keys of a `config.json`; absent ones are removed.
    pub(super) fn put(&self, json: &mut Value, vocab_size: usize) {
        let both = |id: usize| [Some(json!(id)), Some(json!(id))];
        let values = match self {
            Self::Last => both(vocab_size.saturating_sub(1)),
            Self::Eot(id) => both(*id as usize),
            Self::Said(values) => values.clone(),
        };
        let Some(map) = json.as_object_mut() else { return };
        for (key, value) in KEYS.into_iter().zip(values) {
            match value {
                Some(value) => map.insert(key.to_owned(), value),
                None => map.shift_remove(key), // keeps the order of the others
            };
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
                let tokens = TextTokens::Said(said.clone());
                write_hf(&from, &config, &HfOptions { tokens, ..HfOptions::new(Elem::F32) }, |_, _| Ok(()))
                    .unwrap();
                let mut source = open_weights(&from).unwrap();
                let options = HfOptions { tokens: source.text_tokens(), ..HfOptions::new(Elem::BF16) };
                write_hf(&to, &config, &options, |spec, out| source.read_tensor(&spec.name, out)).unwrap();
                let text = std::fs::read(to.join(HF_CONFIG)).unwrap();
                let json: Value = serde_json::from_slice(&text).unwrap();
                assert_eq!(KEYS.map(|key| json.get(key).cloned()), said);
                assert_eq!(*HfFolder::open(&to).unwrap().text_tokens(), TextTokens::Said(said));
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
