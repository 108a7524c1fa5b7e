//! Comparing ways to compute the same at the clock of a training step. A chip that its power limit slows down there ranks them otherwise
//! than at full clock: what counts then is energy. So the best few run one after the other, each until the clock has settled for its
//! power, which takes an H200 80 ms, and only then count.

use super::search::median;
use crate::Result;

/// How ways are compared: all for a moment, then the best few for longer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    /// Milliseconds before anything counts.
    warm_ms: f32,
    /// Milliseconds of a first look at a way, and how many of them it has.
    look_ms: f32,
    looks: usize,
    /// Milliseconds of the part of each turn that does not count, in which the clock adapts to this way's power.
    settle_ms: f32,
    /// Milliseconds of the part that counts.
    turn_ms: f32,
    /// How many ways take turns at most, and how many turns each has.
    places: usize,
    rounds: usize,
}

impl Load {
    /// The load of a step of large products. After a pause the clock is too high for 100 ms, after products of other power wrong
    /// for 80 (docs/log.md).
    pub const SUSTAINED: Self =
        Self { warm_ms: 100.0, look_ms: 1.5, looks: 3, settle_ms: 80.0, turn_ms: 40.0, places: 4, rounds: 1 };
    /// The load of products that are over before the clock changes.
    pub const BRIEF: Self =
        Self { warm_ms: 0.0, look_ms: 0.25, looks: 1, settle_ms: 0.0, turn_ms: 0.25, places: 4, rounds: 5 };
    /// Operations of a product from which on the load is sustained: some 30 µs on a large GPU.
    const SUSTAINED_FLOPS: f64 = 2e10;

    /// The load for a product of this many operations.
    pub fn of(flops: f64) -> Self {
        if flops >= Self::SUSTAINED_FLOPS { Self::SUSTAINED } else { Self::BRIEF }
    }
}

/// A way slower than the best by this factor at first sight takes no turn.
const HOPELESS: f32 = 1.1;
/// Milliseconds to spend on single runs of one way, about: what takes long has fewer rounds.
const MOST_MS: f32 = 30.0;
/// The most repeats of a turn: what is timed is asynchronous, and the queue of a stream is not endless.
const MOST_REPEATS: f32 = 5000.0;

/// One measurement: which way, runs that do not count, and runs that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub way: usize,
    pub skip: u32,
    pub repeats: u32,
}

/// Milliseconds of each of some ways by a first look, all at about the same clock, from a function that returns the mean of a turn's runs, and
/// a guess of it where a look is brief.
pub(super) fn first_look(
    ways: usize,
    load: Load,
    guess_ms: f64,
    mut time: impl FnMut(Turn) -> Result<f32>,
) -> Result<Vec<f32>> {
    let warms = load.warm_ms > 0.0 && ways > 1;
    // On a slower GPU a guess would let the products run for much longer than is asked for.
    let one_ms = if warms { time(Turn { way: 0, skip: 1, repeats: 1 })?.max(1e-3).into() } else { guess_ms };
    let runs = |ms: f32| (f64::from(ms) / one_ms).ceil();
    if warms {
        time(Turn { way: 0, skip: runs(load.warm_ms).min(MOST_REPEATS.into()) as u32, repeats: 1 })?;
    }
    let repeats = runs(load.look_ms).clamp(1.0, 20.0) as u32;
    let mut times = vec![Vec::new(); ways];
    let mut order: Vec<usize> = (0..ways).collect();
    for _ in 0..load.looks {
        for &way in &order {
            times[way].push(time(Turn { way, skip: 0, repeats })?);
        }
        order.reverse();
    }
    Ok(times.into_iter().map(|times| median(times).unwrap_or(f32::MAX)).collect())
}

/// Milliseconds of each way under load, from those of a first look and a function that returns the mean of a turn's runs. Ways that take no
/// turn are as far from the best one then as they were.
pub(super) fn under_load(
    full: &[f32],
    load: Load,
    mut time: impl FnMut(Turn) -> Result<f32>,
) -> Result<Vec<f32>> {
    let mut left: Vec<usize> = (0..full.len()).collect();
    left.sort_by(|&a, &b| full[a].total_cmp(&full[b]));
    let Some(&first) = left.first() else { return Ok(Vec::new()) };
    left.retain(|&way| full[way] <= full[first] * HOPELESS);
    left.truncate(load.places);
    if left.len() < 2 {
        return Ok(full.to_vec());
    }
    let repeats = |way: usize, ms: f32| (ms / full[way].max(1e-3)).ceil().min(MOST_REPEATS) as u32;
    let mut turn = |way: usize| {
        time(Turn { way, skip: repeats(way, load.settle_ms), repeats: repeats(way, load.turn_ms).max(1) })
    };
    let mut times = vec![Vec::new(); full.len()];
    let rounds = load.rounds.min((MOST_MS / full[first]) as usize).max(1);
    for _ in 0..rounds {
        for &way in &left {
            times[way].push(turn(way)?);
        }
        // The next round goes backwards: a drift of the clock, and what the way before did to it, count for all alike.
        left.reverse();
    }
    let ms: Vec<Option<f32>> = times.into_iter().map(median).collect();
    let best = ms.iter().flatten().copied().fold(f32::MAX, f32::min);
    Ok(ms.into_iter().zip(full).map(|(ms, way)| ms.unwrap_or(way / full[first] * best)).collect())
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
                self.clock += (target - self.clock) * (this / 25.0).min(1.0); // a time constant of 25 ms
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
    fn only_the_best_few_take_turns() {
        let ways = [(1.0, 1.0), (1.09, 1.0), (1.02, 1.0), (1.2, 1.0), (1.05, 1.0), (1.08, 1.0)];
        let mut chip = Chip::new(&ways);
        let ms = chip.compare(Load::SUSTAINED);
        assert!(ms.iter().zip(ways).all(|(ms, (full, _))| (ms / full - 1.0).abs() < 1e-3), "{ms:?}");
        let seen: Vec<usize> = chip.turns.iter().map(|turn| turn.way).collect();
        assert_eq!(seen, [0, 2, 4, 5]);
        // as many runs as fill the milliseconds
        assert!(
            chip.turns.iter().all(|turn| (37..=40).contains(&turn.repeats) && (75..=80).contains(&turn.skip))
        );
        let brief = Load { rounds: 3, ..Load::SUSTAINED };
        let mut chip = Chip::new(&ways.map(|(ms, power)| (ms / 10.0, power)));
        chip.compare(brief);
        let seen: Vec<usize> = chip.turns.iter().map(|turn| turn.way).collect();
        assert_eq!(seen, [0, 2, 4, 5, 5, 4, 2, 0, 0, 2, 4, 5], "to and fro");
    }

    #[test]
    fn what_takes_long_has_fewer_rounds() {
        for (ms, rounds) in [(1.0, 5), (9.0, 3), (40.0, 1)] {
            let mut chip = Chip::new(&[(ms, 1.0), (1.01 * ms, 1.0)]);
            chip.compare(Load::BRIEF);
            assert_eq!(chip.turns.len(), 2 * rounds, "{ms} ms");
            assert!(chip.turns.iter().all(|turn| (turn.skip, turn.repeats) == (0, 1)));
        }
    }

    #[test]
    fn a_first_look_is_at_the_clock_of_the_step() {
        let ways = [(0.5, 1.3), (0.52, 1.3), (0.48, 1.3), (0.55, 1.3)];
        let mut chip = Chip::new(&ways);
        let ms = first_look(4, Load::SUSTAINED, 0.4, |turn| chip.run(turn)).unwrap();
        assert!(ms.iter().zip(ways).all(|(ms, (full, _))| (ms / full / 1.3 - 1.0).abs() < 1e-2), "{ms:?}");
        let seen: Vec<usize> = chip.turns.iter().map(|turn| turn.way).collect();
        assert_eq!(seen, [0, 0, 0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]);
        // a run of half a millisecond, then as many as fill what is asked for
        assert_eq!((chip.turns[0].skip, chip.turns[0].repeats), (1, 1));
        assert!((190..=200).contains(&chip.turns[1].skip) && chip.turns[2].repeats == 3, "{:?}", chip.turns);

        let mut chip = Chip::new(&ways);
        let ms = first_look(4, Load::BRIEF, 0.4, |turn| chip.run(turn)).unwrap();
        assert!(chip.turns.len() == 4 && ms[0] < 0.52, "at full clock: {ms:?}");
        assert_eq!(first_look(0, Load::SUSTAINED, 0.4, |turn| chip.run(turn)).unwrap(), Vec::<f32>::new());
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
