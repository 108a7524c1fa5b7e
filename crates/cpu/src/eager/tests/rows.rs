use super::calls::{
    cross_entropy, cross_entropy_bwd, cross_entropy_mean, layernorm, layernorm_bwd, rmsnorm, rmsnorm_bwd,
    rope, scale_bias_relu, scale_bias_relu_bwd, softmax, softmax_bwd,
};
use super::*;
use ironhorse_core::eager::{Pairs, RopeShape, Rows, Targets};

const SIZES: [(usize, usize); 8] = [(0, 3), (3, 0), (1, 1), (3, 31), (5, 33), (2, 1), (7, 129), (67, 5)];
const EPS: f64 = 1e-5;

fn rows_of(x: &[f64], cols: usize) -> impl Iterator<Item = &[f64]> {
    x.chunks_exact(cols.max(1))
}

fn softmax_ref(x: &[f64], cols: usize) -> Vec<f64> {
    let one = |row: &[f64]| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        row.iter().map(|x| (x - max).exp() / sum).collect::<Vec<_>>()
    };
    rows_of(x, cols).flat_map(one).collect()
}

fn rms_ref(x: &[f64], w: &[f64]) -> Vec<f64> {
    let one = |row: &[f64]| {
        let rstd = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / w.len() as f64 + EPS).sqrt();
        row.iter().zip(w).map(|(x, w)| x * rstd * w).collect::<Vec<_>>()
    };
    rows_of(x, w.len()).flat_map(one).collect()
}

fn layer_ref(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let n = w.len() as f64;
    let one = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / n;
        let rstd = 1.0 / (row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + EPS).sqrt();
        (0..row.len()).map(|i| (row[i] - mean) * rstd * w[i] + b[i]).collect::<Vec<_>>()
    };
    rows_of(x, w.len()).flat_map(one).collect()
}

#[test]
fn softmax_both_ways() {
    for (rows, cols) in SIZES {
        let (n, r) = (rows * cols, Rows { rows, cols });
        let (x, d) = (random(n, 1), random(n, 2));
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe { softmax(from[0], to[0], r) };
        let case =
            Case { inputs: elements(std::slice::from_ref(&x)), outputs: vec![(Elements, n)], call: &call };
        let y = softmax_ref(&x, cols);
        for (float, unit) in [
            (Float::F64, 1e-14),
            (Float::F32, 1e-6),
            (Float::BF16, 2.1 * 2f64.powi(-9)),
            (Float::F16, 2f64.powi(-11)),
        ] {
            close(&run(&case, float, &[])[0], &y, unit, "softmax");
        }
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe { softmax_bwd([from[0], from[1]], to[0], r) };
        let case =
            Case { inputs: elements(&[d.clone(), y.clone()]), outputs: vec![(Elements, n)], call: &call };
        let want = differences(&|x| softmax_ref(&x[0], cols), &[x], &d);
        close(&run(&case, Float::F64, &[])[0], &want[0], 1e-6, "softmax_bwd");
        types_agree(&Case { inputs: elements(&[d, rounded(&y)]), ..case }, "softmax_bwd");
    }
}

#[test]
fn scale_bias_relu_both_ways() {
    for (rows, cols) in SIZES {
        let (n, r, scale) = (rows * cols, Rows { rows, cols }, 0.75);
        // Away from the corner: x is a multiple of 1/64, the bias of 1/64 + 1/128 - by construction never -0.75 x.
        let x = random(n, 1);
        let bias: Vec<f64> =
            random(cols, 2).iter().map(|b| (b / 2.0 * 64.0).round() / 64.0 + 1.0 / 512.0).collect();
        let forward = |x: &[Vec<f64>]| -> Vec<f64> {
            rows_of(&x[0], cols)
                .flat_map(|row| row.iter().zip(&x[1]).map(|(x, b)| (x * scale + b).max(0.0)))
                .collect()
        };
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call =
            |from: &[Array], to: &[Array]| unsafe { scale_bias_relu([from[0], from[1]], to[0], r, scale) };
        let case =
            Case { inputs: elements(&[x.clone(), bias.clone()]), outputs: vec![(Elements, n)], call: &call };
        let (y, d) = (forward(&[x.clone(), bias.clone()]), random(n, 3));
        close(&run(&case, Float::F64, &[])[0], &y, 1e-14, "scale_bias_relu");
        close(&run(&case, Float::F32, &[])[0], &y, 1e-6, "scale_bias_relu");
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            scale_bias_relu_bwd([from[0], from[1]], [to[0], to[1]], r, scale)
        };
        let outputs = vec![(Elements, n), (Elements, cols)];
        let case = Case { inputs: elements(&[d.clone(), y.clone()]), outputs, call: &call };
        let want = differences(&forward, &[x, bias], &d);
        let got = run(&case, Float::F64, &[]);
        close(&got[0], &want[0], 1e-6, "d_x");
        close(&got[1], &want[1], 1e-6, "d_bias");
        types_agree(&Case { inputs: elements(&[d, rounded(&y)]), ..case }, "scale_bias_relu_bwd");
    }
    let call =
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        |from: &[Array], to: &[Array]| unsafe { scale_bias_relu([from[0], from[1]], to[0], Rows { rows: 1, cols: 3 }, 1.0) };
    let inputs = elements(&[vec![f64::NAN, -1.0, 2.0], vec![0.0; 3]]);
    let got = run(&Case { inputs, outputs: vec![(Elements, 3)], call: &call }, Float::BF16, &[]);
    assert!(got[0][0].is_nan() && got[0][1..] == [0.0, 2.0]);
}

#[test]
fn rmsnorm_both_ways() {
    for (rows, cols) in SIZES {
        let (n, r) = (rows * cols, Rows { rows, cols });
        let (x, w, d) = (random(n, 1), random(cols, 2), random(n, 3));
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call =
            |from: &[Array], to: &[Array]| unsafe { rmsnorm([from[0], from[1]], [to[0], to[1]], r, EPS) };
        let outputs = vec![(Elements, n), (Sums, rows)];
        let case = Case { inputs: elements(&[x.clone(), w.clone()]), outputs, call: &call };
        let got = run(&case, Float::F64, &[]);
        close(&got[0], &rms_ref(&x, &w), 1e-12, "rmsnorm");
        let rstd = got[1].clone();
        forward_types(&case, "rmsnorm");
        let mut inputs = elements(&[d.clone(), x.clone(), w.clone()]);
        inputs.push((Sums, rstd));
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            rmsnorm_bwd([from[0], from[1], from[2], from[3]], [to[0], to[1]], r)
        };
        let case = Case { inputs, outputs: vec![(Elements, n), (Elements, cols)], call: &call };
        let want = differences(&|x| rms_ref(&x[0], &x[1]), &[x, w], &d);
        let got = run(&case, Float::F64, &[]);
        close(&got[0], &want[0], 1e-6, "d_x");
        close(&got[1], &want[1], 1e-6, "d_weight");
        types_agree(&case, "rmsnorm_bwd");
    }
}

/// A forward whose first output is wanted; statistics may be null.
fn forward_types(case: &Case<'_>, what: &str) {
    let want = run(case, Float::F64, &[]);
    for (float, unit) in
        [(Float::F32, 4e-6), (Float::BF16, 2.1 * 2f64.powi(-9)), (Float::F16, 2f64.powi(-11))]
    {
        let got = run(case, float, &[]);
        close(&got[0], &want[0], unit, what);
        for k in 1..got.len() {
            close(&got[k], &want[k], 4e-6, what);
        }
        let all: Vec<usize> = (1..got.len()).collect();
        assert!(same_bits(&run(case, float, &all)[..1], &got[..1]), "{what}: other bits without statistics");
    }
}

#[test]
fn layernorm_both_ways() {
    for (rows, cols) in SIZES {
        let (n, r) = (rows * cols, Rows { rows, cols });
        let (x, w, b, d) = (random(n, 1), random(cols, 2), random(cols, 4), random(n, 3));
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            layernorm([from[0], from[1], from[2]], [to[0], to[1], to[2]], r, EPS)
        };
        let outputs = vec![(Elements, n), (Sums, rows), (Sums, rows)];
        let case = Case { inputs: elements(&[x.clone(), w.clone(), b.clone()]), outputs, call: &call };
        let got = run(&case, Float::F64, &[]);
        close(&got[0], &layer_ref(&x, &w, &b), 1e-12, "layernorm");
        if cols != 1 {
            forward_types(&case, "layernorm");
        }
        let mut inputs = elements(&[d.clone(), x.clone(), w.clone()]);
        inputs.extend([(Sums, got[1].clone()), (Sums, got[2].clone())]);
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            layernorm_bwd([from[0], from[1], from[2], from[3], from[4]], [to[0], to[1], to[2]], r)
        };
        let case =
            Case { inputs, outputs: vec![(Elements, n), (Elements, cols), (Elements, cols)], call: &call };
        let want = differences(&|x| layer_ref(&x[0], &x[1], &x[2]), &[x, w, b], &d);
        let got = run(&case, Float::F64, &[]);
        for k in 0..3 {
            close(&got[k], &want[k], 1e-6, ["d_x", "d_weight", "d_bias"][k]);
        }
        types_agree(&case, "layernorm_bwd");
    }
}

fn losses_ref(x: &[f64], targets: &[i64], cols: usize, ignore: i64) -> Vec<f64> {
    let one = |(row, &target): (&[f64], &i64)| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        if target == ignore { 0.0 } else { lse - row[target as usize] }
    };
    rows_of(x, cols).zip(targets).map(one).collect()
}

#[test]
fn cross_entropy_both_ways() {
    for (rows, cols) in SIZES.into_iter().filter(|size| size.1 > 0) {
        for (ignore, mean, per_row) in [(-100, true, false), (0, true, false), (0, false, true)] {
            let (n, r) = (rows * cols, Rows { rows, cols });
            let x = random(n, 1);
            let classes: Vec<i64> = (0..rows).map(|i| (i * 7 % cols) as i64).collect();
            let small: Vec<i32> = classes.iter().map(|&i| i as i32).collect();
            let both = [Targets::I64(classes.as_ptr()), Targets::I32(small.as_ptr())];
            let count = if mean { classes.iter().filter(|&&t| t != ignore).count() } else { 1 } as f64;
            let forward = |x: &[Vec<f64>]| losses_ref(&x[0], &classes, cols, ignore);
            let want = forward(std::slice::from_ref(&x));
            let mut lse = Vec::new();
            for targets in both {
                // SAFETY: `run` passes arrays of its own, as long as the case says.
                let call = |from: &[Array], to: &[Array]| unsafe {
                    cross_entropy(from[0], targets, [to[0], to[1]], r, ignore)
                };
                let outputs = vec![(Sums, rows), (Sums, rows)];
                let case = Case { inputs: elements(std::slice::from_ref(&x)), outputs, call: &call };
                let got = run(&case, Float::F64, &[]);
                close(&got[0], &want, 1e-12, "cross_entropy");
                types_agree(&case, "cross_entropy");
                lse = got[1].clone();
                // SAFETY: `run` passes arrays of its own, as long as the case says.
                let call = |from: &[Array], to: &[Array]| unsafe {
                    cross_entropy_mean(from[0], targets, [to[0], to[1]], rows, ignore, mean)
                };
                let outputs = vec![(Elements, 1), (Sums, 1)];
                let case = Case { inputs: vec![(Sums, want.clone())], outputs, call: &call };
                let got = run(&case, Float::F64, &[]);
                close(&got[0], &[want.iter().sum::<f64>() / count], 1e-12, "mean");
                close(&got[1], &[1.0 / count], 1e-12, "inv_count");
                types_agree(&case, "cross_entropy_mean");
            }
            let d = if per_row { random(rows, 5) } else { vec![0.75] };
            let factors: Vec<f64> =
                (0..rows).map(|i| d[if per_row { i } else { 0 }] / count.max(1.0)).collect();
            let want = differences(&forward, std::slice::from_ref(&x), &factors);
            for targets in both {
                // SAFETY: `run` passes arrays of its own, as long as the case says.
                let call = |from: &[Array], to: &[Array]| unsafe {
                    let inv_count = if mean { from[3] } else { Array::none(from[3].float) };
                    cross_entropy_bwd(
                        [from[0], from[1], from[2], inv_count],
                        targets,
                        to[0],
                        r,
                        ignore,
                        per_row,
                    )
                };
                let mut inputs = elements(&[d.clone(), x.clone()]);
                inputs.extend([(Sums, lse.clone()), (Sums, vec![1.0 / count])]);
                let case = Case { inputs, outputs: vec![(Elements, n)], call: &call };
                close(&run(&case, Float::F64, &[])[0], &want[0], 1e-6, "cross_entropy_bwd");
                types_agree(&case, "cross_entropy_bwd");
            }
        }
    }
}

#[test]
fn targets_outside_are_nan_and_odd_rows_as_in_pytorch() {
    let (targets, r) = ([7_i64, -3, 1, -100], Rows { rows: 4, cols: 3 });
    let at = Targets::I64(targets.as_ptr());
    let x = vec![0.0, 1.0, 2.0, 0.0, 1.0, 2.0, f64::NAN, 0.0, 1.0, f64::NAN, 0.0, 1.0];
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe { cross_entropy(from[0], at, [to[0], to[1]], r, -100) };
    let case = Case { inputs: elements(std::slice::from_ref(&x)), outputs: vec![(Sums, 4); 2], call: &call };
    for float in Float::ALL {
        let got = run(&case, float, &[]);
        assert!(got[0][..3].iter().all(|x| x.is_nan()) && got[0][3] == 0.0);
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            let none = Array::none(from[2].float);
            cross_entropy_bwd([from[0], from[1], from[2], none], at, to[0], r, -100, false)
        };
        let mut inputs = elements(&[vec![1.0], x.clone()]);
        inputs.push((Sums, got[1].clone()));
        let got = run(&Case { inputs, outputs: vec![(Elements, 12)], call: &call }, float, &[]);
        assert!(got[0][..9].iter().all(|x| x.is_nan()) && got[0][9..] == [0.0; 3], "{got:?}");
    }
}

#[test]
fn nan_stays_in_its_row() {
    let (rows, cols) = (3, 40);
    let r = Rows { rows, cols };
    let mut x = random(rows * cols, 1);
    x[cols + 3] = f64::NAN;
    let w = vec![1.0; cols];
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe {
        softmax(from[0], to[0], r)?;
        rmsnorm([from[0], from[1]], [to[1], Array::none(from[0].float.acc())], r, EPS)?;
        let none = Array::none(from[0].float.acc());
        layernorm([from[0], from[1], from[1]], [to[2], none, none], r, EPS)
    };
    let case = Case { inputs: elements(&[x, w]), outputs: vec![(Elements, rows * cols); 3], call: &call };
    for float in Float::ALL {
        for y in run(&case, float, &[]) {
            for (i, y) in y.iter().enumerate() {
                assert_eq!(y.is_nan(), i / cols == 1);
            }
        }
    }
}

#[test]
fn rope_turns_pairs_and_back() {
    for (batch, seq, heads, head_dim) in [(0, 3, 2, 4), (2, 3, 2, 2), (1, 5, 3, 6), (2, 7, 1, 34)] {
        for interleaved in [true, false] {
            let (n, half) = (batch * seq * heads * head_dim, head_dim / 2);
            let angles = random(seq * half, 4);
            let (cos, sin) = (
                angles.iter().map(|a| a.cos()).collect::<Vec<_>>(),
                angles.iter().map(|a| a.sin()).collect::<Vec<_>>(),
            );
            let x = random(n, 1);
            let shape = RopeShape {
                batch,
                seq,
                heads,
                head_dim,
                pairs: if interleaved { Pairs::Interleaved } else { Pairs::Halves },
            };
            let mut want = x.clone();
            for (row, head) in want.chunks_exact_mut(head_dim).enumerate() {
                let position = row / heads % seq;
                for i in 0..half {
                    let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                    let (c, s) = (cos[position * half + i], sin[position * half + i]);
                    (head[a], head[b]) = (head[a] * c - head[b] * s, head[a] * s + head[b] * c);
                }
            }
            for back in [false, true] {
                // SAFETY: `run` passes arrays of its own, as long as the case says.
                let call = |from: &[Array], to: &[Array]| unsafe {
                    rope([from[0], from[1], from[2]], to[0], &shape, back)
                };
                let input = if back { want.clone() } else { x.clone() };
                let inputs = vec![(Elements, input), (Sums, cos.clone()), (Sums, sin.clone())];
                let case = Case { inputs, outputs: vec![(Elements, n)], call: &call };
                close(&run(&case, Float::F64, &[])[0], if back { &x } else { &want }, 1e-14, "rope");
                if !back {
                    types_agree(&case, "rope");
                }
            }
        }
    }
}

#[test]
fn long_rows_are_accurate() {
    let (rows, cols) = (1, 100_001);
    let r = Rows { rows, cols };
    let x: Vec<f64> = random(cols, 1).iter().map(|x| x + 2.0).collect();
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe {
        rmsnorm([from[0], from[0]], [to[0], to[1]], r, EPS)?;
        layernorm([from[0], from[0], from[0]], [to[0], to[2], to[3]], r, EPS)
    };
    let outputs = vec![(Elements, cols), (Sums, 1), (Sums, 1), (Sums, 1)];
    let case = Case { inputs: elements(std::slice::from_ref(&x)), outputs, call: &call };
    let (want, got) = (run(&case, Float::F64, &[]), run(&case, Float::F32, &[]));
    for k in 1..4 {
        assert!((got[k][0] / want[k][0] - 1.0).abs() < 1e-6, "{} {}", got[k][0], want[k][0]);
    }
    // The same numbers as columns: the sums of a bias gradient.
    let tall = Rows { rows: cols, cols: 1 };
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe {
        scale_bias_relu_bwd([from[0], from[0]], [Array::none(from[0].float), to[0]], tall, 1.0)
    };
    let case = Case { inputs: elements(&[x]), outputs: vec![(Elements, 1)], call: &call };
    let (want, got) = (run(&case, Float::F64, &[]), run(&case, Float::F32, &[]));
    assert!((got[0][0] / want[0][0] - 1.0).abs() < 1e-6);
}

#[test]
fn threads_change_no_bit() {
    let (rows, cols) = (599, 4097);
    let (n, r) = (rows * cols, Rows { rows, cols });
    let (x, d, w) = (random(n, 1), random(n, 2), random(cols, 3));
    let stats = random(rows, 4);
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe {
        layernorm_bwd([from[0], from[1], from[2], from[3], from[3]], [to[0], to[1], to[2]], r)
    };
    let mut inputs = elements(&[d, x, w]);
    inputs.push((Sums, stats));
    let case = Case { inputs, outputs: vec![(Elements, n), (Elements, cols), (Elements, cols)], call: &call };
    threads_agree(&case, "layernorm_bwd");
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe {
        rmsnorm_bwd([from[0], from[1], from[2], from[3]], [to[0], to[1]], r)?;
        scale_bias_relu_bwd([from[0], from[1]], [Array::none(from[0].float), to[2]], r, 0.5)
    };
    threads_agree(&Case { call: &call, ..case }, "rmsnorm_bwd, scale_bias_relu_bwd");
}

/// Rows without columns: what is kept of each row is NaN, not what the memory held. Sums over rows have nothing to sum.
#[test]
fn rows_without_columns_leave_nothing_unwritten() {
    let (rows, float) = (3, Float::F64);
    let r = Rows { rows, cols: 0 };
    let targets = [0_i64, 1, -100];
    let nothing = Array::none(float);
    let mut kept = [[7.0_f64; 3]; 5];
    let arrays: Vec<Array> =
        kept.iter_mut().map(|row| Array { at: row.as_mut_ptr().cast(), float }).collect();
    // SAFETY: a number a row of what is kept; nothing else has elements.
    unsafe {
        rmsnorm([nothing; 2], [nothing, arrays[0]], r, EPS).unwrap();
        layernorm([nothing; 3], [nothing, arrays[1], arrays[2]], r, EPS).unwrap();
        let at = Targets::I64(targets.as_ptr());
        cross_entropy(nothing, at, [arrays[3], arrays[4]], r, -100).unwrap();
        // Null is not written, and results without elements are no trouble.
        rmsnorm([nothing; 2], [nothing; 2], r, EPS).unwrap();
        layernorm([nothing; 3], [nothing; 3], r, EPS).unwrap();
        cross_entropy(nothing, at, [nothing; 2], r, -100).unwrap();
        softmax(nothing, nothing, r).unwrap();
        softmax_bwd([nothing; 2], nothing, r).unwrap();
        rmsnorm_bwd([nothing, nothing, nothing, arrays[0]], [nothing; 2], r).unwrap();
        layernorm_bwd([nothing, nothing, nothing, arrays[1], arrays[2]], [nothing; 3], r).unwrap();
    }
    assert!(kept.iter().flatten().all(|value| value.is_nan()), "{kept:?}");
}
