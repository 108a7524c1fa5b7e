//! Our own attention in programs: the kernels that [`crate::flash`] chooses, on packed q, k and v.

use super::elementwise::drop_args;
use super::lower::Lower;
use crate::args::{Args, Grid};
use crate::flash::{ANY, ANY_THREADS, Group, Operands, Path, Step, blocks, wide_lanes};
use crate::kernels::{Spec, ctype};
use crate::{Attention, Result, Settings};
use ironhorse_core::op::{AttentionBwd, AttentionFwd, AttentionMask};
use ironhorse_core::{DType, DropSite, Slot};

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
    /// Dropout of the probabilities.
    drop: Option<DropSite>,
    mask: AttentionMask,
}

impl Heads {
    /// `None` if there are no positions.
    fn new(
        cx: &Lower<'_>,
        out: Slot,
        [heads, kv_heads]: [usize; 2],
        (mask, drop): (AttentionMask, Option<DropSite>),
    ) -> Option<Self> {
        let [batch, seq, width] = *out.shape.dims() else { return None };
        if batch * seq == 0 || heads == 0 || kv_heads == 0 {
            return None;
        }
        let (head_dim, l2) = (width / heads, cx.device.info.l2);
        Some(Self { dtype: out.dtype, seq, batch, heads, kv_heads, head_dim, l2, drop, mask })
    }

    /// Heads of the whole batch that a kernel has blocks for: of keys where it makes their gradients, else of queries.
    fn total(&self, step: Step) -> usize {
        self.batch * if step == Step::BwdKv { self.kv_heads } else { self.heads }
    }

    /// How many of these heads blocks work on at a time.
    fn at_a_time(&self, step: Step) -> usize {
        let bytes = 2 * self.seq * self.head_dim.max(1) * self.dtype.size();
        let (share, total) = (self.heads / self.kv_heads, self.total(step));
        Group { l2: self.l2, bytes, share, total }.heads(step)
    }

    /// The arguments that follow the addresses.
    fn args(&self, args: Args, step: Step, cx: &Lower<'_>) -> Result<Args> {
        let args = args.u32s([self.seq, self.heads, self.kv_heads, self.head_dim, self.total(step)]);
        let mut args = args.u32(self.at_a_time(step) as u32).f32(1.0 / (self.head_dim as f32).sqrt());
        if !self.mask.is_causal() {
            let positions = self.mask.positions.map_or(Ok(0), |slot| cx.ptr(slot))?;
            // a query reaches no more than all keys
            let window = self.mask.window.map_or(self.seq, |window| window.min(self.seq));
            args = args.ptr(positions).ptr(cx.fault).u32(window as u32);
        }
        Ok(self.drop.map_or(args.clone(), |drop| drop_args(args, cx.scalars, drop)))
    }
}

/// What tensor cores are handed, if they may be used.
pub(super) fn operands(dtype: DType, settings: &Settings) -> Option<Operands> {
    match dtype {
        _ if settings.attention == Attention::Plain => None,
        DType::BF16 => Some(Operands::Half),
        DType::F32 if settings.tf32 => Some(Operands::Tf32),
        DType::F32 => Some(Operands::TwoTf32),
        _ => None,
    }
}

/// Adds the launch of one kernel; `args` are its addresses.
fn launch(cx: &mut Lower<'_>, g: &Heads, step: Step, args: Args) -> Result<()> {
    let path = Path::choose(operands(g.dtype, cx.settings), g.head_dim, cx.device.info.shared_per_block);
    let plan = path.plan(step);
    let count = path.blocks(step, g.total(step), g.seq)?;
    let grid = Grid::linear(count, plan.threads).shared(plan.shared);
    let spec = plan.spec(ctype(g.dtype)?);
    let spec = if g.drop.is_some() { dropping(spec) } else { spec };
    let spec = if g.mask.is_causal() { spec } else { masked(spec) };
    let args = g.args(args, step, cx)?;
    cx.launch(&spec, plan.name, grid, args)
}

/// The kernels with dropout of the probabilities.
fn dropping(spec: Spec) -> Spec {
    spec.define("DROPOUT", 1)
}

/// The kernels with documents and a window.
fn masked(spec: Spec) -> Spec {
    spec.define("MASKED", 1)
}

/// `out` and `lse` of [`AttentionFwd`].
pub(super) fn attention_fwd(cx: &mut Lower<'_>, op: &AttentionFwd, drop: Option<DropSite>) -> Result<()> {
    let Some(g) = Heads::new(cx, op.out, [op.heads, op.kv_heads], (op.mask, drop)) else { return Ok(()) };
    let args = cx.pointers(&[op.out, op.lse, op.qkv])?;
    launch(cx, &g, Step::Fwd, args)
}

/// Adds the launch that sums `d_out·out` per head and position; returns where the sums are.
fn row_sums(cx: &mut Lower<'_>, g: &Heads, d_out: u64, out: u64) -> Result<u64> {
    let total = g.batch * g.heads;
    let rows = total * g.seq;
    let delta = cx.scratch(rows * size_of::<f32>())?;
    let (name, last, lanes) = match wide_lanes(g.head_dim, g.dtype.size()) {
        Some(lanes) => ("flash_delta_wide", lanes, lanes),
        None => ("flash_delta", g.head_dim, 32),
    };
    let args = Args::new().ptr(delta).ptr(d_out).ptr(out).u32s([g.seq, g.heads, last, total]);
    let grid = Grid::linear(blocks(rows * lanes, ANY_THREADS as usize)?, ANY_THREADS);
    cx.launch(&Spec::new(ANY).typed("ELEM", g.dtype)?, name, grid, args)?;
    Ok(delta)
}

/// `d_qkv` of [`AttentionBwd`].
pub(super) fn attention_bwd(cx: &mut Lower<'_>, op: &AttentionBwd, drop: Option<DropSite>) -> Result<()> {
    let Some(g) = Heads::new(cx, op.out, [op.heads, op.kv_heads], (op.mask, drop)) else { return Ok(()) };
    let (d_out, lse) = (cx.ptr(op.d_out)?, cx.ptr(op.lse)?);
    let delta = row_sums(cx, &g, d_out, cx.ptr(op.out)?)?;
    let args = Args::new().ptr(cx.ptr(op.d_qkv)?).ptr(d_out).ptr(cx.ptr(op.qkv)?).ptr(lse).ptr(delta);
    launch(cx, &g, Step::BwdQ, args.clone())?; // first: it may correct delta
    launch(cx, &g, Step::BwdKv, args)
}

/// Channels of the heads whose kernels are checked with dropout too. It adds the same few lines to every tile, so one of
/// each path, and the widest, which have the fewest registers left, stand for all.
const WITH_DROPOUT: [usize; 5] = [40, 64, 128, 256, 257];

/// What heads of GPT-2 and the generic shapes use: each of the tiles with each type.
pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    let plain = [(DType::F32, None), (DType::BF16, None)];
    let on_tensor_cores = [
        (DType::BF16, Some(Operands::Half)),
        (DType::F32, Some(Operands::Tf32)),
        (DType::F32, Some(Operands::TwoTf32)),
    ];
    for (dtype, operands) in plain.into_iter().chain(on_tensor_cores) {
        for head_dim in [16, 32, 40, 48, 64, 72, 80, 96, 112, 128, 256, 257] {
            let path = Path::choose(operands, head_dim, usize::MAX);
            let steps =
                Step::ALL.into_iter().flat_map(|step| ctype(dtype).map(|elem| path.plan(step).spec(elem)));
            specs.extend(steps.clone());
            if WITH_DROPOUT.contains(&head_dim) {
                specs.extend(steps.map(dropping));
            }
        }
    }
    specs.extend(masked_specs());
    specs.sort();
    specs.dedup();
    specs
}

/// A few of the kernels with documents and windows, those of the usual widths and one with dropout: they differ from the others
/// by little, and each costs the time to compile it.
fn masked_specs() -> Vec<Spec> {
    let kinds = [
        (DType::BF16, Some(Operands::Half), [64, 128].as_slice()),
        (DType::F32, Some(Operands::Tf32), &[64]),
        (DType::F32, Some(Operands::TwoTf32), &[64, 128]),
        (DType::F32, None, &[128, 257]),
    ];
    let mut specs = Vec::new();
    for (dtype, operands, widths) in kinds {
        for path in widths.iter().map(|&width| Path::choose(operands, width, usize::MAX)) {
            let plans = Step::ALL.into_iter().map(|step| path.plan(step));
            specs.extend(plans.flat_map(|plan| ctype(dtype).map(|elem| masked(plan.spec(elem)))));
        }
    }
    let half = Path::choose(Some(Operands::Half), 64, usize::MAX);
    let plans = Step::ALL.into_iter().map(|step| half.plan(step));
    specs.extend(plans.flat_map(|plan| ctype(DType::BF16).map(|elem| masked(dropping(plan.spec(elem))))));
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

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
            drop: None,
            mask: AttentionMask::CAUSAL,
        };
        let both = |kv_heads| Step::ALL.map(|step| (g(kv_heads).total(step), g(kv_heads).at_a_time(step)));
        assert_eq!(both(12), [(96, 16); 3]);
        assert_eq!(both(4), [(96, 48), (32, 5), (96, 48)]);
        assert_eq!(both(1), [(96, 96), (8, 1), (96, 96)]);
    }
}
