//! The JSON of a header, written and parsed. The parser is strict: it keeps the order, and rejects duplicates, unknown
//! fields, gaps and overlaps.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value, json};

use super::header::{Dtype, Entry, Header, TensorInfo, byte_len};
use crate::Error;

/// The key of the metadata beside the tensors' names.
const METADATA: &str = "__metadata__";

/// What is wrong with a header.
#[derive(Debug)]
pub(super) struct Wrong {
    pub field: String,
    pub found: String,
    pub expected: String,
}

impl Wrong {
    fn new(field: impl Into<String>, found: impl ToString, expected: impl ToString) -> Self {
        Self { field: field.into(), found: found.to_string(), expected: expected.to_string() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A JSON object as pairs, because the map of serde_json silently keeps only the last of two equal keys.
struct Pairs<V>(Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Pairs<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect<V>(std::marker::PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Collect<V> {
            type Value = Pairs<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<V>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Collect(std::marker::PhantomData))
    }
}

/// The pairs of the header: the metadata and the tensors.
struct RawHeader {
    metadata: Option<Vec<(String, String)>>,
    tensors: Vec<(String, RawEntry)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { metadata: None, tensors: Vec::new() };
                while let Some(key) = map.next_key::<String>()? {
                    if key != METADATA {
                        header.tensors.push((key, map.next_value()?));
                    } else if header.metadata.is_some() {
                        return Err(serde::de::Error::custom("__metadata__ is given twice"));
                    } else {
                        header.metadata = Some(map.next_value::<Pairs<String>>()?.0);
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

impl Header {
    /// A header for these tensors, in this order.
    pub fn build(metadata: &[(String, String)], tensors: &[TensorInfo]) -> crate::Result<Self> {
        let mut map = Map::new();
        if !metadata.is_empty() {
            let pairs: Map<String, Value> =
                metadata.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))).collect();
            map.insert(METADATA.into(), pairs.into());
        }
        let mut end = 0u64;
        for tensor in tensors {
            let begin = end;
            let bytes = byte_len(tensor.dtype, &tensor.shape).and_then(|bytes| begin.checked_add(bytes));
            end = bytes.ok_or_else(|| {
                let field = format!("shape of tensor `{}`", tensor.name);
                Error::input(field, format!("{:?}", tensor.shape), "a file of less than 2^64 bytes")
            })?;
            let entry =
                json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [begin, end]});
            if map.insert(tensor.name.clone(), entry).is_some() {
                return Err(Error::input(format!("tensor `{}`", tensor.name), "given twice", "once"));
            }
        }
        let mut raw = Value::Object(map).to_string().into_bytes();
        raw.resize(raw.len().next_multiple_of(8), b' ');
        Self::parse(raw, end).map_err(|wrong| Error::input(wrong.field, wrong.found, wrong.expected))
    }

    /// Parses the JSON of a header before `data_len` bytes of data.
    pub(super) fn parse(raw: Vec<u8>, data_len: u64) -> Result<Self, Wrong> {
        let json: RawHeader = serde_json::from_slice(&raw)
            .map_err(|error| Wrong::new("header", format!("not valid ({error})"), "safetensors JSON"))?;
        let metadata = json.metadata.unwrap_or_default();
        let mut keys: Vec<_> = metadata.iter().map(|pair| &pair.0).collect();
        keys.sort();
        if let Some(pair) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Wrong::new(format!("metadata `{}`", pair[0]), "given twice", "once"));
        }
        let mut entries = Vec::with_capacity(json.tensors.len());
        let mut by_name = HashMap::with_capacity(json.tensors.len());
        for (name, raw) in json.tensors {
            if by_name.insert(name.clone(), entries.len()).is_some() {
                return Err(Wrong::new(format!("tensor `{name}`"), "given twice", "once"));
            }
            entries.push(check_entry(name, raw)?);
        }
        let mut file_order: Vec<usize> = (0..entries.len()).collect();
        file_order.sort_by_key(|&index| (entries[index].begin, entries[index].end));
        check_coverage(file_order.iter().map(|&index| &entries[index]), data_len)?;
        Ok(Self { raw, metadata, entries, by_name, file_order })
    }
}

fn check_entry(name: String, raw: RawEntry) -> Result<Entry, Wrong> {
    let Some(dtype) = Dtype::from_name(&raw.dtype) else {
        return Err(Wrong::new(format!("dtype of `{name}`"), raw.dtype, Dtype::names()));
    };
    let dims = raw.shape.iter().map(|&dim| usize::try_from(dim).ok());
    let shape: Option<Vec<usize>> = dims.collect();
    let bytes = shape.as_deref().and_then(|shape| byte_len(dtype, shape));
    let (Some(shape), Some(bytes)) = (shape, bytes) else {
        let found = format!("{:?}", raw.shape);
        return Err(Wrong::new(format!("shape of `{name}`"), found, "fewer than 2^64 bytes"));
    };
    let (begin, end) = raw.data_offsets;
    if end.checked_sub(begin) != Some(bytes) {
        let expected = format!("{bytes} bytes apart for {} {shape:?}", dtype.name());
        return Err(Wrong::new(format!("data_offsets of `{name}`"), format!("[{begin}, {end}]"), expected));
    }
    Ok(Entry { name, dtype, shape, begin, end })
}

/// The tensors, in file order, must fill the data exactly.
fn check_coverage<'a>(entries: impl Iterator<Item = &'a Entry>, data_len: u64) -> Result<(), Wrong> {
    let mut end = 0;
    for entry in entries {
        if entry.begin != end {
            let field = format!("data_offsets of `{}`", entry.name);
            let found = format!("[{}, {}]", entry.begin, entry.end);
            return Err(Wrong::new(field, found, format!("to begin at {end}, where the tensor before ends")));
        }
        end = entry.end;
    }
    if end != data_len {
        return Err(Wrong::new("size of the data", format!("{data_len} bytes"), format!("{end} bytes")));
    }
    Ok(())
}
