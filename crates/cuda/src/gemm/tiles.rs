//! Tiles of cuBLASLt besides those that it proposes. It proposes eight algorithms of a product on Hopper, has some hundred, and the
//! eight are seldom the best where a size is no multiple of 128: 1,600 columns are 5 tiles of 320 or 8 of 200, but 6.25 of 256.

use super::Problem;
use crate::DeviceInfo;
use crate::cublaslt::Product;
use crate::ffi::cublaslt::{Algo, Found};
use cudarc::cublaslt::sys::{cublasLtClusterShape_t as Cluster, cublasLtMatmulTile_t as Tile};
use ironhorse_core::DType;

/// How many tiles of a product are tried, each in all clusters.
const TRIED: usize = 6;
/// Tiles are asked for until so many were refused.
const REFUSED: usize = 24;
const CLUSTERS: [Cluster; 3] = [
    Cluster::CUBLASLT_CLUSTER_SHAPE_1x1x1,
    Cluster::CUBLASLT_CLUSTER_SHAPE_2x1x1,
    Cluster::CUBLASLT_CLUSTER_SHAPE_1x2x1,
];
/// By how much a tile pays for the operands of its rows and columns: fitted to 13 products of GPT-2 1558M on an H200, of each of which the
/// fastest of up to 690 algorithms was one of the first six tiles, or one proposed (docs/log.md).
const OPERANDS: f64 = 15.0;

/// Variants of the first proposal that does not divide dot products, which all sum in the same order; and that proposal.
pub(super) struct Variants {
    pub base: Algo,
    pub found: Vec<Found>,
}

/// Variants of what the library proposes, the most promising tile first.
pub(super) fn variants(
    info: &DeviceInfo,
    problem: &Problem,
    product: &Product,
    proposed: &[Found],
) -> Option<Variants> {
    if info.compute != (9, 0) || problem.inputs != DType::BF16 || problem.batch > 1 {
        return None;
    }
    let base = proposed.iter().map(|found| found.algo).find(|algo| product.parts(algo) == Some(1))?;
    let mut found: Vec<Found> = Vec::new();
    let (mut taken, mut refused) = (0, 0);
    for (tile, ..) in ranked(problem, info.sms as usize) {
        let more = CLUSTERS.iter().filter_map(|&cluster| product.variant(&base, tile, cluster));
        let before = found.len();
        found.extend(more.filter(|variant| proposed.iter().all(|other| other.algo != variant.algo)));
        if found.len() > before {
            taken += 1
        } else {
            refused += 1
        }
        if taken == TRIED || refused == REFUSED {
            break;
        }
    }
    Some(Variants { base, found })
}

/// All tiles, the most promising first.
fn ranked(problem: &Problem, sms: usize) -> Vec<(Tile, usize, usize)> {
    let mut all = TILES.to_vec();
    let value = |&(_, m, n): &(Tile, usize, usize)| promise([problem.m, problem.n], [m, n], sms);
    all.sort_by(|a, b| value(b).total_cmp(&value(a)));
    all
}

/// The share of the multiprocessors' time that is spent on elements of the result, times what is left of it for products when operands
/// are read.
fn promise([m, n]: [usize; 2], [rows, cols]: [usize; 2], sms: usize) -> f64 {
    let waves = (m.div_ceil(rows) * n.div_ceil(cols)).div_ceil(sms.max(1));
    let useful = (m * n) as f64 / (waves * sms.max(1) * rows * cols).max(1) as f64;
    let intensity = (rows * cols) as f64 / (rows + cols) as f64;
    useful * intensity / (intensity + OPERANDS)
}

/// Tiles with their rows and columns.
const TILES: &[(Tile, usize, usize)] = &[
    (Tile::CUBLASLT_MATMUL_TILE_64x256, 64, 256),
    (Tile::CUBLASLT_MATMUL_TILE_64x320, 64, 320),
    (Tile::CUBLASLT_MATMUL_TILE_64x384, 64, 384),
    (Tile::CUBLASLT_MATMUL_TILE_96x192, 96, 192),
    (Tile::CUBLASLT_MATMUL_TILE_96x256, 96, 256),
    (Tile::CUBLASLT_MATMUL_TILE_104x256, 104, 256),
    (Tile::CUBLASLT_MATMUL_TILE_112x192, 112, 192),
    (Tile::CUBLASLT_MATMUL_TILE_112x256, 112, 256),
    (Tile::CUBLASLT_MATMUL_TILE_120x256, 120, 256),
    (Tile::CUBLASLT_MATMUL_TILE_128x128, 128, 128),
    (Tile::CUBLASLT_MATMUL_TILE_128x136, 128, 136),
    (Tile::CUBLASLT_MATMUL_TILE_128x144, 128, 144),
    (Tile::CUBLASLT_MATMUL_TILE_128x152, 128, 152),
    (Tile::CUBLASLT_MATMUL_TILE_128x160, 128, 160),
    (Tile::CUBLASLT_MATMUL_TILE_128x168, 128, 168),
    (Tile::CUBLASLT_MATMUL_TILE_128x176, 128, 176),
    (Tile::CUBLASLT_MATMUL_TILE_128x184, 128, 184),
    (Tile::CUBLASLT_MATMUL_TILE_128x192, 128, 192),
    (Tile::CUBLASLT_MATMUL_TILE_128x200, 128, 200),
    (Tile::CUBLASLT_MATMUL_TILE_128x208, 128, 208),
    (Tile::CUBLASLT_MATMUL_TILE_128x216, 128, 216),
    (Tile::CUBLASLT_MATMUL_TILE_128x224, 128, 224),
    (Tile::CUBLASLT_MATMUL_TILE_128x232, 128, 232),
    (Tile::CUBLASLT_MATMUL_TILE_128x240, 128, 240),
    (Tile::CUBLASLT_MATMUL_TILE_128x248, 128, 248),
    (Tile::CUBLASLT_MATMUL_TILE_128x256, 128, 256),
    (Tile::CUBLASLT_MATMUL_TILE_128x264, 128, 264),
    (Tile::CUBLASLT_MATMUL_TILE_128x272, 128, 272),
    (Tile::CUBLASLT_MATMUL_TILE_128x280, 128, 280),
    (Tile::CUBLASLT_MATMUL_TILE_128x288, 128, 288),
    (Tile::CUBLASLT_MATMUL_TILE_128x296, 128, 296),
    (Tile::CUBLASLT_MATMUL_TILE_128x304, 128, 304),
    (Tile::CUBLASLT_MATMUL_TILE_128x312, 128, 312),
    (Tile::CUBLASLT_MATMUL_TILE_128x320, 128, 320),
    (Tile::CUBLASLT_MATMUL_TILE_128x328, 128, 328),
    (Tile::CUBLASLT_MATMUL_TILE_128x336, 128, 336),
    (Tile::CUBLASLT_MATMUL_TILE_128x344, 128, 344),
    (Tile::CUBLASLT_MATMUL_TILE_128x352, 128, 352),
    (Tile::CUBLASLT_MATMUL_TILE_136x128, 136, 128),
    (Tile::CUBLASLT_MATMUL_TILE_136x256, 136, 256),
    (Tile::CUBLASLT_MATMUL_TILE_144x128, 144, 128),
    (Tile::CUBLASLT_MATMUL_TILE_144x192, 144, 192),
    (Tile::CUBLASLT_MATMUL_TILE_152x128, 152, 128),
    (Tile::CUBLASLT_MATMUL_TILE_160x128, 160, 128),
    (Tile::CUBLASLT_MATMUL_TILE_160x192, 160, 192),
    (Tile::CUBLASLT_MATMUL_TILE_168x128, 168, 128),
    (Tile::CUBLASLT_MATMUL_TILE_176x128, 176, 128),
    (Tile::CUBLASLT_MATMUL_TILE_176x192, 176, 192),
    (Tile::CUBLASLT_MATMUL_TILE_184x128, 184, 128),
    (Tile::CUBLASLT_MATMUL_TILE_192x112, 192, 112),
    (Tile::CUBLASLT_MATMUL_TILE_192x128, 192, 128),
    (Tile::CUBLASLT_MATMUL_TILE_192x144, 192, 144),
    (Tile::CUBLASLT_MATMUL_TILE_192x160, 192, 160),
    (Tile::CUBLASLT_MATMUL_TILE_192x176, 192, 176),
    (Tile::CUBLASLT_MATMUL_TILE_192x192, 192, 192),
    (Tile::CUBLASLT_MATMUL_TILE_192x208, 192, 208),
    (Tile::CUBLASLT_MATMUL_TILE_192x224, 192, 224),
    (Tile::CUBLASLT_MATMUL_TILE_200x128, 200, 128),
    (Tile::CUBLASLT_MATMUL_TILE_208x128, 208, 128),
    (Tile::CUBLASLT_MATMUL_TILE_216x128, 216, 128),
    (Tile::CUBLASLT_MATMUL_TILE_224x128, 224, 128),
    (Tile::CUBLASLT_MATMUL_TILE_232x128, 232, 128),
    (Tile::CUBLASLT_MATMUL_TILE_256x64, 256, 64),
    (Tile::CUBLASLT_MATMUL_TILE_256x72, 256, 72),
    (Tile::CUBLASLT_MATMUL_TILE_256x80, 256, 80),
    (Tile::CUBLASLT_MATMUL_TILE_256x88, 256, 88),
    (Tile::CUBLASLT_MATMUL_TILE_256x96, 256, 96),
    (Tile::CUBLASLT_MATMUL_TILE_256x104, 256, 104),
    (Tile::CUBLASLT_MATMUL_TILE_256x112, 256, 112),
    (Tile::CUBLASLT_MATMUL_TILE_256x120, 256, 120),
    (Tile::CUBLASLT_MATMUL_TILE_256x128, 256, 128),
    (Tile::CUBLASLT_MATMUL_TILE_256x136, 256, 136),
    (Tile::CUBLASLT_MATMUL_TILE_256x144, 256, 144),
    (Tile::CUBLASLT_MATMUL_TILE_256x152, 256, 152),
    (Tile::CUBLASLT_MATMUL_TILE_256x160, 256, 160),
    (Tile::CUBLASLT_MATMUL_TILE_256x168, 256, 168),
    (Tile::CUBLASLT_MATMUL_TILE_256x176, 256, 176),
    (Tile::CUBLASLT_MATMUL_TILE_320x64, 320, 64),
    (Tile::CUBLASLT_MATMUL_TILE_320x80, 320, 80),
    (Tile::CUBLASLT_MATMUL_TILE_320x96, 320, 96),
    (Tile::CUBLASLT_MATMUL_TILE_320x112, 320, 112),
    (Tile::CUBLASLT_MATMUL_TILE_320x128, 320, 128),
    (Tile::CUBLASLT_MATMUL_TILE_384x96, 384, 96),
    (Tile::CUBLASLT_MATMUL_TILE_384x112, 384, 112),
];

#[cfg(test)]
mod tests {
    use super::super::{At, Sizes};
    use super::*;

    fn names(rows: usize, ic: usize, oc: usize) -> Vec<(usize, usize)> {
        let sizes = Sizes { rows, ic, oc, inputs: DType::BF16, output: DType::BF16, tf32: false };
        let ranked = ranked(&Problem::forward(&sizes, &At::default()), 132);
        ranked.into_iter().map(|(_, m, n)| (m, n)).collect()
    }

    #[test]
    fn tiles_have_the_sizes_that_their_names_say() {
        for (tile, m, n) in TILES {
            assert_eq!(format!("{tile:?}"), format!("CUBLASLT_MATMUL_TILE_{m}x{n}"));
        }
        let mut sizes: Vec<_> = TILES.iter().map(|(_, m, n)| (m, n)).collect();
        sizes.dedup();
        assert_eq!(sizes.len(), TILES.len());
    }

    #[test]
    fn whole_tiles_that_fill_the_device_come_first() {
        // 1600 columns of GPT-2 1558M: 5 tiles of 320 and 128 rows, 640 of them, fill 4.85 waves
        let first = &names(16384, 6400, 1600)[..6];
        assert!(first.contains(&(320, 128)) && first.contains(&(200, 128)), "{first:?}");
        // where everything is divisible, the largest squares win over thin ones
        let all = names(65536, 768, 3072);
        let place = |tile| all.iter().position(|&other| other == tile).unwrap();
        assert!(place((256, 128)) < place((128, 128)) && place((128, 128)) < place((64, 256)));
    }

    #[test]
    fn promise_counts_waste() {
        let whole = promise([1320, 1000], [132, 100], 100);
        assert!((whole - 56.896_551 / 71.896_551).abs() < 1e-6, "{whole}");
        assert!(promise([1321, 1000], [132, 100], 100) < 0.51 * whole, "one row more is another wave");
        assert!(promise([0, 0], [128, 128], 132) == 0.0);
    }
}
