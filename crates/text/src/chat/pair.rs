//! A line of preferences: a question and two answers, of which one was chosen.

use serde_json::{Map, Value};

use super::record::{is_assistant, kind, messages_of, object_of};
use super::{Chat, Conversation, Mask, Record};
use crate::Result;
use ironhorse_train::data::Sample;

/// What a line of preferences holds: two records that begin alike.
#[derive(Clone, Debug, PartialEq)]
pub struct PairRecord {
    /// The question with the answer that was chosen.
    pub chosen: Record,
    /// The question with the one that was rejected.
    pub rejected: Record,
}

const EXPECTED: &str =
    r#"expected {"prompt": ..., "chosen": ..., "rejected": ...} or {"chosen": ..., "rejected": ...}"#;

impl PairRecord {
    /// Reads a line. An error is the end of a sentence that begins with the line.
    pub fn parse(line: &str) -> Result<Self, String> {
        let mut fields = object_of(line, EXPECTED)?;
        let prompt = fields.remove("prompt").filter(|prompt| !prompt.is_null());
        let [chosen, rejected] = ["chosen", "rejected"].map(|name| fields.remove(name));
        let (Some(chosen), Some(rejected)) = (chosen, rejected) else {
            return Err(format!("has not both `chosen` and `rejected`, {EXPECTED}"));
        };
        match (prompt, chosen, rejected) {
            (prompt, Value::String(chosen), Value::String(rejected)) => Self::texts(prompt, chosen, rejected),
            (prompt, chosen @ Value::Array(_), rejected @ Value::Array(_)) => {
                let (chosen, rejected) = (messages_of("chosen", chosen)?, messages_of("rejected", rejected)?);
                Self::messages(prompt, [chosen, rejected], fields)
            }
            (_, chosen, rejected) => Err(format!(
                "has {} and {} as `chosen` and `rejected`, expected two texts or two lists of messages",
                kind(&chosen),
                kind(&rejected)
            )),
        }
    }

    /// Two texts after the prompt or, without one, after what they have in common.
    fn texts(prompt: Option<Value>, chosen: String, rejected: String) -> Result<Self, String> {
        let record = |prompt: &str, completion: &str| Record::Completion {
            prompt: prompt.to_owned(),
            completion: completion.to_owned(),
        };
        match prompt {
            Some(Value::String(prompt)) => {
                Ok(Self { chosen: record(&prompt, &chosen), rejected: record(&prompt, &rejected) })
            }
            Some(prompt) => {
                Err(format!("has {} as `prompt`, expected a text as the answers are", kind(&prompt)))
            }
            None => {
                let common = common_text(&chosen, &rejected);
                let split = |text: &str| record(&text[..common], &text[common..]);
                Ok(Self { chosen: split(&chosen), rejected: split(&rejected) })
            }
        }
    }

    /// Two conversations that go on from the messages of the prompt or, without one, from those that they have in common.
    fn messages(
        prompt: Option<Value>,
        [chosen, rejected]: [Vec<Value>; 2],
        fields: Map<String, Value>,
    ) -> Result<Self, String> {
        let (given, [chosen, rejected]) = match prompt {
            Some(prompt @ Value::Array(_)) => {
                let prompt = messages_of("prompt", prompt)?;
                (prompt.len(), [chosen, rejected].map(|answer| [prompt.clone(), answer].concat()))
            }
            // some data sets repeat the question as a text beside conversations that begin with it
            Some(Value::String(prompt)) => {
                let common = common_messages(&chosen, &rejected);
                if !chosen[..common].iter().any(|message| message["content"] == prompt.as_str()) {
                    return Err(
                        "has a text as `prompt` that is no message of both `chosen` and `rejected`, \
                                expected a list of messages as the answers are"
                            .into(),
                    );
                }
                (common, [chosen, rejected])
            }
            Some(prompt) => {
                return Err(format!(
                    "has {} as `prompt`, expected a list of messages as the answers are",
                    kind(&prompt)
                ));
            }
            None => {
                let common = common_messages(&chosen, &rejected);
                let asks = |messages: &[Value]| messages.iter().any(|message| !is_assistant(message));
                if common == 0 && (asks(&chosen) || asks(&rejected)) {
                    return Err(
                        "has `chosen` and `rejected` that begin with different messages, expected two \
                                answers to the same question"
                            .into(),
                    );
                }
                (common, [chosen, rejected])
            }
        };
        for (name, messages) in [("chosen", &chosen), ("rejected", &rejected)] {
            if !messages[given..].iter().any(is_assistant) {
                return Err(format!(
                    "has no message of the assistant in `{name}` after the question, expected one"
                ));
            }
        }
        let record = |messages| Record::Messages(Conversation { messages, given, fields: fields.clone() });
        Ok(Self { chosen: record(chosen), rejected: record(rejected) })
    }
}

impl Chat {
    /// The samples of a pair, the chosen one first.
    pub fn pair(&self, record: &PairRecord, mask: Mask) -> Result<[Sample; 2]> {
        Ok([self.sample(&record.chosen, mask)?, self.sample(&record.rejected, mask)?])
    }
}

/// How many messages two conversations have in common at their beginning, up to the last of them that is not the assistant's:
/// answers that begin alike are answers still.
fn common_messages(one: &[Value], other: &[Value]) -> usize {
    let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let asked = |messages: &[Value]| messages.iter().rposition(|message| !is_assistant(message));
    asked(&one[..same]).map_or(0, |last| last + 1)
}

/// How many bytes two texts have in common at their beginning, whole words only.
fn common_text(one: &str, other: &str) -> usize {
    let same: usize =
        one.chars().zip(other.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    let whole = |text: &str| same == text.len() || text[same..].starts_with(char::is_whitespace);
    if same == 0 || (whole(one) && whole(other)) {
        return same;
    }
    // a word begins with the space before it, as tokens do
    one[..same].rfind(char::is_whitespace).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> PairRecord {
        PairRecord::parse(&value.to_string()).unwrap_or_else(|problem| panic!("{value}: {problem}"))
    }

    fn completions(pair: &PairRecord) -> [[&str; 2]; 2] {
        [&pair.chosen, &pair.rejected].map(|record| match record {
            Record::Completion { prompt, completion } => [prompt.as_str(), completion.as_str()],
            other => panic!("{other:?}"),
        })
    }

    /// How many messages each side has, and how many are given.
    fn sizes(pair: &PairRecord) -> [(usize, usize); 2] {
        [&pair.chosen, &pair.rejected].map(|record| match record {
            Record::Messages(found) => (found.messages.len(), found.given),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn texts_with_a_prompt_and_without() {
        let pair = read(json!({"prompt": "2+2=", "chosen": "4", "rejected": "5", "id": 1}));
        assert_eq!(completions(&pair), [["2+2=", "4"], ["2+2=", "5"]]);
        let pair =
            read(json!({"chosen": "Human: hi Assistant: hello", "rejected": "Human: hi Assistant: help"}));
        assert_eq!(
            completions(&pair),
            [["Human: hi Assistant:", " hello"], ["Human: hi Assistant:", " help"]]
        );
        let pair = read(json!({"chosen": "a é", "rejected": "a è"}));
        assert_eq!(completions(&pair), [["a", " é"], ["a", " è"]]);
        let pair = read(json!({"chosen": "a b", "rejected": "a b c", "prompt": null}));
        assert_eq!(completions(&pair), [["a b", ""], ["a b", " c"]]);
        let pair = read(json!({"chosen": "yes", "rejected": "no"}));
        assert_eq!(completions(&pair), [["", "yes"], ["", "no"]]);
    }

    #[test]
    fn messages_with_a_prompt_and_without() {
        let says = |role: &str, content: &str| json!({"role": role, "content": content});
        let asked = [says("system", "s"), says("user", "q")];
        let [good, bad] = [says("assistant", "a"), says("assistant", "b")];
        let pair = read(json!({"prompt": asked, "chosen": [good], "rejected": [bad]}));
        assert_eq!(sizes(&pair), [(3, 2); 2]);
        let whole = |answer: &Value| [&asked[..], std::slice::from_ref(answer)].concat();
        let implicit = read(json!({"chosen": whole(&good), "rejected": whole(&bad)}));
        assert_eq!(implicit, pair);
        let other = [says("system", "t"), says("user", "q"), bad.clone()];
        let problem =
            PairRecord::parse(&json!({"chosen": whole(&good), "rejected": other}).to_string()).unwrap_err();
        assert!(problem.contains("begin with different messages"), "{problem}");
        assert_eq!(read(json!({"prompt": "q", "chosen": whole(&good), "rejected": whole(&bad)})), pair);
        // the same first answer is part of the question only if someone asks again
        let more = |last: &str| [&whole(&good)[..], &[says("user", "r"), says("assistant", last)]].concat();
        assert_eq!(sizes(&read(json!({"chosen": more("c"), "rejected": more("d")}))), [(5, 4); 2]);
        let again = [whole(&good), vec![says("assistant", "more")]].concat();
        assert_eq!(sizes(&read(json!({"chosen": again, "rejected": whole(&good)}))), [(4, 2), (3, 2)]);
        let pair = read(json!({"prompt": asked, "chosen": [good], "rejected": [bad], "tools": [1]}));
        assert!(matches!(pair.chosen, Record::Messages(found) if found.fields["tools"] == json!([1])));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let talk = r#"[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]"#;
        for (line, want) in [
            ("{".to_owned(), "is not JSON"),
            ("[1]".into(), "is a list, expected {\"prompt\""),
            (r#"{"messages": []}"#.into(), "has not both `chosen` and `rejected`"),
            (r#"{"prompt": "a", "chosen": "b"}"#.into(), "has not both `chosen` and `rejected`"),
            (
                r#"{"prompt": [], "chosen": "b", "rejected": "c"}"#.into(),
                "has a list as `prompt`, expected a text",
            ),
            (
                format!(r#"{{"chosen": "b", "rejected": {talk}}}"#),
                "has a text and a list as `chosen` and `rejected`",
            ),
            (
                format!(r#"{{"prompt": "z", "chosen": {talk}, "rejected": {talk}}}"#),
                "that is no message of both",
            ),
            (format!(r#"{{"prompt": 3, "chosen": {talk}, "rejected": {talk}}}"#), "has a number as `prompt`"),
            (r#"{"chosen": [], "rejected": []}"#.into(), "has no message in `chosen`"),
            (
                format!(r#"{{"chosen": {talk}, "rejected": [{{"role": "user", "content": "q"}}]}}"#),
                "has no message of the assistant in `rejected`",
            ),
            (r#"{"chosen": "\ufdd0", "rejected": "b"}"#.into(), "has the character U+FDD0 or U+FDD1"),
        ] {
            let problem = PairRecord::parse(&line).unwrap_err();
            assert!(problem.contains(want), "{line}: {problem}");
        }
    }
}
