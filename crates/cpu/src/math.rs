//! Elementary functions and reductions that the compiler can vectorise.
//!
//! The functions are branch-free and `#[inline(always)]`, so that a loop over them inside
//! [`multiversion!`](crate::multiversion) becomes vector code. `FMA` says whether the instructions have a fused
//! multiply-add. The reductions add in an order fixed by the length alone: element i goes to lane i mod 32, and the
//! lanes are added by a fixed tree.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use crate::multiversion;

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
const LN2_HI: f32 = 355.0 / 512.0;
const LN2_LO: f32 = -2.121_944_4e-4;

/// e^(x - n ln 2) for an n that leaves at most ln 2 / 2: a minimax fit 1 + r + r^2 q(r), relative error 3e-9.
#[inline(always)]
fn exp_rest<const FMA: bool>(x: f32, n: f32) -> f32 {
    let r = fma::<FMA>(n, -LN2_LO, fma::<FMA>(n, -LN2_HI, x));
    let q = fma::<FMA>(r, 1.381_454e-3, 8.368_745e-3);
    let q = fma::<FMA>(r, q, 4.166_839e-2);
    let q = fma::<FMA>(r, q, 1.666_652_1e-1);
    let q = fma::<FMA>(r, q, 4.999_999_4e-1);
    fma::<FMA>(r * r, q, r) + 1.0
}

/// e^x to 1 ulp (2 without FMA or in the subnormal range); 0 below -104, inf above 88.73, NaN for NaN.
#[inline(always)]
pub fn exp_f32<const FMA: bool>(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits.
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

/// As [`exp_f32`], to the bit, but 0 below -86.6: a quarter fewer operations, and no subnormal number, which are slow. For
/// sums to which a term below 2^-124 adds nothing.
#[inline(always)]
pub fn exp_flush<const FMA: bool>(x: f32) -> f32 {
    // As in `exp_f32`, with 126 more: the low bits are the exponent of 2^(n - 1), which one factor holds for n from -125
    // to 128.
    const ROUND: f32 = 12_582_912.0 + 126.0;
    const LEAST: f32 = -86.6;
    let y = limit(x, LEAST, 89.0);
    let t = fma::<FMA>(y, std::f32::consts::LOG2_E, ROUND);
    let p = exp_rest::<FMA>(y, t - ROUND);
    let e = (p + p) * f32::from_bits(t.to_bits() << 23);
    if x < LEAST { 0.0 } else { e }
}

/// tanh x to 3 ulp, also relative to small x; ±1 for large x, NaN for NaN.
#[inline(always)]
pub fn tanh_f32<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    // Small: a + a z p(z), z = a^2; minimax fit for a < 0.55, relative error 1e-9.
    let z = a * a;
    let p = fma::<FMA>(z, -6.274_239_6e-3, 2.107_168e-2);
    let p = fma::<FMA>(z, p, -5.385_231e-2);
    let p = fma::<FMA>(z, p, 1.333_258_6e-1);
    let p = fma::<FMA>(z, p, -3.333_331_6e-1);
    let small = fma::<FMA>(a * z, p, a);
    let large = 1.0 - 2.0 / (exp_f32::<FMA>(2.0 * a) + 1.0);
    (if a < 0.55 { small } else { large }).copysign(x)
}

/// sqrt(2/pi)
const GELU_A: f32 = 0.797_884_6;
const GELU_B: f32 = 0.044_715;

/// 1 / (1 + e^(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3): this is (1 + tanh u) / 2 without the cancellation.
#[inline(always)]
fn gelu_gate<const FMA: bool>(x: f32) -> f32 {
    let u = x * fma::<FMA>(GELU_A * GELU_B, x * x, GELU_A);
    1.0 / (1.0 + exp_f32::<FMA>(-2.0 * u))
}

/// GELU, tanh form: x (1 + tanh u) / 2.
#[inline(always)]
pub fn gelu<const FMA: bool>(x: f32) -> f32 {
    x * gelu_gate::<FMA>(x)
}

/// The derivative of [`gelu`]: g + 2 x g (1 - g) u'.
#[inline(always)]
pub fn gelu_grad<const FMA: bool>(x: f32) -> f32 {
    let g = gelu_gate::<FMA>(x);
    // The second term is 0 beyond |x| = 12; the limit keeps 0 * inf out.
    let y = limit(x, -12.0, 12.0);
    let slope = 2.0 * GELU_A * fma::<FMA>(3.0 * GELU_B, y * y, 1.0);
    fma::<FMA>(y * slope, g * (1.0 - g), g)
}

/// Lanes of the reductions.
pub const LANES: usize = 32;

/// The lanes combined by a fixed tree: 32 to 16 to 8 ...
#[inline(always)]
pub(crate) fn tree<T: Copy>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// `step(lane, x)` over x, element i in lane i mod 32.
#[inline(always)]
fn lanes<T: Copy>(x: &[f32], zero: T, step: impl Fn(T, f32) -> T) -> [T; LANES] {
    let mut acc = [zero; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            acc[i] = step(acc[i], block[i]);
        }
    }
    for (acc, &x) in acc.iter_mut().zip(rest) {
        *acc = step(*acc, x);
    }
    acc
}

/// As [`sum`], for use inside [`multiversion!`](crate::multiversion).
#[inline(always)]
pub fn sum_inline(x: &[f32]) -> f32 {
    // The compiler must not see that the tree adds pairs: it would add in pairs from the start, two lanes at a time.
    let acc = std::hint::black_box(lanes(x, 0.0, |acc, x| acc + x));
    tree(acc, |a, b| a + b)
}

/// As [`sum_sq`], for use inside [`multiversion!`](crate::multiversion).
#[inline(always)]
pub fn sum_sq_inline(x: &[f32]) -> f64 {
    tree(lanes(x, 0.0_f64, |acc, x| acc + f64::from(x) * f64::from(x)), |a, b| a + b)
}

/// As [`max`], for use inside [`multiversion!`](crate::multiversion).
#[inline(always)]
pub fn max_inline(x: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    tree(lanes(x, f32::NEG_INFINITY, greater), greater)
}

/// As [`dot`], for use inside [`multiversion!`](crate::multiversion).
#[inline(always)]
pub fn dot_inline<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    let len = x.len().min(y.len());
    let (xs, x_rest) = x[..len].as_chunks::<LANES>();
    let (ys, y_rest) = y[..len].as_chunks::<LANES>();
    let mut acc = [0.0; LANES];
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            acc[i] = fma::<FMA>(x[i], y[i], acc[i]);
        }
    }
    for ((acc, &x), &y) in acc.iter_mut().zip(x_rest).zip(y_rest) {
        *acc = fma::<FMA>(x, y, *acc);
    }
    tree(acc, |a, b| a + b)
}

multiversion! {
    /// Σ x
    pub fn sum<const FMA: bool>(x: &[f32]) -> f32 {
        sum_inline(x)
    }

    /// Σ x², in f64.
    pub fn sum_sq<const FMA: bool>(x: &[f32]) -> f64 {
        sum_sq_inline(x)
    }

    /// The greatest element; -inf for none. NaN is passed over.
    pub fn max<const FMA: bool>(x: &[f32]) -> f32 {
        max_inline(x)
    }

    /// Σ x y over the shorter of the two.
    pub fn dot<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
        dot_inline::<FMA>(x, y)
    }

    /// out = e^x
    pub fn exp_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = exp_f32::<FMA>(x));
    }

    /// out = tanh x
    pub fn tanh_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = tanh_f32::<FMA>(x));
    }

    /// out = gelu x
    pub fn gelu_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = gelu::<FMA>(x));
    }

    /// out = d · gelu'(x)
    pub fn gelu_grad_slice<const FMA: bool>(out: &mut [f32], d: &[f32], x: &[f32]) {
        for ((out, &d), &x) in out.iter_mut().zip(d).zip(x) {
            *out = d * gelu_grad::<FMA>(x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

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
        fn flush_slice<const FMA: bool>(out: &mut [f32], x: &[f32]) {
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = exp_flush::<FMA>(x));
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
    fn tanh_is_accurate() {
        for isa in Isa::supported() {
            let (off, at) = worst(isa, &grid(-12.0, 12.0), tanh_slice, f64::tanh);
            assert!(off <= 3.0, "{isa:?}: {off} ulp at {at}");
            let got = apply(tanh_slice, isa, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, 1e-40]);
            assert_eq!(got[..2], [1.0, -1.0]);
            assert!(got[2].is_nan());
            assert_eq!((got[3].to_bits(), got[4].to_bits(), got[5]), (0, 1 << 31, 1e-40));
        }
    }

    fn gelu_f64(x: f64) -> f64 {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        x / (1.0 + (-2.0 * u).exp())
    }

    fn gelu_grad_f64(x: f64) -> f64 {
        let a = (2.0 / std::f64::consts::PI).sqrt();
        let u = a * (x + 0.044715 * x * x * x);
        let g = 1.0 / (1.0 + (-2.0 * u).exp());
        let rest = 1.0 / (1.0 + (2.0 * u).exp());
        g + 2.0 * x * g * rest * a * (1.0 + 3.0 * 0.044715 * x * x)
    }

    #[test]
    fn gelu_is_accurate() {
        for isa in Isa::supported() {
            let x = grid(-12.0, 12.0);
            for (&x, &got) in x.iter().zip(&apply(gelu_slice, isa, &x)) {
                let want = gelu_f64(f64::from(x));
                // The error of u is multiplied by u in e^u: |u| eps, beside the rounding of the rest.
                let relative = if x > -4.0 { 2e-6 } else { 2e-5 };
                let off = (f64::from(got) - want).abs();
                assert!(off <= relative * want.abs() + 1e-37, "{isa:?}: gelu({x}) = {got}, exactly {want}");
            }
            assert_eq!(
                apply(gelu_slice, isa, &[0.0, -1e30, 1e30, f32::INFINITY])[1..],
                [0.0, 1e30, f32::INFINITY]
            );
            assert!(apply(gelu_slice, isa, &[f32::NAN])[0].is_nan());
        }
    }

    #[test]
    fn gelu_grad_is_accurate() {
        for isa in Isa::supported() {
            let x = grid(-14.0, 14.0);
            let mut got = vec![f32::NAN; x.len()];
            gelu_grad_slice(isa, &mut got, &vec![1.0; x.len()], &x);
            for (&x, &got) in x.iter().zip(&got) {
                let want = gelu_grad_f64(f64::from(x));
                let off = (f64::from(got) - want).abs();
                assert!(off <= 2e-6 * want.abs() + 2e-7, "{isa:?}: gelu'({x}) = {got}, exactly {want}");
            }
            let mut got = [0.0; 4];
            gelu_grad_slice(isa, &mut got, &[1.0; 4], &[1e30, -1e30, f32::INFINITY, f32::NAN]);
            assert_eq!(got[..2], [1.0, 0.0]);
            assert!(got[3].is_nan());
        }
    }

    fn random(len: usize) -> Vec<f32> {
        let mut state = 99_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn reductions_agree_with_f64_and_between_instruction_sets() {
        for len in [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 50257] {
            let x = random(len);
            let y: Vec<f32> = x.iter().map(|x| 0.3 - x).collect();
            let exact: f64 = x.iter().map(|&x| f64::from(x)).sum();
            let exact_sq: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            let exact_dot: f64 = x.iter().zip(&y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
            let best = Isa::detect();
            for isa in Isa::supported() {
                let close = |got: f64, want: f64| (got - want).abs() <= 1e-5 * (len as f64).sqrt() + 1e-7;
                assert!(close(f64::from(sum(isa, &x)), exact));
                assert!(close(sum_sq(isa, &x), exact_sq));
                assert!(close(f64::from(dot(isa, &x, &y)), exact_dot));
                assert_eq!(max(isa, &x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                assert_eq!(sum(isa, &x).to_bits(), sum(best, &x).to_bits());
                assert_eq!(sum_sq(isa, &x).to_bits(), sum_sq(best, &x).to_bits());
                if isa != Isa::PORTABLE {
                    assert_eq!(dot(isa, &x, &y).to_bits(), dot(best, &x, &y).to_bits());
                }
            }
        }
    }
}
