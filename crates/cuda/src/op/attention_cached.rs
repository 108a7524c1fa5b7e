//! Attention of new tokens over a cache.

use super::flash::operands;
use super::lower::Lower;
use crate::args::Grid;
use crate::flash::{Operands, Path, Plan, Step};
use crate::kernels::{Spec, ctype};
use crate::{Result, Settings};
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

/// `GROUP` of attention/places.cuh: the most tokens of a sequence that a block takes on tensor cores.
const GROUP: usize = 64;
/// The most blocks of attention/cached_split.cu where tensor cores take most tokens: enough to fill a device several times.
const MOST_BLOCKS: usize = 2048;

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

/// The kernel that joins the parts of a head in a cluster, if `splits` blocks can be a cluster. It is not for tokens that have places of
/// their own: it has too few registers there.
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

/// How tensor cores take tokens that follow each other in a sequence, as those of a prompt do. `None` for steps too small to have a
/// whole group of such tokens, and for head sizes and types without tiles.
fn runs(op: &AttentionCached, settings: &Settings, shared: usize) -> Option<Plan> {
    let half = operands(op.out.dtype, settings).filter(|&operands| operands == Operands::Half);
    let path = Path::choose(half, op.out.shape.cols() / op.heads, shared);
    let takes = matches!(path, Path::Tensor(..)) && op.positions.is_some() && op.out.shape.rows() >= GROUP;
    takes.then(|| path.plan(Step::Fwd))
}

/// The kernel that takes them.
fn runs_spec(plan: &Plan, act: DType) -> Result<Spec> {
    Ok(plan.spec(ctype(act)?).define("EAGER", 1).define("CACHED", 1))
}

/// Attention of the tokens that tensor cores take.
fn of_runs(cx: &mut Lower<'_>, op: &AttentionCached, plan: &Plan) -> Result<()> {
    let [sequences, context, _] = *op.keys.shape.dims() else { return Ok(()) };
    let tokens = op.out.shape.rows();
    let slots = [Some(op.out), Some(op.keys), Some(op.values), Some(op.qkv), op.rows, op.positions];
    let (spec, window) = windowed(runs_spec(plan, op.out.dtype)?, op.window, context);
    let args = cx.optional_pointers(&slots)?;
    let args = args.u32s([tokens, op.heads, op.kv_heads, context, window, sequences]);
    let grid = Grid::linear(tokens.div_ceil(GROUP) * op.heads, plan.threads).shared(plan.shared);
    cx.launch(&spec, "flash_cached", grid, args)
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

/// Attention with the positions of a head split over blocks.
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
    let (mut spec, mut blocks) = (placed(spec, op), rows * splits);
    if let Some(plan) = runs(op, cx.settings, cx.device.info.shared_per_block) {
        of_runs(cx, op, &plan)?;
        (spec, blocks) = (spec.define("RUNS", 1), blocks.min(MOST_BLOCKS));
    }
    let kernel = spec.kernel("attention_cached_split");
    let grid = Grid::linear(blocks, SPLIT_THREADS as u32);
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
    let tiles = [64, 128].map(|width| Path::Tensor(Operands::Half, width).plan(Step::Fwd));
    let runs = tiles.into_iter().flat_map(|plan| runs_spec(&plan, DType::BF16)).flat_map(windowed);
    let rest = [64, 128].into_iter().flat_map(|width| split_spec(DType::BF16, width)).flat_map(windowed);
    let rest = rest.map(|spec| spec.define("PLACED", 1).define("RUNS", 1));
    all.chain(runs).chain(rest).chain(types.into_iter().flat_map(append_spec)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Attention;
    use ironhorse_core::{Pool, Shape, Slot};

    /// Decode steps have fewer tokens than a group, and keep to one launch.
    #[test]
    fn tensor_cores_take_prompts_in_bf16() {
        let takes = |dtype, head_dim: usize, tokens: usize, placed: bool, attention| {
            let slot = |shape: Shape, dtype| Slot { pool: Pool::Io, offset: 0, shape, dtype };
            let cache = slot([2, 300, 2 * head_dim].into(), dtype);
            let places = placed.then(|| slot([tokens, 1].into(), DType::I32));
            let op = AttentionCached {
                out: slot([tokens, 1, 8 * head_dim].into(), dtype),
                keys: cache,
                values: cache,
                qkv: slot([tokens, 1, 12 * head_dim].into(), dtype),
                rows: places,
                positions: places,
                heads: 8,
                kv_heads: 2,
                window: None,
            };
            let plan = runs(&op, &Settings { attention, ..Settings::default() }, 99 << 10);
            plan.map(|plan| (plan.width, plan.shared))
        };
        let auto = Attention::Auto;
        assert_eq!(takes(DType::BF16, 128, 64, true, auto), Some((Some(("HD", 128)), 5 * 64 * 256)));
        assert_eq!(takes(DType::BF16, 64, 1024, true, auto), Some((Some(("HD", 64)), 6 * 64 * 128)));
        for (dtype, head_dim, tokens, placed, attention) in [
            (DType::BF16, 128, GROUP - 1, true, auto),
            (DType::BF16, 128, 64, false, auto),
            (DType::BF16, 128, 64, true, Attention::Plain),
            (DType::BF16, 256, 64, true, auto),
            (DType::F32, 128, 64, true, auto),
        ] {
            assert_eq!(
                takes(dtype, head_dim, tokens, placed, attention),
                None,
                "{dtype} {head_dim} {tokens}"
            );
        }
    }

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
