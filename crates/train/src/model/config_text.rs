//! Sizes as text: a TOML file, `n_layer=3,n_head=5,...` on the command line, and the JSON inside our own files. The
//! three share one table of keys.

use std::path::Path;

use serde_json::{Map, Value};

use super::Gpt2Config;
use crate::{Error, Result};

/// Each size: its key, then the other spellings that are understood.
pub(super) const KEYS: [&[&str]; 6] = [
    &["n_layer", "layers", "depth", "L"],
    &["n_head", "heads", "NH"],
    &["n_embd", "width", "d_model", "C"],
    &["vocab_size", "vocabulary", "vocab", "V"],
    &["max_seq_len", "block_size", "n_positions", "n_ctx", "context", "maxT"],
    &["padded_vocab_size", "Vp"],
];
const N_LAYER: usize = 0;
const N_HEAD: usize = 1;
const N_EMBD: usize = 2;
const VOCAB_SIZE: usize = 3;
const MAX_SEQ_LEN: usize = 4;
const PADDED: usize = 5;

/// Collects key/value pairs, whatever they were written in.
#[derive(Default)]
struct Sizes {
    found: [Option<usize>; KEYS.len()],
}

impl Sizes {
    fn put(&mut self, key: &str, value: &Given) -> Result<()> {
        if key == KIND {
            return match value {
                Given::Text(kind) if kind == "gpt2" => Ok(()),
                other => Err(Error::config(format!("kind is {other}, expected gpt2"))),
            };
        }
        let Some(slot) = KEYS.iter().position(|names| names.contains(&key)) else {
            return Err(unknown_key(key, &KEYS));
        };
        let Some(size) = value.size() else {
            return Err(Error::config(format!("{key} is {value}, expected a whole number of at least 1")));
        };
        if self.found[slot].replace(size).is_some() {
            return Err(given_twice(KEYS[slot]));
        }
        Ok(())
    }

    /// Checks that all is there. V and maxT are those of GPT-2 where not given.
    fn finish(self) -> Result<Gpt2Config> {
        let need = |slot: usize| {
            self.found[slot].ok_or_else(|| Error::config(format!("{} is missing", KEYS[slot].join("|"))))
        };
        let mut config = Gpt2Config::new(
            self.found[MAX_SEQ_LEN].unwrap_or(1024),
            self.found[VOCAB_SIZE].unwrap_or(50257),
            need(N_LAYER)?,
            need(N_HEAD)?,
            need(N_EMBD)?,
        );
        if let Some(padded) = self.found[PADDED] {
            config.padded_vocab_size = padded;
        }
        config.validate()?;
        Ok(config)
    }
}

/// The key that says which model the others are about.
pub(super) const KIND: &str = "kind";

pub(super) fn unknown_key(key: &str, known: &[&[&str]]) -> Error {
    let known: Vec<String> = known.iter().map(|names| names.join("|")).collect();
    Error::config(format!("unknown key `{key}`, expected one of: {}, kind", known.join(", ")))
}

pub(super) fn given_twice(names: &[&str]) -> Error {
    Error::config(format!("{} is given twice, expected once", names.join("|")))
}

/// A value as it was given.
#[derive(Clone, Debug)]
pub(super) enum Given {
    Int(i64),
    /// With what its language calls it.
    Float(f64, &'static str),
    Text(String),
    Other(&'static str),
}

impl Given {
    /// As a size, if it is one.
    pub fn size(&self) -> Option<usize> {
        match self {
            Self::Int(value) => usize::try_from(*value).ok(),
            Self::Text(text) => text.parse().ok(),
            Self::Float(..) | Self::Other(_) => None,
        }
    }

    /// As a number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Int(value) => Some(*value as f64),
            Self::Float(value, _) => Some(*value),
            Self::Text(text) => text.parse().ok(),
            Self::Other(_) => None,
        }
    }
}

impl std::fmt::Display for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Float(_, what) | Self::Other(what) => write!(f, "a {what}"),
        }
    }
}

/// Keys and values, in the order in which they stand.
pub(super) type Pairs = Vec<(String, Given)>;

pub(super) fn toml_pairs(text: &str) -> Result<Pairs> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        let line = 1 + text.bytes().take(start).filter(|&byte| byte == b'\n').count();
        Error::config(format!("not TOML, line {line}: {}", one_line(error.message())))
    })?;
    let given = |(key, value): (String, toml::Value)| {
        let given = match value {
            toml::Value::Integer(value) => Given::Int(value),
            toml::Value::Float(value) => Given::Float(value, "float"),
            // in TOML a number in quotes is a mistake; only `kind` is a string
            toml::Value::String(text) if key == KIND => Given::Text(text),
            other => Given::Other(other.type_str()),
        };
        (key, given)
    };
    Ok(table.into_iter().map(given).collect())
}

pub(super) fn line_pairs(text: &str) -> Result<Pairs> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let split = |pair: &str| match pair.split_once('=') {
        None => Err(Error::config(format!("`{pair}` has no value, expected KEY=NUMBER"))),
        Some((key, value)) => Ok((key.trim().to_owned(), Given::Text(value.trim().to_owned()))),
    };
    pairs.map(split).collect()
}

pub(super) fn json_pairs(text: &str) -> Result<Pairs> {
    let map: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| Error::config(format!("config is not a JSON object: {error}")))?;
    let given = |(key, value): (String, Value)| {
        let given = match value {
            Value::Number(number) => match number.as_i64() {
                Some(value) => Given::Int(value),
                None => number
                    .as_f64()
                    .map_or(Given::Other("non-integer"), |value| Given::Float(value, "non-integer")),
            },
            Value::String(text) if key == KIND => Given::Text(text),
            Value::String(_) => Given::Other("string"),
            _ => Given::Other("non-number"),
        };
        (key, given)
    };
    Ok(map.into_iter().map(given).collect())
}

impl Gpt2Config {
    pub(super) fn from_pairs(pairs: &Pairs) -> Result<Self> {
        let mut sizes = Sizes::default();
        pairs.iter().try_for_each(|(key, value)| sizes.put(key, value))?;
        sizes.finish()
    }

    /// The sizes in a TOML text with the keys of the command line.
    ///
    /// ```
    /// use ironhorse_train::model::Gpt2Config;
    /// let config = Gpt2Config::from_toml("layers = 3\nheads = 5\nwidth = 40\nvocab = 300\ncontext = 16")?;
    /// assert_eq!(config, Gpt2Config::new(16, 300, 3, 5, 40));
    /// # Ok::<(), ironhorse_train::Error>(())
    /// ```
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::from_pairs(&toml_pairs(text)?)
    }

    /// The sizes in a TOML file; the error names the file.
    pub fn from_toml_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::io(path, "read", source))?;
        Self::from_toml(&text).map_err(|error| Error::config(format!("{}: {error}", path.display())))
    }

    /// A named size or sizes in one line: `d12`, or `n_layer=3,n_head=5,n_embd=40,vocab_size=300,max_seq_len=16`.
    pub fn parse(text: &str) -> Result<Self> {
        if !text.contains('=') {
            return Self::named(text.trim());
        }
        Self::from_pairs(&line_pairs(text)?)
    }

    /// The sizes in a JSON object, as our own files carry them.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_pairs(&json_pairs(text)?)
    }

    /// The sizes in a JSON object of another tool: what else it says is ignored.
    pub(crate) fn from_foreign_json(text: &str) -> Result<Self> {
        let mut pairs = json_pairs(text)?;
        pairs.retain(|(key, _)| key == KIND || KEYS.iter().any(|names| names.contains(&key.as_str())));
        Self::from_pairs(&pairs)
    }

    /// The inverse of [`Gpt2Config::from_json`].
    pub fn to_json(&self) -> Value {
        serde_json::json!({
            "max_seq_len": self.max_seq_len,
            "vocab_size": self.vocab_size,
            "padded_vocab_size": self.padded_vocab_size,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
        })
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANT: Gpt2Config = Gpt2Config {
        max_seq_len: 16,
        vocab_size: 300,
        padded_vocab_size: 384,
        n_layer: 3,
        n_head: 5,
        n_embd: 40,
    };

    #[test]
    fn every_spelling_is_understood() {
        let spellings = [
            ["n_layer", "n_head", "n_embd", "vocab_size", "max_seq_len"],
            ["layers", "heads", "width", "vocabulary", "block_size"],
            ["depth", "NH", "d_model", "vocab", "context"],
            ["L", "NH", "C", "V", "maxT"],
        ];
        for keys in spellings {
            let pairs: Vec<_> =
                keys.iter().zip([3, 5, 40, 300, 16]).map(|(k, v)| format!("{k}={v}")).collect();
            assert_eq!(Gpt2Config::parse(&pairs.join(",")).unwrap(), WANT);
            assert_eq!(Gpt2Config::from_toml(&format!("kind=\"gpt2\"\n{}", pairs.join("\n"))).unwrap(), WANT);
        }
        assert_eq!(Gpt2Config::from_json(&WANT.to_json().to_string()).unwrap(), WANT);
        assert_eq!(Gpt2Config::parse("d24").unwrap().n_embd, 1024);
        assert_eq!(Gpt2Config::parse("kind=gpt2, L=1, NH=1, C=2,").unwrap().vocab_size, 50257);
    }

    #[test]
    fn mistakes_are_named() {
        let inline = |text: &str| Gpt2Config::parse(text).unwrap_err().to_string();
        assert!(
            inline("n_layers=3")
                .starts_with("unknown key `n_layers`, expected one of: n_layer|layers|depth|L,")
        );
        assert_eq!(inline("n_layer=x"), "n_layer is \"x\", expected a whole number of at least 1");
        assert_eq!(inline("n_layer=-3"), "n_layer is \"-3\", expected a whole number of at least 1");
        assert_eq!(inline("n_layer=3,L=3"), "n_layer|layers|depth|L is given twice, expected once");
        assert_eq!(inline("n_layer=3,n_head=1"), "n_embd|width|d_model|C is missing");
        assert_eq!(inline("n_layer=3,n_head"), "`n_head` has no value, expected KEY=NUMBER");
        assert_eq!(inline("n_layer=3,n_head=3,n_embd=40"), "n_head is 3, expected a divisor of n_embd, 40");
        assert_eq!(inline("kind=moe"), "kind is \"moe\", expected gpt2");
        assert!(inline("n_layer=99999999999999999999").contains("expected a whole number"));

        let toml = |text: &str| Gpt2Config::from_toml(text).unwrap_err().to_string();
        assert!(
            toml("n_layer = 3\nn_layer = 4").starts_with("not TOML, line 2:"),
            "{}",
            toml("n_layer = 3\nn_layer = 4")
        );
        assert!(toml("\n\n= 3").starts_with("not TOML, line 3:"));
        assert_eq!(toml("n_layer = \"3\""), "n_layer is a string, expected a whole number of at least 1");
        assert_eq!(toml("n_layer = 1.5"), "n_layer is a float, expected a whole number of at least 1");
        assert!(toml("[model]\nn_layer = 1").contains("unknown key `model`"));
        assert_eq!(toml("").lines().count(), 1);
    }

    #[test]
    fn a_toml_file_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.toml");
        assert!(matches!(Gpt2Config::from_toml_file(&path), Err(Error::Io { .. })));
        std::fs::write(&path, "n_layer = 0\nn_head = 1\nn_embd = 1\n").unwrap();
        let text = Gpt2Config::from_toml_file(&path).unwrap_err().to_string();
        assert!(text.contains("small.toml: n_layer is 0"), "{text}");
    }
}
