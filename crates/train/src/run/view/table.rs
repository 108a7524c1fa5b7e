//! The numbers of a log, by column.

use super::curve::Column;
use super::loads::Loads;
use crate::run::metrics::{Ended, Graded, Metrics};
use crate::session::LayerRouting;

/// What can be drawn over the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantity {
    /// The training loss.
    Loss,
    /// The validation loss.
    ValLoss,
    /// The learning rate.
    Lr,
    /// The norm of the gradients before clipping.
    GradNorm,
    /// The speed.
    TokensPerS,
    /// The time of a step.
    StepMs,
    /// The busiest expert of all layers.
    Busiest,
    /// The share of pairs whose chosen text has the larger reward.
    RewardAccuracy,
}

impl Quantity {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 8] = [
        Self::Loss,
        Self::ValLoss,
        Self::Lr,
        Self::GradNorm,
        Self::TokensPerS,
        Self::StepMs,
        Self::Busiest,
        Self::RewardAccuracy,
    ];

    /// What the log calls it; the busiest expert is not in the log as such.
    pub fn key(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::ValLoss => "val_loss",
            Self::Lr => "lr",
            Self::GradNorm => "grad_norm",
            Self::TokensPerS => "tokens_per_s",
            Self::StepMs => "ms",
            Self::Busiest => "busiest_expert",
            Self::RewardAccuracy => "reward_accuracy",
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loss => "training loss",
            Self::ValLoss => "validation loss",
            Self::Lr => "learning rate",
            Self::GradNorm => "gradient norm",
            Self::TokensPerS => "speed",
            Self::StepMs => "step time",
            Self::Busiest => "busiest expert",
            Self::RewardAccuracy => "reward accuracy",
        }
    }

    /// Its unit; empty where it has none.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Loss | Self::ValLoss => "nats per token",
            Self::TokensPerS => "tokens/s",
            Self::StepMs => "ms",
            Self::Busiest => "× an even share",
            Self::RewardAccuracy => "share of pairs",
            Self::Lr | Self::GradNorm => "",
        }
    }

    /// Whether it is measured now and then, and not in every step.
    pub fn is_sparse(self) -> bool {
        matches!(self, Self::ValLoss)
    }

    /// Whether single steps are noise, so that a mean shows more.
    pub fn is_noisy(self) -> bool {
        !self.is_sparse() && self != Self::Lr
    }

    /// Its name with its unit.
    pub fn label(self) -> String {
        let unit = self.unit();
        if unit.is_empty() { self.name().to_owned() } else { format!("{} ({unit})", self.name()) }
    }
}

/// A value of some steps.
pub type Sparse = Vec<(u64, f32)>;

/// The columns. Those of every step have a value for each; what a step does not have is NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// The steps, rising.
    pub steps: Vec<u64>,
    /// Training losses.
    pub loss: Vec<f32>,
    /// Learning rates.
    pub lr: Vec<f32>,
    /// Norms of the gradients.
    pub grad_norm: Vec<f32>,
    /// Milliseconds.
    pub ms: Vec<f32>,
    /// Milliseconds of them in which tokens were read.
    pub data_ms: Vec<f32>,
    /// Tokens per second.
    pub tokens_per_s: Vec<f32>,
    /// Tokens of the step; 0 where the log does not say.
    pub tokens: Vec<u32>,
    /// Validation losses.
    pub val: Sparse,
    /// The busiest expert of all layers, in multiples of an even share.
    pub busiest: Sparse,
    /// How often the chosen text has the higher reward, if preferences are learned.
    pub reward_accuracy: Sparse,
    /// Accuracies of tasks.
    pub evals: Vec<(u64, Graded)>,
    /// Steps that changed nothing.
    pub bad: Vec<u64>,
    /// Losses that stand out, with their scores.
    pub spikes: Sparse,
    /// The last reading of the routers.
    pub router: Vec<LayerRouting>,
    /// All readings of the routers, as means over some steps.
    pub loads: Loads,
    /// Why the run ended before its last step.
    pub ended: Option<Ended>,
}

impl Table {
    /// Adds a step. Where the log goes back to an earlier one, what was after that is forgotten.
    pub fn push(&mut self, metrics: Metrics) {
        if self.steps.last().is_some_and(|&last| last >= metrics.step) {
            self.forget_from(metrics.step);
        }
        let step = metrics.step;
        self.steps.push(step);
        self.loss.push(metrics.loss);
        self.lr.push(metrics.lr);
        self.grad_norm.push(metrics.grad_norm.unwrap_or(f32::NAN));
        self.ms.push(metrics.ms);
        self.data_ms.push(metrics.data_ms.unwrap_or(f32::NAN));
        self.tokens_per_s.push(metrics.tokens_per_s);
        self.tokens.push(metrics.tokens.map_or(0, |tokens| u32::try_from(tokens).unwrap_or(u32::MAX)));
        self.val.extend(metrics.val_loss.map(|loss| (step, loss)));
        self.reward_accuracy.extend(metrics.reward_accuracy.map(|share| (step, share)));
        self.spikes.extend(metrics.spike.map(|score| (step, score)));
        if metrics.bad {
            self.bad.push(step);
        }
        if !metrics.eval.is_empty() {
            self.evals.push((step, metrics.eval));
        }
        if !metrics.router.is_empty() {
            let busiest = metrics.router.iter().map(LayerRouting::busiest).fold(f32::NAN, f32::max);
            self.busiest.push((step, busiest));
            self.loads.push(step, &metrics.router);
            self.router = metrics.router;
        }
        self.val.extend(metrics.ended.map(|ended| (step + 1, ended.val_loss)));
        self.ended = metrics.ended;
    }

    fn forget_from(&mut self, step: u64) {
        let keep = self.steps.partition_point(|&at| at < step);
        self.steps.truncate(keep);
        self.tokens.truncate(keep);
        for column in [
            &mut self.loss,
            &mut self.lr,
            &mut self.grad_norm,
            &mut self.ms,
            &mut self.data_ms,
            &mut self.tokens_per_s,
        ] {
            column.truncate(keep);
        }
        for sparse in [&mut self.val, &mut self.busiest, &mut self.reward_accuracy, &mut self.spikes] {
            sparse.truncate(sparse.partition_point(|(at, _)| *at < step));
        }
        self.evals.truncate(self.evals.partition_point(|(at, _)| *at < step));
        self.bad.truncate(self.bad.partition_point(|at| *at < step));
        self.loads.forget_from(step);
    }

    /// Adds the steps of a later part of the same log.
    pub fn append(&mut self, mut other: Self) {
        let Some(&first) = other.steps.first() else { return };
        if self.steps.last().is_some_and(|&last| last >= first) {
            self.forget_from(first);
        }
        self.steps.append(&mut other.steps);
        self.loss.append(&mut other.loss);
        self.lr.append(&mut other.lr);
        self.grad_norm.append(&mut other.grad_norm);
        self.ms.append(&mut other.ms);
        self.data_ms.append(&mut other.data_ms);
        self.tokens_per_s.append(&mut other.tokens_per_s);
        self.tokens.append(&mut other.tokens);
        self.val.append(&mut other.val);
        self.busiest.append(&mut other.busiest);
        self.reward_accuracy.append(&mut other.reward_accuracy);
        self.evals.append(&mut other.evals);
        self.bad.append(&mut other.bad);
        self.spikes.append(&mut other.spikes);
        self.loads.append(other.loads);
        if !other.router.is_empty() {
            self.router = other.router;
        }
        self.ended = other.ended;
    }

    /// Whether it has no step.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The values of a quantity.
    pub fn column(&self, quantity: Quantity) -> Column<'_> {
        match quantity {
            Quantity::Loss => Column::Dense(&self.steps, &self.loss),
            Quantity::ValLoss => Column::Sparse(&self.val),
            Quantity::Lr => Column::Dense(&self.steps, &self.lr),
            Quantity::GradNorm => Column::Dense(&self.steps, &self.grad_norm),
            Quantity::TokensPerS => Column::Dense(&self.steps, &self.tokens_per_s),
            Quantity::StepMs => Column::Dense(&self.steps, &self.ms),
            Quantity::Busiest => Column::Sparse(&self.busiest),
            Quantity::RewardAccuracy => Column::Sparse(&self.reward_accuracy),
        }
    }

    /// (step, value) of everything finite.
    pub fn points(&self, quantity: Quantity) -> Vec<(f64, f64)> {
        let column = self.column(quantity);
        column.finite(0, column.len())
    }

    /// The last value, whatever it is: NaN too.
    pub fn last(&self, quantity: Quantity) -> Option<f32> {
        let column = self.column(quantity);
        column.get(column.len().checked_sub(1)?).map(|(_, value)| value)
    }

    /// The lowest validation loss, and where it was measured.
    pub fn best(&self) -> Option<(u64, f32)> {
        let finite = self.val.iter().filter(|(_, loss)| loss.is_finite());
        finite.min_by(|a, b| a.1.total_cmp(&b.1)).copied()
    }

    /// Seconds that the logged steps took together.
    pub fn seconds(&self) -> f64 {
        self.ms.iter().filter(|ms| ms.is_finite()).map(|&ms| f64::from(ms)).sum::<f64>() / 1e3
    }

    /// The share of the time of the newest steps, at most this many, in which tokens were read; `None` where the log does not say.
    pub fn data_share(&self, steps: usize) -> Option<f64> {
        let newest = self.ms.len().saturating_sub(steps)..self.ms.len();
        let both = self.ms[newest.clone()].iter().zip(&self.data_ms[newest]);
        let [all, data] = both
            .filter(|(ms, data)| ms.is_finite() && data.is_finite())
            .fold([0.0; 2], |[all, sum], (&ms, &data)| [all + f64::from(ms), sum + f64::from(data)]);
        (all > 0.0).then(|| data / all)
    }

    /// Tokens of the logged steps together; of logs that do not count them, from speed and time.
    pub fn all_tokens(&self) -> f64 {
        let of = |(i, &tokens): (usize, &u32)| match tokens {
            0 => (f64::from(self.tokens_per_s[i]) * f64::from(self.ms[i]) / 1e3).max(0.0).round(),
            tokens => f64::from(tokens),
        };
        self.tokens.iter().enumerate().map(of).filter(|tokens| tokens.is_finite()).sum()
    }

    /// The middle value of the newest steps, at most this many: single steps are noise, and one that validated is slow.
    pub fn recent(&self, quantity: Quantity, steps: usize) -> Option<f32> {
        let column = match quantity {
            Quantity::TokensPerS => &self.tokens_per_s,
            Quantity::StepMs => &self.ms,
            Quantity::Loss => &self.loss,
            Quantity::GradNorm => &self.grad_norm,
            _ => return self.last(quantity),
        };
        let newest = &column[column.len().saturating_sub(steps)..];
        let mut finite: Vec<f32> = newest.iter().copied().filter(|value| value.is_finite()).collect();
        finite.sort_by(f32::total_cmp);
        finite.get(finite.len() / 2).copied()
    }
}
