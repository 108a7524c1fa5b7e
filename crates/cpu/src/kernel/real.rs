//! The types that ops compute in, and the functions of one number.

use super::elem::Elem;
use crate::gemm::{Beta, Gemm, LocalScratch, MatMut, MatRef, gemm_local};
use crate::isa::Isa;
use crate::math;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A matrix: element (i, j) at `ptr + i * rs + j * cs`.
#[derive(Clone, Copy)]
pub struct Mat<A> {
    /// Element (0, 0).
    pub ptr: *mut A,
    /// From row to row.
    pub rs: usize,
    /// From column to column.
    pub cs: usize,
}

impl<A> Mat<A> {
    /// Rows of `cols`, one after the other.
    pub fn new(x: &mut [A], cols: usize) -> Self {
        Self { ptr: x.as_mut_ptr(), rs: cols, cs: 1 }
    }

    /// The rows from `first` on.
    pub fn rows_from(self, first: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(first * self.rs), ..self }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }
}

/// f64 or f32.
pub trait Real:
    Elem<Acc = Self>
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// 0
    const ZERO: Self;
    /// 1
    const ONE: Self;
    /// -inf
    const NEG_INFINITY: Self;

    /// The nearest.
    fn of(x: f64) -> Self;

    /// Exact.
    fn wide(self) -> f64;

    /// a b + c, with one rounding where `FMA`.
    fn fma<const FMA: bool>(a: Self, b: Self, c: Self) -> Self;

    /// e^x
    fn exp<const FMA: bool>(self) -> Self;

    /// e^x, but 0 where an f32 would be below 2^-124: for sums to which such a term adds nothing. Faster than `exp` in f32.
    fn exp_flush<const FMA: bool>(self) -> Self;

    /// √x
    fn sqrt(self) -> Self;

    /// ln x
    fn ln(self) -> Self;

    /// (1 + erf(x / √2)) / 2, accurate relative to itself also far below 0, and e^(-x² / 2).
    fn normal<const FMA: bool>(self) -> [Self; 2];

    /// c (m,n) = or += a (m,k) · b (k,n)
    ///
    /// # Safety
    /// `a` and `b` are readable, `c` has columns side by side and is writable, and overlaps neither.
    unsafe fn product(
        scratch: (&mut LocalScratch, Isa),
        size: [usize; 3],
        ab: [Mat<Self>; 2],
        c: Mat<Self>,
        beta: Beta,
    );
}

/// What f32 and f64 have in common.
macro_rules! same_in_both {
    () => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = Self::NEG_INFINITY;

        #[inline(always)]
        fn of(x: f64) -> Self {
            x as Self
        }

        #[inline(always)]
        fn wide(self) -> f64 {
            self.into()
        }

        #[inline(always)]
        fn fma<const FMA: bool>(a: Self, b: Self, c: Self) -> Self {
            if FMA { a.mul_add(b, c) } else { a * b + c }
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            Self::sqrt(self)
        }

        #[inline(always)]
        fn ln(self) -> Self {
            Self::ln(self)
        }
    };
}

impl Real for f32 {
    same_in_both!();

    #[inline(always)]
    fn exp<const FMA: bool>(self) -> Self {
        math::exp_f32::<FMA>(self)
    }

    #[inline(always)]
    fn exp_flush<const FMA: bool>(self) -> Self {
        math::exp_flush::<FMA>(self)
    }

    #[inline(always)]
    fn normal<const FMA: bool>(self) -> [Self; 2] {
        // Beyond 20 it is 0 or 1; the limit keeps inf - inf out, and NaN in.
        let a = if self.abs() > 20.0 { 20.0 } else { self.abs() };
        let z = a * std::f32::consts::FRAC_1_SQRT_2;
        let t = 1.0 / math::fma::<FMA>(z, 0.5, 1.0);
        // erfc z = t e^(p(t) - z²) to 1.2e-7 (Press et al., Numerical Recipes, erfcc).
        let p = math::fma::<FMA>(t, 0.170_872_77, -0.822_152_2);
        let p = math::fma::<FMA>(t, p, 1.488_515_9);
        let p = math::fma::<FMA>(t, p, -1.135_204);
        let p = math::fma::<FMA>(t, p, 0.278_868_07);
        let p = math::fma::<FMA>(t, p, -0.186_288_06);
        let p = math::fma::<FMA>(t, p, 0.096_784_18);
        let p = math::fma::<FMA>(t, p, 0.374_091_96);
        let p = math::fma::<FMA>(t, p, 1.000_023_7);
        let p = math::fma::<FMA>(t, p, -1.265_512_2);
        // e^(-a²/2) apart, with what squaring loses: the error of an exponent is multiplied by the exponent.
        let square = a * a;
        let lost = if FMA { a.mul_add(a, -square) } else { 0.0 };
        let tail = math::exp_f32::<FMA>(-0.5 * square) * (1.0 - 0.5 * lost);
        let half = 0.5 * t * math::exp_f32::<FMA>(p) * tail;
        [if self > 0.0 { 1.0 - half } else { half }, tail]
    }

    unsafe fn product(
        (scratch, isa): (&mut LocalScratch, Isa),
        [m, n, k]: [usize; 3],
        ab: [Mat<Self>; 2],
        c: Mat<Self>,
        beta: Beta,
    ) {
        let [a, b] = ab.map(|m| MatRef { ptr: m.ptr.cast_const(), rs: m.rs, cs: m.cs });
        let gemm = Gemm::new((m, n, k), a, b, MatMut { ptr: c.ptr, rs: c.rs }).beta(beta);
        // SAFETY: guaranteed by the caller of `product`.
        unsafe { gemm_local(scratch, isa, &gemm) };
    }
}

impl Real for f64 {
    same_in_both!();

    #[inline(always)]
    fn exp<const FMA: bool>(self) -> Self {
        Self::exp(self)
    }

    #[inline(always)]
    fn exp_flush<const FMA: bool>(self) -> Self {
        Self::exp(self)
    }

    #[inline(always)]
    fn normal<const FMA: bool>(self) -> [Self; 2] {
        [0.5 * libm::erfc(-self * std::f64::consts::FRAC_1_SQRT_2), (-0.5 * self * self).exp()]
    }

    unsafe fn product(
        _: (&mut LocalScratch, Isa),
        [m, n, k]: [usize; 3],
        [a, b]: [Mat<Self>; 2],
        c: Mat<Self>,
        beta: Beta,
    ) {
        for i in 0..m {
            for j in 0..n {
                // SAFETY: (i, p), (p, j) and (i, j) are inside the matrices that the caller of `product` guarantees.
                unsafe {
                    let term = |p: usize| *a.ptr.add(i * a.rs + p * a.cs) * *b.ptr.add(p * b.rs + j * b.cs);
                    let at = c.ptr.add(i * c.rs + j);
                    let old = if beta == Beta::Accumulate { *at } else { 0.0 };
                    *at = old + (0..k).map(term).sum::<Self>();
                }
            }
        }
    }
}

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
