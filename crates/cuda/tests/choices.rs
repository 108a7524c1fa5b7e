//! The algorithms of matrix products are part of a run, on a real GPU: an engine that is given the algorithms of
//! another one uses them, whatever its cache contains, and an engine without a cache chooses the same ones every time.
//! `cargo test --release -p ironhorse-cuda --test choices -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::{Act, LinearFwd, PreAct};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Precision, Scalars};
use ironhorse_cuda::{CudaEngine, Settings};
use ironhorse_testkit::Rng;
use std::path::Path;

const ROWS: usize = 512;
const SIZES: (usize, usize) = (768, 3072);

/// Runs a layer with bias and GELU, large enough to be measured; returns the chosen algorithms and the bits of the
/// output.
fn run(cache: &Path, given: &[(String, String)]) -> (Vec<(String, String)>, Vec<u32>) {
    let (ic, oc) = SIZES;
    let mut b = Builder::with_precision(Precision::BF16);
    let (weight, bias) = (b.param("w", [oc, ic], true), b.param("b", [oc], false));
    let inp = b.io("x", [ROWS, ic], DType::BF16);
    let [pre, out] = ["pre", "out"].map(|name| b.io(name, [ROWS, oc], DType::BF16));
    b.push(LinearFwd { out, pre: Some(PreAct { act: Act::Gelu, slot: pre }), inp, weight, bias: Some(bias) })
        .unwrap();
    let program = b.finish().unwrap();
    let settings = Settings { cache: Some(cache.to_owned()), ..Settings::default() };
    let mut engine = CudaEngine::new(settings).unwrap();
    engine.set_choices(given).unwrap();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(1);
    for slot in [inp, weight, bias] {
        let values = rng.uniforms(slot.numel(), -1.0, 1.0);
        engine.write_f32(slot, &values).unwrap();
    }
    engine.run(&program, 0..1, &Scalars::default()).unwrap();
    let mut values = vec![0.0; out.numel()];
    engine.read_f32(out, &mut values).unwrap();
    (engine.choices(), values.iter().map(|value| value.to_bits()).collect())
}

fn names(choices: &[(String, String)]) -> Vec<&str> {
    choices.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn choices_travel_from_run_to_run() {
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (first, bits) = run(folders[0].path(), &[]);
    assert!(first.len() >= 2, "the fused product and the plainer one it was measured against: {first:?}");
    assert!(first.is_sorted());
    let (cached, same) = run(folders[0].path(), &[]);
    assert!(!cached.is_empty() && names(&cached).iter().all(|name| names(&first).contains(name)));
    assert_eq!(same, bits, "from the cache");
    // An engine with an empty cache is given the algorithms, and then caches those it used.
    let (given, same) = run(folders[1].path(), &first);
    assert_eq!(names(&given), names(&first));
    assert_eq!(same, bits);
    let stored = |folder: &Path| {
        let files = std::fs::read_dir(folder).unwrap().flatten();
        files.filter(|file| file.file_name().to_string_lossy().starts_with("gemm-")).count()
    };
    assert_eq!(stored(folders[1].path()), cached.len());
    // The algorithms of another device are ignored, and new ones are chosen.
    let rename = |name: &str| name.replace(" on ", " on other ");
    let other: Vec<_> = first.iter().map(|(name, text)| (rename(name), text.clone())).collect();
    let (anew, _) = run(folders[2].path(), &other);
    assert!(!anew.is_empty() && names(&anew).iter().all(|name| !name.contains("other")), "{anew:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn without_a_cache_every_run_chooses_the_same() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let nowhere = file.path().join("below");
    let (first, bits) = run(&nowhere, &[]);
    assert!(!first.is_empty());
    assert!(first.iter().all(|(_, text)| text.contains("\"first_ms\": null")), "unmeasured: {first:?}");
    for _ in 0..3 {
        assert_eq!(run(&nowhere, &[]), (first.clone(), bits.clone()));
    }
    // The algorithms of a run that measured take precedence here too.
    let folder = tempfile::tempdir().unwrap();
    let (measured, bits) = run(folder.path(), &[]);
    let (given, same) = run(&nowhere, &measured);
    assert_eq!((names(&given), same), (names(&measured), bits));
}
