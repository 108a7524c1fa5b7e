//! Choosing the next token from logits: temperature, then top-k, then top-p, then one draw.
//!
//! p = softmax(logits / temperature); top-k keeps the k largest (and what ties with the k-th), top-p the smallest set of
//! the largest that holds a mass of at least top_p of what top-k left: the order and the rules of Hugging Face `generate`.

use serde::{Deserialize, Serialize};

use crate::rng::Rng;
use crate::{Error, Result};
use ironhorse_core::TokenChoice;

/// How to choose a token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampler {
    /// Logits are divided by this; 0 means the largest logit always wins (the lowest index among equals).
    pub temperature: f32,
    /// Keep only this many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Keep only the most likely tokens that together reach this probability.
    pub top_p: Option<f32>,
    /// Seed of [`rng`](Self::rng).
    pub seed: u64,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

/// One token that may be chosen: its logit, its index, its weight (exp of the scaled logit).
#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    index: usize,
    weight: f64,
}

/// Memory that [`Sampler::pick`] reuses from token to token.
#[derive(Clone, Debug, Default)]
pub struct SamplerScratch {
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Always the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// The generator these settings ask for.
    pub fn rng(&self) -> Rng {
        Rng::new(self.seed)
    }

    /// Checks the settings; the error names the one that is invalid.
    pub fn validate(&self) -> Result<()> {
        let fail = |name, found: &dyn std::fmt::Display, expected| {
            Err(Error::input(format!("sampling: {name}"), found, expected))
        };
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return fail("temperature", &self.temperature, "a finite number >= 0");
        }
        match (self.top_k, self.top_p) {
            (Some(0), _) => fail("top_k", &0, "at least 1"),
            (_, Some(p)) if !(p > 0.0 && p <= 1.0) => fail("top_p", &p, "more than 0 and at most 1"),
            _ => Ok(()),
        }
    }

    /// The index of the chosen logit. Uses one draw of `rng`, none when greedy.
    ///
    /// A logit of minus infinity is never chosen; NaN, plus infinity or no possible token is an error.
    pub fn pick(&self, logits: &[f32], rng: &mut Rng, scratch: &mut SamplerScratch) -> Result<usize> {
        self.validate()?;
        self.pick_at(logits, self.uniform(rng), scratch)
    }

    /// The random number of one choice: a draw of `rng`, none when greedy.
    pub fn uniform(&self, rng: &mut Rng) -> f64 {
        if self.temperature == 0.0 { 0.0 } else { rng.uniform_f64() }
    }

    /// What an engine needs to choose a token by itself.
    pub fn choice(&self, uniform: f64) -> TokenChoice {
        TokenChoice { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p, uniform }
    }

    /// [`pick`](Self::pick) with its random number in [0, 1) given.
    pub fn pick_at(&self, logits: &[f32], uniform: f64, scratch: &mut SamplerScratch) -> Result<usize> {
        let best = argmax(logits)?;
        if self.temperature == 0.0 {
            return Ok(best);
        }
        let (top, temperature) = (f64::from(logits[best]), f64::from(self.temperature));
        let kept = &mut scratch.candidates;
        kept.clear();
        kept.extend(logits.iter().enumerate().map(|(index, &logit)| {
            let weight = libm::exp((f64::from(logit) - top) / temperature);
            Candidate { logit, index, weight }
        }));
        if let Some(k) = self.top_k {
            keep_top_k(kept, k);
        }
        if let Some(p) = self.top_p {
            keep_top_p(kept, f64::from(p));
        }
        Ok(draw(kept, uniform).unwrap_or(best))
    }
}

/// The index of the largest logit, the lowest among equals.
fn argmax(logits: &[f32]) -> Result<usize> {
    let mut best = None;
    for (i, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(Error::input(format!("sampling: logit {i}"), logit, "a finite number"));
        }
        if logit > best.map_or(f32::NEG_INFINITY, |b: usize| logits[b]) {
            best = Some(i);
        }
    }
    best.ok_or_else(|| {
        let n = logits.len();
        Error::input(format!("sampling: the largest of {n} logits"), f32::NEG_INFINITY, "a finite number")
    })
}

/// Keeps the k largest logits and those equal to the k-th, in the order they stand.
fn keep_top_k(kept: &mut Vec<Candidate>, k: usize) {
    if k >= kept.len() {
        return;
    }
    let (_, kth, _) = kept.select_nth_unstable_by(k - 1, |a, b| b.logit.total_cmp(&a.logit));
    let least = kth.logit;
    kept.retain(|c| c.logit >= least);
    // The selection reorders items; sorting by index makes the draw independent of its order.
    kept.sort_unstable_by_key(|c| c.index);
}

/// Keeps, from the most likely down, each token that has less than `p` of the mass above it.
fn keep_top_p(kept: &mut Vec<Candidate>, p: f64) {
    kept.sort_unstable_by(|a, b| b.logit.total_cmp(&a.logit).then(a.index.cmp(&b.index)));
    let enough = p * kept.iter().map(|c| c.weight).sum::<f64>();
    let (mut above, mut count) = (0.0, 0);
    while count < kept.len() && above < enough {
        above += kept[count].weight;
        count += 1;
    }
    kept.truncate(count);
}

/// The candidate in whose share of the total weight `u` (in [0, 1)) falls.
fn draw(kept: &[Candidate], u: f64) -> Option<usize> {
    let mut left = u * kept.iter().map(|c| c.weight).sum::<f64>();
    for c in kept {
        if left < c.weight {
            return Some(c.index);
        }
        left -= c.weight;
    }
    // Rounding can leave a remainder, which falls to the last token with a weight above 0.
    kept.iter().rev().find(|c| c.weight > 0.0).map(|c| c.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The distribution after temperature, top-k and top-p, the plain way on a full sort.
    fn brute_force(s: &Sampler, logits: &[f32]) -> Vec<f64> {
        let softmax = |l: &[f64]| -> Vec<f64> {
            let max = l.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let total: f64 = l.iter().map(|x| (x - max).exp()).sum();
            l.iter().map(|x| (x - max).exp() / total).collect()
        };
        let mut l: Vec<f64> = logits.iter().map(|&x| f64::from(x) / f64::from(s.temperature)).collect();
        if let Some(k) = s.top_k {
            let mut sorted = l.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let kth = sorted[k.min(l.len()) - 1];
            l.iter_mut().filter(|x| **x < kth).for_each(|x| *x = f64::NEG_INFINITY);
        }
        if let Some(p) = s.top_p {
            let probs = softmax(&l);
            let mut order: Vec<usize> = (0..l.len()).collect();
            order.sort_by(|&a, &b| l[b].total_cmp(&l[a]).then(a.cmp(&b)));
            let mut above = 0.0;
            for i in order {
                if above >= f64::from(p) {
                    l[i] = f64::NEG_INFINITY;
                }
                above += probs[i];
            }
        }
        softmax(&l)
    }

    #[test]
    fn matches_brute_force() {
        let mut rng = Rng::new(11);
        let mut scratch = SamplerScratch::default();
        for (case, n) in [1_usize, 2, 5, 31, 33, 50].into_iter().cycle().take(36).enumerate() {
            let mut logits: Vec<f32> = (0..n).map(|_| 2.0 * rng.normal() as f32).collect();
            if case % 3 == 0 && n > 4 {
                logits[1] = logits[0];
                logits[3] = f32::NEG_INFINITY;
            }
            let s = Sampler {
                temperature: [0.7, 1.0, 1.6][case % 3],
                top_k: [None, Some(1), Some(4), Some(40)][case % 4],
                top_p: [None, Some(0.5), Some(0.93), Some(1.0), Some(1e-6)][case % 5],
                seed: case as u64,
            };
            let want = brute_force(&s, &logits);
            let (draws, mut counts, mut draw_rng) = (4000, vec![0.0; n], s.rng());
            for _ in 0..draws {
                counts[s.pick(&logits, &mut draw_rng, &mut scratch).unwrap()] += 1.0;
            }
            let (mut chi2, mut free) = (0.0, 0.0);
            for (i, (&got, &p)) in counts.iter().zip(&want).enumerate() {
                assert!(p > 0.0 || got == 0.0, "case {case}: token {i} was cut but chosen");
                let expected: f64 = p * f64::from(draws);
                if expected >= 5.0 {
                    chi2 += (got - expected) * (got - expected) / expected;
                    free += 1.0;
                }
            }
            assert!(chi2 <= free + 5.0 * (2.0_f64 * free).sqrt(), "case {case}: {chi2} for {free} tokens");
        }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let (mut rng, mut scratch) = (Rng::new(0), SamplerScratch::default());
        let before = rng.clone();
        assert_eq!(Sampler::greedy().pick(&[1.0, 3.0, -2.0, 3.0], &mut rng, &mut scratch).unwrap(), 1);
        assert_eq!(rng, before);
    }

    #[test]
    fn ties_with_the_kth_stay() {
        let s = Sampler { top_k: Some(2), ..Sampler::default() };
        let (mut rng, mut scratch) = (s.rng(), SamplerScratch::default());
        let mut seen = [false; 4];
        for _ in 0..200 {
            seen[s.pick(&[0.0, 1.0, 1.0, 1.0], &mut rng, &mut scratch).unwrap()] = true;
        }
        assert_eq!(seen, [false, true, true, true]);
    }

    #[test]
    fn a_cold_sampler_does_not_overflow() {
        let s = Sampler { temperature: 1e-30, ..Sampler::default() };
        let (mut rng, mut scratch) = (s.rng(), SamplerScratch::default());
        for _ in 0..50 {
            assert_eq!(s.pick(&[-1e30, 5.0, 4.9, 1e30], &mut rng, &mut scratch).unwrap(), 3);
        }
    }

    #[test]
    fn bad_input_is_named() {
        let good = Sampler::default();
        for (bad, logits, text) in [
            (Sampler { temperature: -1.0, ..good }, vec![0.0], "temperature is -1"),
            (Sampler { temperature: f32::NAN, ..good }, vec![0.0], "temperature is NaN"),
            (Sampler { top_k: Some(0), ..good }, vec![0.0], "top_k is 0"),
            (Sampler { top_p: Some(0.0), ..good }, vec![0.0], "top_p is 0"),
            (Sampler { top_p: Some(1.01), ..good }, vec![0.0], "top_p is 1.01"),
            (good, vec![0.0, f32::NAN], "logit 1 is NaN"),
            (Sampler::greedy(), vec![0.0, f32::NAN], "logit 1 is NaN"),
            (good, vec![f32::INFINITY], "logit 0 is inf"),
            (good, vec![f32::NEG_INFINITY; 3], "largest of 3 logits is -inf"),
            (good, vec![], "largest of 0 logits is -inf"),
        ] {
            let error = bad.pick(&logits, &mut Rng::new(0), &mut SamplerScratch::default()).unwrap_err();
            assert!(matches!(error, Error::Input { .. }) && error.to_string().contains(text), "{error}");
        }
    }
}
