//! `profile --ranks`: several processes make the steps together, and what they exchange is seen.

use super::{ProfileArgs, report};
use crate::{Outcome, failure, ranks};
use anyhow::{Result, bail};
use ironhorse::core::{Communicator, Optimizer, Place, Shard};
use ironhorse::train::bench::Recording;
use ironhorse::train::model::Sums;
use ironhorse_ranks::Environment;
use serde::Serialize;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

/// A rank of which nothing is heard for so long is lost.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the ranks of a step exchange.
#[derive(Serialize)]
pub struct Exchanged {
    pub ranks: usize,
    /// While something is sent or received.
    pub ms: f64,
    /// The part of it in which this rank computes.
    pub hidden_ms: f64,
}

impl Exchanged {
    pub fn new(place: Place, recording: &Recording, program: &ironhorse::core::Program) -> Option<Self> {
        let (all, hidden) = recording.exchanged_and_hidden(program);
        let [ms, hidden_ms] = [all, hidden].map(|ns| ns as f64 / 1e6);
        (!place.is_alone()).then_some(Self { ranks: place.world, ms, hidden_ms })
    }

    pub fn text(&self) -> String {
        let Self { ranks, ms, hidden_ms } = self;
        let waits = ms - hidden_ms;
        format!(
            "{ranks} ranks exchange for {ms:.2} ms of the recorded step: {hidden_ms:.2} ms beside computing, {waits:.2} ms not hidden"
        )
    }
}

/// Starts the ranks and waits for them, or is one of them; `None` where one process is profiled.
pub fn run(args: &ProfileArgs, line: &[OsString]) -> Result<Option<Outcome>> {
    match (Environment::read()?, args.ranks) {
        (Some(environment), _) => join(args, &environment).map(Some),
        (None, Some(world)) if world > 1 => {
            sums(args, Place { rank: 0, world }).check()?;
            if args.work.seconds > 0.0 {
                bail!("--seconds ends ranks at different steps; use --steps with --ranks");
            }
            ranks::launch(line, world, TIMEOUT, |_| {}).map(Some)
        }
        (None, Some(_)) => bail!("--ranks 1 is one process; leave it out"),
        (None, None) if args.shard.is_some() => bail!("--shard goes with --ranks N, or with a launcher"),
        (None, None) => Ok(None),
    }
}

/// One micro-step a rank.
fn sums(args: &ProfileArgs, place: Place) -> Sums {
    let by_optimizer = match Optimizer::from(args.work.state.optimizer) {
        Optimizer::Muon => Shard::None,
        Optimizer::AdamW => Shard::State,
    };
    let shard = args.shard.map_or(by_optimizer, Shard::from);
    Sums { place, shard, accumulate: place.world as u32, ..Sums::default() }
}

fn join(args: &ProfileArgs, environment: &Environment) -> Result<Outcome> {
    let with = ranks::meet(environment, TIMEOUT, &Arc::default(), &|| false)?;
    let done = profile(args, environment, with.clone());
    if let Err(error) = &done {
        failure::give_up(with.as_ref(), error);
    }
    done
}

fn profile(args: &ProfileArgs, environment: &Environment, with: Arc<dyn Communicator>) -> Result<Outcome> {
    let mut how = args.work.engine.clone();
    how.share = ranks::share(environment, &how, args.ranks.is_some())?;
    let sums = sums(args, with.place());
    let (mut session, inputs) = args.work.prepare_on(how.engine()?, 1, Some(sums))?;
    session.join(with)?;
    report(args, session, &inputs)
}
