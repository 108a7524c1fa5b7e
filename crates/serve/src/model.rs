//! The model that is served, apart from its weights: its name, its tokenizer and its template.

use crate::error::ApiError;
use crate::schema::{Asked, Prompt};
use ironhorse_text::chat::Chat;
use ironhorse_text::tokenizer::Tokenizer;
use ironhorse_text::tokenizer::bpe::Special;
use ironhorse_train::generate::codec::Codec;
use ironhorse_train::generate::{Job, Wants};
use serde_json::{Map, Value};

/// What turns requests into tokens, and tokens into answers.
pub struct Model {
    /// What clients call it.
    pub name: String,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The tokenizer with the chat template, if the model has one.
    pub chat: Option<Chat>,
    /// Positions of a text, its prompt included.
    pub context: usize,
    /// Tokens of the model.
    pub vocab: usize,
    /// The most tokens of an answer.
    pub most_tokens: usize,
}

/// A text to write, and what of its prompt is told.
#[derive(Debug)]
pub struct Planned {
    /// The text as the decoder takes it.
    pub job: Job,
    /// The prompt as text, where it is part of the answer.
    pub echo: Option<String>,
    /// Tokens before the prompt that the client did not give.
    pub added: usize,
}

impl Model {
    /// The tokens of a prompt, and how many of them the client did not give.
    fn ids(
        &self,
        prompt: &Prompt,
        kwargs: Option<&Map<String, Value>>,
    ) -> Result<(Vec<u32>, usize), ApiError> {
        let refused = |what: &str, error: &dyn std::fmt::Display| ApiError::param(what, error.to_string());
        match prompt {
            Prompt::Ids(ids) => Ok((ids.clone(), 0)),
            Prompt::Text(text) => {
                let ids = self.tokenizer.prompt(text).map_err(|error| refused("prompt", &error))?;
                // the first is the client's own if its text spells it
                let rest = ids.get(1..);
                let is_own =
                    |special| self.tokenizer.encode_as(text.as_bytes(), special).ok().as_deref() == rest;
                let added = usize::from(is_own(Special::Ordinary) || is_own(Special::Tokens));
                Ok((ids, added))
            }
            Prompt::Chat(messages) => {
                let chat = self.chat.as_ref().filter(|chat| chat.template().is_some());
                let Some(chat) = chat else {
                    let message = format!(
                        "`{}` has no chat template: use /v1/completions, or give the server --template",
                        self.name
                    );
                    return Err(ApiError::param("messages", message));
                };
                let none = Map::new();
                let text = chat.question(messages, kwargs.unwrap_or(&none));
                let text = text.map_err(|error| refused("messages", &error))?;
                let ids = self.tokenizer.encode_as(text.as_bytes(), Special::Tokens);
                Ok((ids.map_err(|error| refused("messages", &error))?, 0))
            }
        }
    }

    /// The texts of a request, `choices` of each prompt.
    pub fn plan(&self, asked: &Asked, seed: u64) -> Result<Vec<Planned>, ApiError> {
        let mut all = Vec::with_capacity(asked.prompts.len() * asked.choices);
        for prompt in &asked.prompts {
            let (ids, added) = self.ids(prompt, asked.template_kwargs.as_ref())?;
            self.check(&ids, asked)?;
            let echo = asked.echo.then(|| match prompt {
                Prompt::Text(text) => Ok(text.clone()),
                _ => self.tokenizer.decode_lossy(&ids),
            });
            let echo = echo.transpose().map_err(|error| ApiError::param("prompt", error.to_string()))?;
            for choice in 0..asked.choices {
                let seed = seed.wrapping_add(choice as u64);
                let room = (self.context + 1).saturating_sub(ids.len()); // the last token need not be read
                let job = Job {
                    prompt: ids.clone(),
                    vocab: self.tokenizer.vocab_size(),
                    tokens: asked.max_tokens.unwrap_or(room).min(self.most_tokens),
                    context: None,
                    stop: if asked.ignore_eos { Vec::new() } else { self.ends(asked.chat) },
                    sampler: ironhorse_train::generate::sample::Sampler { seed, ..asked.sampler },
                    slides: false,
                    wants: Wants { logprobs: asked.logprobs, prompt: asked.echo && asked.logprobs.is_some() },
                };
                all.push(Planned { job, echo: echo.clone(), added });
            }
        }
        Ok(all)
    }

    fn ends(&self, chat: bool) -> Vec<u32> {
        match &self.chat {
            Some(model) if chat => model.ends(),
            _ => Codec::ends(&self.tokenizer),
        }
    }

    /// Refuses a prompt that is empty, unknown or too long.
    fn check(&self, ids: &[u32], asked: &Asked) -> Result<(), ApiError> {
        let name = if asked.chat { "messages" } else { "prompt" };
        if ids.is_empty() {
            return Err(ApiError::param(name, format!("`{name}` has no tokens, expected at least one")));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab) {
            let message = format!("token {id} of `{name}` is outside the vocabulary of {}", self.vocab);
            return Err(ApiError::param(name, message));
        }
        let (found, context) = (ids.len(), self.context);
        if found > context {
            let message = format!("`{name}` has {found} tokens, but the context is {context} tokens long");
            let mut error = ApiError::param(name, message);
            error.code = Some("context_length_exceeded");
            return Err(error);
        }
        Ok(())
    }

    /// A token as a text; bytes that are no character as OpenAI writes them.
    pub fn token_text(&self, id: u32) -> String {
        let bytes = self.token_bytes(id);
        String::from_utf8(bytes).unwrap_or_else(|error| {
            let bytes = error.into_bytes();
            std::iter::once("bytes:".to_owned())
                .chain(bytes.iter().map(|byte| format!("\\x{byte:02x}")))
                .collect()
        })
    }

    /// The bytes of a token; none for one that the tokenizer does not know.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        Codec::decode(&self.tokenizer, &[id]).unwrap_or_default()
    }
}
