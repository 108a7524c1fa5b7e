//! Multiple-choice questions from JSON lines: HellaSwag's own file, and any other with a context, choices and a label.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::{Map, Value};

use crate::format::multiple_choice::{AnswerTokens, Example};
use crate::{Error, Result};

/// Turns a text into tokens.
pub type Encode<'a> = &'a dyn Fn(&str) -> Result<Vec<u32>>;

/// How a prompt is made of HellaSwag's fields. The accuracies of the two differ by about a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptForm {
    /// As llm.c: `ctx` as it is; an answer is a space and its text, and both are cut into tokens by themselves.
    Plain,
    /// As lm-evaluation-harness: the label of the activity, a colon, the context, with the marks of WikiHow removed; context
    /// and answer are cut into tokens together.
    Harness,
}

const CONTEXTS: [&str; 6] = ["ctx", "query", "question", "context", "prompt", "text"];
const CHOICES: [&str; 3] = ["endings", "choices", "options"];
const LABELS: [&str; 5] = ["label", "gold", "answer", "answerKey", "target"];

/// Reads all questions of a file. `eot` stands before a question that has no context.
pub fn read_jsonl(path: &Path, form: PromptForm, eot: u32, encode: Encode<'_>) -> Result<Vec<Example>> {
    let file = File::open(path).map_err(|source| Error::io(path, "open", source))?;
    read_questions(BufReader::new(file), path, (form, eot), encode)
}

/// The same with the bytes of the file `path` given.
pub fn read_questions(
    file: impl BufRead,
    path: &Path,
    (form, eot): (PromptForm, u32),
    encode: Encode<'_>,
) -> Result<Vec<Example>> {
    let mut examples = Vec::new();
    for (at, line) in file.split(b'\n').enumerate() {
        let line = line.map_err(|source| Error::io(path, "read", source))?;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let in_line = |error: Error| error.in_line(path, at + 1);
        let object: Map<String, Value> = serde_json::from_slice(&line)
            .map_err(|error| in_line(Error::input("the line", start_of(error), "a JSON object")))?;
        examples.push(question(&object).and_then(|q| q.example(form, eot, encode)).map_err(in_line)?);
    }
    if examples.is_empty() {
        return Err(Error::field(path, "number of questions", 0, "at least 1, one JSON object in a line"));
    }
    Ok(examples)
}

/// A question as text.
struct Question<'a> {
    object: &'a Map<String, Value>,
    context: &'a str,
    choices: Vec<&'a str>,
    label: usize,
}

fn question(object: &Map<String, Value>) -> Result<Question<'_>> {
    let find = |names: &[&'static str]| names.iter().find_map(|name| Some((*name, object.get(*name)?)));
    let missing =
        |what: &str, names: &[&str]| Error::input(what, "not there", format!("one of {}", names.join(", ")));
    let (name, context) = find(&CONTEXTS).ok_or_else(|| missing("the context", &CONTEXTS))?;
    let context = context.as_str().ok_or_else(|| Error::input(name, start_of(context), "a text"))?;
    let (name, list) = find(&CHOICES).ok_or_else(|| missing("the list of choices", &CHOICES))?;
    // ARC has {"text": [...], "label": [...]}
    let texts = list.get("text").unwrap_or(list).as_array();
    let choices: Option<Vec<&str>> = texts.and_then(|texts| texts.iter().map(Value::as_str).collect());
    let choices = choices.filter(|choices| choices.len() > 1);
    let choices = choices.ok_or_else(|| Error::input(name, start_of(list), "a list of at least 2 texts"))?;
    let (name, label) = find(&LABELS).ok_or_else(|| missing("the right choice", &LABELS))?;
    let letters = list.get("label").and_then(Value::as_array);
    let label = index_of(label, &choices, letters).ok_or_else(|| {
        let expected = format!("a number from 0 to {}, a letter, or one of the choices", choices.len() - 1);
        Error::input(name, start_of(label), expected)
    })?;
    Ok(Question { object, context, choices, label })
}

/// What was found, in an error: its first characters.
fn start_of(found: impl ToString) -> String {
    let text = found.to_string();
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Which choice a label names: by number, by the letter given with the choices or by the alphabet, or by its text.
fn index_of(label: &Value, choices: &[&str], letters: Option<&Vec<Value>>) -> Option<usize> {
    let by_number =
        label.as_u64().or_else(|| label.as_str()?.trim().parse().ok()).map(|number| number as usize);
    let by_given = || letters?.iter().position(|letter| letter == label);
    let by_letter = || match label.as_str()?.as_bytes() {
        [letter @ b'A'..=b'Z'] => Some(usize::from(letter - b'A')),
        _ => None,
    };
    let by_text = || choices.iter().position(|choice| Some(*choice) == label.as_str());
    by_given().or(by_number).or_else(by_letter).filter(|&at| at < choices.len()).or_else(by_text)
}

impl Question<'_> {
    fn example(&self, form: PromptForm, eot: u32, encode: Encode<'_>) -> Result<Example> {
        let text = |name: &str| self.object.get(name).and_then(Value::as_str);
        let context = match (form, text("activity_label")) {
            (PromptForm::Harness, Some(activity)) => {
                let body = match (text("ctx_a"), text("ctx_b")) {
                    (Some(a), Some(b)) => format!("{a} {}", capitalised(b)),
                    _ => self.context.to_owned(),
                };
                clean(&format!("{activity}: {body}"))
            }
            _ => self.context.to_owned(),
        };
        let is_hellaswag = text("activity_label").is_some();
        let mut choices = Vec::with_capacity(self.choices.len());
        for answer in &self.choices {
            let answer = match form {
                PromptForm::Harness if is_hellaswag => clean(answer),
                _ => (*answer).to_owned(),
            };
            choices.push(choice(&context, &answer, form, eot, encode)?);
        }
        Ok(Example { choices, label: self.label })
    }
}

fn choice(
    context: &str,
    answer: &str,
    form: PromptForm,
    eot: u32,
    encode: Encode<'_>,
) -> Result<AnswerTokens> {
    let chars = Some(answer.chars().count());
    let (mut tokens, from, rest) = match form {
        PromptForm::Plain => {
            let tokens = encode(context)?;
            (tokens.clone(), tokens.len(), encode(&format!(" {answer}"))?)
        }
        PromptForm::Harness => {
            // Spaces at the end of the context belong to the answer, whose first token may begin with one.
            let trimmed = context.trim_end();
            let answer = format!("{} {answer}", &context[trimmed.len()..]);
            let whole = encode(&format!("{trimmed}{answer}"))?;
            let from = encode(trimmed)?.len().min(whole.len());
            (whole, from, Vec::new())
        }
    };
    tokens.extend(rest);
    if from == 0 {
        tokens.insert(0, eot);
    }
    let from = from.max(1);
    if from >= tokens.len() {
        return Err(Error::input("a choice", "empty", "a text of at least one token"));
    }
    Ok(AnswerTokens { tokens, from, chars })
}

/// The first letter large, the others small, as Python's `capitalize`.
fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(chars.flat_map(char::to_lowercase)).collect()
    })
}

/// Removes what WikiHow's articles left behind: `[title]` begins a sentence, other brackets are dropped.
fn clean(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    let mut kept = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(open) = rest.find('[') {
        let Some(close) = rest[open..].find(']').filter(|&close| !rest[open..open + close].contains('\n'))
        else {
            // no end on this line: the bracket stays
            kept.push_str(&rest[..=open]);
            rest = &rest[open + 1..];
            continue;
        };
        kept.push_str(&rest[..open]);
        rest = &rest[open + close + 1..];
    }
    kept.push_str(rest);
    kept.replace("  ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Result<Vec<u32>> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn read(text: &str, form: PromptForm) -> Result<Vec<Example>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q.jsonl");
        std::fs::write(&path, text).unwrap();
        read_jsonl(&path, form, 0, &bytes)
    }

    fn text(tokens: &[u32]) -> String {
        tokens.iter().map(|&token| char::from(token as u8)).collect()
    }

    #[test]
    fn hellaswag_in_both_forms() {
        let line = r#"{"ctx": "A man sits. he", "ctx_a": "A man sits.", "ctx_b": "he", "activity_label": "Sitting", "endings": ["stands [step] up.", "sings."], "label": 1}"#;
        let plain = read(line, PromptForm::Plain).unwrap();
        assert_eq!(plain[0].label, 1);
        assert_eq!(text(&plain[0].choices[0].tokens), "A man sits. he stands [step] up.");
        assert_eq!(plain[0].choices[0].from, "A man sits. he".len());
        let harness = read(line, PromptForm::Harness).unwrap();
        assert_eq!(text(&harness[0].choices[0].tokens), "Sitting: A man sits. He stands up.");
        assert_eq!(harness[0].choices[0].from, "Sitting: A man sits. He".len());
        assert_eq!(harness[0].choices[0].chars, Some("stands up.".len()));
    }

    #[test]
    fn other_questions_and_labels() {
        for label in ["1", "\"1\"", "\"B\"", "\"no\""] {
            let line = format!(r#"{{"question": "Is it? ", "choices": ["yes", "no"], "answer": {label}}}"#);
            let example = &read(&line, PromptForm::Harness).unwrap()[0];
            assert_eq!(example.label, 1, "{label}");
            // the space at the end moved to the answer
            assert_eq!(
                (text(&example.choices[0].tokens), example.choices[0].from),
                ("Is it?  yes".into(), 6)
            );
        }
        let arc =
            r#"{"question": "q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "1"}"#;
        assert_eq!(read(arc, PromptForm::Plain).unwrap()[0].label, 0);
        let bare = r#"{"prompt": "", "options": ["a", "b"], "gold": 0}"#;
        assert_eq!(
            read(bare, PromptForm::Plain).unwrap()[0].choices[1],
            AnswerTokens { tokens: vec![0, 32, 98], from: 1, chars: Some(1) }
        );
    }

    #[test]
    fn brackets_are_cleaned() {
        assert_eq!(
            clean(" How to x [title] Begin. [step] Go [on. "),
            "How to x.  Begin. Go [on.".replace("  ", " ")
        );
        assert_eq!(capitalised("éTUDE Of"), "Étude of");
        assert_eq!(capitalised(""), "");
    }

    #[test]
    fn broken_lines_are_named() {
        let refusal = |text: &str| {
            let text = read(text, PromptForm::Plain).unwrap_err().to_string();
            text.split_once("q.jsonl: ").unwrap().1.to_owned()
        };
        let good = r#"{"prompt": "x", "options": ["a", "b"], "gold": 0}"#;
        assert!(refusal(&format!("{good}\n\n{{")).starts_with("line 3: the line is EOF"));
        assert!(refusal("{}").starts_with("line 1: the context is not there, expected one of ctx, query"));
        assert!(refusal(r#"{"ctx": 3}"#).starts_with("line 1: ctx is 3, expected a text"));
        assert!(refusal(r#"{"ctx": "", "choices": ["a"]}"#).contains("expected a list of at least 2 texts"));
        assert!(
            refusal(r#"{"ctx": "", "choices": ["a", "b"], "label": 2}"#)
                .contains("label is 2, expected a number from 0 to 1")
        );
        assert_eq!(refusal("\n"), "number of questions is 0, expected at least 1, one JSON object in a line");
    }
}
