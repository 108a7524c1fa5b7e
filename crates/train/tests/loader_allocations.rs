//! A loader whose shards were all read once, and are few enough to stay open, allocates nothing.

use ironhorse_train::data::{Loader, LoaderConfig, OPEN_SHARDS, open_shards};
use ironhorse_train::format::shards::{ShardKind, ShardWriter};

ironhorse_testkit::count_allocations!();

/// One test, because the counter belongs to the whole process.
#[test]
fn batches_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..OPEN_SHARDS as u32 {
        let path = folder.path().join(format!("s_{number:02}.bin"));
        let mut writer = ShardWriter::create(&path, ShardKind::U16).unwrap();
        writer.push(&[number; 100]).unwrap();
        writer.finish().unwrap();
    }
    let sources = open_shards(&[folder.path().join("*.bin")]).unwrap();
    let config = LoaderConfig { batch: 3, seq: 16, vocab: 64, seed: 1, shuffle: true };
    let mut loader = Loader::new(sources, config).unwrap();
    let (mut x, mut y) = (vec![0; 48], vec![0; 48]);
    // two epochs: every shard is read
    for _ in 0..2 * 64 * 6 / 3 {
        loader.next_batch(&mut x, &mut y).unwrap();
    }
    let before = allocations::count();
    for _ in 0..1000 {
        loader.next_batch(&mut x, &mut y).unwrap();
    }
    assert_eq!(allocations::count(), before);
}
