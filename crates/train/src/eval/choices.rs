//! Multiple choice: the model grades every answer by its likelihood after the context.
//!
//! Three definitions of the answer that wins are in use, and they give different accuracies; all three are computed:
//!
//! | name | the winner has the highest | who reports it |
//! | --- | --- | --- |
//! | `acc` | log-likelihood of the whole answer | everyone |
//! | `acc_norm` | log-likelihood per character of the answer | lm-evaluation-harness, the Open LLM leaderboard |
//! | `acc_token` | log-likelihood per token of the answer | llm.c and nanoGPT's successors, as `acc_norm` |

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};

use super::report::Metric;
use super::scorer::{Scorer, Text};
use crate::format::multiple_choice::Example;
use crate::{Error, Result};

/// How one question was graded.
#[derive(Clone, Debug, PartialEq)]
pub struct Grade {
    /// The log-likelihood of each answer.
    pub log_likelihoods: Vec<f64>,
    /// Whether each answer is what greedy decoding would write.
    pub is_greedy: Vec<bool>,
    /// The right answer.
    pub label: usize,
    /// The answer with the highest log-likelihood.
    pub best: usize,
    /// The one with the highest log-likelihood per token.
    pub best_by_token: usize,
    /// The one with the highest log-likelihood per character.
    pub best_by_char: Option<usize>,
}

/// Shares of right answers, each with its standard error, which a single question has not.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accuracies {
    /// Where the likelihood of the whole answer decides.
    pub acc: f64,
    /// The standard error of `acc`.
    pub acc_stderr: Option<f64>,
    /// Per character; `None` where characters are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acc_norm: Option<f64>,
    /// The standard error of `acc_norm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acc_norm_stderr: Option<f64>,
    /// Per token.
    pub acc_token: f64,
    /// The standard error of `acc_token`.
    pub acc_token_stderr: Option<f64>,
    /// Questions.
    pub questions: usize,
}

impl Accuracies {
    /// The figures under their names.
    pub fn metrics(&self) -> Vec<Metric> {
        let figures = [
            ("acc", Some(self.acc), self.acc_stderr),
            ("acc_norm", self.acc_norm, self.acc_norm_stderr),
            ("acc_token", Some(self.acc_token), self.acc_token_stderr),
        ];
        let metric =
            |(name, value, error)| Some(Metric { name, value: value?, error, higher_is_better: true });
        figures.into_iter().filter_map(metric).collect()
    }
}

/// The mean and its standard error, as lm-evaluation-harness computes it (the sample's standard deviation over √n).
pub fn mean_and_error(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0) / count).sqrt())
}

/// Grades every example. `progress` is called with the number of answers scored, and may stop.
pub fn multiple_choice(
    scorer: &mut Scorer<'_>,
    examples: &[Example],
    progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<(Accuracies, Vec<Grade>)> {
    if examples.is_empty() {
        return Err(Error::input("the number of examples", 0, "at least 1"));
    }
    let texts: Vec<Text<'_>> = examples
        .iter()
        .flat_map(|example| &example.choices)
        .map(|choice| Text { tokens: &choice.tokens, from: choice.from })
        .collect();
    let scores = scorer.score(&texts, progress)?;
    let mut rest = scores.as_slice();
    let mut grades = Vec::with_capacity(examples.len());
    for example in examples {
        let (now, later) = rest.split_at(example.choices.len());
        rest = later;
        let log_likelihoods: Vec<f64> = now.iter().map(|score| -score.nats).collect();
        let by_token = now.iter().map(|score| -score.nats / score.tokens as f64);
        let chars: Option<Vec<f64>> =
            example.choices.iter().map(|choice| Some(choice.chars? as f64)).collect();
        let by_char =
            chars.map(|chars| highest(log_likelihoods.iter().zip(chars).map(|(sum, chars)| sum / chars)));
        grades.push(Grade {
            is_greedy: now.iter().map(|score| score.greedy).collect(),
            label: example.label,
            best: highest(log_likelihoods.iter().copied()),
            best_by_token: highest(by_token),
            best_by_char: by_char,
            log_likelihoods,
        });
    }
    Ok((accuracies(&grades), grades))
}

fn accuracies(grades: &[Grade]) -> Accuracies {
    let right = |of: fn(&Grade) -> Option<usize>| {
        let right = grades.iter().map(move |grade| f64::from(u8::from(of(grade) == Some(grade.label))));
        let (share, error) = mean_and_error(right);
        (share, Some(error).filter(|error| error.is_finite()))
    };
    let ((acc, acc_stderr), (acc_token, acc_token_stderr)) =
        (right(|grade| Some(grade.best)), right(|grade| Some(grade.best_by_token)));
    let has_chars = grades.iter().all(|grade| grade.best_by_char.is_some());
    let by_char = has_chars.then(|| right(|grade| grade.best_by_char));
    Accuracies {
        acc,
        acc_stderr,
        acc_norm: by_char.map(|(share, _)| share),
        acc_norm_stderr: by_char.and_then(|(_, error)| error),
        acc_token,
        acc_token_stderr,
        questions: grades.len(),
    }
}

/// The first of the highest, as numpy's argmax; a NaN never wins.
fn highest(values: impl Iterator<Item = f64>) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (at, value) in values.enumerate() {
        if value > best.1 {
            best = (at, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_that_of_the_sample() {
        // 2 of 4: the sample's variance is 1/3
        let (mean, error) = mean_and_error([1.0, 0.0, 1.0, 0.0].into_iter());
        assert_eq!(mean, 0.5);
        assert!((error - (1.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-15);
        assert!(mean_and_error([1.0].into_iter()).1.is_nan());
    }

    #[test]
    fn ties_go_to_the_first_and_nan_never_wins() {
        assert_eq!(highest([1.0, 2.0, 2.0].into_iter()), 1);
        assert_eq!(highest([f64::NAN, -3.0, -2.0].into_iter()), 2);
        assert_eq!(highest([f64::NAN].into_iter()), 0);
    }
}
