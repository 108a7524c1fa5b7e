//! Keys and values in the three notations for sizes: `n_layer=3,n_head=5,...` on the command line, TOML, and JSON.

use crate::{Error, Result};
use serde_json::Value;
use std::fmt;

/// The key that says which kind of model the others describe.
pub(crate) const KIND: &str = "kind";

/// How sizes are written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notation {
    /// `KEY=VALUE,KEY=VALUE`
    Line,
    /// A TOML table.
    Toml,
    /// A JSON object.
    Json,
}

/// A value as it was given.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Given {
    Int(i64),
    Float(f64),
    Bool(bool),
    /// Text without a type of its own, as on the command line: it may spell a number.
    Word(String),
    /// A string of TOML or JSON, which never stands for a number.
    Quoted(String),
    /// Anything else, as it is written.
    Other(String),
}

impl Given {
    /// A word, quoted or not.
    pub fn word(&self) -> Option<&str> {
        match self {
            Self::Word(text) | Self::Quoted(text) => Some(text),
            _ => None,
        }
    }
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            // with a point or an exponent, as JSON has it: 1 would look like a whole number
            Self::Float(value) => write!(f, "{}", serde_json::json!(value)),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Word(text) | Self::Quoted(text) => write!(f, "{text:?}"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl From<&Value> for Given {
    fn from(value: &Value) -> Self {
        match value {
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(value), _) => Self::Int(value),
                (None, Some(value)) => Self::Float(value),
                (None, None) => Self::Other(number.to_string()),
            },
            Value::String(text) => Self::Quoted(text.clone()),
            Value::Bool(value) => Self::Bool(*value),
            other => Self::Other(other.to_string()),
        }
    }
}

impl From<&toml::Value> for Given {
    fn from(value: &toml::Value) -> Self {
        match value {
            toml::Value::Integer(value) => Self::Int(*value),
            toml::Value::Float(value) => Self::Float(*value),
            toml::Value::String(text) => Self::Quoted(text.clone()),
            toml::Value::Boolean(value) => Self::Bool(*value),
            other => Self::Other(other.to_string()),
        }
    }
}

/// Keys and values, in their order.
pub(crate) type Pairs = Vec<(String, Given)>;

impl Notation {
    /// The keys and values in a text.
    pub(crate) fn pairs(self, text: &str) -> Result<Pairs> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text); // the byte-order mark of some editors
        match self {
            Self::Line => line_pairs(text),
            Self::Toml => toml_pairs(text),
            Self::Json => {
                let map: serde_json::Map<String, Value> = serde_json::from_str(text).map_err(|error| {
                    Error::input("config", format!("not valid ({error})"), "a JSON object")
                })?;
                Ok(map.iter().map(|(key, value)| (key.clone(), value.into())).collect())
            }
        }
    }
}

fn line_pairs(text: &str) -> Result<Pairs> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let split = |pair: &str| match pair.split_once('=') {
        None => Err(Error::input(format!("`{pair}`"), "without a value", "KEY=NUMBER")),
        Some((key, value)) => Ok((key.trim().to_owned(), Given::Word(value.trim().to_owned()))),
    };
    pairs.map(split).collect()
}

fn toml_pairs(text: &str) -> Result<Pairs> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        let line = 1 + text.bytes().take(start).filter(|&byte| byte == b'\n').count();
        let reason = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        Error::input("config", format!("not TOML (line {line}: {reason})"), "KEY = VALUE on each line")
    })?;
    Ok(table.iter().map(|(key, value)| (key.clone(), value.into())).collect())
}
