//! Continuing tokens.

use super::{OpenModel, check_growth, read_settings};
use crate::Refusal;
use crate::commands::generate::WritingArgs;
use crate::commands::model::context;
use anyhow::Result;
use ironhorse::train::Error;
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::generate::{Request, generate};
use ironhorse::train::run::Control;

/// Positions by which the key/value cache grows.
const CACHE_STEP: usize = 256;

impl OpenModel {
    /// The tokens that follow a prompt, until `end` or, where that is not given, the token between texts; `settings` are those
    /// of `ironhorse generate` as JSON.
    pub fn generate(
        &mut self,
        (prompt, end): (&[u32], Option<u32>),
        settings: &str,
        control: &Control,
    ) -> Result<Vec<u32>, Refusal> {
        self.continued((prompt, end), settings, control).map_err(|error| Refusal::of(&error))
    }

    fn continued(
        &mut self,
        (prompt, end): (&[u32], Option<u32>),
        settings: &str,
        control: &Control,
    ) -> Result<Vec<u32>> {
        let asked = read_settings::<WritingArgs>("generate", "generate", settings)?;
        let context = context("context", asked.context, self.source.as_ref());
        let tokenizer = self.tokenizer.as_ref().ok();
        let vocab = tokenizer.map_or(self.source.config().vocab_size(), Codec::vocab_size);
        let stop: Vec<u32> = end.into_iter().chain(tokenizer.map_or_else(Vec::new, Codec::ends)).collect();
        let sampler = asked.sampler(vocab);
        sampler.validate()?; // before memory is reserved
        let needs = prompt.len().saturating_add(asked.tokens);
        let positions = needs.checked_next_multiple_of(CACHE_STEP).unwrap_or(needs).min(context);
        let session = self.session(control)?;
        let layout = session.plan_decoding(positions)?;
        check_growth(session, &layout)?;
        session.reserve(&layout)?;
        let request =
            Request { prompt, vocab, tokens: asked.tokens, context: Some(context), stop: &stop, sampler };
        Ok(generate(session, &request, |_| match control.stop_reason() {
            Some(_) => Err(Error::Stopped),
            None => Ok(()),
        })?)
    }
}
