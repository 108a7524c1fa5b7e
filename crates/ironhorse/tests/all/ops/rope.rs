use super::common::*;
use ironhorse::ops::{self, Pairs};

#[test]
fn frequencies() {
    for (max_seq, d, base, alpha) in [
        (1, 2, 1e4_f32, 1.0_f32),
        (9, 2, 1e4, 8.0),
        (77, 6, 1e4, 1.0),
        (4097, 64, 5e5, 4.0),
        (0, 8, 1e4, 1.0),
        (3, 0, 1e4, 1.0),
    ] {
        let half = d / 2;
        let mut freqs = vec![f32::NAN; max_seq * half];
        // SAFETY: `freqs` has max_seq * d / 2 elements.
        unsafe { ops::rope_freqs(freqs.as_mut_ptr(), n(max_seq), n(d), base, alpha, S) }.unwrap();
        let df = d as f64;
        let ntk = f64::from(base) * if d > 2 { f64::from(alpha).powf(df / (df - 2.0)) } else { 1.0 };
        let want: Vec<f64> = (0..max_seq * half)
            .map(|j| (j / half) as f64 * ntk.powf(-2.0 * (j % half) as f64 / df))
            .collect();
        close(&freqs, &want, 1e-7, 0.0);
    }
}

fn rotate(x: &[f32], freqs: &[f32], [batch, seq, heads, d, offset]: [usize; 5], pairs: Pairs) -> Vec<f64> {
    let (x, half) = (f64s(x), d / 2);
    let mut out = x.clone();
    for token in 0..batch * seq {
        for h in 0..heads {
            let head = (token * heads + h) * d;
            for i in 0..half {
                let (sin, cos) = f64::from(freqs[(token % seq + offset) * half + i]).sin_cos();
                let (a, b) = match pairs {
                    Pairs::Interleaved => (head + 2 * i, head + 2 * i + 1),
                    Pairs::Halves => (head + i, head + i + half),
                };
                out[a] = x[a] * cos - x[b] * sin;
                out[b] = x[a] * sin + x[b] * cos;
            }
        }
    }
    out
}

#[test]
fn forward_of_one_and_of_two() {
    for dims @ [batch, seq, heads, d, offset] in [
        [1, 1, 1, 2, 0],
        [2, 31, 3, 6, 5],
        [1, 33, 2, 66, 100_000],
        [3, 200, 4, 64, 1],
        [0, 3, 2, 4, 0],
        [1, 3, 0, 4, 7],
    ] {
        let (q, k) = (random(batch * seq * heads * d, 1), random(batch * seq * (heads + 1) * d, 2));
        let mut freqs = vec![0.0; (seq + offset) * d / 2];
        let [b, s, h, hd, o] = dims.map(n);
        // SAFETY: the arrays have the sizes that are passed.
        unsafe { ops::rope_freqs(freqs.as_mut_ptr(), s + o, hd, 1e4, 1.0, S) }.unwrap();
        for pairs in [Pairs::Interleaved, Pairs::Halves] {
            let (one, two) = match pairs {
                Pairs::Interleaved => (
                    ops::rope_forward as unsafe fn(_, _, _, _, _, _, _, _, _) -> _,
                    ops::rope_qk as unsafe fn(_, _, _, _, _, _, _, _, _, _, _, _) -> _,
                ),
                Pairs::Halves => (ops::rope_forward_half as _, ops::rope_qk_half as _),
            };
            let (mut out, mut same) = (vec![f32::NAN; q.len()], q.clone());
            let (mut q_out, mut k_out) = (out.clone(), vec![f32::NAN; k.len()]);
            let f = freqs.as_ptr();
            // SAFETY: the arrays have the sizes that are passed.
            let results: [ops::Result; 3] = unsafe {
                [
                    one(q.as_ptr(), f, out.as_mut_ptr(), b, s, h, hd, o, S),
                    one(same.as_ptr(), f, same.as_mut_ptr(), b, s, h, hd, o, S),
                    two(
                        q.as_ptr(),
                        k.as_ptr(),
                        f,
                        q_out.as_mut_ptr(),
                        k_out.as_mut_ptr(),
                        b,
                        s,
                        h,
                        h + 1,
                        hd,
                        o,
                        S,
                    ),
                ]
            };
            results.into_iter().for_each(|result| result.unwrap());
            close(&out, &rotate(&q, &freqs, dims, pairs), 1e-6, 2e-7);
            close(&k_out, &rotate(&k, &freqs, [batch, seq, heads + 1, d, offset], pairs), 1e-6, 2e-7);
            assert_eq!((&out, &out), (&same, &q_out));
        }
    }
}
