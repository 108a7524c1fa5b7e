use super::common::*;
use ironhorse::ops;

type Unary = unsafe fn(*const f32, *mut f32, i64, Stream) -> ops::Result;
type Binary = unsafe fn(*const f32, *const f32, *mut f32, i64, Stream) -> ops::Result;

type Exact1 = fn(f64) -> f64;
type Exact2 = fn(f64, f64) -> f64;

fn silu64(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu64(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    x / (1.0 + (-2.0 * u).exp())
}

fn scale3(x: *const f32, out: *mut f32, n: i64, stream: Stream) -> ops::Result {
    // SAFETY: the caller passes arrays of `n` elements.
    unsafe { ops::scale(x, out, -3.25, n, stream) }
}

#[test]
fn unary_ops_apart_and_in_place() {
    let table: [(&str, Unary, Exact1); 3] =
        [("silu", ops::silu, silu64), ("gelu", ops::gelu, gelu64), ("scale", scale3, |x| -3.25 * x)];
    for (name, op, exact) in table {
        for size in SIZES {
            let x = spread(size, 3, 8.0);
            let want: Vec<f64> = f64s(&x).into_iter().map(exact).collect();
            let mut out = vec![f32::NAN; size + 1];
            // SAFETY: the arrays have the sizes that are passed.
            unsafe { op(x.as_ptr(), out.as_mut_ptr(), n(size), S) }.unwrap();
            println!("{name} {size}");
            close(&out[..size], &want, 2e-5, 1e-12);
            assert!(out[size].is_nan(), "wrote beyond the end");
            let mut same = x.clone();
            // SAFETY: the array has the size that is passed; the op may work in place.
            unsafe { op(same.as_ptr(), same.as_mut_ptr(), n(size), S) }.unwrap();
            assert_eq!(same, out[..size]);
        }
    }
}

#[test]
fn binary_ops_with_every_aliasing() {
    let table: [(Binary, Exact2); 3] =
        [(ops::add, |a, b| a + b), (ops::mul, |a, b| a * b), (ops::swiglu, |a, b| silu64(a) * b)];
    for (op, exact) in table {
        for size in SIZES {
            let (a, b) = (spread(size, 1, 6.0), spread(size, 2, 2.0));
            let want: Vec<f64> = a.iter().zip(&b).map(|(&a, &b)| exact(f64::from(a), f64::from(b))).collect();
            let twice: Vec<f64> = a.iter().map(|&a| exact(f64::from(a), f64::from(a))).collect();
            let mut out = vec![f32::NAN; size];
            let (mut on_a, mut on_b, mut on_both) = (a.clone(), b.clone(), a.clone());
            // SAFETY: the arrays have the sizes that are passed, and are equal or disjoint.
            unsafe {
                op(a.as_ptr(), b.as_ptr(), out.as_mut_ptr(), n(size), S).unwrap();
                op(on_a.as_ptr(), b.as_ptr(), on_a.as_mut_ptr(), n(size), S).unwrap();
                op(a.as_ptr(), on_b.as_ptr(), on_b.as_mut_ptr(), n(size), S).unwrap();
                op(on_both.as_ptr(), on_both.as_ptr(), on_both.as_mut_ptr(), n(size), S).unwrap();
            }
            close(&out, &want, 1e-6, 1e-6);
            close(&on_both, &twice, 1e-6, 1e-6);
            assert_eq!((&out, &out), (&on_a, &on_b));
        }
    }
}

#[test]
fn extreme_values() {
    let x = [-100.0, 0.0, 100.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN];
    let mut out = [0.0; 8];
    // SAFETY: every array has eight elements.
    unsafe { ops::silu(x.as_ptr(), out.as_mut_ptr(), 8, S) }.unwrap();
    assert_eq!(out[..4], [0.0, 0.0, 100.0, f32::INFINITY]);
    assert!(out[5].is_nan() && out[6] == f32::MAX && out[7] == 0.0);
    // SAFETY: every array has eight elements.
    unsafe { ops::gelu(x.as_ptr(), out.as_mut_ptr(), 8, S) }.unwrap();
    assert_eq!(out[..4], [0.0, 0.0, 100.0, f32::INFINITY]);
}
