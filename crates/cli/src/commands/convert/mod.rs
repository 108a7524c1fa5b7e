//! `ironhorse convert`

mod gguf;
mod merge;

use self::merge::{Difference, difference};
use super::fetch::names;
use super::model::beside;
use crate::args::json_help;
use crate::{Outcome, number, out};
use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use ironhorse::Device;
use ironhorse::train::format::hf::{HfOptions, write_hf};
use ironhorse::train::format::llmc_model::{ModelOptions, write_model};
use ironhorse::train::format::peft::{AdapterFolder, Merged};
use ironhorse::train::format::{Elem, WeightSource, open_weights};
use ironhorse::train::run::Control;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Converts weights to a Hugging Face folder (GPT-2, Llama, Mistral, Mixtral, Qwen, Gemma 3), llm.c's model .bin, or GGUF for llama.cpp
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse convert runs/0001 model.bin\n  \
                        ironhorse convert gpt2_124M.bin gpt2-folder\n  \
                        ironhorse convert gpt2_124M.bin gpt2_124M_bf16.bin --dtype bf16\n  \
                        ironhorse convert runs/0001 mixtral-folder --dtype bf16 --shard-size 2GB\n  \
                        ironhorse convert Qwen/Qwen3-0.6B qwen3-f32\n  \
                        ironhorse convert Qwen/Qwen3-0.6B qwen3.gguf --type q8_0\n  \
                        ironhorse convert Qwen/Qwen3-0.6B merged --merge runs/0001 --dtype bf16    base and adapter in one")]
pub struct ConvertArgs {
    /// A run, a checkpoint, an answer key, a Hugging Face folder, a model .bin, or a model by name such as gpt2 or org/name
    from: PathBuf,
    /// NAME.bin for llm.c's format, NAME.gguf for llama.cpp's; any other name for a Hugging Face folder
    to: PathBuf,
    /// How to store the matrices in a .gguf; norms, biases and routers are f32, and the tokenizer and its chat template are
    /// inside [default: f16]
    #[arg(long = "type", value_enum)]
    kind: Option<gguf::Stored>,
    #[command(flatten)]
    stored: StoredArgs,
    /// An adapter (LoRA) to add to the weights: a folder of PEFT, or a run of `train --lora`; prints how far the result is
    /// from base and adapter side by side
    #[arg(long, value_name = "DIR")]
    merge: Option<PathBuf>,
    /// Where --merge compares: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: String,
    #[arg(long, help = json_help!("what was written, and what --merge found"), value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How to write weights.
#[derive(Args)]
pub struct StoredArgs {
    /// How to store the weights in a folder or a .bin [default: f32]
    #[arg(long, value_enum)]
    dtype: Option<Stored>,
    /// Largest size of one weights file in a Hugging Face folder: bytes, or KB, MB, GB, TB (powers of 1000, as in
    /// transformers); larger models are split into several files with an index
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = number::file_size)]
    shard_size: u64,
}

#[derive(Serialize)]
struct ConvertReport {
    to: PathBuf,
    parameters: usize,
    dtype: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    merge: Option<Difference>,
}

impl StoredArgs {
    /// How numbers are stored, and what that is called.
    fn elem(&self) -> (Elem, &'static str) {
        match self.dtype.unwrap_or(Stored::F32) {
            Stored::F32 => (Elem::F32, "f32"),
            Stored::Bf16 => (Elem::BF16, "bf16"),
        }
    }
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
    let is_gguf = args.to.extension().is_some_and(|extension| extension == "gguf");
    match (args.stored.dtype, args.kind) {
        (Some(_), _) if is_gguf => bail!("{}: a .gguf takes --type, not --dtype", args.to.display()),
        (_, Some(_)) if !is_gguf => {
            bail!("{}: only a .gguf takes --type; a folder or a .bin takes --dtype", args.to.display())
        }
        _ => {}
    }
    out::check_json(args.json.as_deref())?;
    let device = args.device.parse::<Device>()?;
    let from = names::weights(&args.from, &Control::default())?;
    let mut source = open_weights(&from)?;
    if let Some(adapter) = &args.merge {
        let adapter = AdapterFolder::open(adapter)?;
        adapter.doubt(&[&args.from, &from, source.path()]).iter().for_each(out::note);
        source = Box::new(Merged::new(source, adapter)?);
    }
    if is_gguf {
        return gguf::write(args, &mut *source);
    }
    let config = source.config();
    let (elem, name) = args.stored.elem();
    if args.to.extension().is_some_and(|extension| extension == "bin") {
        let options = ModelOptions { elem, header: None };
        let gpt2 = config.gpt2("llm.c's .bin", "name a Hugging Face folder, without .bin");
        let gpt2 = gpt2.map_err(|error| anyhow!("{}: {error}", args.to.display()))?;
        write_model(&args.to, gpt2, &options, |spec, out| source.read_tensor(&spec.name, out))?;
    } else {
        note_larger_tokenizer(source.as_ref(), &from)?;
        to_folder(source.as_mut(), &args.to, &args.stored)?;
    }
    out::line(format!("{}: {} parameters as {}", args.to.display(), config.told_params(), name))?;
    let merge = args.merge.as_ref().map(|adapter| {
        let found = difference(&from, &mut AdapterFolder::open(adapter)?, &args.to, device)?;
        out::line(found.text())?;
        anyhow::Ok(found)
    });
    let report = ConvertReport {
        to: args.to.clone(),
        parameters: config.told_params(),
        dtype: name,
        merge: merge.transpose()?,
    };
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

/// Says that the tokenizer beside the weights has tokens that the model has no rows for: it is copied as it is.
fn note_larger_tokenizer(source: &dyn WeightSource, from: &Path) -> Result<()> {
    let vocab = source.config().vocab_size();
    if let Some(tokenizer) = beside(source, from)?.filter(|tokenizer| tokenizer.vocab_size() > vocab) {
        out::note(format_args!(
            "{}: the tokenizer has {} tokens, the model only {vocab}; it is copied as it is, and a text with one of the others \
             cannot be computed",
            tokenizer.name(),
            tokenizer.vocab_size()
        ));
    }
    Ok(())
}

/// Writes weights and what belongs to them as a Hugging Face folder.
pub fn to_folder(source: &mut dyn WeightSource, to: &Path, stored: &StoredArgs) -> Result<()> {
    let (tokens, tokenizer) = (source.text_tokens(), source.tokenizer_files()?);
    let options = HfOptions { elem: stored.elem().0, tokens, tokenizer, shard: stored.shard_size };
    let config = source.config();
    Ok(write_hf(to, &config, &options, |spec, out| source.read_tensor(&spec.name, out))?)
}
