use super::common::*;
use ironhorse::ops::layers::{self, GroupedLinear};
use ironhorse::ops::{self};

struct Case {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

fn exact(case: &Case, a: &[f32], b: &[f32], c: &[f32], alpha: f64, beta: f64) -> (Vec<f64>, f64) {
    let Case { batch, m, n, k } = *case;
    let (mut out, mut size) = (Vec::with_capacity(c.len()), 0.0_f64);
    for t in 0..batch {
        for i in 0..m {
            for j in 0..n {
                let at = |l: usize| f64::from(a[(t * m + i) * k + l]) * f64::from(b[(t * k + l) * n + j]);
                let dot: f64 = (0..k).map(at).sum();
                size = size.max((0..k).map(|l| at(l).abs()).sum());
                let old = if beta == 0.0 { 0.0 } else { beta * f64::from(c[(t * m + i) * n + j]) };
                out.push(alpha * dot + old);
            }
        }
    }
    (out, size)
}

#[test]
fn gemm_and_batched() {
    let shapes = [
        (1, 1, 1, 1),
        (1, 31, 33, 17),
        (1, 1, 257, 33),
        (1, 129, 1, 65),
        (3, 7, 5, 9),
        (40, 16, 16, 16),
        (2, 300, 65, 70),
        (1, 130, 140, 150),
        (2, 5, 6, 0),
        (0, 4, 4, 4),
        (1, 0, 4, 4),
    ];
    for (batch, m, n_, k) in shapes {
        let case = Case { batch, m, n: n_, k };
        for (alpha, beta) in [(1.0_f32, 0.0_f32), (0.5, 1.0), (-2.0, 0.75), (0.0, 2.0), (0.0, 0.0)] {
            let (a, b) = (random(batch * m * k, 1), random(batch * k * n_, 2));
            let old = random(batch * m * n_, 3);
            // With beta = 0 the old values must not matter.
            let mut c = if beta == 0.0 { vec![f32::NAN; old.len()] } else { old.clone() };
            let mut single = c.clone();
            let (want, size) = exact(&case, &a, &b, &old, f64::from(alpha), f64::from(beta));
            let dims = [n(batch), n(m), n(n_), n(k)];
            // SAFETY: the arrays have the sizes that are passed.
            unsafe {
                let [t, m, n, k] = dims;
                ops::gemm_batched(a.as_ptr(), b.as_ptr(), c.as_mut_ptr(), t, m, n, k, alpha, beta, S)
                    .unwrap();
            }
            close(&c, &want, 1e-6, 1e-6 * size + 1e-7);
            for i in 0..batch {
                let [a, b] = [a[i * m * k..].as_ptr(), b[i * k * n_..].as_ptr()];
                // SAFETY: the arrays have the sizes that are passed.
                unsafe {
                    let c = single[i * m * n_..].as_mut_ptr();
                    ops::gemm(a, b, c, dims[1], dims[2], dims[3], alpha, beta, S).unwrap();
                }
            }
            assert_eq!(c, single);
        }
    }
}

#[test]
fn without_alpha_nothing_is_read() {
    let (a, mut c) = ([f32::NAN; 4], [3.0; 4]);
    // SAFETY: every array has four elements.
    unsafe { ops::gemm(a.as_ptr(), a.as_ptr(), c.as_mut_ptr(), 2, 2, 2, 0.0, 2.0, S) }.unwrap();
    assert_eq!(c, [6.0; 4]);
    // SAFETY: every array has four elements.
    unsafe { ops::gemm(a.as_ptr(), a.as_ptr(), c.as_mut_ptr(), 2, 2, 2, 1.0, 0.0, S) }.unwrap();
    assert!(c.iter().all(|x| x.is_nan()));
}

fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// What lies transposed gives what the same does that does not. Few rows are added up in another order.
#[test]
fn gemm_transposed() {
    for (m, n_, k) in
        [(1, 1, 1), (31, 33, 17), (1, 257, 33), (129, 1, 65), (300, 65, 70), (5, 6, 0), (0, 4, 4)]
    {
        let (a, b, old) = (random(m * k, 1), random(k * n_, 2), random(m * n_, 3));
        let sizes = [n(m), n(n_), n(k)];
        for factors in [[1.0, 0.0], [1.0, 1.0], [-2.0, 0.5]] {
            let mut want = old.clone();
            // SAFETY: the arrays have the sizes that are passed.
            unsafe {
                let [m, n, k] = sizes;
                let c = want.as_mut_ptr();
                ops::gemm(a.as_ptr(), b.as_ptr(), c, m, n, k, factors[0], factors[1], S).unwrap();
            }
            for swap in [[true, false], [false, true], [true, true]] {
                let left = if swap[0] { transposed(&a, m, k) } else { a.clone() };
                let right = if swap[1] { transposed(&b, k, n_) } else { b.clone() };
                let mut c = old.clone();
                let (a, b, c_ptr) = (left.as_ptr(), right.as_ptr(), c.as_mut_ptr());
                let ([m, n, k], [alpha, beta], [ta, tb]) = (sizes, factors, swap);
                // SAFETY: the arrays have the sizes that are passed.
                unsafe { layers::gemm_transposed(a, b, c_ptr, m, n, k, alpha, beta, ta, tb, S) }.unwrap();
                close(&c, &wide(&want), 2e-6, 1e-6 * (k as f64 + 1.0));
            }
        }
    }
}

/// Each expert's products are those of `gemm_transposed` on its rows; one without rows is left alone.
#[test]
fn gemm_grouped() {
    use layers::Grouped::{Forward, Input, Weight};
    let (outs, ins) = (33_usize, 20_usize);
    for offsets in [vec![0, 5, 5, 37, 64], vec![0, 0, 0, 300], vec![0, 1], vec![0, 0, 0]] {
        let (experts, rows) = (offsets.len() - 1, offsets[offsets.len() - 1] as usize);
        let (x, d_y) = (random(rows * ins, 1), random(rows * outs, 2));
        let (weight, old) = (random(experts * outs * ins, 3), random(experts * outs * ins, 4));
        let (mut y, mut d_x, mut d_w) = (vec![0.0; rows * outs], vec![0.0; rows * ins], old.clone());
        let (mut y2, mut d_x2, mut d_w2) = (y.clone(), d_x.clone(), old.clone());
        let linear = |kind, a, b, c| GroupedLinear { kind, a, b, c, outs, ins, offsets: &offsets };
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            let (x, d_y, w) = (x.as_ptr(), d_y.as_ptr(), weight.as_ptr());
            layers::gemm_grouped(&linear(Forward, x, w, y.as_mut_ptr()), S).unwrap();
            layers::gemm_grouped(&linear(Input, d_y, w, d_x.as_mut_ptr()), S).unwrap();
            layers::gemm_grouped(&linear(Weight, d_y, x, d_w.as_mut_ptr()), S).unwrap();
            for e in 0..experts {
                let (first, count) = (offsets[e] as usize, n((offsets[e + 1] - offsets[e]) as usize));
                let (o, i) = (n(outs), n(ins));
                let (x, d_y, w) = (x.add(first * ins), d_y.add(first * outs), w.add(e * outs * ins));
                let (y, d_x) = (y2.as_mut_ptr().add(first * outs), d_x2.as_mut_ptr().add(first * ins));
                let d_w = d_w2.as_mut_ptr().add(e * outs * ins);
                let one = layers::gemm_transposed;
                one(x, w, y, count, o, i, 1.0, 0.0, false, true, S).unwrap();
                one(d_y, w, d_x, count, i, o, 1.0, 0.0, false, false, S).unwrap();
                one(d_y, x, d_w, o, i, count, 1.0, 1.0, true, false, S).unwrap();
            }
        }
        for (found, want, depth) in [(y, y2, ins), (d_x, d_x2, outs), (d_w, d_w2, rows)] {
            close(&found, &wide(&want), 2e-6, 1e-6 * (depth as f64 + 1.0));
        }
    }
    let (x, mut y) = (random(6, 1), [0.0; 6]);
    for offsets in [&[0, 2, 1][..], &[1, 3], &[], &[0]] {
        let (a, c) = (x.as_ptr(), y.as_mut_ptr());
        let linear = GroupedLinear { kind: Forward, a, b: a, c, outs: 2, ins: 2, offsets };
        // SAFETY: the call rejects the offsets before it accesses memory.
        let refused = unsafe { layers::gemm_grouped(&linear, S) };
        assert!(refused.unwrap_err().text.contains("`offsets` is"), "{offsets:?}");
    }
}
