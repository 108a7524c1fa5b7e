//! Which of the kernels flash_*.cu runs an attention: shared by the engine's ops and the direct ones.
//!
//! Heads of bf16 (and, direct, f16) whose width is a multiple of 16 up to 128 go to the tensor cores (`flash_fwd.cu`,
//! `flash_bwd.cu`), other heads of up to 256 channels to f32 tiles (`flash_f32.cu`), wider ones to one warp per position
//! (`flash_any.cu`). The backward is three launches: row sums of `d_out·out`, then `d_k` and `d_v`, then `d_q`; nothing is
//! added atomically.

use crate::{Error, Result};

/// Threads of the kernels of `flash_any.cu`: one warp per position.
pub(crate) const ANY_THREADS: u32 = 256;
/// The file of those, and of the row sums.
pub(crate) const ANY: &str = "flash_any.cu";

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

/// Which kernels run a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Tensor cores, heads of exactly this many channels.
    Tensor(usize),
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
    /// Positions per block.
    pub rows: usize,
    pub threads: u32,
    pub shared: usize,
}

impl Path {
    /// The fastest for heads of this width that finds room in `shared` bytes per block; `half`: tensor cores take them.
    pub fn choose(half: bool, head_dim: usize, shared: usize) -> Self {
        let tensor = half && head_dim > 0 && head_dim.is_multiple_of(16) && head_dim <= 128;
        let tiles = [64, 128, 256].into_iter().find(|&wide| head_dim <= wide);
        let fits = |path: &Self| Step::ALL.iter().all(|&step| path.plan(step).shared <= shared);
        let fast = [tensor.then_some(Self::Tensor(head_dim)), tiles.map(Self::Tiles)];
        fast.into_iter().flatten().find(fits).unwrap_or(Self::Any)
    }

    pub fn plan(self, step: Step) -> Plan {
        match self {
            // The sizes are those of flash_tile.cuh and the files that use it.
            Self::Tensor(head_dim) => {
                let rows = if head_dim <= 64 { 128 } else { 64 };
                let pitch = 2 * if head_dim % 64 == 0 { head_dim } else { head_dim + 8 };
                let (resident, stats) =
                    if step == Step::Fwd { (1, 0) } else { (2, 4 * 64 * size_of::<f32>()) };
                Plan {
                    file: if step == Step::Fwd { "flash_fwd.cu" } else { "flash_bwd.cu" },
                    name: step.name(["flash_fwd", "flash_bwd_kv", "flash_bwd_q"]),
                    width: Some(("HD", head_dim as u32)),
                    rows,
                    threads: 128,
                    shared: (resident * rows + 4 * 64) * pitch + stats,
                }
            }
            // The sizes are those of flash_f32.cu.
            Self::Tiles(wide) => {
                let (rows, tiles) = (4096 / wide, if step == Step::Fwd { 3 } else { 4 });
                Plan {
                    file: "flash_f32.cu",
                    name: step.name(["flash_f32_fwd", "flash_f32_bwd_kv", "flash_f32_bwd_q"]),
                    width: Some(("HDP", wide as u32)),
                    rows,
                    threads: 256,
                    shared: 4 * rows * (tiles * (wide + 4) + rows + 4),
                }
            }
            Self::Any => Plan {
                file: ANY,
                name: step.name(["flash_any_fwd", "flash_any_bwd_kv", "flash_any_bwd_q"]),
                width: None,
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
            Self::Tensor(_) | Self::Tiles(_) => blocks(heads * positions.div_ceil(self.plan(step).rows), 1),
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
    /// As many as leave half of the L2 free of what they pass over: keys and values, or all queries and gradients of a
    /// head of keys.
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

    #[test]
    fn every_width_has_its_kernels_on_every_gpu() {
        for head_dim in 0..=300 {
            let f32 = Path::choose(false, head_dim, LEAST_SHARED);
            let bf16 = Path::choose(true, head_dim, LEAST_SHARED);
            let tensor = [16, 32, 48, 64, 80, 96, 112, 128].contains(&head_dim);
            assert_eq!(bf16, if tensor { Path::Tensor(head_dim) } else { f32 });
            assert_eq!(f32 == Path::Any, head_dim > 256);
        }
    }

    #[test]
    fn shared_memory_is_what_the_kernels_lay_out() {
        let shared = |path: Path, step| path.plan(step).shared;
        assert_eq!(shared(Path::Tensor(64), Step::Fwd), (128 + 4 * 64) * 128);
        assert_eq!(shared(Path::Tensor(128), Step::BwdKv), (2 * 64 + 4 * 64) * 256 + 1024);
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
