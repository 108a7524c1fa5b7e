//! Any model: what sessions, files and commands need of one without knowing which it is.

use super::config_text::{Given, KEYS, KIND, Pairs, json_pairs, line_pairs, toml_pairs};
use super::moe::{self, MoeConfig};
use super::{Gpt2Config, Recompute, TensorSpec, gpt2};
use crate::{Error, Result};
use ironhorse_core::{Precision, Program};
use serde_json::Value;
use std::path::Path;

/// The sizes of a model of any kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelConfig {
    /// GPT-2.
    Gpt2(Gpt2Config),
    /// A mixture of experts, or the dense Llama shape.
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

/// Calls the method of that name of whichever model it is.
macro_rules! either {
    ($self:expr, $config:ident => $value:expr) => {
        match $self {
            ModelConfig::Gpt2($config) => $value,
            ModelConfig::Moe($config) => $value,
        }
    };
}

impl ModelConfig {
    /// `gpt2`, `moe` or `llama`.
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

    /// The parameter table in model order. Call `validate` first: the table of absurd sizes is absurd.
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

    /// Parameters to tell people of: without the padding of the vocabulary where files have none either.
    pub fn told_params(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.num_params(),
            Self::Moe(config) => config.total_params(),
        }
    }

    /// Parameters that one token meets, where that is not all of them; without padding.
    pub fn active_params(&self) -> Option<usize> {
        match self {
            Self::Moe(config) if config.n_experts > 0 => Some(config.active_params()),
            _ => None,
        }
    }

    /// V
    pub fn vocab_size(&self) -> usize {
        either!(self, config => config.vocab_size)
    }

    /// Vp: V and what pads it in memory.
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

    /// Whether a parameter has a row for each token: V of them in files, Vp in memory.
    pub fn is_vocab_table(&self, name: &str) -> bool {
        match self {
            Self::Gpt2(_) => name == "wte.weight",
            Self::Moe(_) => name == moe::EMBED || name == moe::HEAD,
        }
    }

    /// The shape of a parameter without what pads the vocabulary.
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
            Self::Moe(_) => Err(Error::Config(format!(
                "{what} holds a GPT-2 only, not a model of kind {}; {instead}",
                self.kind()
            ))),
        }
    }

    /// A training step: forward with loss, backward, update. Io: `x`, `y`, `losses`, `loss`, `norm`.
    pub fn training(
        &self,
        batch: (usize, usize),
        recompute: Recompute,
        precision: Precision,
    ) -> Result<Program> {
        match self {
            Self::Gpt2(config) => gpt2::training(config, batch, recompute, precision),
            Self::Moe(config) => moe::training(config, batch, recompute, precision),
        }
    }

    /// The loss of a batch, nothing kept for a backward. Io: `x`, `y`, `losses`, `loss`.
    pub fn evaluation(&self, batch: (usize, usize), precision: Precision) -> Result<Program> {
        match self {
            Self::Gpt2(config) => gpt2::evaluation(config, batch, precision),
            Self::Moe(config) => moe::evaluation(config, batch, precision),
        }
    }

    /// One token for each of `batch` sequences at the scalar `position`, over a key/value cache. Io: `x`, `logits`.
    pub fn decoding(&self, batch: usize, precision: Precision) -> Result<Program> {
        match self {
            Self::Gpt2(config) => gpt2::decoding(config, batch, precision),
            Self::Moe(config) => moe::decoding(config, batch, precision),
        }
    }

    /// The kind that is given, or the one that the keys belong to.
    fn from_pairs(pairs: &Pairs) -> Result<Self> {
        let kind = pairs.iter().find(|(key, _)| key == KIND).map(|(_, kind)| kind);
        // another spelling of a size that GPT-2 has too is a mistake of whoever describes a GPT-2
        let only_moe = |key: &str| {
            let field = moe::KEYS.iter().find(|names| names.contains(&key)).map(|names| names[0]);
            let shared = ["n_layer", "n_head", "vocab_size", "max_seq_len"];
            field.is_some_and(|field| !shared.contains(&field))
                && !KEYS.iter().any(|names| names.contains(&key))
        };
        let is_moe = match kind {
            Some(Given::Text(kind)) if kind == "moe" || kind == "llama" => true,
            Some(Given::Text(kind)) if kind == "gpt2" => false,
            Some(other) => {
                return Err(Error::config(format!("kind is {other}, expected gpt2, moe or llama")));
            }
            None => pairs.iter().any(|(key, _)| only_moe(key)),
        };
        if is_moe {
            MoeConfig::from_pairs(pairs).map(Self::Moe)
        } else {
            Gpt2Config::from_pairs(pairs).map(Self::Gpt2)
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
        Self::from_pairs(&toml_pairs(text)?)
    }

    /// The sizes in a TOML file; the error names the file.
    pub fn from_toml_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::io(path, "read", source))?;
        Self::from_toml(&text).map_err(|error| Error::config(format!("{}: {error}", path.display())))
    }

    /// A named size or sizes in one line: `d12`, `moe-tiny`, `n_layer=3,n_head=5,n_embd=40`,
    /// `hidden=64,n_layer=2,n_head=4,n_experts=4,top_k=2,ffn=256`.
    pub fn parse(text: &str) -> Result<Self> {
        if text.contains('=') {
            return Self::from_pairs(&line_pairs(text)?);
        }
        match MoeConfig::named(text.trim()) {
            Some(config) => Ok(Self::Moe(config)),
            None => Gpt2Config::named(text.trim()).map(Self::Gpt2),
        }
    }

    /// The sizes in a JSON object, as our own files carry them.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::from_pairs(&json_pairs(text)?)
    }

    /// The sizes in a JSON object of another tool, of a model of this kind: what else it says is ignored.
    pub(crate) fn from_foreign_json(kind: &str, text: &str) -> Result<Self> {
        match kind {
            "gpt2" => Gpt2Config::from_foreign_json(text).map(Self::Gpt2),
            _ => MoeConfig::from_foreign_json(text).map(Self::Moe),
        }
    }

    /// The inverse of [`ModelConfig::from_json`].
    pub fn to_json(&self) -> Value {
        either!(self, config => config.to_json())
    }

    /// The sizes in one line, as [`ModelConfig::parse`] reads them.
    pub fn to_line(&self) -> String {
        if let Self::Gpt2(c) = self {
            let Gpt2Config { max_seq_len, vocab_size, padded_vocab_size, n_layer, n_head, n_embd } = c;
            return format!(
                "n_layer={n_layer},n_head={n_head},n_embd={n_embd},vocab_size={vocab_size},max_seq_len={max_seq_len},\
                 padded_vocab_size={padded_vocab_size}"
            );
        }
        let json = self.to_json();
        let pairs = json.as_object().into_iter().flatten().map(|(key, value)| format!("{key}={value}"));
        pairs.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_say_which_model_it_is() {
        let parse = |text: &str| ModelConfig::parse(text).unwrap();
        assert_eq!(parse("d24").kind(), "gpt2");
        assert_eq!(parse("moe-tiny"), MoeConfig::named("moe-tiny").unwrap().into());
        assert_eq!(parse("n_layer=3,n_head=5,n_embd=40").kind(), "gpt2");
        assert_eq!(parse("kind=llama,n_layer=3,n_head=5,n_embd=40,ffn=8").kind(), "llama");
        let moe =
            parse("hidden=40, layers=3, heads=4, kv_heads=2, experts=3, top_k=1, ffn=9, aux_alpha=0.5,");
        let ModelConfig::Moe(config) = moe else { panic!("a mixture of experts") };
        assert_eq!((config.head_dim, config.n_kv_head, config.aux_alpha), (10, 2, 0.5));
        assert_eq!((config.vocab_size, config.max_seq_len, config.rms_eps), (32000, 32768, 1e-5));
    }

    #[test]
    fn every_spelling_leads_back_to_the_same_sizes() {
        let odd = MoeConfig { rope_alpha: 1.7, rms_eps: 3e-7, ..MoeConfig::named("moe-tiny").unwrap() };
        for config in [odd.into(), Gpt2Config::new(16, 300, 3, 5, 40).into()] {
            let config: ModelConfig = config;
            assert_eq!(ModelConfig::from_json(&config.to_json().to_string()).unwrap(), config);
            assert_eq!(ModelConfig::parse(&config.to_line()).unwrap(), config, "{}", config.to_line());
            let toml = config.to_line().replace(',', "\n");
            assert_eq!(ModelConfig::from_toml(&toml).unwrap(), config);
        }
    }

    #[test]
    fn mistakes_are_named() {
        let text = |line: &str| ModelConfig::parse(line).unwrap_err().to_string();
        assert!(text("d13").contains("d48, moe-6.9b, moe-tiny"), "{}", text("d13"));
        assert!(
            text("n_layer=1,n_heads=3")
                .starts_with("unknown key `n_heads`, expected one of: n_layer|layers|")
        );
        assert_eq!(text("kind=bert"), "kind is \"bert\", expected gpt2, moe or llama");
        assert_eq!(
            text("kind=moe,n_layer=2,n_head=2"),
            "hidden|hidden_dim|hidden_size|n_embd|width|d_model|C is missing"
        );
        assert!(text("kind=moe,n_layers=2,L=2").contains("n_layer|n_layers|layers|depth|L is given twice"));
        assert_eq!(text("ffn=1.5"), "ffn is \"1.5\", expected a whole number");
        assert_eq!(text("ffn=4,rope_alpha=x"), "rope_alpha is \"x\", expected a number");
        assert!(text("ffn=4,wpe=3").starts_with("unknown key `wpe`, expected one of: hidden|"));
        assert_eq!(
            text("hidden=64,layers=1,heads=3,ffn=4"),
            "n_head is 3, expected a divisor of hidden, 64, or a head_dim"
        );
        assert_eq!(
            text("hidden=64,layers=1,heads=4,ffn=4,experts=2,top_k=3"),
            "top_k is 3, expected from 1 to n_experts, 2"
        );
    }
}
