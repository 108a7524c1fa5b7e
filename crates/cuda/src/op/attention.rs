//! Causal attention: cuDNN where it is present and takes the shape, else our own kernels. On a Hopper GPU the backward of heads of 64
//! channels is our own first.

use super::lower::Lower;
use super::{flash, flash_wgmma};
use crate::cudnn::{Backward, Direction, DqSum, Execution, Lengths, Role, Session, Shape, is_refusal};
use crate::launch::LibraryCall;
use crate::{Attention, Error, Result};
use ironhorse_core::op::{AttentionBwd, AttentionDropoutBwd, AttentionDropoutFwd, AttentionFwd};
use ironhorse_core::{DType, Slot};
use std::collections::HashSet;
use std::rc::Rc;

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
    if flash_wgmma::attention_bwd(cx, op)? {
        return Ok(());
    }
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
    let session = session(cx)?;
    let (parts, handle) = (session.parts(dq_sum, &shape)?, session.handle.clone());
    let scratch = cx.scratch(parts.scratch)?;
    let [q, k, v] = packed(&shape, cx.ptr(op.qkv)?);
    let [d_q, d_k, d_v] = packed(&shape, cx.ptr(op.d_qkv)?);
    let [out, d_out, lse] = [cx.ptr(op.out)?, cx.ptr(op.d_out)?, cx.ptr(op.lse)?];
    let whole = Backward { q, k, v, out, lse, d_out, d_q, d_k, d_v };
    let mut calls: Calls = Vec::new();
    for part in &parts.all {
        let (at, workspace) = parts.addresses(part, &whole, scratch);
        calls.push(Rc::new(Execution::new(&part.plan, &handle, &at, workspace)?));
    }
    Ok(calls)
}

/// cuDNN, opened now if this is its first use.
fn session<'a>(cx: &'a mut Lower<'_>) -> Result<&'a mut Session> {
    let stream = cx.stream;
    let session = &mut cx.libraries.attention.session;
    session
        .get_or_insert_with(|| Session::open(stream, Lengths::Whole))
        .as_mut()
        .map_err(|error| error.clone())
}

/// The shape of an op whose `out` is (B,T,C) and whose queries, keys and values are packed.
fn shape_of(out: &Slot, heads: usize, kv_heads: usize) -> Result<Shape> {
    let [batch, seq, width] = *out.shape.dims() else {
        return Err(Error::Unsupported(format!("attention: `out` is {}, expected (B, T, C)", out.shape)));
    };
    if out.dtype != DType::BF16 {
        return Err(Error::Unsupported(format!("cuDNN attention takes bf16, this is {}", out.dtype)));
    }
    let heads_of = [heads as i64, kv_heads as i64];
    Ok(Shape::packed(batch as i64, heads_of, seq as i64, (width / heads) as i64))
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
            assert_eq!((shape.q, shape.k, shape.v), ([128 * row, 64, row], shape.q, shape.q));
            assert_eq!(shape.out, [128 * 768, 64, 768]);
            assert_eq!(packed(&shape, 4096), at.map(|element| 4096 + element * BF16_BYTES));
        }
    }
}
