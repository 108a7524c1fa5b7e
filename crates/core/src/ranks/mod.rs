//! Several processes that train together: who they are, which part each has, in which order they add, and how they talk.
//!
//! ```text
//! tree.rs    the order in which micro-steps are added, the same for any number of ranks
//! slices.rs  which elements of the flat pools belong to which rank
//! lanes.rs   which ops run beside others, and what they wait for
//! cost.rs    how long collectives take, by a model of the links between ranks
//! ```
//!
//! The decisions are in docs/adr/0023-ranks.md.

mod cost;
mod lanes;
mod slices;
mod tree;

pub use cost::{Beside, Lasting, Links, Traffic};
pub use lanes::{Lane, Turn, turns};
pub use slices::{PIECE_ELEMENTS, Slices};
pub use tree::{Move, Row, SumTree};

use crate::{Error, Result};
use std::time::Duration;

/// Which of how many processes this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The number of this process, from 0.
    pub rank: usize,
    /// How many there are, at least 1.
    pub world: usize,
}

impl Place {
    /// The place of a process that trains alone.
    pub const ALONE: Self = Self { rank: 0, world: 1 };

    /// Whether there is no other process.
    pub fn is_alone(&self) -> bool {
        self.world <= 1
    }

    /// Whether this process prints and writes files.
    pub fn leads(&self) -> bool {
        self.rank == 0
    }
}

/// The ranks among which something is exchanged. Ranks are numbered machine by machine, as many in each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Among {
    /// All ranks of the run.
    #[default]
    All,
    /// The ranks of one machine, which has this many.
    Machine(usize),
    /// The ranks with the same number in each machine, which has this many.
    Peers(usize),
}

impl Among {
    /// Which of how many among them a rank is.
    pub fn place(self, Place { rank, world }: Place) -> Place {
        match self {
            Self::All => Place { rank, world },
            Self::Machine(size) => Place { rank: rank % size.max(1), world: size.max(1) },
            Self::Peers(size) => Place { rank: rank / size.max(1), world: world / size.max(1) },
        }
    }

    /// The rank of one among them and `with`.
    pub fn rank(self, index: usize, with: Place) -> usize {
        match self {
            Self::All => index,
            Self::Machine(size) => with.rank / size.max(1) * size.max(1) + index,
            Self::Peers(size) => index * size.max(1) + with.rank % size.max(1),
        }
    }

    /// Whether the ranks can be divided like that.
    pub fn divides(self, Place { world, .. }: Place) -> bool {
        match self {
            Self::All => true,
            Self::Machine(size) | Self::Peers(size) => size > 0 && world.is_multiple_of(size),
        }
    }
}

impl Default for Place {
    fn default() -> Self {
        Self::ALONE
    }
}

/// What a rank keeps of what training needs besides the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shard {
    /// Everything: each rank makes the whole update.
    None,
    /// Each rank keeps only its slice of the moments and master weights.
    #[default]
    State,
    /// Each rank also keeps only its slice of the gradients that are summed over micro-steps.
    Grads,
}

impl Shard {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::State => "state",
            Self::Grads => "grads",
        }
    }
}

/// The exit code of a run that was stopped, or that a lost rank has ended: it can be resumed.
pub const RESUMABLE: u8 = 3;
/// The exit code of what could not run.
pub const COULD_NOT_RUN: u8 = 2;
/// How many times as long as any other step the first ones may take: kernels are compiled, algorithms are chosen and links are made.
pub const AT_FIRST: u32 = 10;

/// A step that the ranks watch each other make: one that neither gets on nor waits for another is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// The number of the step. Where all ranks hang, the one in the earliest step is to blame.
    pub step: u64,
    /// Whether it may take [`AT_FIRST`] times as long.
    pub first: bool,
}

/// How the processes of a run talk. All of them call the same methods in the same order; a call returns when this process
/// has what it needs, and fails within the run's time limit when another process is lost.
pub trait Communicator: Send + Sync {
    /// Which of how many this is.
    fn place(&self) -> Place;

    /// Sends `send[r]` to rank r and fills `receive[r]` with what rank r sends here, which must have that length. What is
    /// for this rank itself is copied.
    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<()>;

    /// Gives a small message to all; returns those of all ranks, in their order.
    fn share(&self, message: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// The loss of a rank, once it is known: what waits for it otherwise than by these methods must give up.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// Tells the others that this one cannot go on, so that they need not wait for it, and the exit code of the run. Does not wait.
    fn give_up(&self, why: &str, code: u8);

    /// A step begins, or has ended (`None`). While one is made, a rank that neither gets on nor waits for another is lost: its
    /// process may live, but its device or file system does not answer.
    fn in_step(&self, _step: Option<Watched>) {}

    /// How long what all ranks do once, at the start, may take; `None` without a limit.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// The other ranks, with host and address: for messages.
    fn whereabouts(&self) -> Vec<String> {
        Vec::new()
    }

    /// Called when this rank has made progress: an op or a micro-step is done.
    fn gets_on(&self) {}
}

/// The communicator of a process without others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Communicator for Alone {
    fn place(&self) -> Place {
        Place::ALONE
    }

    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<()> {
        match (send, receive) {
            ([send], [receive]) if send.len() == receive.len() => {
                receive.copy_from_slice(send);
                Ok(())
            }
            _ => Err(Error::Program("an exchange of one rank has one message of one length".into())),
        }
    }

    fn share(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![message.to_vec()])
    }

    fn give_up(&self, _why: &str, _code: u8) {}
}
