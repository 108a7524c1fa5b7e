//! Embedding of tokens, with learned positions or without.

use super::elementwise::ctype;
use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{EmbeddingBwd, EmbeddingFwd};
use ironhorse_core::{DType, Slot};

/// Warps of a forward block, a token each.
const WARPS: usize = 8;
/// `WINDOW`, `SORT_BLOCK`, `DIGITS` and the bits of a digit in embedding/bwd.cu.
pub(crate) const WINDOW: usize = 32;
pub(crate) const SORT_BLOCK: usize = 1024;
pub(crate) const DIGITS: usize = 256;
pub(crate) const DIGIT_BITS: u32 = 8;

fn fwd_spec(act: DType) -> Result<Spec> {
    Ok(Spec::new("embedding/fwd.cu").define("ACT", ctype(act)?))
}

fn bwd_spec(act: DType, grad: DType, vectors: bool) -> Result<Spec> {
    let spec = Spec::new("embedding/bwd.cu").define("ACT", ctype(act)?).define("GRAD", ctype(grad)?);
    Ok(if vectors { spec.define("VECTORS", 1) } else { spec })
}

pub(crate) fn embedding_fwd(cx: &mut Lower<'_>, op: &EmbeddingFwd) -> Result<()> {
    let (rows, seq, width) = (op.tokens.numel(), op.tokens.shape.cols(), op.wte.shape.cols());
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let mut args = Args::new();
    for slot in [op.out, op.tokens, op.wte] {
        args = args.ptr(cx.ptr(slot)?);
    }
    args = args.ptr(cx.opt(op.wpe)?.unwrap_or(0)).ptr(cx.scalars).ptr(cx.fault);
    for size in [rows, seq, width, op.vocab, op.wpe.map_or(0, |wpe| wpe.shape.rows())] {
        args = args.u32(size as u32);
    }
    let function = cx.kernel(&fwd_spec(op.out.dtype)?, "embedding_fwd")?;
    let grid = Grid::linear(rows.div_ceil(WARPS), 32 * WARPS as u32);
    cx.launch("embedding_fwd", function, grid, args.u32(op.at_position.into()));
    Ok(())
}

/// What the launches of one backward share.
struct Bwd<'a> {
    op: &'a EmbeddingBwd,
    spec: Spec,
    /// Positions, columns, rows of the table.
    n: usize,
    width: usize,
    vocab: usize,
    /// Elements a thread takes.
    vector: usize,
}

/// The scratch memory of a backward.
struct Space {
    counts: u64,
    /// Two of each: a pass sorts from one into the other.
    keys: [u64; 2],
    positions: [u64; 2],
    edges: u64,
}

pub(crate) fn embedding_bwd(cx: &mut Lower<'_>, op: &EmbeddingBwd) -> Result<()> {
    let width = op.d_wte.shape.cols();
    if width == 0 {
        return Ok(());
    }
    let whole = 16 / op.d_out.dtype.size();
    let vectors = width.is_multiple_of(whole);
    let bwd = Bwd {
        op,
        spec: bwd_spec(op.d_out.dtype, op.d_wte.dtype, vectors)?,
        n: op.tokens.numel(),
        width,
        vocab: op.d_wte.shape.rows(),
        vector: if vectors { whole } else { 1 },
    };
    if let Some(d_wpe) = op.d_wpe {
        positions(cx, &bwd, d_wpe)?;
    }
    if !cx.adds(op.accum_wte) {
        let at = cx.ptr(op.d_wte)?;
        cx.zero(at, op.d_wte.bytes());
    }
    if bwd.n == 0 {
        return Ok(());
    }
    let space = space(cx, &bwd)?;
    let (keys, sorted) = sort(cx, &bwd, &space)?;
    windows(cx, &bwd, &space, keys, sorted)
}

/// `d_wpe`.
fn positions(cx: &mut Lower<'_>, bwd: &Bwd<'_>, d_wpe: Slot) -> Result<()> {
    let (op, seq, context) = (bwd.op, bwd.op.tokens.shape.cols(), d_wpe.shape.rows());
    let batch = bwd.n.checked_div(seq).unwrap_or(0);
    let mut args = Args::new().ptr(cx.ptr(d_wpe)?).ptr(cx.ptr(op.d_out)?);
    for size in [batch, seq, context, bwd.width] {
        args = args.u32(size as u32);
    }
    let args = args.u32(cx.adds(op.accum).into());
    let function = cx.kernel(&bwd.spec, "embedding_bwd_positions")?;
    let grid = Grid::linear((context * bwd.width).div_ceil(128 * bwd.vector), 128);
    cx.launch("embedding_bwd_positions", function, grid, args);
    Ok(())
}

fn space(cx: &mut Lower<'_>, bwd: &Bwd<'_>) -> Result<Space> {
    let list = (bwd.n * size_of::<u32>()).next_multiple_of(256);
    let counts = DIGITS * bwd.n.div_ceil(SORT_BLOCK) * size_of::<u32>();
    let edges = 2 * bwd.n.div_ceil(WINDOW) * bwd.width * size_of::<f32>();
    let start = cx.scratch(4 * list + counts.next_multiple_of(256) + edges)?;
    let part = |index: usize| start + (index * list) as u64;
    Ok(Space {
        keys: [part(0), part(1)],
        positions: [part(2), part(3)],
        counts: part(4),
        edges: part(4) + counts.next_multiple_of(256) as u64,
    })
}

/// Sorts positions by token, equal ones in the order they stand; returns the addresses of tokens and positions.
fn sort(cx: &mut Lower<'_>, bwd: &Bwd<'_>, space: &Space) -> Result<(u64, u64)> {
    let (n, vocab) = (bwd.n as u32, bwd.vocab as u32);
    let blocks = bwd.n.div_ceil(SORT_BLOCK);
    let grid = Grid::linear(blocks, SORT_BLOCK as u32);
    let [count, scan, scatter] =
        ["sort_count", "sort_scan", "sort_scatter"].map(|name| cx.kernel(&bwd.spec, name));
    let (count, scan, scatter) = (count?, scan?, scatter?);
    // `vocab` itself is the key of a token outside the vocabulary.
    let passes = (u32::BITS - vocab.leading_zeros()).div_ceil(DIGIT_BITS).max(1);
    let (mut keys, mut from) = (cx.ptr(bwd.op.tokens)?, 0);
    for pass in 0..passes {
        let (shift, to) = (pass * DIGIT_BITS, (pass % 2) as usize);
        let args = Args::new().ptr(space.counts).ptr(keys).u32(n).u32(vocab).u32(shift).ptr(cx.fault);
        cx.launch("sort_count", count, grid, args);
        let args = Args::new().ptr(space.counts).u32((DIGITS * blocks) as u32);
        cx.launch("sort_scan", scan, Grid::linear(1, 1024), args);
        let args = Args::new()
            .ptr(space.keys[to])
            .ptr(space.positions[to])
            .ptr(keys)
            .ptr(from)
            .ptr(space.counts)
            .u32(n)
            .u32(vocab)
            .u32(shift);
        cx.launch("sort_scatter", scatter, grid, args);
        (keys, from) = (space.keys[to], space.positions[to]);
    }
    Ok((keys, from))
}

/// `d_wte` from the sorted positions.
fn windows(cx: &mut Lower<'_>, bwd: &Bwd<'_>, space: &Space, keys: u64, sorted: u64) -> Result<()> {
    let (d_wte, d_out) = (cx.ptr(bwd.op.d_wte)?, cx.ptr(bwd.op.d_out)?);
    let vectors = bwd.width.div_ceil(bwd.vector);
    let windows = bwd.n.div_ceil(WINDOW) as u32;
    let sizes = |mut args: Args| {
        for size in [bwd.n, bwd.vocab, bwd.width] {
            args = args.u32(size as u32);
        }
        args
    };
    let threads = vectors.next_multiple_of(32).min(256);
    let grid = Grid {
        grid: [windows, vectors.div_ceil(threads) as u32, 1],
        block: [threads as u32, 1, 1],
        shared: 0,
    };
    let args = sizes(Args::new().ptr(d_wte).ptr(space.edges).ptr(d_out).ptr(keys).ptr(sorted));
    let function = cx.kernel(&bwd.spec, "embedding_bwd_windows")?;
    cx.launch("embedding_bwd_windows", function, grid, args);
    let grid = Grid { grid: [windows, vectors.div_ceil(32) as u32, 1], block: [256, 1, 1], shared: 0 };
    let args = sizes(Args::new().ptr(d_wte).ptr(space.edges).ptr(keys));
    let function = cx.kernel(&bwd.spec, "embedding_bwd_joins")?;
    cx.launch("embedding_bwd_joins", function, grid, args);
    Ok(())
}

pub(super) fn specs() -> Vec<Spec> {
    use DType::{BF16, F32};
    let mut specs: Vec<Spec> = [F32, BF16].into_iter().filter_map(|act| fwd_spec(act).ok()).collect();
    for (act, grad) in [(F32, F32), (BF16, BF16), (BF16, F32)] {
        specs.extend([false, true].into_iter().filter_map(|vectors| bwd_spec(act, grad, vectors).ok()));
    }
    specs
}
