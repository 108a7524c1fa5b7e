//! 8-bit numbers and their products.

use super::activation::{activation, slope};
use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{Amax, MatmulFp8, PreAct, Quantize, ScaleUpdate};

/// The largest |x|, or `least` if that is larger; NaN is the largest.
fn largest(x: &[f64], least: f64) -> f64 {
    x.iter().fold(least, |most, x| if most.is_nan() || x.is_nan() { f64::NAN } else { most.max(x.abs()) })
}

pub(super) fn amax(pools: &mut Pools, op: &Amax) -> Result<()> {
    let most = largest(&pools.read(op.inp)?, 0.0);
    pools.write(op.amax, &[most])
}

pub(super) fn scale_update(pools: &mut Pools, op: &ScaleUpdate) -> Result<()> {
    let mut scales = pools.read(op.scales)?;
    for pair in scales.chunks_mut(2) {
        let [earlier, seen] = [pair[0], pair[1]];
        let taken = seen > 0.0 && seen.is_finite();
        // the product is rounded, as every engine must
        let kept = f64::from((earlier * 15.0 / 16.0) as f32);
        (pair[0], pair[1]) = (if taken { seen.max(kept) } else { earlier }, 0.0);
    }
    pools.write(op.scales, &scales)
}

pub(super) fn quantize(pools: &mut Pools, op: &Quantize, step: Step<'_>) -> Result<()> {
    let mut x = pools.read(op.inp)?;
    if let Some(act) = op.act {
        x.iter_mut().for_each(|x| *x = activation(act, *x));
    }
    if let Some(PreAct { act, slot }) = op.pre {
        let pre = pools.read(slot)?;
        x.iter_mut().zip(&pre).for_each(|(x, &pre)| *x *= slope(act, pre));
    }
    let (rows, cols) = (op.inp.shape.rows(), op.inp.shape.cols());
    if let Some(d_bias) = op.d_bias {
        let sums: Vec<f64> = (0..cols).map(|c| (0..rows).map(|r| x[r * cols + c]).sum()).collect();
        pools.store(d_bias, &sums, op.accum.adds(step.scalars.added()))?;
    }
    if let Some(seen) = op.seen {
        let most = largest(&x, pools.read(seen)?[0]);
        pools.write(seen, &[most])?;
    }
    // the largest power of two that keeps amax·2^margin within the format, by trying
    let amax = pools.read(op.amax)?[0] * 2f64.powi(op.margin);
    let fits = |k: &i32| amax * 2f64.powi(*k) <= f64::from(op.format.max());
    let known = amax > 0.0 && amax.is_finite();
    let k = if known { (-100..=100).rev().find(fits).unwrap_or(-100) } else { op.unknown };
    pools.write(op.inverse, &[2f64.powi(-k)])?;
    let q: Vec<f64> = x.iter().map(|x| op.format.quantize((x * 2f64.powi(k)) as f32).into()).collect();
    if let Some(out) = op.out {
        pools.write(out, &q)?;
    }
    if let Some(out_t) = op.out_t {
        let turned: Vec<f64> =
            (0..cols).flat_map(|c| (0..rows).map(move |r| (r, c))).map(|(r, c)| q[r * cols + c]).collect();
        pools.write(out_t, &turned)?;
    }
    Ok(())
}

pub(super) fn matmul_fp8(pools: &mut Pools, op: &MatmulFp8, step: Step<'_>) -> Result<()> {
    let (a, b) = (pools.read(op.a)?, pools.read(op.b)?);
    let scale = pools.read(op.a_inverse)?[0] * pools.read(op.b_inverse)?[0];
    let (rows, inner, cols) = (op.a.shape.rows(), op.a.shape.cols(), op.b.shape.rows());
    let bias = op.bias.map(|bias| pools.read(bias)).transpose()?;
    let mut out = Vec::with_capacity(rows * cols);
    for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
        let dot: f64 = (0..inner).map(|k| a[r * inner + k] * b[c * inner + k]).sum();
        out.push(dot * scale + bias.as_ref().map_or(0.0, |bias| bias[c]));
    }
    pools.store(op.out, &out, op.accum.adds(step.scalars.added()))
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::Fp8;
    use ironhorse_core::op::{Accum, MatmulFp8, Quantize};

    /// amax 3 in e4m3: 3·128 = 384 fits and 3·256 does not, so s = 128. 3·128 is a number of the format; 0.7·128 = 89.6 lies
    /// between 88 and 96.
    #[test]
    fn quantize_by_hand() {
        let mut kit = Kit::new("quantize");
        let (out, out_t) = (kit.fp8([16, 16], Fp8::E4M3), kit.fp8([16, 16], Fp8::E4M3));
        let mut x = vec![0.0; 256];
        (x[0], x[1], x[16], x[17]) = (3.0, 0.7, -3.0, 100.0);
        let (inp, inverse) = (kit.f32s([16, 16], &x), kit.stat([1]));
        let amax = kit.stat([1]);
        kit.set(amax, vec![3.0]);
        let case = kit.finish(Quantize {
            out: Some(out),
            out_t: Some(out_t),
            inverse,
            d_bias: None,
            inp,
            pre: None,
            amax,
            seen: None,
            act: None,
            format: Fp8::E4M3,
            margin: 0,
            unknown: 0,
            accum: Accum::Write,
        });
        let mut want = vec![0.0; 256];
        (want[0], want[1], want[16], want[17]) = (384.0, 88.0, -384.0, 448.0);
        case.expect_f64(inverse, &[1.0 / 128.0]);
        case.expect_f64(out, &want);
        (want[1], want[16]) = (want[16], want[1]);
        case.expect_f64(out_t, &want);
    }

    #[test]
    fn matmul_by_hand() {
        let mut kit = Kit::new("matmul_fp8");
        let (a, b) = (kit.fp8([16, 16], Fp8::E4M3), kit.fp8([16, 16], Fp8::E5M2));
        let first = |values: &[f32]| [values, &vec![0.0; 256 - values.len()][..]].concat();
        kit.set(a, first(&[3.0, 4.0]));
        kit.set(b, first(&[0.5, 6.0]));
        let [a_inverse, b_inverse] = [0.5, 0.25].map(|inverse| {
            let slot = kit.stat([1]);
            kit.set(slot, vec![inverse]);
            slot
        });
        let out = kit.slot([16, 16]);
        let case = kit.finish(MatmulFp8 {
            out,
            bias: None,
            a,
            b,
            a_inverse,
            b_inverse,
            accum: Accum::Write,
            fast: false,
        });
        // (3·0.5 + 4·6)/8
        case.expect_f64(out, &first(&[3.1875]).iter().map(|&x| x.into()).collect::<Vec<f64>>());
    }
}
