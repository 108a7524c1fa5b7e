//! Flags that commands share, and configuration files: TOML whose keys are the flags.

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use ironhorse::Device;
use ironhorse::core::Engine;
use serde::Serialize;
use std::ffi::OsString;
use std::path::Path;

/// Where to compute.
#[derive(Args, Clone, Debug, Serialize)]
pub struct EngineArgs {
    /// auto or cpu
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: String,
    /// Threads of the CPU engine; 0 means one for each core
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
    /// Precision of weights and activations
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub dtype: Dtype,
}

/// Precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision
    F32,
    /// bfloat16 with f32 sums
    Bf16,
}

impl Dtype {
    /// Its name as a flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl EngineArgs {
    /// The device asked for.
    pub fn device(&self) -> Result<Device> {
        let device: Device = self.device.parse()?;
        if self.dtype == Dtype::Bf16 {
            bail!("the {} engine computes in f32 only; use --dtype f32", device.resolve());
        }
        Ok(device.resolve())
    }

    /// The engine asked for.
    pub fn engine(&self) -> Result<Box<dyn Engine>> {
        Ok(self.device()?.engine(self.threads))
    }
}

/// Replaces `--config FILE` by the flags the file stands for, before the other flags: flags on the line win.
pub fn expand_config(args: impl Iterator<Item = OsString>) -> Result<Vec<OsString>> {
    let args: Vec<OsString> = args.collect();
    let mut kept = Vec::with_capacity(args.len());
    let mut file = None;
    let mut rest = args.into_iter();
    while let Some(arg) = rest.next() {
        let text = arg.to_string_lossy();
        if text == "--" {
            kept.push(arg);
            kept.extend(rest);
            break;
        }
        if text == "--config" {
            file = Some(rest.next().context("--config needs a file")?);
        } else if let Some(path) = text.strip_prefix("--config=") {
            file = Some(path.into());
        } else {
            kept.push(arg);
        }
    }
    let Some(file) = file else { return Ok(kept) };
    let path = Path::new(&file);
    let text = std::fs::read_to_string(path).with_context(|| format!("{}: cannot read", path.display()))?;
    let flags = flags_of(&text).with_context(|| path.display().to_string())?;
    let after_command = kept.len().min(2);
    kept.splice(after_command..after_command, flags.into_iter().map(OsString::from));
    Ok(kept)
}

/// `key = value` becomes `--key=value`, `true` a bare flag, a list a repeated flag; `_` in keys is `-`.
fn flags_of(text: &str) -> Result<Vec<String>> {
    let table: toml::Table = text.parse().context("not valid TOML")?;
    let mut flags = Vec::new();
    for (key, value) in table {
        let flag = format!("--{}", key.replace('_', "-"));
        let mut push = |value: &toml::Value| -> Result<()> {
            match value {
                toml::Value::String(text) => flags.push(format!("{flag}={text}")),
                toml::Value::Integer(number) => flags.push(format!("{flag}={number}")),
                toml::Value::Float(number) => flags.push(format!("{flag}={number}")),
                toml::Value::Boolean(true) => flags.push(flag.clone()),
                toml::Value::Boolean(false) => {}
                other => {
                    bail!("{key} is {other}, expected a text, a number, true or false, or a list of those")
                }
            }
            Ok(())
        };
        match &value {
            toml::Value::Array(items) => items.iter().try_for_each(&mut push)?,
            single => push(single)?,
        }
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_flags() {
        let flags = flags_of(
            "steps = 3\nlr = 0.5\nval_every = 2\ndata = [\"a\", \"b\"]\noverwrite = true\nx = false",
        );
        assert_eq!(
            flags.unwrap(),
            ["--data=a", "--data=b", "--lr=0.5", "--overwrite", "--steps=3", "--val-every=2"]
        );
        assert!(flags_of("a = [[1]]").is_err());
        assert!(flags_of("a =").is_err());
    }

    #[test]
    fn the_file_comes_before_the_flags_of_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, "steps = 3\n").unwrap();
        let line = ["ironhorse", "train", "--steps=5", "--config", path.to_str().unwrap()];
        let args = expand_config(line.iter().map(OsString::from)).unwrap();
        assert_eq!(args, ["ironhorse", "train", "--steps=3", "--steps=5"]);
        let missing = ["ironhorse", "train", "--config=no-such-file.toml"];
        let error = expand_config(missing.iter().map(OsString::from)).unwrap_err();
        assert!(format!("{error:#}").starts_with("no-such-file.toml: cannot read"));
    }
}
