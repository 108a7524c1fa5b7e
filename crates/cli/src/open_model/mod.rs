//! A model for another language: its weights on a device and its tokenizer, which computes, writes, learns and is saved.
//!
//! ```text
//! mod.rs      opening, text and tokens, saving        compute.rs  logits and losses of batches of any shape
//! write.rs    continuing tokens                       train.rs    `ironhorse train` from these weights, then on with the result
//! ```

mod compute;
mod train;
mod write;

pub use compute::Ids;
pub use train::{Calls, STOPPED_BY_CALLER, Training};

use crate::args::config_file::{line_of, table_of_json};
use crate::args::{EngineArgs, FlagValue};
use crate::commands::convert::{StoredArgs, to_folder};
use crate::commands::fetch::names;
use crate::commands::model::find_tokenizer;
use crate::hardware::check_fits;
use crate::loading::load;
use crate::{Refusal, out, usage};
use anyhow::{Result, anyhow};
use clap::{Args, Parser};
use ironhorse::core::{EngineExt, Layout};
use ironhorse::text::chat::{Chat, Record};
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::text::tokenizer::bpe::Special;
use ironhorse::train::format::{AdaptedFrom, WeightSource, open_weights};
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::run::Control;
use ironhorse::train::session::{Session, SessionSpec};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What [`OpenModel::open`] is given.
#[derive(Parser)]
#[command(no_binary_name = true, args_override_self = true, disable_help_flag = true)]
struct Flags {
    #[arg(long)]
    model: PathBuf,
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A model that is open.
pub struct OpenModel {
    flags: Flags,
    source: Box<dyn WeightSource>,
    tokenizer: Result<Tokenizer>,
    /// The tokenizer with its chat template, once messages were given.
    chat: Option<Chat>,
    /// `None` while training has the device for itself, and after it until it is needed.
    session: Option<Session>,
    device: String,
}

impl OpenModel {
    /// Loads weights, fetched if they are a name. `args` are `--model`, `--tokenizer` and the flags of the device.
    pub fn open(args: impl IntoIterator<Item = OsString>, control: &Control) -> Result<Self, Refusal> {
        out::begin();
        let flags = Flags::try_parse_from(args)
            .map_err(|error| Refusal::input(usage::one_line(&error, &Default::default())))?;
        Self::load(flags, control).map_err(|error| Refusal::of(&error))
    }

    fn load(flags: Flags, control: &Control) -> Result<Self> {
        flags.engine.dtype()?; // before anything is fetched
        let path = names::weights(&flags.model, control)?;
        let source = open_weights(&path)?;
        let tokenizer = find_tokenizer(flags.tokenizer.as_deref(), source.as_ref(), &path);
        if let (Some(_), Err(error)) = (&flags.tokenizer, &tokenizer) {
            anyhow::bail!("{error:#}"); // one that was named must be there
        }
        let mut model = Self { flags, source, tokenizer, chat: None, session: None, device: String::new() };
        model.session(control)?;
        Ok(model)
    }

    /// The model on its device. Weights are read where that was not done since they changed.
    fn session(&mut self, control: &Control) -> Result<&mut Session> {
        let session = match self.session.take() {
            Some(session) => session,
            None => self.on_device(control)?,
        };
        Ok(self.session.insert(session))
    }

    fn on_device(&mut self, control: &Control) -> Result<Session> {
        let (engine, config) = (self.flags.engine.engine()?, self.source.config());
        let precision = self.flags.engine.dtype()?.precision(1);
        // the smallest program: others are planned when it is known how large they must be
        let spec = SessionSpec { eval: Some((1, 1)), precision, ..SessionSpec::default() };
        let needs = spec.layout(&config)?.total() as u64;
        check_fits(engine.as_ref(), needs, |_| "use a smaller model or another device".into())?;
        self.device = engine.name().to_owned();
        let mut session = Session::new(engine, config, &spec)?;
        load(&mut session, self.source.as_mut(), || control.stop_reason().is_some())?;
        Ok(session)
    }

    /// The folder or file that has the weights; of a run, its checkpoint.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// For weights with adapters in them: the base, and the weights that differ from it.
    pub fn adapted(&self) -> Option<AdaptedFrom> {
        self.source.adapted()
    }

    /// A weight by its name, rows after rows.
    pub fn weight(&mut self, name: &str) -> Result<Vec<f32>, Refusal> {
        let specs = self.source.config().tensors();
        let Some(spec) = specs.into_iter().find(|spec| spec.name == name) else {
            return Err(Refusal::input(format!("the model has no weight {name}")));
        };
        let mut values = vec![0.0; spec.shape.numel()];
        let read = self.source.read_unchecked(name, &mut values);
        read.map(|()| values).map_err(|error| Refusal::of(&error.into()))
    }

    /// The device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// f32, tf32 or bf16.
    pub fn dtype(&self) -> Result<String, Refusal> {
        self.flags.engine.dtype().map(FlagValue::name).map_err(|error| Refusal::of(&error))
    }

    /// The sizes.
    pub fn config(&self) -> ModelConfig {
        self.source.config()
    }

    fn tokenizer(&self) -> Result<&Tokenizer, Refusal> {
        self.tokenizer.as_ref().map_err(Refusal::of)
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

    /// What a text is continued from, as `ironhorse generate` does.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, Refusal> {
        self.tokenizer()?.prompt(text).map_err(|error| Refusal::of(&error.into()))
    }

    /// The prompt that the assistant's answer to these messages continues, by the template beside the tokenizer, and the token
    /// that ends the answer. `messages` is a JSON list as in `docs/chat.md`.
    pub fn chat_prompt(&mut self, messages: &str) -> Result<(Vec<u32>, Option<u32>), Refusal> {
        let line = format!("{{\"messages\": {messages}}}");
        let record =
            Record::parse(&line).map_err(|error| Refusal::input(format!("the conversation {error}")))?;
        let Record::Messages(conversation) = record else {
            return Err(Refusal::input(
                "messages is not a conversation, expected a list of objects with role and content",
            ));
        };
        let chat = match self.chat.take() {
            Some(chat) => chat,
            None => Chat::open(self.tokenizer()?.name(), None).map_err(|error| Refusal::of(&error.into()))?,
        };
        let chat = self.chat.insert(chat);
        let text = chat.prompt(&conversation.messages, true).map_err(|error| Refusal::of(&error.into()))?;
        let ids = chat.tokenizer().encode_as(text.as_bytes(), Special::Tokens);
        Ok((ids.map_err(|error| Refusal::of(&error.into()))?, chat.end()))
    }

    /// Writes a Hugging Face folder; `settings` are those of `ironhorse convert` as JSON.
    pub fn save(&mut self, folder: &Path, settings: &str) -> Result<(), Refusal> {
        let saved = read_settings::<StoredArgs>("convert", "save_pretrained", settings)
            .and_then(|stored| to_folder(self.source.as_mut(), folder, &stored));
        saved.map_err(|error| Refusal::of(&error))
    }
}

/// The settings of a call, a JSON object whose keys are the flags of a command.
fn read_settings<T: Args>(command: &'static str, called: &str, json: &str) -> Result<T> {
    let line = line_of(command, table_of_json(json)?, called)?;
    let flags = clap::Command::new(command).args_override_self(true).disable_help_flag(true);
    let words = line.args.iter().skip(1); // the command stands where a program does
    let read =
        T::augment_args(flags).try_get_matches_from(words).and_then(|found| T::from_arg_matches(&found));
    read.map_err(|error| anyhow!(usage::one_line(&error, &line)))
}

/// Refuses what the machine has no memory for. A GPU says so itself, before anything is lost.
fn check_growth(session: &mut Session, layout: &Layout) -> Result<()> {
    let engine = session.engine();
    match engine.memory().free {
        Some(_) => Ok(()),
        None => check_fits(engine, layout.total() as u64, |_| "give fewer or shorter sequences".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;

    #[test]
    fn what_cannot_be_opened_is_named() {
        for flags in [&["--model=none/at/all"][..], &[], &["--model=none", "--dtype=f8"]] {
            let Err(refusal) = OpenModel::open(flags.iter().map(OsString::from), &Control::default()) else {
                panic!("{flags:?}")
            };
            assert_eq!(refusal.cause, Cause::Input, "{flags:?}");
            assert!(!refusal.text.is_empty() && !refusal.text.contains('\n'), "{}", refusal.text);
        }
    }

    #[test]
    fn settings_are_read_by_the_flags_of_a_command() {
        let read = |json| read_settings::<StoredArgs>("convert", "save_pretrained", json).map(drop);
        assert!(read(r#"{"dtype": "bf16", "shard_size": "2GB"}"#).is_ok());
        let refused = |json| read(json).unwrap_err().to_string();
        assert!(
            refused(r#"{"dtype": "f8"}"#).starts_with("save_pretrained: key `dtype`: invalid value 'f8'")
        );
        assert!(refused(r#"{"size": 3}"#).starts_with("save_pretrained: key `size`: unexpected argument"));
    }
}
