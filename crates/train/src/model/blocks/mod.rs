//! What the programs of all models are built from: weights by their names, and the layers that the models share, forward and
//! backward.

mod adapter;
mod attention;
mod fp8;
mod head;
mod linear;
mod norm;
mod preference;
mod sum;
mod update;

pub(super) use adapter::Adapter;
pub(super) use attention::{Attending, Attention, Heads};
pub(super) use fp8::{Form, Kind, Narrow, Scaling};
pub(super) use head::Head;
pub(super) use norm::{Norm, NormWeights};
pub(super) use preference::PairIo;

use super::TensorSpec;
use crate::{Error, Result};
use ironhorse_core::op::{Accum, EmbeddingBwd, EmbeddingFwd, Gain};
use ironhorse_core::{
    Builder, DType, Fp8Products, Fp8Scales, Precision, Program, Shape, Slot, bf16_to_f32, f32_to_bf16,
};
use std::collections::HashMap;

/// What a forward is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Training,
    Evaluation,
    /// One token for each sequence, over a key/value cache.
    Decoding,
}

/// A program under construction.
pub(super) struct Blocks {
    pub b: Builder,
    /// B and T.
    batch: (usize, usize),
    /// C
    width: usize,
    /// (B,T) i32, the tokens.
    x: Slot,
    /// (B,T) i32, the position of each token where sequences hold several documents.
    positions: Option<Slot>,
    /// Set where each token belongs to one of several sequences of a cache: how many there are, and (B,1) i32, which one it is.
    sequences: Option<(usize, Slot)>,
    weights: HashMap<String, Vec<Slot>>,
    /// (B,T,P·r), what the adapters of a layer make of its input, by the layer's name.
    hidden_of: HashMap<String, Slot>,
    /// The products of 8-bit numbers, in training.
    fp8: Option<Fp8Products>,
    /// What layers with such products leave for their backward, by the layer's name.
    saved_fp8: HashMap<String, fp8::SavedFp8>,
    /// How many weights are rounded to 8 bits ahead of all other ops.
    weights_fp8: usize,
}

/// A linear layer: weight (out, in) and bias.
#[derive(Clone, Copy)]
pub(super) struct Linear {
    pub weight: Slot,
    pub bias: Option<Slot>,
    /// What is trained beside it.
    pub adapter: Option<Adapter>,
    /// Whether its products stay in the type of the activations: a router's choices must not depend on 8 bits.
    pub exact: bool,
}

impl Linear {
    /// A weight alone.
    pub fn plain(weight: Slot) -> Self {
        Self { weight, bias: None, adapter: None, exact: false }
    }
}

/// The tables that make activations of tokens and positions.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    /// (Vp,C)
    pub wte: Slot,
    /// (maxT,C), where positions are learned.
    pub wpe: Option<Slot>,
    /// What rows of tokens are multiplied by.
    pub factor: f64,
}

impl Tables {
    /// The factor in the type of the activations, as transformers rounds it.
    fn factor(&self, dtype: DType) -> f32 {
        let factor = self.factor as f32;
        if dtype == DType::BF16 { bf16_to_f32(f32_to_bf16(factor)) } else { factor }
    }
}

/// What a loss needs of the host.
pub(super) struct LossIo {
    /// (B,T) i32
    targets: Slot,
    /// (B,T) f32
    losses: Slot,
    /// The mean cross-entropy.
    pub mean: Slot,
    /// The same, and auxiliary losses if there are any.
    pub loss: Slot,
    /// The slots of pairs, if the loss is theirs in place of the cross-entropy.
    pub pairs: Option<PairIo>,
}

/// What a model needs for its programs, apart from its layers.
pub(super) struct Setup {
    /// The parameter table by groups: the tensors of a group are adjacent in memory.
    pub groups: Vec<Vec<TensorSpec>>,
    /// L
    pub layers: usize,
    /// C
    pub width: usize,
    /// maxT
    pub context: usize,
    /// The most numbers that a token's activations may have: an upper bound.
    pub floats: f64,
    /// The most operations that a token may cost, apart from those of attention: an upper bound.
    pub flops: f64,
    /// The most operations of attention that a token may cost for each position: an upper bound.
    pub attention_flops: f64,
    /// How many indices of 32 bits a token needs.
    pub routes: f64,
    /// The parameter table of adapters by groups; where there are adapters, `groups` are frozen.
    pub adapters: Option<Vec<Vec<TensorSpec>>>,
}

impl Setup {
    /// Refuses a batch that is empty or longer than the context, or whose bytes or operations 64 bits cannot count, or
    /// whose routes 32 bits cannot. Sizes and addresses rely on it.
    fn check_batch(&self, (batch, seq): (usize, usize)) -> Result<()> {
        for (name, size) in [("batch", batch), ("sequence length", seq)] {
            if size == 0 {
                return Err(Error::input(name, size, "at least 1"));
            }
        }
        if seq > self.context {
            return Err(Error::input(
                format!("sequence length {seq}"),
                format!("beyond the model's context of {}", self.context),
                format!("--seq {} or less", self.context),
            ));
        }
        let tokens = batch as f64 * seq as f64;
        let fits = 4.0 * tokens * self.floats < usize::MAX as f64 / 4.0
            && tokens * (self.flops + self.attention_flops * seq as f64) < u64::MAX as f64 / 4.0
            && tokens * self.routes < f64::from(i32::MAX);
        if fits {
            return Ok(());
        }
        Err(Error::input(
            format!("batch {batch} × sequence {seq}"),
            "larger than any machine's memory",
            "a smaller batch or sequence",
        ))
    }
}

impl Blocks {
    /// A program with the parameters of `setup`, whose groups it takes.
    pub fn new(setup: &mut Setup, batch: (usize, usize), precision: Precision) -> Result<Self> {
        setup.check_batch(batch)?;
        let mut b = Builder::with_precision(precision);
        // `halt` is not 0 from a bad step on until the host clears it. Every program of a model declares it, and before
        // any other io: programs of one session share the memory of their io, and this one must keep its contents while
        // others run.
        b.io("halt", Shape::new([]), DType::F32);
        let mut weights = HashMap::new();
        for group in std::mem::take(&mut setup.groups) {
            let decay = group.iter().any(|tensor| tensor.decay);
            let name = group.first().map(|tensor| tensor.name.clone()).unwrap_or_default();
            let slots = if setup.adapters.is_some() {
                b.frozen_group(group.into_iter().map(|tensor| (tensor.name, tensor.shape)))
            } else {
                update::declare(&mut b, group, decay)
            };
            weights.insert(name, slots);
        }
        for group in setup.adapters.take().into_iter().flatten() {
            let name = group.first().map(|tensor| tensor.name.clone()).unwrap_or_default();
            weights.insert(name, update::declare(&mut b, group, true));
        }
        let x = b.io("x", [batch.0, batch.1], DType::I32);
        Ok(Self {
            b,
            batch,
            width: setup.width,
            x,
            positions: None,
            sequences: None,
            weights,
            hidden_of: HashMap::new(),
            fp8: None,
            saved_fp8: HashMap::new(),
            weights_fp8: 0,
        })
    }

    /// Makes products of 8-bit numbers where the precision asks for them: in training only, so that losses of other programs
    /// are those of the weights. A step that is a sum of micro-steps has current scales: each micro-step has its own, so that it does
    /// not matter which rank computes it, or when.
    pub fn train_in_fp8(&mut self, sums: bool) {
        self.fp8 = self.b.precision().fp8;
        if self.fp8.is_some() {
            self.b.keep_activations(1); // an engine can compute a norm together with the tensor in 8 bits made of it
        }
        if let Some(fp8) = self.fp8.as_mut().filter(|_| sums) {
            fp8.scales = Fp8Scales::Current;
        }
    }

    /// Lets sequences hold several documents. Io: `positions`.
    pub fn pack(&mut self) {
        self.positions = Some(self.b.io("positions", [self.batch.0, self.batch.1], DType::I32));
    }

    /// Lets every token be of any of so many sequences of a cache, at any position. Io: `rows`, `positions`.
    pub fn place(&mut self, sequences: usize) {
        let rows = self.b.io("rows", [self.batch.0, self.batch.1], DType::I32);
        self.sequences = Some((sequences, rows));
        self.pack();
    }

    /// Goes on with so many of the tokens: their rows of each tensor. Io: `picks`, their numbers.
    pub fn pick<const N: usize>(&mut self, tensors: [Slot; N], count: usize) -> Result<[Slot; N]> {
        let picks = self.b.io("picks", [count, 1], DType::I32);
        let tokens = std::mem::replace(&mut self.batch, (count, 1));
        let vocab = tokens.0 * tokens.1;
        self.b.at("picked");
        let mut picked = tensors;
        for slot in &mut picked {
            // the rows of a table by their numbers: what embedding tokens is
            let width = slot.shape.cols();
            let wte = Slot { shape: [vocab, width].into(), ..*slot };
            let out = self.tokens_by(width);
            let (positions, at_position) = (None, false);
            self.b.push(EmbeddingFwd {
                out,
                tokens: picks,
                wte,
                wpe: None,
                positions,
                vocab,
                at_position,
                factor: 1.0,
            })?;
            *slot = out;
        }
        Ok(picked)
    }

    /// The position of each token where sequences hold several documents, or where tokens continue sequences of a cache.
    pub fn positions(&self) -> Option<Slot> {
        self.positions
    }

    /// The group of parameters whose first is called so, as one tensor of this shape.
    pub fn weight(&self, name: &str, shape: impl Into<Shape>) -> Result<Slot> {
        let missing = || ironhorse_core::Error::Program(format!("the parameter table has no {name}"));
        Ok(Slot::joined(self.weights.get(name).ok_or_else(missing)?, shape)?)
    }

    /// A linear layer: `NAME.weight` and, where there is one, `NAME.bias`.
    pub fn linear_weights(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<Linear> {
        let weight = self.weight(&format!("{name}.weight"), [rows, cols])?;
        Ok(Linear { weight, bias: self.bias(name, rows)?, adapter: None, exact: false })
    }

    /// A norm: `NAME.weight` and, of LayerNorm, `NAME.bias`.
    pub fn norm_weights(&self, name: &str, (eps, gain): (f32, Gain)) -> Result<NormWeights> {
        let weight = self.weight(&format!("{name}.weight"), [self.width])?;
        Ok(NormWeights { weight, bias: self.bias(name, self.width)?, eps, gain })
    }

    fn bias(&self, name: &str, rows: usize) -> Result<Option<Slot>> {
        let name = format!("{name}.bias");
        self.weights.contains_key(&name).then(|| self.weight(&name, [rows])).transpose()
    }

    /// The element type of activations.
    pub fn dtype(&self) -> DType {
        self.b.precision().weights
    }

    /// N: how many tokens a batch has.
    pub fn tokens(&self) -> usize {
        self.batch.0 * self.batch.1
    }

    /// A new (B,T,cols) activation.
    pub fn tokens_by(&mut self, cols: usize) -> Slot {
        let dtype = self.dtype();
        self.b.activation([self.batch.0, self.batch.1, cols], dtype)
    }

    /// A new (B,T,C) activation.
    pub fn hidden(&mut self) -> Slot {
        self.tokens_by(self.width)
    }

    /// One f32 for each token.
    fn per_token(&mut self) -> Slot {
        self.b.activation([self.batch.0, self.batch.1], DType::F32)
    }

    /// A scalar that the host reads.
    pub fn scalar(&mut self, name: impl Into<String>) -> Slot {
        self.b.io(name, Shape::new([]), DType::F32)
    }

    /// The embedding of the tokens, with learned positions if there are any: from 0 on or, when decoding, at `position`.
    pub fn embed(&mut self, tables: Tables, vocab: usize, decoding: bool) -> Result<Slot> {
        let Tables { wte, wpe, .. } = tables;
        let (out, tokens, at_position) = (self.hidden(), self.x, decoding && wpe.is_some());
        let factor = tables.factor(self.dtype());
        self.b.at("embed");
        let positions = self.positions.filter(|_| wpe.is_some());
        self.b.push(EmbeddingFwd { out, tokens, wte, wpe, positions, vocab, at_position, factor })?;
        self.b.name("embed", out);
        Ok(out)
    }

    /// If the head is `tied`, it has already written its gradient to that of the token table, and this one is added.
    pub fn embed_bwd(&mut self, tables: Tables, d_out: Slot, tied: bool) -> Result<()> {
        let Tables { wte, wpe, .. } = tables;
        self.b.name_grad("embed", d_out);
        if adapter::is_frozen(wte) {
            return Ok(());
        }
        self.b.at("embed");
        self.b.push(EmbeddingBwd {
            d_wte: self.b.grad(wte),
            d_wpe: wpe.map(|wpe| self.b.grad(wpe)),
            d_out,
            tokens: self.x,
            positions: self.positions.filter(|_| wpe.is_some()),
            accum_wte: if tied { Accum::Add } else { Accum::FirstWrites },
            accum: Accum::FirstWrites,
            factor: tables.factor(self.dtype()),
        })?;
        Ok(())
    }

    /// Declares what a loss needs of the host, in this `order`; `cross_entropy` only if the loss `has_aux`.
    pub fn loss_io(&mut self, order: &[&str], has_aux: bool) -> Result<LossIo> {
        let (batch, seq) = self.batch;
        let mut declared = HashMap::new();
        for &name in order.iter().filter(|name| has_aux || **name != "cross_entropy") {
            declared.insert(
                name,
                match name {
                    "y" => self.b.io(name, [batch, seq], DType::I32),
                    "losses" => self.b.io(name, [batch, seq], DType::F32),
                    _ => self.scalar(name),
                },
            );
        }
        let undeclared = |name| ironhorse_core::Error::Program(format!("no io is called `{name}`"));
        let find = |name| declared.get(name).copied().ok_or_else(|| undeclared(name));
        let (targets, losses, loss) = (find("y")?, find("losses")?, find("loss")?);
        Ok(LossIo { targets, losses, mean: find("cross_entropy").unwrap_or(loss), loss, pairs: None })
    }

    pub fn finish(self) -> Result<Program> {
        Ok(self.b.finish()?)
    }
}
