//! Timing training steps, whole and op by op.

use crate::Result;
use crate::session::{Session, io};
use ironhorse_core::{Program, Scalars, Section};
use std::time::{Duration, Instant};

/// What a benchmark measured.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Wall time of each step, warm-up left out.
    pub steps: Vec<Duration>,
    /// Loss of each step, warm-up included: the first is the loss before any update.
    pub losses: Vec<f32>,
}

impl Timing {
    /// The median step.
    pub fn median(&self) -> Duration {
        median(&self.steps)
    }
}

/// Runs `warmup + steps` training steps on one batch.
pub fn time_steps(
    session: &mut Session,
    [x, y]: [&[i32]; 2],
    scalars: &Scalars,
    [warmup, steps]: [usize; 2],
) -> Result<Timing> {
    let mut timing = Timing { steps: Vec::with_capacity(steps), losses: Vec::with_capacity(warmup + steps) };
    for step in 0..warmup + steps {
        let start = Instant::now();
        let scalars = Scalars { step: step as u32 + 1, loss_scale: 1.0 / x.len() as f32, ..*scalars };
        session.micro_step(x, y, &scalars)?;
        let (loss, _) = session.update(&scalars)?;
        session.engine().synchronize()?;
        if step >= warmup {
            timing.steps.push(start.elapsed());
        }
        timing.losses.push(loss);
    }
    Ok(timing)
}

/// One op's share of a step.
#[derive(Clone, Copy, Debug)]
pub struct OpTime {
    /// Its index in the program.
    pub op: usize,
    /// Median time.
    pub time: Duration,
}

/// Runs steps op by op and gives each op's median time.
pub fn time_ops(
    session: &mut Session,
    [x, y]: [&[i32]; 2],
    scalars: &Scalars,
    [warmup, steps]: [usize; 2],
) -> Result<Vec<OpTime>> {
    let program: Program = session.train_program()?.clone();
    let ops = program.range(Section::Update).end;
    let mut times = vec![Vec::with_capacity(steps); ops];
    for step in 0..warmup + steps {
        let scalars = Scalars { step: step as u32 + 1, loss_scale: 1.0 / x.len() as f32, ..*scalars };
        session.engine().write_i32(io(&program, "x")?, x)?;
        session.engine().write_i32(io(&program, "y")?, y)?;
        for (i, times) in times.iter_mut().enumerate() {
            let start = Instant::now();
            session.engine().run(&program, i..i + 1, &scalars)?;
            session.engine().synchronize()?;
            if step >= warmup {
                times.push(start.elapsed());
            }
        }
    }
    Ok(times.iter().enumerate().map(|(op, times)| OpTime { op, time: median(times) }).collect())
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
