//! Products of 8-bit numbers of many experts.

use super::grouped::experts;
use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{GroupedFp8, GroupedFp8BwdWeight};

pub(super) fn rows(pools: &mut Pools, op: &GroupedFp8) -> Result<()> {
    let (inner, cols, experts_of) = (op.a.shape.cols(), op.out.shape.cols(), op.offsets.numel() - 1);
    let (a, b) = (pools.read(op.a)?, pools.read(op.b)?);
    let scale = pools.read(op.a_inverse)?[0] * pools.read(op.b_inverse)?[0];
    let mut out = Vec::with_capacity(op.out.numel());
    for (r, e) in experts(pools, op.offsets, op.a.shape.rows())?.into_iter().enumerate() {
        for c in 0..cols {
            let place = |k: usize| match op.beside {
                true => (c * experts_of + e) * inner + k,
                false => (e * cols + c) * inner + k,
            };
            let sum: f64 = (0..inner).map(|k| a[r * inner + k] * b[place(k)]).sum();
            out.push(sum * scale);
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn weight(pools: &mut Pools, op: &GroupedFp8BwdWeight, step: Step<'_>) -> Result<()> {
    let (oc, ic, all) = (op.d_out.shape.rows(), op.inp.shape.rows(), op.inp.shape.cols());
    let (d_out, inp) = (pools.read(op.d_out)?, pools.read(op.inp)?);
    let scale = pools.read(op.d_out_inverse)?[0] * pools.read(op.inp_inverse)?[0];
    let mut d_weight = vec![0.0; op.d_weight.numel()];
    for (r, e) in experts(pools, op.offsets, all)?.into_iter().enumerate() {
        for o in 0..oc {
            for i in 0..ic {
                d_weight[(e * oc + o) * ic + i] += d_out[o * all + r] * inp[i * all + r] * scale;
            }
        }
    }
    pools.store(op.d_weight, &d_weight, op.accum.adds(step.scalars.added()))
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, GroupedFp8, GroupedFp8BwdWeight};
    use ironhorse_core::{Fp8, Shape, Slot};

    /// Rows of 16 in which only the first two columns are not 0.
    fn narrow(kit: &mut Kit, shape: impl Into<Shape>, two: impl Fn(usize) -> [f32; 2]) -> Slot {
        let slot = kit.fp8(shape, Fp8::E4M3);
        kit.set(slot, (0..slot.shape.rows()).flat_map(|r| [&two(r)[..], &[0.0; 14]].concat()).collect());
        slot
    }

    fn one(kit: &mut Kit, value: f32) -> Slot {
        let slot = kit.stat([1]);
        kit.set(slot, vec![value]);
        slot
    }

    /// Three experts, of which the second has no rows: rows are (1, r), weights of expert e (10ᵉ, 2).
    #[test]
    fn rows_by_hand() {
        for beside in [false, true] {
            let mut kit = Kit::new("grouped_fp8");
            let a = narrow(&mut kit, [3, 16], |r| [1.0, r as f32]);
            let b = if beside {
                let b = kit.fp8([16, 48], Fp8::E4M3);
                let line = [1.0, 10.0, 100.0].map(|x| [&[x, 2.0][..], &[0.0; 14]].concat()).concat();
                kit.set(b, line.repeat(16));
                b
            } else {
                narrow(&mut kit, [3, 16, 16], |line| [10f32.powi(line as i32 / 16), 2.0])
            };
            let (a_inverse, b_inverse) = (one(&mut kit, 0.5), one(&mut kit, 4.0));
            let offsets = kit.i32s([4], &[0, 1, 1, 3]);
            let out = kit.slot([3, 16]);
            let op = GroupedFp8 { out, a, b, a_inverse, b_inverse, offsets, beside, fast: false };
            let want = [2.0, 204.0, 208.0].map(|x| [x; 16]).concat();
            kit.finish(op).expect_f64(out, &want);
        }
    }

    #[test]
    fn gradients_of_weights_by_hand() {
        let mut kit = Kit::new("grouped_fp8");
        // 16 rows: of the first expert one, of the second none, of the third fifteen
        let d_out = kit.fp8([16, 16], Fp8::E5M2);
        kit.set(d_out, (0..256).map(|i| if i < 16 { 1.0 } else { 0.0 }).collect());
        let inp = kit.fp8([16, 16], Fp8::E4M3);
        kit.set(inp, (0..256).map(|i| (i / 16) as f32).collect());
        let (d_out_inverse, inp_inverse) = (one(&mut kit, 0.5), one(&mut kit, 4.0));
        let offsets = kit.i32s([4], &[0, 1, 1, 16]);
        let (d_weight, accum) = (kit.slot([3, 16, 16]), Accum::Write);
        let op = GroupedFp8BwdWeight { d_weight, d_out, inp, d_out_inverse, inp_inverse, offsets, accum };
        let mut want = vec![0.0; 768];
        for i in 0..16 {
            want[i] = 2.0 * i as f64;
            want[512 + i] = 30.0 * i as f64;
        }
        kit.finish(op).expect_f64(d_weight, &want);
    }
}
