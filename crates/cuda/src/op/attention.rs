//! Causal attention: cuDNN where it is present and takes the shape, else our own kernels.

use super::flash;
use super::lower::Lower;
use crate::cudnn::{Direction, DqSum, Execution, Handle, Plan, Role, Session, Shape};
use crate::launch::LibraryCall;
use crate::{Attention, Error, Result};
use ironhorse_core::op::{AttentionBwd, AttentionDropoutBwd, AttentionDropoutFwd, AttentionFwd};
use ironhorse_core::{DType, Slot};
use std::collections::HashSet;
use std::rc::Rc;

/// Scratch memory the backward may use; larger batches are computed in parts.
const MOST_SCRATCH: usize = 512 << 20;
/// Bytes of a bf16 element.
const BF16_BYTES: u64 = 2;

/// cuDNN for attention: opened at first use, and why it was not used.
#[derive(Default)]
pub(crate) struct CudnnLibrary {
    session: Option<Result<Session>>,
    told: HashSet<String>,
}

impl CudnnLibrary {
    /// Says once why our own kernels run.
    fn tell(&mut self, name: &str, why: &Error) {
        let line = format!("our own kernels instead of {name}: {why}");
        if !self.told.contains(&line) {
            tracing::info!("{line}");
            self.told.insert(line);
        }
    }
}

/// Lowers the forward.
pub(crate) fn attention_fwd(cx: &mut Lower<'_>, op: &AttentionFwd) -> Result<()> {
    if !op.mask.is_causal() {
        no_cudnn(cx, "cudnn_attention_fwd", MASKED)?;
    } else if op.out.numel() > 0 && by_cudnn(cx, "cudnn_attention_fwd", |cx| cudnn_fwd(cx, op))? {
        return Ok(());
    }
    flash::attention_fwd(cx, op, None)
}

/// Lowers the backward.
pub(crate) fn attention_bwd(cx: &mut Lower<'_>, op: &AttentionBwd) -> Result<()> {
    if !op.mask.is_causal() {
        no_cudnn(cx, "cudnn_attention_bwd", MASKED)?;
    } else if op.out.numel() > 0 && by_cudnn(cx, "cudnn_attention_bwd", |cx| cudnn_bwd(cx, op))? {
        return Ok(());
    }
    flash::attention_bwd(cx, op, None)
}

/// Lowers the forward with dropout: always our own kernels, because cuDNN's dropout has masks of its own.
pub(crate) fn attention_dropout_fwd(cx: &mut Lower<'_>, op: &AttentionDropoutFwd) -> Result<()> {
    no_cudnn(cx, "cudnn_attention_fwd", DROPOUT)?;
    flash::attention_fwd(cx, &op.attention(), Some(op.drop))
}

/// Lowers its backward.
pub(crate) fn attention_dropout_bwd(cx: &mut Lower<'_>, op: &AttentionDropoutBwd) -> Result<()> {
    no_cudnn(cx, "cudnn_attention_bwd", DROPOUT)?;
    flash::attention_bwd(cx, &op.attention(), Some(op.drop))
}

/// Why cuDNN does not run an attention.
const DROPOUT: &str = "with dropout, masks are made by our own kernels";
const MASKED: &str = "documents and windows are masked by our own kernels";

/// Says once why an attention needs our own kernels, or refuses where cuDNN was asked for.
fn no_cudnn(cx: &mut Lower<'_>, name: &'static str, why: &str) -> Result<()> {
    by_cudnn(cx, name, |_| Err(Error::Unsupported(why.into()))).map(|_| ())
}

type Calls = Vec<Rc<dyn LibraryCall>>;

/// Adds cuDNN's calls if the settings ask for them and they can be had. Nothing is added before all are ready.
fn by_cudnn(
    cx: &mut Lower<'_>,
    name: &'static str,
    prepare: impl FnOnce(&mut Lower<'_>) -> Result<Calls>,
) -> Result<bool> {
    if matches!(cx.settings.attention, Attention::Own | Attention::Plain) {
        return Ok(false);
    }
    match prepare(cx) {
        Ok(calls) => {
            calls.into_iter().for_each(|call| cx.call(name, call));
            Ok(true)
        }
        Err(why) if !is_refusal(&why) => Err(why),
        Err(why) if cx.settings.attention == Attention::Cudnn => {
            Err(Error::Unsupported(format!("cuDNN was asked for, but {name} is not possible: {why}")))
        }
        Err(why) => {
            cx.libraries.attention.tell(name, &why);
            Ok(false)
        }
    }
}

/// Whether an error means that cuDNN cannot do it. Too little memory or a lost device would stop our kernels too.
fn is_refusal(error: &Error) -> bool {
    use Error::{Library, LibraryMissing, SymbolMissing, Unsupported};
    matches!(error, Unsupported(_) | LibraryMissing { .. } | SymbolMissing { .. } | Library { .. })
}

fn cudnn_fwd(cx: &mut Lower<'_>, op: &AttentionFwd) -> Result<Calls> {
    let shape = shape_of(&op.out, op.heads, op.kv_heads)?;
    let session = session(cx)?;
    let plan = session.plan(Direction::Forward, &shape)?;
    let handle = session.handle.clone();
    let workspace = cx.scratch(plan.workspace)?;
    let [q, k, v] = packed(&shape, cx.ptr(op.qkv)?);
    let at = [
        (Role::Q, q),
        (Role::K, k),
        (Role::V, v),
        (Role::Out, cx.ptr(op.out)?),
        (Role::Stats, cx.ptr(op.lse)?),
    ];
    Ok(vec![Rc::new(Execution::new(&plan, &handle, &at, workspace)?)])
}

fn cudnn_bwd(cx: &mut Lower<'_>, op: &AttentionBwd) -> Result<Calls> {
    let shape = shape_of(&op.out, op.heads, op.kv_heads)?;
    let dq_sum = if cx.settings.fast { DqSum::AnyOrder } else { DqSum::Fixed };
    let (parts, handle) = plans(session(cx)?, &shape, dq_sum)?;
    let needs = |part: &Part| Scratch::new(&part.shape, dq_sum, part.plan.workspace).total;
    let scratch = cx.scratch(parts.iter().map(needs).max().unwrap_or(0))?;
    let [qkv, d_qkv] = [cx.ptr(op.qkv)?, cx.ptr(op.d_qkv)?];
    let [out, d_out, lse] = [cx.ptr(op.out)?, cx.ptr(op.d_out)?, cx.ptr(op.lse)?];
    let mut calls: Calls = Vec::new();
    for part in &parts {
        let tokens = part.start * shape.seq as u64;
        let (qkv_skip, out_skip) = (tokens * shape.qkv_row as u64, tokens * shape.out_row as u64);
        let [q, k, v] = packed(&shape, qkv + qkv_skip * BF16_BYTES);
        let [d_q, d_k, d_v] = packed(&shape, d_qkv + qkv_skip * BF16_BYTES);
        let room = Scratch::new(&part.shape, dq_sum, part.plan.workspace);
        let at = [
            (Role::Q, q),
            (Role::K, k),
            (Role::V, v),
            (Role::DQ, d_q),
            (Role::DK, d_k),
            (Role::DV, d_v),
            (Role::Out, out + out_skip * BF16_BYTES),
            (Role::DOut, d_out + out_skip * BF16_BYTES),
            (Role::Stats, lse + tokens * shape.heads as u64 * 4),
            (Role::RowSum, scratch),
            (Role::DqSums, scratch + room.dq_sums as u64),
        ];
        let workspace = scratch + room.workspace as u64;
        calls.push(Rc::new(Execution::new(&part.plan, &handle, &at, workspace)?));
    }
    Ok(calls)
}

/// Some sequences of the batch.
struct Part {
    /// The first of them.
    start: u64,
    shape: Shape,
    plan: Rc<Plan>,
}

/// Splits the batch so that no part needs more scratch memory than allowed.
fn plans(session: &mut Session, shape: &Shape, dq_sum: DqSum) -> Result<(Vec<Part>, Rc<Handle>)> {
    // What is known before the first plan: the fixed order keeps dS of all heads.
    let one = Shape { batch: 1, ..*shape };
    let d_s = if dq_sum == DqSum::Fixed { one.heads * one.seq * one.seq * 2 } else { 0 };
    let least = Scratch::new(&one, dq_sum, d_s as usize).total;
    let mut most = (MOST_SCRATCH / least).clamp(1, shape.batch as usize);
    loop {
        let mut parts = Vec::new();
        let mut largest = 0;
        for (start, batch) in split(shape.batch as usize, most) {
            let shape = Shape { batch: batch as i64, ..*shape };
            let plan = session.plan(Direction::Backward(dq_sum), &shape)?;
            largest = largest.max(Scratch::new(&shape, dq_sum, plan.workspace).total);
            parts.push(Part { start: start as u64, shape, plan });
        }
        if largest <= MOST_SCRATCH || most == 1 {
            return Ok((parts, session.handle.clone()));
        }
        most = (most * MOST_SCRATCH / largest).clamp(1, most - 1);
    }
}

/// `count` things in parts of at most `most`, as equal as can be: (start, length) of each.
fn split(count: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let parts = count.div_ceil(most);
    (0..parts).map(move |i| {
        let start = i * count / parts;
        (start, (i + 1) * count / parts - start)
    })
}

/// Where the backward's scratch tensors begin.
struct Scratch {
    dq_sums: usize,
    workspace: usize,
    total: usize,
}

impl Scratch {
    fn new(shape: &Shape, dq_sum: DqSum, workspace: usize) -> Self {
        let rows = (shape.batch * shape.heads * shape.seq) as usize;
        let sums = if dq_sum == DqSum::AnyOrder { rows * shape.head_dim as usize * 4 } else { 0 };
        let dq_sums = (rows * 4).next_multiple_of(256);
        let at = dq_sums + sums.next_multiple_of(256);
        Self { dq_sums, workspace: at, total: at + workspace }
    }
}

/// cuDNN, opened now if this is its first use.
fn session<'a>(cx: &'a mut Lower<'_>) -> Result<&'a mut Session> {
    let stream = cx.stream;
    let session = &mut cx.libraries.attention.session;
    session.get_or_insert_with(|| Session::open(stream)).as_mut().map_err(|error| error.clone())
}

/// The shape of an op whose `out` is (B,T,C) and whose queries, keys and values are packed.
fn shape_of(out: &Slot, heads: usize, kv_heads: usize) -> Result<Shape> {
    let [batch, seq, width] = *out.shape.dims() else {
        return Err(Error::Unsupported(format!("attention: `out` is {}, expected (B, T, C)", out.shape)));
    };
    if out.dtype != DType::BF16 {
        return Err(Error::Unsupported(format!("cuDNN attention takes bf16, this is {}", out.dtype)));
    }
    let head_dim = width / heads;
    Ok(Shape {
        batch: batch as i64,
        heads: heads as i64,
        kv_heads: kv_heads as i64,
        seq: seq as i64,
        head_dim: head_dim as i64,
        qkv_row: ((heads + 2 * kv_heads) * head_dim) as i64,
        out_row: width as i64,
    })
}

/// Addresses of the first queries, keys and values in packed rows.
fn packed(shape: &Shape, row: u64) -> [u64; 3] {
    let (q, kv) = ((shape.heads * shape.head_dim) as u64, (shape.kv_heads * shape.head_dim) as u64);
    [row, row + q * BF16_BYTES, row + (q + kv) * BF16_BYTES]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_keys_and_values_lie_side_by_side() {
        let out = Slot {
            pool: ironhorse_core::Pool::Io,
            offset: 0,
            shape: [2, 128, 768].into(),
            dtype: DType::BF16,
        };
        for (kv_heads, row, at) in [(12, 2304, [0, 768, 1536]), (4, 1280, [0, 768, 1024])] {
            let shape = shape_of(&out, 12, kv_heads).unwrap();
            assert_eq!((shape.kv_heads, shape.head_dim), (kv_heads as i64, 64));
            assert_eq!((shape.qkv_row, shape.out_row), (row, 768));
            assert_eq!(packed(&shape, 4096), at.map(|element| 4096 + element * BF16_BYTES));
        }
    }

    #[test]
    fn parts_cover_the_batch_once() {
        for count in [1, 2, 7, 64, 65] {
            for most in [1, 2, 21, 64, 100] {
                let parts: Vec<_> = split(count, most).collect();
                let mut next = 0;
                for &(start, len) in &parts {
                    assert_eq!(start, next);
                    assert!(len >= 1 && len <= most);
                    next += len;
                }
                assert_eq!(next, count);
                let lens: HashSet<_> = parts.iter().map(|part| part.1).collect();
                assert!(lens.len() <= 2, "at most two plans");
            }
        }
    }
}
