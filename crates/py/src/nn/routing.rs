//! Choosing experts, moving tokens to them and back: on the host.

use super::{Object, Result, Two};
use crate::array::{Array, Call, Pointer, Sharing, rows_of};
use ironhorse::cpu::flat::Span;
use ironhorse::cpu::flat::routing::{self, Choice, Chosen, Sizes, Unfit};
use ironhorse::ops::{Code, OpError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

const HOST: &str = "cpu";

fn refused(op: &str, unfit: &Unfit) -> OpError {
    OpError { code: Code::InvalidValue, text: format!("{op}: {unfit}") }
}

/// An array and how many elements it has, to take along.
#[derive(Clone, Copy)]
struct Part<T>(Pointer<T>, usize);

impl<T> Part<T> {
    fn of(array: &Array<'_, T>) -> Self {
        Self(array.at(), array.len())
    }
}

/// The elements of arrays of a call.
///
/// # Safety
/// Used inside `run`, while the arrays are held; `write` of outputs only, once each.
macro_rules! elements {
    (read $on:ident $part:expr) => {{ Span::from_raw($on.write($part.0), $part.1).all() }};
    (write $on:ident $part:expr) => {{ Span::from_raw($on.write($part.0), $part.1).all_mut() }};
}

/// The softmax of logits (tokens, experts), and of the k largest of each token: weights, numbers, and the routes sorted by
/// expert. Returns (probs, weights, experts, order, places, offsets).
#[pyfunction]
#[pyo3(signature = (logits, k, /))]
pub fn nn_route<'py>(logits: &Object<'py>, k: usize) -> PyResult<Bound<'py, PyTuple>> {
    const OP: &str = "router";
    let py = logits.py();
    let mut call = Call::new(py, OP, HOST)?;
    let logits = call.input::<f32>("logits", logits)?;
    let (tokens, all) = rows_of(&call, ("logits", &logits), (None, None))?;
    let sizes = Sizes { tokens: tokens as usize, experts: all as usize, chosen: k };
    if k == 0 || k > sizes.experts {
        return Err(call.invalid(Unfit::Chosen(k, sizes.experts)));
    }
    let probs = call.output_or_new::<f32>("probs", None, logits.shape())?;
    let weights = call.output_or_new::<f32>("weights", None, &[sizes.tokens, k])?;
    let experts = call.output_or_new::<i32>("experts", None, &[sizes.tokens, k])?;
    let order = call.output_or_new::<i32>("order", None, &[sizes.tokens * k])?;
    let places = call.output_or_new::<i32>("places", None, &[sizes.tokens, k])?;
    let offsets = call.output_or_new::<i32>("offsets", None, &[sizes.experts + 1])?;
    let from = Part::of(&logits);
    let (p, w) = (Part::of(&probs), Part::of(&weights));
    let (e, o, at, ends) = (Part::of(&experts), Part::of(&order), Part::of(&places), Part::of(&offsets));
    call.run(Sharing::Nothing, logits.len() * k, |on| {
        // SAFETY: the arrays are held until `run` returns; outputs are new, so apart from all others.
        unsafe {
            let (probs, weights) = (elements!(write on p), elements!(write on w));
            let mut to = Choice { probs, weights, experts: elements!(write on e) };
            let chosen = routing::choose(elements!(read on from), &mut to, sizes);
            let sorted = chosen.and_then(|()| {
                let rows = (elements!(write on o), elements!(write on at));
                routing::sort(to.experts, rows, elements!(write on ends))
            });
            sorted.map_err(|unfit| refused(OP, &unfit))
        }
    })?;
    let (probs, weights, experts) = (probs.object(), weights.object(), experts.object());
    PyTuple::new(py, [probs, weights, experts, order.object(), places.object(), offsets.object()])
}

/// The gradient of the logits, through the weights and through scale · sum of load · probs.
#[pyfunction]
#[pyo3(signature = (d_weights, probs, weights, experts, load, scale, /))]
pub fn nn_route_bwd<'py>(
    d_weights: &Object<'py>,
    probs: &Object<'py>,
    weights: &Object<'py>,
    experts: &Object<'py>,
    load: &Object<'py>,
    scale: f32,
) -> Result<'py> {
    const OP: &str = "router_bwd";
    let mut call = Call::new(probs.py(), OP, HOST)?;
    let (probs, weights) = (call.input::<f32>("probs", probs)?, call.input::<f32>("weights", weights)?);
    let (d_weights, load) = (call.input::<f32>("d_weights", d_weights)?, call.input::<f32>("load", load)?);
    let experts = call.input::<i32>("experts", experts)?;
    let (tokens, all) = rows_of(&call, ("probs", &probs), (None, None))?;
    let (_, k) = rows_of(&call, ("weights", &weights), (None, None))?;
    let sizes = Sizes { tokens: tokens as usize, experts: all as usize, chosen: k as usize };
    let chosen = call.indices(("experts", &experts), tokens * k, all)?;
    let d_logits = call.output_or_new::<f32>("d_logits", None, probs.shape())?;
    let (d, p) = (Part::of(&d_logits), Part::of(&probs));
    let (w, d_w, l) = (Part::of(&weights), Part::of(&d_weights), Part::of(&load));
    call.run(Sharing::Nothing, probs.len(), |on| {
        // SAFETY: as in `nn_route`.
        unsafe {
            let (probs, weights) = (elements!(read on p), elements!(read on w));
            let (from, load) = (Chosen { probs, weights, experts: chosen.values() }, elements!(read on l));
            routing::choose_bwd(elements!(write on d), elements!(read on d_w), from, (load, scale), sizes)
                .map_err(|unfit| refused(OP, &unfit))
        }
    })?;
    Ok(d_logits.object())
}

/// x of each route in their order: (tokens · k, C)
#[pyfunction]
#[pyo3(signature = (x, order, /))]
pub fn nn_permute<'py>(x: &Object<'py>, order: &Object<'py>) -> Result<'py> {
    const OP: &str = "permute";
    let mut call = Call::new(x.py(), OP, HOST)?;
    let (x, order) = (call.input::<f32>("x", x)?, call.input::<i32>("order", order)?);
    let (tokens, width) = rows_of(&call, ("x", &x), (None, None))?;
    let order = call.indices(("order", &order), order.count(), order.count())?;
    let rows = call.output_or_new::<f32>("rows", None, &[order.values().len(), width as usize])?;
    let (from, to, sizes) = (Part::of(&x), Part::of(&rows), (tokens as usize, width as usize));
    call.run(Sharing::Nothing, rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        let done = unsafe {
            routing::permute(elements!(write on to), elements!(read on from), order.values(), sizes)
        };
        done.map_err(|unfit| refused(OP, &unfit))
    })?;
    Ok(rows.object())
}

/// The gradient of x of `nn_permute`: the sum of each token's rows.
#[pyfunction]
#[pyo3(signature = (d_rows, places, /))]
pub fn nn_permute_bwd<'py>(d_rows: &Object<'py>, places: &Object<'py>) -> Result<'py> {
    const OP: &str = "permute_bwd";
    let mut call = Call::new(d_rows.py(), OP, HOST)?;
    let (d_rows, places) = (call.input::<f32>("d_rows", d_rows)?, call.input::<i32>("places", places)?);
    let (routes, width) = rows_of(&call, ("d_rows", &d_rows), (None, None))?;
    let (tokens, _) = rows_of(&call, ("places", &places), (None, None))?;
    let places = call.indices(("places", &places), routes, routes)?;
    let d_x = call.output_or_new::<f32>("d_x", None, &[tokens as usize, width as usize])?;
    let (from, to, sizes) = (Part::of(&d_rows), Part::of(&d_x), (tokens as usize, width as usize));
    call.run(Sharing::Nothing, d_rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        let done = unsafe {
            routing::permute_bwd(elements!(write on to), elements!(read on from), places.values(), sizes)
        };
        done.map_err(|unfit| refused(OP, &unfit))
    })?;
    Ok(d_x.object())
}

/// The weighted sum of each token's rows: (tokens, C)
#[pyfunction]
#[pyo3(signature = (rows, places, weights, /))]
pub fn nn_combine<'py>(rows: &Object<'py>, places: &Object<'py>, weights: &Object<'py>) -> Result<'py> {
    const OP: &str = "combine";
    let mut call = Call::new(rows.py(), OP, HOST)?;
    let (rows, weights) = (call.input::<f32>("rows", rows)?, call.input::<f32>("weights", weights)?);
    let places = call.input::<i32>("places", places)?;
    let (routes, width) = rows_of(&call, ("rows", &rows), (None, None))?;
    let (tokens, _) = rows_of(&call, ("weights", &weights), (None, None))?;
    let places = call.indices(("places", &places), routes, routes)?;
    let out = call.output_or_new::<f32>("out", None, &[tokens as usize, width as usize])?;
    let (from, by, to) = (Part::of(&rows), Part::of(&weights), Part::of(&out));
    let sizes = (tokens as usize, width as usize);
    call.run(Sharing::Nothing, rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        let done = unsafe {
            let by = (places.values(), elements!(read on by));
            routing::combine(elements!(write on to), elements!(read on from), by, sizes)
        };
        done.map_err(|unfit| refused(OP, &unfit))
    })?;
    Ok(out.object())
}

/// The gradients of rows and weights of `nn_combine`.
#[pyfunction]
#[pyo3(signature = (d_out, rows, places, weights, /))]
pub fn nn_combine_bwd<'py>(
    d_out: &Object<'py>,
    rows: &Object<'py>,
    places: &Object<'py>,
    weights: &Object<'py>,
) -> Two<'py> {
    const OP: &str = "combine_bwd";
    let mut call = Call::new(rows.py(), OP, HOST)?;
    let (d_out, rows) = (call.input::<f32>("d_out", d_out)?, call.input::<f32>("rows", rows)?);
    let (weights, places) = (call.input::<f32>("weights", weights)?, call.input::<i32>("places", places)?);
    let (routes, width) = rows_of(&call, ("rows", &rows), (None, None))?;
    let (tokens, _) = rows_of(&call, ("weights", &weights), (None, None))?;
    let places = call.indices(("places", &places), routes, routes)?;
    let d_rows = call.output_or_new::<f32>("d_rows", None, rows.shape())?;
    let d_weights = call.output_or_new::<f32>("d_weights", None, weights.shape())?;
    let (d, from, by) = (Part::of(&d_out), Part::of(&rows), Part::of(&weights));
    let (to, to_weights, sizes) =
        (Part::of(&d_rows), Part::of(&d_weights), (tokens as usize, width as usize));
    call.run(Sharing::Nothing, 2 * rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        let done = unsafe {
            let to = (elements!(write on to), elements!(write on to_weights));
            let from = (elements!(read on d), elements!(read on from));
            routing::combine_bwd(to, from, (places.values(), elements!(read on by)), sizes)
        };
        done.map_err(|unfit| refused(OP, &unfit))
    })?;
    Ok((d_rows.object(), d_weights.object()))
}
