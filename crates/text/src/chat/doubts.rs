//! What a template lacks that a chat model needs: where the assistant begins, and where it ends.

use serde_json::{Map, Value, json};

use super::{Chat, Conversation, Mask};

const QUESTION: &str = "What is in the box?";
const ANSWER: &str = "Seven grey stones.";

impl Chat {
    /// What is doubtful about the template, one line each. None where it refuses a question with an answer: the data tell then.
    pub fn doubts(&self, mask: Mask) -> Vec<String> {
        let Some(template) = self.template() else { return Vec::new() };
        let lacks = [
            self.lacks_beginning().then_some(
                "writes nothing for add_generation_prompt: a model that is asked does not see where its answer begins, \
                 as it does in training",
            ),
            self.lacks_end(mask).then_some(
                "writes no special token that is learned after what the assistant says: the model will not learn to stop",
            ),
        ];
        lacks.into_iter().flatten().map(|lack| format!("{}: {lack}", template.origin())).collect()
    }

    /// Whether what comes before an answer in training is missing where the model is to answer.
    fn lacks_beginning(&self) -> bool {
        let texts = || -> Option<bool> {
            let (asked, answered) = messages();
            let prompt = self.prompt(&asked, true).ok()?;
            if prompt != self.prompt(&asked, false).ok()? {
                return Some(false);
            }
            let whole = self.prompt(&answered, false).ok()?;
            let between = whole.strip_prefix(&prompt)?.split_once(ANSWER)?.0;
            Some(!between.trim().is_empty())
        };
        texts().unwrap_or(false)
    }

    /// Whether no special token after an answer is learned.
    fn lacks_end(&self, mask: Mask) -> bool {
        let learned = || -> Option<bool> {
            let (_, messages) = messages();
            let record = Conversation { messages, given: 0, fields: Map::new() };
            let marked = self.conversation(&record, mask).ok()?;
            let after = marked.text.rfind(ANSWER)? + ANSWER.len();
            let ends = self
                .ends()
                .into_iter()
                .filter_map(|id| String::from_utf8(self.tokenizer.decode(&[id]).ok()?).ok());
            let markers: Vec<String> =
                self.tokenizer.markers().into_iter().map(str::to_owned).chain(ends).collect();
            let found = markers.iter().filter(|marker| !marker.is_empty()).any(|marker| {
                marked.text[after..].match_indices(marker.as_str()).any(|(at, _)| {
                    let token = after + at..after + at + marker.len();
                    marked.learned.iter().any(|part| part.start < token.end && token.start < part.end)
                })
            });
            Some(!found)
        };
        learned().unwrap_or(false)
    }
}

/// A question, and the same with an answer.
fn messages() -> (Vec<Value>, Vec<Value>) {
    let asked = vec![json!({"role": "user", "content": QUESTION})];
    let answer = json!({"role": "assistant", "content": ANSWER});
    (asked.clone(), [asked, vec![answer]].concat())
}
