//! Finds where a NaN or infinity first appears.

use crate::Result;
use crate::session::{Batch, Session, io};
use ironhorse_core::op::Op;
use ironhorse_core::{DType, EngineExt, Param, Pool, Program, Scalars, Section, Shape, Slot};
use serde::Serialize;
use std::fmt;

/// How many numbers to read at a time, because the logits of a large batch are too many for host memory.
const CHUNK: usize = 1 << 24;

/// The first NaN or infinity of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "in", rename_all = "lowercase")]
pub enum NonFinite {
    /// A weight, before the step.
    Weight {
        /// The parameter.
        name: String,
        /// The pool: the weights, or their master.
        pool: &'static str,
        /// Where in the tensor.
        element: Vec<usize>,
        /// "NaN", "inf" or "-inf".
        value: String,
    },
    /// A result of an op.
    Op {
        /// The op's place in the program.
        index: usize,
        /// Its name.
        op: &'static str,
        /// The part of the model it comes from.
        origin: String,
        /// `forward` or `backward`.
        section: &'static str,
        /// The argument it wrote.
        argument: &'static str,
        /// Where in the tensor.
        element: Vec<usize>,
        /// "NaN", "inf" or "-inf".
        value: String,
    },
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weight { name, pool, element, value } => {
                write!(f, "{name} at {element:?} of the {pool} is {value} before the step")
            }
            Self::Op { index, op, origin, section, argument, element, value } => {
                write!(
                    f,
                    "{op} at {origin} ({section}, op {index}) wrote {value} to `{argument}` at {element:?}"
                )
            }
        }
    }
}

/// The result of [`find_non_finite`] as text.
pub fn first_non_finite(
    session: &mut Session,
    batch: Batch<'_>,
    scalars: &Scalars,
) -> Result<Option<String>> {
    Ok(find_non_finite(session, batch, scalars)?.map(|found| found.to_string()))
}

/// The first NaN or infinity in a training step on this batch: a weight, or what an op of the forward or backward
/// writes. `None` if everything is finite. Gradients of the session are overwritten; its weights stay as they are.
pub fn find_non_finite(
    session: &mut Session,
    batch: Batch<'_>,
    scalars: &Scalars,
) -> Result<Option<NonFinite>> {
    if let Some(found) = in_weights(session)? {
        return Ok(Some(found));
    }
    let scalars = alone(session, scalars)?;
    in_ops(session, batch, &scalars)
}

/// The scalars with which a micro-step runs without those before it, whose loss and gradients cannot be the cause then: as
/// the first, which overwrites them, or, where its number decides what is dropped, as itself after they are cleared.
pub(super) fn alone(session: &mut Session, scalars: &Scalars) -> Result<Scalars> {
    let program = session.train_program()?.clone();
    let drops = program.nodes().iter().any(|node| matches!(node.op, Op::Dropout(_)));
    if !drops || scalars.micro_step == 0 {
        return Ok(Scalars { micro_step: 0, ..*scalars });
    }
    let slots = program.params().iter().map(Param::grad).chain([io(&program, "loss")?]);
    for slot in slots {
        session.engine().write_f32(slot, &vec![0.0; slot.numel()])?;
    }
    Ok(*scalars)
}

/// Runs forward and backward of a micro-step op by op, up to the first that writes a NaN or infinity.
pub(super) fn in_ops(
    session: &mut Session,
    batch: Batch<'_>,
    scalars: &Scalars,
) -> Result<Option<NonFinite>> {
    let program = session.train_program()?.clone();
    let mut values = Vec::new();
    batch.write(session.engine(), &program)?;
    for index in 0..program.range(Section::Backward).end {
        session.engine().run(&program, index..index + 1, scalars)?;
        let node = &program.nodes()[index];
        for arg in node.op.args().iter().filter(|arg| arg.access.writes() && arg.slot.dtype != DType::I32) {
            if let Some((element, value)) = find(session, arg.slot, &mut values)? {
                return Ok(Some(NonFinite::Op {
                    index,
                    op: node.op.name(),
                    origin: program.origin(node).to_owned(),
                    section: node.section.name(),
                    argument: arg.name,
                    element,
                    value: value.to_string(),
                }));
            }
        }
    }
    Ok(None)
}

/// The first NaN or infinite weight.
pub(super) fn in_weights(session: &mut Session) -> Result<Option<NonFinite>> {
    let program: Program = session.train_program()?.clone();
    let mut values = Vec::new();
    let mut pools = vec![Pool::Params];
    // residuals are integers and cannot be non-finite
    if session.weights_pool() != Pool::Params && !program.precision().has_residual() {
        pools.push(session.weights_pool());
    }
    for param in program.params() {
        for &pool in &pools {
            if let Some((element, value)) = find(session, param.in_pool(pool), &mut values)? {
                let (name, pool) = (param.name.clone(), pool.name());
                return Ok(Some(NonFinite::Weight { name, pool, element, value: value.to_string() }));
            }
        }
    }
    Ok(None)
}

/// The first NaN or infinity of a tensor, with its index.
fn find(session: &mut Session, slot: Slot, values: &mut Vec<f32>) -> Result<Option<(Vec<usize>, f32)>> {
    for start in (0..slot.numel()).step_by(CHUNK) {
        let len = CHUNK.min(slot.numel() - start);
        let part = Slot { offset: slot.offset + start * slot.dtype.size(), shape: Shape::new([len]), ..slot };
        values.clear();
        values.resize(len, 0.0);
        session.engine().read_f32(part, values)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Ok(Some((super::compare::index_of(slot.shape.dims(), start + at), values[at])));
        }
    }
    Ok(None)
}
