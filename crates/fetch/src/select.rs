//! Which files of a repository are wanted.

use ironhorse_train::format::hf::{HF_CONFIG, HF_INDEX, HF_WEIGHTS, is_weights_part, parse_index};
use ironhorse_train::format::tokenizer::is_tokenizer_file;
use std::path::Path;

/// What the files are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted<'a> {
    /// The configuration, the weights as safetensors, the tokenizer; no second copy of the weights in another format.
    Model,
    /// The tokenizer alone.
    Tokenizer,
    /// The data of all splits, in one format.
    Dataset,
    /// The split of the data to train on, if the files' names say which it is; otherwise all splits.
    Train,
    /// Files whose paths match one of these patterns.
    Files(&'a [String]),
}

/// Files beside a model that say how it is used.
const ABOUT: [&str; 2] = [HF_CONFIG, "generation_config.json"];
/// What is enough to tokenize, one way or the other.
const WHOLE_TOKENIZERS: [&[&str]; 4] =
    [&["tokenizer.json"], &["vocab.json", "merges.txt"], &["tokenizer.model"], &["tokenizer.bin"]];
/// Formats of data, the best first; a repository often has the same in two.
const FORMATS: [&[&str]; 3] = [
    &[".parquet"],
    &[".jsonl", ".jsonl.gz", ".jsonl.zst"],
    &[".txt", ".txt.gz", ".txt.zst", ".md", ".md.gz", ".md.zst"],
];
/// Texts about the data, not of it.
const NOT_DATA: [&str; 4] = ["readme", "license", "licence", "changelog"];

fn tokenizer(name: &str) -> bool {
    is_tokenizer_file(name) || name.ends_with(".tiktoken")
}

impl Wanted<'_> {
    /// The wanted ones of these files, small ones before weights.
    pub(crate) fn of(&self, files: &[String]) -> Result<Vec<String>, String> {
        let keep = |test: &dyn Fn(&str) -> bool| -> Vec<String> {
            files.iter().filter(|file| test(file)).cloned().collect()
        };
        match self {
            Self::Model => {
                let mut wanted = keep(&|file| ABOUT.contains(&file) || tokenizer(file));
                let one = keep(&|file| file == HF_WEIGHTS);
                wanted.extend(if one.is_empty() {
                    keep(&|file| file == HF_INDEX || is_weights_part(file))
                } else {
                    one
                });
                let has = |name: &str| wanted.iter().any(|file| file == name);
                match has(HF_CONFIG) && (has(HF_WEIGHTS) || has(HF_INDEX)) {
                    true => Ok(wanted),
                    false => Err(format!(
                        "is not a model with {HF_CONFIG} and safetensors, it has {}; --file takes single files",
                        some(files)
                    )),
                }
            }
            Self::Tokenizer => match keep(&tokenizer) {
                found if found.is_empty() => Err(format!("has no tokenizer, it has {}", some(files))),
                found => Ok(found),
            },
            Self::Dataset => data(files),
            Self::Train => {
                let all = data(files)?;
                let train: Vec<String> =
                    all.iter().filter(|file| file.to_ascii_lowercase().contains("train")).cloned().collect();
                Ok(if train.is_empty() { all } else { train })
            }
            Self::Files(patterns) => matching(patterns, files),
        }
    }

    /// Whether these files, which are what the cache has of a repository whose list is not known, are all that is wanted.
    pub(crate) fn is_all(&self, files: &[String], snapshot: &Path) -> bool {
        match self {
            Self::Model => {
                files.iter().any(|file| file == HF_WEIGHTS)
                    || parts(snapshot).is_some_and(|parts| parts.iter().all(|part| files.contains(part)))
            }
            Self::Tokenizer => WHOLE_TOKENIZERS
                .iter()
                .any(|whole| whole.iter().all(|part| files.iter().any(|file| file == part))),
            Self::Files(patterns) => patterns.iter().all(|pattern| files.contains(pattern)),
            Self::Dataset | Self::Train => false,
        }
    }
}

impl Wanted<'_> {
    /// The files that a repository usually has, for advice when it cannot be asked; with several files of weights those
    /// that the index of the folder names.
    pub(crate) fn usual(&self, snapshot: &Path) -> Vec<String> {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        match self {
            Self::Model => match parts(snapshot) {
                Some(parts) => parts,
                None => names(&[HF_CONFIG, HF_WEIGHTS, "tokenizer.json"]),
            },
            Self::Tokenizer => names(&["tokenizer.json"]),
            Self::Files(patterns) => patterns.to_vec(),
            Self::Dataset | Self::Train => Vec::new(),
        }
    }
}

/// The files of weights that the index of a folder names, each once.
fn parts(snapshot: &Path) -> Option<Vec<String>> {
    let index = snapshot.join(HF_INDEX);
    let places = parse_index(&std::fs::read(&index).ok()?, &index).ok()?;
    let parts: std::collections::BTreeSet<String> = places.into_values().collect();
    Some(parts.into_iter().collect())
}

/// The data in the best of the formats that are there.
fn data(files: &[String]) -> Result<Vec<String>, String> {
    let is_data = |file: &String| {
        let name = file.rsplit('/').next().unwrap_or(file).to_ascii_lowercase();
        !name.starts_with('.') && !NOT_DATA.iter().any(|other| name.starts_with(other))
    };
    for endings in FORMATS {
        let ends = |file: &String| endings.iter().any(|ending| file.to_ascii_lowercase().ends_with(ending));
        let found: Vec<String> = files.iter().filter(|file| is_data(file) && ends(file)).cloned().collect();
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Err(format!("has no data in .parquet, .jsonl or .txt, it has {}; --file takes single files", some(files)))
}

/// The files that match, as huggingface_hub matches: `*` also stands for slashes.
fn matching(patterns: &[String], files: &[String]) -> Result<Vec<String>, String> {
    let mut wanted: Vec<String> = Vec::new();
    for pattern in patterns {
        let parsed = glob::Pattern::new(pattern)
            .map_err(|error| format!("--file {pattern}: is no pattern: {error}"))?;
        let found: Vec<&String> =
            files.iter().filter(|file| *file == pattern || parsed.matches(file)).collect();
        if found.is_empty() {
            return Err(format!("has no file {pattern}, it has {}", some(files)));
        }
        for file in found {
            if !wanted.contains(file) {
                wanted.push(file.clone());
            }
        }
    }
    Ok(wanted)
}

/// The first few of a list.
fn some(files: &[String]) -> String {
    const FEW: usize = 8;
    match files.len() {
        0 => "no files".into(),
        all if all <= FEW => files.join(", "),
        all => format!("{} and {} more", files[..FEW].join(", "), all - FEW),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &str) -> Vec<String> {
        names.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_model_is_taken_once() {
        let gpt2 = ".gitattributes 64.tflite README.md config.json flax_model.msgpack generation_config.json merges.txt \
                    model.safetensors onnx/config.json onnx/decoder_model.onnx pytorch_model.bin rust_model.ot tf_model.h5 \
                    tokenizer.json tokenizer_config.json vocab.json";
        let wanted = "config.json generation_config.json merges.txt tokenizer.json tokenizer_config.json vocab.json \
                      model.safetensors";
        assert_eq!(Wanted::Model.of(&files(gpt2)).unwrap(), files(wanted));
        let parts = "config.json consolidated.safetensors model-00001-of-00002.safetensors model-00002-of-00002.safetensors \
                     model.safetensors.index.json original/tokenizer.model tokenizer.model chat_template.jinja";
        let wanted = "config.json tokenizer.model chat_template.jinja model-00001-of-00002.safetensors \
                      model-00002-of-00002.safetensors model.safetensors.index.json";
        assert_eq!(Wanted::Model.of(&files(parts)).unwrap(), files(wanted));
        let error = Wanted::Model.of(&files("config.json pytorch_model.bin")).unwrap_err();
        assert!(error.contains("it has config.json, pytorch_model.bin"), "{error}");
        assert_eq!(
            Wanted::Tokenizer.of(&files(parts)).unwrap(),
            files("tokenizer.model chat_template.jinja")
        );
        assert!(Wanted::Tokenizer.of(&files("a b")).is_err());
    }

    #[test]
    fn data_are_taken_in_one_format() {
        let both =
            "README.md a-train.txt data/train-0.parquet data/train-1.parquet data/validation-0.parquet";
        let wanted = "data/train-0.parquet data/train-1.parquet data/validation-0.parquet";
        assert_eq!(Wanted::Dataset.of(&files(both)).unwrap(), files(wanted));
        assert_eq!(
            Wanted::Train.of(&files(both)).unwrap(),
            files("data/train-0.parquet data/train-1.parquet")
        );
        assert_eq!(
            Wanted::Train.of(&files("README.md x.jsonl.zst y.jsonl")).unwrap(),
            files("x.jsonl.zst y.jsonl")
        );
        assert!(
            Wanted::Dataset.of(&files("README.md x.csv")).unwrap_err().contains("it has README.md, x.csv")
        );
    }

    #[test]
    fn patterns_take_what_they_match() {
        let all = files("a.txt b/c.txt b/d.bin");
        let of = |patterns: &str| Wanted::Files(&files(patterns)).of(&all);
        assert_eq!(of("*.txt").unwrap(), files("a.txt b/c.txt"));
        assert_eq!(of("b/* a.txt *.txt").unwrap(), files("b/c.txt b/d.bin a.txt"));
        assert_eq!(of("x").unwrap_err(), "has no file x, it has a.txt, b/c.txt, b/d.bin");
        assert!(of("[").unwrap_err().contains("is no pattern"));
    }
}
