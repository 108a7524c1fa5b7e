//! Writing text: feed the prompt, then draw one token after the other.

pub mod codec;
mod decoder;
mod likely;
pub mod sample;
mod writer;

pub use self::decoder::{Decoder, End, Event, Job, New, Wants};
pub use self::likely::Likely;
use self::sample::Sampler;
pub use self::writer::{Added, Writer};
use crate::Result;
use crate::session::Session;

/// What to write.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The beginning; must not be empty.
    pub prompt: &'a [u32],
    /// Only tokens below this are chosen, however many the model has: those that the tokenizer can turn into text.
    pub vocab: usize,
    /// The most tokens to add.
    pub tokens: usize,
    /// How far back the model may look, at most its own context: positions that it never saw in training mislead it.
    pub context: Option<usize>,
    /// Stop before any of these tokens (the end of a text).
    pub stop: &'a [u32],
    /// How to choose.
    pub sampler: Sampler,
}

/// Continues the prompt, calling `on_token` for every new token. Returns the new tokens.
///
/// When the context is full its older half is forgotten and the rest is read again.
pub fn generate(
    session: &mut Session,
    request: &Request<'_>,
    mut on_token: impl FnMut(u32) -> Result<()>,
) -> Result<Vec<u32>> {
    let mut decoder = Decoder::new(session)?;
    let Request { prompt, vocab, tokens, context, stop, sampler } = *request;
    decoder.join(Job {
        prompt: prompt.to_vec(),
        vocab,
        tokens,
        context,
        stop: stop.to_vec(),
        sampler,
        slides: true,
        wants: Wants::default(),
    })?;
    let mut written = Vec::new();
    while !decoder.is_empty() {
        decoder.step(|_, event| match event {
            Event::Token(new) => {
                on_token(new.token)?;
                written.push(new.token);
                Ok(())
            }
            Event::Prompt(_) | Event::End(_) => Ok(()),
        })?;
    }
    Ok(written)
}
