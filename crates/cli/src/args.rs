//! Flags that commands share, and configuration files: TOML whose keys are the flags.

use crate::number;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use ironhorse::Device;
use ironhorse::core::{Engine, Precision};
use ironhorse::cuda::{Attention, Settings};
use serde::Serialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where to compute.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct EngineArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: String,
    /// Threads of the CPU engine; 0 means one for each core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    pub threads: usize,
    /// Precision of weights and activations [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// GPU: allow results whose last bits differ from run to run, where that is faster
    #[arg(long)]
    pub fast: bool,
    /// GPU: which attention runs
    #[arg(long, value_enum, default_value_t = AttentionArg::Auto)]
    pub attention: AttentionArg,
    /// GPU: launch every kernel by itself instead of replaying CUDA graphs
    #[arg(long)]
    pub no_graphs: bool,
}

/// Attention on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionArg {
    /// cuDNN where it is there and takes the shape, else our kernels
    Auto,
    /// cuDNN or nothing
    Cudnn,
    /// our flash-attention kernels
    Own,
    /// those of our kernels that use no tensor cores
    Plain,
}

impl AttentionArg {
    /// As the CUDA engine calls it.
    pub fn setting(self) -> Attention {
        match self {
            Self::Auto => Attention::Auto,
            Self::Cudnn => Attention::Cudnn,
            Self::Own => Attention::Own,
            Self::Plain => Attention::Plain,
        }
    }
}

/// Precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision
    F32,
    /// f32 whose products round their operands to 10 bits (GPU)
    Tf32,
    /// bfloat16 with f32 sums
    Bf16,
}

impl Dtype {
    /// Its name as a flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
        }
    }
}

impl Dtype {
    /// The element types of a program in this precision. Gradients that add up over micro-steps are f32.
    pub fn precision(self, micro_steps: u32) -> Precision {
        match self {
            Self::F32 | Self::Tf32 => Precision::F32,
            Self::Bf16 if micro_steps > 1 => Precision::BF16_F32_GRADS,
            Self::Bf16 => Precision::BF16,
        }
    }
}

impl EngineArgs {
    /// The device asked for.
    pub fn device(&self) -> Result<Device> {
        let device = self.device.parse::<Device>()?.resolve();
        match self.dtype {
            Some(dtype @ (Dtype::Bf16 | Dtype::Tf32)) if device == Device::Cpu => {
                bail!("the cpu engine computes in f32 only, not {}; use --dtype f32", dtype.name())
            }
            _ => Ok(device),
        }
    }

    /// The precision asked for, or the one that suits the device.
    pub fn dtype(&self) -> Result<Dtype> {
        let default = if self.device()? == Device::Cpu { Dtype::F32 } else { Dtype::Bf16 };
        Ok(self.dtype.unwrap_or(default))
    }

    /// The precision asked for, or f32: checks are exact unless asked otherwise.
    pub fn exact_dtype(&self) -> Result<Dtype> {
        self.device()?;
        Ok(self.dtype.unwrap_or(Dtype::F32))
    }

    /// The engine asked for.
    pub fn engine(&self) -> Result<Box<dyn Engine>> {
        Ok(self.device()?.engine(self.threads, &self.cuda_settings())?)
    }

    /// What the flags say about the CUDA engine.
    pub fn cuda_settings(&self) -> Settings {
        Settings {
            tf32: self.dtype == Some(Dtype::Tf32),
            fast: self.fast,
            attention: self.attention.setting(),
            graphs: !self.no_graphs,
            ..Settings::default()
        }
    }

    /// How many threads the CPU engine has: those asked for, which [`number::threads`] limits, or one for each core.
    pub fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }
}

/// What the update keeps beside bf16 weights.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StateArgs {
    /// bf16: how the exact weights are kept that the update works on
    #[arg(long, value_enum, default_value_t = MasterArg::F32)]
    pub master: MasterArg,
    /// bf16: how the two moments of AdamW are kept
    #[arg(long, value_enum, default_value_t = MomentsArg::F32)]
    pub moments: MomentsArg,
}

/// Exact weights beside bf16 ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterArg {
    /// Whole: 4 bytes each; the bf16 weights are rounded at random
    F32,
    /// The 16 bits that bf16 weights lack: 2 bytes each; they are rounded to the nearest
    Residual,
}

/// Moments of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MomentsArg {
    /// 4 bytes each
    F32,
    /// 2 bytes each, rounded at random by seed, step and place
    Bf16,
}

impl MasterArg {
    /// Its name as a flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Residual => "residual",
        }
    }
}

impl MomentsArg {
    /// Its name as a flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl StateArgs {
    /// What is not the default, to follow a precision in a report.
    pub fn text(self) -> String {
        let mut text = String::new();
        if self.master != MasterArg::F32 {
            text += &format!(", master {}", self.master.name());
        }
        if self.moments != MomentsArg::F32 {
            text += &format!(", moments {}", self.moments.name());
        }
        text
    }

    /// The element types of a training program: [`Dtype::precision`] with these choices.
    pub fn precision(self, dtype: Dtype, micro_steps: u32) -> Result<Precision> {
        let refused = match self {
            _ if dtype == Dtype::Bf16 => None,
            Self { master: MasterArg::Residual, .. } => Some("--master residual"),
            Self { moments: MomentsArg::Bf16, .. } => Some("--moments bf16"),
            _ => None,
        };
        if let Some(flag) = refused {
            let name = dtype.name();
            bail!("{flag} goes with bf16 weights, not {name}; use --dtype bf16 on a GPU, or leave it out");
        }
        let mut precision = dtype.precision(micro_steps);
        if self.master == MasterArg::Residual {
            precision = precision.with_residual();
        }
        if self.moments == MomentsArg::Bf16 {
            precision = precision.with_bf16_moments();
        }
        Ok(precision)
    }
}

/// A command line, with the flags that its configuration file stands for.
#[derive(Debug, Default)]
pub struct Line {
    /// What the parser gets.
    pub args: Vec<OsString>,
    /// The configuration file, and the keys taken from it.
    config: Option<(PathBuf, Vec<String>)>,
}

impl Line {
    /// The configuration file and its key, if that is where a flag comes from.
    pub fn key_of(&self, flag: &str) -> Option<(&Path, &str)> {
        let (path, keys) = self.config.as_ref()?;
        let key = keys.iter().find(|key| flag_of(key) == flag)?;
        Some((path, key))
    }
}

/// Replaces `--config FILE` by the flags the file stands for; those that the line gives too are left out.
pub fn expand_config(args: impl Iterator<Item = OsString>) -> Result<Line> {
    let mut kept = Vec::new();
    let mut file = None;
    let mut rest = args;
    while let Some(arg) = rest.next() {
        if arg == "--" {
            kept.push(arg);
            kept.extend(rest);
            break;
        }
        if arg == "--config" {
            file = Some(rest.next().context("--config needs a file")?);
        } else if let Some(path) = arg.as_encoded_bytes().strip_prefix(b"--config=") {
            file = Some(os_string(path)?);
        } else {
            kept.push(arg);
        }
    }
    let Some(path) = file.map(PathBuf::from) else { return Ok(Line { args: kept, config: None }) };
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}: cannot read", path.display()))?;
    let mut flags = flags_of(&text).with_context(|| path.display().to_string())?;
    let given = |flag: &str| {
        let is_given = |arg: &OsString| {
            let rest = arg.as_encoded_bytes().strip_prefix(flag.as_bytes());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"="))
        };
        kept.iter().any(is_given)
    };
    flags.retain(|(key, _)| !given(&flag_of(key)));
    // flags go anywhere behind the command, but not behind `--`
    let end = kept.iter().position(|arg| arg == "--").unwrap_or(kept.len());
    let keys = flags.iter().map(|(key, _)| key.clone()).collect();
    kept.splice(end..end, flags.into_iter().map(|(_, flag)| flag.into()));
    Ok(Line { args: kept, config: Some((path, keys)) })
}

/// The rest of an argument, as it was given.
#[cfg(unix)]
fn os_string(bytes: &[u8]) -> Result<OsString> {
    use std::os::unix::ffi::OsStrExt;
    Ok(std::ffi::OsStr::from_bytes(bytes).to_owned())
}

#[cfg(not(unix))]
fn os_string(bytes: &[u8]) -> Result<OsString> {
    Ok(std::str::from_utf8(bytes).context("--config=FILE is not UTF-8; write --config FILE")?.into())
}

/// Refuses paths that config.toml, which is UTF-8, could not hold: the run could not be made again from it. Each comes
/// with its flag.
pub fn check_utf8<'a>(paths: impl IntoIterator<Item = (&'a str, &'a Path)>) -> Result<()> {
    for (flag, path) in paths {
        if path.to_str().is_none() {
            bail!(
                "{flag} {}: the path is not UTF-8, so config.toml cannot hold it; rename it, or give a link to it",
                path.display()
            );
        }
    }
    Ok(())
}

fn flag_of(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// `key = value` becomes `--key=value`, `true` a bare flag, a list a repeated flag; `_` in keys is `-`.
fn flags_of(text: &str) -> Result<Vec<(String, String)>> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        let line = 1 + text.bytes().take(start).filter(|&byte| byte == b'\n').count();
        anyhow::anyhow!("not TOML, line {line}: {}", error.message())
    })?;
    let mut flags = Vec::new();
    for (key, value) in table {
        if key == "config" {
            bail!("key `config`: a configuration file cannot name another");
        }
        let flag = flag_of(&key);
        let mut push = |value: &toml::Value| -> Result<()> {
            let flag = match value {
                toml::Value::String(text) => format!("{flag}={text}"),
                toml::Value::Integer(number) => format!("{flag}={number}"),
                toml::Value::Float(number) => format!("{flag}={number}"),
                toml::Value::Boolean(true) => flag.clone(),
                toml::Value::Boolean(false) => return Ok(()),
                other => bail!(
                    "key `{key}` is a {}, expected a text, a number, true or false, or a list of those",
                    other.type_str()
                ),
            };
            flags.push((key.clone(), flag));
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
        let pairs = flags_of(
            "steps = 3\nlr = 0.5\nval_every = 2\ndata = [\"a\", \"b\"]\noverwrite = true\nx = false",
        );
        let flags: Vec<String> = pairs.unwrap().into_iter().map(|(_, flag)| flag).collect();
        assert_eq!(flags, ["--data=a", "--data=b", "--lr=0.5", "--overwrite", "--steps=3", "--val-every=2"]);
        assert!(flags_of("a = [[1]]").is_err());
        assert!(flags_of("a =").is_err());
    }

    #[test]
    fn flags_of_the_line_win() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, "steps = 3\nval_every = 2\ndata = [\"a\"]\n").unwrap();
        let line = [
            "ironhorse",
            "train",
            "--steps=5",
            "--data",
            "b",
            "--config",
            path.to_str().unwrap(),
            "--",
            "--seq",
        ];
        let line = expand_config(line.iter().map(OsString::from)).unwrap();
        assert_eq!(
            line.args,
            ["ironhorse", "train", "--steps=5", "--data", "b", "--val-every=2", "--", "--seq"]
        );
        assert_eq!(line.key_of("--val-every"), Some((path.as_path(), "val_every")));
        assert_eq!(line.key_of("--steps"), None);
        // a flag is not given by one that begins like it
        let line = ["ironhorse", "train", "--steps-more", "--config", path.to_str().unwrap()];
        let line = expand_config(line.iter().map(OsString::from)).unwrap();
        assert!(line.args.contains(&"--steps=3".into()));
        let missing = ["ironhorse", "train", "--config=no-such-file.toml"];
        let error = expand_config(missing.iter().map(OsString::from)).unwrap_err();
        assert!(format!("{error:#}").starts_with("no-such-file.toml: cannot read"));
    }
    #[cfg(target_os = "linux")]
    #[test]
    fn paths_need_not_be_utf8() {
        use std::os::unix::ffi::{OsStrExt, OsStringExt};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(std::ffi::OsStr::from_bytes(b"c\xff.toml"));
        std::fs::write(&path, "steps = 3\n").unwrap();
        let mut joined = OsString::from("--config=");
        joined.push(&path);
        let out = OsString::from_vec(b"--out=r\xfe".to_vec());
        for config in [vec![joined], vec!["--config".into(), path.clone().into()]] {
            let line = ["ironhorse".into(), "train".into(), out.clone()].into_iter().chain(config);
            let line = expand_config(line).unwrap();
            assert_eq!(
                line.args,
                [OsString::from("ironhorse"), "train".into(), out.clone(), "--steps=3".into()]
            );
            assert_eq!(line.key_of("--steps").unwrap().0, path);
        }
        let text = check_utf8([("--out", Path::new("a")), ("--init", &path)]).unwrap_err().to_string();
        assert!(text.starts_with("--init ") && text.contains("config.toml cannot hold it"), "{text}");
        assert!(check_utf8([("--init", Path::new("a"))]).is_ok());
    }
}
