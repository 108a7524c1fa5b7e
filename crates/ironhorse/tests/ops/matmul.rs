use crate::common::*;
use ironhorse::ops;

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
            // SAFETY: arrays of the size given.
            unsafe {
                let [t, m, n, k] = dims;
                ops::gemm_batched(a.as_ptr(), b.as_ptr(), c.as_mut_ptr(), t, m, n, k, alpha, beta, S)
                    .unwrap();
            }
            close(&c, &want, 1e-6, 1e-6 * size + 1e-7);
            for i in 0..batch {
                let [a, b] = [a[i * m * k..].as_ptr(), b[i * k * n_..].as_ptr()];
                // SAFETY: arrays of the size given.
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
    // SAFETY: four elements each.
    unsafe { ops::gemm(a.as_ptr(), a.as_ptr(), c.as_mut_ptr(), 2, 2, 2, 0.0, 2.0, S) }.unwrap();
    assert_eq!(c, [6.0; 4]);
    // SAFETY: four elements each.
    unsafe { ops::gemm(a.as_ptr(), a.as_ptr(), c.as_mut_ptr(), 2, 2, 2, 1.0, 0.0, S) }.unwrap();
    assert!(c.iter().all(|x| x.is_nan()));
}
