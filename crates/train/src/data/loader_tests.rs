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
            loader.start_epoch(epoch);
            let windows = loader.windows;
            let order = starts(&mut loader, windows);
            assert_eq!(loader.state().epoch, epoch);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            // Inside a source, windows lie side by side and leave less than a window free at either end.
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
    let text = same.restore(LoaderState { position: 10_000, ..state }).unwrap_err().to_string();
    assert!(text.contains("position is 10000"), "{text}");
    assert_eq!(same.state(), stood);
    same.restore(state).unwrap();
    assert_eq!(batch(&mut same), first);
}

#[test]
fn validation_is_in_file_order() {
    let mut loader = loader(&[21, 15], config(2, 5, false));
    assert_eq!((loader.len_batches(), loader.len_tokens()), (3, 36));
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
    assert_eq!(error.to_string(), "shard_1.bin: token 33 is 1033, expected < 1033");
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
    assert!(text.contains("longest of 2 sources has 32 tokens, expected at least 33"), "{text}");
    assert!(fails(&[], config(1, 5, true)).contains("longest of 0 sources"));
    let mut good = loader(&[9], config(1, 5, true));
    let text = good.next_batch(&mut [0; 5], &mut [0; 4]).unwrap_err().to_string();
    assert!(text.contains("`y` has 4 elements, expected 1 x 5"), "{text}");
}
