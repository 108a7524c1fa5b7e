//! Training a byte-level BPE vocabulary with the trainer of the crate `tokenizers`.

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, DecoderWrapper, PostProcessorWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    Tokenizer as Inner, Trainer,
};

use super::alphabet::spell;
use super::split::{self, Pattern};
use crate::{Error, Result};

/// What to train.
#[derive(Clone, Debug)]
pub struct TrainSettings {
    /// The number of tokens, the 256 bytes and the special tokens included.
    pub vocab_size: usize,
    /// `gpt2`, `cl100k`, `o200k`, `qwen2`, or a regular expression whose matches are the words.
    pub split: String,
    /// Tokens that text does not contain; the first stands between documents.
    pub special: Vec<String>,
    /// Pairs that are rarer are not merged.
    pub min_frequency: u64,
}

impl Default for TrainSettings {
    fn default() -> Self {
        Self {
            vocab_size: 29000,
            split: "gpt2".into(),
            special: vec!["<|endoftext|>".into()],
            min_frequency: 2,
        }
    }
}

/// A trained vocabulary.
pub struct Trained {
    /// The `tokenizer.json`.
    pub json: String,
    /// The `tokenizer_config.json`, by which transformers knows the special tokens.
    pub config: String,
    /// The number of tokens: fewer than asked for if the text has no more pairs that are frequent enough.
    pub vocab_size: usize,
}

/// Trains on documents.
pub fn train<I>(settings: &TrainSettings, documents: I) -> Result<Trained>
where
    I: Iterator<Item = String> + Send,
{
    let failed =
        |error: Box<dyn std::error::Error + Send + Sync>| Error::Setting(format!("tokenizer train: {error}"));
    let least = 256 + settings.special.len();
    if settings.vocab_size < least {
        return Err(Error::Setting(format!(
            "--vocab-size is {}, expected at least {least}: the 256 bytes and the special tokens",
            settings.vocab_size
        )));
    }
    let (regex, pattern) = splitter(&settings.split);
    let split = Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false)
        .map_err(|error| Error::Setting(format!("--split is not a regular expression: {error}")))?;
    let marker = |content: &String| AddedToken::from(content.clone(), true).normalized(false);
    let mut trainer = BpeTrainer::builder()
        .vocab_size(settings.vocab_size)
        .min_frequency(settings.min_frequency)
        .show_progress(false)
        .special_tokens(settings.special.iter().map(marker).collect())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    match pattern {
        // the same words as by the regular expression, several times as fast
        Some(pattern) => trainer.feed(documents, |text| Ok(spelled_words(pattern, text))),
        None => {
            let bytes = ByteLevel::new(false, false, false);
            let split = split.clone();
            trainer.feed(documents, move |text| words_by(&split, &bytes, text))
        }
    }
    .map_err(failed)?;
    let mut model = BPE::default();
    let special = trainer.train(&mut model).map_err(failed)?;
    let mut tokenizer = Inner::new(model);
    let byte_level = || ByteLevel::new(false, false, false);
    tokenizer.with_pre_tokenizer(Some(match pattern {
        Some(Pattern::Gpt2) => PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true)),
        _ => PreTokenizerWrapper::Sequence(Sequence::new(vec![split.into(), byte_level().into()])),
    }));
    tokenizer.with_decoder(Some(DecoderWrapper::ByteLevel(byte_level())));
    tokenizer.with_post_processor(Some(PostProcessorWrapper::ByteLevel(byte_level())));
    tokenizer.add_special_tokens(special).map_err(failed)?;
    let json = tokenizer.to_string(true).map_err(failed)?;
    let vocab_size = tokenizer.get_vocab_size(true);
    Ok(Trained { json: json + "\n", config: config(settings), vocab_size })
}

/// The regular expression of a name, and our splitter for it if there is one.
fn splitter(name: &str) -> (&str, Option<Pattern>) {
    let pattern = match name {
        "gpt2" => Some(Pattern::Gpt2),
        "cl100k" | "llama3" => Some(Pattern::CL100K),
        "o200k" => Some(Pattern::O200k),
        "qwen2" => Some(Pattern::QWEN2),
        regex => Pattern::of_regex(regex),
    };
    match pattern {
        Some(Pattern::Gpt2) => (split::GPT2, pattern),
        Some(known) => (known.regex(), pattern),
        None => (name, None),
    }
}

fn spelled_words(pattern: Pattern, text: &str) -> Vec<String> {
    let (mut at, mut words) = (0, Vec::new());
    while at < text.len() {
        let end = pattern.next(text.as_bytes(), at);
        words.push(spell(&text.as_bytes()[at..end]));
        at = end;
    }
    words
}

fn words_by(split: &Split, bytes: &ByteLevel, text: &str) -> tokenizers::Result<Vec<String>> {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
    let mut text = PreTokenizedString::from(text);
    split.pre_tokenize(&mut text)?;
    bytes.pre_tokenize(&mut text)?;
    let words = text.get_splits(OffsetReferential::Original, OffsetType::None);
    Ok(words.into_iter().map(|(word, _, _)| word.to_owned()).collect())
}

fn config(settings: &TrainSettings) -> String {
    let mut json =
        json!({ "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false });
    if let Some(end) = settings.special.first() {
        json["bos_token"] = Value::from(end.as_str());
        json["eos_token"] = Value::from(end.as_str());
    }
    format!("{json:#}\n")
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::*;

    fn documents() -> impl Iterator<Item = String> + Send {
        (0..200).map(|n| format!("Ivy was a cat's friend {n}, and they'd play; été 中文 \n\n  again {n}.\n"))
    }

    fn trained(split: &str, vocab_size: usize) -> Trained {
        let settings = TrainSettings { vocab_size, split: split.into(), ..TrainSettings::default() };
        train(&settings, documents()).unwrap()
    }

    #[test]
    fn a_trained_vocabulary_is_ours_to_use_and_always_the_same() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["gpt2", "cl100k", "o200k", "qwen2"] {
            let made = trained(name, 290);
            assert_eq!(made.json, trained(name, 290).json);
            assert_eq!(made.vocab_size, 290);
            let path = folder.path().join("tokenizer.json");
            std::fs::write(&path, &made.json).unwrap();
            let tokenizer = Tokenizer::open_path(&path).unwrap();
            assert_eq!((tokenizer.method(), tokenizer.vocab_size()), ("byte-level BPE", 290));
            let text = documents().next().unwrap();
            let ids = tokenizer.encode(text.as_bytes()).unwrap();
            assert!(ids.len() < text.len() * 2 / 3, "{} ids", ids.len());
            assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
            assert_eq!(tokenizer.eot(), Some(0));
        }
    }

    #[test]
    fn any_regular_expression_splits() {
        let folder = tempfile::tempdir().unwrap();
        let made = trained(r"\w+|\W", 300);
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, &made.json).unwrap();
        let tokenizer = Tokenizer::open_path(&path).unwrap();
        assert_eq!(tokenizer.method(), "the tokenizers crate");
        let text = "Ivy was été";
        assert_eq!(tokenizer.decode(&tokenizer.encode(text.as_bytes()).unwrap()).unwrap(), text.as_bytes());
        let settings = TrainSettings { split: "(".into(), ..TrainSettings::default() };
        let error = train(&settings, documents()).err().unwrap().to_string();
        assert!(error.starts_with("--split is not a regular expression"), "{error}");
        let settings = TrainSettings { vocab_size: 256, ..TrainSettings::default() };
        let error = train(&settings, documents()).err().unwrap().to_string();
        assert!(error.starts_with("--vocab-size is 256, expected at least 257"), "{error}");
    }
}
