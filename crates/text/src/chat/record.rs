//! One line of chat data.

use ironhorse_train::format::parse_json;
use serde_json::error::Category;
use serde_json::{Map, Value};

use super::generation::{CLOSE, OPEN};

/// What a line holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// `{"messages": [{"role", "content"}, ...]}`, also `{"prompt": [...], "completion": [...]}` with lists of messages.
    Messages(Conversation),
    /// `{"prompt", "completion"}`: texts that belong together as they are.
    Completion {
        /// What is given.
        prompt: String,
        /// What is to be written.
        completion: String,
    },
    /// `{"text"}`
    Text(String),
}

/// Messages and what comes with them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The messages.
    pub messages: Vec<Value>,
    /// How many of them are the prompt of `{"prompt": [...], "completion": [...]}`: these are not learned.
    pub given: usize,
    /// The other fields, of which templates see `tools`, `documents` and what is in `chat_template_kwargs`.
    pub fields: Map<String, Value>,
}

const EXPECTED: &str = r#"expected {"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}"#;

/// The fields that make a line a sample.
const FORMS: [&str; 4] = ["messages", "prompt", "completion", "text"];

/// Names under which a message's reasoning is found; templates know the first, some the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl Record {
    /// Reads a line. An error is the end of a sentence that begins with the line.
    pub fn parse(line: &str) -> Result<Self, String> {
        let mut fields = object_of(line, EXPECTED)?;
        // null is in columns that a data set does not use
        fields.retain(|name, value| !FORMS.contains(&name.as_str()) || !value.is_null());
        refuse_two_forms(&fields)?;
        if let Some(messages) = fields.remove("messages") {
            let messages = messages_of("messages", messages)?;
            return Ok(Self::Messages(Conversation { messages, given: 0, fields }));
        }
        match (fields.remove("prompt"), fields.remove("completion")) {
            (Some(Value::String(prompt)), Some(Value::String(completion))) => {
                return Ok(Self::Completion { prompt, completion });
            }
            (Some(prompt @ Value::Array(_)), Some(completion @ Value::Array(_))) => {
                let mut messages = messages_of("prompt", prompt)?;
                let given = messages.len();
                messages.extend(messages_of("completion", completion)?);
                return Ok(Self::Messages(Conversation { messages, given, fields }));
            }
            (Some(prompt), Some(completion)) => {
                let found = format!("{} and {}", kind(&prompt), kind(&completion));
                return Err(format!(
                    "has {found} as `prompt` and `completion`, expected two texts or two lists of messages"
                ));
            }
            (Some(_), None) => return Err(format!("has `prompt` but no `completion`, {EXPECTED}")),
            (None, Some(_)) => return Err(format!("has `completion` but no `prompt`, {EXPECTED}")),
            (None, None) => {}
        }
        match fields.remove("text") {
            Some(Value::String(text)) => Ok(Self::Text(text)),
            Some(other) => Err(format!("has {} as `text`, expected a text", kind(&other))),
            None => Err(format!("has none of the fields that are known, {EXPECTED}")),
        }
    }
}

/// Refuses a line that is a sample in two ways. Data sets repeat a message as a text beside the messages, which is fine.
fn refuse_two_forms(fields: &Map<String, Value>) -> Result<(), String> {
    let messages = fields.get("messages").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let repeats = |value: &Value| messages.iter().any(|message| message.get("content") == Some(value));
    let found = FORMS.iter().filter(|name| fields.get(**name).is_some_and(|value| !repeats(value)));
    match found.collect::<Vec<_>>()[..] {
        [] | [_] | [&"prompt", &"completion"] => Ok(()),
        [first, second, ..] => {
            let second = if (*first, *second) == ("prompt", "completion") { &"text" } else { second };
            Err(format!("has both `{first}` and `{second}`, {EXPECTED}; remove the one that is not meant"))
        }
    }
}

/// The fields of a line.
pub(super) fn object_of(line: &str, expected: &str) -> Result<Map<String, Value>, String> {
    let value = parse_json(line.as_bytes()).map_err(|error| {
        let text = error.to_string();
        let what = text.split_once(" at line ").map_or(text.as_str(), |(what, _)| what);
        match error.classify() {
            Category::Data => format!("has {what} (column {}), expected it once", error.column()),
            _ => format!("is not JSON ({what} at column {})", error.column()),
        }
    })?;
    if holds_mark(&value) {
        let code = u32::from(OPEN);
        return Err(format!(
            "has the character U+{code:X} or U+{:X}, which are reserved; remove them",
            code + 1
        ));
    }
    match value {
        Value::Object(fields) => Ok(fields),
        value => Err(format!("is {}, {expected}", kind(&value))),
    }
}

/// The messages of the field of this name, checked.
pub(super) fn messages_of(name: &str, value: Value) -> Result<Vec<Value>, String> {
    let Value::Array(mut messages) = value else {
        return Err(format!("has {} as `{name}`, expected a list of messages", kind(&value)));
    };
    if messages.is_empty() {
        return Err(format!("has no message in `{name}`, expected at least one"));
    }
    for (at, message) in messages.iter_mut().enumerate() {
        check(message)
            .map_err(|problem| format!("has a message in `{name}`, number {}, that {problem}", at + 1))?;
    }
    Ok(messages)
}

fn check(message: &mut Value) -> Result<(), String> {
    let Value::Object(message) = message else {
        return Err(format!(r#"is {}, expected {{"role": ..., "content": ...}}"#, kind(message)));
    };
    match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => {}
        Some(role) => return Err(format!("has {} as `role`, expected a name such as user", kind(role))),
        None => return Err("has no `role`, expected one such as user".into()),
    }
    match message.get("content") {
        Some(Value::String(_) | Value::Array(_)) => {}
        None | Some(Value::Null) if message.contains_key("tool_calls") => {}
        Some(content) => return Err(format!("has {} as `content`, expected a text", kind(content))),
        None => return Err("has no `content`, expected a text".into()),
    }
    let reasoning =
        REASONING.iter().find_map(|name| message.get(*name).filter(|value| !value.is_null()).cloned());
    if let Some(reasoning) = reasoning {
        message.entry(REASONING[1]).or_insert_with(|| reasoning.clone());
        message.insert(REASONING[0].into(), reasoning);
    }
    Ok(())
}

/// Whether a message is the assistant's.
pub fn is_assistant(message: &Value) -> bool {
    message["role"] == "assistant"
}

const MARKS: [char; 2] = [OPEN, CLOSE];

fn holds_mark(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains(MARKS),
        Value::Array(list) => list.iter().any(holds_mark),
        Value::Object(fields) => fields.iter().any(|(name, value)| name.contains(MARKS) || holds_mark(value)),
        _ => false,
    }
}

/// What a value is, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(text) if text.is_empty() => "an empty text",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_three_forms() {
        let messages = json!([{"role": "user", "content": "a"}]);
        let read = |value: Value| Record::parse(&value.to_string()).unwrap();
        let Record::Messages(found) = read(json!({"messages": messages, "tools": [1]})) else {
            panic!("not messages")
        };
        assert_eq!((Value::from(found.messages), &found.fields["tools"]), (messages, &json!([1])));
        let (prompt, completion) = ("p".to_owned(), "c".to_owned());
        assert_eq!(
            read(json!({"prompt": "p", "completion": "c"})),
            Record::Completion { prompt, completion }
        );
        assert_eq!(read(json!({"text": "t", "id": 3})), Record::Text("t".into()));
        let parts = json!({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]});
        assert!(
            matches!(read(parts), Record::Messages(found) if (found.messages.len(), found.given) == (2, 1))
        );
    }

    #[test]
    fn reasoning_has_all_its_names() {
        let line = r#"{"messages": [{"role": "assistant", "content": "a", "reasoning": "r"}]}"#;
        let Record::Messages(found) = Record::parse(line).unwrap() else { panic!("not messages") };
        let message = &found.messages[0];
        assert_eq!([&message["reasoning_content"], &message["thinking"]], ["r", "r"]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (line, want) in [
            ("{", "is not JSON (EOF while parsing an object at column 1)"),
            ("[1]", "is a list, expected {\"messages\""),
            ("{}", "has none of the fields that are known"),
            (r#"{"messages": "a"}"#, "has a text as `messages`, expected a list of messages"),
            (r#"{"messages": []}"#, "has no message in `messages`"),
            (r#"{"messages": [3]}"#, "number 1, that is a number"),
            (
                r#"{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}"#,
                "number 2, that has no `role`",
            ),
            (r#"{"messages": [{"role": 3, "content": "a"}]}"#, "that has a number as `role`"),
            (r#"{"messages": [{"role": "user"}]}"#, "that has no `content`"),
            (r#"{"messages": [{"role": "user", "content": null}]}"#, "that has null as `content`"),
            (r#"{"prompt": "a"}"#, "has `prompt` but no `completion`"),
            (r#"{"completion": "a"}"#, "has `completion` but no `prompt`"),
            (r#"{"prompt": "a", "completion": []}"#, "has a text and a list as `prompt` and `completion`"),
            (r#"{"text": ["a"]}"#, "has a list as `text`"),
            (
                r#"{"messages": [{"role": "user", "role": "user"}]}"#,
                "has the key `role` twice in one object (column 37)",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}"#,
                "has both `messages` and `prompt`, expected {",
            ),
            (r#"{"messages": [{"role": "user", "content": "a"}], "completion": "b"}"#, "and `completion`"),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "text": "b"}"#,
                "both `messages` and `text`",
            ),
            (r#"{"prompt": "a", "completion": "b", "text": "ab"}"#, "has both `prompt` and `text`"),
            (r#"{"text": "\ufdd0"}"#, "has the character U+FDD0 or U+FDD1"),
            (r#"{"text": "a", "tools": [{"\ufdd1": 1}]}"#, "has the character U+FDD0 or U+FDD1"),
        ] {
            let problem = Record::parse(line).unwrap_err();
            assert!(problem.contains(want), "{line}: {problem}");
        }
        // the question again beside the messages, and columns that are not used
        for more in [r#""prompt": "a""#, r#""prompt": null, "completion": null, "text": null"#] {
            let line = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}], {more}}}"#);
            assert!(matches!(Record::parse(&line), Ok(Record::Messages(_))), "{more}");
        }
        assert!(Record::parse(r#"{"messages": [{"role": "assistant", "tool_calls": []}]}"#).is_ok());
    }
}
