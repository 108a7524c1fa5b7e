//! `--dropout`: the same masks however a run is made, and none outside of training.

use super::Place;

/// Small, but large enough that several threads have work.
const DROPPING: &str = "--model n_layer=2,n_head=4,n_embd=64,vocab_size=256,max_seq_len=48 --batch 3 --seq 48 \
                        --accumulate 2 --steps 3 --val-batches 2 --sample-tokens 0 --device cpu";

#[test]
fn the_bits_do_not_depend_on_threads_recomputation_or_resuming() {
    let place = Place::new();
    place.does(&format!("train {DROPPING} --dropout 0.2 --threads 1 --out one"));
    for (name, flags) in [
        ("again", "--threads 1"),
        ("three", "--threads 3"),
        ("gelu", "--recompute gelu --threads 2"),
        ("full", "--recompute full --threads 2"),
    ] {
        place.does(&format!("train {DROPPING} --dropout 0.2 {flags} --out {name}"));
        assert_eq!(place.losses(name), place.losses("one"), "{name}");
        assert!(place.weights(name) == place.weights("one"), "{name}: other weights");
    }
    for (name, flags) in
        [("none", "--dropout 0"), ("more", "--dropout 0.3"), ("seed", "--dropout 0.2 --seed 2")]
    {
        place.does(&format!("train {DROPPING} {flags} --out {name}"));
        assert_ne!(place.losses(name), place.losses("one"), "{name}");
    }
    // The first validation is before any step and without dropout, so it is the same with and without.
    let first = |run: &str| place.metrics(run)[0].val_loss;
    assert!(first("one").is_some() && first("one") == first("none"));
    // The first training loss is not: its forward drops.
    assert_ne!(place.metrics("one")[0].loss, place.metrics("none")[0].loss);
    let config = String::from_utf8(place.read("one/config.toml")).unwrap();
    assert!(config.contains("dropout = 0.2"), "{config}");
    place.does("train --config one/config.toml --threads 1 --out configured");
    assert!(place.weights("configured") == place.weights("one"));
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_with_dropout_is_proved_equal() {
    let place = Place::new();
    let small = "--model n_layer=1,n_head=2,n_embd=32,vocab_size=256,max_seq_len=32 --batch 2 --seq 16 --val-batches 4 \
                 --threads 1 --device cpu --accumulate 2";
    let done = place.does(&format!("resume-check {small} --dropout 0.3 --steps 40"));
    assert!(done.text().contains("PASS"), "{}", done.text());
}

#[test]
fn what_cannot_be_dropped_is_refused() {
    let place = Place::new();
    for bad in ["1", "-0.1", "1.5", "nan", "x"] {
        place.refuses(
            &format!("train {DROPPING} --dropout={bad}"),
            &["--dropout", "a number of at least 0 and below 1"],
        );
    }
    let llama = "--model hidden=24,layers=1,heads=2,ffn=32,vocab=256,context=16 --batch 1 --seq 8";
    for command in ["train --steps 1 --device cpu", "bench --steps 1 --device cpu", "plan --device cpu"] {
        place.refuses(
            &format!("{command} {llama} --dropout 0.1"),
            &["dropout is 0.1", "a model of kind llama", "only GPT-2 has dropout"],
        );
    }
    place.does(&format!("train {DROPPING} --dropout 0.1 --steps 2 --out run"));
    place.refuses(
        "train --resume run --steps 4 --dropout 0.2",
        &["--dropout cannot change when a run is resumed"],
    );
}

#[test]
fn other_commands_take_it() {
    let place = Place::new();
    let sizes = "--model n_layer=1,n_head=2,n_embd=32,vocab_size=64,max_seq_len=16 --batch 2 --seq 16";
    place.does(&format!("bench {sizes} --dropout 0.1 --steps 1 --warmup 0 --device cpu"));
    let ops = |flags: &str| {
        place.does(&format!("plan {sizes} {flags} --device cpu --json p.json"));
        place.json("p.json")["ops"].as_u64().unwrap()
    };
    // the embedding, and two of the layer; forward and backward
    assert_eq!(ops("--dropout 0.1"), ops("") + 6);
    let done = place.does(&format!("verify --lockstep {sizes} --dropout 0.5 --device cpu"));
    assert!(done.text().contains("attention_dropout_bwd"), "{}", done.text());
}
