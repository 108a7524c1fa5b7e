//! What a request is told, as JSON: whole, or piece by piece.

use crate::error::ApiError;
use crate::model::{Model, Planned};
use crate::schema::Asked;
use crate::worker::Told;
use hyper::StatusCode;
use ironhorse_train::generate::{End, Event, Likely, Writer};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A token with how likely it was.
struct Scored {
    id: u32,
    /// `None` for the first token of a prompt.
    likely: Option<Likely>,
    /// The offset of its text in the answer, in characters.
    offset: usize,
}

/// One text of an answer.
struct Choice {
    writer: Writer,
    /// The text that a stream has not sent yet; without a stream, all of it.
    text: String,
    /// The number of characters before `text`.
    told: usize,
    scored: Vec<Scored>,
    /// Tokens of the prompt that are not told with it.
    added: usize,
    prompt: Vec<u32>,
    /// Tokens of the prompt that were scored.
    read: usize,
    written: usize,
    finish: Option<&'static str>,
    cancelled: Arc<AtomicBool>,
}

/// All texts of an answer as they grow.
pub struct Answers {
    model: Arc<Model>,
    choices: Vec<Choice>,
    /// The `id` of OpenAI's schema.
    id: String,
    created: u64,
    chat: bool,
    logprobs: bool,
    /// Tokens of the prompts, each counted once.
    prompt_tokens: usize,
}

impl Answers {
    /// The empty answers to a request.
    pub fn new(model: Arc<Model>, asked: &Asked, planned: &[Planned], number: u64) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let kind = if asked.chat { "chatcmpl" } else { "cmpl" };
        let prompt_tokens =
            planned.iter().step_by(asked.choices.max(1)).map(|text| text.job.prompt.len()).sum();
        let mut all = Self {
            choices: planned.iter().map(|text| Choice::new(text, asked.stops.clone())).collect(),
            model,
            id: format!("{kind}-{created:x}{number:08x}"),
            created,
            chat: asked.chat,
            logprobs: asked.logprobs.is_some(),
            prompt_tokens,
        };
        for choice in &mut all.choices {
            choice.begin(&all.model);
        }
        all
    }

    /// Set to end a text early.
    pub fn cancellation(&self, index: usize) -> Arc<AtomicBool> {
        self.choices[index].cancelled.clone()
    }

    /// Whether all texts have ended.
    pub fn is_done(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    /// Takes what was told; gives the number of the text if a stream has something new to tell.
    pub fn take(&mut self, (index, event): Told) -> Result<Option<usize>, ApiError> {
        let model = self.model.clone();
        let Some(choice) = self.choices.get_mut(index).filter(|choice| choice.finish.is_none()) else {
            return Ok(None);
        };
        let failed = |message: String| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, None, message);
        match event.map_err(failed)? {
            Event::Prompt(likely) => {
                choice.read += 1;
                choice.score_prompt(&model, Some(likely));
                Ok(None)
            }
            Event::Token(new) => {
                choice.written += 1;
                let added = choice.writer.push(&model.tokenizer, new.token);
                let added = added.map_err(|error| failed(error.to_string()))?;
                if !added.stopped || !added.text.is_empty() {
                    let (id, likely) = (new.token, new.likely);
                    let offset = choice.told + choice.text.chars().count();
                    choice.scored.extend(likely.map(|likely| Scored { id, likely: Some(likely), offset }));
                }
                choice.text.push_str(&added.text);
                if added.stopped {
                    choice.finish = Some("stop");
                    choice.cancelled.store(true, Ordering::Relaxed);
                }
                Ok(Some(index))
            }
            Event::End(end) => {
                let rest = choice.writer.finish();
                choice.text.push_str(&rest);
                choice.finish = Some(if end == End::Stop { "stop" } else { "length" });
                Ok(Some(index))
            }
        }
    }

    fn head(&self, object: &str) -> Map<String, Value> {
        let Value::Object(head) = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model.name,
        }) else {
            return Map::new();
        };
        head
    }

    /// The whole answer.
    pub fn whole(&self) -> Value {
        let mut all = self.head(if self.chat { "chat.completion" } else { "text_completion" });
        let choices = self.choices.iter().enumerate().map(|(index, choice)| {
            let (finish, logprobs) = (choice.finish, self.logprobs_of(choice));
            match self.chat {
                true => {
                    let message = json!({"role": "assistant", "content": choice.text, "refusal": null});
                    json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
                }
                false => {
                    json!({"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": finish})
                }
            }
        });
        all.insert("choices".into(), choices.collect());
        all.insert("usage".into(), self.usage());
        Value::Object(all)
    }

    /// How many tokens there were.
    pub fn usage(&self) -> Value {
        let (prompt, written) =
            (self.prompt_tokens, self.choices.iter().map(|choice| choice.written).sum::<usize>());
        json!({"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written})
    }

    /// The first piece of each text of a conversation, which says who speaks.
    pub fn opening(&self, index: usize) -> Value {
        let delta = json!({"role": "assistant", "content": ""});
        self.chunk(json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}))
    }

    /// What is new of a text; `None` if that is nothing.
    pub fn piece(&mut self, index: usize) -> Option<Value> {
        let choice = &self.choices[index];
        if choice.text.is_empty() && choice.scored.is_empty() && choice.finish.is_none() {
            return None;
        }
        let (finish, logprobs) = (choice.finish, self.logprobs_of(choice));
        let choice = &mut self.choices[index];
        let text = std::mem::take(&mut choice.text);
        choice.told += text.chars().count();
        choice.scored.clear();
        Some(match self.chat {
            true => {
                let delta =
                    if text.is_empty() && finish.is_some() { json!({}) } else { json!({"content": text}) };
                self.chunk(
                    json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}),
                )
            }
            false => self
                .chunk(json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})),
        })
    }

    /// The last piece of a stream that tells how many tokens there were.
    pub fn usage_piece(&self) -> Value {
        let mut all = self.head(if self.chat { "chat.completion.chunk" } else { "text_completion" });
        all.insert("choices".into(), json!([]));
        all.insert("usage".into(), self.usage());
        Value::Object(all)
    }

    fn chunk(&self, choice: Value) -> Value {
        let mut all = self.head(if self.chat { "chat.completion.chunk" } else { "text_completion" });
        all.insert("choices".into(), json!([choice]));
        Value::Object(all)
    }

    /// How many texts there are.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// Whether it is the answer of a conversation.
    pub fn is_chat(&self) -> bool {
        self.chat
    }

    fn logprobs_of(&self, choice: &Choice) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        if self.chat {
            let content = choice.scored.iter().map(|scored| {
                let top = scored.likely.iter().flat_map(|likely| &likely.top);
                let top: Vec<Value> = top.map(|&(id, ln)| self.entry(id, ln)).collect();
                let mut entry =
                    self.entry(scored.id, scored.likely.as_ref().map_or(0.0, |likely| likely.logprob));
                entry["top_logprobs"] = top.into();
                entry
            });
            return json!({"content": content.collect::<Vec<_>>(), "refusal": null});
        }
        let of = |scored: &Scored| scored.likely.as_ref().map(|likely| finite(likely.logprob));
        let top = |scored: &Scored| {
            let likely = scored.likely.as_ref()?;
            let mut all = Map::new();
            for &(id, ln) in &likely.top {
                all.entry(self.model.token_text(id)).or_insert_with(|| finite(ln).into());
            }
            all.entry(self.model.token_text(scored.id)).or_insert_with(|| finite(likely.logprob).into());
            Some(all)
        };
        let text = |scored: &Scored| self.model.token_text(scored.id);
        json!({
            "tokens": choice.scored.iter().map(text).collect::<Vec<_>>(),
            "token_logprobs": choice.scored.iter().map(of).collect::<Vec<_>>(),
            "top_logprobs": choice.scored.iter().map(top).collect::<Vec<_>>(),
            "text_offset": choice.scored.iter().map(|scored| scored.offset).collect::<Vec<_>>(),
        })
    }

    /// A token of a conversation.
    fn entry(&self, id: u32, ln: f64) -> Value {
        let (token, bytes) = (self.model.token_text(id), self.model.token_bytes(id));
        json!({"token": token, "logprob": finite(ln), "bytes": bytes})
    }
}

/// JSON has no infinities: a token that is impossible has the least number that OpenAI uses for it.
fn finite(ln: f64) -> f64 {
    ln.max(-9999.0)
}

impl Choice {
    fn new(text: &Planned, stops: Vec<String>) -> Self {
        Self {
            writer: Writer::new(stops),
            text: text.echo.clone().unwrap_or_default(),
            told: 0,
            scored: Vec::new(),
            added: text.added,
            prompt: if text.job.wants.prompt { text.job.prompt.clone() } else { Vec::new() },
            read: 0,
            written: 0,
            finish: None,
            cancelled: Arc::default(),
        }
    }

    /// The first token of a prompt that is scored follows nothing.
    fn begin(&mut self, model: &Model) {
        self.score_prompt(model, None);
    }

    /// The token of the prompt whose turn it is.
    fn score_prompt(&mut self, model: &Model, likely: Option<Likely>) {
        let Some(&id) = self.prompt.get(self.read) else { return };
        if self.read < self.added {
            return; // not the client's
        }
        let last = self.scored.last();
        let offset = last.map_or(0, |last| last.offset + model.token_text(last.id).chars().count());
        self.scored.push(Scored { id, likely, offset });
    }
}

impl Drop for Answers {
    /// Nobody waits for them any more.
    fn drop(&mut self) {
        self.choices.iter().for_each(|choice| choice.cancelled.store(true, Ordering::Relaxed));
    }
}
