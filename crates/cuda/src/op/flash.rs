//! Our own attention: which of the kernels flash_*.cu runs a shape, and how many blocks it takes.
//!
//! bf16 heads whose width is a multiple of 16 up to 128 go to the tensor cores (`flash_fwd.cu`, `flash_bwd.cu`), other
//! heads of up to 256 channels to f32 tiles (`flash_f32.cu`), wider ones to one warp per position (`flash_any.cu`). The
//! backward is three launches: row sums of `d_out·out`, then `d_k` and `d_v`, then `d_q`; nothing is added atomically.

use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::{Grid, Lower};
use crate::{Error, Result};
use ironhorse_core::op::{AttentionBwd, AttentionFwd};
use ironhorse_core::{DType, Slot};

/// Shared memory any block gets without asking.
const FREE_SHARED: usize = 48 << 10;

/// Threads of the kernels of `flash_any.cu`: one warp per position.
const ANY_THREADS: u32 = 256;

/// The sizes of one attention.
#[derive(Clone, Copy, Debug)]
struct Heads {
    dtype: DType,
    seq: usize,
    batch: usize,
    heads: usize,
    /// Heads of keys and values.
    kv_heads: usize,
    head_dim: usize,
    /// Bytes of L2.
    l2: usize,
}

impl Heads {
    /// `None` if there are no positions.
    fn new(cx: &Lower<'_>, out: Slot, heads: usize, kv_heads: usize) -> Option<Self> {
        let [batch, seq, width] = *out.shape.dims() else { return None };
        if batch * seq == 0 || heads == 0 || kv_heads == 0 {
            return None;
        }
        let (head_dim, l2) = (width / heads, cx.device.info.l2);
        Some(Self { dtype: out.dtype, seq, batch, heads, kv_heads, head_dim, l2 })
    }

    /// Heads of the whole batch that a kernel has blocks for: of keys where it makes their gradients, else of queries.
    fn total(&self, step: Step) -> usize {
        self.batch * if step == Step::BwdKv { self.kv_heads } else { self.heads }
    }

    /// How many of them blocks work on at a time: what they pass over, keys and values or all queries and gradients of
    /// a head of keys, takes half of the L2.
    fn at_a_time(&self, step: Step) -> usize {
        let bytes = 2 * self.seq * self.head_dim.max(1) * self.dtype.size();
        let share = self.heads / self.kv_heads;
        let fit = self.l2 / 2 / bytes;
        let fit = if step == Step::BwdKv { fit / share } else { fit * share };
        fit.clamp(1, self.total(step))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// The arguments that follow the addresses.
    fn args(&self, args: Args, step: Step) -> Args {
        let args = args.u32(self.seq as u32).u32(self.heads as u32).u32(self.kv_heads as u32);
        let args = args.u32(self.head_dim as u32).u32(self.total(step) as u32);
        args.u32(self.at_a_time(step) as u32).f32(self.scale())
    }
}

/// The three kernels of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Fwd,
    BwdKv,
    BwdQ,
}

/// Which kernels run a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// Tensor cores, heads of exactly this many channels.
    Tensor(usize),
    /// Tiles of f32, heads padded to this many channels.
    Tiles(usize),
    /// One warp per position.
    Any,
}

/// How one kernel is launched.
#[derive(Clone, Debug)]
struct Plan {
    spec: Spec,
    name: &'static str,
    /// Positions per block.
    rows: usize,
    threads: u32,
    shared: usize,
}

fn elem(spec: Spec, dtype: DType) -> Spec {
    spec.define("ELEM", if dtype == DType::BF16 { "bf16" } else { "float" })
}

impl Path {
    /// The fastest for heads of this width that finds room in `shared` bytes per block.
    fn choose(dtype: DType, head_dim: usize, shared: usize) -> Self {
        let tensor = dtype == DType::BF16 && head_dim > 0 && head_dim.is_multiple_of(16) && head_dim <= 128;
        let tiles = [64, 128, 256].into_iter().find(|&wide| head_dim <= wide);
        let fits = |path: &Self| Step::ALL.iter().all(|&step| path.plan(dtype, step).shared <= shared);
        let fast = [tensor.then_some(Self::Tensor(head_dim)), tiles.map(Self::Tiles)];
        fast.into_iter().flatten().find(fits).unwrap_or(Self::Any)
    }

    fn plan(self, dtype: DType, step: Step) -> Plan {
        match self {
            // The sizes are those of flash_tile.cuh and the files that use it.
            Self::Tensor(head_dim) => {
                let file = if step == Step::Fwd { "flash_fwd.cu" } else { "flash_bwd.cu" };
                let rows = if head_dim <= 64 { 128 } else { 64 };
                let pitch = 2 * if head_dim % 64 == 0 { head_dim } else { head_dim + 8 };
                let (resident, stats) =
                    if step == Step::Fwd { (1, 0) } else { (2, 4 * 64 * size_of::<f32>()) };
                Plan {
                    spec: Spec::new(file).define("HD", head_dim),
                    name: step.name(["flash_fwd", "flash_bwd_kv", "flash_bwd_q"]),
                    rows,
                    threads: 128,
                    shared: (resident * rows + 4 * 64) * pitch + stats,
                }
            }
            // The sizes are those of flash_f32.cu.
            Self::Tiles(wide) => {
                let (rows, tiles) = (4096 / wide, if step == Step::Fwd { 3 } else { 4 });
                Plan {
                    spec: elem(Spec::new("flash_f32.cu"), dtype).define("HDP", wide),
                    name: step.name(["flash_f32_fwd", "flash_f32_bwd_kv", "flash_f32_bwd_q"]),
                    rows,
                    threads: 256,
                    shared: 4 * rows * (tiles * (wide + 4) + rows + 4),
                }
            }
            Self::Any => Plan {
                spec: elem(Spec::new("flash_any.cu"), dtype),
                name: step.name(["flash_any_fwd", "flash_any_bwd_kv", "flash_any_bwd_q"]),
                rows: 1,
                threads: ANY_THREADS,
                shared: 0,
            },
        }
    }
}

impl Step {
    const ALL: [Self; 3] = [Self::Fwd, Self::BwdKv, Self::BwdQ];

    fn name(self, [fwd, bwd_kv, bwd_q]: [&'static str; 3]) -> &'static str {
        match self {
            Self::Fwd => fwd,
            Self::BwdKv => bwd_kv,
            Self::BwdQ => bwd_q,
        }
    }
}

/// How many blocks of `each` cover `count`; a grid has room for 2^31 - 1.
fn blocks(count: usize, each: usize) -> Result<usize> {
    let blocks = count.div_ceil(each);
    if blocks > i32::MAX as usize {
        return Err(Error::Unsupported(format!("attention: {blocks} blocks are more than a grid holds")));
    }
    Ok(blocks)
}

/// Adds the launch of one kernel; `args` are its addresses.
fn launch(cx: &mut Lower<'_>, g: &Heads, step: Step, args: Args) -> Result<()> {
    let path = Path::choose(g.dtype, g.head_dim, cx.device.info.shared_per_block);
    let plan = path.plan(g.dtype, step);
    let count = match path {
        Path::Any => blocks(g.total(step) * g.seq * 32, ANY_THREADS as usize)?,
        Path::Tensor(_) | Path::Tiles(_) => blocks(g.total(step) * g.seq.div_ceil(plan.rows), 1)?,
    };
    let kernel = cx.kernel(&plan.spec, plan.name)?;
    if plan.shared > FREE_SHARED {
        kernel.allow_shared(plan.shared)?;
    }
    cx.launch(plan.name, kernel, Grid::linear(count, plan.threads).shared(plan.shared), g.args(args, step));
    Ok(())
}

/// `out` and `lse` of [`AttentionFwd`].
pub(super) fn attention_fwd(cx: &mut Lower<'_>, op: &AttentionFwd) -> Result<()> {
    let Some(g) = Heads::new(cx, op.out, op.heads, op.kv_heads) else { return Ok(()) };
    let args = Args::new().ptr(cx.ptr(op.out)?).ptr(cx.ptr(op.lse)?).ptr(cx.ptr(op.qkv)?);
    launch(cx, &g, Step::Fwd, args)
}

/// Adds the launch that sums `d_out·out` per head and position; returns where the sums are.
fn row_sums(cx: &mut Lower<'_>, g: &Heads, d_out: u64, out: u64) -> Result<u64> {
    let total = g.batch * g.heads;
    let rows = total * g.seq;
    let delta = cx.scratch(rows * size_of::<f32>())?;
    let piece = 16 / g.dtype.size();
    let lanes = g.head_dim / piece;
    let wide = g.head_dim.is_multiple_of(piece) && lanes.is_power_of_two() && lanes <= 32;
    let (name, last, lanes) =
        if wide { ("flash_delta_wide", lanes, lanes) } else { ("flash_delta", g.head_dim, 32) };
    let kernel = cx.kernel(&Path::Any.plan(g.dtype, Step::BwdQ).spec, name)?;
    let args = Args::new().ptr(delta).ptr(d_out).ptr(out).u32(g.seq as u32).u32(g.heads as u32);
    let args = args.u32(last as u32).u32(total as u32);
    cx.launch(name, kernel, Grid::linear(blocks(rows * lanes, ANY_THREADS as usize)?, ANY_THREADS), args);
    Ok(delta)
}

/// `d_qkv` of [`AttentionBwd`].
pub(super) fn attention_bwd(cx: &mut Lower<'_>, op: &AttentionBwd) -> Result<()> {
    let Some(g) = Heads::new(cx, op.out, op.heads, op.kv_heads) else { return Ok(()) };
    let (d_out, lse) = (cx.ptr(op.d_out)?, cx.ptr(op.lse)?);
    let delta = row_sums(cx, &g, d_out, cx.ptr(op.out)?)?;
    let args = Args::new().ptr(cx.ptr(op.d_qkv)?).ptr(d_out).ptr(cx.ptr(op.qkv)?).ptr(lse).ptr(delta);
    launch(cx, &g, Step::BwdKv, args.clone())?;
    launch(cx, &g, Step::BwdQ, args)
}

/// What heads of GPT-2 and the generic shapes use: each of the tiles with each type.
pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for head_dim in [16, 32, 40, 48, 64, 72, 80, 96, 112, 128, 256, 257] {
            let path = Path::choose(dtype, head_dim, usize::MAX);
            specs.extend(Step::ALL.map(|step| path.plan(dtype, step).spec));
        }
    }
    specs.sort();
    specs.dedup();
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a block may have on the smallest of our GPUs (8.6, 8.9, 12.0).
    const LEAST_SHARED: usize = 99 << 10;

    #[test]
    fn every_width_has_its_kernels_on_every_gpu() {
        for head_dim in 0..=300 {
            let f32 = Path::choose(DType::F32, head_dim, LEAST_SHARED);
            let bf16 = Path::choose(DType::BF16, head_dim, LEAST_SHARED);
            let tensor = [16, 32, 48, 64, 80, 96, 112, 128].contains(&head_dim);
            assert_eq!(bf16, if tensor { Path::Tensor(head_dim) } else { f32 });
            assert_eq!(f32 == Path::Any, head_dim > 256);
        }
    }

    /// A block of the backward of keys passes over all queries that share them.
    #[test]
    fn blocks_are_of_keys_where_keys_get_gradients() {
        let g = |kv_heads| Heads {
            dtype: DType::BF16,
            seq: 1024,
            batch: 8,
            heads: 12,
            kv_heads,
            head_dim: 64,
            l2: 8 << 20,
        };
        let both = |kv_heads| Step::ALL.map(|step| (g(kv_heads).total(step), g(kv_heads).at_a_time(step)));
        assert_eq!(both(12), [(96, 16); 3]);
        assert_eq!(both(4), [(96, 48), (32, 5), (96, 48)]);
        assert_eq!(both(1), [(96, 96), (8, 1), (96, 96)]);
    }

    #[test]
    fn shared_memory_is_what_the_kernels_lay_out() {
        let shared = |path: Path, step| path.plan(DType::F32, step).shared;
        assert_eq!(shared(Path::Tensor(64), Step::Fwd), (128 + 4 * 64) * 128);
        assert_eq!(shared(Path::Tensor(128), Step::BwdKv), (2 * 64 + 4 * 64) * 256 + 1024);
        assert_eq!(shared(Path::Tiles(64), Step::BwdQ), 4 * (4 * 64 * 68 + 64 * 68));
    }
}
