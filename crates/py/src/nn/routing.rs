//! Choosing experts, moving tokens to them and back: on the host.

use super::{Object, Result};
use crate::array::{NumpyArray, NumpyCall, Placed, Slot};
use ironhorse::cpu::eager::routing::{self, Routed, RoutedMut, Sizes, Unfit};
use ironhorse::ops::spec::Elem::{F32, I32};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

const HOST: &str = "cpu";

/// [`NumpyCall::run`] of work on the host that may refuse its arguments.
fn run(
    call: &NumpyCall<'_>,
    elements: usize,
    work: impl FnOnce(&Placed) -> std::result::Result<(), Unfit> + Send,
) -> PyResult<()> {
    let mut refused = None;
    call.run(elements, |on| {
        refused = work(on).err();
        Ok(())
    })?;
    refused.map_or(Ok(()), |unfit| Err(call.invalid(unfit)))
}

/// An array of a call, to take along into work without the interpreter's lock.
#[derive(Clone, Copy)]
struct Memory {
    slot: Slot,
    len: usize,
}

impl Memory {
    fn of(array: &NumpyArray<'_>) -> Self {
        Self { slot: array.slot(), len: array.len() }
    }

    /// The elements, to read.
    ///
    /// # Safety
    /// The array is of T and held, and nothing writes it meanwhile.
    unsafe fn read<T>(self, on: &Placed) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts(on.address(self.slot).cast::<T>(), self.len) }
    }

    /// The elements, to write.
    ///
    /// # Safety
    /// The array is of T, held, and used by nothing else meanwhile.
    #[allow(clippy::mut_from_ref)] // `on` holds addresses; the memory is not borrowed from it
    unsafe fn write<T>(self, on: &Placed) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(on.address(self.slot).cast::<T>(), self.len) }
    }
}

/// The softmax of logits (tokens, experts), and of the k largest of each token: weights, numbers, and the routes sorted by
/// expert. Returns (probs, weights, experts, order, places, offsets).
#[pyfunction]
#[pyo3(signature = (logits, k, /))]
pub fn nn_route<'py>(logits: &Object<'py>, k: usize) -> PyResult<Bound<'py, PyTuple>> {
    let py = logits.py();
    let mut call = NumpyCall::new(py, "router", HOST)?;
    let logits = call.read("logits", logits)?;
    let (tokens, all) = logits.rows();
    let sizes = Sizes { tokens, experts: all, chosen: k };
    if k == 0 || k > sizes.experts {
        return Err(call.invalid(Unfit::Chosen(k, sizes.experts)));
    }
    let probs = call.made(F32, logits.shape())?;
    let weights = call.made(F32, &[sizes.tokens, k])?;
    let experts = call.made(I32, &[sizes.tokens, k])?;
    let order = call.made(I32, &[sizes.tokens * k])?;
    let places = call.made(I32, &[sizes.tokens, k])?;
    let offsets = call.made(I32, &[sizes.experts + 1])?;
    let from = Memory::of(&logits);
    let (p, w) = (Memory::of(&probs), Memory::of(&weights));
    let (e, o, at, ends) =
        (Memory::of(&experts), Memory::of(&order), Memory::of(&places), Memory::of(&offsets));
    run(&call, logits.len() * k, |on| {
        // SAFETY: the arrays are held until `run` returns; outputs are new, so apart from all others.
        unsafe {
            let (probs, weights) = (p.write(on), w.write(on));
            let mut to = RoutedMut { probs, weights, experts: e.write(on) };
            let chosen = routing::choose(from.read(on), &mut to, sizes);
            chosen.and_then(|()| routing::sort(to.experts, (o.write(on), at.write(on)), ends.write(on)))
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
    let mut call = NumpyCall::new(probs.py(), "router_bwd", HOST)?;
    let (probs, weights) = (call.read("probs", probs)?, call.read("weights", weights)?);
    let (d_weights, load) = (call.read("d_weights", d_weights)?, call.read("load", load)?);
    let experts = call.input("experts", I32, experts)?;
    let (tokens, all) = probs.rows();
    let (_, k) = weights.rows();
    let sizes = Sizes { tokens, experts: all, chosen: k };
    let chosen = call.indices(("experts", &experts), tokens * k, all)?;
    let d_logits = call.made(F32, probs.shape())?;
    let (d, p) = (Memory::of(&d_logits), Memory::of(&probs));
    let (w, d_w, l) = (Memory::of(&weights), Memory::of(&d_weights), Memory::of(&load));
    run(&call, probs.len(), |on| {
        // SAFETY: as in `nn_route`.
        unsafe {
            let (probs, weights) = (p.read(on), w.read(on));
            let (from, load) = (Routed { probs, weights, experts: chosen.values() }, l.read(on));
            routing::choose_bwd(d.write(on), d_w.read(on), from, (load, scale), sizes)
        }
    })?;
    Ok(d_logits.object())
}

/// x of each route in their order: (tokens · k, C)
#[pyfunction]
#[pyo3(signature = (x, order, /))]
pub fn nn_permute<'py>(x: &Object<'py>, order: &Object<'py>) -> Result<'py> {
    let mut call = NumpyCall::new(x.py(), "permute", HOST)?;
    let (x, order) = (call.read("x", x)?, call.input("order", I32, order)?);
    let (tokens, width) = x.rows();
    let order = call.indices(("order", &order), order.len(), order.len())?;
    let rows = call.made(F32, &[order.values().len(), width])?;
    let (from, to, sizes) = (Memory::of(&x), Memory::of(&rows), (tokens, width));
    run(&call, rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        unsafe { routing::permute(to.write(on), from.read(on), order.values(), sizes) }
    })?;
    Ok(rows.object())
}

/// The gradient of x of `nn_permute`: the sum of each token's rows.
#[pyfunction]
#[pyo3(signature = (d_rows, places, /))]
pub fn nn_permute_bwd<'py>(d_rows: &Object<'py>, places: &Object<'py>) -> Result<'py> {
    let mut call = NumpyCall::new(d_rows.py(), "permute_bwd", HOST)?;
    let (d_rows, places) = (call.read("d_rows", d_rows)?, call.input("places", I32, places)?);
    let (routes, width) = d_rows.rows();
    let (tokens, _) = places.rows();
    let places = call.indices(("places", &places), routes, routes)?;
    let d_x = call.made(F32, &[tokens, width])?;
    let (from, to, sizes) = (Memory::of(&d_rows), Memory::of(&d_x), (tokens, width));
    run(&call, d_rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        unsafe { routing::permute_bwd(to.write(on), from.read(on), places.values(), sizes) }
    })?;
    Ok(d_x.object())
}

/// The weighted sum of each token's rows: (tokens, C)
#[pyfunction]
#[pyo3(signature = (rows, places, weights, /))]
pub fn nn_combine<'py>(rows: &Object<'py>, places: &Object<'py>, weights: &Object<'py>) -> Result<'py> {
    let mut call = NumpyCall::new(rows.py(), "combine", HOST)?;
    let (rows, weights) = (call.read("rows", rows)?, call.read("weights", weights)?);
    let places = call.input("places", I32, places)?;
    let (routes, width) = rows.rows();
    let (tokens, _) = weights.rows();
    let places = call.indices(("places", &places), routes, routes)?;
    let out = call.made(F32, &[tokens, width])?;
    let (from, by, to) = (Memory::of(&rows), Memory::of(&weights), Memory::of(&out));
    let sizes = (tokens, width);
    run(&call, rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        unsafe {
            let by = (places.values(), by.read(on));
            routing::combine(to.write(on), from.read(on), by, sizes)
        }
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
) -> PyResult<(Object<'py>, Object<'py>)> {
    let mut call = NumpyCall::new(rows.py(), "combine_bwd", HOST)?;
    let (d_out, rows) = (call.read("d_out", d_out)?, call.read("rows", rows)?);
    let (weights, places) = (call.read("weights", weights)?, call.input("places", I32, places)?);
    let (routes, width) = rows.rows();
    let (tokens, _) = weights.rows();
    let places = call.indices(("places", &places), routes, routes)?;
    let d_rows = call.made(F32, rows.shape())?;
    let d_weights = call.made(F32, weights.shape())?;
    let (d, from, by) = (Memory::of(&d_out), Memory::of(&rows), Memory::of(&weights));
    let (to, to_weights, sizes) = (Memory::of(&d_rows), Memory::of(&d_weights), (tokens, width));
    run(&call, 2 * rows.len(), |on| {
        // SAFETY: as in `nn_route`.
        unsafe {
            let to = (to.write(on), to_weights.write(on));
            let from = (d.read(on), from.read(on));
            routing::combine_bwd(to, from, (places.values(), by.read(on)), sizes)
        }
    })?;
    Ok((d_rows.object(), d_weights.object()))
}
