//! LayerNorm and RMSNorm, alone and together with the residual add before them.

use super::Blocks;
use crate::Result;
use crate::model::Recompute;
use ironhorse_core::Slot;
use ironhorse_core::op::{
    Accum, Gain, LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd, ResidualRmsNormFwd,
    RmsNormApply, RmsNormBwd, RmsNormFwd,
};

/// The weights of a norm: LayerNorm where there is a bias, otherwise RMSNorm.
#[derive(Clone, Copy)]
pub(in crate::model) struct NormWeights {
    pub weight: Slot,
    pub bias: Option<Slot>,
    pub eps: f32,
    /// What RMSNorm multiplies by: the weight, or 1 + weight.
    pub gain: Gain,
}

/// A normalised activation with what its backward needs.
#[derive(Clone, Copy)]
pub(in crate::model) struct Norm {
    /// (B,T,C), the residual stream that went in.
    pub inp: Slot,
    pub out: Slot,
    /// (B,T) f32, of LayerNorm only.
    mean: Option<Slot>,
    /// (B,T) f32
    rstd: Slot,
    weights: NormWeights,
}

impl Blocks {
    fn norm_slots(&mut self, inp: Slot, weights: NormWeights) -> Norm {
        let out = self.hidden();
        let mean = weights.bias.map(|_| self.per_token());
        Norm { inp, out, mean, rstd: self.per_token(), weights }
    }

    pub fn norm(&mut self, name: &str, inp: Slot, weights: NormWeights) -> Result<Norm> {
        let norm @ Norm { out, mean, rstd, .. } = self.norm_slots(inp, weights);
        let NormWeights { weight, bias, eps, gain } = weights;
        self.b.at(name);
        match (bias, mean) {
            (Some(bias), Some(mean)) => {
                self.b.push(LayerNormFwd { out, mean, rstd, inp, weight, bias, eps })?;
            }
            _ => self.b.push(RmsNormFwd { out, rstd, inp, weight, eps, gain })?,
        }
        self.b.name(name, out);
        Ok(norm)
    }

    /// The residual add that ends one block and the norm that begins the next, in one op; `names` are of both results.
    pub fn residual_norm(
        &mut self,
        names: [String; 2],
        [a, b]: [Slot; 2],
        weights: NormWeights,
    ) -> Result<Norm> {
        let residual = self.hidden();
        let norm @ Norm { out, mean, rstd, .. } = self.norm_slots(residual, weights);
        let NormWeights { weight, bias, eps, gain } = weights;
        self.b.at(&names[1]);
        match (bias, mean) {
            (Some(bias), Some(mean)) => {
                self.b.push(ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps })?;
            }
            _ => self.b.push(ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps, gain })?,
        }
        let [residual_name, name] = names;
        self.b.name(residual_name, residual);
        self.b.name(name, out);
        Ok(norm)
    }

    pub fn norm_bwd(
        &mut self,
        name: &str,
        norm: &Norm,
        [d_inp, d_out]: [Slot; 2],
        accum_inp: Accum,
    ) -> Result<()> {
        let Norm { inp, mean, rstd, weights: NormWeights { weight, bias, gain, .. }, .. } = *norm;
        let (d_weight, accum) = self.grad_of(weight);
        self.b.at(name);
        match (bias, mean) {
            (Some(bias), Some(mean)) => {
                let (d_bias, _) = self.grad_of(bias);
                self.b.push(LayerNormBwd {
                    d_inp,
                    d_weight,
                    d_bias,
                    d_out,
                    inp,
                    mean,
                    rstd,
                    weight,
                    accum_inp,
                    accum,
                })?;
            }
            _ => {
                let op = RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum, gain };
                self.b.push(op)?;
            }
        }
        Ok(())
    }

    /// The normalised activation: kept, or computed again from its input and statistics.
    pub fn norm_again(&mut self, name: &str, saved: &Norm, recompute: Recompute) -> Result<Slot> {
        if !recompute.norms() {
            return Ok(saved.out);
        }
        let Norm { inp, mean, rstd, weights: NormWeights { weight, bias, gain, .. }, .. } = *saved;
        let out = self.hidden();
        self.b.at(name);
        match (bias, mean) {
            (Some(bias), Some(mean)) => {
                self.b.push(LayerNormApply { out, inp, mean, rstd, weight, bias })?;
            }
            _ => self.b.push(RmsNormApply { out, inp, rstd, weight, gain })?,
        }
        Ok(out)
    }
}
