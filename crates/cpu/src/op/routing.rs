//! Moving tokens to their experts and back.

use super::{Ctx, check_below};
use crate::kernel::routing::{
    combine_route_bwd, combine_routes, count_routes, first_rows, is_permutation, place_routes, sum_routes,
};
use ironhorse_core::op::{Combine, CombineBwd, Permute, PermuteBwd, RouteSort};
use ironhorse_core::{Error, Result};

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
    let (width, routes) = (op.inp.shape.cols(), op.order.numel());
    let k = routes / op.inp.shape.rows().max(1);
    // SAFETY: nothing writes the order while the op runs.
    let order = unsafe { order.all() };
    check_below("row", order, routes)?;
    ctx.rows(routes, width, |row| {
        let from = inp.row(order[row] as usize / k, width);
        // SAFETY: rows have one task each; `out` shares no memory with `inp` (`Op::check`).
        unsafe { out.row(row, width).all_mut().copy_from_slice(from.all()) };
    })
}

pub fn permute_bwd(ctx: &mut Ctx<'_>, op: &PermuteBwd) -> Result<()> {
    let (d_inp, d_out) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_out)?);
    let (isa, width, k) = (ctx.isa, op.d_inp.shape.cols(), op.places.shape.cols());
    let adds = op.accum.adds(ctx.scalars.micro_step);
    // SAFETY: nothing writes the places while the op runs.
    let places = unsafe { ctx.i32(op.places)?.all() };
    check_below("row", places, places.len())?;
    ctx.rows(op.places.shape.rows(), k * width, |token| {
        // SAFETY: tokens have one task each; `d_inp` shares no memory with `d_out` (`Op::check`).
        unsafe {
            let d = d_inp.row(token, width).all_mut();
            sum_routes(isa, d, d_out, &places[token * k..(token + 1) * k], adds);
        }
    })
}

pub fn combine(ctx: &mut Ctx<'_>, op: &Combine) -> Result<()> {
    let (out, rows, weights) = (ctx.f32(op.out)?, ctx.f32(op.rows)?, ctx.f32(op.weights)?);
    let (isa, width, k) = (ctx.isa, op.out.shape.cols(), op.places.shape.cols());
    // SAFETY: nothing writes places and weights while the op runs.
    let (places, weights) = unsafe { (ctx.i32(op.places)?.all(), weights.all()) };
    check_below("row", places, places.len())?;
    ctx.rows(op.places.shape.rows(), k * width, |token| {
        let routes = token * k..(token + 1) * k;
        // SAFETY: tokens have one task each; `out` shares no memory with `rows` (`Op::check`).
        unsafe {
            let out = out.row(token, width).all_mut();
            combine_routes(isa, out, rows, &places[routes.clone()], &weights[routes]);
        }
    })
}

pub fn combine_bwd(ctx: &mut Ctx<'_>, op: &CombineBwd) -> Result<()> {
    let (d_rows, d_weights) = (ctx.f32(op.d_rows)?, ctx.f32(op.d_weights)?);
    let (d_out, rows, weights) = (ctx.f32(op.d_out)?, ctx.f32(op.rows)?, ctx.f32(op.weights)?);
    let (isa, width, k) = (ctx.isa, op.d_out.shape.cols(), op.places.shape.cols());
    // SAFETY: nothing writes places and weights while the op runs.
    let (places, weights) = unsafe { (ctx.i32(op.places)?.all(), weights.all()) };
    check_below("row", places, places.len())?;
    let seen = ctx.counts(places.len());
    // SAFETY: one thread, and nobody else has this memory.
    if !is_permutation(places, unsafe { seen.all_mut() }) {
        return Err(Error::Input("combine_bwd: two routes have the same row in `places`".to_owned()));
    }
    ctx.rows(op.places.shape.rows(), k * width, |token| {
        for route in token * k..(token + 1) * k {
            let [d_row, row] = [d_rows, rows].map(|x| x.row(places[route] as usize, width));
            // SAFETY: no two routes have the same row, so tasks write disjoint rows; `rows` is `d_rows` or shares no memory
            // with it (`Op::check`).
            unsafe {
                let d = d_out.row(token, width).all();
                d_weights.set(route, combine_route_bwd(isa, d_row, d, row, weights[route]));
            }
        }
    })
}
