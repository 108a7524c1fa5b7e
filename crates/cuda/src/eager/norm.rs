//! RMS and layer normalisation of rows.

use super::gpu::{At, Kernel};
use super::rows::{Team, address, aligned, congruent, empty};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use ironhorse_core::eager::{Array, Float, Rows};

const FILE: &str = "norm/eager_fwd.cu";

/// One call of norm/eager_fwd.cu.
struct Norm {
    layer: bool,
    x: Array,
    /// Added to x, and where the sum goes.
    residual: Option<[Array; 2]>,
    weight: Array,
    bias: Array,
    y: Array,
    mean: Array,
    rstd: Array,
    rows: Rows,
    eps: f64,
}

impl Norm {
    fn launch(&self, at: &At<'_>) -> Result<()> {
        let (Rows { rows, cols }, float) = (self.rows, self.x.float);
        if empty(self.rows) {
            // The mean of nothing. SAFETY: rows elements, by the contract.
            return unsafe { at.fill_nan([self.mean, self.rstd], rows) };
        }
        let none = Array::none(float);
        let [other, sums] = self.residual.unwrap_or([none; 2]);
        let lines = [self.x, self.y, other, sums];
        let vector = congruent(&lines);
        let packed = aligned(&[self.x, self.y, other, sums, self.weight, self.bias], cols, float);
        let (name, held) = match (self.residual, packed) {
            (None, true) => {
                let threads = |vecs| if vecs == 8 { 640 } else { 512 };
                let team = Team::held(cols, float, false, 8, threads);
                let whole = team.is_some_and(|team| {
                    team.vecs == 4
                        && team.lanes > 32
                        && team.lanes.is_power_of_two()
                        && team.is_full(cols, float)
                });
                (if whole { "norm_whole_held" } else { "norm_held" }, team)
            }
            (None, false) => {
                ("norm_edges_held", Team::held(cols, float, true, 8, |_| 512).filter(|_| vector))
            }
            (Some(_), true) => ("norm_add_held", Team::held(cols, float, false, 4, |_| 512)),
            (Some(_), false) => ("", None),
        };
        let (kernel, team) = match held {
            Some(team) => (Kernel::of(FILE, name, float).number("VECS", team.vecs), team),
            None => (Kernel::of(FILE, "norm_any", float), Team::streamed(cols, 32, 512)),
        };
        let args = Args::new().ptr(address(self.y)).ptr(address(self.mean)).ptr(address(self.rstd));
        let args = args.ptr(address(self.x)).ptr(address(other)).ptr(address(sums));
        let args = args.ptr(address(self.weight)).ptr(address(self.bias)).f64(self.eps);
        let args = args.u64(rows as u64).u64(cols as u64).u32(team.lanes).u32(vector.into());
        at.launch(&kernel.number("LAYER", self.layer.into()), team.grid(rows), args)
    }
}

/// y = x rstd weight, rstd = 1 / √(mean(x²) + eps), in each row; `y` may be `x`. A null `weight` is 1; a null `rstd` is not
/// written. Without columns `rstd` is NaN.
///
/// # Safety
/// See [the module](super); x and y: rows·cols, weight: cols, rstd: rows elements.
pub unsafe fn rmsnorm(
    at: &At<'_>,
    [x, weight]: [Array; 2],
    [y, rstd]: [Array; 2],
    rows: Rows,
    eps: f64,
) -> Result<()> {
    let none = Array::none(x.float);
    Norm { layer: false, x, residual: None, weight, bias: none, y, mean: none, rstd, rows, eps }.launch(at)
}

/// sum = x + residual, rounded; y = rmsnorm(sum). `sum` may be `x` or `residual`; so may `y`, if `sum` is another array.
///
/// # Safety
/// See [the module](super); weight: cols, all others: rows·cols elements.
pub unsafe fn rmsnorm_residual(
    at: &At<'_>,
    [x, residual, weight]: [Array; 3],
    [y, sum]: [Array; 2],
    rows: Rows,
    eps: f64,
) -> Result<()> {
    let none = Array::none(x.float);
    let residual = Some([residual, sum]);
    Norm { layer: false, x, residual, weight, bias: none, y, mean: none, rstd: none, rows, eps }.launch(at)
}

/// y = (x - mean) rstd weight + bias, rstd = 1 / √(var + eps), in each row; var is divided by cols. `y` may be `x`. A null
/// `weight` is 1, a null `bias` 0; null `mean` and `rstd` are not written. Without columns they are NaN.
///
/// # Safety
/// See [the module](super); x and y: rows·cols, weight and bias: cols, mean and rstd: rows elements.
pub unsafe fn layernorm(
    at: &At<'_>,
    [x, weight, bias]: [Array; 3],
    [y, mean, rstd]: [Array; 3],
    rows: Rows,
    eps: f64,
) -> Result<()> {
    Norm { layer: true, x, residual: None, weight, bias, y, mean, rstd, rows, eps }.launch(at)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    let each = |float: Float| {
        let held = [1, 2, 4, 8].map(|vecs| Kernel::of(FILE, "", float).number("VECS", vecs));
        held.into_iter().chain([Kernel::of(FILE, "", float)])
    };
    let kernels = Float::ALL.into_iter().flat_map(each);
    kernels.flat_map(|kernel| [0, 1].map(|layer| kernel.clone().number("LAYER", layer).spec())).collect()
}
