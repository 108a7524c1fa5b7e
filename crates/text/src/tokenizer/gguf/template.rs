//! The chat template, where transformers keeps it.

use ironhorse_train::format::gguf::Value as Meta;
use ironhorse_train::format::tokenizer::NamedFiles;
use serde_json::Value;

use super::{file, parsed};

const KEY: &str = "tokenizer.chat_template";

/// The keys of the template, or of several with names, of which one is the default.
pub fn keys(files: &NamedFiles, config: &Value) -> Result<Vec<(String, Meta)>, String> {
    if let Some(bytes) = file(files, "chat_template.jinja") {
        let text =
            std::str::from_utf8(bytes).map_err(|_| "its chat_template.jinja is not UTF-8".to_owned())?;
        return Ok(vec![(KEY.to_owned(), text.into())]);
    }
    let alone = file(files, "chat_template.json").map(parsed).transpose();
    let alone = alone.map_err(|problem| format!("its chat_template.json {problem}"))?;
    match alone.as_ref().map_or(&config["chat_template"], |file| &file["chat_template"]) {
        Value::Null => Ok(Vec::new()),
        Value::String(text) => Ok(vec![(KEY.to_owned(), text.as_str().into())]),
        Value::Array(several) => several.iter().map(named).collect(),
        other => Err(format!("its chat_template is {other}, expected a text or a list of them with names")),
    }
}

fn named(entry: &Value) -> Result<(String, Meta), String> {
    match (entry["name"].as_str(), entry["template"].as_str()) {
        (Some("default"), Some(text)) => Ok((KEY.to_owned(), text.into())),
        (Some(name), Some(text)) => Ok((format!("{KEY}.{name}"), text.into())),
        _ => Err(format!("a chat_template is {entry}, expected a name and a template")),
    }
}
