//! Linear layers of many experts.

use super::{Pools, Step, swiglu};
use ironhorse_core::op::{Gate, GroupedLinearBwdInput, GroupedLinearBwdWeight, GroupedLinearFwd, SwigluFwd};
use ironhorse_core::{Error, Result, Slot};

pub(super) fn fwd(pools: &mut Pools, op: &GroupedLinearFwd) -> Result<()> {
    let (ic, oc) = (op.inp.shape.cols(), op.out.shape.cols());
    let (inp, weight) = (pools.read(op.inp)?, pools.read(op.weight)?);
    let mut out = vec![0.0; op.out.numel()];
    for (r, e) in experts(pools, op.offsets, op.inp.shape.rows())?.into_iter().enumerate() {
        for o in 0..oc {
            out[r * oc + o] = (0..ic).map(|i| inp[r * ic + i] * weight[(e * oc + o) * ic + i]).sum();
        }
    }
    pools.write(op.out, &out)?;
    match op.act {
        Some(act) => swiglu::fwd(pools, &SwigluFwd { out: act, inp: op.out, gate: Gate::Silu }),
        None => Ok(()),
    }
}

pub(super) fn bwd_input(pools: &mut Pools, op: &GroupedLinearBwdInput) -> Result<()> {
    let (ic, oc) = (op.d_inp.shape.cols(), op.d_out.shape.cols());
    let (d_out, weight) = (pools.read(op.d_out)?, pools.read(op.weight)?);
    let mut d_inp = vec![0.0; op.d_inp.numel()];
    for (r, e) in experts(pools, op.offsets, op.d_inp.shape.rows())?.into_iter().enumerate() {
        for o in 0..oc {
            for i in 0..ic {
                d_inp[r * ic + i] += d_out[r * oc + o] * weight[(e * oc + o) * ic + i];
            }
        }
    }
    pools.write(op.d_inp, &d_inp)
}

pub(super) fn bwd_weight(pools: &mut Pools, op: &GroupedLinearBwdWeight, step: Step) -> Result<()> {
    let (ic, oc) = (op.inp.shape.cols(), op.d_out.shape.cols());
    let (d_out, inp) = (pools.read(op.d_out)?, pools.read(op.inp)?);
    let mut d_weight = vec![0.0; op.d_weight.numel()];
    for (r, e) in experts(pools, op.offsets, op.inp.shape.rows())?.into_iter().enumerate() {
        for o in 0..oc {
            for i in 0..ic {
                d_weight[(e * oc + o) * ic + i] += d_out[r * oc + o] * inp[r * ic + i];
            }
        }
    }
    pools.store(op.d_weight, &d_weight, op.accum.adds(step.scalars.added()))
}

/// The expert of each row, or an input error.
pub(super) fn experts(pools: &Pools, offsets: Slot, rows: usize) -> Result<Vec<usize>> {
    let offsets = pools.read(offsets)?;
    let ends = (offsets.first(), offsets.last()) == (Some(&0.0), Some(&(rows as f64)));
    if !ends || offsets.windows(2).any(|pair| pair[0] > pair[1]) {
        return Err(Error::Input(format!(
            "the `offsets` of the experts must rise from 0 to {rows}, the number of rows"
        )));
    }
    Ok((0..rows).map(|r| offsets.iter().filter(|&&first| first <= r as f64).count() - 1).collect())
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, GroupedLinearBwdInput, GroupedLinearBwdWeight, GroupedLinearFwd};

    const WEIGHT: [f32; 6] = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];

    /// Three experts, two inputs, one output; the second has no rows.
    #[test]
    fn by_hand() {
        let mut kit = Kit::new("grouped");
        let op = GroupedLinearFwd {
            out: kit.slot([3, 1]),
            act: None,
            inp: kit.f32s([3, 2], &[1.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
            weight: kit.f32s([3, 1, 2], &WEIGHT),
            offsets: kit.i32s([4], &[0, 1, 1, 3]),
        };
        kit.finish(op).expect_f64(op.out, &[3.0, 800.0, 1400.0]);
        let mut kit = Kit::new("grouped");
        let op = GroupedLinearBwdInput {
            d_inp: kit.slot([3, 2]),
            d_out: kit.f32s([3, 1], &[1.0, 2.0, 3.0]),
            weight: kit.f32s([3, 1, 2], &WEIGHT),
            offsets: kit.i32s([4], &[0, 1, 1, 3]),
        };
        kit.finish(op).expect_f64(op.d_inp, &[1.0, 2.0, 200.0, 400.0, 300.0, 600.0]);
        for accum in [Accum::Write, Accum::Add] {
            let mut kit = Kit::new("grouped");
            let op = GroupedLinearBwdWeight {
                d_weight: kit.f32s([3, 1, 2], &WEIGHT),
                d_out: kit.f32s([3, 1], &[1.0, 2.0, 3.0]),
                inp: kit.f32s([3, 2], &[1.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
                offsets: kit.i32s([4], &[0, 1, 1, 3]),
                accum,
            };
            let mut want = [1.0, 1.0, 0.0, 0.0, 16.0, 21.0];
            if accum == Accum::Add {
                want.iter_mut().zip(WEIGHT).for_each(|(want, old)| *want += f64::from(old));
            }
            kit.finish(op).expect_f64(op.d_weight, &want);
        }
    }
}
