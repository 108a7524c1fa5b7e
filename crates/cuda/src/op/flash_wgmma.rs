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
const MOST_SUMS: usize = 1 << 30;
/// A block's warps that multiply: `WARPS` of the file. Each leaves a row of partial sums of `d_qkv` for each sequence.
const WARPS: usize = 8;
/// Blocks that a launch may have: `MOST_BLOCKS` of the file.
const MOST_BLOCKS: usize = 144;
/// Queries and threads of a block of `flash_bwd_stats`.
const STATS_BLOCK: (usize, u32) = (32, 256);
/// Threads of a block of `flash_bwd_join`, and blocks that a tile of keys has.
const JOIN_BLOCK: (u32, usize) = (128, 4);
/// Microseconds of a pair of tiles on an H200, as measured, and of the sums of a tile of keys, written and read at 4 TB/s.
const PAIR_TIME: f64 = 3.2;
const KEY_SUMS_TIME: f64 = 4.0 * (TILE * HEAD_DIM * size_of::<f32>()) as f64 / 4e6;

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

    /// How many equal parts the heads of queries that share keys are divided into, so that every multiprocessor has work: the
    /// fastest number by estimate. More than one part needs the sums of keys in memory, and a kernel that joins them.
    fn parts(&self, sms: usize) -> usize {
        let share = self.heads / self.kv_heads;
        let time = |parts: usize| {
            let units = self.units(parts);
            let pairs = self.cuts(units, sms).most * (share / parts);
            let sums = if parts > 1 { units * self.tiles() } else { 0 };
            pairs as f64 * PAIR_TIME + sums as f64 * KEY_SUMS_TIME
        };
        let divisors = (1..=share).filter(|parts| share.is_multiple_of(*parts));
        divisors.min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or(1)
    }

    /// Parts of heads of keys.
    fn units(&self, parts: usize) -> usize {
        self.batch * self.kv_heads * parts
    }

    /// Bytes of the sums of a head of queries.
    fn head_sums(&self) -> usize {
        self.seq * HEAD_DIM * size_of::<f32>()
    }

    /// Tiles of keys, or of queries, of a sequence.
    fn tiles(&self) -> usize {
        self.seq / TILE
    }

    /// Pairs of a tile of keys and one of queries that sees it, of one head of queries.
    fn pairs(&self) -> usize {
        self.tiles() * (self.tiles() + 1) / 2
    }

    /// Divides the strips of `units` units among blocks, one for each multiprocessor, such that the one with the most pairs has as few as
    /// possible. No block has strips inside a unit alone: with fewer units than multiprocessors each has one unit.
    fn cuts(&self, units: usize, sms: usize) -> Cuts {
        let (tiles, blocks) = (self.tiles(), units.min(sms).min(MOST_BLOCKS));
        // A tile of keys is seen by its own tile of queries and by those behind it.
        let seen = |strip: usize| tiles - strip % tiles;
        let filled = |most: usize| {
            let mut at = vec![0];
            let mut pairs = 0;
            for strip in 0..units * tiles {
                if pairs + seen(strip) > most {
                    at.push(strip as u32);
                    pairs = 0;
                }
                pairs += seen(strip);
            }
            at
        };
        // Two blocks with parts of a unit have sums of their own for it. Where that is too much memory, units stay whole.
        let share = self.batch * self.heads / units;
        if 2 * blocks * share * self.head_sums() > MOST_SUMS {
            let at = (0..=blocks).map(|block| (units * block / blocks * tiles) as u32).collect();
            return Cuts { at, most: units.div_ceil(blocks) * self.pairs() };
        }
        let (mut most, mut too_few) = (units.div_ceil(blocks) * self.pairs(), self.pairs() - 1);
        while most - too_few > 1 {
            let middle = usize::midpoint(most, too_few);
            if filled(middle).len() <= blocks { most = middle } else { too_few = middle }
        }
        let mut at = filled(most);
        at.push((units * tiles) as u32);
        Cuts { at, most }
    }

    /// Whether `units` units of work keep enough of the multiprocessors busy that this kernel is the fastest. Other kernels divide heads
    /// among blocks; on a full H200 this one takes 0.5 of their time at T = 1,024, 0.6 at 2,048 and 0.8 at 4,096 (docs/log.md), and 0.6,
    /// 0.75 and 0.97 of the time of sums in any order.
    fn fills(&self, units: usize, sms: usize, any_order: bool) -> bool {
        let percent = match (self.seq, any_order) {
            (..=1024, false) => 50,
            (..=1024, true) => 60,
            (..=2048, false) => 65,
            (..=2048, true) => 75,
            (_, false) => 85,
            (_, true) => 98,
        };
        100 * units * self.pairs() >= percent * self.cuts(units, sms).most * sms
    }

    /// Bytes of the sums of `d_q`: for each block, those of the heads of queries of a unit, and of another one where units are handed on.
    /// Then those of `d_k` and `d_v`, of each unit, where heads of keys are divided.
    fn sums_bytes(&self, parts: usize, sms: usize) -> [usize; 2] {
        let (units, head) = (self.units(parts), self.head_sums());
        let cuts = self.cuts(units, sms);
        let each = if cuts.within_units(self.tiles()) { 2 } else { 1 };
        let queries = cuts.blocks() * each * (self.heads / (self.kv_heads * parts)) * head;
        [queries, if parts > 1 { units * 2 * head } else { 0 }]
    }
}

/// The strips of each block: all tiles of keys of a unit, then those of the next one.
#[derive(Debug)]
struct Cuts {
    /// The first strip of each block, and the end of the last one's.
    at: Vec<u32>,
    /// Pairs of tiles of the block that has the most, of one head of queries.
    most: usize,
}

impl Cuts {
    fn blocks(&self) -> usize {
        self.at.len() - 1
    }

    /// Whether a block goes on with a unit that another has begun.
    fn within_units(&self, tiles: usize) -> bool {
        self.at.iter().any(|&cut| !(cut as usize).is_multiple_of(tiles))
    }

    /// The parameter of the kernel: `Cuts` of the file.
    fn words(&self) -> [u32; MOST_BLOCKS + 1] {
        std::array::from_fn(|block| self.at.get(block).copied().unwrap_or(0))
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
    let Some(sizes) = Sizes::new(op) else { return Ok(false) };
    let parts = sizes.parts(sms);
    let (units, [query_sums, key_sums]) = (sizes.units(parts), sizes.sums_bytes(parts, sms));
    if !sizes.fills(units, sms, cx.settings.fast) || query_sums + key_sums > MOST_SUMS {
        return Ok(false);
    }
    let [qkv, out, d_out, d_qkv] = [cx.ptr(op.qkv)?, cx.ptr(op.out)?, cx.ptr(op.d_out)?, cx.ptr(op.d_qkv)?];
    let aligned = [qkv, out, d_out, d_qkv].iter().all(|at| at.is_multiple_of(16));
    if !aligned || !may_run(&cx.device.info, cx.settings) {
        return Ok(false);
    }
    let Sizes { batch, seq, heads, kv_heads } = sizes;
    let (rows, cuts) = (batch * heads * seq, sizes.cuts(units, sms));
    let handed_words = cuts.blocks() * WARPS;
    let stats_bytes = 2 * rows * size_of::<f32>(); // two for each query
    // Sums of parts are not what is stored.
    let leaves_sums = parts == 1 && cx.bias_follows(op.d_qkv);
    let columns_bytes = match leaves_sums {
        true => batch * WARPS * (heads + 2 * kv_heads) * HEAD_DIM * size_of::<f32>(),
        false => 0,
    };
    let handed_bytes = handed_words * size_of::<u32>();
    let stats = cx.scratch(stats_bytes + query_sums + key_sums + columns_bytes + handed_bytes)?;
    let sums = stats + stats_bytes as u64;
    let of_keys = sums + query_sums as u64;
    let columns = of_keys + key_sums as u64;
    let handed = columns + columns_bytes as u64;
    if leaves_sums {
        *cx.partials = Some(Partials { op: cx.op, of: op.d_qkv, at: columns, rows: batch * WARPS });
    }
    let scale = 1.0 / (HEAD_DIM as f32).sqrt();

    let spec = spec(leaves_sums);
    let (each, threads) = STATS_BLOCK;
    let args = Args::new().ptr(stats).ptr(d_out).ptr(out).ptr(cx.ptr(op.lse)?).ptr(handed);
    let args = args.u32s([handed_words, seq, heads]);
    cx.launch(&spec, "flash_bwd_stats", Grid::linear(crate::flash::blocks(rows, each)?, threads), args)?;

    let map = |slot: Slot, at: u64, box_rows: u32| {
        let cols = slot.shape.dims().last().copied().unwrap_or(0);
        Matrix { at, rows: batch * seq, cols, bytes: DType::BF16.size() }.tensor_map(cx.device, box_rows)
    };
    let args = Args::new()
        .words(&map(op.qkv, qkv, TILE as u32)?)
        .words(&map(op.d_out, d_out, TILE as u32)?)
        .words(&map(op.d_qkv, d_qkv, STORE_ROWS)?)
        .words(&cuts.words())
        .ptr(stats)
        .ptr(sums)
        .ptr(of_keys)
        .ptr(columns)
        .ptr(handed)
        .u32s([seq, heads, kv_heads, parts])
        .f32(scale);
    cx.launch(&spec, "flash_bwd_wgmma", Grid::linear(cuts.blocks(), THREADS).shared(SHARED), args)?;
    if parts > 1 {
        let (threads, of_tile) = JOIN_BLOCK;
        let args = Args::new().ptr(d_qkv).ptr(of_keys).u32s([seq, heads, kv_heads, parts]).f32(scale);
        let grid = Grid::plane(batch * kv_heads, seq / TILE * of_tile, threads);
        cx.launch(&spec, "flash_bwd_join", grid, args)?;
    }
    tracing::debug!(
        "attention_bwd of {} heads of keys in {parts} parts, T {seq}: flash_bwd_wgmma, {} blocks",
        batch * kv_heads,
        cuts.blocks()
    );
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
        let fills = |batch, kv_heads| {
            let sizes = Sizes { batch, seq: 1024, heads: kv_heads, kv_heads };
            sizes.fills(sizes.units(sizes.parts(132)), 132, false)
        };
        assert!(fills(64, 12) && fills(8, 12) && fills(16, 6), "768, 96 and 96 heads");
        assert!(!fills(4, 12), "48 heads");
        assert!(
            fills(11, 12) && fills(12, 12),
            "132 heads, one for each block; 144 heads, some in two blocks"
        );
        let long =
            |seq, any_order| Sizes { batch: 8, seq, heads: 12, kv_heads: 12 }.fills(96, 132, any_order);
        assert!(long(1024, true) && long(2048, false) && !long(2048, true) && !long(4096, false), "96 heads");
    }

    #[test]
    fn heads_that_share_keys_are_divided_where_that_is_faster() {
        let parts = |batch, heads, kv_heads| Sizes { batch, seq: 1024, heads, kv_heads }.parts(132);
        assert_eq!(parts(64, 12, 12), 1, "nothing to divide");
        assert_eq!(parts(20, 12, 1), 6, "120 units of two heads each; 12 parts would have more sums");
        assert_eq!(parts(16, 32, 8), 1, "128 heads of keys are enough");
        assert_eq!(parts(20, 32, 8), 1, "160 heads of keys, cut where blocks are full");
        let sums = |seq, parts| Sizes { batch: 16, seq, heads: 32, kv_heads: 8 }.sums_bytes(parts, 132);
        assert_eq!(sums(1024, 1), [128 << 20, 0], "128 blocks, four heads each");
        assert_eq!(sums(1024, 2), [64 << 20, 128 << 20], "128 blocks, two units of two heads each");
        assert!(sums(8192, 1)[0] <= MOST_SUMS && sums(16384, 1)[0] > MOST_SUMS);
    }

    #[test]
    fn units_stay_whole_where_sums_would_take_too_much_memory() {
        let long = Sizes { batch: 32, seq: 4096, heads: 32, kv_heads: 8 };
        let cuts = long.cuts(long.units(1), 132);
        assert!(cuts.blocks() == 132 && !cuts.within_units(long.tiles()));
        assert_eq!((cuts.at[0], cuts.at[132], cuts.most), (0, 256 * 32, 2 * 528), "two units at most");
        assert!(long.sums_bytes(1, 132)[0] <= MOST_SUMS && long.fills(256, 132, false));
    }

    #[test]
    fn cuts_give_every_block_about_as_many_pairs() {
        for (seq, units, sms, most) in [
            (1024, 400, 132, 116), // 109.1 on average, 144 in whole units
            (1024, 950, 132, 261), // 259.1, 288
            (1024, 768, 132, 212), // 209.5, 216
            (1024, 133, 132, 44),  // 36.3, 72
            (2048, 256, 132, 272), // 263.8, 272
            (1024, 132, 132, 36),
            (1024, 50, 132, 36),
            (128, 300, 132, 3),
        ] {
            let sizes = Sizes { batch: units, seq, heads: 1, kv_heads: 1 };
            let (cuts, tiles) = (sizes.cuts(units, sms), sizes.tiles());
            assert!(cuts.at[0] == 0 && cuts.blocks() <= units.min(sms), "{units} units");
            assert_eq!(cuts.at.last().copied(), Some((units * tiles) as u32), "{units} units");
            let seen = |strip: u32| tiles - strip as usize % tiles;
            let pairs = |block: &[u32]| (block[0]..block[1]).map(seen).sum::<usize>();
            assert_eq!(cuts.at.windows(2).map(pairs).max(), Some(cuts.most), "{units} units");
            assert!(
                cuts.most <= most && cuts.most >= (units * sizes.pairs()).div_ceil(sms),
                "{units} units: {}",
                cuts.most
            );
            // What a block hands on is its first work, and what it takes over its last: it has a cut between units.
            let inside = |cut: u32| !(cut as usize).is_multiple_of(tiles);
            for block in cuts.at.windows(2).filter(|block| inside(block[0]) && inside(block[1])) {
                assert!(block[0] as usize / tiles < block[1] as usize / tiles, "{units} units: {block:?}");
            }
        }
    }
}
