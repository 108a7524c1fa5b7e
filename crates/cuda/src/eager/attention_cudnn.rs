//! Attention by cuDNN for eager ops: started once per GPU; plans are kept per shape and strides, for all threads.

use super::OnStream;
use super::layout::address;
use crate::cudnn::{ALIGNMENT, BF16, F16};
use crate::cudnn::{Backward, Direction, DqSum, Execution, Lengths, Role, Session, Shape, Steps, is_refusal};
use crate::launch::LibraryCall;
use crate::{Error, ErrorKind, Result};
use ironhorse_core::eager::{Array, Attention, AttentionBwd, AttentionShape, Float, Strides};
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The most scratch memory that is taken for a backward; our own kernels need next to none.
const MOST_SCRATCH: usize = 1 << 30;
/// The variable that keeps eager attention on our own kernels, if it is `own`.
const CHOICE: &str = "IRONHORSE_ATTENTION";
/// The fewest multiply-adds in one product that cuDNN is asked for. Below that our own kernels are as fast, and cost the host less.
const LEAST_WORK: usize = 1 << 26;
/// The fewest queries and keys that cuDNN is asked for.
const LEAST_LEN: usize = 128;
/// The most different refusals that are logged.
const MOST_TOLD: usize = 64;
/// Addresses within scratch memory are multiples of this.
const ALIGN: usize = 256;

/// cuDNN of all GPUs, and the refusals that were logged.
#[derive(Default)]
struct Known {
    sessions: HashMap<usize, Result<Session>>,
    told: HashSet<String>,
}

// SAFETY: everything in it is used behind the lock of `KNOWN` only, by one thread at a time, and nothing of it leaves that
// lock; cuDNN allows a handle and its descriptors to be used by several threads one after the other.
unsafe impl Send for Known {}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

/// Puts the forward on the stream; `false` if cuDNN is absent or does not take it: then nothing was done.
pub(super) fn forward(at: &OnStream<'_>, op: &Attention, aligned: bool) -> Result<bool> {
    let Some(shape) = asked(&op.shape, op.q.float, aligned, op.lse) else { return Ok(false) };
    let workspace =
        with_session(at, |session| session.plan(Direction::Forward, &shape).map(|plan| plan.workspace));
    let Some(workspace) = accepted("forward", workspace)? else { return Ok(false) };
    let mut room = Room::default();
    let (stats, workspace) =
        (room.unless(op.lse, shape.rows().dims.iter().product::<i64>() as usize * 4), room.of(workspace));
    let Some(start) = room.take(at)? else { return Ok(false) };
    let at_roles = [
        (Role::Q, address(op.q)),
        (Role::K, address(op.k)),
        (Role::V, address(op.v)),
        (Role::Out, address(op.out)),
        (Role::Stats, stats.map_or(address(op.lse), |offset| start + offset)),
    ];
    with_session(at, |session| {
        let plan = session.plan(Direction::Forward, &shape)?;
        Execution::new(&plan, &session.handle, &at_roles, start + workspace)?.enqueue(&at.stream)
    })?;
    Ok(true)
}

/// As [`forward`], for the backward.
pub(super) fn backward(at: &OnStream<'_>, op: &AttentionBwd, aligned: bool) -> Result<bool> {
    let Some(shape) = asked(&op.shape, op.q.float, aligned, op.lse) else { return Ok(false) };
    let dq_sum = if op.any_order { DqSum::AnyOrder } else { DqSum::Fixed };
    let scratch = with_session(at, |session| {
        let scratch = session.parts(dq_sum, &shape)?.scratch;
        match scratch {
            0..=MOST_SCRATCH => Ok(scratch),
            _ => Err(Error::Unsupported(format!("{shape:?} needs {scratch} bytes of scratch memory"))),
        }
    });
    let Some(scratch) = accepted("backward", scratch)? else { return Ok(false) };
    // cuDNN computes all three gradients.
    let mut room = Room::default();
    let parts_at = room.of(scratch);
    let [d_q, d_k, d_v] = [(op.d_q, shape.q_view()), (op.d_k, shape.k_view()), (op.d_v, shape.v_view())]
        .map(|(array, view)| (array, room.unless(array, view.extent() * op.q.float.size())));
    let Some(start) = room.take(at)? else { return Ok(false) };
    let place =
        |(array, offset): (Array, Option<u64>)| offset.map_or(address(array), |offset| start + offset);
    let whole = Backward {
        q: address(op.q),
        k: address(op.k),
        v: address(op.v),
        out: address(op.out),
        lse: address(op.lse),
        d_out: address(op.d_out),
        d_q: place(d_q),
        d_k: place(d_k),
        d_v: place(d_v),
    };
    with_session(at, |session| {
        let parts = session.parts(dq_sum, &shape)?;
        parts.all.iter().try_for_each(|part| {
            let (roles, workspace) = parts.addresses(part, &whole, start + parts_at);
            Execution::new(&part.plan, &session.handle, &roles, workspace)?.enqueue(&at.stream)
        })
    })?;
    Ok(true)
}

/// Works with cuDNN on the stream of `at`, opened now if this is its first use on that GPU. Memory is not taken inside: the
/// caller's allocator may wait for a thread that waits for this lock.
fn with_session<T>(at: &OnStream<'_>, work: impl FnOnce(&mut Session) -> Result<T>) -> Result<T> {
    let mut guard = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let sessions = &mut guard.get_or_insert_default().sessions;
    // The first call of a shape may be one that is recorded into a graph.
    let _relaxed = at.stream.device().while_recording()?;
    let session = sessions.entry(at.info().index).or_insert_with(|| Session::open(&at.stream, Lengths::Any));
    let session = session.as_mut().map_err(|error| error.clone())?;
    session.handle.work_on(&at.stream)?;
    work(session)
}

/// What cuDNN gave, or `None` if it refuses; each of the first [`MOST_TOLD`] reasons is logged once.
fn accepted<T>(direction: &str, result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_refusal(&error) => {
            let mut guard = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            let told = &mut guard.get_or_insert_default().told;
            if told.len() < MOST_TOLD {
                let line = format!("attention {direction} by our own kernels: {error}");
                if !told.contains(&line) {
                    tracing::info!("{line}");
                    told.insert(line);
                }
            }
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// What cuDNN is asked for; `None` if the work is too small, misaligned or not supported, or the user chose our own kernels.
fn asked(shape: &AttentionShape, float: Float, aligned: bool, lse: Array) -> Option<Shape> {
    let aligned = aligned && address(lse).is_multiple_of(ALIGNMENT);
    let AttentionShape { batch, heads, q_len, kv_len, head_dim, .. } = *shape;
    let sizes = [heads, q_len, kv_len, head_dim];
    let work = sizes.into_iter().fold(batch, usize::saturating_mul);
    shape_of(shape, float).filter(|_| aligned && work >= LEAST_WORK && may_ask())
}

/// Whether `IRONHORSE_ATTENTION` is not `own`.
fn may_ask() -> bool {
    static MAY: OnceLock<bool> = OnceLock::new();
    *MAY.get_or_init(|| std::env::var_os(CHOICE).is_none_or(|choice| choice != "own"))
}

/// What cuDNN computes, as far as it does not depend on its version. `None` for what it is not asked: other types, few
/// queries or keys, causal attention with q_len ≠ kv_len, a scale that is not positive, strides of 0.
fn shape_of(shape: &AttentionShape, float: Float) -> Option<Shape> {
    let AttentionShape { batch, heads, kv_heads, q_len, kv_len, head_dim, scale, causal, q, k, v, out } =
        *shape;
    let data = match float {
        Float::BF16 => BF16,
        Float::F16 => F16,
        Float::F32 | Float::F64 => return None,
    };
    let counts = [batch, heads, kv_heads, q_len, kv_len, head_dim];
    let scale = scale as f32;
    if counts.contains(&0)
        || q_len.min(kv_len) < LEAST_LEN
        || (causal && q_len != kv_len)
        || !(scale.is_normal() && scale > 0.0)
    {
        return None;
    }
    // The stride of a dimension of size 1 means nothing to us, but cuDNN requires a plausible one.
    let steps = |strides: Strides, heads: usize, len: usize| -> Option<Steps> {
        let Strides { batch: b, head: h, position: p } = strides;
        let head = if heads == 1 { p.max(head_dim) } else { h };
        let sequence = if batch == 1 { (head * heads).max(p * len) } else { b };
        let steps = [sequence, head, p];
        steps.iter().all(|&step| step > 0).then(|| steps.map(|step| step as i64))
    };
    Some(Shape {
        data,
        batch: batch as i64,
        heads: heads as i64,
        kv_heads: kv_heads as i64,
        q_len: q_len as i64,
        kv_len: kv_len as i64,
        head_dim: head_dim as i64,
        scale_bits: scale.to_bits(),
        causal,
        q: steps(q, heads, q_len)?,
        k: steps(k, kv_heads, kv_len)?,
        v: steps(v, kv_heads, kv_len)?,
        out: steps(out, heads, q_len)?,
    })
}

/// Scratch memory of a call, taken at once.
#[derive(Default)]
struct Room {
    bytes: usize,
}

impl Room {
    /// Reserves `bytes` and returns their offset.
    fn of(&mut self, bytes: usize) -> u64 {
        let offset = self.bytes;
        self.bytes = (offset + bytes).next_multiple_of(ALIGN);
        offset as u64
    }

    /// Reserves memory in place of an array that the caller does not want; `None` if it is wanted.
    fn unless(&mut self, array: Array, bytes: usize) -> Option<u64> {
        (!array.is_some()).then(|| self.of(bytes))
    }

    /// Allocates what was reserved and returns its address, 0 if there are no bytes; `None` if there is no memory for it.
    fn take(&self, at: &OnStream<'_>) -> Result<Option<u64>> {
        if self.bytes == 0 {
            return Ok(Some(0));
        }
        match at.scratch(self.bytes) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => Ok(None),
            taken => taken.map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> AttentionShape {
        AttentionShape::position_major([2, 256, 256], [8, 2], 64, (0.125, true)) // as few as cuDNN is asked for
    }

    #[test]
    fn strides_of_the_caller_are_those_of_cudnn() {
        let asked = shape_of(&shape(), Float::BF16).unwrap();
        assert_eq!((asked.batch, asked.heads, asked.kv_heads), (2, 8, 2));
        assert_eq!((asked.q_len, asked.kv_len, asked.head_dim), (256, 256, 64));
        assert_eq!((asked.scale(), asked.causal, asked.data), (0.125, true, BF16));
        assert_eq!((asked.q, asked.out), ([256 * 512, 64, 512], asked.q));
        assert_eq!((asked.k, asked.v), ([256 * 128, 64, 128], asked.k));
        assert_eq!(asked.q_view().strides, [256 * 512, 64, 512, 1]);
        assert_eq!(shape_of(&shape(), Float::F16).unwrap().data, F16);
        // One sequence and one head: strides that are never used may be anything.
        let q = Strides { batch: 0, head: 0, position: 96 };
        let one = AttentionShape { batch: 1, heads: 1, kv_heads: 1, q, ..shape() };
        assert_eq!(shape_of(&one, Float::F16).unwrap().q, [256 * 96, 96, 96]);
    }

    #[test]
    fn our_kernels_run_what_cudnn_computes_in_another_way_or_not_at_all() {
        let refused = |shape: AttentionShape| shape_of(&shape, Float::BF16).is_none();
        assert!(!refused(shape()));
        assert!(shape_of(&shape(), Float::F32).is_none() && shape_of(&shape(), Float::F64).is_none());
        assert!(refused(AttentionShape { kv_len: 512, ..shape() }), "the last query sees all keys");
        assert!(!refused(AttentionShape { kv_len: 512, causal: false, ..shape() }));
        for scale in [0.0, -0.125, f64::NAN, f64::INFINITY, 1e-60, 1e60] {
            assert!(refused(AttentionShape { scale, ..shape() }), "{scale}");
        }
        assert!(refused(AttentionShape { batch: 0, ..shape() }));
        assert!(refused(AttentionShape { q_len: 0, kv_len: 0, ..shape() }));
        assert!(refused(AttentionShape { q_len: 127, causal: false, ..shape() }), "few queries");
        let shared = Strides { head: 0, ..shape().k };
        assert!(refused(AttentionShape { k: shared, ..shape() }), "heads at one address");
    }

    #[test]
    fn addresses_decide_too() {
        let at = |address: usize| Array { at: std::ptr::without_provenance_mut(address), float: Float::F32 };
        let asks = |aligned, lse| asked(&shape(), Float::BF16, aligned, lse).is_some();
        assert!(asks(true, at(256)) && asks(true, at(0)));
        assert!(!asks(false, at(256)), "rows of q, k, v or out");
        assert!(!asks(true, at(264)), "the statistics");
        let small = AttentionShape { q_len: 255, kv_len: 255, ..shape() };
        assert!(asked(&small, Float::BF16, true, at(256)).is_none(), "few products");
    }

    #[test]
    fn scratch_memory_is_taken_once_and_aligned() {
        let given = Array { at: std::ptr::without_provenance_mut(64), float: Float::F32 };
        let mut room = Room::default();
        assert_eq!(room.unless(given, 1000), None);
        assert_eq!((room.of(10), room.of(0), room.unless(Array::none(Float::F32), 300)), (0, 256, Some(256)));
        assert_eq!(room.bytes, 768);
    }
}
