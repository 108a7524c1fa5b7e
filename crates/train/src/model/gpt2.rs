//! GPT-2: its description, its parameter table and the plan of its decoder.

use super::TensorSpec;
use super::blocks::{Heads, Setup};
use super::decoder::{ExpertNames, MlpKind, Names, Plan};
use super::describe::{
    self, Described, Field, MAX_LAYERS, MAX_SIZE, check_params, described, factor, padded, size,
};
use crate::{Error, Result};
use ironhorse_core::op::{Act, Gain};

described! {
    /// The sizes of a GPT-2.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    Gpt2Config {
        /// The longest sequence the position table holds (maxT).
        max_seq_len: usize = Some(1024), ["block_size", "n_positions", "n_ctx", "context", "maxT"],
            hf ["n_positions", "n_ctx"], size(1, MAX_SIZE);
        /// Tokens of the vocabulary (V).
        vocab_size: usize = Some(50257), ["vocabulary", "vocab", "V"], hf ["vocab_size"], size(1, MAX_SIZE);
        /// Rows of the token table in memory (Vp): V rounded up to a multiple of 128 unless a file says otherwise. The
        /// rows beyond V are zero.
        padded_vocab_size: usize = Some(0), ["Vp"], hf [], size(1, i32::MAX as usize);
        /// Transformer blocks (L).
        n_layer: usize = None, ["layers", "depth", "L"], hf ["n_layer"], size(1, MAX_LAYERS);
        /// Attention heads (NH).
        n_head: usize = None, ["heads", "NH"], hf ["n_head"], size(1, MAX_SIZE);
        /// Channels (C).
        n_embd: usize = None, ["width", "d_model", "C"], hf ["n_embd"], size(1, MAX_SIZE);
        /// The activation of the MLP.
        act: Act = Some(Act::Gelu), [], hf ["activation_function"], |_| None;
    }
}

impl Described for Gpt2Config {
    const KINDS: &'static [&'static str] = &["gpt2"];
    const FIELDS: &'static [Field<Self>] = Self::TABLE;
    const LATER: &'static [&'static str] = &["act"];

    fn blank() -> Self {
        Self::BLANK
    }

    fn complete(&mut self, given: impl Fn(&str) -> bool) -> Result<()> {
        if !given("padded_vocab_size") {
            self.padded_vocab_size = padded(self.vocab_size);
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let Self { vocab_size, padded_vocab_size, n_layer, n_head, n_embd, .. } = *self;
        if padded_vocab_size < vocab_size {
            let expected = format!("at least vocab_size, {vocab_size}");
            return Err(Error::input("padded_vocab_size", padded_vocab_size, expected));
        }
        if !n_embd.is_multiple_of(n_head) {
            return Err(Error::input("n_head", n_head, format!("a divisor of n_embd, {n_embd}")));
        }
        check_params(self.count_params(), [("n_layer", n_layer), ("n_embd", n_embd)])
    }
}

impl Gpt2Config {
    /// Sizes with the vocabulary padded to a multiple of 128.
    pub const fn new(
        max_seq_len: usize,
        vocab_size: usize,
        n_layer: usize,
        n_head: usize,
        n_embd: usize,
    ) -> Self {
        let mut config = Self::BLANK;
        config.max_seq_len = max_seq_len;
        config.vocab_size = vocab_size;
        config.padded_vocab_size = padded(vocab_size);
        config.n_layer = n_layer;
        config.n_head = n_head;
        config.n_embd = n_embd;
        config
    }

    /// Refuses sizes that no model can have. Everything below relies on it: after it no product overflows.
    pub fn validate(&self) -> Result<()> {
        describe::validate(self)
    }

    fn count_params(&self) -> u128 {
        let [c, rows, positions] = [self.n_embd, self.padded_vocab_size, self.max_seq_len].map(factor);
        // per block: 12 C*C of matrices and 13 C of biases and norms
        (rows + positions) * c + factor(self.n_layer) * (12 * c + 13) * c + 2 * c
    }

    /// Parameters in memory, the padding of the vocabulary included. 0 for sizes that `validate` refuses as too large to
    /// count.
    pub fn num_params(&self) -> usize {
        usize::try_from(self.count_params()).unwrap_or(0)
    }

    /// How many tensors a layer has.
    pub fn tensors_per_layer(&self) -> usize {
        12
    }

    /// The channels of one head (HD).
    pub fn head_dim(&self) -> usize {
        self.n_embd / self.n_head.max(1)
    }

    /// The parameter table in model order. Call `validate` first: invalid sizes can make a huge table.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let c = self.n_embd;
        let mut table = Vec::with_capacity(4 + 12 * self.n_layer);
        table.push(TensorSpec::new(EMBED, [self.padded_vocab_size, c]));
        table.push(TensorSpec::new("wpe.weight", [self.max_seq_len, c]));
        for layer in 0..self.n_layer {
            let name = |part: &str| format!("h.{layer}.{part}");
            table.push(TensorSpec::new(name("ln_1.weight"), [c]));
            table.push(TensorSpec::new(name("ln_1.bias"), [c]));
            table.push(TensorSpec::new(name("attn.c_attn.weight"), [3 * c, c]).matrices(3));
            table.push(TensorSpec::new(name("attn.c_attn.bias"), [3 * c]));
            table.push(TensorSpec::new(name("attn.c_proj.weight"), [c, c]).matrices(1));
            table.push(TensorSpec::new(name("attn.c_proj.bias"), [c]));
            table.push(TensorSpec::new(name("ln_2.weight"), [c]));
            table.push(TensorSpec::new(name("ln_2.bias"), [c]));
            table.push(TensorSpec::new(name("mlp.c_fc.weight"), [4 * c, c]).matrices(1));
            table.push(TensorSpec::new(name("mlp.c_fc.bias"), [4 * c]));
            table.push(TensorSpec::new(name("mlp.c_proj.weight"), [c, 4 * c]).matrices(1));
            table.push(TensorSpec::new(name("mlp.c_proj.bias"), [c]));
        }
        table.push(TensorSpec::new("ln_f.weight", [c]));
        table.push(TensorSpec::new("ln_f.bias", [c]));
        table
    }

    pub(super) fn plan(&self) -> Plan {
        let (layers, width) = (self.n_layer as f64, self.n_embd as f64);
        let setup = Setup {
            groups: self.tensors().into_iter().map(|tensor| vec![tensor]).collect(),
            layers: self.n_layer,
            width: self.n_embd,
            context: self.max_seq_len,
            // the buffers of a layer are less than 64 (C + 1) numbers, of logits there are less than 4
            floats: 64.0 * (width + 1.0) * (layers + 1.0) + 4.0 * self.padded_vocab_size as f64,
            flops: 16.0 * self.num_params() as f64,
            attention_flops: 32.0 * width * layers,
            routes: 0.0,
            adapters: None,
        };
        Plan {
            setup,
            lora: None,
            names: NAMES,
            heads: Heads { query: self.n_head, kv: self.n_head, dim: self.head_dim() },
            rope: None,
            windowed_rope: None,
            qk_norm: None,
            windows: Vec::new(),
            norm_eps: LAYERNORM_EPS,
            gain: Gain::Weight,
            embed_factor: 1.0,
            vocab: [self.vocab_size, self.padded_vocab_size],
            ffn: 4 * self.n_embd,
            mlp: MlpKind::Plain(self.act),
        }
    }
}

/// LayerNorm's epsilon in every GPT-2.
pub(crate) const LAYERNORM_EPS: f32 = 1e-5;

/// The token table, which is also the head: V rows in files, Vp in memory.
pub(super) const EMBED: &str = "wte.weight";

const NAMES: Names = Names {
    layers: ["h", "h"],
    embed: EMBED,
    positions: Some("wpe.weight"),
    norm_1: "ln_1",
    qkv: ["attn.c_attn", "attn.c_attn"],
    attn: "attn.sdpa",
    proj: ["attn.c_proj", "attn.c_proj"],
    post_attn: None,
    norm_2: "ln_2",
    post_mlp: None,
    last_norm: ["ln_f", "ln_f"],
    head: EMBED,
    experts: ExpertNames::NONE,
    io: &["y", "losses", "loss"],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_adds_up() {
        for config in [Gpt2Config::new(1024, 50257, 12, 12, 768), Gpt2Config::new(9, 130, 3, 5, 40)] {
            config.validate().unwrap();
            let sum: usize = config.tensors().iter().map(|spec| spec.shape.numel()).sum();
            assert_eq!(sum, config.num_params());
            assert_eq!(config.tensors().len(), 4 + config.n_layer * config.tensors_per_layer());
        }
        // 124,439,808 of GPT-2 plus 47 padded rows
        assert_eq!(Gpt2Config::new(1024, 50257, 12, 12, 768).num_params(), 124_439_808 + 47 * 768);
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

    #[test]
    fn muon_has_the_matrices_of_the_blocks() {
        let table = Gpt2Config::new(8, 5, 1, 1, 2).tensors();
        let muon: Vec<_> =
            table.iter().filter(|spec| spec.matrices > 0).map(|spec| (&*spec.name, spec.matrices)).collect();
        assert_eq!(
            muon,
            [
                ("h.0.attn.c_attn.weight", 3),
                ("h.0.attn.c_proj.weight", 1),
                ("h.0.mlp.c_fc.weight", 1),
                ("h.0.mlp.c_proj.weight", 1)
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
        assert_eq!(
            refusal(Gpt2Config { n_embd: usize::MAX, n_head: 1, ..good }),
            "n_embd is 18446744073709551615, expected at most 2147483519"
        );
        assert!(refusal(Gpt2Config { n_embd: 1 << 20, n_head: 1, ..good }).contains("at most 2^40"));
        assert!(refusal(Gpt2Config { n_layer: usize::MAX, ..good }).contains("n_layer"));
        assert!(refusal(Gpt2Config::new(8, usize::MAX, 1, 1, 1)).contains("vocab_size"));
    }
}
