//! Moving tokens to their experts and back.

use super::router::expert;
use super::{Pools, Step};
use ironhorse_core::op::{Combine, CombineBwd, Permute, PermuteBwd, RouteSort};
use ironhorse_core::{Error, Result, Slot};

pub(super) fn sort(pools: &mut Pools, op: &RouteSort) -> Result<()> {
    let all = op.offsets.numel() - 1;
    let experts: Vec<usize> =
        pools.read(op.experts)?.into_iter().map(|e| expert(e, all)).collect::<Result<_>>()?;
    let mut order: Vec<usize> = (0..experts.len()).collect();
    order.sort_by_key(|&route| experts[route]); // a stable sort
    let mut places = vec![0.0; experts.len()];
    for (s, &route) in order.iter().enumerate() {
        places[route] = s as f64;
    }
    let before = |e: usize| experts.iter().filter(|&&other| other < e).count() as f64;
    pools.write(op.order, &order.iter().map(|&route| route as f64).collect::<Vec<_>>())?;
    pools.write(op.places, &places)?;
    pools.write(op.offsets, &(0..=all).map(before).collect::<Vec<_>>())
}

pub(super) fn permute(pools: &mut Pools, op: &Permute) -> Result<()> {
    let (width, n) = (op.inp.shape.cols(), op.inp.shape.rows());
    let (inp, order) = (pools.read(op.inp)?, rows(pools, op.order)?);
    let k = order.len() / n.max(1);
    let mut out = Vec::new();
    for route in order {
        let token = route / k;
        out.extend_from_slice(&inp[token * width..(token + 1) * width]);
    }
    pools.write(op.out, &out)
}

pub(super) fn permute_bwd(pools: &mut Pools, op: &PermuteBwd, step: Step) -> Result<()> {
    let (width, k) = (op.d_inp.shape.cols(), op.places.shape.cols());
    let (d_out, places) = (pools.read(op.d_out)?, rows(pools, op.places)?);
    let mut d_inp = vec![0.0; op.d_inp.numel()];
    for (route, place) in places.into_iter().enumerate() {
        for c in 0..width {
            d_inp[route / k * width + c] += d_out[place * width + c];
        }
    }
    pools.store(op.d_inp, &d_inp, op.accum.adds(step.scalars.added()))
}

pub(super) fn combine(pools: &mut Pools, op: &Combine) -> Result<()> {
    let (width, k) = (op.out.shape.cols(), op.places.shape.cols());
    let (from, places, weights) = (pools.read(op.rows)?, rows(pools, op.places)?, pools.read(op.weights)?);
    let mut out = vec![0.0; op.out.numel()];
    for (route, place) in places.into_iter().enumerate() {
        for c in 0..width {
            out[route / k * width + c] += weights[route] * from[place * width + c];
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn combine_bwd(pools: &mut Pools, op: &CombineBwd) -> Result<()> {
    let (width, k) = (op.d_out.shape.cols(), op.places.shape.cols());
    let (d_out, from) = (pools.read(op.d_out)?, pools.read(op.rows)?);
    let (places, weights) = (rows(pools, op.places)?, pools.read(op.weights)?);
    let (mut d_rows, mut d_weights) = (vec![0.0; from.len()], vec![0.0; weights.len()]);
    for (route, place) in places.into_iter().enumerate() {
        for c in 0..width {
            let d = d_out[route / k * width + c];
            d_rows[place * width + c] = weights[route] * d;
            d_weights[route] += d * from[place * width + c];
        }
    }
    pools.write(op.d_rows, &d_rows)?;
    pools.write(op.d_weights, &d_weights)
}

/// A permutation of as many rows as the slot has elements, or an input error.
fn rows(pools: &Pools, slot: Slot) -> Result<Vec<usize>> {
    let count = slot.numel();
    let row = |value: f64| match value {
        row if row >= 0.0 && row < count as f64 => Ok(row as usize),
        row => Err(Error::Input(format!("row index {row} is out of range 0..{count}"))),
    };
    pools.read(slot)?.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, Combine, CombineBwd, Permute, PermuteBwd, RouteSort};

    /// Routes 0..6 go to experts 2, 0, 2, 1, 0, 2; expert 3 has no rows.
    #[test]
    fn sort_by_hand() {
        let mut kit = Kit::new("sort");
        let (order, places, offsets) = (kit.ints([6]), kit.ints([3, 2]), kit.ints([5]));
        let op = RouteSort { order, places, offsets, experts: kit.i32s([3, 2], &[2, 0, 2, 1, 0, 2]) };
        let case = kit.finish(op);
        case.expect_f64(op.order, &[1.0, 4.0, 3.0, 0.0, 2.0, 5.0]);
        case.expect_f64(op.places, &[3.0, 0.0, 4.0, 2.0, 1.0, 5.0]);
        case.expect_f64(op.offsets, &[0.0, 2.0, 3.0, 6.0, 6.0]);
    }

    #[test]
    fn permute_by_hand() {
        let mut kit = Kit::new("permute");
        let op = Permute {
            out: kit.slot([4, 2]),
            inp: kit.f32s([2, 2], &[1.0, 2.0, 3.0, 4.0]),
            order: kit.i32s([4], &[2, 1, 3, 0]),
        };
        kit.finish(op).expect_f64(op.out, &[3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0]);
        for (accum, want) in [(Accum::Write, [12.0, 5.0]), (Accum::Add, [112.0, 205.0])] {
            let mut kit = Kit::new("permute");
            let op = PermuteBwd {
                d_inp: kit.f32s([2, 1], &[100.0, 200.0]),
                d_out: kit.f32s([4, 1], &[1.0, 4.0, 4.0, 8.0]),
                places: kit.i32s([2, 2], &[3, 1, 0, 2]),
                accum,
            };
            kit.finish(op).expect_f64(op.d_inp, &want);
        }
    }

    #[test]
    fn combine_by_hand() {
        let mut kit = Kit::new("combine");
        let op = Combine {
            out: kit.slot([2, 1]),
            rows: kit.f32s([4, 1], &[1.0, 2.0, 4.0, 8.0]),
            places: kit.i32s([2, 2], &[3, 1, 0, 2]),
            weights: kit.f32s([2, 2], &[0.5, 0.25, 2.0, 3.0]),
        };
        kit.finish(op).expect_f64(op.out, &[4.5, 14.0]);
        for in_place in [false, true] {
            let mut kit = Kit::new("combine");
            let rows = kit.f32s([4, 1], &[1.0, 2.0, 4.0, 8.0]);
            let op = CombineBwd {
                d_rows: if in_place { rows } else { kit.slot([4, 1]) },
                d_weights: kit.slot([2, 2]),
                d_out: kit.f32s([2, 1], &[10.0, 100.0]),
                rows,
                places: kit.i32s([2, 2], &[3, 1, 0, 2]),
                weights: kit.f32s([2, 2], &[0.5, 0.25, 2.0, 3.0]),
            };
            let case = kit.finish(op);
            case.expect_f64(op.d_rows, &[200.0, 2.5, 300.0, 5.0]);
            case.expect_f64(op.d_weights, &[80.0, 20.0, 100.0, 400.0]);
        }
    }
}
