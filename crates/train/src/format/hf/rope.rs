//! RoPE in a `config.json`: `rope_parameters`, as transformers writes it since its version 5, or `rope_theta` and `rope_scaling`,
//! as it did before.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::one_of;
use crate::model::{MoeConfig, RopeType};
use crate::{Error, Result};

/// The tables that a file can have; if both are there, transformers uses the first.
const TABLES: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// What a table can say apart from its type, and which types need it.
const NUMBERS: [(&str, &[RopeType]); 4] = [
    ("factor", &[RopeType::Linear, RopeType::Llama3]),
    ("low_freq_factor", &[RopeType::Llama3]),
    ("high_freq_factor", &[RopeType::Llama3]),
    ("original_max_position_embeddings", &[RopeType::Llama3]),
];

/// One table, checked.
struct Table<'a> {
    kind: RopeType,
    values: &'a Map<String, Value>,
}

/// Finds the base and the scaling of RoPE in any of the places a file can have them, and leaves them under the keys that
/// our fields have in their table.
pub(super) fn prepare(map: &mut Map<String, Value>, path: &Path) -> Result<()> {
    let given = map.clone();
    let mut tables = TABLES.iter().map(|key| table(&given, path, key));
    let (first, second) = (tables.next().transpose()?.flatten(), tables.next().transpose()?.flatten());
    let found = first.or(second);
    let kind = found.as_ref().map_or(RopeType::Default, |table| table.kind);
    if let Some(theta) = found.as_ref().and_then(|table| table.values.get("rope_theta")) {
        map.insert("rope_theta".into(), theta.clone());
    }
    let number = |key: &str| found.as_ref().and_then(|table| table.values.get(key)).cloned();
    map.insert("rope_parameters.rope_type".into(), kind.name().into());
    let defaults = [json!(1.0), json!(1.0), json!(4.0), json!(8192)];
    for ((key, _), default) in NUMBERS.into_iter().zip(defaults) {
        map.insert(format!("rope_parameters.{key}"), number(key).unwrap_or(default));
    }
    Ok(())
}

/// Refuses a file whose places say different things of RoPE: versions of transformers do not look in the same one first. The
/// map is that of the file, without what is filled in where it is absent.
pub(super) fn check_agreement(map: &Map<String, Value>, path: &Path) -> Result<()> {
    let places = TABLES.map(|key| (format!("{key}."), map.get(key).and_then(Value::as_object)));
    let places = [(String::new(), Some(map))].into_iter().chain(places);
    let mut said: Vec<(&str, String, &Value)> = Vec::new();
    for (place, table) in places.filter_map(|(place, table)| Some((place, table?))) {
        let in_table = !place.is_empty();
        let names = NUMBERS.iter().map(|(name, _)| *name).chain(["rope_type"]).filter(|_| in_table);
        for name in names.chain(["rope_theta"]) {
            let other = table.get("type").filter(|_| name == "rope_type");
            let Some(value) = table.get(name).or(other).filter(|value| !value.is_null()) else { continue };
            let same = |other: &Value| {
                other == value || other.as_f64().is_some() && other.as_f64() == value.as_f64()
            };
            match said.iter().find(|(earlier, ..)| *earlier == name) {
                None => said.push((name, format!("{place}{name}"), value)),
                Some((.., other)) if same(other) => {}
                Some((_, first, other)) => {
                    return Err(Error::field(
                        path,
                        format!("{place}{name}"),
                        value,
                        format!("{other}, as {first} says; keep the one that the model was trained with"),
                    ));
                }
            }
        }
    }
    Ok(())
}

/// The table of that key; `None` without one. Other kinds of RoPE have other angles and are errors.
fn table<'a>(map: &'a Map<String, Value>, path: &Path, key: &str) -> Result<Option<Table<'a>>> {
    let Some(value) = map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let wrong = |name: &str, found: &dyn std::fmt::Display, expected: String| {
        Err(Error::field(path, format!("{key}.{name}"), found, expected))
    };
    let Some(values) = value.as_object() else {
        return Err(Error::field(path, key, value, "null or an object with a \"rope_type\""));
    };
    let said = values.get("rope_type").or(values.get("type"));
    let kind = match said {
        None => RopeType::Default,
        Some(said) => match RopeType::ALL.iter().find(|kind| said == kind.name()) {
            Some(kind) => *kind,
            None => {
                let known = RopeType::ALL.iter().map(|kind| format!("{:?}", kind.name()));
                return wrong("rope_type", said, one_of(known));
            }
        },
    };
    for (name, set) in values {
        let needs = NUMBERS.iter().find(|(number, _)| number == name);
        let expected = match (name.as_str(), needs) {
            ("rope_type" | "type", _) if Some(set) == said => None,
            ("rope_theta", _) => (!set.is_number()).then(|| "a number".to_owned()),
            ("partial_rotary_factor", _) => {
                (!set.is_null() && set.as_f64() != Some(1.0)).then(|| "null or 1".to_owned())
            }
            (_, Some((_, kinds))) if kinds.contains(&kind) => {
                (!set.is_number()).then(|| "a number".to_owned())
            }
            _ => Some(format!("no such field with the type {:?}", kind.name())),
        };
        if let Some(expected) = expected {
            return wrong(name, set, expected);
        }
    }
    for (name, kinds) in NUMBERS {
        if kinds.contains(&kind) && !values.contains_key(name) {
            return wrong(name, &"missing", format!("a number with the type {:?}", kind.name()));
        }
    }
    Ok(Some(Table { kind, values }))
}

/// Puts RoPE into a file, for all versions of transformers. The NTK-aware alpha is included in the base.
pub(super) fn put(json: &mut Map<String, Value>, config: &MoeConfig) {
    let (theta, kind) = (config.rope_theta(), config.rope_type);
    let mut table = Map::new();
    table.insert("rope_type".into(), kind.name().into());
    let numbers = [
        json!(config.rope_factor),
        json!(config.rope_low),
        json!(config.rope_high),
        json!(config.rope_original),
    ];
    for ((name, kinds), number) in NUMBERS.into_iter().zip(numbers) {
        if kinds.contains(&kind) {
            table.insert(name.into(), number);
        }
    }
    // where versions before 5 look
    json.insert("rope_theta".into(), json!(theta));
    if kind != RopeType::Default {
        json.insert("rope_scaling".into(), table.clone().into());
    }
    table.insert("rope_theta".into(), json!(theta));
    json.insert("rope_parameters".into(), table.into());
}
