//! `ironhorse convert`

use crate::{Outcome, out};
use anyhow::Result;
use clap::{Args, ValueEnum};
use ironhorse::train::format::hf::{HfOptions, write_hf};
use ironhorse::train::format::llmc_model::{ModelOptions, write_model};
use ironhorse::train::format::{Elem, open_weights};
use std::path::PathBuf;

/// Converts weights between Hugging Face folders (GPT-2, Mixtral, Llama), checkpoints, answer keys and llm.c's model .bin
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse convert runs/0001/checkpoint model.bin\n  \
                        ironhorse convert gpt2_124M.bin gpt2-folder\n  \
                        ironhorse convert gpt2_124M.bin gpt2_124M_bf16.bin --dtype bf16")]
pub struct ConvertArgs {
    /// A model .bin, a Hugging Face folder, a checkpoint or an answer key
    from: PathBuf,
    /// A name ending in .bin for llm.c's format, any other for a Hugging Face folder
    to: PathBuf,
    /// How to store the weights
    #[arg(long, value_enum, default_value_t = Stored::F32)]
    dtype: Stored,
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
    let mut source = open_weights(&args.from)?;
    let config = source.config();
    let (elem, name) = match args.dtype {
        Stored::F32 => (Elem::F32, "f32"),
        Stored::Bf16 => (Elem::BF16, "bf16"),
    };
    if args.to.extension().is_some_and(|extension| extension == "bin") {
        let options = ModelOptions { elem, header: None };
        let gpt2 = config.gpt2("llm.c's .bin")?;
        write_model(&args.to, gpt2, &options, |spec, out| source.read_tensor(&spec.name, out))?;
    } else {
        let options = HfOptions { elem, eot: None };
        write_hf(&args.to, &config, &options, |spec, out| source.read_tensor(&spec.name, out))?;
    }
    out::line(format!("{}: {} parameters as {}", args.to.display(), config.num_params(), name))?;
    Ok(Outcome::Done)
}
