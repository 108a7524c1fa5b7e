//! Tests of packing. Every token occurs once in the samples, so a token tells where it belongs.

use super::*;
use ironhorse_core::op::check_positions;
use std::collections::HashMap;

const VOCAB: usize = 1 << 20;

/// Samples of 1 to 40 tokens. Every token occurs once: sample number · 64 + its place, from 1 on.
fn samples(count: usize) -> Vec<Sample> {
    let mut rng = Rng::new(5);
    let sample = |number: usize, length: usize, rng: &mut Rng| Sample {
        ids: (0..length).map(|at| (number * 64 + at + 1) as i32).collect(),
        learned: (0..length).map(|_| rng.below(3) > 0).collect(),
    };
    (0..count)
        .map(|number| {
            let length = 1 + rng.index(40);
            sample(number, length, &mut rng)
        })
        .collect()
}

fn loader(batch: usize, shuffle: bool) -> PackedLoader {
    let config = LoaderConfig { batch, seq: 64, vocab: VOCAB, seed: 9, shuffle };
    PackedLoader::new(samples(100), config).unwrap()
}

struct Batch {
    x: Vec<i32>,
    y: Vec<i32>,
    positions: Vec<i32>,
    tokens: BatchTokens,
}

fn next(loader: &mut PackedLoader) -> Batch {
    let size = loader.batch() * loader.seq();
    let [mut x, mut y, mut positions] = [(); 3].map(|()| vec![i32::MIN; size]);
    let tokens = loader.next_batch([&mut x, &mut y, &mut positions]).unwrap();
    Batch { x, y, positions, tokens }
}

/// Every token of every sample is in one place, at its own position, with the token after it as target if that is learned.
#[test]
fn an_epoch_has_every_token_once() {
    let all = samples(100);
    for shuffle in [false, true] {
        let mut loader = loader(1, shuffle);
        let (mut seen, mut total) = (HashMap::new(), BatchTokens::default());
        for _ in 0..loader.len_batches() {
            let Batch { x, y, positions, tokens } = next(&mut loader);
            check_positions(&positions, 64).unwrap();
            total.tokens += tokens.tokens;
            total.counted += tokens.counted;
            for (i, &token) in x.iter().enumerate() {
                if token == PADDING {
                    assert_eq!((positions[i], y[i]), (0, IGNORED), "padding");
                    continue;
                }
                let (number, at) = ((token - 1) as usize / 64, (token - 1) as usize % 64);
                assert_eq!(positions[i] as usize, at);
                let sample = &all[number];
                let learned = sample.learned.get(at + 1).is_some_and(|&learned| learned);
                assert_eq!(y[i], if learned { sample.ids[at + 1] } else { IGNORED });
                *seen.entry(token).or_insert(0) += 1;
            }
        }
        let stats = loader.stats();
        assert_eq!(seen.len(), all.iter().map(|sample| sample.ids.len()).sum::<usize>());
        assert!(seen.values().all(|&times| times == 1));
        assert_eq!([stats.tokens, stats.counted], [total.tokens, total.counted].map(|n| n as u64));
        assert_eq!((stats.samples, stats.positions), (100, 64 * stats.rows));
        let padding = (stats.positions - stats.tokens) as f64 / stats.positions as f64;
        assert!((stats.padding() - padding).abs() < 1e-12 && padding < 0.05, "{padding}");
        assert_eq!(loader.epoch(), 0);
    }
}

/// The last batch of a validation ends with empty rows instead of samples that it had already.
#[test]
fn a_validation_has_every_token_once_and_is_always_the_same() {
    let rows = loader(1, false).stats().rows as usize;
    let mut loader = loader(rows - 1, false);
    let pass = |loader: &mut PackedLoader| {
        (0..loader.len_batches())
            .map(|_| next(loader))
            .map(|batch| (batch.x, batch.tokens))
            .collect::<Vec<_>>()
    };
    let first = pass(&mut loader);
    let tokens: usize = first.iter().map(|(_, tokens)| tokens.tokens).sum();
    assert_eq!(tokens as u64, loader.stats().tokens);
    assert!(first.last().unwrap().0.iter().rev().take(64).all(|&token| token == PADDING));
    assert_eq!(pass(&mut loader), first, "the next epoch");
    next(&mut loader);
    loader.rewind();
    assert_eq!(pass(&mut loader), first);
}

#[test]
fn epochs_and_seeds_differ_and_runs_do_not() {
    let (mut a, mut b) = (loader(1, true), loader(1, true));
    let epoch =
        |loader: &mut PackedLoader| (0..loader.stats().rows).map(|_| next(loader).x).collect::<Vec<_>>();
    let first = epoch(&mut a);
    assert_eq!(first, epoch(&mut b));
    let second = epoch(&mut a);
    assert_eq!((a.epoch(), first.len()), (1, second.len()));
    let sorted = |mut rows: Vec<Vec<i32>>| {
        rows.sort();
        rows
    };
    assert_ne!(sorted(first.clone()), sorted(second), "samples have other neighbours");
    let config = LoaderConfig { seed: 10, ..a.config };
    assert_ne!(first, epoch(&mut PackedLoader::new(samples(100), config).unwrap()));
}

/// From every place, across the ends of epochs, with another batch size.
#[test]
fn a_restored_loader_goes_on_where_the_other_was() {
    let mut whole = loader(1, true);
    let rows: Vec<_> = (0..3 * whole.stats().rows).map(|_| next(&mut whole).x).collect();
    let mut stopped = loader(3, true);
    for step in 0..(rows.len() / 3 - 1) {
        let mut resumed = loader(3, true);
        resumed.restore(stopped.state()).unwrap();
        assert_eq!(resumed.state(), stopped.state());
        assert_eq!(next(&mut resumed).x, rows[3 * step..3 * step + 3].concat());
        next(&mut stopped);
    }
    let mut end = loader(whole.stats().rows as usize, true);
    next(&mut end);
    let mut resumed = loader(1, true);
    resumed.restore(end.state()).unwrap();
    assert_eq!((resumed.epoch(), &next(&mut resumed).x), (0, &rows[end.stats().rows as usize]));
    let mut other = samples(100);
    other[50].learned[0] ^= true;
    let mut other = PackedLoader::new(other, whole.config).unwrap();
    assert!(matches!(other.restore(whole.state()), Err(Error::OtherData)));
}

#[test]
fn rows_are_described_by_their_samples() {
    let mut loader = loader(1, true);
    let texts = loader.describe(0..2 * loader.stats().rows);
    for text in texts {
        let mut found: Vec<usize> = Vec::new();
        let Batch { x, positions, .. } = next(&mut loader);
        let starts =
            x.iter().zip(&positions).filter(|&(&token, &position)| position == 0 && token != PADDING);
        found.extend(starts.map(|(&token, _)| (token - 1) as usize / 64));
        let found: Vec<String> = found.iter().map(usize::to_string).collect();
        assert_eq!(text, format!("samples {}", found.join(", ")));
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let config = LoaderConfig { batch: 2, seq: 4, vocab: 10, seed: 0, shuffle: true };
    let refused =
        |samples: Vec<Sample>, config| PackedLoader::new(samples, config).err().unwrap().to_string();
    let sample = |ids: &[i32]| Sample { ids: ids.to_vec(), learned: vec![true; ids.len()] };
    assert!(PackedLoader::new(vec![sample(&[1, 2, 3, 9])], config).is_ok());
    assert_eq!(
        refused(vec![sample(&[1]), sample(&[1; 5])], config),
        "data: the length of sample 1 is 5, expected 1 to 4, the length of a row; cut it off, or choose a larger seq"
    );
    assert!(
        refused(vec![sample(&[])], config).starts_with("data: the length of sample 0 is 0, expected 1 to 4")
    );
    for id in [-1, 10] {
        let expected =
            format!("data: token 2 of sample 0 is {id}, expected a token of the vocabulary, 0 to 9");
        assert_eq!(refused(vec![sample(&[1, 2, id])], config), expected);
    }
    let uneven = Sample { learned: vec![true], ..sample(&[1, 2]) };
    assert!(refused(vec![uneven], config).contains("2 tokens, and 1 that say what is learned"));
    assert!(refused(Vec::new(), config).starts_with("data: the number of samples is 0"));
    assert!(refused(vec![sample(&[1])], LoaderConfig { batch: 0, ..config }).starts_with("data: batch is 0"));
    let mut loader = PackedLoader::new(vec![sample(&[1])], config).unwrap();
    let error = loader.next_batch([&mut [0; 8], &mut [0; 8], &mut [0; 7]]).unwrap_err().to_string();
    assert_eq!(error, "data: the size of `positions` is 7, expected 2 x 4 elements");
}

/// 50 pairs of two of the samples, of 2 to 62 tokens together.
fn pairs() -> Vec<[Sample; 2]> {
    let cut = |mut sample: Sample| {
        sample.ids.truncate(31);
        sample.learned.truncate(31);
        sample
    };
    let all: Vec<Sample> = samples(100).into_iter().map(cut).collect();
    all.chunks_exact(2).map(|pair| [pair[0].clone(), pair[1].clone()]).collect()
}

fn loader_of_pairs(batch: usize, shuffle: bool) -> PackedLoader {
    let config = LoaderConfig { batch, seq: 64, vocab: VOCAB, seed: 9, shuffle };
    PackedLoader::of_pairs(pairs(), config).unwrap()
}

/// What the reference of these tests gives a token: its own number.
fn measured([x, _, _]: [&[i32]; 3]) -> Result<Vec<f32>> {
    Ok(x.iter().map(|&token| token as f32).collect())
}

/// The samples of a pair stay side by side, and every token that counts keeps the loss that the reference gave it, whichever
/// rows and batches it was measured in.
#[test]
fn pairs_stay_together_with_what_the_reference_says() {
    let all = pairs();
    for (batch, shuffle) in [(1, false), (3, true), (7, false)] {
        let mut loader = loader_of_pairs(batch, shuffle);
        let before = loader.state();
        loader.measure_reference(measured).unwrap();
        assert_eq!(loader.state(), before);
        let mut seen = vec![0; all.len()];
        for _ in 0..loader.stats().rows.div_ceil(batch as u64) {
            let Batch { x, y, positions, .. } = next(&mut loader);
            check_positions(&positions, 64).unwrap();
            let (bounds, reference) = loader.pairs().unwrap();
            ironhorse_core::op::check_pairs(bounds, x.len()).unwrap();
            let mut inside = 0;
            for pair in bounds.chunks_exact(3) {
                let [start, middle, end] = [0, 1, 2].map(|i| pair[i] as usize);
                let number = (x[start] - 1) as usize / 128;
                assert_eq!([&x[start..middle], &x[middle..end]], [0, 1].map(|i| &all[number][i].ids[..]));
                seen[number] += 1;
                inside += end - start;
            }
            assert_eq!(inside, x.iter().filter(|&&token| token != PADDING).count());
            for ((&x, &y), &reference) in x.iter().zip(&y).zip(reference) {
                assert_eq!(reference, if y == IGNORED { 0.0 } else { x as f32 });
            }
        }
        // a batch that the epoch cannot fill goes on with the next one
        assert!(seen.iter().all(|&times| times == 1 || (shuffle && times == 2)), "{seen:?}");
    }
}

#[test]
fn pairs_are_counted_and_packed_as_one() {
    let mut loader = loader_of_pairs(2, true);
    let stats = loader.stats();
    assert_eq!(stats.samples, 50);
    assert_eq!(stats.tokens, pairs().iter().flatten().map(|sample| sample.ids.len() as u64).sum::<u64>());
    assert!(loader.describe(0..1)[0].starts_with("pairs "), "{:?}", loader.describe(0..1));
    let alone = PackedLoader::new(pairs().concat(), loader.config).unwrap();
    assert_ne!(loader.state().fingerprint, alone.state().fingerprint);
    assert!(alone.pairs().is_none());
    next(&mut loader);
    let state = loader.state();
    let mut other = loader_of_pairs(2, true);
    other.restore(state).unwrap();
    let after = |loader: &mut PackedLoader| {
        let batch = next(loader);
        (batch.x, loader.pairs().unwrap().0.to_vec())
    };
    assert_eq!(after(&mut loader), after(&mut other));
}

#[test]
fn a_pair_that_fits_no_row_is_refused() {
    let config = LoaderConfig { batch: 1, seq: 64, vocab: VOCAB, seed: 9, shuffle: true };
    let long = |length: i32| Sample { ids: (1..=length).collect(), learned: vec![true; length as usize] };
    let text = PackedLoader::of_pairs(vec![[long(1), long(2)], [long(40), long(25)]], config).err().unwrap();
    assert_eq!(
        text.to_string(),
        "data: the length of both samples of pair 1 is 65, expected at most 64, the length of a row; cut them off, or choose a larger seq"
    );
    let failed = loader_of_pairs(1, true).measure_reference(|_| Err(Error::Stopped));
    assert!(matches!(failed, Err(Error::Stopped)));
}
