//! Argmax and the random choices.

use super::common::*;
use ironhorse::ops;
use ironhorse::train::generate::sample::{Sampler, SamplerScratch};

fn draw(logits: &[f32], seeds: &[u64], s: &Sampler) -> ops::Result<Vec<i32>> {
    let mut out = vec![-1; seeds.len()];
    let (b, v) = (n(seeds.len()), n(logits.len() / seeds.len()));
    let (l, o, r, t) = (logits.as_ptr(), out.as_mut_ptr(), seeds.as_ptr(), s.temperature);
    // SAFETY: the arrays have the sizes that are passed.
    unsafe {
        match (s.top_k, s.top_p) {
            (Some(k), _) => ops::topk_sample(l, o, r, b, v, n(k), t, S),
            (_, Some(p)) => ops::topp_sample(l, o, r, b, v, p, t, S),
            _ => ops::sample(l, o, r, b, v, t, S),
        }?;
    }
    Ok(out)
}

#[test]
fn the_rules_are_those_of_the_sampler() {
    let (mut scratch, mut differ, mut all) = (SamplerScratch::default(), 0, 0);
    for vocab in [1_usize, 2, 31, 33, 1000, 5003, 40_000] {
        let batch = 40;
        let mut logits = spread(batch * vocab, vocab as u32, 4.0);
        if vocab > 3 {
            (logits[0], logits[1], logits[2]) = (2.0, 2.0, f32::NEG_INFINITY);
        }
        let seeds: Vec<u64> = (0..batch as u64).map(|i| i * 77 + vocab as u64).collect();
        let kinds = [
            (None, None),
            (Some(1), None),
            (Some(5), None),
            (Some(700), None),
            (None, Some(0.3)),
            (None, Some(0.95)),
            (None, Some(1.0)),
        ];
        for (top_k, top_p) in kinds {
            for temperature in [0.0, 0.05, 0.7, 1.5] {
                let s = Sampler { temperature, top_k, top_p, seed: 0 };
                let got = draw(&logits, &seeds, &s).unwrap();
                for (row, got) in got.into_iter().enumerate() {
                    let x = &logits[row * vocab..(row + 1) * vocab];
                    let want = s.pick_at(x, ops::uniform_of_seed(seeds[row]), &mut scratch).unwrap();
                    (all, differ) = (all + 1, differ + usize::from(want != got as usize));
                }
            }
        }
    }
    // A random number within 1e-13 of the boundary between two tokens may select either.
    assert_eq!(differ, 0, "{differ} of {all}");
}

#[test]
fn seeds_give_uniform_numbers() {
    // First outputs of SplitMix64 for the states 0 and 1.
    assert_eq!(ops::uniform_of_seed(0), (0xe220_a839_7b1d_cdaf_u64 >> 11) as f64 / 9_007_199_254_740_992.0);
    let mean = (0..100_000).map(ops::uniform_of_seed).sum::<f64>() / 1e5;
    assert!((mean - 0.5).abs() < 0.005);
}

#[test]
fn bad_logits_are_refused_and_nothing_is_written() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = random(3 * 40, 1);
        logits[50] = bad;
        invalid(draw(&logits, &[1, 2, 3], &Sampler::default()).map(|_| ()), "row 1 of `logits`");
    }
    let none = [f32::NEG_INFINITY; 4];
    invalid(draw(&none, &[1], &Sampler::default()).map(|_| ()), "no logit is above -inf");
    let mut out = [77; 2];
    let logits = [0.0, 0.0, f32::NAN, 0.0];
    // SAFETY: the arrays have the sizes that are passed.
    let result = unsafe { ops::sample(logits.as_ptr(), out.as_mut_ptr(), [1_u64, 2].as_ptr(), 2, 2, 1.0, S) };
    assert!(result.is_err() && out == [77; 2]);
}

fn argmax(x: &[f32], batch: usize) -> Vec<i32> {
    let mut out = vec![-1; batch];
    // SAFETY: the arrays have the sizes that are passed.
    unsafe { ops::argmax(x.as_ptr(), out.as_mut_ptr(), n(batch), n(x.len() / batch.max(1)), S) }.unwrap();
    out
}

#[test]
fn argmax_takes_the_first_of_the_largest() {
    for (rows, cols) in SHAPES.into_iter().filter(|&(_, cols)| cols > 0) {
        let x = random(rows * cols, 9);
        let want: Vec<i32> = x
            .chunks(cols)
            .map(|row| (0..cols).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as i32)
            .collect();
        assert_eq!(argmax(&x, rows), want);
    }
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    assert_eq!(argmax(&[1.0, 3.0, 3.0, inf, inf, 0.0, 2.0, nan, nan, -inf, -inf, -inf], 4), [1, 0, 1, 0]);
}
