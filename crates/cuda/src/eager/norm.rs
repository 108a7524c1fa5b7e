//! RMS and layer normalisation of rows.

use super::layout::{pointers, whole_vectors};
use super::rows::{Team, congruent, empty};
use super::{Launch, OnStream};
use crate::Result;
use crate::kernels::Spec;
use ironhorse_core::eager::{Array, Float, LayerNorm, ResidualRmsNorm, RmsNorm, Rows};

/// `LAYER` is 1 for a layer norm, 0 for an RMS norm; `VECS` compiles the kernels that hold a row in registers.
fn spec(float: Float, vecs: Option<u32>, layer: bool) -> Spec {
    let spec = Spec::of("norm/eager_fwd.cu", float);
    let spec = vecs.into_iter().fold(spec, |spec, vecs| spec.define("VECS", vecs));
    spec.define("LAYER", u32::from(layer))
}

/// One call of norm/eager_fwd.cu: a layer norm, of which an RMS norm is the one without mean and bias.
struct Norm<'a> {
    op: &'a LayerNorm,
    layer: bool,
    /// What is added to x first, and where the sum goes; null if nothing is added.
    residual: Array,
    sum: Array,
}

impl Norm<'_> {
    fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let LayerNorm { x, weight, bias, y, mean, rstd, rows: Rows { rows, cols }, eps } = *self.op;
        if empty(self.op.rows) {
            return at.fill_nan([mean, rstd], rows);
        }
        let Self { layer, residual, sum, .. } = *self;
        let vector = congruent(&[x, y, residual, sum]);
        let packed = whole_vectors(&[x, y, residual, sum, weight, bias], cols, x.float);
        let (name, held) = match (residual.is_some(), packed) {
            (false, true) => {
                let threads = |vecs| if vecs == 8 { 640 } else { 512 };
                let team = Team::held(cols, x.float, false, 8, threads);
                let whole = team.is_some_and(|team| {
                    let block = team.lanes > 32 && team.lanes.is_power_of_two();
                    team.vecs == 4 && block && team.is_full(cols, x.float)
                });
                (if whole { "norm_whole_held" } else { "norm_held" }, team)
            }
            (false, false) => {
                ("norm_edges_held", Team::held(cols, x.float, true, 8, |_| 512).filter(|_| vector))
            }
            (true, true) => ("norm_add_held", Team::held(cols, x.float, false, 4, |_| 512)),
            (true, false) => ("", None),
        };
        let (name, team) =
            held.map_or_else(|| ("norm_any", Team::streamed(cols, 32, 512)), |team| (name, team));
        let args = pointers([y, mean, rstd, x, residual, sum, weight, bias]).f64(eps);
        let args = args.u64s([rows, cols]).u32(team.lanes).u32(vector.into());
        let kernel = spec(x.float, held.map(|team| team.vecs), layer).kernel(name);
        at.launch(&kernel, team.grid(rows), args)
    }
}

/// A null `weight` is 1.
impl Launch for RmsNorm {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { x, weight, y, rstd, rows, eps } = *self;
        let none = Array::none(x.float);
        let op = &LayerNorm { x, weight, bias: none, y, mean: none, rstd, rows, eps };
        Norm { op, layer: false, residual: none, sum: none }.launch(at)
    }
}

/// The sum is rounded before it is normalised.
impl Launch for ResidualRmsNorm {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { x, residual, weight, y, sum, rows, eps } = *self;
        let none = Array::none(x.float);
        let op = &LayerNorm { x, weight, bias: none, y, mean: none, rstd: none, rows, eps };
        Norm { op, layer: false, residual, sum }.launch(at)
    }
}

/// A null `weight` is 1, a null `bias` 0.
impl Launch for LayerNorm {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let none = Array::none(self.x.float);
        Norm { op: self, layer: true, residual: none, sum: none }.launch(at)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    let vecs = [Some(1), Some(2), Some(4), Some(8), None];
    let each =
        |float| vecs.into_iter().flat_map(move |vecs| [false, true].map(|layer| spec(float, vecs, layer)));
    Float::ALL.into_iter().flat_map(each).collect()
}
