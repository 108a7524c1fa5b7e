//! Products of 8-bit numbers, in f32 slots that hold the numbers of the format: what a GPU does, for comparison with it.

use super::columns::column_sums;
use super::linear::{product, rows_of};
use super::{Ctx, TASK};
use crate::gemm::{Beta, Gemm, MatMut};
use crate::kernel::elementwise::{add_to, unary, unary_bwd};
use crate::memory::Span;
use ironhorse_core::eager::UnaryFn;
use ironhorse_core::op::{Amax, MatmulFp8, Quantize, ScaleUpdate};
use ironhorse_core::{Result, power_of_two};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

pub fn amax(ctx: &mut Ctx<'_>, op: &Amax) -> Result<()> {
    let (out, inp) = (ctx.f32(op.amax)?, ctx.f32(op.inp)?);
    let most = largest(ctx, inp, 0.0)?;
    // SAFETY: the only use of the slot, which shares no memory with `inp` (`Op::check`).
    let out = unsafe { out.get_mut(0..1) };
    out[0] = most;
    Ok(())
}

/// The largest |x|, or `least` if that is larger; NaN is the largest.
fn largest(ctx: &Ctx<'_>, x: Span<f32>, least: f32) -> Result<f32> {
    // Without the sign, the bits of floats have the order of the floats, and NaN is the largest. A maximum has no order.
    let most = AtomicU32::new(least.to_bits());
    ctx.chunks(x.len(), TASK, |r, _| {
        // SAFETY: nothing writes `x` while the op runs.
        let largest = unsafe { x.get(r) }.iter().map(|x| x.to_bits() & 0x7fff_ffff).max();
        most.fetch_max(largest.unwrap_or(0), Ordering::Relaxed);
    })?;
    Ok(f32::from_bits(most.into_inner()))
}

pub fn scale_update(ctx: &mut Ctx<'_>, op: &ScaleUpdate) -> Result<()> {
    // SAFETY: the only slot of the op, which runs alone.
    let scales = unsafe { ctx.f32(op.scales)?.all_mut() };
    for pair in scales.as_chunks_mut::<2>().0 {
        *pair = ScaleUpdate::next(*pair);
    }
    Ok(())
}

pub fn quantize(ctx: &mut Ctx<'_>, op: &Quantize) -> Result<()> {
    let (inp, amax, inverse) = (ctx.f32(op.inp)?, ctx.f32(op.amax)?, ctx.f32(op.inverse)?);
    let (rows, cols) = (op.inp.shape.rows(), op.inp.shape.cols());
    let x = activated(ctx, op, inp)?;
    if let Some(d_bias) = op.d_bias {
        let (isa, adds) = (ctx.isa, op.accum.adds(ctx.scalars.added()));
        column_sums(ctx, [ctx.f32(d_bias)?], rows, adds, |row, columns, [sums]| {
            // SAFETY: nothing writes `x` while the sums are made.
            add_to(isa, sums, unsafe { x.get(row * cols + columns.start..row * cols + columns.end) });
        })?;
    }
    if let Some(seen) = op.seen {
        let seen = ctx.f32(seen)?;
        // SAFETY: the only use of the slot, which shares no memory with others (`Op::check`).
        let seen = unsafe { seen.get_mut(0..1) };
        seen[0] = largest(ctx, x, seen[0])?;
    }
    // SAFETY: nothing writes `amax` while the op runs.
    let k = op.format.scale_exponent(unsafe { amax.get(0..1) }[0], op.margin, op.unknown);
    // SAFETY: the only use of the slot, which shares no memory with others (`Op::check`).
    let inverse = unsafe { inverse.get_mut(0..1) };
    inverse[0] = power_of_two(-k);
    let (scale, format) = (power_of_two(k), op.format);
    let (out, out_t) = (ctx.f32_or_none(op.out)?, ctx.f32_or_none(op.out_t)?);
    ctx.rows(rows, cols, |row| {
        for col in 0..cols {
            // SAFETY: nothing writes `x` now; each element of the results belongs to the task of its row, and they share no
            // memory with anything else (`Op::check`).
            unsafe {
                let q = format.quantize(x.get(row * cols + col..row * cols + col + 1)[0] * scale);
                if op.out.is_some() {
                    out.get_mut(row * cols + col..row * cols + col + 1)[0] = q;
                }
                if op.out_t.is_some() {
                    out_t.get_mut(col * rows + row..col * rows + row + 1)[0] = q;
                }
            }
        }
    })
}

/// What is quantised: the input, or what its activation makes of it.
fn activated(ctx: &mut Ctx<'_>, op: &Quantize, inp: Span<f32>) -> Result<Span<f32>> {
    if op.act.is_none() && op.pre.is_none() {
        return Ok(inp);
    }
    let pre = op.pre.map(|pre| Ok((pre.act, ctx.f32(pre.slot)?))).transpose()?;
    let (x, isa) = (ctx.floats(inp.len()), ctx.isa);
    ctx.chunks(inp.len(), TASK, |r, _| {
        // Tasks have disjoint ranges of `x`, which nothing else uses; `inp` and `pre` are only read.
        let (from, to) = (inp.part(r.clone()), x.part(r.clone()));
        match (op.act, pre) {
            (_, Some((act, pre))) => unary_bwd(isa, UnaryFn::Act(act), [from, pre.part(r)], to),
            (Some(act), None) => unary(isa, UnaryFn::Act(act), from, to),
            (None, None) => {}
        }
    })?;
    Ok(x)
}

pub fn matmul_fp8(ctx: &mut Ctx<'_>, op: &MatmulFp8) -> Result<()> {
    let (out, a, b) = (ctx.f32(op.out)?, ctx.f32(op.a)?, ctx.f32(op.b)?);
    let (a_inverse, b_inverse) = (ctx.f32(op.a_inverse)?, ctx.f32(op.b_inverse)?);
    let bias = op.bias.map(|slot| ctx.f32(slot)).transpose()?;
    let (m, k, n) = (op.a.shape.rows(), op.a.shape.cols(), op.b.shape.rows());
    // SAFETY: nothing writes the scales while the op runs.
    let alpha = unsafe { a_inverse.get(0..1)[0] * b_inverse.get(0..1)[0] };
    let isa = ctx.isa;
    let finish = |rows: Range<usize>, columns: Range<usize>, _: usize| {
        let Some(bias) = bias else { return };
        for row in rows {
            let r = row * n + columns.start..row * n + columns.end;
            // SAFETY: the region is final and belongs to the calling task; the bias is only read.
            unsafe { add_to(isa, out.get_mut(r), bias.get(columns.clone())) };
        }
    };
    let beta = if op.accum.adds(ctx.scalars.added()) { Beta::Accumulate } else { Beta::Overwrite };
    let c = MatMut { ptr: out.ptr(), rs: n };
    let mut g = Gemm::new((m, n, k), rows_of(a, k), rows_of(b, k).transposed(), c).beta(beta).alpha(alpha);
    if bias.is_some() {
        g = g.epilogue(&finish);
    }
    // SAFETY: shapes and aliasing were checked by `Op::check`.
    unsafe { product(ctx, g) }
}
