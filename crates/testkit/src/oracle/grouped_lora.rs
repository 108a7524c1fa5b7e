//! Adapters of experts: for each row those of its expert, part by part as nested loops.

use super::grouped::experts;
use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{
    GroupedLoraBwdHidden, GroupedLoraBwdInput, GroupedLoraBwdWeight, GroupedLoraFwd, LoraParts,
};

/// Calls `f(row, column of the result, column of hidden, element of B)` for every term of the products with B.
fn each_term(
    experts: &[usize],
    parts: &LoraParts,
    rank: usize,
    mut f: impl FnMut(usize, usize, usize, usize),
) {
    for (r, &expert) in experts.iter().enumerate() {
        for part in parts.each(rank) {
            for (o, row) in part.out.clone().zip(part.b.clone()) {
                for i in 0..rank {
                    f(r, o, part.hidden.start + i, (expert * parts.rows() + row) * rank + i);
                }
            }
        }
    }
}

pub(super) fn fwd(pools: &mut Pools, op: &GroupedLoraFwd) -> Result<()> {
    let (mut out, hidden, b) = (pools.read(op.out)?, pools.read(op.hidden)?, pools.read(op.b)?);
    let (oc, wide, scale) = (op.out.shape.cols(), op.hidden.shape.cols(), f64::from(op.scale));
    let experts = experts(pools, op.offsets, op.out.shape.rows())?;
    each_term(&experts, &op.parts, op.b.shape.cols(), |r, o, h, at| {
        out[r * oc + o] += scale * hidden[r * wide + h] * b[at];
    });
    pools.write(op.out, &out)
}

pub(super) fn bwd_hidden(pools: &mut Pools, op: &GroupedLoraBwdHidden) -> Result<()> {
    let (d_out, b) = (pools.read(op.d_out)?, pools.read(op.b)?);
    let (oc, wide, scale) = (op.d_out.shape.cols(), op.d_hidden.shape.cols(), f64::from(op.scale));
    let mut d_hidden = vec![0.0; op.d_hidden.numel()];
    let experts = experts(pools, op.offsets, op.d_out.shape.rows())?;
    each_term(&experts, &op.parts, op.b.shape.cols(), |r, o, h, at| {
        d_hidden[r * wide + h] += scale * d_out[r * oc + o] * b[at];
    });
    pools.write(op.d_hidden, &d_hidden)
}

pub(super) fn bwd_weight(pools: &mut Pools, op: &GroupedLoraBwdWeight, step: Step) -> Result<()> {
    let (d_out, hidden) = (pools.read(op.d_out)?, pools.read(op.hidden)?);
    let (oc, wide, scale) = (op.d_out.shape.cols(), op.hidden.shape.cols(), f64::from(op.scale));
    let mut d_b = vec![0.0; op.d_b.numel()];
    let experts = experts(pools, op.offsets, op.d_out.shape.rows())?;
    each_term(&experts, &op.parts, op.d_b.shape.cols(), |r, o, h, at| {
        d_b[at] += scale * d_out[r * oc + o] * hidden[r * wide + h];
    });
    pools.store(op.d_b, &d_b, op.accum.adds(step.scalars.added()))
}

pub(super) fn bwd_input(pools: &mut Pools, op: &GroupedLoraBwdInput) -> Result<()> {
    let (mut d_inp, d_hidden, a) = (pools.read(op.d_inp)?, pools.read(op.d_hidden)?, pools.read(op.a)?);
    let (ic, wide) = (op.d_inp.shape.cols(), op.d_hidden.shape.cols());
    for (r, e) in experts(pools, op.offsets, op.d_inp.shape.rows())?.into_iter().enumerate() {
        for i in 0..ic {
            let term = |h: usize| d_hidden[r * wide + h] * a[(e * wide + h) * ic + i];
            d_inp[r * ic + i] += (0..wide).map(term).sum::<f64>();
        }
    }
    pools.write(op.d_inp, &d_inp)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{
        Accum, GroupedLoraBwdHidden, GroupedLoraBwdInput, GroupedLoraBwdWeight, GroupedLoraFwd, LoraParts,
    };

    /// Rank 1, scale 2, parts at columns 0 and 2 of 3; the second of three experts has no rows.
    #[test]
    fn by_hand() {
        let parts = LoraParts::new(&[0..1, 2..3]).unwrap();
        let b = [10.0, 100.0, 7.0, 7.0, 1.0, -1.0];
        let mut kit = Kit::new("grouped lora");
        let (out, hidden) = (kit.f32s([2, 3], &[1.0; 6]), kit.f32s([2, 2], &[1.0, 2.0, 3.0, 4.0]));
        let (b_slot, offsets) = (kit.f32s([3, 2, 1], &b), kit.i32s([4], &[0, 1, 1, 2]));
        let case = kit.finish(GroupedLoraFwd { out, hidden, b: b_slot, offsets, parts, scale: 2.0 });
        case.expect_f64(out, &[21.0, 1.0, 401.0, 7.0, 1.0, -7.0]);
        let d_values = [1.0, 5.0, 3.0, 2.0, 5.0, 4.0];
        let mut kit = Kit::new("grouped lora");
        let (d_hidden, d_out) = (kit.slot([2, 2]), kit.f32s([2, 3], &d_values));
        let (b_slot, offsets) = (kit.f32s([3, 2, 1], &b), kit.i32s([4], &[0, 1, 1, 2]));
        let case =
            kit.finish(GroupedLoraBwdHidden { d_hidden, d_out, b: b_slot, offsets, parts, scale: 2.0 });
        case.expect_f64(d_hidden, &[20.0, 600.0, 4.0, -8.0]);
        for (accum, kept) in [(Accum::Write, 0.0), (Accum::Add, 7.0)] {
            let mut kit = Kit::new("grouped lora");
            let (d_b, d_out) = (kit.f32s([3, 2, 1], &[7.0; 6]), kit.f32s([2, 3], &d_values));
            let (hidden, offsets) = (kit.f32s([2, 2], &[1.0, 2.0, 3.0, 4.0]), kit.i32s([4], &[0, 1, 1, 2]));
            let op = GroupedLoraBwdWeight { d_b, d_out, hidden, offsets, parts, scale: 2.0, accum };
            kit.finish(op).expect_f64(d_b, &[2.0, 12.0, 0.0, 0.0, 12.0, 32.0].map(|x| x + kept));
        }
        let mut kit = Kit::new("grouped lora");
        let (d_inp, d_hidden) = (kit.f32s([2, 1], &[0.5, 0.25]), kit.f32s([2, 2], &[1.0, 2.0, 3.0, 4.0]));
        let (a, offsets) = (kit.f32s([3, 2, 1], &b), kit.i32s([4], &[0, 1, 1, 2]));
        let case = kit.finish(GroupedLoraBwdInput { d_inp, d_hidden, a, offsets });
        case.expect_f64(d_inp, &[210.5, -0.75]);
    }
}
