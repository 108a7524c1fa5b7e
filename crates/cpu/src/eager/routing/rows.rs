//! Moving tokens to their experts and back.

use super::{Unfit, below, length};
use crate::eager::process_team::ProcessTeam;
use crate::kernel::routing::{
    combine_route_bwd, combine_routes, count_routes, first_rows, is_permutation, place_routes, sum_routes,
};
use crate::memory::{Span, Word};
use crate::team::Split;

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
    let rows = Span::of_slice(rows);
    Ok(ProcessTeam.rows(order.len(), width, 1, |row| {
        let token = order[row] as usize / k;
        // SAFETY: rows have one task each.
        let to = unsafe { rows.row(row, width).all_mut() };
        to.copy_from_slice(&inp[token * width..(token + 1) * width]);
    })?)
}

/// The number of routes of each token. Refuses indices of routes or rows that are out of range.
fn routes_per_token(name: &'static str, indices: &[i32], tokens: usize) -> Result<usize, Unfit> {
    let k = indices.len() / tokens.max(1);
    length(name, indices.len(), k * tokens)?;
    below(name, indices, indices.len())?;
    Ok(k)
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
    length("rows", d_rows.len(), places.len() * width)?;
    let k = routes_per_token("places", places, tokens)?;
    let (isa, d_inp, d_rows) = (ProcessTeam.isa(), Span::of_slice(d_inp), read_only(d_rows));
    Ok(ProcessTeam.rows(tokens, width, k.max(1), |token| {
        // SAFETY: tokens have one task each; nobody writes the rows.
        unsafe {
            sum_routes(
                isa,
                d_inp.row(token, width).all_mut(),
                d_rows,
                &places[token * k..(token + 1) * k],
                false,
            );
        }
    })?)
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
    length("rows", rows.len(), places.len() * width)?;
    length("weights", weights.len(), places.len())?;
    let k = routes_per_token("places", places, tokens)?;
    let (isa, out, rows) = (ProcessTeam.isa(), Span::of_slice(out), read_only(rows));
    Ok(ProcessTeam.rows(tokens, width, k.max(1), |token| {
        let routes = token * k..(token + 1) * k;
        // SAFETY: tokens have one task each; nobody writes the rows.
        unsafe {
            let out = out.row(token, width).all_mut();
            combine_routes(isa, out, rows, &places[routes.clone()], &weights[routes]);
        }
    })?)
}

/// Of [`combine`]: `d_rows[places[n, j]] = weights[n, j]·d_out[n]` and `d_weights[n, j] = d_out[n]·rows[places[n, j]]`.
///
/// # Errors
/// An array has the wrong size; the places are no permutation.
pub fn combine_bwd(
    (d_rows, d_weights): (&mut [f32], &mut [f32]),
    (d_out, rows): (&[f32], &[f32]),
    (places, weights): (&[i32], &[f32]),
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("d_out", d_out.len(), tokens * width)?;
    length("rows", rows.len(), places.len() * width)?;
    length("d_rows", d_rows.len(), places.len() * width)?;
    length("weights", weights.len(), places.len())?;
    length("d_weights", d_weights.len(), places.len())?;
    let k = routes_per_token("places", places, tokens)?;
    if !is_permutation(places, &mut vec![0; places.len()]) {
        return Err(Unfit::Numbers("places"));
    }
    let (isa, d_rows, d_weights) = (ProcessTeam.isa(), Span::of_slice(d_rows), Span::of_slice(d_weights));
    let (d_out, rows) = (read_only(d_out), read_only(rows));
    Ok(ProcessTeam.rows(tokens, width, 2 * k.max(1), |token| {
        for route in token * k..(token + 1) * k {
            let [d_row, row] = [d_rows, rows].map(|x| x.row(places[route] as usize, width));
            // SAFETY: no two routes have the same row, so tasks write disjoint elements, which nobody reads.
            unsafe {
                let d = d_out.row(token, width).all();
                d_weights.set(route, combine_route_bwd(isa, d_row, d, row, weights[route]));
            }
        }
    })?)
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
