//! Sine and cosine that the compiler can vectorise.

use crate::multiversion;

/// The largest angle for which the reduction by multiples of π/2 in f64 loses nothing that an f32 shows.
const FAST: f32 = 1e6;

/// (sin x, cos x) for |x| <= [`FAST`]; NaN for NaN.
#[inline(always)]
fn sin_cos_fast(x: f32) -> (f32, f32) {
    // 1.5 * 2^52: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// π/2 = HI + LO
    const HI: f64 = std::f64::consts::FRAC_PI_2;
    const LO: f64 = 6.123_233_995_736_766e-17;
    let x = f64::from(x);
    let t = x * std::f64::consts::FRAC_2_PI + ROUND;
    let n = t - ROUND;
    let r = (x - n * HI) - n * LO;
    let z = r * r;
    // Taylor series for |r| <= π/4: what is left out is below 1e-11.
    let s = 1.0 / 362_880.0 + z * (-1.0 / 39_916_800.0);
    let s = r + r * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * s)));
    let c = 1.0 / 40_320.0 + z * (-1.0 / 3_628_800.0 + z * (1.0 / 479_001_600.0));
    let c = 1.0 + z * (-0.5 + z * (1.0 / 24.0 + z * (-1.0 / 720.0 + z * c)));
    let quarter = t.to_bits();
    let swap = quarter & 1 != 0;
    let (sin, cos) = (if swap { c } else { s }, if swap { s } else { c });
    let sin = if quarter & 2 != 0 { -sin } else { sin };
    let cos = if quarter.wrapping_add(1) & 2 != 0 { -cos } else { cos };
    (sin as f32, cos as f32)
}

multiversion! {
    fn fast_slice<const FMA: bool>(sin: &mut [f32], cos: &mut [f32], x: &[f32]) {
        for ((sin, cos), &x) in sin.iter_mut().zip(cos.iter_mut()).zip(x) {
            (*sin, *cos) = sin_cos_fast(x);
        }
    }
}

/// sin and cos of each x, to 1 ulp or 1e-10; NaN for NaN and infinities.
pub fn sin_cos_slice(sin: &mut [f32], cos: &mut [f32], x: &[f32]) {
    fast_slice(crate::isa::Isa::detect(), sin, cos, x);
    for ((sin, cos), &x) in sin.iter_mut().zip(cos).zip(x) {
        if x.abs() > FAST {
            let (s, c) = f64::from(x).sin_cos();
            (*sin, *cos) = (s as f32, c as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_f64() {
        let mut x: Vec<f32> = (-40_000..40_000).map(|i| i as f32 * 0.01).collect();
        x.extend((0..4000).map(|i| i as f32 * 333.77));
        x.extend([1e7, -3e9, 1e30, 0.0, -0.0, 1e-30]);
        let (mut s, mut c) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        sin_cos_slice(&mut s, &mut c, &x);
        for ((&x, s), c) in x.iter().zip(s).zip(c) {
            let (es, ec) = f64::from(x).sin_cos();
            assert!((f64::from(s) - es).abs() <= 6e-8 * es.abs() + 1e-10, "sin {x} = {s}, exactly {es}");
            assert!((f64::from(c) - ec).abs() <= 6e-8 * ec.abs() + 1e-10, "cos {x} = {c}, exactly {ec}");
        }
        let (mut s, mut c) = ([0.0; 3], [0.0; 3]);
        sin_cos_slice(&mut s, &mut c, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        assert!(s.iter().chain(&c).all(|v| v.is_nan()));
    }
}
