//! Attention of new tokens over a cache.

use super::lower::Lower;
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::DType;
use ironhorse_core::op::AttentionCached;

/// `THREADS` of attention/cached.cu.
const THREADS: usize = 512;

fn spec(act: DType, vectors: bool) -> Result<Spec> {
    Spec::act_vectors("attention/cached.cu", act, vectors)
}

/// `THREADS` and `LANES` of attention/cached_split.cu.
const SPLIT_THREADS: usize = 256;
const LANES: usize = 8;
/// Threads of a block of attention/append.cu.
const APPEND_THREADS: u32 = 256;
/// Blocks to split positions for. Not the device's own number, so that every device sums in the same order.
const BLOCKS: usize = 512;
/// The most blocks of a head that are a cluster: the largest one that every device with clusters runs.
const CLUSTER: usize = 8;

fn split_spec(act: DType, head_dim: usize) -> Result<Spec> {
    Ok(Spec::act("attention/cached_split.cu", act)?.define("HEAD_DIM", head_dim as u32))
}

/// `SPAN` of attention/cached_split.cu: the positions that a block takes at a time. `None` for heads that are not one to
/// four vectors for each of the lanes.
fn span(act: DType, head_dim: usize) -> Option<usize> {
    let part = LANES * 16 / act.size();
    let takes = head_dim > 0 && head_dim.is_multiple_of(part) && head_dim <= 4 * part;
    takes.then(|| SPLIT_THREADS / LANES * (4 * part / head_dim))
}

/// How many blocks share the positions of a head. A number that clusters can have, unless that is less than half of the blocks and
/// too few for the context.
fn splits(rows: usize, context: usize, span: usize) -> usize {
    let (spans, most) = (context.div_ceil(span), (BLOCKS / rows).max(1));
    if spans > CLUSTER && rows * CLUSTER < BLOCKS / 2 {
        return spans.min(most);
    }
    spans.next_power_of_two().min(1 << most.ilog2()).min(CLUSTER)
}

/// The kernel that joins the parts of a head in a cluster, if so many blocks can be one. Not for tokens that have places of their own: it
/// has too few registers there.
fn clustered(spec: Spec, splits: usize) -> Spec {
    let takes = splits > 1 && splits <= CLUSTER && splits.is_power_of_two();
    if takes { spec.define("CLUSTER", splits as u32) } else { spec }
}

/// The kernels that attend to a window where it is shorter than the context, and the window, which others ignore.
fn windowed(spec: Spec, window: Option<usize>, context: usize) -> (Spec, usize) {
    match window.filter(|&window| window < context) {
        Some(window) => (spec.define("WINDOWED", 1), window),
        None => (spec, context),
    }
}

fn append_spec(act: DType) -> Result<Spec> {
    Spec::act("attention/append.cu", act)
}

/// The kernels for tokens that have places of their own in the cache.
fn placed(spec: Spec, op: &AttentionCached) -> Spec {
    if op.positions.is_some() { spec.define("PLACED", 1) } else { spec }
}

/// Stores the keys and values of tokens that have places of their own: one of them may attend to another.
fn append(cx: &mut Lower<'_>, op: &AttentionCached) -> Result<()> {
    let (&[sequences, context, width], Some(_)) = (op.keys.shape.dims(), op.positions) else { return Ok(()) };
    let slots = [Some(op.keys), Some(op.values), Some(op.qkv), op.rows, op.positions];
    let args = cx.optional_pointers(&slots)?.ptr(cx.fault);
    let args = args.u32s([sequences, context, width, op.out.shape.cols()]);
    let grid = Grid::linear(op.out.shape.rows(), APPEND_THREADS);
    cx.launch(&append_spec(op.out.dtype)?, "cache_append", grid, args)
}

/// With the positions of a head split over blocks.
fn split(cx: &mut Lower<'_>, op: &AttentionCached, span: usize) -> Result<()> {
    let [sequences, context, width] = *op.keys.shape.dims() else { return Ok(()) };
    let (rows, head_dim) = (op.out.shape.rows() * op.heads, width / op.kv_heads);
    let splits = splits(rows, context, span);
    let partials = cx.scratch(rows * splits * (head_dim + 2) * size_of::<f32>())?;
    let ended = cx.upload(&vec![0; rows * size_of::<u32>()])?;
    let args = cx.pointers(&[op.out, op.keys, op.values, op.qkv])?.ptr(partials).ptr(ended).ptr(cx.scalars);
    let args = cx.append(args, &[op.rows, op.positions])?;
    let (spec, window) = windowed(split_spec(op.out.dtype, head_dim)?, op.window, context);
    let args = args.u32s([op.heads, op.kv_heads, context, rows, splits, window, sequences]);
    let joins = cx.device.info.has_clusters() && op.positions.is_none();
    let spec = if joins { clustered(spec, splits) } else { spec };
    let kernel = placed(spec, op).kernel("attention_cached_split");
    let grid = Grid::linear(rows * splits, SPLIT_THREADS as u32);
    let early: &[_] = if op.positions.is_some() { &[] } else { &[op.keys, op.values] };
    cx.launch_chained(&kernel, grid, args, early)
}

pub(crate) fn attention_cached(cx: &mut Lower<'_>, op: &AttentionCached) -> Result<()> {
    let [sequences, context, width] = *op.keys.shape.dims() else { return Ok(()) };
    let tokens = op.out.shape.rows();
    if tokens * sequences * context * width == 0 {
        return Ok(());
    }
    append(cx, op)?;
    let head_dim = width / op.kv_heads;
    if let Some(span) = span(op.out.dtype, head_dim) {
        return split(cx, op, span);
    }
    let whole = 16 / op.out.dtype.size();
    // Heads are contiguous, so all of them are aligned if one head is a multiple of a vector.
    let vectors = head_dim.is_multiple_of(whole);
    let per_thread = if vectors { whole } else { 1 };
    let scores = cx.scratch(tokens * op.heads * context * size_of::<f32>())?;
    let args = cx.pointers(&[op.out, op.keys, op.values, op.qkv])?.ptr(scores).ptr(cx.scalars);
    let args = cx.append(args, &[op.rows, op.positions])?;
    let (spec, window) = windowed(spec(op.out.dtype, vectors)?, op.window, context);
    let args = args.u32s([op.heads, op.kv_heads, head_dim, context, window, sequences]);
    let shared = (head_dim.next_multiple_of(4) + THREADS * per_thread) * size_of::<f32>();
    let grid = Grid::linear(tokens * op.heads, THREADS as u32).shared(shared);
    cx.launch(&placed(spec, op), "attention_cached", grid, args)
}

pub(super) fn specs() -> Vec<Spec> {
    let types = [DType::F32, DType::BF16];
    let widths = |act| [64, 128, 256].into_iter().filter(move |&width| span(act, width).is_some());
    let split: Vec<Spec> =
        types.into_iter().flat_map(|act| widths(act).flat_map(move |width| split_spec(act, width))).collect();
    let windowed = |spec: Spec| [spec.clone(), spec.define("WINDOWED", 1)];
    let clusters = split.clone().into_iter().flat_map(windowed);
    let clusters = clusters.flat_map(|spec| [2, 4, CLUSTER].map(|splits| clustered(spec.clone(), splits)));
    let all = Spec::all_vectors(spec).into_iter().chain(split).flat_map(windowed);
    let all = all.flat_map(|spec| [spec.clone(), spec.define("PLACED", 1)]).chain(clusters);
    all.chain(types.into_iter().flat_map(append_spec)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_of_a_head_are_a_cluster_unless_they_would_be_too_few() {
        let cases = [
            (25, 1024, 8), // d48, one sequence
            (25, 500, 4),
            (25, 100, 1),
            (200, 1024, 2), // and eight of them
            (100, 1024, 4),
            (32, 40_960, 8), // half of the blocks
            (12, 4096, 32),  // less
            (12, 40_960, 42),
            (600, 4096, 1),
        ];
        for (rows, context, expected) in cases {
            assert_eq!(splits(rows, context, 128), expected, "{rows} heads, {context} positions");
        }
    }
}
