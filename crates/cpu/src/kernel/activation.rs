//! The activation functions and their derivatives, for one number.

use crate::element::Real;

/// √(2/π)
const GELU_A: f64 = 0.797_884_560_802_865_4;
const GELU_B: f64 = 0.044_715;

/// x limited to ±bound, so that its product with a zero is zero; NaN stays NaN.
#[inline(always)]
fn limited<A: Real>(x: A, bound: f64) -> A {
    let bound = A::of(bound);
    let x = if x < -bound { -bound } else { x };
    if x > bound { bound } else { x }
}

/// 1 + e^-x. A term that `exp_flush` makes 0 does not change the sum.
#[inline(always)]
fn one_plus_exp<A: Real, const FMA: bool>(x: A) -> A {
    A::ONE + (-x).exp_flush::<FMA>()
}

/// x / (1 + e^-x)
#[inline(always)]
pub fn silu<A: Real, const FMA: bool>(x: A) -> A {
    x / one_plus_exp::<A, FMA>(x)
}

/// What the gradient of silu needs: [1 / (1 + e^-x), silu' x, silu x].
#[inline(always)]
pub fn silu_grad<A: Real, const FMA: bool>(x: A) -> [A; 3] {
    let open = one_plus_exp::<A, FMA>(x);
    let s = A::ONE / open;
    [s, s * A::fma::<FMA>(x, A::ONE - s, A::ONE), x / open]
}

/// 1 / (1 + e^(-2u)) with u = √(2/π) (x + 0.044715 x³): this is (1 + tanh u) / 2 without the cancellation.
#[inline(always)]
fn gelu_gate<A: Real, const FMA: bool>(x: A) -> A {
    let (a, b) = (A::of(GELU_A), A::of(GELU_B));
    let u = x * A::fma::<FMA>(a * b, x * x, a);
    A::ONE / one_plus_exp::<A, FMA>(A::of(2.0) * u)
}

/// GELU in its tanh form: x (1 + tanh u) / 2.
#[inline(always)]
pub fn gelu_tanh<A: Real, const FMA: bool>(x: A) -> A {
    x * gelu_gate::<A, FMA>(x)
}

/// The derivative of [`gelu_tanh`]: g + 2 x g (1 - g) u'.
#[inline(always)]
pub fn gelu_tanh_grad<A: Real, const FMA: bool>(x: A) -> A {
    let g = gelu_gate::<A, FMA>(x);
    // The second term is 0 beyond |x| = 12; the limit keeps 0 * inf out.
    let y = limited(x, 12.0);
    let slope = A::of(2.0) * A::of(GELU_A) * A::fma::<FMA>(A::of(3.0) * A::of(GELU_B), y * y, A::ONE);
    A::fma::<FMA>(y * slope, g * (A::ONE - g), g)
}

/// GELU by its definition.
#[inline(always)]
pub fn gelu_erf<A: Real, const FMA: bool>(x: A) -> A {
    x * x.normal::<FMA>()[0]
}

/// The derivative of [`gelu_erf`].
#[inline(always)]
pub fn gelu_erf_grad<A: Real, const FMA: bool>(x: A) -> A {
    /// 1 / √(2π)
    const DENSITY: f64 = 0.398_942_280_401_432_7;
    let y = limited(x, 1e4);
    let [cdf, power] = y.normal::<FMA>();
    A::fma::<FMA>(y * A::of(DENSITY), power, cdf)
}
