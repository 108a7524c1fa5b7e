//! The router of a mixture of experts on slices: `choose` picks experts, `rows` moves tokens to them and back. The rules are
//! those of `ironhorse_core::op`'s `RouterFwd`, `RouterBwd`, `RouteSort`, `Permute` and `Combine`.
//!
//! N tokens, E experts, K of them for each; C channels. Route `token·K + j` is one choice; sorted by expert, routes are
//! rows of the experts' inputs: `order` leads from a row to its route, `places` from a route to its row.
//!
//! Sizes and indices are checked here, so that nothing is unsafe to call: an [`Unfit`] says what is wrong.

mod choose;
mod rows;

use crate::team::TaskPanic;
pub use choose::{Routed, RoutedMut, choose, choose_bwd};
pub use rows::{combine, combine_bwd, permute, permute_bwd, sort};
use std::fmt;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq)]
pub enum Unfit {
    /// An array has the wrong number of elements: its name, found, expected.
    Length(&'static str, usize, usize),
    /// The number of experts chosen for a token is out of range: chosen, available.
    Chosen(usize, usize),
    /// A logit is NaN or infinite: its token, its value.
    Logit(usize, f32),
    /// Indices that are out of range, or places that are not a permutation: the name of the array.
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
            Self::Logit(token, value) => {
                write!(f, "a logit of token {token} is {value}, expected a finite number")
            }
            Self::Numbers(name) => {
                write!(f, "`{name}` does not describe a routing: an index is out of range or appears twice")
            }
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
