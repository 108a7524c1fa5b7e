//! `--dpo`: pairs of answers, of which one was chosen.

use super::TrainArgs;
use crate::args::MaskArg;
use anyhow::{Result, bail};
use ironhorse::train::data::Sample;

/// Refuses flags that do not go together.
pub fn check(args: &TrainArgs) -> Result<()> {
    match args {
        TrainArgs { dpo: false, beta: Some(_), .. } => bail!("--beta goes with --dpo: preferences"),
        TrainArgs { dpo: true, save_batches: Some(_), .. } => {
            bail!("--save-batches writes no pairs; leave it out with --dpo")
        }
        TrainArgs { dpo: true, .. } if args.template.mask == Some(MaskArg::None) => {
            bail!(
                "--mask none goes with chats: of preferences the answers are learned; give assistant or completion"
            )
        }
        TrainArgs { dpo: true, .. } if args.init.is_none() && args.model == super::BUILTIN => {
            bail!("--dpo learns which answers of a model are better; give the model with --init")
        }
        _ => Ok(()),
    }
}

/// Cuts both samples of a pair at their ends until they fit into a row together: the longer one first, then both to the same
/// length. Gives how many tokens were cut off each.
pub fn cut(pair: &mut [Sample], seq: usize) -> Vec<usize> {
    let lengths: Vec<usize> = pair.iter().map(|sample| sample.ids.len()).collect();
    let shortest = lengths.iter().copied().min().unwrap_or(0);
    let most = if lengths.iter().sum::<usize>() <= seq {
        usize::MAX
    } else {
        (seq / 2).max(seq.saturating_sub(shortest))
    };
    pair.iter_mut().map(|sample| sample.cut(most)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_cut_until_they_fit() {
        let cut = |lengths: [usize; 2], seq| {
            let mut pair = lengths.map(|length| Sample { ids: vec![1; length], learned: vec![true; length] });
            let cut = cut(&mut pair, seq);
            let left = pair.each_ref().map(|sample| sample.ids.len());
            assert!(left.iter().sum::<usize>() <= seq);
            assert_eq!([0, 1].map(|i| left[i] + cut[i]), lengths);
            left
        };
        assert_eq!(cut([5, 5], 10), [5, 5]);
        assert_eq!(cut([3, 20], 10), [3, 7]);
        assert_eq!(cut([20, 3], 10), [7, 3]);
        assert_eq!(cut([20, 6], 10), [5, 5]);
        assert_eq!(cut([8, 9], 11), [5, 5]);
        assert_eq!(cut([2, 3], 2), [1, 1]);
    }
}
