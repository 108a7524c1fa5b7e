//! The sizes of a GPT-2 and its parameter table.

use ironhorse_core::Shape;

use super::moe::MoeConfig;
use crate::{Error, Result};

/// The sizes of a GPT-2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gpt2Config {
    /// The longest sequence the position table holds (maxT).
    pub max_seq_len: usize,
    /// Tokens of the vocabulary (V).
    pub vocab_size: usize,
    /// Rows of the token table in memory (Vp): V rounded up, the rows beyond V are zero.
    pub padded_vocab_size: usize,
    /// Transformer blocks (L).
    pub n_layer: usize,
    /// Attention heads (NH).
    pub n_head: usize,
    /// Channels (C).
    pub n_embd: usize,
}

/// One row of the parameter table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The Hugging Face name; of GPT-2 without `transformer.`: `h.3.mlp.c_fc.weight`.
    pub name: String,
    /// Weights are (out, in).
    pub shape: Shape,
    /// Whether weight decay applies: to matrices, not to biases and norms.
    pub decay: bool,
}

impl TensorSpec {
    pub(super) fn new<const N: usize>(name: impl Into<String>, dims: [usize; N]) -> Self {
        Self { name: name.into(), shape: Shape::new(dims), decay: N == 2 }
    }
}

/// V is padded to a multiple of this, so that the output GEMM has round tiles.
pub(super) const VOCAB_MULTIPLE: usize = 128;
/// More parameters than any machine this runs on can hold: a typing error or a broken header.
pub(super) const MAX_PARAMS: u64 = 1 << 40;
/// Far beyond any model that trains, and few enough that tables and programs stay small when the width is tiny.
pub(super) const MAX_LAYERS: usize = 1024;

impl Gpt2Config {
    /// The named sizes: name, layers, heads, width.
    pub const NAMED: [(&'static str, usize, usize, usize); 4] =
        [("d12", 12, 12, 768), ("d24", 24, 16, 1024), ("d36", 36, 20, 1280), ("d48", 48, 25, 1600)];

    /// Sizes with the vocabulary padded to a multiple of 128.
    pub fn new(max_seq_len: usize, vocab_size: usize, n_layer: usize, n_head: usize, n_embd: usize) -> Self {
        let padded_vocab_size = vocab_size.checked_next_multiple_of(VOCAB_MULTIPLE).unwrap_or(vocab_size);
        Self { max_seq_len, vocab_size, padded_vocab_size, n_layer, n_head, n_embd }
    }

    /// One of the GPT-2 sizes: d12, d24, d36, d48.
    pub fn named(name: &str) -> Result<Self> {
        match Self::NAMED.iter().find(|size| size.0 == name) {
            Some(&(_, layers, heads, width)) => Ok(Self::new(1024, 50257, layers, heads, width)),
            None => {
                let gpt2 = Self::NAMED.iter().map(|size| size.0);
                let names: Vec<_> = gpt2.chain(MoeConfig::NAMED.iter().map(|size| size.0)).collect();
                Err(Error::config(format!(
                    "unknown model `{name}`: expected {}, a checkpoint file or folder, a TOML file, or sizes \
                     such as n_layer=2,n_head=4,n_embd=64",
                    names.join(", ")
                )))
            }
        }
    }

    /// Refuses sizes that no model can have. Everything below relies on it: after it no product overflows.
    pub fn validate(&self) -> Result<()> {
        match self.problem() {
            None => Ok(()),
            Some((field, found, expected)) => {
                Err(Error::config(format!("{field} is {found}, expected {expected}")))
            }
        }
    }

    /// What is wrong, as (field, found, expected), for readers that name their file as well.
    pub(crate) fn problem(&self) -> Option<(&'static str, String, String)> {
        let fields = [
            ("max_seq_len", self.max_seq_len),
            ("vocab_size", self.vocab_size),
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_embd", self.n_embd),
        ];
        if let Some((name, _)) = fields.iter().find(|field| field.1 == 0) {
            return Some((name, "0".into(), "at least 1".into()));
        }
        if self.padded_vocab_size < self.vocab_size {
            let expected = format!("at least vocab_size, {}", self.vocab_size);
            return Some(("padded_vocab_size", self.padded_vocab_size.to_string(), expected));
        }
        if self.vocab_size > i32::MAX as usize {
            return Some(("vocab_size", self.vocab_size.to_string(), format!("at most {}", i32::MAX)));
        }
        if !self.n_embd.is_multiple_of(self.n_head) {
            let expected = format!("a divisor of n_embd, {}", self.n_embd);
            return Some(("n_head", self.n_head.to_string(), expected));
        }
        if self.n_layer > MAX_LAYERS {
            return Some(("n_layer", self.n_layer.to_string(), format!("at most {MAX_LAYERS}")));
        }
        match self.checked_params() {
            Some(count) if count <= MAX_PARAMS => None,
            count => Some((
                "number of parameters",
                count.map_or("more than 2^64".into(), |count| count.to_string()),
                format!("at most 2^40 (n_layer {}, n_embd {})", self.n_layer, self.n_embd),
            )),
        }
    }

    fn checked_params(&self) -> Option<u64> {
        let c = self.n_embd as u64;
        let tables = (self.padded_vocab_size as u64).checked_add(self.max_seq_len as u64)?.checked_mul(c)?;
        // per block: 12 C*C of matrices and 13 C of biases and norms
        let block = c.checked_mul(12)?.checked_add(13)?.checked_mul(c)?;
        let blocks = block.checked_mul(self.n_layer as u64)?;
        tables.checked_add(blocks)?.checked_add(c.checked_mul(2)?)
    }

    /// Parameters in memory, the padding of the vocabulary included. 0 for sizes that `validate` refuses as too
    /// large to count.
    pub fn num_params(&self) -> usize {
        self.checked_params().and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
    }

    /// How many tensors a layer has.
    pub fn tensors_per_layer(&self) -> usize {
        12
    }

    /// The channels of one head (HD).
    pub fn head_dim(&self) -> usize {
        self.n_embd / self.n_head.max(1)
    }

    /// The parameter table in model order. Call `validate` first: the table of absurd sizes is absurd.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let c = self.n_embd;
        let mut table = Vec::with_capacity(4 + 12 * self.n_layer);
        table.push(TensorSpec::new("wte.weight", [self.padded_vocab_size, c]));
        table.push(TensorSpec::new("wpe.weight", [self.max_seq_len, c]));
        for layer in 0..self.n_layer {
            let name = |part: &str| format!("h.{layer}.{part}");
            table.push(TensorSpec::new(name("ln_1.weight"), [c]));
            table.push(TensorSpec::new(name("ln_1.bias"), [c]));
            table.push(TensorSpec::new(name("attn.c_attn.weight"), [3 * c, c]));
            table.push(TensorSpec::new(name("attn.c_attn.bias"), [3 * c]));
            table.push(TensorSpec::new(name("attn.c_proj.weight"), [c, c]));
            table.push(TensorSpec::new(name("attn.c_proj.bias"), [c]));
            table.push(TensorSpec::new(name("ln_2.weight"), [c]));
            table.push(TensorSpec::new(name("ln_2.bias"), [c]));
            table.push(TensorSpec::new(name("mlp.c_fc.weight"), [4 * c, c]));
            table.push(TensorSpec::new(name("mlp.c_fc.bias"), [4 * c]));
            table.push(TensorSpec::new(name("mlp.c_proj.weight"), [c, 4 * c]));
            table.push(TensorSpec::new(name("mlp.c_proj.bias"), [c]));
        }
        table.push(TensorSpec::new("ln_f.weight", [c]));
        table.push(TensorSpec::new("ln_f.bias", [c]));
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_adds_up() {
        for (name, ..) in Gpt2Config::NAMED {
            let config = Gpt2Config::named(name).unwrap();
            config.validate().unwrap();
            let sum: usize = config.tensors().iter().map(|spec| spec.shape.numel()).sum();
            assert_eq!(sum, config.num_params(), "{name}");
            assert_eq!(config.tensors().len(), 4 + config.n_layer * config.tensors_per_layer());
        }
        // 124,439,808 of GPT-2 plus 47 padded rows
        assert_eq!(Gpt2Config::named("d12").unwrap().num_params(), 124_439_808 + 47 * 768);
    }

    #[test]
    fn only_matrices_decay() {
        let table = Gpt2Config::new(8, 5, 1, 1, 2).tensors();
        let decayed: Vec<_> = table.iter().filter(|spec| spec.decay).map(|spec| &*spec.name).collect();
        assert_eq!(
            decayed,
            [
                "wte.weight",
                "wpe.weight",
                "h.0.attn.c_attn.weight",
                "h.0.attn.c_proj.weight",
                "h.0.mlp.c_fc.weight",
                "h.0.mlp.c_proj.weight"
            ]
        );
    }

    fn refusal(config: Gpt2Config) -> String {
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn senseless_sizes_are_refused() {
        let good = Gpt2Config::new(8, 200, 3, 5, 40);
        good.validate().unwrap();
        assert_eq!(good.padded_vocab_size, 256);
        assert_eq!(refusal(Gpt2Config { n_head: 0, ..good }), "n_head is 0, expected at least 1");
        assert_eq!(refusal(Gpt2Config { n_embd: 0, ..good }), "n_embd is 0, expected at least 1");
        assert_eq!(
            refusal(Gpt2Config { n_head: 3, ..good }),
            "n_head is 3, expected a divisor of n_embd, 40"
        );
        assert_eq!(
            refusal(Gpt2Config { padded_vocab_size: 199, ..good }),
            "padded_vocab_size is 199, expected at least vocab_size, 200"
        );
        assert!(refusal(Gpt2Config { n_embd: usize::MAX, n_head: 1, ..good }).contains("more than 2^64"));
        assert!(refusal(Gpt2Config { n_embd: 1 << 20, n_head: 1, ..good }).contains("at most 2^40"));
        assert!(refusal(Gpt2Config { n_layer: usize::MAX, ..good }).contains("n_layer"));
        assert!(refusal(Gpt2Config::new(8, usize::MAX, 1, 1, 1)).contains("vocab_size"));
    }

    #[test]
    fn an_unknown_name_lists_the_possible() {
        let text = Gpt2Config::named("d13").unwrap_err().to_string();
        assert!(text.contains("d13") && text.contains("d12, d24, d36, d48"), "{text}");
    }
}
