//! f32 products on tensor cores, each as three tf32 products, by our own kernels (`product/gemm_tf32_wgmma.cu` on Hopper, else
//! `product/gemm_tf32.cu`).
//!
//! The library computes them on CUDA cores, at two thirds of the speed or less.

use super::column_sums::Step;
use super::{Addresses, Extra, Problem};
use crate::Result;
use crate::args::{Args, Grid};
use crate::device::Device;
use crate::kernels::Spec;
use ironhorse_core::DType;

/// `library` leaves products in f32 to cuBLASLt, `mma` keeps to what all GPUs have.
const CHOICE: &str = "IRONHORSE_F32_PRODUCTS";
/// Rows and columns of a block's tile, and the part of K in a stage: constants of the files.
const TILE: usize = 128;
const DEPTH: usize = 32;
/// Bytes of a stage of one operand.
const BYTES: usize = TILE * DEPTH * size_of::<f32>();
/// The fewest FLOPs for which these kernels are used.
const LEAST_FLOPS: f64 = 1e8;
/// The number of blocks that split-K aims at: a constant, so that the order of summation does not depend on the device.
const BLOCKS: usize = 1584;
/// The shortest slice of K.
const LEAST_SPAN: usize = 512;

/// Whether the kernel takes a product.
fn takes(problem: &Problem) -> bool {
    let Problem { m, n, k, inputs, output, tf32, extra, align, .. } = *problem;
    let [a, b, d, _] = align;
    (inputs, output, tf32) == (DType::F32, DType::F32, false)
        && !problem.is_strided()
        && matches!(extra, Extra::None | Extra::Bias)
        && [m, n, k].into_iter().all(|size| size.is_multiple_of(4) && size < 1 << 30)
        && [a, b, d].into_iter().all(|bytes| bytes >= 16)
        && m.div_ceil(TILE) * n.div_ceil(TILE) < 1 << 20
        && problem.flops() >= LEAST_FLOPS
}

/// The length of a slice of K, and how many slices there are. Only products of few tiles and a long K are cut.
fn slices(problem: &Problem) -> (usize, usize) {
    let tiles = problem.m.div_ceil(TILE) * problem.n.div_ceil(TILE);
    let most = if problem.extra == Extra::None { problem.k / LEAST_SPAN } else { 1 };
    let wanted = if tiles < BLOCKS / 2 { BLOCKS / tiles } else { 1 };
    let span = problem.k.div_ceil(wanted.clamp(1, most.max(1))).next_multiple_of(DEPTH);
    (span, problem.k.div_ceil(span))
}

/// Which of the kernels; both sum in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Mma,
    Wgmma,
}

impl Path {
    const ALL: [Self; 2] = [Self::Mma, Self::Wgmma];

    fn choose(compute: (u32, u32)) -> Self {
        let may = compute == (9, 0) && !std::env::var(CHOICE).is_ok_and(|choice| choice == "mma");
        if may { Self::Wgmma } else { Self::Mma }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Mma => "gemm_tf32",
            Self::Wgmma => "gemm_tf32_wgmma",
        }
    }

    fn spec(self, [along_a, along_b]: [bool; 2]) -> Spec {
        let file = if self == Self::Mma { "product/gemm_tf32.cu" } else { "product/gemm_tf32_wgmma.cu" };
        Spec::new(file).define("ALONG_A", u32::from(along_a)).define("ALONG_B", u32::from(along_b))
    }

    /// The grid for `tiles` tiles: one to a block, or as many persistent blocks as the device holds.
    fn grid(self, tiles: usize, sms: u32) -> Grid {
        match self {
            Self::Mma => Grid::linear(tiles, 256).shared(3 * 2 * BYTES),
            // 1024: stages start at a multiple of it
            Self::Wgmma => Grid::linear(tiles.min(sms as usize), 384).shared(4 * 3 * BYTES + 1024),
        }
    }
}

/// Every specialisation: the three products of a layer.
pub(super) fn specs() -> Vec<Spec> {
    let along = [[true, true], [false, true], [false, false]];
    Path::ALL.into_iter().flat_map(|path| along.map(|along| path.spec(along))).collect()
}

/// Whether our f32 kernels compute this product.
pub(crate) fn splits(problem: &Problem) -> bool {
    takes(problem) && !std::env::var(CHOICE).is_ok_and(|choice| choice == "library")
}

/// The launches of a product; none if the kernels do not take it, or are not asked for. `scratch` gives device memory.
pub(crate) fn split_product(
    device: &'static Device,
    problem: &Problem,
    at: &Addresses,
    scratch: impl FnOnce(usize) -> Result<u64>,
) -> Result<Vec<Step>> {
    if !splits(problem) {
        return Ok(Vec::new());
    }
    let Problem { m, n, k, adds, .. } = *problem;
    let [[a_k, a_m], [b_k, b_n]] = problem.strides();
    let along = [a_k == 1, b_k == 1];
    let [lda, ldb] = [if along[0] { a_m } else { a_k }, if along[1] { b_n } else { b_k }];
    let (span, slices) = slices(problem);
    let parts = if slices > 1 { scratch(slices * m * n * size_of::<f32>())? } else { 0 };
    let path = Path::choose(device.info.compute);
    let tiles = m.div_ceil(TILE) * n.div_ceil(TILE) * slices;
    let grid = path.grid(tiles, device.info.sms);
    let function = |name| device.function(&path.spec(along).kernel(name));
    let args = Args::new().ptr(at.d).ptr(parts).ptr(at.a).ptr(at.b).ptr(at.bias);
    let args = args.u32s([m, n, k]).u64s([lda, ldb]).u32(span as u32).u32((adds && slices == 1).into());
    let args = if path == Path::Wgmma { args.u32(tiles as u32) } else { args };
    let mut steps = vec![(path.name(), function(path.name())?, grid, args)];
    if slices > 1 {
        let args = Args::new().ptr(at.d).ptr(parts).u64((m * n) as u64).u32(slices as u32).u32(adds.into());
        let grid = Grid::linear((m * n).div_ceil(4 * 256), 256);
        steps.push(("gemm_tf32_sum", function("gemm_tf32_sum")?, grid, args));
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Sizes;

    fn sizes(rows: usize, ic: usize, oc: usize) -> Sizes {
        Sizes { rows, ic, oc, inputs: DType::F32, output: DType::F32, tf32: false }
    }

    #[test]
    fn few_tiles_of_many_terms_are_cut() {
        let at = Addresses { a: 64, b: 64, d: 64, ..Addresses::default() };
        let layer = sizes(32768, 768, 3072);
        assert_eq!(slices(&Problem::forward(&layer, &at)), (768, 1));
        assert_eq!(slices(&Problem::input_gradient(&layer, &at)), (3072, 1));
        let (span, count) = slices(&Problem::weight_gradient(&layer, &at));
        assert_eq!((span % DEPTH, count), (0, 11));
        assert!(span * (count - 1) < 32768 && span * count >= 32768);
        assert_eq!(slices(&Problem::weight_gradient(&sizes(256, 768, 768), &at)).1, 1);
    }

    #[test]
    fn odd_sizes_and_other_types_are_left_to_the_library() {
        let at = Addresses { a: 64, b: 64, d: 64, ..Addresses::default() };
        assert!(takes(&Problem::forward(&sizes(4096, 768, 3072), &at)));
        assert!(!takes(&Problem::forward(&sizes(4096, 768, 3070), &at)));
        assert!(!takes(&Problem::forward(&sizes(4096, 768, 3072), &Addresses { a: 8, ..at })));
        assert!(!takes(&Problem::forward(&Sizes { tf32: true, ..sizes(4096, 768, 3072) }, &at)));
        assert!(!takes(&Problem::forward(&sizes(16, 768, 768), &at)), "too small");
    }
}
