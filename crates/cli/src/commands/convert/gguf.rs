//! `ironhorse convert X NAME.gguf`

use super::ConvertArgs;
use crate::{Outcome, out};
use anyhow::Result;
use clap::ValueEnum;
use ironhorse::text::tokenizer::{Told, gguf_tokenizer};
use ironhorse::train::format::WeightSource;
use ironhorse::train::format::gguf::{GgufOptions, GgufType, note, write_gguf};

/// How matrices are stored.
#[derive(Clone, Copy, ValueEnum)]
pub enum Stored {
    /// IEEE single precision
    F32,
    /// IEEE half precision
    F16,
    /// bfloat16
    Bf16,
    /// Blocks of 32 bytes that share a scale
    #[value(name = "q8_0")]
    Q8_0,
}

impl From<Stored> for GgufType {
    fn from(stored: Stored) -> Self {
        match stored {
            Stored::F32 => Self::F32,
            Stored::F16 => Self::F16,
            Stored::Bf16 => Self::Bf16,
            Stored::Q8_0 => Self::Q8_0,
        }
    }
}

pub fn write(args: &ConvertArgs, source: &mut dyn WeightSource) -> Result<Outcome> {
    let config = source.config();
    let told = Told { vocab_size: config.vocab_size(), ids: source.text_tokens().ids(config.vocab_size()) };
    let tokenizer = gguf_tokenizer(&source.tokenizer_files()?, told)?;
    let about_tokens = match &tokenizer {
        None => Some("without a tokenizer, because there is none beside the weights"),
        Some(tokenizer) => tokenizer.note,
    };
    let notes = about_tokens.map(str::to_owned).into_iter().chain(note(&config));
    let notes: String = notes.map(|note| format!("; {note}")).collect();
    let name = args.from.file_name().map_or_else(|| config.kind().into(), |name| name.to_string_lossy());
    let options = GgufOptions {
        kind: args.kind.unwrap_or(Stored::F16).into(),
        name: name.into_owned(),
        tokenizer: tokenizer.map(|tokenizer| tokenizer.keys).unwrap_or_default(),
    };
    write_gguf(&args.to, &config, &options, |spec, out| source.read_tensor(&spec.name, out))?;
    let (to, params, kind) = (args.to.display(), config.told_params(), options.kind);
    out::line(format!("{to}: {params} parameters as {kind}{notes}"))?;
    Ok(Outcome::Done)
}
