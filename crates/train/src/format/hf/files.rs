//! The weights of a folder: `model.safetensors`, or several files with an index that maps tensors to files.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::without_bom;
use crate::format::safetensors::{Entry, SafeTensors};
use crate::{Error, Result};

/// The file of the weights, if there is only one.
pub const HF_WEIGHTS: &str = "model.safetensors";
/// The index, if there are several files.
pub const HF_INDEX: &str = "model.safetensors.index.json";

/// The stem of the names of files of weights.
pub(in crate::format) const MODEL: &str = "model";

/// The name of one of `count` files; `number` counts from 1.
pub(in crate::format) fn part_name(stem: &str, number: usize, count: usize) -> String {
    match count {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{number:05}-of-{count:05}.safetensors"),
    }
}

/// Whether this is a name that [`part_name`] gives to one of several files.
pub(in crate::format) fn is_part_name(stem: &str, name: &str) -> bool {
    let middle =
        name.strip_prefix(stem).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(".safetensors"));
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    middle.and_then(|middle| middle.split_once("-of-")).is_some_and(|(n, of)| digits(n) && digits(of))
}

/// Whether this is the name of one of several files of weights.
pub fn is_weights_part(name: &str) -> bool {
    is_part_name(MODEL, name)
}

/// Which tensors, of these sizes, go into each file: as many as fit into `most` bytes, in order; at least one.
pub(in crate::format) fn split(sizes: impl IntoIterator<Item = u64>, most: u64) -> Vec<Range<usize>> {
    let (mut parts, mut here, mut held) = (Vec::new(), 0..0, 0_u64);
    for bytes in sizes {
        if !here.is_empty() && held.saturating_add(bytes) > most {
            let next = here.end..here.end;
            parts.push(std::mem::replace(&mut here, next));
            held = 0;
        }
        held = held.saturating_add(bytes);
        here.end += 1;
    }
    parts.push(here);
    parts
}

/// The first file of several in a folder.
fn first_part(folder: &Path) -> Option<String> {
    let names =
        std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| is_part_name(MODEL, name)).min()
}

/// The error of a folder whose weights are files of PyTorch: they are programs, which are not run here.
fn pickled(folder: &Path) -> Option<Error> {
    let names = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
    let name = names.into_iter().find(|name| folder.join(name).exists())?;
    Some(Error::field(
        &folder.join(name),
        "format",
        "that of torch.save, which is not read",
        format!(
            "{HF_WEIGHTS}; transformers writes it: AutoModelForCausalLM.from_pretrained(FOLDER)\
             .save_pretrained(NEW, safe_serialization=True), and AutoTokenizer in the same way"
        ),
    ))
}

fn missing(path: &Path) -> Error {
    Error::io(path, "open", std::io::ErrorKind::NotFound.into())
}

/// The text of the index: `places` are names of tensors and of their files.
pub(super) fn index_json(places: &[(String, String)], parameters: u64, bytes: u64) -> String {
    // sorted, as transformers writes it
    let map: std::collections::BTreeMap<_, _> = places.iter().map(|(name, file)| (name, file)).collect();
    let json = json!({
        "metadata": { "total_parameters": parameters, "total_size": bytes },
        "weight_map": map,
    });
    format!("{json:#}\n")
}

/// The open files of a folder, in which every tensor occurs once.
#[derive(Debug)]
pub struct WeightFiles<R = File> {
    files: Vec<SafeTensors<R>>,
    place: HashMap<String, usize>,
}

impl WeightFiles<File> {
    /// Opens the single file or, if it does not exist, those of the index.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let (one, index) = (folder.join(HF_WEIGHTS), folder.join(HF_INDEX));
        if one.exists() || !index.exists() {
            let part = if one.exists() { None } else { first_part(folder) };
            return match part {
                Some(part) => {
                    let expected = format!(
                        "in the folder, to say which tensor is in which file, because {part} is there"
                    );
                    Err(Error::field(&index, "file", "missing", expected))
                }
                None if !one.exists() => Err(pickled(folder).unwrap_or_else(|| missing(&one))),
                None => Ok(SafeTensors::open(&one)?.into()),
            };
        }
        let bytes = std::fs::read(&index).map_err(|source| Error::io(&index, "read", source))?;
        let places = parse_index(&bytes, &index)?;
        let names: std::collections::BTreeSet<&String> = places.values().collect();
        let mut files = Vec::new();
        for name in names {
            if !folder.join(name).is_file() {
                let expected = format!("in the folder, as {HF_INDEX} says; it may not have been copied");
                return Err(Error::field(&folder.join(name), "file", "missing", expected));
            }
            files.push(SafeTensors::open(&folder.join(name))?);
        }
        let found = Self::several(files)?;
        found.check_index(&places, &index)?;
        Ok(found)
    }
}

impl<R: Read + Seek> From<SafeTensors<R>> for WeightFiles<R> {
    fn from(file: SafeTensors<R>) -> Self {
        let place = file.header().entries().iter().map(|entry| (entry.name.clone(), 0)).collect();
        Self { files: vec![file], place }
    }
}

impl<R: Read + Seek> WeightFiles<R> {
    /// Rejects a tensor that is in two files, because it is ambiguous.
    fn several(files: Vec<SafeTensors<R>>) -> Result<Self> {
        let mut place: HashMap<String, usize> = HashMap::new();
        for (number, file) in files.iter().enumerate() {
            for entry in file.header().entries() {
                if let Some(other) = place.insert(entry.name.clone(), number) {
                    let found = format!("also in {}", files[other].path().display());
                    return Err(file.field(format!("tensor `{}`", entry.name), found, "in one file only"));
                }
            }
        }
        Ok(Self { files, place })
    }

    /// Every tensor must be where the index says, and in the index.
    fn check_index(&self, places: &HashMap<String, String>, index: &Path) -> Result<()> {
        for file in &self.files {
            let name = file.path().file_name().and_then(|name| name.to_str()).unwrap_or_default();
            for entry in file.header().entries() {
                if places.get(&entry.name).is_none_or(|place| place != name) {
                    let said = places.get(&entry.name).map_or("nowhere", |place| place);
                    let found = format!("in this file, but {HF_INDEX} says {said}");
                    return Err(file.field(format!("tensor `{}`", entry.name), found, "the same in both"));
                }
            }
        }
        match places.keys().filter(|name| !self.place.contains_key(*name)).min() {
            None => Ok(()),
            Some(name) => {
                let expected = format!("in {}, as the index says", places[name]);
                Err(Error::field(index, format!("tensor `{name}`"), "missing", expected))
            }
        }
    }

    /// The open files, sorted by name.
    pub(super) fn files(&self) -> &[SafeTensors<R>] {
        &self.files
    }

    /// All tensors of all files.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.files.iter().flat_map(|file| file.header().entries())
    }

    /// The tensor of that name.
    pub(super) fn get(&self, name: &str) -> Option<&Entry> {
        self.place.get(name).and_then(|&file| self.files[file].header().get(name))
    }

    /// The entry of a tensor that must be there.
    pub(super) fn entry(&self, name: &str, folder: &Path) -> Result<&Entry> {
        self.get(name).ok_or_else(|| {
            let (path, whose) = match &self.files[..] {
                [one] => (one.path(), "in the file"),
                _ => (folder, "in one of its files"),
            };
            Error::field(path, format!("tensor `{name}`"), "missing", whose)
        })
    }

    /// An error about a tensor, or about all of them.
    pub(super) fn wrong(&self, tensor: Option<&str>, field: &str, found: String, expected: String) -> Error {
        let file = tensor.and_then(|name| self.place.get(name)).copied().unwrap_or(0);
        self.files[file].field(field, found, expected)
    }

    /// Fills `out` with a tensor widened to f32.
    pub(super) fn read_f32(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let file = self.place.get(name).copied().unwrap_or(0);
        self.files[file].read_f32(name, out) // an unknown name is its error
    }
}

/// Names of tensors and of the files they are in.
pub fn parse_index(bytes: &[u8], path: &Path) -> Result<HashMap<String, String>> {
    let map: Map<String, Value> = serde_json::from_slice(without_bom(bytes))
        .map_err(|error| Error::field(path, "content", format!("not valid ({error})"), "a JSON object"))?;
    let expected = "an object: names of tensors and of files in this folder";
    let wrong = |found: &dyn std::fmt::Display| Error::field(path, "weight_map", found, expected);
    let places = map.get("weight_map").ok_or_else(|| wrong(&"missing"))?;
    let places = places.as_object().filter(|places| !places.is_empty()).ok_or_else(|| wrong(places))?;
    let mut checked = HashSet::new();
    let mut found = HashMap::new();
    for (name, file) in places {
        let file = file.as_str().ok_or_else(|| wrong(file))?;
        // only names of safetensors files in this folder: an untrusted index must not point elsewhere
        let plain = Path::new(file).file_name().is_some_and(|last| last == file);
        if checked.insert(file) && !(plain && file.ends_with(".safetensors") && !file.contains('\\')) {
            return Err(Error::field(path, format!("file of `{name}`"), format!("{file:?}"), expected));
        }
        found.insert(name.clone(), file.to_owned());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_known() {
        assert_eq!(part_name(MODEL, 2, 14), "model-00002-of-00014.safetensors");
        assert_eq!(part_name(MODEL, 1, 1), HF_WEIGHTS);
        assert!(is_part_name(MODEL, &part_name(MODEL, 1, 123_456)));
        for name in [
            "model.safetensors",
            "model-1-of-2.safetensors",
            "model-00001-of-00002.bin",
            "model-00001-of-.safetensors",
        ] {
            assert!(!is_part_name(MODEL, name), "{name}");
        }
    }

    #[test]
    fn weights_of_torch_save_are_sent_to_transformers() {
        for name in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join(name), "").unwrap();
            let error = WeightFiles::open(folder.path()).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}: format is that of torch.save")), "{error}");
            assert!(error.contains("save_pretrained(NEW, safe_serialization=True)"), "{error}");
            std::fs::write(folder.path().join(HF_WEIGHTS), "").unwrap();
            let error = WeightFiles::open(folder.path()).unwrap_err().to_string();
            assert!(!error.contains("torch.save"), "{error}");
        }
    }

    #[test]
    fn a_wrong_index_is_named() {
        let refusal = |text: &str| parse_index(text.as_bytes(), Path::new("i")).unwrap_err().to_string();
        let wants = "expected an object: names of tensors and of files in this folder";
        assert!(refusal("[").starts_with("i: content is not valid"));
        assert_eq!(refusal("{}"), format!("i: weight_map is missing, {wants}"));
        assert_eq!(refusal(r#"{"weight_map":{}}"#), format!("i: weight_map is {{}}, {wants}"));
        assert_eq!(refusal(r#"{"weight_map":{"a":3}}"#), format!("i: weight_map is 3, {wants}"));
        for file in ["../a.safetensors", "/a.safetensors", "b\\a.safetensors", "pytorch_model.bin", "..", ""]
        {
            let text = refusal(&json!({"weight_map": {"a": file}}).to_string());
            assert_eq!(text, format!("i: file of `a` is {file:?}, {wants}"));
        }
        let good =
            parse_index("\u{feff}{\"weight_map\":{\"a\":\"b.safetensors\"}}".as_bytes(), Path::new("i"));
        assert_eq!(good.unwrap()["a"], "b.safetensors");
    }
}
