//! Muon: momentum scaled to a norm of 1, and the step.

use super::optimizer::{clip, read_weights, write_weights};
use super::{Pools, Step};
use ironhorse_core::op::{MuonMomentum, MuonUpdate, Op};
use ironhorse_core::{Error, MuonMatrix, Result, Shape, muon_matrices};

/// The matrices of an op.
fn matrices(name: &str, shape: Shape, first: usize, step: Step) -> Result<Vec<MuonMatrix>> {
    let &[count, rows, cols] = shape.dims() else { return Ok(Vec::new()) };
    let found: Vec<_> = muon_matrices(step.params, [rows, cols]).skip(first).take(count).collect();
    if found.len() < count {
        let what = format!("{name}: {} matrices of {rows} by {cols}, expected {count}", found.len());
        return Err(Error::Program(what));
    }
    Ok(found)
}

pub(super) fn momentum(pools: &mut Pools, op: &MuonMomentum, step: Step) -> Result<()> {
    let mut out = vec![0.0; op.out.numel()];
    let all = matrices("muon_momentum", op.out.shape, op.first, step)?;
    let Some(clip) = clip(pools, [op.norm, op.halt], step.scalars.grad_clip.into())? else {
        return pools.write(op.out, &out);
    };
    let (grads, mut m) = (pools.read(op.grads)?, pools.read(op.moment1)?);
    let (size, mu) = (out.len() / all.len().max(1), f64::from(op.momentum));
    for (number, matrix) in all.iter().enumerate() {
        let out = &mut out[number * size..(number + 1) * size];
        for (out, i) in out.iter_mut().zip(matrix.first..) {
            let g = grads[i] * clip;
            m[i] = mu * m[i] + (1.0 - mu) * g;
            *out = mu * m[i] + (1.0 - mu) * g;
        }
        let norm = out.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scale = if norm < MuonMomentum::LEAST_NORM { 0.0 } else { 1.0 / norm };
        out.iter_mut().for_each(|x| *x *= scale);
    }
    pools.write(op.out, &out)?;
    pools.write(op.moment1, &m)
}

pub(super) fn update(pools: &mut Pools, op: &MuonUpdate, step: Step) -> Result<()> {
    let all = matrices("muon_update", op.inp.shape, op.first, step)?;
    if clip(pools, [op.norm, op.halt], 0.0)?.is_none() {
        return Ok(());
    }
    let [lr, weight_decay, scale] = [step.scalars.lr, step.scalars.weight_decay, op.scale].map(f64::from);
    let (mut w, inp) = (read_weights(pools, op.params, op.master)?, pools.read(op.inp)?);
    let size = inp.len() / all.len().max(1);
    for (number, matrix) in all.iter().enumerate() {
        let decay = if matrix.decay { weight_decay } else { 0.0 };
        for (&x, i) in inp[number * size..(number + 1) * size].iter().zip(matrix.first..) {
            w[i] = w[i] - lr * decay * w[i] - lr * scale * x;
        }
    }
    let changed = Op::from(*op).updates(step.params);
    write_weights(pools, op.params, op.master, (&w, &changed))
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{MuonMomentum, MuonUpdate};
    use ironhorse_core::{DType, Pool};

    /// A tensor of two matrices of 1 by 2, of which the op has the second, behind one of AdamW. The gradient (6, 8) has
    /// the norm 10, clipped to 5: g = (3, 4). m = 1/2·m + 1/2·g = (3/2 + 3/2, 2) = (3, 2);
    /// u = 1/2·m + 1/2·g = (3, 3), of norm √18.
    #[test]
    fn momentum_by_hand() {
        let mut kit = Kit::new("momentum");
        kit.scalars.grad_clip = 5.0;
        kit.builder.param("before", [3], false);
        kit.builder.muon_group([("w", [2, 2], 2)], true);
        let [grads, moment1] = [Pool::Grads, Pool::Moment1].map(|pool| kit.builder.flat(pool));
        let (norm, halt) = (kit.stat([1]), kit.stat([1]));
        let out = kit.slot([1, 1, 2]);
        let sparse = |a: f32, b: f32| {
            let mut all = vec![0.0; 32];
            (all[18], all[19]) = (a, b);
            all
        };
        kit.set(grads, sparse(6.0, 8.0));
        kit.set(moment1, sparse(3.0, 0.0));
        kit.set(norm, vec![10.0]);
        kit.set(halt, vec![0.0]);
        let op = MuonMomentum { out, moment1, grads, norm, halt, first: 1, momentum: 0.5 };
        let case = kit.finish(op);
        case.expect_within(out, &[0.5_f64.sqrt(); 2], 1e-6);
        let want: Vec<f64> = sparse(3.0, 2.0).into_iter().map(f64::from).collect();
        case.expect_within(moment1, &want, 1e-6);
        assert_eq!(case.op().updates(case.program.params()).as_slice(), std::slice::from_ref(&(18..20)));
        assert_eq!(case.program.layout().bytes(Pool::Moment2), 0);
        assert_eq!(case.program.flat(Pool::Moment2).bytes(), 64, "only what AdamW updates");
    }

    /// w = 8 - 1/2·1/4·8 - 1/2·2·inp.
    #[test]
    fn update_by_hand() {
        let mut kit = Kit::new("update");
        (kit.scalars.lr, kit.scalars.weight_decay) = (0.5, 0.25);
        kit.builder.muon_group([("w", [2, 1], 1)], true);
        let params = kit.builder.flat(Pool::Params);
        let (norm, halt) = (kit.stat([1]), kit.stat([1]));
        let inp = kit.f32s([1, 2, 1], &[1.0, -3.0]);
        let mut weights = vec![0.0; 16];
        weights[..2].fill(8.0);
        kit.set(params, weights);
        kit.set(norm, vec![10.0]);
        kit.set(halt, vec![0.0]);
        let op = MuonUpdate { params, master: None, inp, norm, halt, first: 0, scale: 2.0 };
        let mut want = vec![0.0; 16];
        want[..2].copy_from_slice(&[6.0, 10.0]);
        kit.finish(op).expect_f64(params, &want);
        assert_eq!(params.dtype, DType::F32);
    }
}
