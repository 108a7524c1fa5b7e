//! `ironhorse convert`

use crate::{Outcome, out};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ironhorse::train::format::hf::{HfOptions, write_hf};
use ironhorse::train::format::llmc_model::{ModelOptions, write_model};
use ironhorse::train::format::{Elem, open_weights};
use std::path::PathBuf;

/// Converts weights between Hugging Face folders (GPT-2, Mixtral, Llama), checkpoints, answer keys and llm.c's model .bin
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse convert runs/0001 model.bin\n  \
                        ironhorse convert gpt2_124M.bin gpt2-folder\n  \
                        ironhorse convert gpt2_124M.bin gpt2_124M_bf16.bin --dtype bf16\n  \
                        ironhorse convert runs/0001 mixtral-folder --dtype bf16 --shard-size 2GB")]
pub struct ConvertArgs {
    /// A model .bin, a Hugging Face folder, a checkpoint or an answer key
    from: PathBuf,
    /// A name ending in .bin for llm.c's format, any other but .safetensors for a Hugging Face folder
    to: PathBuf,
    /// How to store the weights
    #[arg(long, value_enum, default_value_t = Stored::F32)]
    dtype: Stored,
    /// The most weights in one file of a Hugging Face folder: bytes, or KB, MB, GB, TB (powers of 1000, as transformers
    /// counts); what is more goes into several files with an index
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
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

/// Bytes: `300`, `20KB`, `1.5GB`. GiB and its like are powers of 1024.
fn parse_size(text: &str) -> std::result::Result<u64, String> {
    const UNITS: [(&str, f64); 8] = [
        ("kib", 1024.0),
        ("mib", 1_048_576.0),
        ("gib", 1_073_741_824.0),
        ("tib", 1_099_511_627_776.0),
        ("kb", 1e3),
        ("mb", 1e6),
        ("gb", 1e9),
        ("tb", 1e12),
    ];
    let lower = text.trim().to_ascii_lowercase();
    let unit = UNITS.iter().find_map(|(name, bytes)| lower.strip_suffix(name).map(|rest| (rest, *bytes)));
    let (number, bytes) = unit.unwrap_or((lower.strip_suffix('b').unwrap_or(&lower), 1.0));
    match number.trim().parse::<f64>().map(|number| number * bytes) {
        // below 2^53 every whole number of bytes is exact
        Ok(size) if (1.0..9e15).contains(&size) => Ok(size as u64),
        _ => Err("expected a number of bytes above 0, such as 500MB or 5GB".into()),
    }
}

pub fn run(args: &ConvertArgs) -> Result<Outcome> {
    if args.to.extension().is_some_and(|extension| extension == "safetensors") {
        bail!(
            "{}: a single .safetensors file has no sizes; name a folder, which gets config.json and model.safetensors",
            args.to.display()
        );
    }
    let mut source = open_weights(&args.from)?;
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
            tokenizer: source.tokenizer()?,
            shard: args.shard_size,
        };
        write_hf(&args.to, &config, &options, |spec, out| source.read_tensor(&spec.name, out))?;
    }
    out::line(format!("{}: {} parameters as {}", args.to.display(), config.told_params(), name))?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes_are_counted_as_transformers_does() {
        for (text, bytes) in [
            ("300", 300),
            ("7b", 7),
            ("20KB", 20_000),
            (" 1.5 gb ", 1_500_000_000),
            ("2GiB", 2 << 30),
            ("3TB", 3_000_000_000_000),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GB", "0", "-1GB", "0.1b", "nan", "inf", "1e30", "5 GBs", "five"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
