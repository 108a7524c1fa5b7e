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
    heads: usize,
    /// B·NH
    total: usize,
    head_dim: usize,
    /// Heads that blocks work on at a time.
    group: usize,
}

impl Heads {
    /// `None` if there are no positions.
    fn new(cx: &Lower<'_>, out: Slot, heads: usize) -> Option<Self> {
        let [batch, seq, width] = *out.shape.dims() else { return None };
        if batch * seq == 0 || heads == 0 {
            return None;
        }
        let (total, head_dim) = (batch * heads, width / heads);
        // Keys and values, or queries and gradients, of a group take half of the L2.
        let bytes = 2 * seq * head_dim.max(1) * out.dtype.size();
        let group = (cx.device.info.l2 / 2 / bytes).clamp(1, total);
        Some(Self { dtype: out.dtype, seq, heads, total, head_dim, group })
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// The sizes, after the addresses.
    fn sizes(&self, args: Args) -> Args {
        let args = args.u32(self.seq as u32).u32(self.heads as u32).u32(self.head_dim as u32);
        args.u32(self.total as u32)
    }

    /// The arguments all kernels but `flash_delta` end with.
    fn args(&self, args: Args) -> Args {
        self.sizes(args).u32(self.group as u32).f32(self.scale())
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
        let tensor = dtype == DType::BF16 && head_dim > 0 && head_dim % 16 == 0 && head_dim <= 128;
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

/// Adds the launch of one kernel; `args` are its addresses.
fn launch(cx: &mut Lower<'_>, g: &Heads, step: Step, args: Args) -> Result<()> {
    let path = Path::choose(g.dtype, g.head_dim, cx.device.info.shared_per_block);
    let plan = path.plan(g.dtype, step);
    let blocks = match path {
        Path::Any => (g.total * g.seq).div_ceil(ANY_THREADS as usize / 32),
        _ => g.total * g.seq.div_ceil(plan.rows),
    };
    if blocks > i32::MAX as usize {
        let (name, heads, seq) = (plan.name, g.total, g.seq);
        return Err(Error::Unsupported(format!(
            "{name}: {heads} heads of {seq} positions are too many blocks"
        )));
    }
    let kernel = cx.kernel(&plan.spec, plan.name)?;
    if plan.shared > FREE_SHARED {
        kernel.allow_shared(plan.shared)?;
    }
    cx.launch(plan.name, kernel, Grid::linear(blocks, plan.threads).shared(plan.shared), g.args(args));
    Ok(())
}

/// `out` and `lse` of [`AttentionFwd`].
pub(super) fn attention_fwd(cx: &mut Lower<'_>, op: &AttentionFwd) -> Result<()> {
    let Some(g) = Heads::new(cx, op.out, op.heads) else { return Ok(()) };
    let args = Args::new().ptr(cx.ptr(op.out)?).ptr(cx.ptr(op.lse)?).ptr(cx.ptr(op.qkv)?);
    launch(cx, &g, Step::Fwd, args)
}

/// `d_qkv` of [`AttentionBwd`].
pub(super) fn attention_bwd(cx: &mut Lower<'_>, op: &AttentionBwd) -> Result<()> {
    let Some(g) = Heads::new(cx, op.out, op.heads) else { return Ok(()) };
    let rows = g.total * g.seq;
    let delta = cx.scratch(rows * size_of::<f32>())?;
    let (d_out, lse) = (cx.ptr(op.d_out)?, cx.ptr(op.lse)?);
    let spec = Path::Any.plan(g.dtype, Step::BwdQ).spec;
    let kernel = cx.kernel(&spec, "flash_delta")?;
    let args = g.sizes(Args::new().ptr(delta).ptr(d_out).ptr(cx.ptr(op.out)?));
    let shape = Grid::linear(rows.div_ceil(ANY_THREADS as usize / 32), ANY_THREADS);
    cx.launch("flash_delta", kernel, shape, args);
    let args = Args::new().ptr(cx.ptr(op.d_qkv)?).ptr(d_out).ptr(cx.ptr(op.qkv)?).ptr(lse).ptr(delta);
    launch(cx, &g, Step::BwdKv, args.clone())?;
    launch(cx, &g, Step::BwdQ, args)
}

/// What heads of GPT-2 and the generic shapes use.
pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for head_dim in [64, 128, 256, 257] {
            let path = Path::choose(dtype, head_dim, usize::MAX);
            specs.extend(Step::ALL.map(|step| path.plan(dtype, step).spec));
        }
    }
    specs.sort();
    specs.dedup();
    specs
}
