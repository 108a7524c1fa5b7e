//! Adapters beside linear layers, part by part as nested loops.

use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{LoraBwdHidden, LoraBwdInput, LoraBwdWeight, LoraFwd};

pub(super) fn fwd(pools: &mut Pools, op: &LoraFwd) -> Result<()> {
    let (mut out, hidden, b) = (pools.read(op.out)?, pools.read(op.hidden)?, pools.read(op.b)?);
    let (oc, wide, rank) = (op.out.shape.cols(), op.hidden.shape.cols(), op.b.shape.cols());
    for part in op.parts.each(rank) {
        for r in 0..op.out.shape.rows() {
            for (o, row) in part.out.clone().zip(part.b.clone()) {
                let dot = |i: usize| hidden[r * wide + part.hidden.start + i] * b[row * rank + i];
                out[r * oc + o] += f64::from(op.scale) * (0..rank).map(dot).sum::<f64>();
            }
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn bwd_hidden(pools: &mut Pools, op: &LoraBwdHidden) -> Result<()> {
    let (d_out, b) = (pools.read(op.d_out)?, pools.read(op.b)?);
    let (oc, wide, rank) = (op.d_out.shape.cols(), op.d_hidden.shape.cols(), op.b.shape.cols());
    let mut d_hidden = vec![0.0; op.d_hidden.numel()];
    for part in op.parts.each(rank) {
        for r in 0..op.d_out.shape.rows() {
            for (o, row) in part.out.clone().zip(part.b.clone()) {
                for i in 0..rank {
                    let at = r * wide + part.hidden.start + i;
                    d_hidden[at] += f64::from(op.scale) * d_out[r * oc + o] * b[row * rank + i];
                }
            }
        }
    }
    pools.write(op.d_hidden, &d_hidden)
}

pub(super) fn bwd_weight(pools: &mut Pools, op: &LoraBwdWeight, step: Step) -> Result<()> {
    let (d_out, hidden) = (pools.read(op.d_out)?, pools.read(op.hidden)?);
    let (oc, wide, rank) = (op.d_out.shape.cols(), op.hidden.shape.cols(), op.d_b.shape.cols());
    let mut d_b = vec![0.0; op.d_b.numel()];
    for part in op.parts.each(rank) {
        for r in 0..op.d_out.shape.rows() {
            for (o, row) in part.out.clone().zip(part.b.clone()) {
                for i in 0..rank {
                    let x = hidden[r * wide + part.hidden.start + i];
                    d_b[row * rank + i] += f64::from(op.scale) * d_out[r * oc + o] * x;
                }
            }
        }
    }
    pools.store(op.d_b, &d_b, op.accum.adds(step.scalars.added()))
}

pub(super) fn bwd_input(pools: &mut Pools, op: &LoraBwdInput) -> Result<()> {
    let (mut d_inp, d_hidden, a) = (pools.read(op.d_inp)?, pools.read(op.d_hidden)?, pools.read(op.a)?);
    let (ic, wide) = (op.d_inp.shape.cols(), op.d_hidden.shape.cols());
    for r in 0..op.d_inp.shape.rows() {
        for i in 0..ic {
            d_inp[r * ic + i] += (0..wide).map(|h| d_hidden[r * wide + h] * a[h * ic + i]).sum::<f64>();
        }
    }
    pools.write(op.d_inp, &d_inp)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{LoraBwdHidden, LoraFwd, LoraParts};

    /// Rank 1, parts at columns 0 and 2 of 3, B = 10 and 100, scale 2: (1, 2) becomes 1 + 2·1·10 and 1 + 2·2·100.
    #[test]
    fn parts_by_hand() {
        let parts = LoraParts::new(&[0..1, 2..3]).unwrap();
        let mut kit = Kit::new("lora");
        let (out, hidden) = (kit.f32s([1, 3], &[1.0; 3]), kit.f32s([1, 2], &[1.0, 2.0]));
        let b = kit.f32s([2, 1], &[10.0, 100.0]);
        kit.finish(LoraFwd { out, hidden, b, parts, scale: 2.0 }).expect_f64(out, &[21.0, 1.0, 401.0]);
        let mut kit = Kit::new("lora");
        let (d_hidden, d_out) = (kit.slot([1, 2]), kit.f32s([1, 3], &[1.0, 5.0, 3.0]));
        let b = kit.f32s([2, 1], &[10.0, 100.0]);
        let case = kit.finish(LoraBwdHidden { d_hidden, d_out, b, parts, scale: 2.0 });
        case.expect_f64(d_hidden, &[20.0, 600.0]);
    }
}
