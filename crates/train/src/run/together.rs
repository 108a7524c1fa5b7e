//! What the ranks of a run tell each other between steps: all of them must take the same turns.

use super::StopReason;
use crate::{Error, Result};
use ironhorse_core::ranks::{COULD_NOT_RUN, RESUMABLE, Watched};
use ironhorse_core::{Communicator, Place};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;

/// The ranks of a run, seen by one of them; also of a run without others.
#[derive(Clone)]
pub(super) struct Together {
    with: Arc<dyn Communicator>,
    place: Place,
}

/// What a rank asks of all ranks before a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, serde::Deserialize)]
pub(super) struct Wish {
    /// Stop: the signal, or the other value that was stored in the flag. 0 asks for nothing.
    pub asked: usize,
    /// Stop, because this many seconds have passed.
    pub time: Option<f64>,
    /// Save, because the rank was asked to.
    pub asked_to_save: bool,
    /// Save, because the leader found that it is time.
    pub save: bool,
    /// Draw a sample; only the leader asks for one.
    pub samples: bool,
    /// This rank has written its part of a checkpoint. In the wish that all agree about: all ranks have.
    pub written: bool,
}

impl Wish {
    pub fn new(stop: Option<StopReason>) -> Self {
        match stop {
            Some(StopReason::Asked(asked)) => Self { asked, ..Self::default() },
            Some(StopReason::Time(time)) => Self { time: Some(time.as_secs_f64()), ..Self::default() },
            None => Self::default(),
        }
    }

    pub fn stop(&self) -> Option<StopReason> {
        match (self.asked, self.time) {
            (0, time) => time.map(|seconds| StopReason::Time(Duration::from_secs_f64(seconds))),
            (asked, _) => Some(StopReason::Asked(asked)),
        }
    }
}

impl Together {
    pub fn new(with: Arc<dyn Communicator>) -> Self {
        let place = with.place();
        Self { with, place }
    }

    pub fn place(&self) -> Place {
        self.place
    }

    pub fn leads(&self) -> bool {
        self.place.leads()
    }

    /// What every rank says, in the order of ranks.
    pub fn share<T: Serialize + DeserializeOwned + Clone>(&self, mine: &T) -> Result<Vec<T>> {
        if self.place.is_alone() {
            return Ok(vec![mine.clone()]);
        }
        let text = serde_json::to_vec(mine).map_err(|error| unreadable(&error))?;
        let all = self.with.share(&text)?;
        all.iter().map(|text| serde_json::from_slice(text).map_err(|error| unreadable(&error))).collect()
    }

    /// What the leader says.
    pub fn of_leader<T: Serialize + DeserializeOwned + Clone>(&self, mine: T) -> Result<T> {
        self.share(&mine)?.into_iter().next().ok_or_else(|| unreadable(&"nobody leads"))
    }

    /// What all ranks do: one that is asked to stop or save asks all of them.
    pub fn agree(&self, mine: Wish) -> Result<Wish> {
        let all = self.share(&mine)?;
        let mut agreed = all.first().copied().unwrap_or(mine);
        let stops = all.iter().find(|wish| wish.stop().is_some()).copied().unwrap_or_default();
        (agreed.asked, agreed.time) = (stops.asked, stops.time);
        agreed.asked_to_save = all.iter().any(|wish| wish.asked_to_save);
        agreed.written = all.iter().all(|wish| wish.written);
        Ok(agreed)
    }

    /// Whether all ranks meet this error at the same place.
    pub fn is_common(&self, error: &Error) -> bool {
        self.place.is_alone() || matches!(error, Error::Diverged { .. })
    }

    /// A step begins, or has ended: while one is made, a rank that does not get on is lost.
    pub fn in_step(&self, step: Option<Watched>) {
        self.with.in_step(step);
    }

    /// Waits for all.
    pub fn meet(&self) -> Result<()> {
        self.share(&()).map(drop)
    }

    /// Tells the others that this one ends, unless that is what they told this one, or all know.
    pub fn give_up(&self, error: &Error) {
        let told = matches!(error, Error::Core(ironhorse_core::Error::RankLost { .. }));
        if !told && !self.is_common(error) {
            let code = if matches!(error, Error::Stopped) { RESUMABLE } else { COULD_NOT_RUN };
            self.with.give_up(&error.to_string(), code);
        }
    }
}

fn unreadable(error: &dyn std::fmt::Display) -> Error {
    ironhorse_core::Error::Program(format!("a message between ranks: {error}")).into()
}
