//! Detects outlier losses by a robust z-score: the distance from the median in units of the
//! median absolute deviation, which a few outliers do not move.

use std::collections::VecDeque;

/// Losses in the window, and the fewest from which a score is computed.
const WINDOW: usize = 128;
const LEAST: usize = 32;
/// The score from which a loss counts as a spike.
const THRESHOLD: f32 = 8.0;
/// What makes the median absolute deviation of normal noise its standard deviation.
const TO_SIGMA: f32 = 1.4826;
/// The least deviation, as a share of the median: where the loss hardly varies, a small change is not a spike.
const LEAST_DEVIATION: f32 = 0.01;

/// The last losses of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Spikes {
    losses: VecDeque<f32>,
    sorted: Vec<f32>,
}

impl Spikes {
    /// Adds a loss; its score if it is a spike.
    pub fn add(&mut self, loss: f32) -> Option<f32> {
        if !loss.is_finite() {
            return None;
        }
        let score = self.score(loss).filter(|&score| score > THRESHOLD);
        if self.losses.len() == WINDOW {
            self.losses.pop_front();
        }
        self.losses.push_back(loss);
        score
    }

    fn score(&mut self, loss: f32) -> Option<f32> {
        if self.losses.len() < LEAST {
            return None;
        }
        self.sorted.clear();
        self.sorted.extend(&self.losses);
        let median = middle(&mut self.sorted);
        self.sorted.iter_mut().for_each(|value| *value = (*value - median).abs());
        let deviation = (TO_SIGMA * middle(&mut self.sorted)).max(LEAST_DEVIATION * median.abs());
        Some((loss - median) / deviation.max(f32::MIN_POSITIVE))
    }
}

fn middle(values: &mut [f32]) -> f32 {
    values.sort_unstable_by(f32::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stands_out_upwards_is_a_spike() {
        let mut spikes = Spikes::default();
        let noise = |i: usize| 3.0 + 0.1 * ((i * 37 % 17) as f32 / 17.0 - 0.5);
        assert_eq!(spikes.add(50.0), None, "nothing to compare it with");
        for i in 0..500 {
            assert_eq!(spikes.add(noise(i)), None, "{i}");
        }
        assert!(spikes.add(4.5).is_some_and(|score| score > 20.0));
        assert_eq!(spikes.add(f32::NAN), None);
        assert_eq!(spikes.add(1.0), None, "better than expected");
        assert_eq!(spikes.add(noise(7)), None, "one spike hides nothing");
        let mut flat = Spikes::default();
        (0..200).for_each(|_| assert_eq!(flat.add(2.0), None));
        assert_eq!(flat.add(2.05), None);
        assert!(flat.add(2.5).is_some());
    }
}
