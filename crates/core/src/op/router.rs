//! The router of a mixture of experts: softmax, the K most likely experts of each token, and the load-balancing loss.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{DType, Result, Slot};

/// Sums of at most 128 exponentials of logits at most 30 apart; gradients are differences of probabilities.
const SOFTMAX: Numerics = Numerics::new(Arithmetic::Sum(2e-6));

/// Per token: `probs = softmax(logits)` over all experts in f32; `experts` are the indices of the K largest `logits` in
/// descending order, ties to the lower index; `weights` are their probabilities, normalised to sum to 1.
///
/// Experts are chosen by `logits` and not by `probs`, in which different logits may round to the same value: this way
/// every engine chooses the same experts. A non-finite logit is an input error that names the token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterFwd {
    /// (N,E) f32
    pub probs: Slot,
    /// (N,K) f32
    pub weights: Slot,
    /// (N,K) i32
    pub experts: Slot,
    /// (N,E)
    pub logits: Slot,
}

impl OpSpec for RouterFwd {
    const NAME: &'static str = "router_fwd";
    slots!(Write probs, Write weights, Write experts, Read logits);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("logits", &self.logits)])?;
        check_routed(&c, [&self.probs, &self.weights, &self.experts])?;
        c.matrix("logits", &self.logits, self.probs.shape.rows(), self.probs.shape.cols())
    }

    fn numerics(&self, _: &str) -> Numerics {
        SOFTMAX
    }

    fn flops(&self) -> u64 {
        8 * self.logits.numel() as u64
    }
}

/// The gradient of the logits, which is the sum of two parts: through the weights of the chosen experts and through the
/// auxiliary loss.
///
/// The weights are the softmax of the chosen logits alone, so with `D = Σ_j weights_j·d_weights_j` the first part is
/// `weights_j·(d_weights_j - D)` at the chosen experts and 0 elsewhere.
///
/// For the second part: the loss of a step is the mean over its micro-steps of cross-entropy plus each layer's
/// `aux = alpha·E·Σ_e load_e·mean_n(probs_ne)`. The cross-entropy of a token has the factor
/// `loss_scale = 1/(N·micro-steps)`. `aux` is computed once for N tokens, so its factor is
/// `1/micro-steps = loss_scale·N`. `load` depends on the chosen experts only and counts as constant, so
/// `∂/∂probs_ne = loss_scale·N · alpha·E·load_e/N = loss_scale·alpha·E·load_e`. Through the softmax this becomes
/// `loss_scale·alpha·E · probs_ne·(load_e - Σ_e' probs_ne'·load_e')`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterBwd {
    /// (N,E)
    pub d_logits: Slot,
    /// (N,K) f32
    pub d_weights: Slot,
    /// (N,E) f32
    pub probs: Slot,
    /// (N,K) f32
    pub weights: Slot,
    /// (N,K) i32
    pub experts: Slot,
    /// (E) f32, from [`RouterLoad`]
    pub load: Slot,
    /// Weight of the auxiliary loss.
    pub alpha: f32,
}

impl OpSpec for RouterBwd {
    const NAME: &'static str = "router_bwd";
    slots!(Write d_logits, Read d_weights, Read probs, Read weights, Read experts, Read load);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_logits", &self.d_logits)])?;
        check_routed(&c, [&self.probs, &self.weights, &self.experts])?;
        c.matrix("d_logits", &self.d_logits, self.probs.shape.rows(), self.probs.shape.cols())?;
        c.all_f32(&[("d_weights", &self.d_weights), ("load", &self.load)])?;
        c.matrix("d_weights", &self.d_weights, self.weights.shape.rows(), self.weights.shape.cols())?;
        c.numel("load", &self.load, self.probs.shape.cols())?;
        check_alpha(&c, self.alpha)
    }

    fn numerics(&self, _: &str) -> Numerics {
        SOFTMAX
    }

    fn flops(&self) -> u64 {
        6 * self.probs.numel() as u64 + 5 * self.weights.numel() as u64
    }
}

/// How the tokens are distributed over the experts: `load_e` is the fraction of the tokens sent to expert e (the sum
/// over e is K), `aux (+)= loss_scale·N · alpha·E·Σ_e load_e·mean_n(probs_ne)`, and
/// `entropy (+)= loss_scale·Σ_n -Σ_e probs_ne·ln(probs_ne)`. With `loss_scale = 1/(N·micro-steps)` both are means over
/// the micro-steps of a step; [`RouterBwd`] explains the factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLoad {
    /// (E) f32, for this micro-step
    pub load: Slot,
    /// one f32
    pub aux: Slot,
    /// one f32, in nats
    pub entropy: Option<Slot>,
    /// (N,E) f32
    pub probs: Slot,
    /// (E+1) i32, from [`RouteSort`](super::RouteSort)
    pub offsets: Slot,
    /// Weight of the auxiliary loss.
    pub alpha: f32,
    /// Whether `aux` and `entropy` are overwritten or added to.
    pub accum: Accum,
}

impl OpSpec for RouterLoad {
    const NAME: &'static str = "router_load";
    slots!(Write load, Accumulate(accum) aux, Accumulate(accum) entropy, Read probs, Read offsets);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.all_f32(&[("probs", &self.probs), ("load", &self.load), ("aux", &self.aux)])?;
        let experts = self.probs.shape.cols();
        c.numel("load", &self.load, experts)?;
        c.numel("aux", &self.aux, 1)?;
        if let Some(entropy) = &self.entropy {
            c.all_f32(&[("entropy", entropy)])?;
            c.numel("entropy", entropy, 1)?;
        }
        c.dtype("offsets", &self.offsets, DType::I32)?;
        c.numel("offsets", &self.offsets, experts + 1)?;
        check_alpha(&c, self.alpha)
    }

    fn numerics(&self, _: &str) -> Numerics {
        Numerics::new(Arithmetic::PositiveSum(2e-6))
    }

    fn flops(&self) -> u64 {
        (if self.entropy.is_some() { 12 } else { 2 }) * self.probs.numel() as u64
    }
}

/// Checks the probabilities of all experts against the weights and indices of the chosen ones.
fn check_routed(c: &Checker, [probs, weights, experts]: [&Slot; 3]) -> Result<()> {
    c.all_f32(&[("probs", probs), ("weights", weights)])?;
    c.dtype("experts", experts, DType::I32)?;
    let (all, chosen) = (probs.shape.cols(), experts.shape.cols());
    if chosen == 0 || chosen > all {
        return c.fail(format!("a token has {chosen} experts, expected 1..={all}"));
    }
    c.matrix("experts", experts, probs.shape.rows(), chosen)?;
    c.matrix("weights", weights, probs.shape.rows(), chosen)
}

fn check_alpha(c: &Checker, alpha: f32) -> Result<()> {
    if alpha.is_finite() {
        return Ok(());
    }
    c.fail(format!("`alpha` is {alpha}, expected a finite number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    fn slot(offset: usize, shape: [usize; 2], dtype: DType) -> Slot {
        Slot { pool: Pool::Io, offset, shape: shape.into(), dtype }
    }

    #[test]
    fn more_experts_chosen_than_there_are_is_refused() {
        let op = |k| RouterFwd {
            probs: slot(0, [5, 4], DType::F32),
            weights: slot(1000, [5, k], DType::F32),
            experts: slot(2000, [5, k], DType::I32),
            logits: slot(3000, [5, 4], DType::BF16),
        };
        op(4).check().unwrap();
        assert_eq!(
            op(5).check().unwrap_err().to_string(),
            "router_fwd: a token has 5 experts, expected 1..=4"
        );
        assert_eq!(
            op(0).check().unwrap_err().to_string(),
            "router_fwd: a token has 0 experts, expected 1..=4"
        );
        let wide = RouterFwd { experts: slot(2000, [5, 2], DType::F32), ..op(2) };
        assert_eq!(wide.check().unwrap_err().to_string(), "router_fwd: `experts` is f32, expected i32");
    }
}
