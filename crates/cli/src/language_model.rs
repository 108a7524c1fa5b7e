//! A model with its tokenizer on a device, for another language: it tells how likely texts are, and continues them.

use crate::args::{EngineArgs, FlagValue};
use crate::commands::model::{self, batch_tokens, find_tokenizer};
use crate::hardware::check_fits;
use crate::loading::load;
use crate::{Refusal, number, usage};
use anyhow::Result;
use clap::Parser;
use ironhorse::Device;
use ironhorse::core::EngineExt;
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::text::tokenizer::bpe::Special;
use ironhorse::train::Error;
use ironhorse::train::eval::{Score, Scorer, Text};
use ironhorse::train::format::open_weights;
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::generate::sample::Sampler;
use ironhorse::train::generate::{Request, generate};
use ironhorse::train::session::{Session, SessionSpec};
use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// What [`LanguageModel::open`] is given: flags, as those of `ironhorse eval`.
#[derive(Parser)]
#[command(no_binary_name = true, args_override_self = true, disable_help_flag = true)]
struct Flags {
    #[arg(long)]
    model: PathBuf,
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    #[arg(long, value_parser = number::count::<usize>)]
    seq: Option<usize>,
    #[arg(long, value_parser = number::count::<usize>)]
    batch_tokens: Option<usize>,
    /// The same as a number of texts that fill the context.
    #[arg(long, value_parser = number::count::<usize>)]
    batch_texts: Option<usize>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A model with its weights on a device, and its tokenizer.
pub struct LanguageModel {
    session: Session,
    tokenizer: Result<Tokenizer>,
    facts: Facts,
}

/// What there is to know about a model that was opened.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The folder or file that has the weights.
    pub path: PathBuf,
    /// The device.
    pub device: String,
    /// f32, tf32 or bf16.
    pub dtype: String,
    /// The most tokens that the model sees at once.
    pub context: usize,
    /// Tokens of the model.
    pub vocab_size: usize,
    /// Weights.
    pub params: usize,
}

/// What to write after a prompt.
#[derive(Clone, Debug)]
pub struct Writing {
    /// The tokens to continue, at least one.
    pub prompt: Vec<u32>,
    /// The most tokens to add.
    pub tokens: usize,
    /// The text ends before the first of these.
    pub until: Vec<String>,
    /// How tokens are chosen.
    pub sampler: Sampler,
}

impl LanguageModel {
    /// Loads the weights. `args` are `--model`, `--tokenizer`, `--seq`, `--batch-tokens`, `--batch-texts` and the flags of
    /// the device.
    pub fn open(args: impl IntoIterator<Item = OsString>) -> Result<Self, Refusal> {
        let flags = Flags::try_parse_from(args)
            .map_err(|error| Refusal::input(usage::one_line(&error, &Default::default())))?;
        Self::load(&flags).map_err(|error| Refusal::of(&error))
    }

    fn load(flags: &Flags) -> Result<Self> {
        let mut source = open_weights(&flags.model)?;
        let (config, context) = (source.config(), model::context("--seq", flags.seq, source.as_ref()));
        let tokenizer = find_tokenizer(flags.tokenizer.as_deref(), source.as_ref(), &flags.model);
        if let (Some(_), Err(error)) = (&flags.tokenizer, &tokenizer) {
            anyhow::bail!("{error:#}"); // one that was named must be there
        }
        let dtype = flags.engine.dtype()?;
        let precision = dtype.precision(1);
        let asked = flags.batch_tokens.or(flags.batch_texts.map(|texts| texts.saturating_mul(context)));
        let score = Some((context, asked.unwrap_or(batch_tokens(flags.engine.device()? == Device::Cpu))));
        let spec = SessionSpec {
            score,
            decode: Some(1),
            decode_context: Some(context),
            precision,
            ..SessionSpec::default()
        };
        let engine = flags.engine.engine()?;
        let needs = spec.layout(&config)?.total() as u64;
        check_fits(engine.as_ref(), needs, |_| "give a smaller batch or a shorter context".into())?;
        let facts = Facts {
            path: source.path().to_owned(),
            device: engine.name().to_owned(),
            dtype: dtype.name(),
            context,
            vocab_size: config.vocab_size(),
            params: config.told_params(),
        };
        let mut session = Session::new(engine, config, &spec)?;
        load(&mut session, source.as_mut(), || false)?;
        session.settle()?;
        Ok(Self { session, tokenizer, facts })
    }

    /// What there is to know about it.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    fn tokenizer(&self) -> Result<&Tokenizer, Refusal> {
        self.tokenizer.as_ref().map_err(Refusal::of)
    }

    /// The token between texts.
    pub fn eot(&self) -> Option<u32> {
        self.tokenizer.as_ref().ok()?.eot()
    }

    /// The ids of a text; special tokens that are spelled out in it are tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Refusal> {
        let ids = self.tokenizer()?.encode_as(text.as_bytes(), Special::Tokens);
        ids.map_err(|error| Refusal::of(&error.into()))
    }

    /// The text that ids stand for; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Refusal> {
        self.tokenizer()?.decode_lossy(ids).map_err(|error| Refusal::of(&error.into()))
    }

    /// How likely the tokens from an index on are after those before them. `progress` is called with the number of texts
    /// done, and may stop.
    pub fn score(
        &mut self,
        texts: &[(Vec<u32>, usize)],
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Score>, Refusal> {
        let texts: Vec<Text<'_>> = texts.iter().map(|(tokens, from)| Text { tokens, from: *from }).collect();
        let scored = Scorer::new(&mut self.session).and_then(|mut scorer| scorer.score(&texts, progress));
        scored.map_err(|error| Refusal::of(&error.into()))
    }

    /// Continues a prompt, whose last tokens are taken where it does not fit into the context. `progress` is called after
    /// every token, and may stop.
    pub fn write(
        &mut self,
        writing: &Writing,
        progress: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<String, Refusal> {
        let tokenizer = self.tokenizer.as_ref().map_err(Refusal::of)?;
        let request = Request {
            prompt: &writing.prompt,
            vocab: tokenizer.vocab_size(),
            tokens: writing.tokens,
            context: Some(self.facts.context),
            stop: &tokenizer.ends(),
            sampler: writing.sampler,
        };
        let (mut ids, mut done) = (Vec::new(), None);
        let written = generate(&mut self.session, &request, |token| {
            ids.push(token);
            done = cut(tokenizer.decode_lossy(&ids)?, &writing.until);
            match done.is_some() || progress().is_break() {
                true => Err(Error::Stopped),
                false => Ok(()),
            }
        });
        match (done, written) {
            (Some(text), _) => Ok(text),
            (None, Ok(ids)) => tokenizer.decode_lossy(&ids).map_err(|error| Refusal::of(&error.into())),
            (None, Err(error)) => Err(Refusal::of(&error.into())),
        }
    }
}

/// The text before the first of these, if one is there.
fn cut(mut text: String, until: &[String]) -> Option<String> {
    let first =
        until.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| text.find(stop.as_str())).min()?;
    text.truncate(first);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;

    #[test]
    fn a_text_ends_before_the_first_stop() {
        let cut =
            |until: &[&str]| cut("ab\n\ncd".into(), &until.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        assert_eq!(cut(&["d", "\n"]).as_deref(), Some("ab"));
        assert_eq!(cut(&["x", ""]), None);
        assert_eq!(cut(&["a"]).as_deref(), Some(""));
    }

    #[test]
    fn what_cannot_be_opened_is_named() {
        let refused = |flags: &[&str]| match LanguageModel::open(flags.iter().map(OsString::from)) {
            Ok(_) => panic!("{flags:?}"),
            Err(refusal) => refusal,
        };
        for flags in
            [&["--model=none"][..], &[], &["--model=none", "--seq=0"], &["--model=none", "--dtype=f8"]]
        {
            let refusal = refused(flags);
            assert_eq!(refusal.cause, Cause::Input, "{flags:?}");
            assert!(!refusal.text.is_empty() && !refusal.text.contains('\n'), "{}", refusal.text);
        }
    }
}
