//! JSON in which a key may occur only once in an object: of two values a reader would take one without a word.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Reads a value. An error of the category `Data` is about a key that occurs twice, or about what JSON cannot hold.
pub fn parse_json(bytes: &[u8]) -> serde_json::Result<Value> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = Once.deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// A value whose keys occur once.
struct Once;

impl<'de> DeserializeSeed<'de> for Once {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Once {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Self)? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = items.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("the key `{key}` twice in one object")));
            }
            let value = items.next_value_seed(Self)?;
            map.insert(key, value);
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_that_of_the_usual_reader() {
        let text = r#" {"a": [1, -2, 3.5, 1e300, 18446744073709551615, null, true, "é\n"], "b": {"a": {}}} "#;
        assert_eq!(parse_json(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for wrong in ["", "{", "{} x", "[1,]", "\"\\q\"", "nul"] {
            let usual = serde_json::from_str::<Value>(wrong).unwrap_err();
            assert_eq!(parse_json(wrong.as_bytes()).unwrap_err().to_string(), usual.to_string(), "{wrong}");
        }
    }

    #[test]
    fn a_key_that_occurs_twice_is_named() {
        let error = parse_json(br#"[{"a": {"b": 1, "c": 2, "b": 1}}]"#).unwrap_err();
        assert!(error.to_string().starts_with("the key `b` twice in one object"), "{error}");
        assert_eq!(error.classify(), serde_json::error::Category::Data);
    }
}
