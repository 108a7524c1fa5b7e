//! Finite differences in f64 on the oracle: `d = (L(x + h) - L(x - h)) / 2h`.
//!
//! With h = 1e-5 the truncation error is about h² = 1e-10 and the rounding error of L about 1e-16/h = 1e-11: a correct
//! gradient agrees to better than 1e-7, a wrong one does not.

use crate::{OracleEngine, Rng};
use ironhorse_core::op::Op;
use ironhorse_core::{Engine, EngineExt, Error, Pool, Program, Result, Scalars, Section, Slot};
use std::fmt;

const H: f64 = 1e-5;

/// Why a gradient check failed.
#[derive(Clone, Debug, PartialEq)]
pub enum GradMismatch {
    /// The program could not be run.
    Refused(Error),
    /// The error of a gradient is above the tolerance; `index` is the element with the largest error.
    Value {
        /// The tensor whose gradient it is.
        name: String,
        /// Which element.
        index: usize,
        /// The difference quotient.
        want: f64,
        /// The program's gradient.
        got: f64,
        /// ‖got−want‖/‖want‖ over the checked elements.
        error: f64,
    },
    /// The second micro-step did not add to the gradient of the first.
    NotAdded {
        /// The parameter.
        name: String,
        /// Which element.
        index: usize,
        /// The sum of the gradients of both micro-steps.
        want: f64,
        /// The gradient after two micro-steps.
        got: f64,
    },
}

impl From<Error> for GradMismatch {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl fmt::Display for GradMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "{error}"),
            Self::Value { name, index, want, got, error } => write!(
                f,
                "gradient of {name} has an error of {error:.2e}; worst at [{index}]: difference quotient {want:e}, got {got:e}"
            ),
            Self::NotAdded { name, index, want, got } => {
                write!(
                    f,
                    "gradient of {name}[{index}] after a second micro-step: expected {want:e}, got {got:e}"
                )
            }
        }
    }
}

impl std::error::Error for GradMismatch {}

/// A forward and its backward, to be checked over every element.
#[derive(Clone, Debug)]
pub struct OpGradients<'a> {
    /// The forward in its forward section, the backward in its backward section. No slot the forward reads or writes
    /// may be written by the backward.
    pub program: &'a Program,
    /// The scalars to run with.
    pub scalars: Scalars,
    /// The contents of the slots before anything runs.
    pub inputs: &'a [(Slot, Vec<f64>)],
    /// The functional is `L = Σ weight·slot` over these slots, after the forward.
    pub functional: &'a [(Slot, Vec<f64>)],
    /// Pairs of slots: the variable of the differentiation of `L`, and the gradient that the backward writes.
    pub gradients: &'a [(Slot, Slot)],
    /// The largest ‖got−want‖/‖want‖ allowed.
    pub tolerance: f64,
}

/// Compares the backward with central differences of the forward, over every element. Returns the worst error.
pub fn check_op_gradients(check: &OpGradients) -> Result<f64, GradMismatch> {
    let mut oracle = OracleEngine::new();
    oracle.reserve(check.program.layout())?;
    for (slot, values) in check.inputs {
        oracle.write_f64(*slot, values)?;
    }
    oracle.run_section(check.program, Section::Forward, &check.scalars)?;
    oracle.run_section(check.program, Section::Backward, &check.scalars)?;
    let mut functional = |oracle: &mut OracleEngine| -> Result<f64> {
        oracle.run_section(check.program, Section::Forward, &check.scalars)?;
        let mut sum = 0.0;
        for (slot, weights) in check.functional {
            sum += oracle.read_f64(*slot)?.iter().zip(weights).map(|(y, w)| y * w).sum::<f64>();
        }
        Ok(sum)
    };
    let mut worst: f64 = 0.0;
    for (i, &(x, d_x)) in check.gradients.iter().enumerate() {
        let got = oracle.read_f64(d_x)?;
        let all: Vec<usize> = (0..x.numel()).collect();
        let want = differences(&mut oracle, x, &all, &mut functional)?;
        worst = worst.max(compare(&format!("pair {i}, {x:?}"), &all, &got, &want, check.tolerance)?);
    }
    Ok(worst)
}

/// A whole training program, to be checked on sampled elements of every parameter.
#[derive(Clone, Debug)]
pub struct ProgramGradients<'a> {
    /// Forward and backward sections over the io slots "x", "y" (tokens, targets) and "loss".
    pub program: &'a Program,
    /// Tokens, as many as "x" holds.
    pub tokens: &'a [i32],
    /// Targets, as many as "y" holds.
    pub targets: &'a [i32],
    /// Positions, as many as "positions" holds; empty where the program has no such io.
    pub positions: &'a [i32],
    /// Other inputs by their names.
    pub more: &'a [(&'a str, Vec<f64>)],
    /// Seed of the random parameters and of the choice of elements.
    pub seed: u64,
    /// Elements to check of each parameter: the one with the largest gradient, the others at random.
    pub samples: usize,
    /// The largest ‖got−want‖/‖want‖ allowed per parameter, over the checked elements.
    pub tolerance: f64,
}

/// Compares the gradients of a program with central differences of its loss, and checks that a second micro-step adds
/// to them. Returns the worst error.
///
/// Activations, gradients and the loss start as NaN, so a program that reads them before writing them fails.
pub fn check_program_gradients(check: &ProgramGradients) -> Result<f64, GradMismatch> {
    let program = check.program;
    let mut rng = Rng::new(check.seed);
    let mut oracle = load(check, &mut rng)?;
    let scalars = Scalars { loss_scale: 1.0 / check.tokens.len() as f32, ..Scalars::default() };
    oracle.run_section(program, Section::Forward, &scalars)?;
    oracle.run_section(program, Section::Backward, &scalars)?;
    let grads = gradients(program, &oracle)?;

    let second = Scalars { micro_step: 1, ..scalars };
    oracle.run_section(program, Section::Forward, &second)?;
    oracle.run_section(program, Section::Backward, &second)?;
    let both = gradients(program, &oracle)?;
    let alone = if drops(program) { of_second(program, &mut oracle, &second)? } else { grads.clone() };
    for (((param, once), other), both) in program.params().iter().zip(&grads).zip(&alone).zip(&both) {
        for (index, ((&got, once), other)) in both.iter().zip(once).zip(other).enumerate() {
            // The second micro-step adds the same terms in another order: equal up to rounding error.
            let want = once + other;
            let close = (got - want).abs() <= 1e-9 * once.abs().max(other.abs()).max(1e-3);
            if !close {
                let name = param.name.clone();
                return Err(GradMismatch::NotAdded { name, index, want, got });
            }
        }
    }

    let loss = io(program, "loss")?;
    let mut functional = |oracle: &mut OracleEngine| -> Result<f64> {
        oracle.run_section(program, Section::Forward, &scalars)?;
        Ok(oracle.read_f64(loss)?[0])
    };
    let mut worst: f64 = 0.0;
    for (param, got) in program.params().iter().zip(&grads) {
        let picked = sample(got, check.samples, &mut rng);
        let want = differences(&mut oracle, param.weight, &picked, &mut functional)?;
        let got: Vec<f64> = picked.iter().map(|&i| got[i]).collect();
        worst = worst.max(compare(&param.name, &picked, &got, &want, check.tolerance)?);
    }
    Ok(worst)
}

/// The gradients of all parameters.
fn gradients(program: &Program, oracle: &OracleEngine) -> Result<Vec<Vec<f64>>> {
    program.params().iter().map(|param| oracle.read_f64(param.grad())).collect()
}

/// Whether micro-steps have masks of their own, and so different gradients.
fn drops(program: &Program) -> bool {
    program.nodes().iter().any(|node| matches!(node.op, Op::Dropout(_)))
}

/// The gradients of the second micro-step alone: added to 0.
fn of_second(program: &Program, oracle: &mut OracleEngine, second: &Scalars) -> Result<Vec<Vec<f64>>> {
    for param in program.params() {
        oracle.write_f64(param.grad(), &vec![0.0; param.weight.numel()])?;
    }
    oracle.run_section(program, Section::Forward, second)?;
    oracle.run_section(program, Section::Backward, second)?;
    gradients(program, oracle)
}

/// An oracle with random parameters and the inputs; everything else is NaN.
fn load(check: &ProgramGradients, rng: &mut Rng) -> Result<OracleEngine> {
    let program = check.program;
    let mut oracle = OracleEngine::new();
    oracle.reserve(program.layout())?;
    let words = program.layout().bytes(Pool::Activations) / 2;
    let activations = Slot {
        pool: Pool::Activations,
        offset: 0,
        shape: [words].into(),
        dtype: ironhorse_core::DType::BF16, // 2 bytes: covers every cell of the oracle
    };
    oracle.write_f64(activations, &vec![f64::NAN; words])?;
    let trained = program.params().iter().map(|param| param.weight);
    for weight in trained.chain(program.frozen().iter().map(|(_, weight)| *weight)) {
        // Matrices preserve the magnitude of their input; vectors (norm weights, biases) are near 1 but differ.
        let spread = (3.0 / weight.shape.cols().max(1) as f32).sqrt();
        let (lo, hi) = if weight.shape.dims().len() > 1 { (-spread, spread) } else { (0.5, 1.5) };
        oracle.write_f32(weight, &rng.uniforms(weight.numel(), lo, hi))?;
    }
    for param in program.params() {
        oracle.write_f64(param.grad(), &vec![f64::NAN; param.weight.numel()])?;
    }
    oracle.write_i32(io(program, "x")?, check.tokens)?;
    oracle.write_i32(io(program, "y")?, check.targets)?;
    if !check.positions.is_empty() {
        oracle.write_i32(io(program, "positions")?, check.positions)?;
    }
    for (name, values) in check.more {
        oracle.write_f64(io(program, name)?, values)?;
    }
    oracle.write_f64(io(program, "loss")?, &[f64::NAN])?;
    Ok(oracle)
}

fn io(program: &Program, name: &str) -> Result<Slot> {
    program.io(name).ok_or_else(|| Error::Program(format!("no input or result named {name}")))
}

/// The element with the largest gradient, and others at random.
fn sample(grads: &[f64], count: usize, rng: &mut Rng) -> Vec<usize> {
    if grads.len() <= count {
        return (0..grads.len()).collect();
    }
    let largest = (0..grads.len()).max_by(|&a, &b| grads[a].abs().total_cmp(&grads[b].abs()));
    largest.into_iter().chain((1..count).map(|_| rng.below(grads.len()))).collect()
}

/// Central differences of a functional with respect to these elements of a slot, whose contents are restored.
fn differences(
    oracle: &mut OracleEngine,
    slot: Slot,
    elements: &[usize],
    functional: &mut dyn FnMut(&mut OracleEngine) -> Result<f64>,
) -> Result<Vec<f64>> {
    let original = oracle.read_f64(slot)?;
    let mut at = |index: usize, value: f64| {
        let mut moved = original.clone();
        moved[index] = value;
        oracle.write_f64(slot, &moved)?;
        functional(oracle)
    };
    let quotients =
        elements.iter().map(|&i| Ok((at(i, original[i] + H)? - at(i, original[i] - H)?) / (2.0 * H)));
    let quotients = quotients.collect::<Result<_>>()?;
    oracle.write_f64(slot, &original)?;
    Ok(quotients)
}

/// ‖got−want‖/‖want‖, or an error that names the worst element. If `want` is all 0, the error is absolute.
fn compare(
    name: &str,
    elements: &[usize],
    got: &[f64],
    want: &[f64],
    tolerance: f64,
) -> Result<f64, GradMismatch> {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let size = norm(&mut want.iter().copied());
    let error = norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / if size > 1e-9 { size } else { 1.0 };
    if error <= tolerance {
        return Ok(error);
    }
    let off = |&i: &usize| (got[i] - want[i]).abs();
    let worst = (0..want.len()).max_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0);
    let (index, want, got) = (elements[worst], want[worst], got[worst]);
    Err(GradMismatch::Value { name: name.into(), index, want, got, error })
}

#[cfg(test)]
#[path = "finite_tests.rs"]
mod tests;
