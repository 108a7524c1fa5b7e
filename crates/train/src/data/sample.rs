//! One sample of fine-tuning data.

use super::loader::hash;

/// The tokens of a sample, and which of them are learned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub ids: Vec<i32>,
    /// Whether predicting `ids[i]` counts. Not shifted: labels are shifted once, when batches are made.
    pub learned: Vec<bool>,
}

impl Sample {
    /// How many of its tokens are predicted and learned: the first is not predicted from anything.
    pub fn targets(&self) -> usize {
        self.learned.iter().skip(1).filter(|&&learned| learned).count()
    }

    /// Leaves its first tokens, at most this many; gives how many were cut off.
    pub fn cut(&mut self, most: usize) -> usize {
        let cut = self.ids.len().saturating_sub(most);
        self.ids.truncate(most);
        self.learned.truncate(most);
        cut
    }

    /// A number from 0 to 1 that its tokens alone decide: the same in every run, and for equal samples.
    pub fn lot(&self) -> f64 {
        let all = hash(self.ids.iter().map(|&id| u64::from(id as u32)).chain([self.ids.len() as u64]));
        (all >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// What comes before the first token that is learned.
    pub fn prompt(&self) -> Vec<u32> {
        let asked = self.ids.iter().zip(&self.learned).take_while(|(_, learned)| !**learned);
        asked.map(|(&id, _)| id.unsigned_abs()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lots_are_even_and_depend_on_the_tokens_alone() {
        let sample = |id: i32| Sample { ids: vec![id, 7], learned: vec![true; 2] };
        let below = (0..4000).filter(|&id| sample(id).lot() < 0.05).count();
        assert!((150..250).contains(&below), "{below}");
        let masked = Sample { learned: vec![false; 2], ..sample(3) };
        assert_eq!(masked.lot().to_bits(), sample(3).lot().to_bits());
        assert_ne!(sample(3).lot().to_bits(), sample(4).lot().to_bits());
    }

    #[test]
    fn a_prompt_ends_where_learning_begins() {
        let sample = |learned: [bool; 4]| Sample { ids: vec![5, 6, 7, 8], learned: learned.into() };
        assert_eq!(sample([false, false, true, false]).prompt(), [5, 6]);
        assert_eq!(sample([true, false, true, true]).prompt(), [0; 0]);
        assert_eq!(sample([false; 4]).prompt(), [5, 6, 7, 8]);
    }
}
