//! Moving tokens to their experts and back.

use super::{Unfit, below, length};
use crate::eager::process_team::ProcessTeam;
use crate::kernel::routing::{
    self as kernel, Routed, count_routes, first_rows, is_permutation, place_routes,
};
use crate::memory::{Span, Word};

/// A window that is only read.
fn read_only<T: Word>(x: &[T]) -> Span<T> {
    // SAFETY: the memory of a slice, which outlives the call that made this.
    unsafe { Span::from_raw(x.as_ptr().cast_mut(), x.len()) }
}

/// Sorts the routes by expert, those of one expert in their order; rows `offsets[e]..offsets[e + 1]` are expert e's.
///
/// # Errors
/// An array has the wrong size; an expert is out of range; there are more than 2³¹ routes.
pub fn sort(
    experts: &[i32],
    (order, places): (&mut [i32], &mut [i32]),
    offsets: &mut [i32],
) -> Result<(), Unfit> {
    length("order", order.len(), experts.len())?;
    length("places", places.len(), experts.len())?;
    let all = offsets.len().saturating_sub(1);
    below("experts", experts, all)?;
    if i32::try_from(experts.len()).is_err() {
        return Err(Unfit::Length("experts", experts.len(), i32::MAX as usize));
    }
    let mut next = vec![0; all];
    count_routes(experts, &mut next);
    first_rows(&mut next, offsets);
    // SAFETY: one piece has all routes, and this call alone uses `order`.
    unsafe { place_routes(experts, 0..experts.len(), &mut next, places, Span::of_slice(order)) };
    Ok(())
}

/// `rows[s] = inp[order[s] / K]`: each token once for each of its experts. `inp` is (N, C), `rows` (N·K, C).
///
/// # Errors
/// An array has the wrong size; an element of `order` is out of range.
pub fn permute(
    rows: &mut [f32],
    inp: &[f32],
    order: &[i32],
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("inp", inp.len(), tokens * width)?;
    length("rows", rows.len(), order.len() * width)?;
    let k = routes_per_token("order", order, tokens)?;
    // SAFETY: the sizes were checked; this call alone uses `rows`.
    Ok(unsafe { kernel::permute(&ProcessTeam, Span::of_slice(rows), read_only(inp), order, k) }?)
}

/// The number of routes of each token. Refuses indices of routes or rows that are out of range.
fn routes_per_token(name: &'static str, indices: &[i32], tokens: usize) -> Result<usize, Unfit> {
    let k = indices.len() / tokens.max(1);
    length(name, indices.len(), k * tokens)?;
    below(name, indices, indices.len())?;
    Ok(k)
}

/// The rows of the tokens' routes. Refuses what does not fit together.
fn routed<'a>(
    rows: &'a [f32],
    places: &'a [i32],
    (tokens, width): (usize, usize),
) -> Result<Routed<'a>, Unfit> {
    length("rows", rows.len(), places.len() * width)?;
    Ok(Routed { rows: read_only(rows), places, tokens, k: routes_per_token("places", places, tokens)? })
}

/// `d_inp[n] = Σ_j d_rows[places[n, j]]`, in the order of j.
///
/// # Errors
/// An array has the wrong size; a place is out of range.
pub fn permute_bwd(
    d_inp: &mut [f32],
    d_rows: &[f32],
    places: &[i32],
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("d_inp", d_inp.len(), tokens * width)?;
    let routed = routed(d_rows, places, (tokens, width))?;
    // SAFETY: the sizes were checked; this call alone uses `d_inp`.
    Ok(unsafe { routed.sum(&ProcessTeam, Span::of_slice(d_inp), None, false) }?)
}

/// `out[n] = Σ_j weights[n, j]·rows[places[n, j]]`, in the order of j.
///
/// # Errors
/// An array has the wrong size; a place is out of range.
pub fn combine(
    out: &mut [f32],
    rows: &[f32],
    (places, weights): (&[i32], &[f32]),
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("out", out.len(), tokens * width)?;
    length("weights", weights.len(), places.len())?;
    let routed = routed(rows, places, (tokens, width))?;
    // SAFETY: the sizes were checked; this call alone uses `out`.
    Ok(unsafe { routed.sum(&ProcessTeam, Span::of_slice(out), Some(weights), false) }?)
}

/// Gradients of [`combine`]: `d_rows[places[n, j]] = weights[n, j]·d_out[n]` and `d_weights[n, j] = d_out[n]·rows[places[n, j]]`.
///
/// # Errors
/// An array has the wrong size; the places are not a permutation.
pub fn combine_bwd(
    (d_rows, d_weights): (&mut [f32], &mut [f32]),
    (d_out, rows): (&[f32], &[f32]),
    (places, weights): (&[i32], &[f32]),
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("d_out", d_out.len(), tokens * width)?;
    length("d_rows", d_rows.len(), places.len() * width)?;
    length("weights", weights.len(), places.len())?;
    length("d_weights", d_weights.len(), places.len())?;
    let routed = routed(rows, places, (tokens, width))?;
    if !is_permutation(places, &mut vec![0; places.len()]) {
        return Err(Unfit::Numbers("places"));
    }
    let to = (Span::of_slice(d_rows), Span::of_slice(d_weights));
    // SAFETY: the sizes were checked; no two places are the same; this call alone uses what is written.
    Ok(unsafe { routed.sum_bwd(&ProcessTeam, to, (read_only(d_out), weights)) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_no_routing_are_refused() {
        let (d_rows, d_weights) = (&mut [0.0; 3], &mut [0.0; 3]);
        let refused =
            combine_bwd((d_rows, d_weights), (&[0.0; 3], &[0.0; 3]), (&[0, 1, 1], &[0.0; 3]), (3, 1));
        assert_eq!(refused, Err(Unfit::Numbers("places")));
        assert_eq!(sort(&[0, 4], (&mut [0; 2], &mut [0; 2]), &mut [0; 5]), Err(Unfit::Numbers("experts")));
    }

    #[test]
    fn routes_are_sorted_stably_and_rows_come_back() {
        let experts = [2, 0, 0, 2, 2, 3];
        let (mut order, mut places, mut offsets) = ([0; 6], [0; 6], [9; 5]);
        sort(&experts, (&mut order, &mut places), &mut offsets).unwrap();
        assert_eq!(order, [1, 2, 0, 3, 4, 5]);
        assert_eq!(places, [2, 0, 1, 3, 4, 5]);
        assert_eq!(offsets, [0, 2, 2, 5, 6]);
        let inp = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        let mut rows = [0.0; 12];
        permute(&mut rows, &inp, &order, (3, 2)).unwrap();
        assert_eq!(rows, [1.0, 10.0, 2.0, 20.0, 1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 3.0, 30.0]);
        let mut out = [0.0; 6];
        combine(&mut out, &rows, (&places, &[0.25, 0.75, 0.5, 0.5, 1.0, 1.0]), (3, 2)).unwrap();
        assert_eq!(out, [1.0, 10.0, 2.0, 20.0, 6.0, 60.0]);
        let mut d_inp = [7.0; 6];
        permute_bwd(&mut d_inp, &rows, &places, (3, 2)).unwrap();
        assert_eq!(d_inp, [2.0, 20.0, 4.0, 40.0, 6.0, 60.0]);
    }
}
