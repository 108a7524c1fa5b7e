//! Moving tokens to their experts and back.

use super::{Ctx, check_below};
use crate::kernel::routing::{
    self as kernel, Routed, count_routes, first_rows, is_permutation, place_routes,
};
use ironhorse_core::op::{Combine, CombineBwd, Permute, PermuteBwd, RouteSort};
use ironhorse_core::{Error, Result, Slot};

/// Routes a task of the sort handles.
const ROUTES: usize = 4096;

/// A counting sort in pieces: each counts, then each knows where its routes of every expert begin.
pub fn route_sort(ctx: &mut Ctx<'_>, op: &RouteSort) -> Result<()> {
    let (order, places) = (ctx.i32(op.order)?, ctx.i32(op.places)?);
    let (offsets, experts) = (ctx.i32(op.offsets)?, ctx.i32(op.experts)?);
    let all = op.offsets.numel() - 1;
    // SAFETY: nothing writes the experts while the op runs.
    let experts = unsafe { experts.all() };
    check_below("expert", experts, all)?;
    let counts = ctx.counts(experts.len().div_ceil(ROUTES) * all);
    ctx.chunks(experts.len(), ROUTES, |routes, _| {
        // SAFETY: every piece has counts of its own.
        let counts = unsafe { counts.row(routes.start / ROUTES, all).all_mut() };
        count_routes(&experts[routes], counts);
    })?;
    // SAFETY: no task runs.
    unsafe { first_rows(counts.all_mut(), offsets.all_mut()) };
    ctx.chunks(experts.len(), ROUTES, |routes, _| {
        // SAFETY: every piece has its own part of counts and places, and the rows it counted for itself in `order`.
        unsafe {
            let next = counts.row(routes.start / ROUTES, all).all_mut();
            let places = places.get_mut(routes.clone());
            place_routes(experts, routes, next, places, order);
        }
    })
}

pub fn permute(ctx: &mut Ctx<'_>, op: &Permute) -> Result<()> {
    let (out, inp, order) = (ctx.f32(op.out)?, ctx.f32(op.inp)?, ctx.i32(op.order)?);
    let k = op.order.numel() / op.inp.shape.rows().max(1);
    // SAFETY: nothing writes the order while the op runs.
    let order = unsafe { order.all() };
    check_below("row", order, order.len())?;
    // SAFETY: the indices were checked; `out` shares no memory with `inp` (`Op::check`).
    ctx.done(unsafe { kernel::permute(&ctx.split(), out, inp, order, k) })
}

/// The rows of the tokens' routes. Refuses places that are out of range.
fn routed(ctx: &Ctx<'_>, rows: Slot, places: Slot) -> Result<Routed<'static>> {
    let (tokens, k) = (places.shape.rows(), places.shape.cols());
    // SAFETY: nothing writes the places while the op runs.
    let places = unsafe { ctx.i32(places)?.all() };
    check_below("row", places, places.len())?;
    Ok(Routed { rows: ctx.f32(rows)?, places, tokens, k })
}

pub fn permute_bwd(ctx: &mut Ctx<'_>, op: &PermuteBwd) -> Result<()> {
    let (routed, d_inp) = (routed(ctx, op.d_out, op.places)?, ctx.f32(op.d_inp)?);
    let adds = op.accum.adds(ctx.scalars.added());
    // SAFETY: `d_inp` shares no memory with `d_out` (`Op::check`).
    ctx.done(unsafe { routed.sum(&ctx.split(), d_inp, None, adds) })
}

pub fn combine(ctx: &mut Ctx<'_>, op: &Combine) -> Result<()> {
    let (routed, out, weights) = (routed(ctx, op.rows, op.places)?, ctx.f32(op.out)?, ctx.f32(op.weights)?);
    // SAFETY: nothing writes the weights while the op runs; `out` shares no memory with `rows` (`Op::check`).
    ctx.done(unsafe { routed.sum(&ctx.split(), out, Some(weights.all()), false) })
}

pub fn combine_bwd(ctx: &mut Ctx<'_>, op: &CombineBwd) -> Result<()> {
    let (routed, weights) = (routed(ctx, op.rows, op.places)?, ctx.f32(op.weights)?);
    let (to, d_out) = ((ctx.f32(op.d_rows)?, ctx.f32(op.d_weights)?), ctx.f32(op.d_out)?);
    let seen = ctx.counts(routed.places.len());
    // SAFETY: one thread, and nobody else has this memory.
    if !is_permutation(routed.places, unsafe { seen.all_mut() }) {
        return Err(Error::Input("combine_bwd: two routes have the same row in `places`".to_owned()));
    }
    // SAFETY: no two places are the same; `rows` is `d_rows` or shares no memory with what is written (`Op::check`).
    ctx.done(unsafe { routed.sum_bwd(&ctx.split(), to, (d_out, weights.all())) })
}
