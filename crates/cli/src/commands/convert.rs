//! `ironhorse convert`

use super::fetch::names;
use crate::{Outcome, number, out};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ironhorse::train::format::hf::{HfOptions, write_hf};
use ironhorse::train::format::llmc_model::{ModelOptions, write_model};
use ironhorse::train::format::{Elem, open_weights};
use ironhorse::train::run::Control;
use std::path::PathBuf;

/// Converts weights to a Hugging Face folder (GPT-2, Llama, Mistral, Mixtral, Qwen) or llm.c's model .bin
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse convert runs/0001 model.bin\n  \
                        ironhorse convert gpt2_124M.bin gpt2-folder\n  \
                        ironhorse convert gpt2_124M.bin gpt2_124M_bf16.bin --dtype bf16\n  \
                        ironhorse convert runs/0001 mixtral-folder --dtype bf16 --shard-size 2GB\n  \
                        ironhorse convert Qwen/Qwen3-0.6B qwen3-f32")]
pub struct ConvertArgs {
    /// A run, a checkpoint, an answer key, a Hugging Face folder, a model .bin, or a model by name such as gpt2 or org/name
    from: PathBuf,
    /// NAME.bin for llm.c's format; any other name for a Hugging Face folder
    to: PathBuf,
    /// How to store the weights
    #[arg(long, value_enum, default_value_t = Stored::F32)]
    dtype: Stored,
    /// Largest size of one weights file in a Hugging Face folder: bytes, or KB, MB, GB, TB (powers of 1000, as in
    /// transformers); larger models are split into several files with an index
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = number::file_size)]
    shard_size: u64,
}

/// How weights are stored.
#[derive(Clone, Copy, ValueEnum)]
enum Stored {
    /// IEEE single precision
    F32,
    /// bfloat16
    Bf16,
}

pub fn run(args: &ConvertArgs) -> Result<Outcome> {
    if args.to.extension().is_some_and(|extension| extension == "safetensors") {
        bail!(
            "{}: a single .safetensors file would not record the model's sizes; name a folder, which gets \
             config.json and model.safetensors",
            args.to.display()
        );
    }
    let mut source = open_weights(&names::weights(&args.from, &Control::default())?)?;
    let config = source.config();
    let (elem, name) = match args.dtype {
        Stored::F32 => (Elem::F32, "f32"),
        Stored::Bf16 => (Elem::BF16, "bf16"),
    };
    if args.to.extension().is_some_and(|extension| extension == "bin") {
        let options = ModelOptions { elem, header: None };
        let gpt2 = config.gpt2("llm.c's .bin", "name a Hugging Face folder, without .bin")?;
        write_model(&args.to, gpt2, &options, |spec, out| source.read_tensor(&spec.name, out))?;
    } else {
        let options = HfOptions {
            elem,
            tokens: source.text_tokens(),
            tokenizer: source.tokenizer_files()?,
            shard: args.shard_size,
        };
        write_hf(&args.to, &config, &options, |spec, out| source.read_tensor(&spec.name, out))?;
    }
    out::line(format!("{}: {} parameters as {}", args.to.display(), config.told_params(), name))?;
    Ok(Outcome::Done)
}
