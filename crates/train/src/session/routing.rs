//! How tokens spread over the experts of a layer.

use super::{Session, io, not_trained};
use crate::Result;
use ironhorse_core::EngineExt;
use serde::{Deserialize, Deserializer, Serialize};

/// How a layer's tokens spread over its experts in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerRouting {
    /// The share of the tokens that each expert got; they sum to K. The mean over the micro-steps, with `--sum chain` the last.
    pub load: Vec<f32>,
    /// Mean entropy of the router's choice in nats: ln E where it is undecided, 0 where it is sure.
    #[serde(deserialize_with = "null_is_nan")]
    pub entropy: f32,
    /// The auxiliary loss: alpha·K where the load is even, more where it is not.
    #[serde(deserialize_with = "null_is_nan")]
    pub aux: f32,
}

impl LayerRouting {
    /// The load of the busiest expert in multiples of an even share; NaN without a load.
    pub fn busiest(&self) -> f32 {
        let most = self.load.iter().copied().fold(f32::NAN, f32::max);
        most * self.load.len() as f32 / self.load.iter().sum::<f32>()
    }
}

impl Session {
    /// How the tokens of the last step spread over the experts, layer by layer; waits for the step. Empty without experts.
    pub fn routing(&mut self) -> Result<Vec<LayerRouting>> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        let (mut layers, added) = (Vec::new(), self.ranks.added() as f32);
        while let Some(slot) = program.io(&format!("layers.{}.load", layers.len())) {
            let mut load = vec![0.0; slot.numel()];
            self.engine.read_f32(slot, &mut load)?;
            load.iter_mut().for_each(|share: &mut f32| *share /= added);
            let l = layers.len();
            let entropy = self.engine.read_scalar(io(program, &format!("layers.{l}.entropy"))?)?;
            let aux = self.engine.read_scalar(io(program, &format!("layers.{l}.aux"))?)?;
            layers.push(LayerRouting { load, entropy, aux });
        }
        Ok(layers)
    }
}

/// JSON has no NaN and no infinity: they are written as `null`, and read back as NaN.
pub(crate) fn null_is_nan<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<f32, D::Error> {
    Ok(Option::<f32>::deserialize(input)?.unwrap_or(f32::NAN))
}
