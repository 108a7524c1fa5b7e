//! Softmax and the norms.

use super::common::*;
use ironhorse::ops;

fn softmax64(x: &[f64]) -> Vec<f64> {
    let max = x.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    let total: f64 = x.iter().map(|x| (x - max).exp()).sum();
    x.iter().map(|x| (x - max).exp() / total).collect()
}

fn by_rows(x: &[f32], cols: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    f64s(x).chunks(cols.max(1)).flat_map(f).collect()
}

#[test]
fn softmax() {
    for (rows, cols) in SHAPES {
        let x = spread(rows * cols, 5, 12.0);
        let want = by_rows(&x, cols, softmax64);
        let (mut out, mut same) = (vec![f32::NAN; x.len()], x.clone());
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            ops::softmax(x.as_ptr(), out.as_mut_ptr(), n(rows), n(cols), S).unwrap();
            ops::softmax(same.as_ptr(), same.as_mut_ptr(), n(rows), n(cols), S).unwrap();
        }
        close(&out, &want, 3e-6, 1e-12);
        assert_eq!(out, same);
    }
}

#[test]
fn softmax_of_odd_rows() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for (x, want) in [
        ([0.0, -inf, 0.0], Some([0.5, 0.0, 0.5])),
        ([1e30, -1e30, 0.0], Some([1.0, 0.0, 0.0])),
        ([0.0, nan, 0.0], None),
        ([0.0, inf, 0.0], None),
        ([-inf; 3], None),
    ] {
        let mut out = [7.0; 3];
        // SAFETY: every array has three elements.
        unsafe { ops::softmax(x.as_ptr(), out.as_mut_ptr(), 1, 3, S) }.unwrap();
        match want {
            Some(want) => assert_eq!(out, want),
            None => assert!(out.iter().all(|x| x.is_nan()), "{out:?}"),
        }
    }
}

#[test]
fn softmax_topk() {
    for (rows, cols) in SHAPES {
        for k in [0, 1, 2, 8, cols].into_iter().filter(|&k| k <= cols && k * rows < 100_000) {
            let mut x = spread(rows * cols, 6, 3.0);
            if cols > 4 && rows > 0 {
                (x[1], x[3]) = (9.0, 9.0); // equals: the lower index first
            }
            let (mut weights, mut idx) = (vec![f32::NAN; rows * k], vec![-1; rows * k]);
            // SAFETY: the arrays have the sizes that are passed.
            unsafe {
                let (w, i) = (weights.as_mut_ptr(), idx.as_mut_ptr());
                ops::softmax_topk(x.as_ptr(), w, i, n(rows), n(cols), n(k), S).unwrap();
            }
            for row in 0..if k == 0 { 0 } else { rows } {
                let p = softmax64(&f64s(&x[row * cols..(row + 1) * cols]));
                let mut order: Vec<usize> = (0..cols).collect();
                order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
                let total: f64 = order[..k].iter().map(|&i| p[i]).sum();
                let want: Vec<f64> = order[..k].iter().map(|&i| p[i] / total).collect();
                let got: Vec<usize> = idx[row * k..(row + 1) * k].iter().map(|&i| i as usize).collect();
                assert_eq!(got, order[..k]);
                close(&weights[row * k..(row + 1) * k], &want, 1e-6, 0.0);
            }
        }
    }
    let (x, mut weights, mut idx) = ([1.0, f32::NAN, 2.0], [0.0; 2], [0; 2]);
    // SAFETY: `x` has three elements, `weights` and `idx` have two.
    unsafe { ops::softmax_topk(x.as_ptr(), weights.as_mut_ptr(), idx.as_mut_ptr(), 1, 3, 2, S) }.unwrap();
    assert!(weights.iter().all(|w| w.is_nan()) && idx == [1, 2]);
}

fn rms64(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(w).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
}

#[test]
fn rmsnorm_with_and_without_residual() {
    for (rows, dim) in SHAPES {
        let (x, res, w) = (spread(rows * dim, 1, 3.0), random(rows * dim, 2), random(dim, 3));
        let want = by_rows(&x, dim, |row| rms64(row, &f64s(&w), 1e-5));
        let mut out = vec![f32::NAN; x.len()];
        let mut same = x.clone();
        let sum: Vec<f32> = x.iter().zip(&res).map(|(a, b)| a + b).collect();
        let want_res = by_rows(&sum, dim, |row| rms64(row, &f64s(&w), 1e-5));
        let (mut out2, mut sum2, mut res2) = (out.clone(), out.clone(), res.clone());
        let (r, d) = (n(rows), n(dim));
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            ops::rmsnorm(x.as_ptr(), w.as_ptr(), out.as_mut_ptr(), r, d, 1e-5, S).unwrap();
            ops::rmsnorm(same.as_ptr(), w.as_ptr(), same.as_mut_ptr(), r, d, 1e-5, S).unwrap();
            let (xp, wp) = (x.as_ptr(), w.as_ptr());
            ops::rmsnorm_residual(xp, res.as_ptr(), wp, out2.as_mut_ptr(), sum2.as_mut_ptr(), r, d, 1e-5, S)
                .unwrap();
        }
        close(&out, &want, 1e-6, 1e-7);
        assert_eq!(out, same);
        close(&out2, &want_res, 1e-6, 1e-7);
        assert_eq!(sum2, sum);
        let mut out3 = x.clone();
        // SAFETY: the arrays have the sizes that are passed; the sum may replace the residual, and the result the
        // input.
        unsafe {
            let (xp, res, o) = (out3.as_ptr(), res2.as_mut_ptr(), out3.as_mut_ptr());
            ops::rmsnorm_residual(xp, res, w.as_ptr(), o, res, r, d, 1e-5, S).unwrap();
        }
        assert_eq!((out3, res2), (out2, sum2));
    }
}

#[test]
fn layernorm() {
    for (rows, dim) in SHAPES {
        let (x, w, b) = (spread(rows * dim, 1, 3.0), random(dim, 2), random(dim, 3));
        let want = by_rows(&x, dim, |x| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let rows = x.iter().zip(&w).zip(&b);
            rows.map(|((x, &w), &b)| (x - mean) / (var + 1e-5).sqrt() * f64::from(w) + f64::from(b)).collect()
        });
        let (mut out, mut same) = (vec![f32::NAN; x.len()], x.clone());
        let (r, d) = (n(rows), n(dim));
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            let (wp, bp) = (w.as_ptr(), b.as_ptr());
            ops::layernorm(x.as_ptr(), wp, bp, out.as_mut_ptr(), r, d, 1e-5, S).unwrap();
            ops::layernorm(same.as_ptr(), wp, bp, same.as_mut_ptr(), r, d, 1e-5, S).unwrap();
        }
        close(&out, &want, 1e-6, 2e-6);
        assert_eq!(out, same);
    }
}
