use super::calls::{attention, attention_bwd};
use super::*;
use ironhorse_core::eager::{AttentionShape, Strides};

fn shape(
    [batch, heads, kv_heads]: [usize; 3],
    [q_len, kv_len, head_dim]: [usize; 3],
    causal: bool,
) -> AttentionShape {
    AttentionShape {
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        scale: 0.3,
        causal,
        q: Strides::position_major(heads, q_len, head_dim),
        k: Strides::head_major(kv_heads, kv_len, head_dim),
        v: Strides::position_major(kv_heads, kv_len, head_dim),
        out: Strides::head_major(heads, q_len, head_dim),
    }
}

fn index(s: Strides, b: usize, h: usize, position: usize) -> usize {
    b * s.batch + h * s.head + position * s.position
}

/// (out, lse)
fn reference(x: &[Vec<f64>], a: &AttentionShape) -> (Vec<f64>, Vec<f64>) {
    let hd = a.head_dim;
    let mut out = vec![0.0; a.batch * a.heads * a.q_len * hd];
    let mut lse = Vec::new();
    for b in 0..a.batch {
        for h in 0..a.heads {
            let kv = h / (a.heads / a.kv_heads);
            for i in 0..a.q_len {
                let sees = if a.causal { (a.kv_len + i + 1).saturating_sub(a.q_len) } else { a.kv_len };
                let q = &x[0][index(a.q, b, h, i)..][..hd];
                let score = |j: usize| {
                    let k = &x[1][index(a.k, b, kv, j)..][..hd];
                    a.scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
                };
                let sum: f64 = (0..sees).map(|j| score(j).exp()).sum();
                lse.push(sum.ln());
                for j in 0..sees {
                    let p = score(j).exp() / sum;
                    for e in 0..hd {
                        out[index(a.out, b, h, i) + e] += p * x[2][index(a.v, b, kv, j) + e];
                    }
                }
            }
        }
    }
    (out, lse)
}

fn sizes(a: &AttentionShape) -> [usize; 3] {
    let kv = a.batch * a.kv_heads * a.kv_len * a.head_dim;
    [a.batch * a.heads * a.q_len * a.head_dim, kv, kv]
}

fn shapes() -> Vec<AttentionShape> {
    let mut all = Vec::new();
    for causal in [false, true] {
        for (heads, lengths) in [
            ([1, 1, 1], [1, 1, 1]),
            ([2, 4, 2], [5, 5, 3]),
            ([1, 2, 1], [3, 7, 4]),
            ([1, 2, 2], [7, 3, 5]),
            ([1, 1, 1], [0, 3, 4]),
            ([1, 3, 1], [3, 0, 4]),
            ([1, 2, 1], [2, 3, 0]),
        ] {
            all.push(shape(heads, lengths, causal));
        }
    }
    all
}

fn forward_case<'a>(
    a: &AttentionShape,
    x: &[Vec<f64>],
    call: &'a dyn Fn(&[Array], &[Array]) -> Done,
) -> Case<'a> {
    let kept = if a.head_dim == 0 { 0 } else { a.batch * a.heads * a.q_len };
    Case { inputs: elements(x), outputs: vec![(Elements, sizes(a)[0]), (Sums, kept)], call }
}

fn inputs(a: &AttentionShape) -> Vec<Vec<f64>> {
    sizes(a).into_iter().zip(1..).map(|(n, seed)| random(n, seed)).collect()
}

#[test]
fn forward_and_backward() {
    let mut all = shapes();
    // More than one tile each way; differences would take too long.
    all.extend([shape([1, 2, 1], [67, 130, 9], true), shape([1, 2, 1], [130, 65, 33], true)]);
    all.extend([shape([1, 1, 1], [65, 129, 16], false), shape([1, 2, 1], [80, 41, 32], true)]);
    for a in all {
        let x = inputs(&a);
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            attention([from[0], from[1], from[2]], [to[0], to[1]], &a)
        };
        let case = forward_case(&a, &x, &call);
        let got = run(&case, Float::F64, &[]);
        let (want, lse) = reference(&x, &a);
        close(&got[0], &want, 1e-12, "attention");
        if a.head_dim > 0 {
            close(&got[1], &lse, 1e-12, "lse");
        }
        for (float, unit) in
            [(Float::F32, 4e-6), (Float::BF16, 2.1 * 2f64.powi(-9)), (Float::F16, 2f64.powi(-11))]
        {
            let narrow = run(&case, float, &[]);
            close(&narrow[0], &got[0], unit, "attention types");
            close(&narrow[1], &got[1], 4e-6, "lse types");
            assert!(same_bits(&run(&case, float, &[1])[..1], &narrow[..1]));
        }
        let d = random(sizes(&a)[0], 9);
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            let from = [from[0], from[1], from[2], from[3], from[4], from[5]];
            attention_bwd(from, [to[0], to[1], to[2]], &a)
        };
        let inputs_of = |out: Vec<f64>| {
            let mut inputs = elements(&[d.clone(), x[0].clone(), x[1].clone(), x[2].clone(), out]);
            inputs.push((Sums, lse.clone()));
            inputs
        };
        let outputs = sizes(&a).map(|n| (Elements, n)).into();
        let case = Case { inputs: inputs_of(got[0].clone()), outputs, call: &call };
        let back = run(&case, Float::F64, &[]);
        if a.q_len < 60 {
            let want = differences(&|x| reference(x, &a).0, &x, &d);
            for k in 0..3 {
                close(&back[k], &want[k], 1e-6, ["d_q", "d_k", "d_v"][k]);
            }
        } else {
            directional(&a, &x, &d, &back);
        }
        types_agree(&Case { inputs: inputs_of(rounded(&got[0])), ..case }, "attention_bwd");
    }
}

/// The slope along a random direction.
fn directional(a: &AttentionShape, x: &[Vec<f64>], d: &[f64], gradients: &[Vec<f64>]) {
    for k in 0..3 {
        let way = random(x[k].len(), 20 + k as u32);
        let moved = |step: f64| {
            let mut x = x.to_vec();
            x[k].iter_mut().zip(&way).for_each(|(x, w)| *x += step * w);
            reference(&x, a).0.iter().zip(d).map(|(y, d)| y * d).sum::<f64>()
        };
        let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        let got: f64 = gradients[k].iter().zip(&way).map(|(g, w)| g * w).sum();
        assert!((got - want).abs() < 1e-6 * want.abs().max(1.0), "gradient {k}: {got}, expected {want}");
    }
}

#[test]
fn one_key_has_no_gradient() {
    let a = shape([1, 1, 1], [3, 3, 5], true);
    let x = inputs(&a);
    let (out, lse) = reference(&x, &a);
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe {
        let from = [from[0], from[1], from[2], from[3], from[4], from[5]];
        attention_bwd(from, [to[0], to[1], to[2]], &a)
    };
    let mut all = elements(&[random(15, 9), x[0].clone(), x[1].clone(), x[2].clone(), out]);
    all.push((Sums, lse));
    let got = run(&Case { inputs: all, outputs: vec![(Elements, 15); 3], call: &call }, Float::F32, &[]);
    assert_eq!(got[0][..5], [0.0; 5]);
}

#[test]
fn queries_that_see_nothing_have_no_gradient() {
    // Whole tiles of queries before the first key; `out` holds what such a query never wrote.
    let a = shape([1, 1, 1], [80, 10, 16], true);
    let x = inputs(&a);
    let (n, seen) = (sizes(&a), 70 * 16);
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe {
        let from = [from[0], from[1], from[2], from[3], from[4], from[5]];
        attention_bwd(from, [to[0], to[1], to[2]], &a)
    };
    let mut all = elements(&[random(n[0], 9), x[0].clone(), x[1].clone(), x[2].clone(), vec![1.0; n[0]]]);
    all.push((Sums, reference(&x, &a).1));
    let case = Case { inputs: all, outputs: n.map(|n| (Elements, n)).into(), call: &call };
    for float in [Float::F32, Float::BF16, Float::F16] {
        let got = run(&case, float, &[]);
        assert_eq!(got[0][..seen], vec![0.0; seen], "{float:?}");
        assert!(got[0][seen..].iter().any(|x| *x != 0.0), "{float:?}");
    }
}

#[test]
fn threads_change_no_bit() {
    // As many heads as threads, and fewer: then the backward is cut into chunks of keys.
    for (heads, lengths) in
        [([1, 4, 2], [150, 170, 24]), ([1, 1, 1], [300, 600, 9]), ([1, 2, 1], [300, 530, 8])]
    {
        for causal in [false, true] {
            let a = shape(heads, lengths, causal);
            let x = inputs(&a);
            let n = sizes(&a);
            // SAFETY: `run` passes arrays of its own, as long as the case says.
            let call = |from: &[Array], to: &[Array]| unsafe {
                attention([from[0], from[1], from[2]], [to[3], to[4]], &a)?;
                let from = [from[3], from[0], from[1], from[2], to[3], to[4]];
                attention_bwd(from, [to[0], to[1], to[2]], &a)
            };
            let mut outputs: Vec<_> = n.map(|n| (Elements, n)).into();
            outputs.extend([(Elements, n[0]), (Sums, a.heads * a.q_len)]);
            let inputs = elements(&[x[0].clone(), x[1].clone(), x[2].clone(), random(n[0], 9)]);
            threads_agree(&Case { inputs, outputs, call: &call }, "attention");
        }
    }
}
