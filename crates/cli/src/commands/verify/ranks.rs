//! `verify --ranks`: several processes share the step of a key.

use super::{Found, Verified, VerifyArgs, check_optimizer, cpu, open, options, show};
use crate::hardware::check_memory;
use crate::{Outcome, failure, ranks};
use anyhow::{Result, bail};
use ironhorse::core::{Communicator, EngineExt, Optimizer, Place, Shard};
use ironhorse::train::verify::{Reference, Together, session_spec_of_rank, shared, verify_together};
use ironhorse_ranks::Environment;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank of which nothing is heard for so long is lost.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Starts the ranks and waits for them, or is one of them; `None` where one process verifies.
pub fn run(args: &VerifyArgs, line: &[OsString]) -> Result<Option<Outcome>> {
    let environment = Environment::read()?.filter(|_| args.key.is_some());
    match (environment, args.ranks) {
        (Some(environment), _) => join(args, &environment).map(Some),
        (None, Some(world)) if world > 1 => {
            let reference = open(args)?;
            check_optimizer(args, reference.as_ref())?;
            shared(reference.as_ref(), Place { rank: 0, world }, shard(args, reference.as_ref()))?;
            ranks::launch(line, world, TIMEOUT, |_| {}).map(Some)
        }
        (None, Some(_)) => bail!("--ranks 1 is one process; leave it out"),
        (None, None) if args.shard.is_some() => bail!("--shard goes with --ranks N, or with a launcher"),
        (None, None) => Ok(None),
    }
}

fn shard(args: &VerifyArgs, reference: &dyn Reference) -> Shard {
    let by_optimizer = match reference.optimizer().optimizer {
        Optimizer::Muon => Shard::None,
        Optimizer::AdamW => Shard::State,
    };
    args.shard.map_or(by_optimizer, Shard::from)
}

fn join(args: &VerifyArgs, environment: &Environment) -> Result<Outcome> {
    let ranks = ranks::meet(environment, TIMEOUT, &Arc::default(), &|| false)?;
    let done = compute(args, environment, ranks.clone());
    match &done {
        Ok(Some(done)) => show(args, done),
        Ok(None) => Ok(Outcome::Done),
        Err(error) => {
            failure::give_up(ranks.as_ref(), error);
            done.map(|_| Outcome::Refused)
        }
    }
}

fn compute(
    args: &VerifyArgs,
    environment: &Environment,
    with: Arc<dyn Communicator>,
) -> Result<Option<Verified>> {
    let begin = Instant::now();
    let mut how = args.engine.clone();
    how.share = ranks::share(environment, &how, args.ranks.is_some())?;
    let (engine, dtype) = (how.engine()?, how.exact_dtype()?);
    let name = format!("{} of {} ranks", engine.name(), with.place().world);
    let mut reference = open(args)?;
    check_optimizer(args, reference.as_ref())?;
    let options = options(args, dtype, reference.batch() as u32)?;
    let together = Together { with, shard: shard(args, reference.as_ref()) };
    let spec = session_spec_of_rank(reference.as_ref(), &options, &together)?;
    check_memory(engine.as_ref(), &reference.config(), &spec)?;
    let report = verify_together(engine, reference.as_mut(), &options, &together, &mut || cpu(args))?;
    let seconds = begin.elapsed().as_secs_f64();
    Ok(report.map(|report| Verified { seconds, ..Verified::new(Found::Answers(report), (name, dtype)) }))
}
