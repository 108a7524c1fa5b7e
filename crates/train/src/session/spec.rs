//! Which programs a session has, and what an engine must reserve for them.

use super::{Serving, serving};
use crate::Result;
use crate::eval::shapes;
use crate::model::{Adapted, Lora, ModelConfig, Recompute, StepOptions, Sums};
use ironhorse_core::{DeviceDescription, DropRate, Layout, Precision, Program};

/// Which programs a session is made for.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionSpec {
    /// Training steps on (batch, seq).
    pub train: Option<(usize, usize)>,
    /// Losses without training on (batch, seq).
    pub eval: Option<(usize, usize)>,
    /// Losses and the most likely token at every position of texts: at most so many positions each, about so many at a
    /// time.
    pub score: Option<(usize, usize)>,
    /// Token-by-token decoding of this many sequences.
    pub decode: Option<usize>,
    /// The positions that decoding has room for [default: the context].
    pub decode_context: Option<usize>,
    /// Continuing several sequences at once. Without it, `decode` of one sequence can do so for that one.
    pub serving: Option<Serving>,
    /// What the backward computes again.
    pub recompute: Recompute,
    /// How often training drops elements.
    pub dropout: DropRate,
    /// Whether the sequences of `train` and `eval` hold several documents ([`StepOptions::packed`]).
    pub packed: bool,
    /// The β of the loss of pairs, where `train` and `eval` learn which of two documents is preferred
    /// ([`StepOptions::preference`]).
    pub preference: Option<f32>,
    /// How the gradients of micro-steps are added up ([`StepOptions::sums`]).
    pub sums: Option<Sums>,
    /// Into how many parts the tokens are cut for the output head ([`StepOptions::head_chunks`]).
    pub head_chunks: usize,
    /// Element types of weights and gradients.
    pub precision: Precision,
    /// The adapters that are trained, or that a frozen model runs with.
    pub lora: Option<Lora>,
}

impl SessionSpec {
    /// What such a session is on a device: its experts stay in bf16 where the device says so.
    #[must_use]
    pub fn on(mut self, device: &DeviceDescription) -> Self {
        if let Some(fp8) = &mut self.precision.fp8 {
            fp8.experts &= !device.experts_in_bf16;
        }
        self
    }

    /// What an engine must reserve for such a session.
    pub fn layout(&self, config: &ModelConfig) -> Result<Layout> {
        Ok(self.programs(config)?.layout())
    }

    /// How its training steps are made.
    pub fn step_options(&self) -> StepOptions {
        let Self { recompute, dropout, packed, preference, sums, head_chunks, .. } = *self;
        StepOptions { recompute, dropout, packed, preference, sums, head_chunks }
    }

    pub(super) fn programs(&self, config: &ModelConfig) -> Result<Programs> {
        config.validate()?;
        let options = self.step_options();
        let model = Adapted { config: *config, lora: self.lora };
        let train = self.train.map(|batch| model.training(batch, options, self.precision));
        let eval = self.eval.map(|batch| model.evaluation_of(batch, options, self.precision));
        let score = self.score.map_or_else(Vec::new, |(longest, tokens)| shapes(longest, tokens));
        let score = score.into_iter().map(|batch| model.scoring(batch, self.precision));
        let decode = self.decode.map(|batch| match self.decode_context {
            Some(positions) => model.decoding_within(batch, positions, self.precision),
            None => model.decoding(batch, self.precision),
        });
        let one = self.decode == Some(1);
        let serving = self.serving.or(one.then(|| Serving::one(self.decode_context)));
        Ok(Programs {
            serving: serving.map_or(Ok(Vec::new()), |serving| serving.programs(&model, self.precision))?,
            train: train.transpose()?,
            eval: eval.transpose()?,
            score: score.collect::<Result<_>>()?,
            decode: decode.transpose()?,
        })
    }
}

/// The programs of a session, over one set of weights.
pub(super) struct Programs {
    pub train: Option<Program>,
    pub eval: Option<Program>,
    /// For texts of different lengths.
    pub score: Vec<Program>,
    pub decode: Option<Program>,
    /// The programs of serving, from few tokens to many; the last may give the logits of all tokens.
    pub serving: Vec<serving::ServingProgram>,
}

impl Programs {
    pub fn all(&self) -> impl Iterator<Item = &Program> {
        let serving = self.serving.iter().map(|serving| &serving.program);
        self.train.iter().chain(&self.eval).chain(&self.score).chain(&self.decode).chain(serving)
    }

    pub fn layout(&self) -> Layout {
        self.all().fold(Layout::default(), |all, program| all.union(program.layout()))
    }
}
