//! Which of the kernels in `kernels/attention` runs an attention: shared by the engine and eager ops.
//!
//! Tensor cores (`flash_fwd.cu`, `flash_bwd.cu`) take heads of up to 128 channels: a multiple of 16 in bf16 and f16, of 32 in
//! f32. Other heads of up to 256 channels go to f32 tiles (`flash_f32.cu`), wider ones to one warp per position
//! (`flash_any.cu`). The backward is three launches: row sums of `d_out·out`, then `d_q`, then `d_k` and `d_v`; nothing is
//! added atomically.

use crate::kernels::Spec;
use crate::{Error, Result};

/// Threads of the kernels of `attention/flash_any.cu`: one warp per position.
pub(crate) const ANY_THREADS: u32 = 256;
/// The file of those, and of the row sums.
pub(crate) const ANY: &str = "attention/flash_any.cu";

/// The three kernels of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Fwd,
    BwdKv,
    BwdQ,
}

impl Step {
    pub const ALL: [Self; 3] = [Self::Fwd, Self::BwdKv, Self::BwdQ];

    fn name(self, [fwd, bwd_kv, bwd_q]: [&'static str; 3]) -> &'static str {
        match self {
            Self::Fwd => fwd,
            Self::BwdKv => bwd_kv,
            Self::BwdQ => bwd_q,
        }
    }
}

/// What tensor cores may be handed for a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operands {
    /// bf16 or f16, as they are.
    Half,
    /// f32, rounded.
    Tf32,
    /// f32 in two parts of tf32: three products, which keep f32's digits.
    TwoTf32,
}

impl Operands {
    /// Products of tf32 for one of f32: `TERMS` of attention/tile_f32.cuh.
    fn terms(self) -> Option<u32> {
        match self {
            Self::Half => None,
            Self::Tf32 => Some(1),
            Self::TwoTf32 => Some(3),
        }
    }
}

/// Which kernels run a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Tensor cores, heads of exactly this many channels.
    Tensor(Operands, usize),
    /// Tiles of f32, heads padded to this many channels.
    Tiles(usize),
    /// One warp per position.
    Any,
}

/// How one kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub file: &'static str,
    pub name: &'static str,
    /// The width as a constant of the file.
    pub width: Option<(&'static str, u32)>,
    /// The constant `TERMS`, where operands are tf32.
    pub terms: Option<u32>,
    /// Positions per block.
    pub rows: usize,
    pub threads: u32,
    pub shared: usize,
}

impl Plan {
    /// Its file for elements of type `elem`, with the constants of the plan.
    pub fn spec(&self, elem: &'static str) -> Spec {
        let numbers = self.width.into_iter().chain(self.terms.map(|terms| ("TERMS", terms)));
        let spec = Spec::new(self.file).define("ELEM", elem);
        numbers.fold(spec, |spec, (name, value)| spec.define(name, value))
    }
}

impl Path {
    /// The fastest for heads of this width that finds room in `shared` bytes per block; without `operands` no tensor cores.
    pub fn choose(operands: Option<Operands>, head_dim: usize, shared: usize) -> Self {
        let tensor = operands.filter(|&operands| {
            let step = if operands == Operands::Half { 16 } else { 32 };
            head_dim > 0 && head_dim.is_multiple_of(step) && head_dim <= 128
        });
        let tiles = [64, 128, 256].into_iter().find(|&wide| head_dim <= wide);
        let fits = |path: &Self| Step::ALL.iter().all(|&step| path.plan(step).shared <= shared);
        let fast = [tensor.map(|operands| Self::Tensor(operands, head_dim)), tiles.map(Self::Tiles)];
        fast.into_iter().flatten().find(fits).unwrap_or(Self::Any)
    }

    pub fn plan(self, step: Step) -> Plan {
        match self {
            Self::Tensor(operands, head_dim) => {
                let Tile { rows, stage, threads, pitch } = Tile::of(operands, head_dim, step);
                let (resident, stats) =
                    if step == Step::Fwd { (1, 0) } else { (2, 4 * stage * size_of::<f32>()) };
                Plan {
                    file: if step == Step::Fwd { "attention/flash_fwd.cu" } else { "attention/flash_bwd.cu" },
                    name: step.name(["flash_fwd", "flash_bwd_kv", "flash_bwd_q"]),
                    width: Some(("HD", head_dim as u32)),
                    terms: operands.terms(),
                    rows,
                    threads,
                    shared: (resident * rows + 4 * stage) * pitch + stats,
                }
            }
            // The sizes are those of attention/flash_f32.cu.
            Self::Tiles(wide) => {
                let (rows, tiles) = (4096 / wide, if step == Step::Fwd { 3 } else { 4 });
                Plan {
                    file: "attention/flash_f32.cu",
                    name: step.name(["flash_f32_fwd", "flash_f32_bwd_kv", "flash_f32_bwd_q"]),
                    width: Some(("HDP", wide as u32)),
                    terms: None,
                    rows,
                    threads: 256,
                    shared: 4 * rows * (tiles * (wide + 4) + rows + 4),
                }
            }
            Self::Any => Plan {
                file: ANY,
                name: step.name(["flash_any_fwd", "flash_any_bwd_kv", "flash_any_bwd_q"]),
                width: None,
                terms: None,
                rows: 1,
                threads: ANY_THREADS,
                shared: 0,
            },
        }
    }

    /// Blocks of a kernel for `heads` heads of `positions` each.
    pub fn blocks(self, step: Step, heads: usize, positions: usize) -> Result<usize> {
        match self {
            Self::Any => blocks(heads * positions * 32, ANY_THREADS as usize),
            Self::Tensor(..) | Self::Tiles(_) => blocks(heads * positions.div_ceil(self.plan(step).rows), 1),
        }
    }
}

/// Sizes of the kernels on tensor cores.
struct Tile {
    /// Positions per block.
    rows: usize,
    /// Positions that pass by at a time.
    stage: usize,
    threads: u32,
    /// Bytes of a position in shared memory.
    pitch: usize,
}

impl Tile {
    fn of(operands: Operands, head_dim: usize, step: Step) -> Self {
        let narrow = head_dim <= 64;
        match operands {
            // The sizes are those of attention/tile_half.cuh.
            Operands::Half => {
                let pitch = 2 * if head_dim.is_multiple_of(64) { head_dim } else { head_dim + 8 };
                Self { rows: if narrow { 128 } else { 64 }, stage: 64, threads: 128, pitch }
            }
            // The sizes are those of attention/tile_f32.cuh.
            Operands::Tf32 | Operands::TwoTf32 => {
                let two_tiles = operands == Operands::Tf32 && narrow;
                Self {
                    rows: if narrow && !two_tiles { 64 } else { 128 },
                    stage: if two_tiles && step == Step::Fwd { 64 } else { 32 },
                    threads: if narrow { 128 } else { 256 },
                    pitch: 4 * head_dim,
                }
            }
        }
    }
}

/// How many blocks of `each` cover `count`; a grid has room for 2^31 - 1.
pub(crate) fn blocks(count: usize, each: usize) -> Result<usize> {
    let blocks = count.div_ceil(each);
    if blocks > i32::MAX as usize {
        return Err(Error::Unsupported(format!("attention: {blocks} blocks are more than a grid holds")));
    }
    Ok(blocks)
}

/// The lanes that sum a row of `d_out·out` in pieces of 16 bytes; `None` where only single elements go.
pub(crate) fn wide_lanes(head_dim: usize, element: usize) -> Option<usize> {
    let piece = 16 / element;
    let lanes = head_dim / piece;
    (head_dim.is_multiple_of(piece) && lanes.is_power_of_two() && lanes <= 32).then_some(lanes)
}

/// What decides how many heads blocks work on at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    /// Bytes of L2.
    pub l2: usize,
    /// Bytes of what is passed over for a head: keys and values, or queries and gradients of one head.
    pub bytes: usize,
    /// Heads of queries that share keys.
    pub share: usize,
    /// Heads of the whole batch that the kernel has blocks for.
    pub total: usize,
}

impl Group {
    /// The number of heads to work on at a time: as many as leave half of the L2 free of what they pass over, which is keys
    /// and values, or all queries and gradients of a head of keys.
    pub fn heads(&self, step: Step) -> usize {
        let fit = self.l2 / 2 / self.bytes.max(1);
        let fit = if step == Step::BwdKv { fit / self.share } else { fit * self.share };
        fit.clamp(1, self.total.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a block may have on the smallest of our GPUs (8.6, 8.9, 12.0).
    const LEAST_SHARED: usize = 99 << 10;
    /// What a block may have on 9.0.
    const HOPPER_SHARED: usize = 227 << 10;

    #[test]
    fn every_width_has_its_kernels_on_every_gpu() {
        for head_dim in 0..=300 {
            let plain = Path::choose(None, head_dim, LEAST_SHARED);
            let bf16 = Path::choose(Some(Operands::Half), head_dim, LEAST_SHARED);
            let tensor = [16, 32, 48, 64, 80, 96, 112, 128].contains(&head_dim);
            assert_eq!(bf16, if tensor { Path::Tensor(Operands::Half, head_dim) } else { plain });
            assert_eq!(plain == Path::Any, head_dim > 256);
            for operands in [Operands::Tf32, Operands::TwoTf32] {
                let f32 = |shared| Path::choose(Some(operands), head_dim, shared);
                let on_tensor_cores = |some: &[usize]| {
                    if some.contains(&head_dim) { Path::Tensor(operands, head_dim) } else { plain }
                };
                assert_eq!(f32(LEAST_SHARED), on_tensor_cores(&[32, 64]));
                assert_eq!(f32(HOPPER_SHARED), on_tensor_cores(&[32, 64, 96, 128]));
            }
        }
    }

    #[test]
    fn shared_memory_is_what_the_kernels_lay_out() {
        let shared = |path: Path, step| path.plan(step).shared;
        assert_eq!(shared(Path::Tensor(Operands::Half, 64), Step::Fwd), (128 + 4 * 64) * 128);
        assert_eq!(shared(Path::Tensor(Operands::Half, 128), Step::BwdKv), (2 * 64 + 4 * 64) * 256 + 1024);
        assert_eq!(shared(Path::Tensor(Operands::Tf32, 64), Step::Fwd), (128 + 4 * 64) * 256);
        assert_eq!(shared(Path::Tensor(Operands::Tf32, 64), Step::BwdQ), (2 * 128 + 4 * 32) * 256 + 512);
        assert_eq!(shared(Path::Tensor(Operands::TwoTf32, 64), Step::BwdQ), (2 * 64 + 4 * 32) * 256 + 512);
        assert_eq!(shared(Path::Tensor(Operands::TwoTf32, 128), Step::Fwd), (128 + 4 * 32) * 512);
        assert_eq!(shared(Path::Tiles(64), Step::BwdQ), 4 * (4 * 64 * 68 + 64 * 68));
    }

    #[test]
    fn rows_are_summed_in_pieces_where_those_are_a_power_of_two() {
        assert_eq!(wide_lanes(64, 2), Some(8));
        assert_eq!(wide_lanes(80, 2), None);
        assert_eq!(wide_lanes(6, 8), None);
        assert_eq!(wide_lanes(0, 4), None);
    }
}
