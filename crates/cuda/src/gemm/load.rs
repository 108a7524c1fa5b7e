//! Comparing ways to compute the same at the clock of a training step. A chip that its power limit slows down there ranks them otherwise
//! than at full clock: what counts then is energy. So the best few take turns until the clock has settled, and only then count.

use super::search::median;
use crate::Result;

/// How ways are compared after each was timed for a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    /// Milliseconds of all turns before the first that counts.
    warm_ms: f32,
    /// Milliseconds of the part of each turn that does not count, in which the clock adapts to this way's power.
    settle_ms: f32,
    /// Milliseconds of the part that counts.
    turn_ms: f32,
    /// How many ways take part in each round: the best ones of the rounds before.
    places: &'static [usize],
}

impl Load {
    /// As in a step of large products.
    pub const SUSTAINED: Self = Self { warm_ms: 40.0, settle_ms: 6.0, turn_ms: 10.0, places: &[8, 5, 3] };
    /// For what is over before the clock changes.
    pub const BRIEF: Self = Self { warm_ms: 0.0, settle_ms: 0.0, turn_ms: 0.25, places: &[4; 5] };
    /// Operations of a product from which on the load is sustained: some 30 µs on a large GPU.
    const SUSTAINED_FLOPS: f64 = 2e10;

    /// For a product of so many operations.
    pub fn of(flops: f64) -> Self {
        if flops >= Self::SUSTAINED_FLOPS { Self::SUSTAINED } else { Self::BRIEF }
    }
}

/// A way slower than the best by this factor at full clock takes no turn.
const HOPELESS: f32 = 1.1;
/// The most repeats of a turn: what is timed is asynchronous, and the queue of a stream is not endless.
const MOST_REPEATS: f32 = 500.0;

/// One measurement: which way, runs that do not count, and runs that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub way: usize,
    pub skip: u32,
    pub repeats: u32,
}

/// Milliseconds of each way under load, from those at full clock and a function that returns the mean of a turn's runs. Ways that are out are as
/// far from the best in the end as they were when they last took part.
pub(super) fn under_load(
    full: &[f32],
    load: Load,
    mut time: impl FnMut(Turn) -> Result<f32>,
) -> Result<Vec<f32>> {
    let mut left: Vec<usize> = (0..full.len()).collect();
    left.sort_by(|&a, &b| full[a].total_cmp(&full[b]));
    let Some(&best) = left.first() else { return Ok(Vec::new()) };
    let (mut best_ms, limit) = (full[best], full[best] * HOPELESS);
    let mut ratios: Vec<f32> = full.iter().map(|ms| ms / best_ms).collect();
    left.retain(|&way| full[way] <= limit);
    let repeats = |way: usize, ms: f32| (ms / full[way].max(1e-3)).ceil().min(MOST_REPEATS) as u32;
    let mut turn = |way: usize| {
        time(Turn { way, skip: repeats(way, load.settle_ms), repeats: repeats(way, load.turn_ms).max(1) })
    };
    let mut times = vec![Vec::new(); full.len()];
    for (round, &places) in load.places.iter().enumerate() {
        left.truncate(places);
        if left.len() < 2 {
            break;
        }
        if round == 0 {
            let turns = (load.warm_ms / (load.settle_ms + load.turn_ms)).ceil() as usize;
            left.iter().cycle().take(turns).try_for_each(|&way| turn(way).map(drop))?;
        }
        // Every second round goes backwards: a drift of the clock, and what the way before did to it, count for all alike.
        let mut order = left.clone();
        if round % 2 == 1 {
            order.reverse();
        }
        for way in order {
            times[way].push(turn(way)?);
        }
        let medians: Vec<f32> = times.iter().map(|times| median(times.clone()).unwrap_or(f32::MAX)).collect();
        left.sort_by(|&a, &b| medians[a].total_cmp(&medians[b]));
        best_ms = medians[left[0]];
        left.iter().for_each(|&way| ratios[way] = medians[way] / best_ms);
    }
    Ok(ratios.into_iter().map(|ratio| ratio * best_ms).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chip whose clock follows the power of what ran during the last milliseconds. A way has a time at full clock and a power,
    /// where 1 is the limit.
    struct Chip {
        ways: Vec<(f32, f32)>,
        clock: f32,
        turns: Vec<Turn>,
    }

    impl Chip {
        fn new(ways: &[(f32, f32)]) -> Self {
            Self { ways: ways.to_vec(), clock: 1.0, turns: vec![] }
        }

        fn run(&mut self, turn: Turn) -> Result<f32> {
            self.turns.push(turn);
            let (ms, power) = self.ways[turn.way];
            let mut spent = 0.0;
            for i in 0..turn.skip + turn.repeats {
                let this = ms / self.clock;
                let target = (1.0 / power).min(1.0);
                self.clock += (target - self.clock) * (this / 5.0).min(1.0); // a time constant of 5 ms
                spent += if i < turn.skip { 0.0 } else { this };
            }
            Ok(spent / turn.repeats as f32)
        }

        fn compare(&mut self, load: Load) -> Vec<f32> {
            let full: Vec<f32> = self.ways.iter().map(|way| way.0).collect();
            under_load(&full, load, |turn| self.run(turn)).unwrap()
        }
    }

    #[test]
    fn the_one_that_needs_less_energy_wins_under_load() {
        // 3 % slower at full clock, but with 10 % less power
        let ways = [(0.50, 1.30), (0.515, 1.17), (0.54, 1.30), (0.60, 1.0)];
        let ms = Chip::new(&ways).compare(Load::SUSTAINED);
        assert!(ms[1] < 0.97 * ms[0] && ms[0] < ms[2], "{ms:?}");
        // the last was hopeless at full clock, and is not made better by the slower clock of the others
        assert!((ms[3] / ms[1] - 0.60 / 0.50).abs() < 1e-4, "{ms:?}");
        let brief = Chip::new(&ways).compare(Load::BRIEF);
        assert!(brief[0] < brief[1], "at full clock the first one is the best: {brief:?}");
    }

    #[test]
    fn equals_stay_equal_whatever_their_place() {
        let ms = Chip::new(&[(0.5, 1.3); 4]).compare(Load::SUSTAINED);
        assert!(ms.iter().all(|way| (way / ms[0] - 1.0).abs() < 5e-3), "{ms:?}");
        // between ways of more power too
        let ms = Chip::new(&[(0.5, 1.5), (0.5, 1.2), (0.51, 1.2), (0.5, 1.2)]).compare(Load::SUSTAINED);
        assert!((ms[1] / ms[3] - 1.0).abs() < 1.5e-2 && ms[1] < ms[2], "{ms:?}");
    }

    #[test]
    fn fewer_take_part_from_round_to_round() {
        let ways: Vec<(f32, f32)> = (0..12).map(|i| (1.0 + 0.01 * i as f32, 1.0)).collect();
        let mut chip = Chip::new(&ways);
        let ms = chip.compare(Load::SUSTAINED);
        assert!(ms.is_sorted() && (ms[0] - 1.0).abs() < 1e-3, "{ms:?}");
        assert!(
            (ms[11] - 1.11).abs() < 1e-3 && (ms[6] - 1.06).abs() < 1e-3,
            "where they were when they left: {ms:?}"
        );
        let seen: Vec<usize> = chip.turns.iter().map(|turn| turn.way).collect();
        let counted = &seen[seen.len() - (8 + 5 + 3)..];
        assert_eq!(counted, [0, 1, 2, 3, 4, 5, 6, 7, 4, 3, 2, 1, 0, 0, 1, 2]);
        // as many runs as fill the milliseconds
        assert!(
            chip.turns.iter().all(|turn| (10..=11).contains(&turn.repeats) && (6..=7).contains(&turn.skip))
        );
    }

    #[test]
    fn one_way_or_none_is_not_timed_again() {
        let mut never = |_: Turn| -> Result<f32> { panic!("timed") };
        assert_eq!(under_load(&[], Load::SUSTAINED, &mut never).unwrap(), Vec::<f32>::new());
        assert_eq!(under_load(&[0.7], Load::SUSTAINED, &mut never).unwrap(), [0.7]);
        assert_eq!(under_load(&[0.9, 0.7], Load::SUSTAINED, &mut never).unwrap(), [0.9, 0.7]);
    }

    #[test]
    fn small_products_are_not_kept_running() {
        assert_eq!(Load::of(1e9), Load::BRIEF);
        assert_eq!(Load::of(2.0 * 16384.0 * 1600.0 * 1600.0), Load::SUSTAINED);
    }
}
