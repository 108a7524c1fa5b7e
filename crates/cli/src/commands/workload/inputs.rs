//! The tokens of the steps that `bench` and `profile` run, and what packing made of them.

use anyhow::{Context, Result, bail};
use ironhorse::core::op::{AttentionMask, Op};
use ironhorse::core::{Program, Section};
use ironhorse::train::data::{LoaderConfig, PackedLoader, Sample};
use ironhorse::train::model::{ModelConfig, Recompute};
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Batch, Session};
use serde::Serialize;

/// How many batches of documents are packed together: one alone would fit worse than a data set does.
const BATCHES: usize = 4;

/// The tokens of a step.
pub struct Inputs {
    x: Vec<i32>,
    y: Vec<i32>,
    packed: Option<(Vec<i32>, Packed)>,
}

/// What packing made of documents.
#[derive(Clone, Copy, Serialize)]
pub struct Packed {
    /// Documents of a step.
    pub documents: usize,
    /// Their tokens: the others of the step's positions are padding.
    pub tokens: usize,
    /// The share of positions that are padding.
    pub padding: f64,
}

impl Inputs {
    /// Sequences that are one document each.
    pub fn plain((x, y): (Vec<i32>, Vec<i32>)) -> Self {
        Self { x, y, packed: None }
    }

    /// Random tokens; with `documents`, of packed documents of this mean length.
    pub fn random(
        documents: Option<usize>,
        [batch, seq]: [usize; 2],
        config: &ModelConfig,
        seed: u64,
    ) -> Result<Self> {
        let vocab = config.vocab_size();
        if let Some(mean) = documents {
            return Self::packed(mean, LoaderConfig { batch, seq, vocab, seed, shuffle: true });
        }
        let mut rng = Rng::new(seed).fork(u64::MAX);
        let stream: Vec<i32> = (0..=batch * seq).map(|_| rng.index(vocab) as i32).collect();
        Ok(Self::plain((stream[..batch * seq].to_vec(), stream[1..].to_vec())))
    }

    /// Random documents of 1 to 2·`mean` - 1 tokens, at most `seq`, packed by best fit.
    fn packed(mean: usize, config: LoaderConfig) -> Result<Self> {
        let mut rng = Rng::new(config.seed).fork(u64::MAX);
        let (mut samples, mut room) = (Vec::new(), BATCHES * config.batch * config.seq);
        while room > 0 {
            let length = (1 + rng.index(mean.saturating_mul(2) - 1)).min(config.seq).min(room);
            let ids = (0..length).map(|_| rng.index(config.vocab) as i32).collect();
            samples.push(Sample { ids, learned: vec![true; length] });
            room -= length;
        }
        let count = config.batch * config.seq;
        let [mut x, mut y, mut positions] = [(); 3].map(|()| vec![0; count]);
        let tokens = PackedLoader::new(samples, config)?.next_batch([&mut x, &mut y, &mut positions])?.tokens;
        let starts = positions.iter().filter(|&&position| position == 0).count();
        let documents = starts - (count - tokens); // padding is documents of one token
        let padding = 1.0 - tokens as f64 / count as f64;
        Ok(Self { x, y, packed: Some((positions, Packed { documents, tokens, padding })) })
    }

    /// The inputs as a session takes them.
    pub fn batch(&self) -> Batch<'_> {
        let positions = self.packed.as_ref().map(|(positions, _)| positions.as_slice());
        Batch { x: &self.x, y: &self.y, positions, pairs: None }
    }

    /// What packing made of them.
    pub fn packing(&self) -> Option<Packed> {
        self.packed.as_ref().map(|(_, packed)| *packed)
    }

    /// Tokens of a step, without padding.
    pub fn tokens(&self) -> usize {
        self.packing().map_or(self.x.len(), |packed| packed.tokens)
    }

    /// Operations of a whole step of so many micro-steps.
    pub fn step_flops(&self, program: &Program, micro_steps: u32) -> f64 {
        let each = self.flops(program, &[Section::Forward, Section::Backward]);
        f64::from(micro_steps) * each + self.flops(program, &[Section::Update])
    }

    /// Operations that the model itself asks for in a step: forward and backward, without the optimizer and without what
    /// is recomputed to save memory. Attention counts the keys that a query reaches.
    pub fn model_flops(&self, session: &Session) -> Result<f64> {
        let program = session.train_program()?;
        let x = program.io("x").context("the training program has no input `x`")?;
        let [batch, seq] = *x.shape.dims() else {
            bail!("the input `x` of the training program is not (B, T)");
        };
        let plain = session.model().training((batch, seq), Recompute::None, program.precision())?;
        Ok(self.flops(&plain, &[Section::Forward, Section::Backward]))
    }

    fn flops(&self, program: &Program, sections: &[Section]) -> f64 {
        let nodes = sections.iter().flat_map(|&section| &program.nodes()[program.range(section)]);
        nodes.map(|node| node.op.flops() as f64 * self.reached(&node.op)).sum()
    }

    /// The share of the keys before it that a query attends to, those of its document; 1 for other ops.
    fn reached(&self, op: &Op) -> f64 {
        let (mask, out) = match op {
            Op::AttentionFwd(op) => (op.mask, op.out),
            Op::AttentionBwd(op) => (op.mask, op.out),
            Op::AttentionDropoutFwd(op) => (op.mask, op.out),
            Op::AttentionDropoutBwd(op) => (op.mask, op.out),
            _ => return 1.0,
        };
        let Some((positions, _)) = &self.packed else { return 1.0 };
        let seq = out.shape.dims().get(1).copied().unwrap_or(1).max(1);
        let keys = |mask: AttentionMask, t: usize, position: usize| t + 1 - mask.first_key(t, position);
        let sum = |keys: &dyn Fn(usize, usize) -> usize| {
            let each = positions.iter().enumerate();
            each.map(|(at, &position)| keys(at % seq, position as usize)).sum::<usize>() as f64
        };
        sum(&|t, position| keys(mask, t, position)) / sum(&|t, _| keys(mask, t, t))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse::core::Precision;
    use ironhorse::train::model::StepOptions;

    fn config(batch: usize, seq: usize) -> LoaderConfig {
        LoaderConfig { batch, seq, vocab: 11, seed: 1, shuffle: true }
    }

    #[test]
    fn documents_are_counted_and_padding_is_not() {
        for (mean, seq) in [(1, 8), (5, 32), (32, 32), (1000, 32)] {
            let inputs = Inputs::packed(mean, config(3, seq)).unwrap();
            let (packed, batch) = (inputs.packing().unwrap(), inputs.batch());
            assert_eq!((batch.x.len(), batch.positions.unwrap().len()), (3 * seq, 3 * seq));
            assert!(packed.tokens > 2 * seq && packed.tokens <= 3 * seq, "{mean}");
            assert_eq!(inputs.tokens(), packed.tokens);
            assert!((packed.padding - (1.0 - packed.tokens as f64 / (3 * seq) as f64)).abs() < 1e-12);
            assert!(packed.documents >= 3 && packed.documents <= packed.tokens);
            assert!(mean > 1 || packed.documents == packed.tokens);
        }
    }

    /// Documents of one token have one key for each query, of which a sequence of 8 has 36 for 8.
    #[test]
    fn attention_is_counted_inside_documents() {
        let inputs = Inputs::packed(1, config(2, 8)).unwrap();
        let model = ModelConfig::parse("n_layer=1,n_head=1,n_embd=8,vocab=11,max_seq_len=8").unwrap();
        let options = StepOptions { packed: true, ..StepOptions::default() };
        let program = model.training((2, 8), options, Precision::F32).unwrap();
        let attention = |op: &&Op| op.name().starts_with("attention");
        let ops: Vec<&Op> = program.nodes().iter().map(|node| &node.op).filter(attention).collect();
        assert_eq!(ops.len(), 2);
        for op in ops {
            assert!((inputs.reached(op) - 8.0 / 36.0).abs() < 1e-12);
        }
        let whole: u64 = program.nodes().iter().map(|node| node.op.flops()).sum();
        assert!(inputs.step_flops(&program, 1) < whole as f64);
    }
}
