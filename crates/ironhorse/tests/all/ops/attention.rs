use super::common::*;
use ironhorse::ops;

/// batch, q_len, kv_len, heads, kv_heads, head_dim
type Sizes = [usize; 6];

fn exact(
    [batch, t, s, heads, kv_heads, d]: Sizes,
    [q, k, v]: [&[f32]; 3],
    scale: f64,
    causal: bool,
) -> Vec<f64> {
    let mut out = vec![0.0; batch * t * heads * d];
    for (b, i, h) in (0..batch * t * heads).map(|x| (x / heads / t, x / heads % t, x % heads)) {
        let at = ((b * t + i) * heads + h) * d;
        let key = |j: usize| ((b * s + j) * kv_heads + h / (heads / kv_heads)) * d;
        let sees = if causal { (s + i + 1).saturating_sub(t) } else { s };
        let score = |j: usize| -> f64 {
            (0..d).map(|c| f64::from(q[at + c]) * f64::from(k[key(j) + c])).sum::<f64>() * scale
        };
        let scores: Vec<f64> = (0..sees).map(score).collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let total: f64 = scores.iter().map(|x| (x - max).exp()).sum();
        for (j, x) in scores.iter().enumerate() {
            let p = (x - max).exp() / total;
            (0..d).for_each(|c| out[at + c] += p * f64::from(v[key(j) + c]));
        }
    }
    out
}

#[test]
fn attention_of_every_kind() {
    let sizes: [Sizes; 11] = [
        [1, 1, 1, 1, 1, 1],
        [2, 31, 31, 3, 3, 7],
        [1, 65, 65, 2, 1, 33],
        [2, 130, 130, 4, 2, 64],
        [1, 1, 200, 4, 1, 32],
        [1, 5, 70, 6, 3, 16],
        [1, 70, 5, 2, 2, 16],
        [1, 129, 63, 2, 2, 8],
        [1, 3, 0, 2, 2, 8],
        [0, 3, 3, 2, 2, 8],
        [1, 3, 3, 0, 0, 8],
    ];
    for size in sizes {
        let [batch, t, s, heads, kv_heads, d] = size;
        let q = spread(batch * t * heads * d, 1, 2.0);
        let [k, v] = [2, 3].map(|seed| spread(batch * s * kv_heads * d, seed, 2.0));
        for (causal, scale) in [(false, 0.3), (true, 0.3), (true, -0.5)] {
            let want =
                if kv_heads == 0 { vec![] } else { exact(size, [&q, &k, &v], f64::from(scale), causal) };
            let mut out = vec![f32::NAN; q.len()];
            let [b, t, s, h, kh, d] = size.map(n);
            // SAFETY: the arrays have the sizes that are passed.
            unsafe {
                let (q, k, v, o) = (q.as_ptr(), k.as_ptr(), v.as_ptr(), out.as_mut_ptr());
                ops::attention(q, k, v, o, b, t, s, h, kh, d, scale, causal, S).unwrap();
                // Scores reach 25: the rounding of a score is 2e-6 of its weight.
                close(&out, &want, 1e-5, 1e-5);
                if t == s && h == kh {
                    let mut flash = vec![f32::NAN; out.len()];
                    ops::flash_attention(q, k, v, flash.as_mut_ptr(), b, t, h, d, scale, causal, S).unwrap();
                    assert_eq!(out, flash);
                }
            }
        }
    }
}

#[test]
fn odd_values_do_not_crash() {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (q, mut k) = (random(70 * 4, 1), random(70 * 4, 2));
        k[100] = odd;
        let mut out = vec![0.0; 70 * 4];
        // SAFETY: the arrays have the sizes that are passed.
        unsafe {
            ops::flash_attention(
                q.as_ptr(),
                k.as_ptr(),
                k.as_ptr(),
                out.as_mut_ptr(),
                1,
                70,
                1,
                4,
                1.0,
                true,
                S,
            )
        }
        .unwrap();
    }
}
