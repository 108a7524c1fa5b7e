//! The router of a mixture of experts: softmax, the K most likely experts of each token, and the load-balancing loss.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, Named, named, op};
use crate::{DType, Result, Slot};

/// Sums of at most 128 exponentials of logits at most 30 apart; gradients are differences of probabilities.
const SOFTMAX: Numerics = Numerics::new(Arithmetic::Sum(2e-6));

op! {
    /// Per token: `probs = softmax(logits)` over all experts in f32; `experts` are the indices of the K largest `logits` in
    /// descending order, ties to the lower index; `weights` are their probabilities, normalised to sum to 1.
    ///
    /// Experts are chosen by `logits` and not by `probs`, in which different logits may round to the same value: this way
    /// every engine chooses the same experts. A non-finite logit is an input error that names the token.
    pub struct RouterFwd {
        /// (N,E) f32
        pub probs: Slot = Write,
        /// (N,K) f32
        pub weights: Slot = Write,
        /// (N,K) i32
        pub experts: Slot = Write,
        /// (N,E)
        pub logits: Slot = Read,
    }
    name "router_fwd"
    check(op, c) {
        c.same_float(named!(op: logits))?;
        check_routed(c, named!(op: probs, weights, experts))?;
        c.matrix("logits", &op.logits, op.probs.shape.rows(), op.probs.shape.cols())
    }
    numerics { SOFTMAX }
    flops(op) { 8 * op.logits.numel() as u64 }
}

op! {
    /// The gradient of the logits, which is the sum of two parts: through the weights of the chosen experts and through the
    /// auxiliary loss.
    ///
    /// The weights are the softmax of the chosen logits alone, so with `D = Σ_j weights_j·d_weights_j` the first part is
    /// `weights_j·(d_weights_j - D)` at the chosen experts and 0 elsewhere.
    ///
    /// For the second part: the loss of a step is the mean of the cross-entropy of its tokens that count, plus the mean
    /// over its micro-steps of each layer's `aux = alpha·E·Σ_e load_e·mean_n(probs_ne)`, in which all tokens take part.
    /// With `row_scale = loss_scale·counted = 1/(N·micro-steps)` the factor of `aux`, which is computed once for N tokens,
    /// is `1/micro-steps = row_scale·N`. `load` depends on the chosen experts only and counts as constant, so
    /// `∂/∂probs_ne = row_scale·N · alpha·E·load_e/N = row_scale·alpha·E·load_e`. Through the softmax this becomes
    /// `row_scale·alpha·E · probs_ne·(load_e - Σ_e' probs_ne'·load_e')`.
    pub struct RouterBwd {
        /// (N,E)
        pub d_logits: Slot = Write,
        /// (N,K) f32
        pub d_weights: Slot = Read,
        /// (N,E) f32
        pub probs: Slot = Read,
        /// (N,K) f32
        pub weights: Slot = Read,
        /// (N,K) i32
        pub experts: Slot = Read,
        /// (E) f32, from [`RouterLoad`]
        pub load: Slot = Read,
        /// Weight of the auxiliary loss.
        pub alpha: f32,
    }
    name "router_bwd"
    check(op, c) {
        c.same_float(named!(op: d_logits))?;
        check_routed(c, named!(op: probs, weights, experts))?;
        c.matrix("d_logits", &op.d_logits, op.probs.shape.rows(), op.probs.shape.cols())?;
        c.dtypes(named!(op: d_weights, load), DType::F32)?;
        c.matrix("d_weights", &op.d_weights, op.weights.shape.rows(), op.weights.shape.cols())?;
        c.numel("load", &op.load, op.probs.shape.cols())?;
        check_alpha(c, op.alpha)
    }
    numerics { SOFTMAX }
    flops(op) { 6 * op.probs.numel() as u64 + 5 * op.weights.numel() as u64 }
}

op! {
    /// How the tokens are distributed over the experts: `load_e` is the fraction of the tokens sent to expert e (the sum
    /// over e is K), `aux (+)= row_scale·N · alpha·E·Σ_e load_e·mean_n(probs_ne)`, and
    /// `entropy (+)= row_scale·Σ_n -Σ_e probs_ne·ln(probs_ne)`. With `row_scale = loss_scale·counted = 1/(N·micro-steps)`
    /// both are means over the micro-steps of a step; [`RouterBwd`] explains the factors.
    pub struct RouterLoad {
        /// (E) f32, for this micro-step
        pub load: Slot = Write,
        /// one f32
        pub aux: Slot = Accumulate(accum),
        /// one f32, in nats
        pub entropy: Option<Slot> = Accumulate(accum),
        /// (N,E) f32
        pub probs: Slot = Read,
        /// (E+1) i32, from [`RouteSort`](super::RouteSort)
        pub offsets: Slot = Read,
        /// Weight of the auxiliary loss.
        pub alpha: f32,
        /// Whether `aux` and `entropy` are overwritten or added to.
        pub accum: Accum,
    }
    name "router_load"
    check(op, c) {
        c.dtypes(named!(op: probs, load, aux), DType::F32)?;
        let experts = op.probs.shape.cols();
        c.numel("load", &op.load, experts)?;
        c.numel("aux", &op.aux, 1)?;
        if let Some(entropy) = &op.entropy {
            c.dtype("entropy", entropy, DType::F32)?;
            c.numel("entropy", entropy, 1)?;
        }
        c.dtype("offsets", &op.offsets, DType::I32)?;
        c.numel("offsets", &op.offsets, experts + 1)?;
        check_alpha(c, op.alpha)
    }
    numerics { Numerics::new(Arithmetic::PositiveSum(2e-6)) }
    flops(op) { (if op.entropy.is_some() { 12 } else { 2 }) * op.probs.numel() as u64 }
}

/// Checks the probabilities of all experts against the weights and indices of the chosen ones.
fn check_routed(c: &Checker, slots: &[Named<'_>; 3]) -> Result<()> {
    let &[(_, probs), _, (_, experts)] = slots;
    c.dtypes(&slots[..2], DType::F32)?;
    c.dtypes(&slots[2..], DType::I32)?;
    let (all, chosen) = (probs.shape.cols(), experts.shape.cols());
    if chosen == 0 || chosen > all {
        return c.fail(format!("a token has {chosen} experts, expected 1..={all}"));
    }
    c.matrices(&slots[1..], probs.shape.rows(), chosen)
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
    use crate::op::OpSpec;

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
