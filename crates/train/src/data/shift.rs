//! The one place where labels are shifted.

use super::Sample;
use ironhorse_core::op::IGNORED;

/// Writes a sample as a row of tokens and targets: `y[i]` is the token after `x[i]` if it is learned, else [`IGNORED`]. The
/// last token has no successor. `x` and `y` are as long as the sample.
pub fn shift(sample: &Sample, x: &mut [i32], y: &mut [i32]) {
    x.copy_from_slice(&sample.ids);
    let next = sample.ids.iter().zip(&sample.learned).skip(1);
    let targets = next.map(|(&id, &learned)| if learned { id } else { IGNORED });
    y.iter_mut().zip(targets.chain([IGNORED])).for_each(|(y, target)| *y = target);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shifted twice, 13 would be the target of 10; not at all, 11 that of 11.
    #[test]
    fn targets_are_the_next_tokens_where_they_are_learned() {
        let sample = Sample { ids: vec![10, 11, 12, 13, 14], learned: vec![true, false, true, true, false] };
        let (mut x, mut y) = ([0; 5], [0; 5]);
        shift(&sample, &mut x, &mut y);
        assert_eq!((x, y), ([10, 11, 12, 13, 14], [IGNORED, 12, 13, IGNORED, IGNORED]));
        shift(&Sample::default(), &mut [], &mut []);
    }
}
