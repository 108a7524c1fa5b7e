//! How tokens spread over the experts of a layer.

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

/// JSON has no NaN and no infinity: they are written as `null`, and read back as NaN.
pub(crate) fn null_is_nan<'de, D: Deserializer<'de>>(input: D) -> Result<f32, D::Error> {
    Ok(Option::<f32>::deserialize(input)?.unwrap_or(f32::NAN))
}
