//! Tests of the loader. Tokens are numbered through all sources, so a token tells where its window starts.

use super::*;
use crate::data::MemoryTokens;

fn config(batch: usize, seq: usize, shuffle: bool) -> LoaderConfig {
    LoaderConfig { batch, seq, vocab: 100_000, seed: 7, shuffle }
}

/// A loader over sources of these lengths; source i holds 1000 i, 1000 i + 1, ...
fn loader(lens: &[u32], config: LoaderConfig) -> Loader {
    let source = |(i, &len): (usize, &u32)| -> Box<dyn Tokens> {
        let first = 1000 * i as u32;
        Box::new(MemoryTokens::new(format!("shard_{i}.bin"), (first..first + len).collect()))
    };
    Loader::new(lens.iter().enumerate().map(source).collect(), config).unwrap()
}

fn batch(loader: &mut Loader) -> (Vec<i32>, Vec<i32>) {
    let n = loader.config.batch * loader.config.seq;
    let (mut x, mut y) = (vec![-1; n], vec![-1; n]);
    loader.next_batch(&mut x, &mut y).unwrap();
    (x, y)
}

/// The first tokens of the next `n` windows.
fn starts(loader: &mut Loader, n: u64) -> Vec<i32> {
    assert_eq!(loader.config.batch, 1);
    (0..n).map(|_| batch(loader).0[0]).collect()
}

#[test]
fn every_window_once_per_epoch() {
    for seq in [1_usize, 2, 7, 31, 33] {
        // The empty source and the one of `seq` tokens have no window; `seq + 1` makes exactly one.
        let lens = [100, 0, seq as u32, 257, seq as u32 + 1, 64];
        let mut loader = loader(&lens, config(1, seq, true));
        let mut orders = Vec::new();
        for epoch in 0..4 {
            let first = batch(&mut loader).0[0];
            let windows = loader.epoch.windows;
            let mut order = vec![first];
            order.extend(starts(&mut loader, windows - 1));
            assert_eq!(loader.epoch(), epoch);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            // Within a source, windows are adjacent and leave less than one window unused at either end.
            for (i, &len) in lens.iter().enumerate() {
                let (first, last) = (1000 * i as i32, 1000 * i as i32 + len as i32);
                let own: Vec<i32> = sorted.iter().copied().filter(|s| (first..last).contains(s)).collect();
                let seq = seq as i32;
                assert_eq!(own.is_empty(), len as i32 <= seq, "seq {seq} source {i}");
                let (Some(&low), Some(&high)) = (own.first(), own.last()) else { continue };
                assert!(own.windows(2).all(|w| w[1] - w[0] == seq), "{own:?}");
                assert!(low - first < seq && high + seq < last && high + 2 * seq >= last, "{own:?}");
            }
            orders.push(order);
        }
        assert!(orders[0] != orders[1] && orders[1] != orders[2], "epochs differ");
    }
}

#[test]
fn targets_are_inputs_one_later() {
    for shuffle in [true, false] {
        let mut loader = loader(&[333, 50], config(3, 8, shuffle));
        for _ in 0..40 {
            let (x, y) = batch(&mut loader);
            for (x, y) in x.chunks(8).zip(y.chunks(8)) {
                assert!((0..8).all(|t| x[t] == x[0] + t as i32 && y[t] == x[t] + 1), "{x:?} {y:?}");
            }
        }
    }
}

#[test]
fn the_seed_decides_the_order() {
    let order = |seed| starts(&mut loader(&[1000], LoaderConfig { seed, ..config(1, 5, true) }), 400);
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
}

#[test]
fn restore_continues_exactly() {
    for done in [0, 1, 17, 40, 90] {
        let mut one = loader(&[200, 300], config(3, 5, true));
        (0..done).for_each(|_| drop(batch(&mut one)));
        let saved = serde_json::to_string(&one.state()).unwrap();
        let mut two = loader(&[200, 300], config(3, 5, true));
        two.restore(serde_json::from_str(&saved).unwrap()).unwrap();
        assert!((0..70).all(|_| batch(&mut one) == batch(&mut two)), "after {done}");
    }
}

#[test]
fn restore_refuses_other_data() {
    let state = loader(&[200], config(1, 5, true)).state();
    for (lens, config) in [
        (&[201][..], config(1, 5, true)),
        (&[200], config(1, 6, true)),
        (&[200], LoaderConfig { seed: 8, ..config(1, 5, true) }),
        (&[200, 1], config(1, 5, true)),
    ] {
        let text = loader(lens, config).restore(state).unwrap_err().to_string();
        assert!(text.contains("other data files"), "{text}");
    }
    let mut same = loader(&[200], config(4, 5, true));
    same.restore(state).unwrap();
    let first = batch(&mut same);
    let stood = same.state();
    let text = same.restore(LoaderState { samples: u64::MAX, ..state }).unwrap_err().to_string();
    assert!(text.contains("position is 18446744073709551615 samples"), "{text}");
    assert_eq!(same.state(), stood);
    same.restore(state).unwrap();
    assert_eq!(batch(&mut same), first);
}

#[test]
fn validation_is_in_file_order() {
    let mut loader = loader(&[21, 15], config(2, 5, false));
    assert_eq!(loader.len_batches(), 3);
    let first = batch(&mut loader).0;
    assert_eq!(first, (0..10).collect::<Vec<i32>>());
    assert_eq!(batch(&mut loader).0[0], 10);
    assert_eq!(batch(&mut loader).0[..6], [1000, 1001, 1002, 1003, 1004, 1005]);
    assert_eq!(batch(&mut loader).0, first, "the next epoch is the same");
    batch(&mut loader);
    loader.rewind();
    assert_eq!(batch(&mut loader).0, first);
}

#[test]
fn a_batch_wider_than_the_data_starts_again() {
    let mut loader = loader(&[6], config(3, 5, false));
    assert_eq!(loader.len_batches(), 1);
    assert_eq!(batch(&mut loader).0, [0, 1, 2, 3, 4].repeat(3));
}

#[test]
fn a_token_outside_the_vocabulary_is_named() {
    let mut loader = loader(&[10, 50], LoaderConfig { vocab: 1033, ..config(1, 4, false) });
    let (mut x, mut y) = (vec![0; 4], vec![0; 4]);
    let error = (0..20).find_map(|_| loader.next_batch(&mut x, &mut y).err()).unwrap();
    assert!(matches!(error, Error::Field { .. }));
    assert_eq!(
        error.to_string(),
        "shard_1.bin: token at position 33 is 1033, expected a token of the vocabulary, 0 to 1032"
    );
}

#[test]
fn bad_settings_are_named() {
    let fails = |lens: &[u32], config| {
        let sources = lens
            .iter()
            .map(|&len| -> Box<dyn Tokens> { Box::new(MemoryTokens::new("s", vec![0; len as usize])) });
        Loader::new(sources.collect(), config).err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert!(fails(&[9], config(0, 5, true)).contains("batch is 0"));
    assert!(fails(&[9], config(1, 0, true)).contains("seq is 0"));
    assert!(fails(&[9], LoaderConfig { vocab: 1 << 31, ..config(1, 5, true) }).contains("vocab is"));
    let text = fails(&[9, 32], config(1, 32, true));
    assert!(text.contains("longest of 2 sources is 32 tokens long, expected at least 33"), "{text}");
    assert!(fails(&[], config(1, 5, true)).contains("longest of 0 sources"));
    let mut good = loader(&[9], config(1, 5, true));
    let text = good.next_batch(&mut [0; 5], &mut [0; 4]).unwrap_err().to_string();
    assert!(text.contains("the size of `y` is 4, expected 1 x 5 elements"), "{text}");
}

/// The numbers of all windows that these loaders produce, by their first tokens.
fn rows(loader: &mut Loader, batches: usize) -> Vec<i32> {
    let seq = loader.config.seq;
    (0..batches).flat_map(|_| batch(loader).0.chunks(seq).map(|row| row[0]).collect::<Vec<_>>()).collect()
}

#[test]
fn the_number_of_samples_is_the_position() {
    for shuffle in [true, false] {
        // an epoch has 15 or 16 windows, which no batch size here divides throughout
        let lens = [40, 3, 47];
        let all = rows(&mut loader(&lens, config(1, 5, shuffle)), 400);
        for size in [1, 3, 4, 7, 50] {
            let mut running = loader(&lens, config(size, 5, shuffle));
            for done in 0..300 / size {
                let samples = (done * size) as u64;
                assert_eq!(running.samples(), samples);
                let mut restored = loader(&lens, config(size, 5, shuffle));
                restored.restore(running.state()).unwrap();
                assert_eq!(restored.state(), running.state());
                assert_eq!(
                    (restored.epoch(), restored.len_batches()),
                    (running.epoch(), running.len_batches())
                );
                let want = &all[done * size..(done + 2) * size];
                assert_eq!(rows(&mut restored, 2), want, "size {size} after {samples}");
                rows(&mut running, 1);
            }
        }
        // another batch size continues with the same samples
        let mut four = loader(&lens, config(4, 5, shuffle));
        rows(&mut four, 13);
        let mut three = loader(&lens, config(3, 5, shuffle));
        three.restore(four.state()).unwrap();
        assert_eq!(rows(&mut three, 5), all[52..67]);
    }
}

#[test]
fn skipping_is_running_on() {
    for shuffle in [true, false] {
        let all = rows(&mut loader(&[40, 47], config(1, 5, shuffle)), 400);
        let mut at = 0;
        let mut skipping = loader(&[40, 47], config(1, 5, shuffle));
        for skip in [0, 1, 16, 17, 18, 100, 0, 33, 2] {
            skipping.skip(skip).unwrap();
            at += skip as usize;
            assert_eq!(starts(&mut skipping, 3), all[at..at + 3], "at {at}");
            at += 3;
        }
        // back to the start, from a later epoch
        let start = LoaderState { samples: 0, ..skipping.state() };
        skipping.restore(start).unwrap();
        assert_eq!(starts(&mut skipping, 50), all[..50]);
        assert_eq!(skipping.skip(u64::MAX).is_err(), shuffle);
    }
}

#[test]
fn a_hundred_thousand_epochs_are_found_quickly() {
    let lens = [12, 9, 30];
    let mut far = loader(&lens, config(1, 5, true));
    let from = std::time::Instant::now();
    far.skip(800_000).unwrap();
    assert!(far.epoch() > 90_000, "{}", far.epoch());
    assert!(from.elapsed().as_secs_f64() < 1.0, "{:?}", from.elapsed());
    let mut restored = loader(&lens, config(1, 5, true));
    restored.restore(far.state()).unwrap();
    assert_eq!(starts(&mut restored, 20), starts(&mut far, 20));
    // file order needs no walk
    let mut validation = loader(&lens, config(1, 5, false));
    validation.skip(u64::MAX / 2).unwrap();
    assert_eq!(validation.samples(), u64::MAX / 2);
}

#[test]
fn the_state_knows_the_contents() {
    let state = loader(&[200], config(1, 5, true)).state();
    let with = |content: &str| {
        let mut loader = loader(&[200], config(1, 5, true));
        loader.set_content(content);
        loader
    };
    let known = with("abc").state();
    assert_ne!(known, state);
    with("abc").restore(known).unwrap();
    for (mut other, state) in [(with("abd"), known), (with("abc"), state), (with(""), state)] {
        assert!(other.restore(state).unwrap_err().to_string().contains("other data files"));
    }
    let mut again = with("first");
    again.set_content("abc");
    assert_eq!(again.state(), known, "the last one counts");
    let text = r#"{"samples": 1, "fingerprint": 2, "epoch": 3}"#;
    assert!(serde_json::from_str::<LoaderState>(text).unwrap_err().to_string().contains("epoch"));
}

/// The orders of earlier versions, which did not count positions in samples: the batches after a checkpoint must not
/// change.
#[test]
fn the_order_stays() {
    let order = starts(&mut loader(&[40, 3, 47], config(1, 5, true)), 24);
    assert_eq!(
        order,
        [
            2038, 15, 2018, 30, 25, 20, 2003, 5, 2013, 10, 2028, 2033, 2008, 0, 2023, 6, 2032, 2037, 11, 31,
            2017, 26, 2012, 2022
        ]
    );
}

#[test]
fn samples_are_described() {
    for shuffle in [true, false] {
        let mut loader = loader(&[40, 3, 47], config(1, 5, shuffle));
        let texts = loader.describe(0..60).unwrap();
        let stood = loader.state();
        for (sample, text) in texts.iter().enumerate() {
            let first = batch(&mut loader).0[0];
            assert_eq!(
                *text,
                format!("shard_{}.bin token {}", first / 1000, first % 1000),
                "sample {sample}"
            );
        }
        assert_eq!(loader.describe(7..9).unwrap(), texts[7..9]);
        assert!(loader.describe(9..9).unwrap().is_empty());
        loader.restore(stood).unwrap();
    }
    let source = MemoryTokens::new("data/fine/train_000.bin", vec![0; 50]);
    let loader = Loader::new(vec![Box::new(source)], config(1, 5, false)).unwrap();
    assert_eq!(loader.describe(3..4).unwrap(), ["train_000.bin token 15"]);
}
