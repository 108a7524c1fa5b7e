//! The backward of attention by warpgroups of a Hopper GPU, heads of 64 channels (attention/flash_bwd_wgmma.cu).

use super::lower::{Lower, Partials, RESULT_SUMS};
use crate::args::{Args, Grid};
use crate::device::{DeviceInfo, Matrix};
use crate::kernels::Spec;
use crate::{Attention, Result, Settings};
use ironhorse_core::op::AttentionBwd;
use ironhorse_core::{DType, Slot};

const FILE: &str = "attention/flash_bwd_wgmma.cu";
/// `HD` of the file.
const HEAD_DIM: usize = 64;
/// Queries and keys of a tile: `TILE` of the file.
const TILE: usize = 128;
/// Rows of a TMA store.
const STORE_ROWS: u32 = 16;
/// `THREADS` of the file.
const THREADS: u32 = 384;
/// Shared memory of a block: `Space` of the file, and what is lost to start at a multiple of 1024.
const SHARED: usize = 9 * (16 << 10) + 2 * (32 << 10) + 2 * (1 << 10) + 12 * 8 + 1024;
/// Bytes of sums that it may take: long sequences whose keys many heads share would need more than the other kernels do.
const MOST_SUMS: usize = 512 << 20;
/// Rows of partial sums of `d_qkv` for each sequence: a block's warps that multiply.
const SUM_ROWS: usize = 8;
/// Queries and threads of a block of `flash_bwd_stats`.
const STATS_BLOCK: (usize, u32) = (32, 256);

/// The sizes of one attention.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
}

impl Sizes {
    /// `None` where the kernel does not take the shape.
    fn new(op: &AttentionBwd) -> Option<Self> {
        let [batch, seq, width] = *op.out.shape.dims() else { return None };
        let (heads, kv_heads) = (op.heads, op.kv_heads);
        let types = [op.qkv, op.out, op.d_out, op.d_qkv].iter().all(|slot| slot.dtype == DType::BF16);
        let takes = types
            && op.mask.is_causal()
            && batch > 0
            && kv_heads > 0
            && heads.is_multiple_of(kv_heads)
            && width == heads * HEAD_DIM
            && seq > 0
            && seq.is_multiple_of(TILE);
        takes.then_some(Self { batch, seq, heads, kv_heads })
    }

    /// Heads of keys, each the work of one block.
    fn units(&self) -> usize {
        self.batch * self.kv_heads
    }

    fn blocks(&self, sms: usize) -> usize {
        self.units().min(sms)
    }

    /// Whether the heads of keys keep so many multiprocessors busy that this is the fastest. Other kernels divide heads among
    /// blocks; on a full H200 this one takes 0.5 of their time at T = 1,024, 0.6 at 2,048 and 0.8 at 4,096 (docs/log.md), and 0.6,
    /// 0.75 and 0.97 of that of sums in any order.
    fn fills(&self, sms: usize, any_order: bool) -> bool {
        let percent = match (self.seq, any_order) {
            (..=1024, false) => 50,
            (..=1024, true) => 60,
            (..=2048, false) => 65,
            (..=2048, true) => 75,
            (_, false) => 85,
            (_, true) => 98,
        };
        100 * self.units() >= percent * self.units().div_ceil(sms) * sms
    }

    /// Bytes of the sums of `d_q`: for each block, those of the heads that share the keys it works on.
    fn sums_bytes(&self, blocks: usize) -> usize {
        blocks * (self.heads / self.kv_heads) * self.seq * HEAD_DIM * size_of::<f32>()
    }
}

/// Whether a GPU and the settings let it run.
fn may_run(info: &DeviceInfo, settings: &Settings) -> bool {
    info.compute == (9, 0)
        && info.shared_per_block >= SHARED
        && matches!(settings.attention, Attention::Auto | Attention::Own)
}

/// Adds the launches of [`AttentionBwd`] where this is the fastest; else adds nothing and returns `false`.
pub(super) fn attention_bwd(cx: &mut Lower<'_>, op: &AttentionBwd) -> Result<bool> {
    let sms = cx.device.info.sms as usize;
    let any_order = cx.settings.fast;
    let fast =
        |sizes: &Sizes| sizes.fills(sms, any_order) && sizes.sums_bytes(sizes.blocks(sms)) <= MOST_SUMS;
    let Some(sizes) = Sizes::new(op).filter(fast) else { return Ok(false) };
    let [qkv, out, d_out, d_qkv] = [cx.ptr(op.qkv)?, cx.ptr(op.out)?, cx.ptr(op.d_out)?, cx.ptr(op.d_qkv)?];
    let aligned = [qkv, out, d_out, d_qkv].iter().all(|at| at.is_multiple_of(16));
    if !aligned || !may_run(&cx.device.info, cx.settings) {
        return Ok(false);
    }
    let Sizes { batch, seq, heads, kv_heads } = sizes;
    let (units, rows, blocks) = (sizes.units(), batch * heads * seq, sizes.blocks(sms));
    let stats_bytes = 2 * rows * size_of::<f32>(); // two for each query
    let leaves_sums = cx.bias_follows(op.d_qkv);
    let columns_bytes = match leaves_sums {
        true => batch * SUM_ROWS * (heads + 2 * kv_heads) * HEAD_DIM * size_of::<f32>(),
        false => 0,
    };
    let stats = cx.scratch(stats_bytes + sizes.sums_bytes(blocks) + columns_bytes)?;
    let sums = stats + stats_bytes as u64;
    let columns = sums + sizes.sums_bytes(blocks) as u64;
    if leaves_sums {
        *cx.partials = Some(Partials { op: cx.op, of: op.d_qkv, at: columns, rows: batch * SUM_ROWS });
    }

    let spec = spec(leaves_sums);
    let (each, threads) = STATS_BLOCK;
    let args = Args::new().ptr(stats).ptr(d_out).ptr(out).ptr(cx.ptr(op.lse)?).u32s([seq, heads]);
    cx.launch(&spec, "flash_bwd_stats", Grid::linear(crate::flash::blocks(rows, each)?, threads), args)?;

    let map = |slot: Slot, at: u64, box_rows: u32| {
        let cols = slot.shape.dims().last().copied().unwrap_or(0);
        Matrix { at, rows: batch * seq, cols, bytes: DType::BF16.size() }.tensor_map(cx.device, box_rows)
    };
    let args = Args::new()
        .words(&map(op.qkv, qkv, TILE as u32)?)
        .words(&map(op.d_out, d_out, TILE as u32)?)
        .words(&map(op.d_qkv, d_qkv, STORE_ROWS)?)
        .ptr(stats)
        .ptr(sums)
        .ptr(columns)
        .u32s([seq, heads, kv_heads, units])
        .f32(1.0 / (HEAD_DIM as f32).sqrt());
    cx.launch(&spec, "flash_bwd_wgmma", Grid::linear(blocks, THREADS).shared(SHARED), args)?;
    tracing::debug!("attention_bwd of {units} heads of keys, T {seq}: flash_bwd_wgmma, {blocks} blocks");
    Ok(true)
}

fn spec(leaves_sums: bool) -> Spec {
    if leaves_sums { Spec::new(FILE).define(RESULT_SUMS, 1) } else { Spec::new(FILE) }
}

pub(super) fn specs() -> Vec<Spec> {
    [false, true].map(spec).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::op::AttentionMask;
    use ironhorse_core::{Pool, Shape};

    fn op(seq: usize, [heads, kv_heads]: [usize; 2], head_dim: usize, dtype: DType) -> AttentionBwd {
        let slot = |shape: Shape| Slot { pool: Pool::Io, offset: 0, shape, dtype };
        let packed = || slot([2, seq, (heads + 2 * kv_heads) * head_dim].into());
        let out = || slot([2, seq, heads * head_dim].into());
        let lse = Slot { dtype: DType::F32, ..slot([2, heads, seq].into()) };
        let (d_qkv, d_out, qkv, mask) = (packed(), out(), packed(), AttentionMask::CAUSAL);
        AttentionBwd { d_qkv, d_out, qkv, out: out(), lse, heads, kv_heads, mask }
    }

    #[test]
    fn whole_tiles_of_heads_of_64_in_bf16_are_taken() {
        let takes = |op: &AttentionBwd| Sizes::new(op).is_some();
        assert!(takes(&op(128, [3, 3], 64, DType::BF16)) && takes(&op(1024, [6, 2], 64, DType::BF16)));
        assert!(!takes(&op(1000, [3, 3], 64, DType::BF16)) && !takes(&op(0, [3, 3], 64, DType::BF16)));
        assert!(!takes(&op(128, [3, 3], 128, DType::BF16)) && !takes(&op(128, [3, 3], 64, DType::F32)));
        let window = AttentionMask { positions: None, window: Some(5) };
        assert!(!takes(&AttentionBwd { mask: window, ..op(128, [3, 3], 64, DType::BF16) }));
    }

    #[test]
    fn few_heads_are_left_to_kernels_that_divide_them() {
        let fills = |batch, kv_heads| Sizes { batch, seq: 1024, heads: 12, kv_heads }.fills(132, false);
        assert!(fills(64, 12) && fills(8, 12) && fills(16, 6), "768, 96 and 96 heads");
        assert!(!fills(4, 12), "48 heads");
        assert!(fills(11, 12) && fills(12, 12), "one wave of 132 heads; 144 heads in two");
        let long = |seq, any_order| Sizes { batch: 8, seq, heads: 12, kv_heads: 12 }.fills(132, any_order);
        assert!(long(1024, true) && long(2048, false) && !long(2048, true) && !long(4096, false), "96 heads");
        let sums = |seq| Sizes { batch: 16, seq, heads: 32, kv_heads: 8 }.sums_bytes(128);
        assert_eq!((sums(1024), sums(8192)), (128 << 20, 1 << 30));
        assert!(sums(4096) <= MOST_SUMS && sums(8192) > MOST_SUMS);
    }
}
