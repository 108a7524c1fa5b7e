//! JSON lines: the reader cuts between lines, whoever works on a unit takes the field out of each.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, Visitor};

use super::raw::Raw;
use super::{Content, ReadSettings};
use crate::{Error, Result};

/// The most bytes of a line: it is held in memory.
const LONGEST: usize = 1 << 31;

/// Cuts a file between lines.
pub struct Lines {
    raw: Raw,
    /// What was read after the last line of the unit before.
    rest: Vec<u8>,
    next_line: u64,
}

impl Lines {
    pub fn new(raw: Raw) -> Self {
        Self { raw, rest: Vec::new(), next_line: 1 }
    }

    pub fn raw(&self) -> &Raw {
        &self.raw
    }

    pub fn into_raw(self) -> Raw {
        self.raw
    }

    /// The next lines, at least `unit_bytes` of them; `None` at the end.
    pub fn next(&mut self, settings: &ReadSettings, path: &std::path::Path) -> Result<Option<Content>> {
        let mut bytes = std::mem::take(&mut self.rest);
        loop {
            let before = bytes.len();
            let count = self.raw.fill(settings.unit_bytes, &mut bytes)?;
            let line_end = memchr::memrchr(b'\n', &bytes[before..]).map(|at| before + at + 1);
            match line_end {
                Some(end) if count == settings.unit_bytes => {
                    self.rest = bytes.split_off(end);
                    break;
                }
                _ if count < settings.unit_bytes => break, // the end of the file ends the last line
                _ if bytes.len() > LONGEST => {
                    let problem = format!("line {} is longer than {LONGEST} bytes", self.next_line);
                    return Err(Error::input(path, problem));
                }
                _ => {}
            }
        }
        if bytes.is_empty() {
            return Ok(None);
        }
        let first = self.next_line;
        self.next_line += memchr::memchr_iter(b'\n', &bytes).count() as u64;
        Ok(Some(Content::Lines { first, bytes }))
    }
}

/// What a line holds.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// A line of nothing but white space.
    Blank,
    /// The text of the field, and the number of sequences that are not UTF-8 and were replaced by U+FFFD.
    Text(Cow<'a, str>, u64),
    /// What is wrong, as the end of a sentence.
    Bad(String),
}

/// The lines of a unit with their numbers.
pub fn numbered(first: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let lines = bytes.strip_suffix(b"\n").unwrap_or(bytes).split(|&byte| byte == b'\n');
    (first..).zip(lines)
}

/// Takes the field out of one line.
pub fn parse<'a>(line: &'a [u8], field: &str) -> Line<'a> {
    let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
    if line.trim_ascii().is_empty() {
        return Line::Blank;
    }
    match std::str::from_utf8(line) {
        Ok(line) => match take(line, field) {
            Ok(text) => Line::Text(text, 0),
            Err(problem) => Line::Bad(problem),
        },
        Err(_) => {
            let broken = line.utf8_chunks().filter(|chunk| !chunk.invalid().is_empty()).count() as u64;
            match take(&String::from_utf8_lossy(line), field) {
                Ok(text) => Line::Text(text.into_owned().into(), broken),
                Err(problem) => Line::Bad(problem),
            }
        }
    }
}

fn take<'a>(line: &'a str, field: &str) -> Result<Cow<'a, str>, String> {
    let path: Vec<&str> = field.split('.').collect();
    let mut json = serde_json::Deserializer::from_str(line);
    let found = Field { path: &path }.deserialize(&mut json);
    let found = found.and_then(|found| json.end().map(|()| found));
    let shortened = |error: serde_json::Error| {
        // "... at line 1 column 7": the line is known better
        let text = error.to_string();
        text.split_once(" at line ")
            .map_or(text.clone(), |(what, _)| format!("{what} at column {}", error.column()))
    };
    match found {
        Ok(Some(Found::Text(text))) => Ok(text),
        Ok(Some(Found::Other(kind))) => Err(format!("has {kind} in the field `{field}`, expected a string")),
        Ok(None) => Err(format!("has no field `{field}`; --field names another")),
        Err(error) if error.is_data() => Err(format!("is not a JSON object ({})", shortened(error))),
        Err(error) => Err(format!("is not JSON ({})", shortened(error))),
    }
}

enum Found<'a> {
    Text(Cow<'a, str>),
    /// What the field holds instead of a text.
    Other(&'static str),
}

/// Finds a field in an object without building the rest of it.
struct Field<'p> {
    path: &'p [&'p str],
}

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<Found<'de>>;

    fn deserialize<D: de::Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        if self.path.is_empty() { json.deserialize_any(Leaf).map(Some) } else { json.deserialize_map(self) }
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<Found<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (Some((name, inner)), mut found) = (self.path.split_first(), None) else { return Ok(None) };
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key == *name {
                found = map.next_value_seed(Field { path: inner })?; // of equal names the last counts
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// The value of the field.
struct Leaf;

macro_rules! other {
    ($($visit:ident($type:ty) $kind:literal)*) => {
        $(fn $visit<E>(self, _: $type) -> Result<Self::Value, E> { Ok(Found::Other($kind)) })*
    };
}

impl<'de> Visitor<'de> for Leaf {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Found::Text(text.into()))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Found::Text(text.to_owned().into()))
    }

    other! { visit_bool(bool) "a truth value" visit_i64(i64) "a number" visit_u64(u64) "a number" visit_f64(f64) "a number" }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Found::Other("null"))
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Found::Other("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Found::Other("an object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(line: &str, field: &str) -> String {
        match parse(line.as_bytes(), field) {
            Line::Text(text, 0) => text.into_owned(),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn bad(line: &str) -> String {
        match parse(line.as_bytes(), "text") {
            Line::Bad(problem) => problem,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn the_field_is_found() {
        assert_eq!(text(r#"{"id": [1, {"a": null}], "text": "a\nb\u00e9"}"#, "text"), "a\nbé");
        assert_eq!(text("{\"text\": \"plain\"}\r", "text"), "plain");
        assert_eq!(text(r#"{"a": {"b": "in"}, "b": "out"}"#, "a.b"), "in");
        assert_eq!(text(r#"{"text": "first", "text": "last"}"#, "text"), "last");
        assert_eq!(text("\u{feff}{\"text\":\"bom\"}", "text"), "bom");
        assert_eq!(parse(b" \t\r", "text"), Line::Blank);
        assert_eq!(parse(b"{\"text\":\"a\xffb\"}", "text"), Line::Text("a\u{fffd}b".into(), 1));
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert_eq!(bad("{\"text\": \"a"), "is not JSON (EOF while parsing a string at column 11)");
        assert_eq!(bad("{\"text\": \"a\"} x"), "is not JSON (trailing characters at column 15)");
        assert!(bad("[1]").starts_with("is not a JSON object (invalid type: sequence, expected an object"));
        assert!(bad("plain text").starts_with("is not JSON (expected value"));
        assert_eq!(bad("{\"content\": \"a\"}"), "has no field `text`; --field names another");
        assert_eq!(bad("{\"text\": 3}"), "has a number in the field `text`, expected a string");
        assert_eq!(bad("{\"text\": null}"), "has null in the field `text`, expected a string");
        assert_eq!(bad("{\"text\": [\"a\"]}"), "has a list in the field `text`, expected a string");
        assert!(bad(r#"{"text": "\ud800"}"#).starts_with("is not JSON"));
    }
}
