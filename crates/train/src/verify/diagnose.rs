//! Where a number that is none comes from.

use crate::Result;
use crate::session::{Session, io};
use ironhorse_core::{DType, Pool, Program, Scalars, Section, Shape, Slot};

/// Numbers looked at in one go: logits of a large batch are more than the host should hold.
const CHUNK: usize = 1 << 24;

/// The first number that is not finite in a training step on this batch: a weight, or what an op of the forward or
/// backward writes. `None` if there is none. Gradients of the session are overwritten; its weights stay as they are.
pub fn first_non_finite(
    session: &mut Session,
    x: &[i32],
    y: &[i32],
    scalars: &Scalars,
) -> Result<Option<String>> {
    let program = session.train_program()?.clone();
    let mut values = Vec::new();
    if let Some(found) = in_weights(session, &program, &mut values)? {
        return Ok(Some(found));
    }
    // the first micro-step writes gradients, so that what was there before cannot be what is found
    let scalars = Scalars { micro_step: 0, ..*scalars };
    session.engine().write_i32(io(&program, "x")?, x)?;
    session.engine().write_i32(io(&program, "y")?, y)?;
    for i in 0..program.range(Section::Backward).end {
        session.engine().run(&program, i..i + 1, &scalars)?;
        let node = &program.nodes()[i];
        for arg in node.op.args().iter().filter(|arg| arg.access.writes() && arg.slot.dtype != DType::I32) {
            if let Some((index, value)) = find(session, arg.slot, &mut values)? {
                let (op, origin, section) = (node.op.name(), program.origin(node), node.section);
                let argument = arg.name;
                return Ok(Some(format!(
                    "{op} at {origin} ({section}, op {i}) wrote {value} to `{argument}` at {index:?}"
                )));
            }
        }
    }
    Ok(None)
}

fn in_weights(session: &mut Session, program: &Program, values: &mut Vec<f32>) -> Result<Option<String>> {
    let mut pools = vec![Pool::Params];
    // what only completes the weights is a whole number
    if session.weights_pool() != Pool::Params && !program.precision().has_residual() {
        pools.push(session.weights_pool());
    }
    for param in program.params() {
        for &pool in &pools {
            if let Some((index, value)) = find(session, param.in_pool(pool), values)? {
                let (name, pool) = (&param.name, pool.name());
                return Ok(Some(format!("{name} at {index:?} of the {pool} is {value} before the step")));
            }
        }
    }
    Ok(None)
}

/// The first number of a tensor that is not finite, with its index.
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
