//! The adapters of a layer's products.

use super::Plan;
use crate::Result;
use crate::model::Target;
use crate::model::blocks::{Adapter, Blocks, Linear};
use ironhorse_core::Error;
use ironhorse_core::op::LoraParts;

/// The product that has this target in a layer, with its adapters if it has any.
pub(super) fn adapted(
    net: &Blocks,
    plan: &Plan,
    (l, target): (usize, Target),
    layer: Linear,
) -> Result<Linear> {
    let Some((lora, config)) = &plan.lora else { return Ok(layer) };
    let Some(found) = lora.of_product(config, l, target) else { return Ok(layer) };
    let too_many = || Error::Program(format!("{} adapters of one product", found.columns.len()));
    let parts = LoraParts::new(&found.columns).ok_or_else(too_many)?;
    let [a, b] = &found.names;
    let adapter = Adapter {
        a: net.weight(a, [parts.count() * lora.rank, layer.weight.shape.cols()])?,
        b: net.weight(b, [parts.rows(), lora.rank])?,
        parts,
        scale: lora.scale() as f32,
    };
    Ok(Linear { adapter: Some(adapter), ..layer })
}
