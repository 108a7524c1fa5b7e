//! Log-probabilities of tokens.

/// How likely a token was, and which were the most likely in its place. Natural logarithms, before temperature and cuts.
#[derive(Clone, Debug, PartialEq)]
pub struct Likely {
    /// ln p of the token that is there.
    pub logprob: f64,
    /// The most likely tokens in its place with their ln p, the most likely first; the lower id first among equals.
    pub top: Vec<(u32, f64)>,
}

impl Likely {
    /// How likely `token` is after these logits, with the `count` most likely tokens.
    pub fn of(logits: &[f32], token: u32, count: usize) -> Self {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| libm::exp(f64::from(logit) - f64::from(most))).sum();
        let all = f64::from(most) + libm::log(sum);
        let of = |index: usize| f64::from(logits[index]) - all;
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let count = count.min(order.len());
        let by = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if count > 0 && count < order.len() {
            order.select_nth_unstable_by(count - 1, by);
        }
        order.truncate(count);
        order.sort_unstable_by(by);
        let logprob = if (token as usize) < logits.len() { of(token as usize) } else { f64::NEG_INFINITY };
        Self { logprob, top: order.into_iter().map(|id| (id, of(id as usize))).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_and_the_likely_come_first() {
        let logits = [1.0, 3.0, -2.0, 3.0, 0.5];
        let likely = Likely::of(&logits, 0, 3);
        assert_eq!(likely.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 0]);
        assert_eq!(likely.top[2].1, likely.logprob);
        let all = Likely::of(&logits, 2, 99);
        let sum: f64 = all.top.iter().map(|(_, ln)| ln.exp()).sum();
        assert!(all.top.len() == 5 && (sum - 1.0).abs() < 1e-12, "{sum}");
        assert!(Likely::of(&logits, 0, 0).top.is_empty());
        assert_eq!(Likely::of(&logits, 7, 0).logprob, f64::NEG_INFINITY);
    }
}
