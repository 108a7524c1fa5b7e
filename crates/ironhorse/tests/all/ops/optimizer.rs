use super::common::*;
use ironhorse::ops;

#[test]
fn adamw() {
    for size in SIZES {
        let (mut p, mut m, mut v) = (random(size, 1), vec![0.0; size], vec![0.0; size]);
        let (mut p64, mut m64, mut v64) = (f64s(&p), vec![0.0; size], vec![0.0; size]);
        let (lr, b1, b2, eps, wd) = (1e-2_f32, 0.9_f32, 0.999_f32, 1e-8_f32, 0.1_f32);
        for step in 1..=4 {
            let g = random(size, 10 + step as u32);
            // SAFETY: the arrays have the sizes that are passed.
            unsafe {
                let (p, m, v) = (p.as_mut_ptr(), m.as_mut_ptr(), v.as_mut_ptr());
                ops::adamw_step(p, g.as_ptr(), m, v, lr, b1, b2, eps, wd, step, n(size), S).unwrap();
            }
            let [lr, b1, b2, eps, wd] = [lr, b1, b2, eps, wd].map(f64::from);
            for i in 0..size {
                let g = f64::from(g[i]);
                m64[i] = b1 * m64[i] + (1.0 - b1) * g;
                v64[i] = b2 * v64[i] + (1.0 - b2) * g * g;
                let denominator = (v64[i] / (1.0 - b2.powi(step))).sqrt() + eps;
                p64[i] = p64[i] * (1.0 - lr * wd) - lr / (1.0 - b1.powi(step)) * m64[i] / denominator;
            }
        }
        close(&p, &p64, 1e-6, 1e-7);
        close(&m, &m64, 1e-5, 1e-7);
        close(&v, &v64, 1e-5, 1e-7);
    }
}

#[test]
fn zero_and_clip() {
    for size in SIZES {
        let grad = spread(size, 1, 5.0);
        let norm = f64s(&grad).iter().map(|x| x * x).sum::<f64>().sqrt();
        for clip in [0.0, 1.0, 1e9, f32::INFINITY] {
            let (mut g, mut total) = (grad.clone(), [f32::NAN]);
            // SAFETY: the arrays have the sizes that are passed.
            unsafe {
                ops::grad_clip(g.as_mut_ptr(), std::ptr::null_mut(), total.as_mut_ptr(), clip, n(size), S)
                    .unwrap();
            }
            close(&total, &[norm], 1e-6, 0.0);
            let factor = (f64::from(clip) / (norm + 1e-6)).min(1.0);
            let want: Vec<f64> = grad.iter().map(|&x| f64::from(x) * factor).collect();
            close(&g, &want, 1e-6, 0.0);
        }
        let mut g = grad;
        // SAFETY: `g` has `size` elements.
        unsafe { ops::zero_grad(g.as_mut_ptr(), n(size), S) }.unwrap();
        assert!(g.iter().all(|x| x.to_bits() == 0));
    }
}

#[test]
fn scatter() {
    for (count, dim, rows) in [(0, 4, 3), (5, 0, 3), (1, 1, 1), (31, 33, 7), (1000, 3, 40), (700, 256, 50)] {
        let (grad, idx, old) = (random(count * dim, 1), ints(count, 2, rows), random(rows * dim, 3));
        let (mut table, mut checked) = (old.clone(), old.clone());
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            let (g, i) = (grad.as_ptr(), idx.as_ptr());
            ops::scatter_add(g, i, table.as_mut_ptr(), n(count), n(dim), S).unwrap();
            ops::scatter_add_rows(g, i, checked.as_mut_ptr(), n(count), n(dim), n(rows), S).unwrap();
        }
        let mut want = f64s(&old);
        for (i, &row) in idx.iter().enumerate() {
            (0..dim).for_each(|c| want[row as usize * dim + c] += f64::from(grad[i * dim + c]));
        }
        close(&table, &want, 1e-5, 1e-5);
        assert_eq!(table, checked);
    }
}
