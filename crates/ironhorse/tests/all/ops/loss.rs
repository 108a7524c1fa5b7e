use super::common::*;
use ironhorse::ops;

#[test]
fn cross_entropy() {
    for (rows, vocab) in SHAPES.into_iter().filter(|&(rows, vocab)| rows == 0 || vocab > 0) {
        let x = spread(rows * vocab, 1, 9.0);
        let targets = ints(rows, 2, vocab);
        let exact: Vec<f64> = f64s(&x)
            .chunks(vocab)
            .flat_map(|row| {
                let max = row.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                let lse = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
                row.iter().map(move |x| x - lse).collect::<Vec<_>>()
            })
            .collect();
        let (mut loss, mut log_probs, mut same) = ([f32::NAN], vec![f32::NAN; x.len()], x.clone());
        let (r, v) = (n(rows), n(vocab));
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            let (t, l) = (targets.as_ptr(), loss.as_mut_ptr());
            ops::cross_entropy_forward(x.as_ptr(), t, l, log_probs.as_mut_ptr(), r, v, S).unwrap();
            ops::cross_entropy_forward(same.as_ptr(), t, l, same.as_mut_ptr(), r, v, S).unwrap();
        }
        close(&log_probs, &exact, 1e-6, 1e-6);
        assert_eq!(log_probs, same);
        if rows == 0 {
            assert!(loss[0].is_nan());
            continue;
        }
        let losses = targets.iter().enumerate().map(|(r, &t)| -exact[r * vocab + t as usize]);
        close(&loss, &[losses.sum::<f64>() / rows as f64], 1e-6, 1e-7);
        let mut d = vec![f32::NAN; x.len()];
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            let t = targets.as_ptr();
            ops::cross_entropy_backward(log_probs.as_ptr(), t, d.as_mut_ptr(), r, v, 0.5, S).unwrap();
            ops::cross_entropy_backward(same.as_ptr(), t, same.as_mut_ptr(), r, v, 0.5, S).unwrap();
        }
        let hot = |i: usize| if targets[i / vocab] as usize == i % vocab { 1.0 } else { 0.0 };
        let want: Vec<f64> = exact.iter().enumerate().map(|(i, l)| (l.exp() - hot(i)) * 0.5).collect();
        close(&d, &want, 4e-6, 1e-6);
        assert_eq!(d, same);
    }
}

#[test]
fn cross_entropy_needs_a_class() {
    let (targets, mut loss) = ([0; 3], [7.0]);
    let none = std::ptr::null_mut();
    // SAFETY: there are 0 columns of logits, one target per row and one loss.
    let said = unsafe {
        let t = targets.as_ptr();
        [
            ops::cross_entropy_forward(none, t, loss.as_mut_ptr(), none, 3, 0, S),
            ops::cross_entropy_backward(none, t, none, 3, 0, 1.0, S),
        ]
    };
    for (said, op) in said.into_iter().zip(["forward", "backward"]) {
        let want = format!("cross_entropy_{op}: `vocab` is 0, expected at least 1 and below 2^31");
        assert_eq!(said.unwrap_err().to_string(), want);
    }
}

#[test]
fn aux_loss() {
    for (rows, experts, k) in [(1, 1, 1), (31, 8, 2), (1000, 33, 3), (5, 4, 0), (0, 4, 2), (3, 0, 0)] {
        let probs: Vec<f32> = random(rows * experts, 1).iter().map(|x| x.abs()).collect();
        let idx = ints(rows * k, 2, experts);
        let (mut aux, mut f, mut p) = ([f32::NAN], vec![f32::NAN; experts], vec![f32::NAN; experts]);
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            let (a, f, p) = (aux.as_mut_ptr(), f.as_mut_ptr(), p.as_mut_ptr());
            let sizes = [rows, experts, k].map(n);
            ops::aux_loss_forward(
                probs.as_ptr(),
                idx.as_ptr(),
                a,
                f,
                p,
                sizes[0],
                sizes[1],
                sizes[2],
                0.01,
                S,
            )
            .unwrap();
        }
        if rows * experts == 0 {
            assert!(aux[0].is_nan());
            continue;
        }
        let share = |e: usize| {
            let hit = |r: &usize| idx[r * k..(r + 1) * k].contains(&(e as i32));
            (0..rows).filter(hit).count() as f64 / rows as f64
        };
        let mean = |e: usize| (0..rows).map(|r| f64::from(probs[r * experts + e])).sum::<f64>() / rows as f64;
        let (shares, means): (Vec<f64>, Vec<f64>) = (0..experts).map(|e| (share(e), mean(e))).unzip();
        close(&f, &shares, 1e-7, 0.0);
        close(&p, &means, 1e-6, 0.0);
        let dot: f64 = shares.iter().zip(&means).map(|(a, b)| a * b).sum();
        close(&aux, &[f64::from(0.01_f32) * experts as f64 * dot], 1e-6, 0.0);
    }
}
