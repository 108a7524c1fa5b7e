//! Writing text: feed the prompt, then draw one token after the other.

pub mod codec;
pub mod sample;

use self::sample::{Sampler, Scratch};
use crate::session::Session;
use crate::{Error, Result};

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
    request.sampler.validate()?;
    let (vocab, own) = (session.config().vocab_size(), session.config().max_seq_len());
    let context = request.context.map_or(own, |context| context.clamp(1, own));
    if request.prompt.is_empty() {
        return Err(Error::input("the prompt", "empty", "at least one token to continue from"));
    }
    if let Some(token) = request.prompt.iter().find(|&&token| token as usize >= vocab) {
        return Err(Error::input(
            "prompt token",
            token,
            format!("less than the model's vocabulary of {vocab}"),
        ));
    }
    let choice = request.vocab.min(vocab);
    let mut rng = request.sampler.rng();
    let (mut scratch, mut logits) = (Scratch::default(), Vec::new());
    let mut all = request.prompt.to_vec();
    let mut start = all.len().saturating_sub(context); // first token that is in the cache
    let mut fed = start;
    for _ in 0..request.tokens {
        if all.len() - start > context {
            start = all.len() - (context / 2).max(1);
            fed = start;
        }
        for (at, &token) in all.iter().enumerate().skip(fed) {
            session.feed(&[token as i32], at - start)?;
        }
        fed = all.len();
        let uniform = request.sampler.uniform(&mut rng);
        let token = match session.pick(choice, &request.sampler.choice(uniform))? {
            Some(token) => token,
            None => {
                session.logits(&mut logits)?;
                request.sampler.pick_at(&logits[..choice], uniform, &mut scratch)? as u32
            }
        };
        if request.stop.contains(&token) {
            break;
        }
        on_token(token)?;
        all.push(token);
    }
    Ok(all.split_off(request.prompt.len()))
}
