//! The router of a mixture of experts on plain memory of the host: choosing experts, moving tokens to them and back. The
//! rules are those of `ironhorse_core::op`'s `RouterFwd`, `RouterBwd`, `RouteSort`, `Permute` and `Combine`.
//!
//! N tokens, E experts, K of them for each; C channels. Route `token·K + j` is one choice; sorted by expert, routes are
//! rows of the experts' inputs: `order` leads from a row to its route, `places` from a route to its row.
//!
//! Everything is checked here, so that nothing is unsafe to call: an [`Unfit`] says what does not fit.

use super::pool::{isa, row_pieces};
use super::{Done, Span, TaskPanic};
use crate::math::{dot, max, sum};
use crate::multiversion;
use std::fmt;

multiversion! {
    fn exp_row<const FMA: bool>(p: &mut [f32], x: &[f32], max: f32) {
        for (p, x) in p.iter_mut().zip(x) {
            *p = crate::math::exp_f32::<FMA>(x - max);
        }
    }

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

/// Why a call did nothing, or not all.
#[derive(Clone, Debug, PartialEq)]
pub enum Unfit {
    /// An array has another number of elements: its name, those found, those expected.
    Length(&'static str, usize, usize),
    /// More experts chosen than there are, or none: chosen, there.
    Chosen(usize, usize),
    /// A logit that is not a finite number: its token, its value.
    Logit(usize, f32),
    /// Numbers that are not those of a routing: the name of the array.
    Numbers(&'static str),
    /// A task panicked: a bug in this crate.
    Panic,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(name, found, expected) => {
                write!(f, "`{name}` has {found} elements, expected {expected}")
            }
            Self::Chosen(k, all) => write!(f, "top_k is {k}, expected 1 to {all}, the number of experts"),
            Self::Logit(token, value) => write!(f, "a logit of token {token} is {value}, expected a number"),
            Self::Numbers(name) => write!(f, "`{name}` is not of a routing"),
            Self::Panic => write!(f, "a task panicked; this is a bug in ironhorse"),
        }
    }
}

impl std::error::Error for Unfit {}

impl From<TaskPanic> for Unfit {
    fn from(_: TaskPanic) -> Self {
        Self::Panic
    }
}

/// How many: tokens, experts, and experts of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// N
    pub tokens: usize,
    /// E
    pub experts: usize,
    /// K, 1 to E
    pub chosen: usize,
}

impl Sizes {
    fn check(self) -> Result<(), Unfit> {
        if self.chosen == 0 || self.chosen > self.experts {
            return Err(Unfit::Chosen(self.chosen, self.experts));
        }
        Ok(())
    }

    fn all(self) -> usize {
        self.tokens * self.experts
    }

    fn routes(self) -> usize {
        self.tokens * self.chosen
    }
}

fn length(name: &'static str, found: usize, expected: usize) -> Result<(), Unfit> {
    if found == expected { Ok(()) } else { Err(Unfit::Length(name, found, expected)) }
}

/// What a router decides.
#[derive(Debug)]
pub struct Choice<'a> {
    /// (N, E): softmax of the logits
    pub probs: &'a mut [f32],
    /// (N, K): probabilities of the chosen, over their sum
    pub weights: &'a mut [f32],
    /// (N, K): the largest logits, descending, of equal ones the lower number first
    pub experts: &'a mut [i32],
}

/// The same to read.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a> {
    /// As in [`Choice`].
    pub probs: &'a [f32],
    /// As in [`Choice`].
    pub weights: &'a [f32],
    /// As in [`Choice`].
    pub experts: &'a [i32],
}

/// Chooses the experts of each token.
///
/// # Errors
/// Arrays of other sizes; a logit that is no finite number.
pub fn choose(logits: &[f32], to: &mut Choice<'_>, sizes: Sizes) -> Result<(), Unfit> {
    sizes.check()?;
    length("logits", logits.len(), sizes.all())?;
    length("probs", to.probs.len(), sizes.all())?;
    length("weights", to.weights.len(), sizes.routes())?;
    length("experts", to.experts.len(), sizes.routes())?;
    let (isa, all, k) = (isa(), sizes.experts, sizes.chosen);
    let chosen = to.weights.chunks_exact_mut(k).zip(to.experts.chunks_exact_mut(k));
    let rows = logits.chunks_exact(all).zip(to.probs.chunks_exact_mut(all)).zip(chosen);
    for (token, ((x, p), (w, e))) in rows.enumerate() {
        if let Some(&strange) = x.iter().find(|x| !x.is_finite()) {
            return Err(Unfit::Logit(token, strange));
        }
        exp_row(isa, p, x, max(isa, x));
        let total = sum(isa, p);
        p.iter_mut().for_each(|p| *p /= total);
        let (mut last, mut total) = (None, 0.0_f32);
        for (w, e) in w.iter_mut().zip(e) {
            let (logit, index) = next_largest(x, last);
            (*w, *e) = (p[index], index as i32);
            total += *w;
            last = Some((logit, index));
        }
        w.iter_mut().for_each(|w| *w /= total);
    }
    Ok(())
}

/// The largest of the logits that come after `(value, index)` in their order: descending, equal ones by number.
fn next_largest(x: &[f32], after: Option<(f32, usize)>) -> (f32, usize) {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, &x) in x.iter().enumerate() {
        let left = after.is_none_or(|(value, index)| x < value || (x == value && i > index));
        if left && x > best.0 {
            best = (x, i);
        }
    }
    best
}

/// The gradient of the logits: through the weights, and through `scale·Σ_e load_e·Σ_n probs_ne`, the balancing loss.
///
/// `weights` are the softmax of the chosen logits alone: `weights_j·(d_weights_j - Σ weights·d_weights)`.
///
/// # Errors
/// Arrays of other sizes; experts that do not exist.
pub fn choose_bwd(
    d_logits: &mut [f32],
    d_weights: &[f32],
    from: Chosen<'_>,
    (load, scale): (&[f32], f32),
    sizes: Sizes,
) -> Result<(), Unfit> {
    sizes.check()?;
    length("d_logits", d_logits.len(), sizes.all())?;
    length("probs", from.probs.len(), sizes.all())?;
    length("load", load.len(), sizes.experts)?;
    length("d_weights", d_weights.len(), sizes.routes())?;
    length("weights", from.weights.len(), sizes.routes())?;
    length("experts", from.experts.len(), sizes.routes())?;
    below("experts", from.experts, sizes.experts)?;
    let (isa, all, k) = (isa(), sizes.experts, sizes.chosen);
    let rows = d_logits.chunks_exact_mut(all).zip(from.probs.chunks_exact(all));
    for (token, (d, p)) in rows.enumerate() {
        let mean = dot(isa, p, load);
        for ((d, p), load) in d.iter_mut().zip(p).zip(load) {
            *d = scale * (p * (load - mean));
        }
        let routes = token * k..(token + 1) * k;
        let (w, d_w) = (&from.weights[routes.clone()], &d_weights[routes.clone()]);
        let mean: f32 = w.iter().zip(d_w).map(|(w, d)| w * d).sum();
        for ((&e, w), d_w) in from.experts[routes].iter().zip(w).zip(d_w) {
            d[e as usize] += w * (d_w - mean);
        }
    }
    Ok(())
}

fn below(name: &'static str, numbers: &[i32], count: usize) -> Result<(), Unfit> {
    let fits = numbers.iter().all(|&number| usize::try_from(number).is_ok_and(|number| number < count));
    if fits { Ok(()) } else { Err(Unfit::Numbers(name)) }
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

    const SIZES: Sizes = Sizes { tokens: 3, experts: 4, chosen: 2 };

    #[test]
    fn the_largest_logits_are_chosen_and_of_equal_ones_the_lower() {
        let logits = [0.0, 2.0, 1.0, 2.0, -1.0, -1.0, -1.0, -1.0, 5.0, 0.0, 9.0, 1.0];
        let (mut probs, mut weights, mut experts) = ([0.0; 12], [0.0; 6], [0; 6]);
        let mut choice = Choice { probs: &mut probs, weights: &mut weights, experts: &mut experts };
        choose(&logits, &mut choice, SIZES).unwrap();
        assert_eq!(experts, [1, 3, 0, 1, 2, 0]);
        assert!((probs[..4].iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(weights[..4], [0.5; 4]);
        assert!((weights[4] - 1.0 / (1.0 + (-4.0_f32).exp())).abs() < 1e-6);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (mut probs, mut weights, mut experts) = ([0.0; 12], [0.0; 6], [0; 6]);
        let mut logits = [0.0; 12];
        logits[7] = f32::NAN;
        let mut choice = Choice { probs: &mut probs, weights: &mut weights, experts: &mut experts };
        let error = choose(&logits, &mut choice, SIZES).unwrap_err();
        assert_eq!(error.to_string(), "a logit of token 1 is NaN, expected a number");
        let sizes = Sizes { chosen: 5, ..SIZES };
        let error = choose(&logits, &mut choice, sizes).unwrap_err();
        assert_eq!(error.to_string(), "top_k is 5, expected 1 to 4, the number of experts");
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
