//! Attention with any strides and lengths: by cuDNN where it is present and takes the shape, else by the kernels that
//! [`crate::flash`] chooses.

use super::attention_cudnn;
use super::layout::{aligned, lane_width, pointers};
use super::{Launch, OnStream};
use crate::args::{Args, Grid};
use crate::flash::{ANY, ANY_THREADS, Group, Operands, Path, Step, blocks, wide_lanes};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Attention, AttentionBwd, AttentionShape, Float, Strides};

/// Positions of a sequence that kernels count to.
const MOST_POSITIONS: usize = 1 << 30;

impl Launch for Attention {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { q, k, v, out, lse, shape } = self;
        check(shape)?;
        if shape.batch * shape.heads * shape.q_len == 0 {
            return Ok(());
        }
        let aligned = rows_are_aligned(shape, &[*q, *k, *v, *out]);
        if attention_cudnn::forward(at, self, aligned)? {
            return Ok(());
        }
        let call = Flash { shape, float: q.float, aligned, l2: at.info().l2 };
        call.launch(at, Step::Fwd, pointers([*out, *lse, *q, *k, *v]))
    }
}

impl Launch for AttentionBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { d_out, q, k, v, out, lse, d_q, d_k, d_v, ref shape, any_order: _ } = *self;
        check(shape)?;
        let queries = shape.batch * shape.heads * shape.q_len;
        let keys = shape.batch * shape.kv_heads * shape.kv_len;
        let for_keys = keys > 0 && (d_k.is_some() || d_v.is_some());
        if shape.heads == 0 && for_keys {
            return Err(Error::Unsupported(
                "attention_bwd: q has 0 heads, but gradients of keys or values are wanted".into(),
            ));
        }
        let aligned = rows_are_aligned(shape, &[d_out, q, k, v, out, d_q, d_k, d_v]);
        let wanted = d_q.is_some() || d_k.is_some() || d_v.is_some();
        if wanted && attention_cudnn::backward(at, self, aligned)? {
            return Ok(());
        }
        let call = Flash { shape, float: q.float, aligned, l2: at.info().l2 };
        let delta = at.scratch(queries * q.float.acc().size())?;
        if queries > 0 {
            call.row_sums(at, delta, d_out, out)?;
        }
        let args = pointers([d_q, d_k, d_v, d_out, q, k, v, lse]).ptr(delta);
        // First d_q, which may correct delta. Without it d_k is as accurate, but may differ in its last bits.
        if queries > 0 && d_q.is_some() {
            call.launch(at, Step::BwdQ, args.clone())?;
        }
        if for_keys { call.launch(at, Step::BwdKv, args) } else { Ok(()) }
    }
}

/// Whether kernels can count what there is.
fn check(shape: &AttentionShape) -> Result<()> {
    let AttentionShape { batch, heads, kv_heads, q_len, kv_len, head_dim, .. } = *shape;
    let fits = q_len < MOST_POSITIONS && kv_len < MOST_POSITIONS && head_dim < MOST_POSITIONS;
    let fits = fits && batch.checked_mul(heads.max(kv_heads)).is_some_and(|n| n <= u32::MAX as usize);
    if !fits {
        return Err(Error::Unsupported(format!(
            "attention: batch {batch}, heads {heads}, head_dim {head_dim}, {q_len} queries and {kv_len} keys are too many; \
             expected lengths and head_dim below 2^30, batch * heads below 2^32"
        )));
    }
    if heads > 0 && (kv_heads == 0 || !heads.is_multiple_of(kv_heads)) {
        return Err(Error::Unsupported(format!(
            "attention: {heads} heads of queries, expected a multiple of the {kv_heads} heads of keys"
        )));
    }
    Ok(())
}

/// Whether every row of every array starts at a multiple of 16 bytes and has whole vectors of them.
fn rows_are_aligned(shape: &AttentionShape, arrays: &[Array]) -> bool {
    let AttentionShape { batch, heads, kv_heads, q_len, kv_len, head_dim, q, k, v, out, .. } = *shape;
    let Some(first) = arrays.first() else { return false };
    let vector = lane_width(first.float);
    let steps = |s: Strides, heads: usize, len: usize| [(s.batch, batch), (s.head, heads), (s.position, len)];
    let queries = [steps(q, heads, q_len), steps(out, heads, q_len)];
    let keys = [steps(k, kv_heads, kv_len), steps(v, kv_heads, kv_len)];
    let mut all = queries.iter().chain(&keys).flatten();
    head_dim.is_multiple_of(vector)
        && aligned(arrays)
        && all.all(|&(stride, count)| count <= 1 || stride.is_multiple_of(vector))
}

/// One attention on its way to the stream.
struct Flash<'a> {
    shape: &'a AttentionShape,
    float: Float,
    /// See [`rows_are_aligned`].
    aligned: bool,
    /// Bytes of L2.
    l2: usize,
}

impl Flash<'_> {
    /// Heads of the whole batch that a kernel has blocks for, and positions of each: those whose rows it writes.
    fn owned(&self, step: Step) -> (usize, usize) {
        let AttentionShape { batch, heads, kv_heads, q_len, kv_len, .. } = *self.shape;
        if step == Step::BwdKv { (batch * kv_heads, kv_len) } else { (batch * heads, q_len) }
    }

    /// Puts one of the three kernels on the stream; `args` are its addresses.
    fn launch(&self, at: &OnStream<'_>, step: Step, args: Args) -> Result<()> {
        let path = path(self.float, self.shape, self.aligned, at.info().shared_per_block);
        let plan = path.plan(step);
        let (heads, positions) = self.owned(step);
        let grid = Grid::linear(path.blocks(step, heads, positions)?, plan.threads).shared(plan.shared);
        at.launch(
            &strided(plan.spec(self.float.ctype())).kernel(plan.name),
            grid,
            args.words(&self.words(step)),
        )
    }

    /// Sums `d_out·out` per head and query.
    fn row_sums(&self, at: &OnStream<'_>, delta: u64, d_out: Array, out: Array) -> Result<()> {
        let (heads, positions) = self.owned(Step::Fwd);
        let args = Args::new().ptr(delta).arrays([d_out, out]);
        let wide = wide_lanes(self.shape.head_dim, self.float.size()).filter(|_| self.aligned);
        let (name, args, lanes) = match wide {
            Some(lanes) => ("flash_delta_wide", args.u32(lanes as u32), lanes),
            None => ("flash_delta", args, 32),
        };
        let grid = Grid::linear(blocks(heads * positions * lanes, ANY_THREADS as usize)?, ANY_THREADS);
        let kernel = strided(Spec::of(ANY, self.float)).kernel(name);
        at.launch(&kernel, grid, args.words(&self.words(Step::Fwd)))
    }

    /// `Shape` of attention/strided.cuh, in its order.
    fn words(&self, step: Step) -> Vec<u32> {
        let AttentionShape { heads, kv_heads, q_len, kv_len, head_dim, scale, causal, .. } = *self.shape;
        let (total, _) = self.owned(step);
        let passed = if step == Step::BwdKv { q_len } else { kv_len };
        let share = heads.checked_div(kv_heads).unwrap_or(0).max(1);
        let bytes = 2 * passed * head_dim * self.float.size();
        let group = Group { l2: self.l2, bytes, share, total }.heads(step);
        // Every query sees the keys up to its own number plus this.
        let shift = if causal { kv_len as i64 - q_len as i64 } else { kv_len as i64 } as i32;
        let both = |x: u64| [x as u32, (x >> 32) as u32];
        let strides = [self.shape.q, self.shape.k, self.shape.v, self.shape.out];
        let strides = strides.into_iter().flat_map(|s| [s.batch, s.head, s.position]);
        let mut words: Vec<u32> = strides.flat_map(|stride| both(stride as u64)).collect();
        words.extend(both(scale.to_bits()));
        // Hidden scores are -inf, and stay so times anything but 0.
        let steep = (scale as f32).abs().max(f32::MIN_POSITIVE);
        let steep = if scale.is_nan() { f32::NAN } else { steep };
        words.extend([(scale as f32).to_bits(), steep.to_bits(), q_len as u32, kv_len as u32]);
        words.extend([shift.cast_unsigned(), heads as u32, kv_heads as u32, head_dim as u32]);
        words.extend([total as u32, group as u32, self.aligned.into(), 0]);
        words
    }
}

/// Which kernels run an attention: without keys or without queries there is nothing to fill tiles with.
fn path(float: Float, shape: &AttentionShape, aligned: bool, shared: usize) -> Path {
    if float == Float::F64 || shape.q_len == 0 || shape.kv_len == 0 || shape.head_dim == 0 {
        return Path::Any;
    }
    Path::choose(operands(float).filter(|_| aligned), shape.head_dim, shared)
}

/// What tensor cores are handed.
fn operands(float: Float) -> Option<Operands> {
    match float {
        Float::BF16 | Float::F16 => Some(Operands::Half),
        Float::F32 => Some(Operands::TwoTf32),
        Float::F64 => None,
    }
}

/// A file of attention for tensors with strides of their own.
fn strided(spec: Spec) -> Spec {
    spec.define("EAGER", 1)
}

/// Each of the tiles with each type.
pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for float in Float::ALL {
        for head_dim in [16, 32, 48, 64, 80, 96, 112, 128, 24, 72, 256, 257] {
            for operands in [operands(float), None] {
                let any = float == Float::F64;
                let path = if any { Path::Any } else { Path::choose(operands, head_dim, usize::MAX) };
                specs.extend(Step::ALL.map(|step| strided(path.plan(step).spec(float.ctype()))));
            }
        }
    }
    specs.sort();
    specs.dedup();
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> AttentionShape {
        let (q, kv) = (Strides::position_major(8, 100, 64), Strides::head_major(2, 300, 64));
        AttentionShape {
            batch: 3,
            heads: 8,
            kv_heads: 2,
            q_len: 100,
            kv_len: 300,
            head_dim: 64,
            scale: -0.125,
            causal: true,
            q,
            k: kv,
            v: kv,
            out: q,
        }
    }

    #[test]
    fn the_struct_has_the_size_and_order_of_the_kernels() {
        let at = shape();
        let call = Flash { shape: &at, float: Float::BF16, aligned: true, l2: 50 << 20 };
        let words = call.words(Step::BwdKv);
        assert_eq!(words.len() * 4, 152);
        assert_eq!(words[..6], [51200, 0, 64, 0, 512, 0]);
        assert_eq!(words[26..28], [(-0.125_f32).to_bits(), 0.125_f32.to_bits()]);
        assert_eq!(words[28..34], [100, 300, 200, 8, 2, 64]);
        assert_eq!(words[34..], [6, 6, 1, 0]);
        let all = AttentionShape { causal: false, scale: 0.0, ..at };
        let rest = Flash { shape: &all, float: Float::F32, aligned: false, l2: 1 }.words(Step::Fwd);
        assert_eq!(rest[26..31], [0, f32::MIN_POSITIVE.to_bits(), 100, 300, 300]);
    }

    #[test]
    fn tensor_cores_need_aligned_rows() {
        let array = |at: usize| Array { at: std::ptr::without_provenance_mut(at), float: Float::BF16 };
        let at = shape();
        assert!(rows_are_aligned(&at, &[array(32)]));
        assert!(!rows_are_aligned(&at, &[array(32), array(8)]));
        let odd = Strides { position: 68, ..at.q };
        assert!(!rows_are_aligned(&AttentionShape { q: odd, ..at }, &[array(32)]));
        assert!(rows_are_aligned(&AttentionShape { q: odd, out: odd, q_len: 1, ..at }, &[array(32)]));
        assert!(!rows_are_aligned(&AttentionShape { head_dim: 60, ..at }, &[array(32)]));
        assert_eq!(path(Float::F16, &at, true, usize::MAX), Path::Tensor(Operands::Half, 64));
        assert_eq!(path(Float::F32, &at, true, usize::MAX), Path::Tensor(Operands::TwoTf32, 64));
        assert_eq!(path(Float::F16, &at, false, usize::MAX), Path::Tiles(64));
        assert_eq!(path(Float::F64, &at, true, usize::MAX), Path::Any);
        assert_eq!(path(Float::F32, &AttentionShape { kv_len: 0, ..at }, true, usize::MAX), Path::Any);
    }

    #[test]
    fn heads_of_keys_divide_those_of_queries() {
        assert!(check(&shape()).is_ok());
        assert!(check(&AttentionShape { kv_heads: 3, ..shape() }).is_err());
        assert!(check(&AttentionShape { kv_heads: 0, ..shape() }).is_err());
        assert!(check(&AttentionShape { q_len: 1 << 30, ..shape() }).is_err());
    }
}
