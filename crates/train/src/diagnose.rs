//! Finding out where a step went wrong.

use crate::Result;
use crate::session::{Session, io};
use ironhorse_core::op::Access;
use ironhorse_core::{DType, Pool, Scalars, Section, Slot};

/// The first tensor of a step on (x, y) that holds a number that is not finite: a weight, or what the first such op
/// wrote. Runs forward and backward op by op; gradients are overwritten, weights stay.
pub fn first_non_finite(
    session: &mut Session,
    [x, y]: [&[i32]; 2],
    scalars: &Scalars,
) -> Result<Option<String>> {
    let program = session.train_program()?.clone();
    for param in program.params() {
        if let Some(at) = non_finite_in(session, param.in_pool(Pool::Params))? {
            return Ok(Some(format!("the weights: {}[{at}]", param.name)));
        }
    }
    session.engine().write_i32(io(&program, "x")?, x)?;
    session.engine().write_i32(io(&program, "y")?, y)?;
    for i in 0..program.range(Section::Backward).end {
        session.engine().run(&program, i..i + 1, scalars)?;
        let node = &program.nodes()[i];
        for arg in node.op.args().into_iter().filter(|arg| arg.access != Access::Read) {
            if let Some(at) = non_finite_in(session, arg.slot)? {
                let (op, origin, section) = (node.op.name(), program.origin(node), node.section);
                return Ok(Some(format!("`{}`[{at}] of {op} at {origin} ({section})", arg.name)));
            }
        }
    }
    Ok(None)
}

/// The first element of a slot that is not finite.
fn non_finite_in(session: &mut Session, slot: Slot) -> Result<Option<usize>> {
    if slot.dtype == DType::I32 {
        return Ok(None);
    }
    let mut values = vec![0.0; slot.numel()];
    session.engine().read_f32(slot, &mut values)?;
    Ok(values.iter().position(|value| !value.is_finite()))
}
