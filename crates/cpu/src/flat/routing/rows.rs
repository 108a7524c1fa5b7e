//! Moving tokens to their experts and back.

use super::super::pool::{isa, row_pieces};
use super::super::{Done, Span};
use super::{Unfit, below, length};
use crate::math::dot;
use crate::multiversion;

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

/// Sorts the routes by expert, those of one expert in their order; rows `offsets[e]..offsets[e + 1]` are expert e's.
///
/// # Errors
/// Arrays of other sizes; experts that do not exist; more than 2³¹ routes.
pub fn sort(
    experts: &[i32],
    (order, places): (&mut [i32], &mut [i32]),
    offsets: &mut [i32],
) -> Result<(), Unfit> {
    length("order", order.len(), experts.len())?;
    length("places", places.len(), experts.len())?;
    below("experts", experts, offsets.len().saturating_sub(1))?;
    if i32::try_from(experts.len()).is_err() {
        return Err(Unfit::Length("experts", experts.len(), i32::MAX as usize));
    }
    offsets.fill(0);
    experts.iter().for_each(|&e| offsets[e as usize + 1] += 1);
    for e in 1..offsets.len() {
        offsets[e] += offsets[e - 1];
    }
    // While routes are placed, offsets[e] is the next row of expert e; afterwards it is where e + 1 begins.
    for (route, (&e, place)) in experts.iter().zip(places).enumerate() {
        let row = &mut offsets[e as usize];
        (*place, order[*row as usize]) = (*row, route as i32);
        *row += 1;
    }
    let experts = offsets.len().saturating_sub(1);
    offsets.copy_within(..experts, 1);
    if let Some(first) = offsets.first_mut() {
        *first = 0;
    }
    Ok(())
}

/// `rows[s] = inp[order[s] / K]`: each token once for each of its experts. `inp` is (N, C), `rows` (N·K, C).
///
/// # Errors
/// Arrays of other sizes; an order that is none.
pub fn permute(
    rows: &mut [f32],
    inp: &[f32],
    order: &[i32],
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("inp", inp.len(), tokens * width)?;
    length("rows", rows.len(), order.len() * width)?;
    if tokens == 0 || order.is_empty() {
        return length("order", order.len(), 0);
    }
    let k = order.len() / tokens;
    length("order", order.len(), k * tokens)?;
    below("order", order, order.len())?;
    let rows = span(rows);
    Ok(row_pieces(order.len(), width, 1, |range| {
        for row in range {
            let token = order[row] as usize / k;
            // SAFETY: tasks have disjoint rows, which share no memory with `inp`.
            let to = unsafe { rows.get_mut(row * width..(row + 1) * width) };
            to.copy_from_slice(&inp[token * width..(token + 1) * width]);
        }
    })?)
}

/// `d_inp[n] = Σ_j d_rows[places[n, j]]`, in the order of j.
///
/// # Errors
/// Arrays of other sizes; places that are none.
pub fn permute_bwd(
    d_inp: &mut [f32],
    d_rows: &[f32],
    places: &[i32],
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("d_inp", d_inp.len(), tokens * width)?;
    each_token(d_inp, (d_rows, places), (tokens, width), |to, rows, _| {
        let mut rows = rows.iter();
        if let Some(first) = rows.next() {
            to.copy_from_slice(first);
        }
        rows.for_each(|row| to.iter_mut().zip(*row).for_each(|(to, row)| *to += row));
    })
}

/// `out[n] = Σ_j weights[n, j]·rows[places[n, j]]`, in the order of j.
///
/// # Errors
/// Arrays of other sizes; places that are none.
pub fn combine(
    out: &mut [f32],
    rows: &[f32],
    (places, weights): (&[i32], &[f32]),
    (tokens, width): (usize, usize),
) -> Result<(), Unfit> {
    length("out", out.len(), tokens * width)?;
    length("weights", weights.len(), places.len())?;
    let isa = isa();
    each_token(out, (rows, places), (tokens, width), |to, rows, first| {
        let mut rows = rows.iter().zip(&weights[first..]);
        if let Some((row, &weight)) = rows.next() {
            scaled(isa, to, weight, row);
        }
        rows.for_each(|(row, &weight)| add_scaled(isa, to, weight, row));
    })
}

/// Calls `work` with each token of `out`, the rows of its routes, and the number of its first route.
fn each_token(
    out: &mut [f32],
    (rows, places): (&[f32], &[i32]),
    (tokens, width): (usize, usize),
    work: impl Fn(&mut [f32], &[&[f32]], usize) + Sync,
) -> Result<(), Unfit> {
    length("rows", rows.len(), places.len() * width)?;
    let k = places.len() / tokens.max(1);
    length("places", places.len(), k * tokens)?;
    below("places", places, places.len())?;
    let out = span(out);
    Ok(row_pieces(tokens, width, k.max(1), |range| {
        let mut own: Vec<&[f32]> = Vec::with_capacity(k);
        for token in range {
            own.clear();
            let at = |&place: &i32| &rows[place as usize * width..(place as usize + 1) * width];
            own.extend(places[token * k..(token + 1) * k].iter().map(at));
            // SAFETY: tasks have disjoint tokens, which share no memory with `rows`.
            let to = unsafe { out.get_mut(token * width..(token + 1) * width) };
            work(to, &own, token * k);
        }
    })?)
}

/// Of [`combine`]: `d_rows[places[n, j]] = weights[n, j]·d_out[n]` and `d_weights[n, j] = d_out[n]·rows[places[n, j]]`.
///
/// # Errors
/// Arrays of other sizes; places that are no permutation.
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
    let k = places.len() / tokens.max(1);
    length("places", places.len(), k * tokens)?;
    permutation(places)?;
    let (isa, d_rows, d_weights) = (isa(), span(d_rows), span(d_weights));
    let done: Done = row_pieces(tokens, width, 2 * k.max(1), |range| {
        for route in range.start * k..range.end * k {
            let (token, row) = (route / k, places[route] as usize * width);
            let d = &d_out[token * width..(token + 1) * width];
            // SAFETY: no two routes have the same row, so tasks write disjoint elements, which nobody reads.
            let (to, d_weight) =
                unsafe { (d_rows.get_mut(row..row + width), d_weights.get_mut(route..route + 1)) };
            d_weight[0] = dot(isa, d, &rows[row..row + width]);
            scaled(isa, to, weights[route], d);
        }
    });
    Ok(done?)
}

/// Refuses places that are no permutation: two tasks would write the same row.
fn permutation(places: &[i32]) -> Result<(), Unfit> {
    below("places", places, places.len())?;
    let mut seen = vec![false; places.len()];
    let first_time = |&place: &i32| !std::mem::replace(&mut seen[place as usize], true);
    if places.iter().all(first_time) { Ok(()) } else { Err(Unfit::Numbers("places")) }
}

/// For tasks that write parts of a slice.
fn span<T: crate::memory::Word>(slice: &mut [T]) -> Span<T> {
    // SAFETY: the memory of a slice, which outlives the call that made this.
    unsafe { Span::from_raw(slice.as_mut_ptr(), slice.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_no_routing_are_refused() {
        assert_eq!(permutation(&[0, 1, 1]), Err(Unfit::Numbers("places")));
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
