//! The router of a mixture of experts on plain memory of the host: `choose` picks experts, `rows` moves tokens to them and
//! back. The rules are those of `ironhorse_core::op`'s `RouterFwd`, `RouterBwd`, `RouteSort`, `Permute` and `Combine`.
//!
//! N tokens, E experts, K of them for each; C channels. Route `token·K + j` is one choice; sorted by expert, routes are
//! rows of the experts' inputs: `order` leads from a row to its route, `places` from a route to its row.
//!
//! Everything is checked here, so that nothing is unsafe to call: an [`Unfit`] says what does not fit.

mod choose;
mod rows;

use super::TaskPanic;
pub use choose::{Choice, Chosen, choose, choose_bwd};
pub use rows::{combine, combine_bwd, permute, permute_bwd, sort};
use std::fmt;

/// Why a call did nothing, or not all.
#[derive(Clone, Debug, PartialEq)]
pub enum Unfit {
    /// An array has another number of elements: its name, those found, those expected.
    Length(&'static str, usize, usize),
    /// More experts chosen than there are, or none: chosen, there.
    Chosen(usize, usize),
    /// A logit that is not a finite number: its token, its value.
    Logit(usize, f32),
    /// Numbers that are not those of a routing: the name of the array.
    Numbers(&'static str),
    /// A task panicked: a bug in this crate.
    Panic,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(name, found, expected) => {
                write!(f, "`{name}` has {found} elements, expected {expected}")
            }
            Self::Chosen(k, all) => write!(f, "top_k is {k}, expected 1 to {all}, the number of experts"),
            Self::Logit(token, value) => write!(f, "a logit of token {token} is {value}, expected a number"),
            Self::Numbers(name) => write!(f, "`{name}` is not of a routing"),
            Self::Panic => write!(f, "a task panicked; this is a bug in ironhorse"),
        }
    }
}

impl std::error::Error for Unfit {}

impl From<TaskPanic> for Unfit {
    fn from(_: TaskPanic) -> Self {
        Self::Panic
    }
}

/// How many: tokens, experts, and experts of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// N
    pub tokens: usize,
    /// E
    pub experts: usize,
    /// K, 1 to E
    pub chosen: usize,
}

impl Sizes {
    fn check(self) -> Result<(), Unfit> {
        if self.chosen == 0 || self.chosen > self.experts {
            return Err(Unfit::Chosen(self.chosen, self.experts));
        }
        Ok(())
    }

    fn all(self) -> usize {
        self.tokens * self.experts
    }

    fn routes(self) -> usize {
        self.tokens * self.chosen
    }
}

fn length(name: &'static str, found: usize, expected: usize) -> Result<(), Unfit> {
    if found == expected { Ok(()) } else { Err(Unfit::Length(name, found, expected)) }
}

fn below(name: &'static str, numbers: &[i32], count: usize) -> Result<(), Unfit> {
    let fits = numbers.iter().all(|&number| usize::try_from(number).is_ok_and(|number| number < count));
    if fits { Ok(()) } else { Err(Unfit::Numbers(name)) }
}
