//! Exponentials that the compiler can vectorise.
//!
//! The functions are branch-free and `#[inline(always)]`, so that a loop over them inside
//! [`multiversion!`](crate::multiversion) becomes vector code. `FMA` says whether the instructions have a fused
//! multiply-add.

/// a b + c, with one rounding where `FMA`, with two elsewhere.
#[inline(always)]
pub fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// x limited to lo..=hi; NaN stays NaN.
#[inline(always)]
fn limit(x: f32, lo: f32, hi: f32) -> f32 {
    let x = if x < lo { lo } else { x };
    if x > hi { hi } else { x }
}

/// ln 2 = HI + LO, where n * HI is exact for |n| < 2^15.
pub(crate) const LN2_HI: f32 = 355.0 / 512.0;
pub(crate) const LN2_LO: f32 = -2.121_944_4e-4;

/// A fit of e^r for |r| <= ln 2 / 2, highest power first, with a relative error of 3e-9: minimax where 1 + r is left as it is.
pub(crate) const EXP_FIT: [f32; 7] =
    [1.381_454e-3, 8.368_745e-3, 4.166_839e-2, 1.666_652_1e-1, 4.999_999_4e-1, 1.0, 1.0];

/// e^(x - n ln 2) for an n that leaves at most ln 2 / 2.
#[inline(always)]
fn exp_rest<const FMA: bool>(x: f32, n: f32) -> f32 {
    let r = fma::<FMA>(n, -LN2_LO, fma::<FMA>(n, -LN2_HI, x));
    let mut fit = EXP_FIT[0];
    for &term in &EXP_FIT[1..] {
        fit = fma::<FMA>(r, fit, term);
    }
    fit
}

/// e^x to 1 ulp (2 without FMA or in the subnormal range); 0 below -104, inf above 88.73, NaN for NaN.
#[inline(always)]
pub fn exp_f32<const FMA: bool>(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = limit(x, -104.0, 89.0);
    let t = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let p = exp_rest::<FMA>(x, t - ROUND);
    // 2^n in two factors: n runs from -150 to 128, more than one exponent holds.
    let n = (t.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    p * power(half) * power(n.wrapping_sub(half))
}

/// [`exp_flush`] is 0 below this.
const LEAST: f32 = -86.6;

/// As [`exp_f32`], to the bit, but 0 below -86.6: a quarter fewer operations, and no subnormal numbers, which are slow. It is
/// for sums to which a term below 2^-124 adds nothing.
#[inline(always)]
pub fn exp_flush<const FMA: bool>(x: f32) -> f32 {
    // As in `exp_f32`, with 126 more: the low bits are the exponent of 2^(n - 1), which one factor holds for n from -125
    // to 128.
    const ROUND: f32 = 12_582_912.0 + 126.0;
    let y = limit(x, LEAST, 89.0);
    let t = fma::<FMA>(y, std::f32::consts::LOG2_E, ROUND);
    let p = exp_rest::<FMA>(y, t - ROUND);
    let e = (p + p) * f32::from_bits(t.to_bits() << 23);
    if x < LEAST { 0.0 } else { e }
}

/// -127 ln 2: there the bits of 2^n would have 0 as their exponent, and so are those of 0.
pub(crate) const LOW_ZERO: f32 = -88.029_69;
/// As in [`exp_f32`], with 127 more: the low bits are the exponent of 2^n.
pub(crate) const LOW_ROUND: f32 = 12_582_912.0 + 127.0;

/// As [`exp_flush`], to the bit, for an x from -86.6 to 88: fewer operations still. Below it falls to 0, which it is from -87.7 on; between
/// -87.7 and -87.3 it is subnormal, and slow. Above 88 the result is unspecified.
#[inline(always)]
pub fn exp_low<const FMA: bool>(x: f32) -> f32 {
    let x = if x < LOW_ZERO { LOW_ZERO } else { x };
    let t = fma::<FMA>(x, std::f32::consts::LOG2_E, LOW_ROUND);
    exp_rest::<FMA>(x, t - LOW_ROUND) * f32::from_bits(t.to_bits() << 23)
}

/// A fit of 2^r for |r| <= 1/2, highest power first, with a relative error of 1.2e-8, where it is exactly 1 at 0.
pub(crate) const EXP2_FIT: [f32; 7] =
    [1.559_467_8e-4, 1.340_664_3e-3, 9.617_701e-3, 5.550_307e-2, 2.402_265_4e-1, 6.931_472_4e-1, 1.0];

/// [`exp2_flush`] is 0 below this, where 2^x would be subnormal.
pub(crate) const EXP2_LEAST: f32 = -126.0;

/// 2^x to 1 ulp (2 without FMA); 0 below -126, inf from 128 on, NaN for NaN. Between 127.5 and 128 it may be inf.
#[inline(always)]
pub fn exp2_flush<const FMA: bool>(x: f32) -> f32 {
    let y = limit(x, EXP2_LEAST, 128.0);
    let t = y + LOW_ROUND;
    let r = y - (t - LOW_ROUND);
    let mut fit = EXP2_FIT[0];
    for &term in &EXP2_FIT[1..] {
        fit = fma::<FMA>(r, fit, term);
    }
    let e = fit * f32::from_bits(t.to_bits() << 23);
    if x < EXP2_LEAST { 0.0 } else { e }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::multiversion;

    /// Distance in units of the last place of the exact value.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        if got == nearest || (got.is_nan() && want.is_nan()) {
            return 0.0;
        }
        let exponent = nearest.abs().max(f32::MIN_POSITIVE).to_bits() >> 23;
        (f64::from(got) - want).abs() / 2f64.powi(exponent as i32 - 150)
    }

    /// A dense grid over lo..hi, and every 2^16th float of either sign inside it.
    fn grid(lo: f32, hi: f32) -> Vec<f32> {
        let even = (0..=400_000).map(|i| lo + (hi - lo) * (i as f32 / 400_000.0));
        let floats = (0..=u32::MAX >> 12).map(|i| f32::from_bits(i << 12)).filter(|x| *x >= lo && *x <= hi);
        even.chain(floats).collect()
    }

    fn apply(f: fn(Isa, &mut [f32], &[f32]), isa: Isa, x: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len()];
        f(isa, &mut out, x);
        out
    }

    fn worst(isa: Isa, x: &[f32], f: fn(Isa, &mut [f32], &[f32]), exact: fn(f64) -> f64) -> (f64, f32) {
        let got = apply(f, isa, x);
        let mut worst = (0.0, 0.0);
        for (&x, &got) in x.iter().zip(&got) {
            let off = ulps(got, exact(f64::from(x)));
            if off.is_nan() || off > worst.0 {
                worst = (off, x);
            }
        }
        worst
    }

    #[test]
    fn exp_is_accurate() {
        for isa in Isa::supported() {
            let bound = if isa == Isa::PORTABLE { 1.5 } else { 1.1 };
            let (off, at) = worst(isa, &grid(-87.0, 88.72), exp_slice, f64::exp);
            assert!(off <= bound, "{isa:?}: {off} ulp at {at}");
            let (off, at) = worst(isa, &grid(-104.5, -87.0), exp_slice, f64::exp);
            assert!(off <= 1.5, "{isa:?}: {off} ulp at {at}");
        }
    }

    #[test]
    fn exp_of_special_values() {
        for isa in Isa::supported() {
            let x = [
                f32::NEG_INFINITY,
                -1e30,
                -104.0,
                0.0,
                -0.0,
                88.8,
                1e30,
                f32::INFINITY,
                f32::NAN,
                f32::MIN_POSITIVE,
            ];
            let got = apply(exp_slice, isa, &x);
            assert_eq!(got[..3], [0.0; 3]);
            assert_eq!(got[3..5], [1.0; 2]);
            assert_eq!(got[5..8], [f32::INFINITY; 3]);
            assert!(got[8].is_nan());
            assert_eq!(got[9], 1.0);
        }
    }

    multiversion! {
        fn exp_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = exp_f32::<FMA>(x));
        }

        fn flush_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = exp_flush::<FMA>(x));
        }

        fn low_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = exp_low::<FMA>(x));
        }

        fn exp2_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = exp2_flush::<FMA>(x));
        }
    }

    #[test]
    fn exp_that_flushes_is_exp_elsewhere() {
        for isa in Isa::supported() {
            let mut x = grid(-110.0, 95.0);
            x.extend([f32::NEG_INFINITY, f32::INFINITY, -1e30, 1e30, -0.0, -86.6, 88.72, 88.73]);
            let (got, exact) = (apply(flush_slice, isa, &x), apply(exp_slice, isa, &x));
            for ((&x, &got), &exact) in x.iter().zip(&got).zip(&exact) {
                let want = if x < -86.6 { 0.0 } else { exact };
                assert_eq!(got.to_bits(), want.to_bits(), "{isa:?}: e^{x} is {got}, expected {want}");
            }
            assert!(apply(flush_slice, isa, &[f32::NAN])[0].is_nan());
        }
    }

    #[test]
    fn exp_of_low_numbers_is_that_which_flushes() {
        for isa in Isa::supported() {
            let mut x = grid(-110.0, 88.0);
            x.extend([f32::NEG_INFINITY, f32::MIN, -1e30, -1e5, -212.0, -88.1, -0.0, -86.6]);
            let (got, want) = (apply(low_slice, isa, &x), apply(flush_slice, isa, &x));
            for ((&x, &got), &want) in x.iter().zip(&got).zip(&want) {
                let falls = x > -87.7 && x < LEAST && (0.0..=LEAST.exp()).contains(&got);
                assert!(falls || got.to_bits() == want.to_bits(), "{isa:?}: e^{x} is {got}, expected {want}");
            }
            assert!(apply(low_slice, isa, &[f32::NAN])[0].is_nan());
        }
    }

    #[test]
    fn exp2_is_accurate() {
        for isa in Isa::supported() {
            let bound = if isa == Isa::PORTABLE { 1.6 } else { 1.1 };
            let (off, at) = worst(isa, &grid(EXP2_LEAST, 127.4), exp2_slice, f64::exp2);
            assert!(off <= bound, "{isa:?}: {off} ulp at {at}");
            let whole = (-126..128).map(|n| n as f32).collect::<Vec<_>>();
            let (off, at) = worst(isa, &whole, exp2_slice, f64::exp2);
            assert!(off == 0.0, "{isa:?}: {off} ulp at {at}");
        }
    }

    #[test]
    fn exp2_of_special_values() {
        for isa in Isa::supported() {
            let x = [f32::NEG_INFINITY, f32::MIN, -1e30, -126.1, 128.0, 1e30, f32::INFINITY, -0.0, f32::NAN];
            let got = apply(exp2_slice, isa, &x);
            assert_eq!(got[..4], [0.0; 4], "{isa:?}");
            assert_eq!(got[4..7], [f32::INFINITY; 3], "{isa:?}");
            assert_eq!(got[7], 1.0, "{isa:?}");
            assert!(got[8].is_nan(), "{isa:?}");
        }
    }
}
