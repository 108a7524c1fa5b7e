//! A model that speaks: what `chat` and `serve` open alike.

use super::choices::Named;
use super::generate::{name_model, open_adapters};
use super::model::{context, find_tokenizer, given_or_newest};
use crate::args::{EngineArgs, heading};
use crate::hardware::{check_fits, human_bytes, room};
use crate::loading::load_base;
use crate::{number, out};
use anyhow::Result;
use clap::Args;
use ironhorse::core::{Engine, Pool, Precision};
use ironhorse::text::chat::Chat;
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::train::format::open_weights;
use ironhorse::train::model::{Lora, ModelConfig};
use ironhorse::train::session::{Serving, Session, SessionSpec};
use std::path::{Path, PathBuf};

/// Which model, and how far back it looks.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::MODEL)]
pub struct SpeakingArgs {
    /// A run (RUN/best is its best checkpoint), a checkpoint, a Hugging Face folder, a model .bin, or a model by name such as gpt2 or org/name [default: the newest run below runs/]
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,
    /// An adapter (LoRA) for the model: a folder of PEFT, or a run of `train --lora`
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Name, file or folder of a tokenizer, as of `prepare` [default: the one beside the model]
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<PathBuf>,
    /// A chat template in Jinja [default: the one beside the tokenizer]
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// The most tokens of a conversation or text [default: the sequence length a run was trained with, else the model's context, at most 4096]
    #[arg(long, value_name = "N", value_parser = number::count::<usize>)]
    context: Option<usize>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Positions that a model has room for unless it is asked for more: a cache of 40,960 takes gigabytes for every text.
const USUAL: usize = 4096;
/// Texts at a time, if they fit: the first number that does.
const ROWS: [usize; 5] = [16, 8, 4, 2, 1];

/// How many texts are written at a time.
pub enum Rows {
    /// One.
    One,
    /// This many, or as many as fit if it is `None`; the second number is the tokens of a step.
    Many(Option<usize>, usize),
}

/// A model that is ready to speak.
pub struct Speaking {
    pub session: Session,
    pub tokenizer: Tokenizer,
    pub chat: Option<Chat>,
    pub config: ModelConfig,
    /// What it is called.
    pub name: String,
    pub context: usize,
}

impl SpeakingArgs {
    /// Plans, and loads the weights if everything fits.
    pub fn open(&self, rows: &Rows) -> Result<Speaking> {
        let path = given_or_newest(self.model.as_deref())?;
        let mut source = open_weights(&path)?;
        let config = source.config();
        let tokenizer = find_tokenizer(self.tokenizer.as_deref(), source.as_ref(), &path)?;
        let looks_back = context("--context", self.context, source.as_ref());
        let context = if self.context.is_some() { looks_back } else { looks_back.min(USUAL) };
        let chat = match Chat::open(tokenizer.name(), self.template.as_deref()) {
            Ok(chat) => Some(chat),
            Err(error) if self.template.is_some() => return Err(error.into()),
            Err(error) => {
                out::note(format_args!("the chat template cannot be used: {error}"));
                None
            }
        };
        let named = self.adapter.iter().map(|file| Named { name: "adapter".into(), file: file.clone() });
        let mut adapters = open_adapters(&named.collect::<Vec<_>>(), source.as_ref())?;
        let lora = Lora::covering(&adapters.iter().map(|(_, adapter)| adapter.lora()).collect::<Vec<_>>());
        let engine = self.engine.engine()?;
        let precision = self.engine.dtype()?.precision(1);
        let plan = Plan { config, lora, precision, context };
        let spec = plan.choose(engine.as_ref(), rows)?;
        let mut session = Session::new(engine, config, &spec)?;
        let digest = load_base(&mut session, source.as_mut())?;
        for (_, adapter) in &mut adapters {
            adapter.check_base(&digest, &path)?;
            session.load_adapter(adapter)?;
        }
        session.settle()?;
        name_model(&path, source.as_ref());
        let name = called(self.model.as_deref().unwrap_or(&path));
        Ok(Speaking { session, tokenizer, chat, config, name, context })
    }
}

/// What clients call a model: the name it was given by, or that of its file or folder.
fn called(given: &Path) -> String {
    let text = given.to_string_lossy();
    if !given.exists() {
        return text.into_owned(); // a name of the hub
    }
    let last = given.file_name().map_or(text.clone(), |name| name.to_string_lossy());
    match given.parent().and_then(Path::file_name) {
        Some(folder) if folder == super::model::RUNS => format!("{}/{last}", folder.to_string_lossy()),
        _ => last.into_owned(),
    }
}

/// What memory depends on.
struct Plan {
    config: ModelConfig,
    lora: Option<Lora>,
    precision: Precision,
    context: usize,
}

impl Plan {
    fn spec(&self, sequences: usize, tokens: usize) -> SessionSpec {
        let Self { lora, precision, context, .. } = *self;
        let serving = Serving { sequences, context: Some(context), tokens, all_logits: true };
        SessionSpec { serving: Some(serving), lora, precision, ..SessionSpec::default() }
    }

    /// How many texts at a time fit, and the session for them.
    fn choose(&self, engine: &dyn Engine, rows: &Rows) -> Result<SessionSpec> {
        let fit = |spec: &SessionSpec| -> Result<bool> {
            let needs = spec.layout(&self.config)?.total() as u64;
            Ok(room(engine).is_none_or(|has| needs <= has / 10 * 9))
        };
        let (rows, spec) = match *rows {
            Rows::One => {
                let Self { lora, precision, context, .. } = *self;
                let decode_context = Some(context);
                (
                    1,
                    SessionSpec {
                        decode: Some(1),
                        decode_context,
                        precision,
                        lora,
                        ..SessionSpec::default()
                    },
                )
            }
            Rows::Many(Some(rows), tokens) => (rows, self.spec(rows, tokens)),
            Rows::Many(None, tokens) => {
                let mut chosen = (1, self.spec(1, tokens));
                for rows in ROWS {
                    chosen = (rows, self.spec(rows, tokens));
                    if fit(&chosen.1)? {
                        break;
                    }
                }
                chosen
            }
        };
        let layout = spec.layout(&self.config)?;
        check_fits(engine, layout.total() as u64, |_| {
            "give a shorter --context, fewer --rows or a smaller model".into()
        })?;
        if rows > 1 {
            let (weights, cache) =
                (layout.bytes(Pool::Params) + layout.bytes(Pool::Frozen), layout.bytes(Pool::Cache));
            out::note(format_args!(
                "{rows} texts at a time of {} tokens: weights {}, keys and values {}, together {}",
                self.context,
                human_bytes(weights as u64),
                human_bytes(cache as u64),
                human_bytes(layout.total() as u64)
            ));
        }
        Ok(spec)
    }
}
