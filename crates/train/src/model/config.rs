//! A model of any family: what sessions, files and commands need of one without knowing which it is.

use super::decoder::{self, Plan};
use super::describe::{self, Described, position};
use super::named::NAMED;
use super::notation::{KIND, Notation, Pairs};
use super::{Gpt2Config, MoeConfig, ServingStep, StepOptions, TensorSpec, gpt2, moe};
use crate::error::one_of;
use crate::{Error, Result};
use ironhorse_core::{Precision, Program};
use serde_json::{Map, Value};
use std::path::Path;

/// The sizes of a model of any family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelConfig {
    /// GPT-2.
    Gpt2(Gpt2Config),
    /// A decoder of Llama's design, dense or a mixture of experts.
    Moe(MoeConfig),
}

impl From<Gpt2Config> for ModelConfig {
    fn from(config: Gpt2Config) -> Self {
        Self::Gpt2(config)
    }
}

impl From<MoeConfig> for ModelConfig {
    fn from(config: MoeConfig) -> Self {
        Self::Moe(config)
    }
}

impl From<&Self> for ModelConfig {
    fn from(config: &Self) -> Self {
        *config
    }
}

impl From<&Gpt2Config> for ModelConfig {
    fn from(config: &Gpt2Config) -> Self {
        Self::Gpt2(*config)
    }
}

/// Evaluates an expression with the configuration of whichever family it is.
macro_rules! either {
    ($self:expr, $config:ident => $value:expr) => {
        match $self {
            ModelConfig::Gpt2($config) => $value,
            ModelConfig::Moe($config) => $value,
        }
    };
}

impl ModelConfig {
    /// `gpt2`, or one of [`MoeConfig::kind`].
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "gpt2",
            Self::Moe(config) => config.kind(),
        }
    }

    /// Refuses sizes that no model can have.
    pub fn validate(&self) -> Result<()> {
        either!(self, config => config.validate())
    }

    /// The parameter table in model order. Call `validate` first: invalid sizes can make a huge table.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        either!(self, config => config.tensors())
    }

    /// How many tensors a layer has: files with fewer are refused before a table is made of what their header claims.
    pub fn tensors_per_layer(&self) -> usize {
        either!(self, config => config.tensors_per_layer())
    }

    /// Parameters in memory, the padding of the vocabulary included.
    pub fn num_params(&self) -> usize {
        either!(self, config => config.num_params())
    }

    /// Parameters as reports count them: without the padding of the vocabulary where files have none either.
    pub fn told_params(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.num_params(),
            Self::Moe(config) => config.total_params(),
        }
    }

    /// Parameters that one token uses, where that is not all of them; without padding.
    pub fn active_params(&self) -> Option<usize> {
        match self {
            Self::Moe(config) if self.has_experts() => Some(config.active_params()),
            _ => None,
        }
    }

    /// Whether layers have experts.
    pub fn has_experts(&self) -> bool {
        matches!(self, Self::Moe(config) if config.n_experts > 0)
    }

    /// V
    pub fn vocab_size(&self) -> usize {
        either!(self, config => config.vocab_size)
    }

    /// Vp: V and its padding in memory.
    pub fn padded_vocab_size(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.padded_vocab_size,
            Self::Moe(config) => config.padded_vocab_size(),
        }
    }

    /// maxT
    pub fn max_seq_len(&self) -> usize {
        either!(self, config => config.max_seq_len)
    }

    /// L
    pub fn layers(&self) -> usize {
        either!(self, config => config.n_layer)
    }

    /// C
    pub fn width(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_embd,
            Self::Moe(config) => config.hidden,
        }
    }

    /// What weights of norms start as, so that norms multiply by 1.
    pub(super) fn norm_start(&self) -> f32 {
        match self {
            Self::Gpt2(_) => 1.0,
            Self::Moe(config) => 1.0 - config.family.gain().offset(),
        }
    }

    /// Whether a parameter has a row for each token: V of them in files, Vp in memory.
    pub fn is_vocab_table(&self, name: &str) -> bool {
        match self {
            Self::Gpt2(_) => name == gpt2::EMBED,
            Self::Moe(_) => name == moe::EMBED || name == moe::HEAD,
        }
    }

    /// The shape of a parameter without the padding of the vocabulary.
    pub fn unpadded_shape(&self, spec: &TensorSpec) -> Vec<usize> {
        let mut dims = spec.shape.dims().to_vec();
        if self.is_vocab_table(&spec.name) {
            dims[0] = self.vocab_size();
        }
        dims
    }

    /// Whether both have the same parameters and compute the same logits from them. Files say the same in different ways:
    /// Hugging Face's have no padding, one number for RoPE's base and alpha, and without experts no auxiliary loss.
    pub fn computes_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Gpt2(a), Self::Gpt2(b)) => {
                *a == Gpt2Config { padded_vocab_size: a.padded_vocab_size, ..*b }
            }
            (Self::Moe(a), Self::Moe(b)) => a.computes_as(b),
            _ => false,
        }
    }

    /// The sizes of a GPT-2, for files that hold no other model; `instead` says what does.
    pub fn gpt2(&self, what: &str, instead: &str) -> Result<&Gpt2Config> {
        match self {
            Self::Gpt2(config) => Ok(config),
            Self::Moe(_) => Err(Error::Unsupported(format!(
                "{what} holds a GPT-2 only, not a model of kind {}; {instead}",
                self.kind()
            ))),
        }
    }

    pub(super) fn plan(&self) -> Result<Plan> {
        self.validate()?;
        Ok(either!(self, config => config.plan()))
    }

    /// A training step: forward with loss, backward, update. Io: `x`, `y`, `losses`, `loss`, `norm`, `halt`; with experts
    /// also `cross_entropy` and, for each layer N, `layers.N.load` (E), `layers.N.aux` and `layers.N.entropy`. `loss` is
    /// the cross-entropy and every layer's `aux`; of packed sequences also `positions`; of pairs also `pairs`, `reference`, `rewards` and `reward_means`. `options` may be a [`Recompute`](super::Recompute) alone.
    pub fn training(
        &self,
        batch: (usize, usize),
        options: impl Into<StepOptions>,
        precision: Precision,
    ) -> Result<Program> {
        let options = options.into();
        if options.dropout.drops() && !matches!(self, Self::Gpt2(_)) {
            let found = format!("{:.4} for a model of kind {}", options.dropout.rate(), self.kind());
            return Err(Error::input("dropout", found, "0: only GPT-2 has dropout"));
        }
        decoder::training(self.plan()?, batch, options, precision)
    }

    /// The cross-entropy of a batch as `loss`, nothing kept for a backward. Io: `x`, `y`, `losses`, `loss`.
    pub fn evaluation(&self, batch: (usize, usize), precision: Precision) -> Result<Program> {
        self.evaluation_of(batch, StepOptions::default(), precision)
    }

    /// [`evaluation`](Self::evaluation) of sequences that hold several documents. Io: also `positions`.
    pub fn packed_evaluation(&self, batch: (usize, usize), precision: Precision) -> Result<Program> {
        self.evaluation_of(batch, StepOptions { packed: true, ..StepOptions::default() }, precision)
    }

    /// [`evaluation`](Self::evaluation) of what a training step of these options is given: packed sequences, pairs. Io: as
    /// for [`training`](Self::training).
    pub fn evaluation_of(
        &self,
        batch: (usize, usize),
        options: StepOptions,
        precision: Precision,
    ) -> Result<Program> {
        decoder::evaluation(self.plan()?, batch, options, precision)
    }

    /// [`evaluation`](Self::evaluation) that also tells the most likely token at each position. Io: also `best`.
    pub fn scoring(&self, batch: (usize, usize), precision: Precision) -> Result<Program> {
        decoder::scoring(self.plan()?, batch, precision)
    }

    /// The logits after every token of a batch. Io: `x`, `logits` (B,T,Vp).
    pub fn logits(&self, batch: (usize, usize), precision: Precision) -> Result<Program> {
        decoder::logits(self.plan()?, batch, precision)
    }

    /// One token for each of `batch` sequences at the scalar `position`, over a key/value cache. Io: `x`, `logits`.
    pub fn decoding(&self, batch: usize, precision: Precision) -> Result<Program> {
        decoder::decoding(self.plan()?, batch, None, precision)
    }

    /// [`decoding`](Self::decoding) whose cache has room for the first `positions` only: a context of 40,960 tokens takes
    /// gigabytes, and a short text does not need them.
    pub fn decoding_within(&self, batch: usize, positions: usize, precision: Precision) -> Result<Program> {
        decoder::decoding(self.plan()?, batch, Some(positions), precision)
    }

    /// New tokens of several sequences over a key/value cache. Io: `x`, `rows`, `positions` and `logits`; `picks` where only
    /// some tokens have logits.
    pub fn serving(&self, step: ServingStep, precision: Precision) -> Result<Program> {
        decoder::serving(self.plan()?, step, precision)
    }

    /// Reads a description of this kind.
    fn of_kind(kind: &str, pairs: &Pairs) -> Result<Self> {
        match kind {
            _ if Gpt2Config::KINDS.contains(&kind) => describe::read_as(kind, pairs).map(Self::Gpt2),
            _ if MoeConfig::KINDS.contains(&kind) => describe::read_as(kind, pairs).map(Self::Moe),
            _ => Err(Self::unknown_kind(&format!("{kind:?}"))),
        }
    }

    /// All kinds of models.
    pub fn kinds() -> Vec<&'static str> {
        [Gpt2Config::KINDS, MoeConfig::KINDS].concat()
    }

    fn unknown_kind(given: &dyn std::fmt::Display) -> Error {
        Error::input(KIND, given, one_of(Self::kinds()))
    }

    /// Reads a description of the kind that it names, or that its keys belong to.
    fn from_pairs(pairs: &Pairs) -> Result<Self> {
        // Another spelling of a size that GPT-2 has too does not make a mixture: it is a mistake in describing a GPT-2.
        let is_shared = |at: usize| position::<Gpt2Config>(MoeConfig::FIELDS[at].names[0]).is_some();
        let only_moe = |key: &str| {
            position::<Gpt2Config>(key).is_none()
                && position::<MoeConfig>(key).is_some_and(|at| !is_shared(at))
        };
        let kind = match pairs.iter().find(|(key, _)| key == KIND) {
            Some((_, given)) => given.word().ok_or_else(|| Self::unknown_kind(given))?,
            None if pairs.iter().any(|(key, _)| only_moe(key)) => "moe",
            None => "gpt2",
        };
        Self::of_kind(kind, pairs)
    }

    /// The sizes in a text; a line without `=` is the name of a model. With a `kind` (`gpt2`, `moe`, `llama`) only a model
    /// of that family is accepted.
    pub fn from_text(text: &str, notation: Notation, kind: Option<&str>) -> Result<Self> {
        if let Some((name, changes)) = text.split_once(',').filter(|_| notation == Notation::Line)
            && !name.contains('=')
            && !changes.trim().is_empty()
        {
            return Self::changed(name.trim(), changes, kind);
        }
        if notation == Notation::Line && !text.contains('=') {
            let config = Self::of_name(text.trim())?;
            return match kind {
                Some(kind) if Self::keys(kind) != Self::keys(config.kind()) => Err(Error::input(
                    "model",
                    format!("{}, a {}", text.trim(), config.kind()),
                    format!("a {kind}"),
                )),
                _ => Ok(config),
            };
        }
        let pairs = notation.pairs(text)?;
        match kind {
            None => Self::from_pairs(&pairs),
            Some(kind) => Self::of_kind(kind, &pairs),
        }
    }

    /// The sizes in a TOML text with the keys of the command line.
    ///
    /// ```
    /// use ironhorse_train::model::ModelConfig;
    /// let text = "hidden = 64\nlayers = 2\nheads = 4\nexperts = 8\ntop_k = 2\nffn = 256\nrope_alpha = 1.5";
    /// assert_eq!(ModelConfig::from_toml(text)?.kind(), "moe");
    /// # Ok::<(), ironhorse_train::Error>(())
    /// ```
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::from_text(text, Notation::Toml, None)
    }

    /// The sizes in a TOML file; the error names the file.
    pub fn from_toml_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::io(path, "read", source))?;
        Self::from_toml(&text).map_err(|error| error.in_file(path))
    }

    /// A named model with some of its fields changed: `d12` and `act=relu2`.
    fn changed(name: &str, changes: &str, kind: Option<&str>) -> Result<Self> {
        let named = Self::of_name(name)?;
        let changes = Notation::Line.pairs(changes)?;
        let keys = Self::keys(named.kind());
        let field = |key: &str| keys.iter().position(|names| names.contains(&key));
        let mut pairs = Notation::Json.pairs(&named.to_json().to_string())?;
        pairs.retain(|(key, _)| !changes.iter().any(|(changed, _)| field(changed) == field(key)));
        if changes.iter().any(|(key, _)| field(key) == field("vocab_size")) {
            pairs.retain(|(key, _)| key != "padded_vocab_size"); // follows from the vocabulary
        }
        pairs.extend(changes);
        Self::of_kind(kind.unwrap_or(named.kind()), &pairs)
    }

    /// A named model or sizes in one line: `d12`, `gpt2`, `moe-tiny`, `d12,context=2048`, `n_layer=3,n_head=5,n_embd=40`,
    /// `hidden=64,n_layer=2,n_head=4,n_experts=4,top_k=2,ffn=256`.
    pub fn parse(text: &str) -> Result<Self> {
        Self::from_text(text, Notation::Line, None)
    }

    fn of_name(name: &str) -> Result<Self> {
        Self::named(name).unwrap_or_else(|| {
            let expected = format!(
                "{}, a checkpoint file or folder, a TOML file, or sizes such as n_layer=2,n_head=4,n_embd=64",
                Self::listed_names()
            );
            Err(Error::unknown("model", name, expected))
        })
    }

    /// The model of this name, if there is one.
    pub fn named(name: &str) -> Option<Result<Self>> {
        let (_, sizes) = NAMED.iter().find(|(names, _)| names.contains(&name))?;
        Some(Self::from_text(sizes, Notation::Line, None))
    }

    /// The names of all named models, each model's first name first.
    pub fn names() -> impl Iterator<Item = &'static [&'static str]> {
        NAMED.iter().map(|(names, _)| *names)
    }

    /// The same as a list for people: `d12|gpt2, d24|gpt2-medium, …`.
    pub fn listed_names() -> String {
        Self::names().map(|names| names.join("|")).collect::<Vec<_>>().join(", ")
    }

    /// The keys of a description of this kind, each with its other spellings after it; empty for an unknown kind.
    pub fn keys(kind: &str) -> Vec<&'static [&'static str]> {
        fn of<C: Described>() -> Vec<&'static [&'static str]> {
            C::FIELDS.iter().map(|field| field.names).collect()
        }
        match kind {
            _ if Gpt2Config::KINDS.contains(&kind) => of::<Gpt2Config>(),
            _ if MoeConfig::KINDS.contains(&kind) => of::<MoeConfig>(),
            _ => Vec::new(),
        }
    }

    /// The sizes in a JSON object, as our own files carry them.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_text(text, Notation::Json, None)
    }

    /// The sizes in a JSON object of another tool, of a model of this kind: keys that we do not know are ignored.
    pub(crate) fn from_foreign_json(kind: &str, text: &str) -> Result<Self> {
        let mut pairs = Notation::Json.pairs(text)?;
        let known = Self::keys(kind);
        pairs.retain(|(key, _)| key == KIND || known.iter().any(|names| names.contains(&key.as_str())));
        Self::of_kind(kind, &pairs)
    }

    /// The inverse of [`ModelConfig::from_json`].
    pub fn to_json(&self) -> Value {
        Value::Object(self.to_map())
    }

    fn to_map(self) -> Map<String, Value> {
        either!(&self, config => describe::to_json(config))
    }

    /// The sizes in one line, as [`ModelConfig::parse`] reads them.
    pub fn to_line(&self) -> String {
        let pairs = self.to_map().into_iter().map(|(key, value)| match value {
            Value::String(word) => format!("{key}={word}"),
            value => format!("{key}={value}"),
        });
        pairs.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
