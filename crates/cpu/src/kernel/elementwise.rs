//! Functions of single elements, and their gradients. An output may be the same window as an input.

use super::activation::{gelu_erf, gelu_erf_grad, gelu_tanh, gelu_tanh_grad, silu, silu_grad};
use crate::element::{Elem, Real, map};
use crate::memory::Span;
use crate::multiversion;
use ironhorse_core::eager::{BinaryFn, UnaryFn};
use ironhorse_core::op::Act;

/// max(x, 0); NaN stays NaN.
#[inline(always)]
fn relu<A: Real>(x: A) -> A {
    if x <= A::ZERO { A::ZERO } else { x }
}

multiversion! {
    /// y = op(x)
    pub fn unary<const FMA: bool, T: Elem>(op: UnaryFn, x: Span<T>, y: Span<T>) {
        // SAFETY: the caller alone uses `y`, which is `x` or shares no memory with it.
        unsafe {
            match op {
                UnaryFn::Silu => map([x], [y], |[x]| [silu::<_, FMA>(x)]),
                UnaryFn::Act(Act::Gelu) => map([x], [y], |[x]| [gelu_tanh::<_, FMA>(x)]),
                UnaryFn::Act(Act::Relu2) => map([x], [y], |[x]| [relu(x) * relu(x)]),
                UnaryFn::GeluErf => map([x], [y], |[x]| [gelu_erf::<_, FMA>(x)]),
                UnaryFn::Square => map([x], [y], |[x]| [x * x]),
                UnaryFn::Scale(a) => map([x], [y], |[x]| [T::Acc::of(a) * x]),
            }
        }
    }

    /// d_x = d_y op'(x). `Scale` does not read x.
    pub fn unary_bwd<const FMA: bool, T: Elem>(op: UnaryFn, from: [Span<T>; 2], d_x: Span<T>) {
        // SAFETY: the caller alone uses `d_x`, which is an input or shares no memory with it.
        unsafe {
            match op {
                UnaryFn::Silu => map(from, [d_x], |[d, x]| [d * silu_grad::<_, FMA>(x)[1]]),
                UnaryFn::Act(Act::Gelu) => map(from, [d_x], |[d, x]| [d * gelu_tanh_grad::<_, FMA>(x)]),
                UnaryFn::Act(Act::Relu2) => map(from, [d_x], |[d, x]| [d * (relu(x) + relu(x))]),
                UnaryFn::GeluErf => map(from, [d_x], |[d, x]| [d * gelu_erf_grad::<_, FMA>(x)]),
                UnaryFn::Square => map(from, [d_x], |[d, x]| [d * (x + x)]),
                UnaryFn::Scale(a) => map([from[0]], [d_x], |[d]| [T::Acc::of(a) * d]),
            }
        }
    }

    /// y = op(a, b)
    pub fn binary<const FMA: bool, T: Elem>(op: BinaryFn, from: [Span<T>; 2], y: Span<T>) {
        // SAFETY: the caller alone uses `y`, which is an input or shares no memory with it.
        unsafe {
            match op {
                BinaryFn::Add => map(from, [y], |[a, b]| [a + b]),
                BinaryFn::Mul => map(from, [y], |[a, b]| [a * b]),
                BinaryFn::Swiglu => map(from, [y], |[a, b]| [silu::<_, FMA>(a) * b]),
            }
        }
    }

    /// y = gelu(gate) up, GELU in its tanh form
    pub fn geglu<const FMA: bool, T: Elem>(from: [Span<T>; 2], y: Span<T>) {
        // SAFETY: the caller alone uses `y`, which is an input or shares no memory with it.
        unsafe { map(from, [y], |[gate, up]| [gelu_tanh::<_, FMA>(gate) * up]) }
    }

    /// As `swiglu_bwd`, with GELU in its tanh form in place of silu.
    pub fn geglu_bwd<const FMA: bool, T: Elem>(from: [Span<T>; 3], to: [Span<T>; 3]) {
        // SAFETY: the caller alone uses what is written, each of which is an input or shares no memory with one.
        unsafe {
            map(from, to, |[d, gate, up]| {
                let gelu = gelu_tanh::<_, FMA>(gate);
                [d * up * gelu_tanh_grad::<_, FMA>(gate), d * gelu, gelu * up]
            });
        }
    }

    /// From \[d_y, gate, up\]: d_gate = d_y up silu'(gate), d_up = d_y silu(gate), and once more y = silu(gate) up.
    pub fn swiglu_bwd<const FMA: bool, T: Elem>(from: [Span<T>; 3], to: [Span<T>; 3]) {
        // SAFETY: the caller alone uses what is written, each of which is an input or shares no memory with one.
        unsafe {
            if to[2].is_some() {
                map(from, to, |[d, gate, up]| {
                    let [s, slope, silu] = silu_grad::<_, FMA>(gate);
                    [d * up * slope, d * gate * s, silu * up]
                });
            } else {
                // without y there is one division less
                map(from, [to[0], to[1]], |[d, gate, up]| {
                    let [s, slope, _] = silu_grad::<_, FMA>(gate);
                    [d * up * slope, d * gate * s]
                });
            }
        }
    }

    /// y = relu(x scale + bias); NaN stays NaN.
    pub fn scale_bias_relu<const FMA: bool, T: Elem>(from: [Span<T>; 2], y: Span<T>, scale: T::Acc) {
        // SAFETY: the caller alone uses `y`, which is `x` or shares no memory with it.
        unsafe {
            map(from, [y], |[x, bias]| {
                let sum = T::Acc::fma::<FMA>(x, scale, bias);
                [relu(sum)]
            });
        }
    }

    /// From \[d_y, y\]: d_x = d_y scale where y is not <= 0.
    pub fn scale_bias_relu_bwd<const FMA: bool, T: Elem>(from: [Span<T>; 2], d_x: Span<T>, scale: T::Acc) {
        // SAFETY: the caller alone uses `d_x`, which is an input or shares no memory with it.
        unsafe { map(from, [d_x], |[d, y]| [if y <= T::Acc::ZERO { T::Acc::ZERO } else { d * scale }]) }
    }

    /// sums += d_y where y is not <= 0
    pub fn relu_sums<const FMA: bool, T: Elem>(sums: &mut [T::Acc], d_y: &[T], y: &[T]) {
        for ((sum, d), y) in sums.iter_mut().zip(d_y).zip(y) {
            *sum += if y.load() <= T::Acc::ZERO { T::Acc::ZERO } else { d.load() };
        }
    }

    /// sums += x
    pub fn add_to<const FMA: bool, T: Elem>(sums: &mut [T::Acc], x: &[T]) {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.load());
    }

    /// out = factor x
    pub fn scaled<const FMA: bool, A: Real>(out: &mut [A], factor: A, x: &[A]) {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = factor * x);
    }

    /// out += factor x
    pub fn add_scaled<const FMA: bool, T: Elem>(out: &mut [T::Acc], factor: T::Acc, x: &[T]) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = T::Acc::fma::<FMA>(factor, x.load(), *out));
    }

    /// x *= factor
    pub fn scale_by<const FMA: bool, A: Real>(x: &mut [A], factor: A) {
        x.iter_mut().for_each(|x| *x = *x * factor);
    }

    /// to = x, widened
    pub fn widen<const FMA: bool, T: Elem>(to: &mut [T::Acc], x: &[T]) {
        to.iter_mut().zip(x).for_each(|(to, x)| *to = x.load());
    }

    /// to = x, rounded
    pub fn narrow<const FMA: bool, T: Elem>(to: &mut [T], x: &[T::Acc]) {
        to.iter_mut().zip(x).for_each(|(to, &x)| *to = T::store(x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    fn gelu(isa: Isa, x: &[f32]) -> Vec<f32> {
        let (mut x, mut y) = (x.to_vec(), vec![f32::NAN; x.len()]);
        unary(isa, UnaryFn::Act(Act::Gelu), Span::of_slice(&mut x), Span::of_slice(&mut y));
        y
    }

    fn gelu_grad(isa: Isa, out: &mut [f32], x: &[f32]) {
        let (mut x, mut d) = (x.to_vec(), vec![1.0; x.len()]);
        let from = [Span::of_slice(&mut d), Span::of_slice(&mut x)];
        unary_bwd(isa, UnaryFn::Act(Act::Gelu), from, Span::of_slice(out));
    }

    /// A dense grid over ±bound, and every 2^12th float inside it.
    fn grid(bound: f32) -> Vec<f32> {
        let even = (0..=400_000).map(|i| bound * (i as f32 / 200_000.0 - 1.0));
        let floats = (0..=u32::MAX >> 12).map(|i| f32::from_bits(i << 12)).filter(|x| x.abs() <= bound);
        even.chain(floats).collect()
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
            let x = grid(12.0);
            for (&x, &got) in x.iter().zip(&gelu(isa, &x)) {
                let want = gelu_f64(f64::from(x));
                // The error of u is multiplied by u in e^u: |u| eps, beside the rounding of the rest.
                let relative = if x > -4.0 { 2e-6 } else { 2e-5 };
                let off = (f64::from(got) - want).abs();
                assert!(off <= relative * want.abs() + 1e-37, "{isa:?}: gelu({x}) = {got}, exactly {want}");
            }
            assert_eq!(gelu(isa, &[0.0, -1e30, 1e30, f32::INFINITY])[1..], [0.0, 1e30, f32::INFINITY]);
            assert!(gelu(isa, &[f32::NAN])[0].is_nan());
        }
    }

    #[test]
    fn gelu_grad_is_accurate() {
        for isa in Isa::supported() {
            let x = grid(14.0);
            let mut got = vec![f32::NAN; x.len()];
            gelu_grad(isa, &mut got, &x);
            for (&x, &got) in x.iter().zip(&got) {
                let want = gelu_grad_f64(f64::from(x));
                let off = (f64::from(got) - want).abs();
                assert!(off <= 2e-6 * want.abs() + 2e-7, "{isa:?}: gelu'({x}) = {got}, exactly {want}");
            }
            let mut got = [0.0; 4];
            gelu_grad(isa, &mut got, &[1e30, -1e30, f32::INFINITY, f32::NAN]);
            assert_eq!(got[..2], [1.0, 0.0]);
            assert!(got[3].is_nan());
        }
    }
}
