//! The adapters of a layer's products.

use super::Plan;
use crate::Result;
use crate::model::Target;
use crate::model::blocks::{Adapter, Blocks};
use ironhorse_core::op::LoraParts;
use ironhorse_core::{Error, Shape, Slot};

/// The adapters of the product that has this target in a layer, if it has any: of a weight (OC,C), or of experts' (E,OC,C).
pub(super) fn adapter(
    net: &Blocks,
    plan: &Plan,
    (l, target): (usize, Target),
    weight: Slot,
) -> Result<Option<Adapter>> {
    let Some((lora, config)) = &plan.lora else { return Ok(None) };
    let Some(found) = lora.of_product(config, l, target) else { return Ok(None) };
    let too_many = || Error::Program(format!("{} adapters of one product", found.columns.len()));
    let parts = LoraParts::new(&found.columns).ok_or_else(too_many)?;
    let shape = |rows: usize, cols: usize| match *weight.shape.dims() {
        [experts, _, _] => Shape::new([experts, rows, cols]),
        _ => Shape::new([rows, cols]),
    };
    let [a, b] = &found.names;
    Ok(Some(Adapter {
        a: net.weight(a, shape(parts.count() * lora.rank, weight.shape.cols()))?,
        b: net.weight(b, shape(parts.rows(), lora.rank))?,
        parts,
        scale: lora.scale() as f32,
    }))
}
