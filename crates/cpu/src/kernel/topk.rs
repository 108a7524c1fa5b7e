//! The k largest of a row.

use super::sampling::survey;
use crate::isa::Isa;
use std::cmp::Ordering;

/// Largest first, NaN before all, the lower index first among equals: a total order, so any selection gives the same.
fn before(row: &[f32], a: u32, b: u32) -> Ordering {
    let (x, y) = (row[a as usize], row[b as usize]);
    let by_value = match (x.is_nan(), y.is_nan()) {
        (false, false) => y.partial_cmp(&x).unwrap_or(Ordering::Equal),
        (x, y) => y.cmp(&x),
    };
    by_value.then(a.cmp(&b))
}

/// The largest k for which a list of the best so far is kept, and most of the row is passed over by its maxima.
const FEW: usize = 32;
/// Elements whose maximum decides whether they are looked at one by one.
const GROUP: usize = 64;

/// The k largest in the order of [`before`].
fn few_largest(isa: Isa, x: &[f32], k: usize, best: &mut Vec<u32>) {
    best.clear();
    for (number, group) in x.chunks(GROUP).enumerate() {
        let (top, odd) = survey(isa, group);
        let start = (number * GROUP) as u32;
        let full = best.len() == k;
        if full && !odd && best.last().is_some_and(|&last| top <= x[last as usize]) {
            continue;
        }
        for i in start..start + group.len() as u32 {
            // Later among equals comes behind; what is not smaller, or NaN, finds its place below.
            if best.len() == k && best.last().is_some_and(|&last| x[i as usize] <= x[last as usize]) {
                continue;
            }
            let at = best.partition_point(|&b| before(x, b, i).is_lt());
            if at < k {
                best.truncate(k - 1);
                best.insert(at, i);
            }
        }
    }
}

/// The columns of the k largest, largest first, the lower column first among equals: the first k elements of `order`.
pub fn largest_columns(isa: Isa, x: &[f32], k: usize, order: &mut Vec<u32>) {
    if k <= FEW {
        return few_largest(isa, x, k, order);
    }
    order.clear();
    order.extend(0..x.len() as u32);
    if k < x.len() {
        order.select_nth_unstable_by(k - 1, |&a, &b| before(x, a, b));
    }
    order[..k].sort_unstable_by(|&a, &b| before(x, a, b));
}

/// The probabilities of the chosen columns, divided by their sum: the sum over the rest of the row cancels. NaN if the
/// softmax of the row is.
pub fn top_weights(x: &[f32], chosen: &[u32], weights: &mut [f32], indices: &mut [i32]) {
    let max = chosen.first().map_or(f32::NAN, |&i| x[i as usize]);
    let share = |i: u32| f64::from(x[i as usize] - max).exp();
    let total: f64 = chosen.iter().map(|&i| share(i)).sum();
    for ((weight, index), &i) in weights.iter_mut().zip(indices).zip(chosen) {
        *weight = (share(i) / total) as f32;
        *index = i as i32;
    }
}
