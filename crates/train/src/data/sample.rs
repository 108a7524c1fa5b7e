//! One sample of fine-tuning data.

/// The tokens of a sample, and which of them are learned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens.
    pub ids: Vec<i32>,
    /// Whether predicting `ids[i]` counts. Not shifted: labels are shifted once, when batches are made.
    pub learned: Vec<bool>,
}
