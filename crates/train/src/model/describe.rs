//! How a family of models describes itself: one table of fields per family. Reading and writing a line of text, TOML, JSON,
//! checkpoints and `config.json`, and the errors about them all follow from the table. Python's `config.py`
//! repeats the fields.

use super::notation::{Given, KIND, Pairs};
use crate::error::one_of;
use crate::{Error, Result};
use ironhorse_core::op::Act;
use serde_json::{Map, Value, json};

/// One field of the description of `C`.
pub(crate) struct Field<C> {
    /// Its key, then the other spellings that are understood.
    pub names: &'static [&'static str],
    /// Its key in a Hugging Face `config.json`. Where there are several, all of them are written and must agree.
    pub hf: &'static [&'static str],
    /// Whether a description without it is incomplete.
    pub required: bool,
    /// What kind of value it holds: "a whole number".
    pub expected: fn() -> String,
    /// Stores a value if it is of the field's kind.
    pub set: fn(&mut C, &Given) -> Option<()>,
    /// The value as JSON.
    pub get: fn(&C) -> Value,
    /// Whether it has its default.
    pub is_default: fn(&C) -> bool,
    /// The value as errors show it.
    pub show: fn(&C) -> String,
    /// What is expected instead, if the value is out of range.
    pub problem: fn(&C) -> Option<String>,
}

impl<C> Field<C> {
    /// All spellings, for errors: `n_layer|layers|depth|L`.
    fn spellings(&self) -> String {
        self.names.join("|")
    }
}

/// A family of models whose configuration is a table of fields.
pub(crate) trait Described: Copy + 'static {
    /// What the key `kind` may say.
    const KINDS: &'static [&'static str];
    /// The table, in the order in which files have it.
    const FIELDS: &'static [Field<Self>];
    /// Fields that models did not always have: our files leave them out where they have their default.
    const LATER: &'static [&'static str];

    /// Takes over what a kind decides.
    fn set_kind(&mut self, _kind: &str) {}

    /// Every field at its default; fields that must be given are 0.
    fn blank() -> Self;

    /// Fills in the fields whose default depends on others; `given` tells which were set.
    fn complete(&mut self, given: impl Fn(&str) -> bool) -> Result<()>;

    /// Refuses fields that do not fit together; each of them alone is in range.
    fn check(&self) -> Result<()>;
}

/// A type that a field may have.
pub(crate) trait FieldValue: Copy + std::fmt::Display {
    /// Stands for a value that must be given, before it is.
    const BLANK: Self;
    /// What values of this type are called.
    fn expected() -> String;
    /// The value, if it is one of this type.
    fn read(given: &Given) -> Option<Self>;
    /// The value as JSON.
    fn json(self) -> Value;
}

impl FieldValue for bool {
    const BLANK: Self = false;

    fn expected() -> String {
        "true or false".into()
    }

    fn read(given: &Given) -> Option<Self> {
        match given {
            Given::Bool(value) => Some(*value),
            Given::Word(text) => text.parse().ok(),
            _ => None,
        }
    }

    fn json(self) -> Value {
        json!(self)
    }
}

impl FieldValue for usize {
    const BLANK: Self = 0;

    fn expected() -> String {
        "a whole number".into()
    }

    fn read(given: &Given) -> Option<Self> {
        match given {
            Given::Int(value) => Self::try_from(*value).ok(),
            Given::Word(text) => text.parse().ok(),
            _ => None,
        }
    }

    fn json(self) -> Value {
        json!(self)
    }
}

impl FieldValue for f64 {
    const BLANK: Self = 0.0;

    fn expected() -> String {
        "a number".into()
    }

    fn read(given: &Given) -> Option<Self> {
        match given {
            Given::Int(value) => Some(*value as Self),
            Given::Float(value) => Some(*value),
            Given::Word(text) => text.parse().ok(),
            _ => None,
        }
    }

    fn json(self) -> Value {
        json!(self)
    }
}

impl FieldValue for Act {
    const BLANK: Self = Self::Gelu;

    fn expected() -> String {
        one_of(Self::ALL.iter().map(|act| act.name()))
    }

    fn read(given: &Given) -> Option<Self> {
        Self::parse(given.word()?)
    }

    fn json(self) -> Value {
        json!(self.name())
    }
}

/// Declares a configuration and its table. Each field: its type and default (`None` if it must be given), its other
/// spellings, its keys in a Hugging Face `config.json`, and its range.
macro_rules! described {
    ($(#[$meta:meta])* $config:ident { $(
        $(#[$doc:meta])*
        $name:ident: $type:ty = $default:expr, [$($alias:literal),*], hf [$($hf:literal),*], $range:expr;
    )* }) => {
        $(#[$meta])*
        pub struct $config { $($(#[$doc])* pub $name: $type,)* }

        impl $config {
            const TABLE: &'static [$crate::model::describe::Field<Self>] = &[$($crate::model::describe::Field {
                names: &[stringify!($name), $($alias),*],
                hf: &[$($hf),*],
                required: {
                    const DEFAULT: Option<$type> = $default;
                    DEFAULT.is_none()
                },
                expected: <$type as $crate::model::describe::FieldValue>::expected,
                set: |config, given| {
                    config.$name = $crate::model::describe::FieldValue::read(given)?;
                    Some(())
                },
                get: |config| $crate::model::describe::FieldValue::json(config.$name),
                is_default: |config| config.$name == Self::BLANK.$name,
                show: |config| config.$name.to_string(),
                problem: |config| ($range)(config.$name),
            }),*];

            /// Every field at its default; fields that must be given are 0.
            const BLANK: Self = Self { $($name: match $default {
                Some(value) => value,
                None => <$type as $crate::model::describe::FieldValue>::BLANK,
            }),* };
        }
    };
}
pub(crate) use described;

/// V is padded to a multiple of this, so that the output GEMM has whole tiles.
pub(crate) const VOCAB_MULTIPLE: usize = 128;
/// The largest size: with 32 bits each, no product of two of them overflows, and neither does padding.
pub(crate) const MAX_SIZE: usize = i32::MAX as usize - VOCAB_MULTIPLE;
/// Far beyond any model that trains, and few enough that tables and programs stay small when the width is tiny.
pub(crate) const MAX_LAYERS: usize = 1024;
/// More parameters than any machine this runs on can hold: a typing error or a broken header.
const MAX_PARAMS: u128 = 1 << 40;

/// A range of sizes.
pub(crate) fn size(least: usize, most: usize) -> impl Fn(usize) -> Option<String> {
    move |value| match value {
        _ if value < least => Some(format!("at least {least}")),
        _ if value > most => Some(format!("at most {most}")),
        _ => None,
    }
}

/// Numbers that f32, the type of an op's constants, holds as finite and above 0.
pub(crate) fn above_0(value: f64) -> Option<String> {
    let fits = (value as f32).is_finite() && value as f32 > 0.0;
    (!fits).then(|| "a number above 0".into())
}

/// Numbers that f32 holds as finite and that are 0 or more.
pub(crate) fn at_least_0(value: f64) -> Option<String> {
    let fits = (value as f32).is_finite() && value >= 0.0;
    (!fits).then(|| "a number of at least 0".into())
}

/// V rounded up to a multiple of 128.
pub(crate) const fn padded(vocab_size: usize) -> usize {
    match vocab_size.checked_next_multiple_of(VOCAB_MULTIPLE) {
        Some(padded) => padded,
        None => vocab_size,
    }
}

/// A size as a factor of a parameter count. Sizes that are out of range are cut, so that no count overflows.
pub(crate) fn factor(size: usize) -> u128 {
    (size as u128).min(1 << 31)
}

/// Refuses a number of parameters that no machine holds; the error names these `sizes`.
pub(crate) fn check_params(count: u128, sizes: [(&str, usize); 2]) -> Result<()> {
    let [(layers, depth), (width, channels)] = sizes;
    let expected = || format!("at most 2^40 ({layers} {depth}, {width} {channels})");
    if count <= MAX_PARAMS { Ok(()) } else { Err(Error::input("number of parameters", count, expected())) }
}

/// Refuses a configuration with a field that is out of range, or fields that do not fit together. After it no product of
/// sizes overflows.
pub(crate) fn validate<C: Described>(config: &C) -> Result<()> {
    for field in C::FIELDS {
        if let Some(expected) = (field.problem)(config) {
            return Err(Error::input(field.names[0], (field.show)(config), expected));
        }
    }
    config.check()
}

/// Builds a configuration field by field.
pub(crate) struct Filling<C> {
    config: C,
    given: Vec<bool>,
}

impl<C: Described> Filling<C> {
    pub fn new() -> Self {
        Self { config: C::blank(), given: vec![false; C::FIELDS.len()] }
    }

    /// Takes over what a kind decides.
    pub fn set_kind(&mut self, kind: &str) {
        self.config.set_kind(kind);
    }

    /// Sets the field at a place in the table, which goes by `key` where the value comes from.
    pub fn set(&mut self, at: usize, key: &str, value: &Given) -> Result<()> {
        let field = &C::FIELDS[at];
        if std::mem::replace(&mut self.given[at], true) {
            return Err(Error::input(field.spellings(), "given twice", "once"));
        }
        let set = (field.set)(&mut self.config, value);
        set.ok_or_else(|| Error::input(key, value, (field.expected)()))
    }

    /// The configuration, complete and valid.
    pub fn finish(mut self) -> Result<C> {
        let missing = C::FIELDS.iter().zip(&self.given).find(|(field, given)| field.required && !**given);
        if let Some((field, _)) = missing {
            return Err(Error::input(field.spellings(), "missing", (field.expected)()));
        }
        let given = self.given;
        self.config.complete(|name| {
            C::FIELDS.iter().zip(&given).any(|(field, given)| field.names[0] == name && *given)
        })?;
        validate(&self.config)?;
        Ok(self.config)
    }
}

/// Whether `key` is a spelling of a field.
pub(crate) fn position<C: Described>(key: &str) -> Option<usize> {
    C::FIELDS.iter().position(|field| field.names.contains(&key))
}

/// The configuration of this kind that keys and values describe, under any of their spellings.
pub(crate) fn read_as<C: Described>(kind: &str, pairs: &Pairs) -> Result<C> {
    let mut filling = Filling::<C>::new();
    filling.set_kind(kind);
    for (key, value) in pairs {
        if key == KIND {
            let kind = value.word().filter(|kind| C::KINDS.contains(kind));
            filling.set_kind(kind.ok_or_else(|| Error::input(KIND, value, one_of(C::KINDS)))?);
            continue;
        }
        let known = || C::FIELDS.iter().map(|field| field.spellings()).collect::<Vec<_>>().join(", ");
        let at = position::<C>(key)
            .ok_or_else(|| Error::unknown("key", key, format!("one of: {}, {KIND}", known())))?;
        filling.set(at, key, value)?;
    }
    filling.finish()
}

/// The inverse of [`read_as`]: every field under its key.
pub(crate) fn to_json<C: Described>(config: &C) -> Map<String, Value> {
    let told = |field: &&Field<C>| !(C::LATER.contains(&field.names[0]) && (field.is_default)(config));
    let told = C::FIELDS.iter().filter(told);
    told.map(|field| (field.names[0].to_owned(), (field.get)(config))).collect()
}
