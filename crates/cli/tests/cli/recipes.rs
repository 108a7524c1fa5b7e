//! The recipes of the repository: every one is read and trains, at a size that takes milliseconds.

use super::Place;
use std::fs;
use std::path::{Path, PathBuf};

fn recipes() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = files.filter(|file| file.extension().is_some_and(|end| end == "toml")).collect();
    found.sort();
    found
}

#[test]
fn every_recipe_trains() {
    const SMALL: &str = "n_layer=1,n_head=1,n_embd=8,vocab_size=50257,max_seq_len=32";
    let place = Place::new();
    place.write("text.txt", "A text of some lines, for a model to read.\n".repeat(100));
    let rest = "--device cpu --batch 1 --seq 16 --accumulate 1 --steps 4 --warmup 1 --val-every 2 --val-batches 1 \
                --sample-every 4 --sample-tokens 4";
    place.does(&format!("train --model {SMALL} --data text.txt --tokenizer gpt2 {rest} --out base"));
    assert!(recipes().len() >= 5);
    for recipe in recipes() {
        let name = recipe.file_stem().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&recipe).unwrap();
        let has = |key: &str| text.lines().any(|line| line.starts_with(&format!("{key} = ")));
        // What a recipe says of the model stays where it is small enough; data are the ones at hand.
        let mut line = format!("train --config {} {rest} --data text.txt --out {name}", recipe.display());
        if has("val-data") {
            line += " --val-data text.txt";
        }
        if has("init") {
            line += " --init base";
        }
        if text.contains("model = \"gpt2\"") {
            line += &format!(" --model {SMALL}");
        }
        place.does(&line);
    }
}

#[test]
fn every_curve_belongs_to_a_recipe_and_every_page_is_linked() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let index = fs::read_to_string(folder.join("README.md")).unwrap();
    let place = Place::new();
    for recipe in recipes() {
        let name = recipe.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(index.contains(&format!("[{name}](")), "{name} is not in recipes/README.md");
        let curve = recipe.with_extension("jsonl");
        if curve.is_file() {
            let file = curve.display();
            place.does(&format!("compare {file} {file} --loss validation --svg curve.svg"));
        } else {
            let row = index.lines().find(|line| line.contains(&format!("[{name}]("))).unwrap();
            assert!(row.contains("not run here"), "{name} has neither a curve nor the words `not run here`");
        }
    }
}
