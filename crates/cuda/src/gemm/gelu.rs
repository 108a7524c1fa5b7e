//! Products of bf16 numbers with GELU or its derivative behind them, by our own kernels on Hopper (`product/linear_gelu.cu` and
//! `product/linear_gelu_bwd.cu`): they compute the epilogue of a tile while the next one is multiplied. The search times them beside the
//! library's algorithms.
//!
//! The backward needs of the numbers before GELU only its slopes at them. Where nothing else reads them, the forward's kernel can leave the
//! slopes in their place ([`Saved::Slopes`]): it has the exponential already, and the backward's is spared a third of what it computes.

use super::column_sums::Step;
use super::{Addresses, Extra, Problem};
use crate::args::{Args, Grid};
use crate::device::{Device, Matrix};
use crate::kernels::Spec;
use crate::{DeviceInfo, Result};
use ironhorse_core::DType;

/// `own` takes our kernels for every shape they can compute, `library` for none; else the search decides.
const CHOICE: &str = "IRONHORSE_GELU_PRODUCTS";
/// Rows and columns of a block's tile, and terms of a stage: constants of product/linear_hopper.cuh.
const TILE: [usize; 2] = [128, 256];
const DEPTH: usize = 64;
/// Rows of tiles of a band.
const BAND: u32 = 16;
/// Rows of a TMA copy of results.
const STORE_ROWS: u32 = 16;
/// Three stages of 48 KB, a tile of results, barriers, and what is lost to start at a multiple of 1024.
const SHARED: usize = 3 * (48 << 10) + (64 << 10) + 512 + 1024;

/// Whether the kernels compute this product on this device.
fn takes(info: &DeviceInfo, problem: &Problem) -> bool {
    let Problem { m, n, k, inputs, inputs_b, output, extra, adds, batch, align, .. } = *problem;
    info.compute == (9, 0)
        && matches!(extra, Extra::Gelu { .. } | Extra::GeluGrad)
        && (inputs, inputs_b, output) == (DType::BF16, None, DType::BF16)
        && (adds, batch, problem.is_strided()) == (false, 1, false)
        && align.into_iter().all(|bytes| bytes >= 16)
        && n.is_multiple_of(TILE[0])
        && m.is_multiple_of(TILE[1])
        && k.is_multiple_of(DEPTH)
        && [m, n, k].into_iter().all(|size| size > 0 && size < 1 << 30)
        && n / TILE[0] * (m / TILE[1]) < 1 << 30
}

/// Which kernels are to compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Ours do not take it, or are not asked for.
    Library,
    /// Ours, without timing them.
    Own,
    /// The faster ones.
    Faster,
}

pub(super) fn wish(info: &DeviceInfo, problem: &Problem) -> Wish {
    if !takes(info, problem) {
        return Wish::Library;
    }
    match std::env::var(CHOICE).as_deref() {
        Ok("own") => Wish::Own,
        Ok("library") => Wish::Library,
        _ => Wish::Faster,
    }
}

/// What a forward with GELU leaves for the backward, rounded to bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// The numbers before GELU.
    Inputs,
    /// The slopes of GELU at these, rounded as the numbers are.
    Slopes,
}

fn spec(extra: Extra, saved: Saved) -> Spec {
    let file = if extra == Extra::GeluGrad { "product/linear_gelu_bwd.cu" } else { "product/linear_gelu.cu" };
    let slopes = u32::from(saved == Saved::Slopes);
    Spec::new(file).define("ACT", "bf16").define("BAND", BAND).define("SLOPES", slopes)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    let both = |extra| [Saved::Inputs, Saved::Slopes].map(|saved| spec(extra, saved));
    [Extra::GeluGrad, Extra::Gelu { bias: true }].map(both).into_iter().flatten().collect()
}

/// How many rows of partial sums of the result's columns the derivative's kernel leaves.
pub(crate) fn partial_rows(problem: &Problem) -> usize {
    problem.n / TILE[0]
}

/// Bytes of these.
pub(crate) fn partial_bytes(problem: &Problem) -> usize {
    if problem.extra == Extra::GeluGrad { partial_rows(problem) * problem.m * size_of::<f32>() } else { 0 }
}

/// The launch of a product that the kernels take, where the matrix on the side has what is `saved`. The derivative's leaves sums of columns
/// at `partials`.
pub(crate) fn gelu_product(
    device: &'static Device,
    problem: &Problem,
    at: &Addresses,
    saved: Saved,
    partials: u64,
) -> Result<Step> {
    let Problem { m, n, k, extra, .. } = *problem;
    let map = |at: u64, [rows, cols]: [usize; 2], box_rows: u32| {
        Matrix { at, rows, cols, bytes: 2 }.tensor_map(device, box_rows)
    };
    let left = map(at.b, [n, k], TILE[0] as u32)?;
    let side = map(at.aux, [n, m], STORE_ROWS)?;
    let args = if extra == Extra::GeluGrad {
        let (result, weight) = (map(at.d, [n, m], STORE_ROWS)?, map(at.a, [k, m], DEPTH as u32)?);
        Args::new().ptr(partials).words(&result).words(&side).words(&left).words(&weight)
    } else {
        let weight = map(at.a, [m, k], TILE[1] as u32)?;
        Args::new().ptr(at.d).ptr(at.aux).words(&side).words(&left).words(&weight).ptr(at.bias)
    };
    let name = match (extra == Extra::GeluGrad, saved) {
        (false, Saved::Inputs) => "linear_gelu_fwd",
        (false, Saved::Slopes) => "linear_gelu_fwd_slopes",
        (true, Saved::Inputs) => "linear_gelu_bwd",
        (true, Saved::Slopes) => "linear_gelu_bwd_slopes",
    };
    let tiles = n / TILE[0] * (m / TILE[1]);
    let blocks = tiles.min(device.info.sms as usize);
    let function = device.function(&spec(extra, saved).kernel(name))?;
    Ok((name, function, Grid::linear(blocks, 384).shared(SHARED), args.u32s([n, m, k])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Sizes;

    const LAYER: Sizes =
        Sizes { rows: 65536, ic: 768, oc: 3072, inputs: DType::BF16, output: DType::BF16, tf32: false };

    fn device(compute: (u32, u32)) -> DeviceInfo {
        DeviceInfo { index: 0, name: "GPU".into(), compute, sms: 132, memory: 0, l2: 0, shared_per_block: 0 }
    }

    #[test]
    fn whole_tiles_in_bf16_on_hopper_are_taken() {
        let at = Addresses { a: 64, b: 64, d: 64, bias: 64, aux: 64, ..Addresses::default() };
        let hopper = device((9, 0));
        let forward =
            |sizes: Sizes, at: &Addresses| Problem::forward(&sizes, at).extra(Extra::Gelu { bias: true });
        let backward = |sizes: Sizes| Problem::input_gradient(&sizes, &at).extra(Extra::GeluGrad);
        assert!(takes(&hopper, &forward(LAYER, &at)));
        // the second layer of the block: its input has 3072 columns
        let second = Sizes { ic: 3072, oc: 768, ..LAYER };
        assert!(takes(&hopper, &backward(second)));
        assert!(!takes(&hopper, &backward(Sizes { ic: 3000, ..second })), "columns of the result");
        assert!(!takes(&hopper, &backward(Sizes { oc: 760, ..second })), "terms");
        assert!(!takes(&hopper, &forward(Sizes { rows: 65500, ..LAYER }, &at)), "rows");
        assert!(!takes(&hopper, &forward(Sizes { rows: 0, ..LAYER }, &at)));
        assert!(!takes(&hopper, &forward(LAYER, &Addresses { aux: 8, ..at })), "alignment");
        assert!(!takes(&hopper, &Problem::forward(&LAYER, &at)), "no GELU");
        assert!(!takes(&hopper, &forward(Sizes { output: DType::F32, ..LAYER }, &at)));
        for other in [(8, 0), (8, 9), (10, 0), (12, 0)] {
            assert!(!takes(&device(other), &forward(LAYER, &at)), "{other:?}");
        }
    }

    #[test]
    fn the_derivative_leaves_a_row_of_sums_for_each_row_of_tiles() {
        let problem = Problem::input_gradient(&Sizes { ic: 3072, oc: 768, ..LAYER }, &Addresses::default());
        let problem = problem.extra(Extra::GeluGrad);
        assert_eq!((partial_rows(&problem), partial_bytes(&problem)), (512, 512 * 3072 * 4));
        assert_eq!(
            partial_bytes(&Problem::forward(&LAYER, &Addresses::default()).extra(Extra::Gelu { bias: true })),
            0
        );
    }
}
