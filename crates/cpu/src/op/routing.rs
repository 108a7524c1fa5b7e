//! Moving tokens to their experts and back.

use super::elementwise::add_in_place;
use super::{Ctx, check_below};
use crate::math::dot;
use crate::memory::Span;
use crate::multiversion;
use ironhorse_core::op::{Combine, CombineBwd, Permute, PermuteBwd, RouteSort};
use ironhorse_core::{Error, Result};

/// Routes a task of the sort handles.
const ROUTES: usize = 4096;

multiversion! {
    /// out = factor·x
    fn scaled<const FMA: bool>(out: &mut [f32], factor: f32, x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = factor * x;
        }
    }

    /// out += factor·x
    fn add_scaled<const FMA: bool>(out: &mut [f32], factor: f32, x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = crate::math::fma::<FMA>(factor, *x, *out);
        }
    }
}

/// A counting sort in pieces: each counts, then each knows where its routes of every expert begin.
pub fn route_sort(ctx: &mut Ctx<'_>, op: &RouteSort) -> Result<()> {
    let (order, places) = (ctx.i32(op.order)?, ctx.i32(op.places)?);
    let (offsets, experts) = (ctx.i32(op.offsets)?, ctx.i32(op.experts)?);
    let all = op.offsets.numel() - 1;
    // SAFETY: nothing writes the experts while the op runs.
    let experts = unsafe { experts.all() };
    check_below("expert", experts, all)?;
    let counts = ctx.counts(experts.len().div_ceil(ROUTES).max(1) * all);
    ctx.chunks(experts.len(), ROUTES, |routes, _| {
        let piece = routes.start / ROUTES;
        // SAFETY: every piece has counts of its own.
        let counts = unsafe { counts.get_mut(piece * all..(piece + 1) * all) };
        counts.fill(0);
        experts[routes].iter().for_each(|&e| counts[e as usize] += 1);
    })?;
    // SAFETY: no task runs.
    let (counts_now, offsets) = unsafe { (counts.all_mut(), offsets.all_mut()) };
    let mut next = 0;
    for e in 0..all {
        offsets[e] = next;
        if experts.is_empty() {
            continue;
        }
        for piece in counts_now.chunks_exact_mut(all) {
            next += std::mem::replace(&mut piece[e], next);
        }
    }
    offsets[all] = next;
    ctx.chunks(experts.len(), ROUTES, |routes, _| {
        let piece = routes.start / ROUTES;
        // SAFETY: every piece has its own part of counts and places, and the rows it counted for itself in `order`.
        unsafe {
            let next = counts.get_mut(piece * all..(piece + 1) * all);
            let places = places.get_mut(routes.clone());
            for (place, route) in places.iter_mut().zip(routes) {
                let row = &mut next[experts[route] as usize];
                *place = *row;
                order.get_mut(*row as usize..*row as usize + 1)[0] = route as i32;
                *row += 1;
            }
        }
    })
}

pub fn permute(ctx: &mut Ctx<'_>, op: &Permute) -> Result<()> {
    let (out, inp, order) = (ctx.f32(op.out)?, ctx.f32(op.inp)?, ctx.i32(op.order)?);
    let (width, routes) = (op.inp.shape.cols(), op.order.numel());
    let k = routes / op.inp.shape.rows().max(1);
    // SAFETY: nothing writes the order while the op runs.
    let order = unsafe { order.all() };
    check_below("row", order, routes)?;
    ctx.rows(routes, width, |rows, _| {
        for row in rows {
            let token = order[row] as usize / k;
            // SAFETY: tasks have disjoint rows of `out`, which shares no memory with `inp`.
            unsafe {
                let from = inp.get(token * width..(token + 1) * width);
                out.get_mut(row * width..(row + 1) * width).copy_from_slice(from);
            }
        }
    })
}

pub fn permute_bwd(ctx: &mut Ctx<'_>, op: &PermuteBwd) -> Result<()> {
    let (d_inp, d_out) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_out)?);
    let (isa, width, k) = (ctx.isa, op.d_inp.shape.cols(), op.places.shape.cols());
    let adds = op.accum.adds(ctx.scalars.micro_step);
    // SAFETY: nothing writes the places while the op runs.
    let places = unsafe { ctx.i32(op.places)?.all() };
    check_below("row", places, places.len())?;
    ctx.rows(op.places.shape.rows(), k * width, |tokens, _| {
        for token in tokens {
            // SAFETY: tasks have disjoint tokens of `d_inp`, which shares no memory with `d_out`.
            let d = unsafe { d_inp.get_mut(token * width..(token + 1) * width) };
            for (j, &place) in places[token * k..(token + 1) * k].iter().enumerate() {
                // SAFETY: as above.
                let from = unsafe { row_of(d_out, place, width) };
                if j == 0 && !adds {
                    d.copy_from_slice(from);
                } else {
                    add_in_place(isa, d, from);
                }
            }
        }
    })
}

/// # Safety
/// As [`Span::get`]; `place` is not negative.
unsafe fn row_of<'a>(span: Span<f32>, place: i32, width: usize) -> &'a [f32] {
    let row = place as usize;
    // SAFETY: the caller's contract.
    unsafe { span.get(row * width..(row + 1) * width) }
}

pub fn combine(ctx: &mut Ctx<'_>, op: &Combine) -> Result<()> {
    let (out, rows, weights) = (ctx.f32(op.out)?, ctx.f32(op.rows)?, ctx.f32(op.weights)?);
    let (isa, width, k) = (ctx.isa, op.out.shape.cols(), op.places.shape.cols());
    // SAFETY: nothing writes places and weights while the op runs.
    let (places, weights) = unsafe { (ctx.i32(op.places)?.all(), weights.all()) };
    check_below("row", places, places.len())?;
    ctx.rows(op.places.shape.rows(), k * width, |tokens, _| {
        for token in tokens {
            // SAFETY: tasks have disjoint tokens of `out`, which shares no memory with `rows`.
            let out = unsafe { out.get_mut(token * width..(token + 1) * width) };
            for route in token * k..(token + 1) * k {
                // SAFETY: as above.
                let from = unsafe { row_of(rows, places[route], width) };
                if route == token * k {
                    scaled(isa, out, weights[route], from);
                } else {
                    add_scaled(isa, out, weights[route], from);
                }
            }
        }
    })
}

pub fn combine_bwd(ctx: &mut Ctx<'_>, op: &CombineBwd) -> Result<()> {
    let (d_rows, d_weights) = (ctx.f32(op.d_rows)?, ctx.f32(op.d_weights)?);
    let (d_out, rows, weights) = (ctx.f32(op.d_out)?, ctx.f32(op.rows)?, ctx.f32(op.weights)?);
    let (isa, width, k) = (ctx.isa, op.d_out.shape.cols(), op.places.shape.cols());
    // SAFETY: nothing writes places and weights while the op runs.
    let (places, weights) = unsafe { (ctx.i32(op.places)?.all(), weights.all()) };
    check_permutation(ctx, places)?;
    ctx.rows(op.places.shape.rows(), k * width, |tokens, _| {
        for token in tokens {
            for route in token * k..(token + 1) * k {
                let row = places[route] as usize * width..(places[route] as usize + 1) * width;
                // SAFETY: no two routes have the same row, so tasks write disjoint rows; `rows` is `d_rows` or apart from
                // it, and is not used any more when its row is written.
                unsafe {
                    let d = d_out.get(token * width..(token + 1) * width);
                    d_weights.get_mut(route..route + 1)[0] = dot(isa, d, rows.get(row.clone()));
                    scaled(isa, d_rows.get_mut(row), weights[route], d);
                }
            }
        }
    })
}

/// Refuses places that are no permutation: two tasks would write the same row.
fn check_permutation(ctx: &mut Ctx<'_>, places: &[i32]) -> Result<()> {
    check_below("row", places, places.len())?;
    let seen = ctx.counts(places.len());
    // SAFETY: one thread, and nobody else has this memory.
    let seen = unsafe { seen.all_mut() };
    seen.fill(0);
    for &place in places {
        if std::mem::replace(&mut seen[place as usize], 1) != 0 {
            return Err(Error::Input(format!("row {place} is the place of two routes")));
        }
    }
    Ok(())
}
