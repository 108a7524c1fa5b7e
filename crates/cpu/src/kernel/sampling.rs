//! Choosing one index per row: the largest, or a draw from the softmax after temperature, top-k or top-p.
//!
//! The rules are those of `ironhorse_train::generate::sample`. The weights e^((x - max) / temperature) are f64.

use super::argmax::argmax_row;
use crate::element::{LANES, tree};
use crate::isa::Isa;
use crate::multiversion;

/// Logits whose weights are added before the sum joins the total.
const BLOCK: usize = 1024;
/// Logits that are represented by their maximum in the search for a lower bound of the k-th largest.
const GROUP: usize = 64;
/// Logits that are sorted whole.
const FEW: usize = 2048;
/// The number of steps that logits are sorted into, and how many steps a factor of e covers; logits more than 64 below
/// the largest have no weight.
const STEPS: usize = 4096;
const STEPS_PER_E: f64 = 64.0;

/// e^x for x <= 0, to 1e-14; 0 below -708.
#[inline(always)]
fn exp_f64(x: f64) -> f64 {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const HI: f64 = 0.693_147_180_369_123_8;
    const LO: f64 = 1.908_214_929_270_587_7e-10;
    let limited = if x > -708.0 { x } else { -708.0 };
    let t = limited * std::f64::consts::LOG2_E + ROUND;
    let n = t - ROUND;
    let r = (limited - n * HI) - n * LO;
    let p = 1.0 / 39_916_800.0;
    let p = 1.0 / 3_628_800.0 + r * p;
    let p = 1.0 / 362_880.0 + r * p;
    let p = 1.0 / 40_320.0 + r * p;
    let p = 1.0 / 5040.0 + r * p;
    let p = 1.0 / 720.0 + r * p;
    let p = 1.0 / 120.0 + r * p;
    let p = 1.0 / 24.0 + r * p;
    let p = 1.0 / 6.0 + r * p;
    let p = 0.5 + r * p;
    let p = 1.0 + r * (1.0 + r * p);
    let power = t.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(1023) << 52;
    if x > -708.0 { p * f64::from_bits(power) } else { 0.0 }
}

multiversion! {
    /// (the largest, whether a value is NaN or +inf)
    pub fn survey<const FMA: bool>(x: &[f32]) -> (f32, bool) {
        let (mut tops, mut odd) = ([f32::NEG_INFINITY; LANES], [0_u32; LANES]);
        let mut look = |i: usize, x: f32| {
            tops[i] = if x > tops[i] { x } else { tops[i] };
            odd[i] |= u32::from(x.is_nan() | (x == f32::INFINITY));
        };
        let (full, rest) = x.as_chunks::<LANES>();
        for part in full {
            (0..LANES).for_each(|i| look(i, part[i]));
        }
        rest.iter().enumerate().for_each(|(i, &x)| look(i, x));
        (tree(tops, |a, b| if b > a { b } else { a }), odd.iter().fold(0, |a, b| a | b) != 0)
    }

    /// w = e^((x - max) / temperature)
    fn weigh<const FMA: bool>(w: &mut [f64], x: &[f32], max: f64, inverse: f64) {
        for (w, &x) in w.iter_mut().zip(x) {
            *w = exp_f64((f64::from(x) - max) * inverse);
        }
    }

    /// The step of a logit: the larger the logit, the lower the step.
    fn steps_of<const FMA: bool>(steps: &mut [u16], x: &[f32], max: f64, inverse: f64) {
        for (step, &x) in steps.iter_mut().zip(x) {
            let depth = (max - f64::from(x)) * (inverse * STEPS_PER_E);
            let depth = if depth < (STEPS - 1) as f64 { depth } else { (STEPS - 1) as f64 };
            // SAFETY: from 0, for max is the largest, to STEPS - 1.
            *step = unsafe { depth.to_int_unchecked::<i32>() } as u16;
        }
    }

    /// Σ e^((x - max) / temperature)
    fn mass<const FMA: bool>(x: &[f32], max: f64, inverse: f64) -> f64 {
        const WIDE: usize = 16;
        let mut lanes = [0.0_f64; WIDE];
        let (full, rest) = x.as_chunks::<WIDE>();
        for part in full {
            for i in 0..WIDE {
                lanes[i] += exp_f64((f64::from(part[i]) - max) * inverse);
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(rest) {
            *lane += exp_f64((f64::from(x) - max) * inverse);
        }
        lanes.iter().sum()
    }
}

/// One row and what is known about it.
struct Row<'a> {
    isa: Isa,
    x: &'a [f32],
    max: f64,
    inverse: f64,
}

impl Row<'_> {
    fn weights(&self, indices: impl Iterator<Item = u32>) -> Vec<f64> {
        let x: Vec<f32> = indices.map(|i| self.x[i as usize]).collect();
        let mut weights = vec![0.0; x.len()];
        weigh(self.isa, &mut weights, &x, self.max, self.inverse);
        weights
    }

    /// Every index whose logit is at least some bound that k logits reach, or all.
    fn at_least(&self, k: usize) -> Vec<u32> {
        let mut tops: Vec<f32> = self.x.chunks(GROUP).map(|group| survey(self.isa, group).0).collect();
        if k > tops.len() {
            return (0..self.x.len() as u32).collect();
        }
        let groups = tops.clone();
        let bound = *tops.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
        let mut found = Vec::with_capacity(2 * k);
        for (number, _) in groups.iter().enumerate().filter(|(_, top)| **top >= bound) {
            let start = number * GROUP;
            let end = self.x.len().min(start + GROUP);
            found.extend((start..end).filter(|&i| self.x[i] >= bound).map(|i| i as u32));
        }
        found
    }

    /// The k largest and those equal to the k-th, by index.
    fn top_k(&self, k: usize) -> Vec<u32> {
        let mut kept = self.at_least(k);
        if k < kept.len() {
            let (_, kth, _) = kept.select_nth_unstable_by(k - 1, |&a, &b| self.descending(a, b));
            let least = self.x[*kth as usize];
            kept.retain(|&i| self.x[i as usize] >= least);
            kept.sort_unstable();
        }
        kept
    }

    /// Sorts, largest first.
    fn sorted(&self, indices: impl Iterator<Item = usize>) -> Vec<u32> {
        // Logit and index in one number that sorts as `descending` does.
        let mut keys: Vec<u64> = indices.map(|i| self.key(i as u32)).collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| key as u32).collect()
    }

    /// An index drawn from those that, from the largest down, have less than the share `p` above them.
    fn draw_top_p(&self, p: f64, u: f64) -> Option<usize> {
        if self.x.len() > FEW { self.draw_by_steps(p, u) } else { self.draw_sorted(p, u) }
    }

    fn draw_sorted(&self, p: f64, u: f64) -> Option<usize> {
        let order = self.sorted(0..self.x.len());
        let weights = self.weights(order.iter().copied());
        let (above, kept) = reach(&weights, 0.0, p * weights.iter().sum::<f64>());
        self.draw(order[..kept].iter().map(|&i| i as usize).zip(weights), u * above)
    }

    /// Draws as [`Row::draw_top_p`] says, without sorting the row: the mass of each step of the logits is known, so only the step
    /// in which the share is reached, and the one in which `u` falls, are sorted.
    fn draw_by_steps(&self, p: f64, u: f64) -> Option<usize> {
        let (steps, masses) = self.steps();
        let on = |step: usize| self.sorted(members(&steps, step as u16));
        let enough = p * masses.iter().sum::<f64>();
        let (mut above, mut end, mut last) = (0.0, STEPS, Vec::new());
        for (step, &mass) in masses.iter().enumerate() {
            if above + mass < enough {
                above += mass;
                continue;
            }
            last = on(step);
            let (reached, kept) = reach(&self.weights(last.iter().copied()), above, enough);
            last.truncate(kept);
            (above, end) = (reached, step);
            if above >= enough {
                break;
            }
            // Summed in another order, this step may miss the share by a rounding error.
        }
        let mut left = u * above;
        for (step, &mass) in masses[..end].iter().enumerate() {
            if left < mass {
                return self.draw_at(&on(step), left);
            }
            left -= mass;
        }
        self.draw_at(&last, left)
    }

    /// The step of each logit, and the mass of each step.
    fn steps(&self) -> (Vec<u16>, Vec<f64>) {
        let (mut steps, mut masses, mut weights) = (vec![0; self.x.len()], vec![0.0; STEPS], [0.0; BLOCK]);
        for (block, steps) in self.x.chunks(BLOCK).zip(steps.chunks_mut(BLOCK)) {
            weigh(self.isa, &mut weights[..block.len()], block, self.max, self.inverse);
            steps_of(self.isa, steps, block, self.max, self.inverse);
            steps.iter().zip(&weights).for_each(|(&step, weight)| masses[step as usize % STEPS] += weight);
        }
        (steps, masses)
    }

    /// Orders indices as [`Row::descending`] does; the index is in the lower half.
    fn key(&self, i: u32) -> u64 {
        let bits = self.x[i as usize].to_bits();
        let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        u64::from(!ascending) << 32 | u64::from(i)
    }

    fn descending(&self, a: u32, b: u32) -> std::cmp::Ordering {
        self.x[b as usize].total_cmp(&self.x[a as usize]).then(a.cmp(&b))
    }

    fn blocks(&self) -> Vec<f64> {
        self.x.chunks(BLOCK).map(|block| mass(self.isa, block, self.max, self.inverse)).collect()
    }

    /// The index in whose share of the whole row `u` falls.
    fn draw_all(&self, u: f64) -> Option<usize> {
        let blocks = self.blocks();
        let mut left = u * blocks.iter().sum::<f64>();
        let last = blocks.iter().rposition(|&mass| mass > 0.0)?;
        for (number, &mass) in blocks.iter().enumerate() {
            if left < mass || number == last {
                let start = number * BLOCK;
                let end = self.x.len().min(start + BLOCK);
                let weights = self.weights(start as u32..end as u32);
                return self.draw((start..end).zip(weights), left);
            }
            left -= mass;
        }
        None
    }

    /// The index in whose weight `left` falls, or, if a rounding error leaves none, the last with a weight above 0.
    fn draw(&self, weighed: impl Iterator<Item = (usize, f64)>, mut left: f64) -> Option<usize> {
        let mut last = None;
        for (i, weight) in weighed {
            if weight > 0.0 {
                last = Some(i);
                if left < weight {
                    return last;
                }
                left -= weight;
            }
        }
        last
    }

    /// The one of these indices in whose weight `left` falls.
    fn draw_at(&self, order: &[u32], left: f64) -> Option<usize> {
        self.draw(order.iter().map(|&i| i as usize).zip(self.weights(order.iter().copied())), left)
    }

    fn draw_from(&self, kept: &[u32], u: f64) -> Option<usize> {
        let weights = self.weights(kept.iter().copied());
        let left = u * weights.iter().sum::<f64>();
        self.draw(kept.iter().map(|&i| i as usize).zip(weights), left)
    }
}

/// The indices of the logits on `step`.
fn members(steps: &[u16], step: u16) -> impl Iterator<Item = usize> {
    let holds = move |group: &[u16]| group.iter().fold(0, |found, &s| found | u32::from(s == step)) != 0;
    let groups = steps.chunks(GROUP).enumerate().filter(move |(_, group)| holds(group));
    groups.flat_map(move |(number, group)| {
        group.iter().enumerate().filter(move |(_, s)| **s == step).map(move |(i, _)| number * GROUP + i)
    })
}

/// Adds weights to `above` until it is `enough`: (the sum, how many).
fn reach(weights: &[f64], mut above: f64, enough: f64) -> (f64, usize) {
    let mut count = 0;
    while count < weights.len() && above < enough {
        above += weights[count];
        count += 1;
    }
    (above, count)
}

/// What to draw from.
#[derive(Clone, Copy)]
pub struct Sampling {
    /// Divides the logits; 0 is argmax.
    pub temperature: f32,
    /// Only the k largest logits, and what ties with the k-th, can be drawn; at least 1.
    pub top_k: Option<usize>,
    /// Only the largest logits that together reach this share can be drawn, in (0, 1].
    pub top_p: Option<f32>,
}

/// Why a row has no distribution to draw from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoDistribution {
    /// A logit is NaN or +inf.
    NotFinite,
    /// Every logit is -inf.
    Empty,
}

/// The column that `u`, uniform in \[0, 1), draws from a row. `top_k` goes before `top_p`; only one of them is used.
///
/// # Errors
/// The row has no distribution.
pub fn draw(isa: Isa, x: &[f32], choice: &Sampling, u: f64) -> Result<i32, NoDistribution> {
    let (max, odd) = survey(isa, x);
    if odd {
        return Err(NoDistribution::NotFinite);
    }
    if max == f32::NEG_INFINITY {
        return Err(NoDistribution::Empty);
    }
    if choice.temperature == 0.0 {
        return Ok(argmax_row(isa, x) as i32);
    }
    let row = Row { isa, x, max: f64::from(max), inverse: 1.0 / f64::from(choice.temperature) };
    let drawn = match (choice.top_k, choice.top_p) {
        (Some(k), _) => row.draw_from(&row.top_k(k), u),
        (None, Some(p)) => row.draw_top_p(f64::from(p), u),
        (None, None) => row.draw_all(u),
    };
    drawn.map(|i| i as i32).ok_or(NoDistribution::Empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::eager::uniform_of_seed;

    #[test]
    fn drawing_by_steps_is_drawing_from_the_sorted() {
        let mut state = 3_u64;
        let mut next = || {
            state += 1;
            uniform_of_seed(state)
        };
        for (len, spread, inverse) in
            [(1, 1.0, 1.0), (3000, 4.0, 1.0), (5000, 0.01, 1.0), (4000, 300.0, 0.7), (3000, 8.0, 9.0)]
        {
            let mut x: Vec<f32> = (0..len).map(|_| ((next() + next() - 1.0) * spread) as f32).collect();
            (0..len / 10).for_each(|_| x[(next() * len as f64) as usize] = f32::NEG_INFINITY);
            let tied = x[len / 2];
            (0..len / 10).for_each(|_| x[(next() * len as f64) as usize] = tied);
            let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let row = Row { isa: Isa::detect(), x: &x, max, inverse };
            for p in [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0] {
                for u in [0.0, next(), next(), next(), 1.0 - 1e-16] {
                    let (steps, sorted) = (row.draw_by_steps(p, u), row.draw_sorted(p, u));
                    let value = |drawn: Option<usize>| drawn.map(|i| x[i]);
                    // At the very ends sums in another order may end one weightless logit earlier or later.
                    let exact = p < 1.0 && u < 0.999_999;
                    let near = value(steps)
                        .zip(value(sorted))
                        .is_some_and(|(a, b)| (a - b).abs() <= 40.0 / inverse as f32);
                    assert!(
                        if exact { steps == sorted } else { near },
                        "{len} p {p} u {u}: {steps:?} {sorted:?}"
                    );
                }
            }
        }
    }
}
