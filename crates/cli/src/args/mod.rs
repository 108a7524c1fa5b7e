//! Flags that commands share: where to compute and in which precision; `config_file.rs` reads flags from a file.

mod chat;
pub mod config_file;
mod lora;
mod ranks;

pub use chat::{MaskArg, TemplateArgs};
pub use lora::LoraArgs;
pub use ranks::{RankArgs, ShardArg, SumArg};

use crate::{number, out};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ironhorse::Device;
use ironhorse::core::{Engine, Fp8, Fp8Products, Fp8Scales, Operands, Optimizer, Precision};
use ironhorse::cpu::CpuSettings;
use ironhorse::cuda::{Attention, Settings};
use ironhorse::train::model::{ModelConfig, Recompute};
use serde::Serialize;
use std::path::Path;

/// Headings of the help, in the order in which `train` shows them.
pub mod heading {
    pub const MODEL: &str = "Model";
    pub const LORA: &str = "Adapters (LoRA)";
    pub const DATA: &str = "Data";
    pub const STEPS: &str = "Batches and steps";
    pub const OPTIMIZER: &str = "Optimizer";
    pub const VALIDATION: &str = "Validation and samples";
    pub const SAMPLING: &str = "Sampling";
    pub const MEMORY: &str = "Memory";
    pub const DEVICE: &str = "Device";
    pub const RANKS: &str = "Several processes";
    pub const CHECKPOINTS: &str = "Checkpoints, stopping and resuming";
    pub const CHECKS: &str = "What to compare";
    pub const OUTPUT: &str = "Output";
}

/// The help of `--json`, which writes this.
macro_rules! json_help {
    ($what:literal) => {
        concat!(
            "Also write ",
            $what,
            " as JSON to FILE; - means standard output, and everything else goes to standard error"
        )
    };
}
pub(crate) use json_help;

/// The help of `--model`, which ends with what else the command takes.
pub fn model_help(last: &str) -> String {
    let names = ModelConfig::listed_names();
    format!(
        "A named model ({names}), sizes such as n_layer=2,n_head=4,n_embd=64, changes such as gpt2,act=relu2, a TOML file, {last}"
    )
}

/// Where to compute.
#[derive(Args, Clone, Debug, Serialize)]
#[command(next_help_heading = heading::DEVICE)]
#[serde(rename_all = "kebab-case")]
pub struct EngineArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: String,
    /// CPU threads; 0 means one for each core
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = number::threads)]
    pub threads: usize,
    /// The GPU of a process that shares the machine with others, and its threads if --threads does not say.
    #[arg(skip)]
    #[serde(skip)]
    pub share: (Option<usize>, usize),
    /// Precision of weights and activations [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    #[command(flatten)]
    #[serde(flatten)]
    pub cuda: CudaArgs,
}

/// How the CUDA engine computes.
#[derive(Args, Clone, Copy, Debug, Serialize)]
#[command(next_help_heading = heading::DEVICE)]
#[serde(rename_all = "kebab-case")]
pub struct CudaArgs {
    /// GPU: allow results whose last bits differ from run to run, where that is faster; with several GPUs NCCL adds gradients, so bits
    /// also depend on how many there are
    #[arg(long)]
    pub fast: bool,
    /// GPU: which attention kernels to use
    #[arg(long, value_enum, default_value_t = AttentionArg::Auto)]
    pub attention: AttentionArg,
    /// GPU: launch kernels one by one instead of replaying CUDA graphs
    #[arg(long)]
    no_graphs: bool,
    /// Several GPUs: exchange gradients on the stream of the backward, not beside it
    #[arg(long)]
    #[serde(skip)]
    no_overlap: bool,
}

impl CudaArgs {
    /// The settings as the CUDA engine takes them.
    pub fn settings(self, tf32: bool) -> Settings {
        let (attention, graphs, overlap) = (self.attention.into(), !self.no_graphs, !self.no_overlap);
        Settings { tf32, fast: self.fast, attention, graphs, overlap, ..Settings::default() }
    }
}

/// Declares the values of a flag, each with its help; they stand for the variants of the same names of another type.
macro_rules! flag_values {
    ($(#[$doc:meta])* $name:ident for $of:ty { $($(#[$help:meta])* $variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
        #[serde(rename_all = "lowercase")]
        pub enum $name {
            $($(#[$help])* $variant,)*
        }

        impl From<$name> for $of {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => Self::$variant,)*
                }
            }
        }
    };
}
pub(crate) use flag_values;

flag_values! {
    /// Attention on the GPU.
    AttentionArg for Attention {
        /// our backward for Hopper, cuDNN where it is installed and supports the shape, else our kernels
        Auto,
        /// cuDNN; an error where it is missing or does not support the shape
        Cudnn,
        /// our flash-attention kernels
        Own,
        /// our kernels without tensor cores
        Plain,
    }
}

flag_values! {
    /// What the backward pass recomputes.
    RecomputeArg for Recompute {
        /// Nothing: keep every activation
        None,
        /// The activation of the MLP
        Gelu,
        /// Also the norms and the rows permuted to the experts
        Full,
        /// Also everything inside the experts
        Experts,
    }
}

/// The name of a flag's value on the command line.
pub trait FlagValue: ValueEnum {
    /// The value as it is typed.
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl<T: ValueEnum> FlagValue for T {}

/// Precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision
    F32,
    /// f32 whose products round their operands to 10 bits (GPU)
    Tf32,
    /// f32 whose linear layers, and with AMX attention, round their operands to bf16 (CPU; several times as fast with AMX)
    #[serde(rename = "bf16-products")]
    Bf16Products,
    /// bfloat16 with f32 sums; on the CPU, bf16-products
    Bf16,
    /// bf16 whose training multiplies the layers of the blocks in 8 bits, each tensor scaled (GPU of compute capability 8.9 or newer)
    Fp8,
    /// the same, with the output head in 8 bits too
    #[serde(rename = "fp8-head")]
    Fp8Head,
}

impl Dtype {
    /// Whether weights are bf16.
    pub fn is_bf16(self) -> bool {
        matches!(self, Self::Bf16 | Self::Fp8 | Self::Fp8Head)
    }

    /// What products of f32 round their operands to.
    pub fn operands(self) -> Operands {
        match self {
            Self::Tf32 => Operands::Tf32,
            Self::Bf16Products => Operands::Bf16,
            Self::F32 | Self::Bf16 | Self::Fp8 | Self::Fp8Head => Operands::F32,
        }
    }

    /// What a device computes for this word; an error for what it cannot.
    pub fn on(self, device: Device) -> Result<Self> {
        match (self, device == Device::Cpu) {
            (Self::Bf16, true) => Ok(Self::Bf16Products),
            (Self::F32 | Self::Bf16Products, true) => Ok(self),
            (Self::Bf16Products, false) => {
                bail!("--dtype bf16-products: the cuda engine has no such products; use --dtype bf16")
            }
            (_, true) => {
                bail!("the cpu engine computes in f32 and bf16, not {}; use --dtype bf16", self.name())
            }
            (_, false) => Ok(self),
        }
    }

    /// The products of 8-bit numbers.
    fn fp8(self) -> Option<Fp8Products> {
        let scales = Fp8Scales::default();
        let products = |head| Some(Fp8Products { head, experts: true, gradients: Fp8::E5M2, scales });
        match self {
            Self::Fp8 => products(false),
            Self::Fp8Head => products(true),
            Self::F32 | Self::Tf32 | Self::Bf16Products | Self::Bf16 => None,
        }
    }

    /// The element types of a program in this precision. Gradients that add up over micro-steps are f32.
    pub fn precision(self, micro_steps: u32) -> Precision {
        match self {
            Self::F32 | Self::Tf32 | Self::Bf16Products => Precision::F32,
            _ => {
                let bf16 = if micro_steps > 1 { Precision::BF16_F32_GRADS } else { Precision::BF16 };
                Precision { fp8: self.fp8(), ..bf16 }
            }
        }
    }
}

impl EngineArgs {
    /// The device asked for.
    pub fn device(&self) -> Result<Device> {
        let device = match (self.device.parse::<Device>()?.resolve(), self.share.0) {
            (Device::Cuda(_), Some(gpu)) => Device::Cuda(gpu),
            (device, _) => device,
        };
        self.dtype.map_or(Ok(Dtype::F32), |dtype| dtype.on(device))?;
        Ok(device)
    }

    /// The precision asked for, if one was.
    pub fn asked_dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    /// The precision asked for, or the one that suits the device.
    pub fn dtype(&self) -> Result<Dtype> {
        let device = self.device()?;
        let default = if device == Device::Cpu { Dtype::F32 } else { Dtype::Bf16 };
        self.dtype.unwrap_or(default).on(device)
    }

    /// The precision asked for, or f32: checks are exact unless asked otherwise.
    pub fn exact_dtype(&self) -> Result<Dtype> {
        self.dtype.unwrap_or(Dtype::F32).on(self.device()?)
    }

    /// The engine asked for.
    pub fn engine(&self) -> Result<Box<dyn Engine>> {
        let threads = if self.threads == 0 { self.share.1 } else { self.threads };
        let operands = self.exact_dtype()?.operands();
        if operands == Operands::Bf16 && !ironhorse::cpu::multiplies_bf16() {
            out::note(
                "this processor has no instructions for bf16 (AMX): its products are no faster than in f32",
            );
        }
        Ok(self.device()?.engine(CpuSettings { threads, operands }, &self.cuda_settings())?)
    }

    /// What the flags say about the CUDA engine.
    pub fn cuda_settings(&self) -> Settings {
        self.cuda.settings(self.dtype == Some(Dtype::Tf32))
    }

    /// How many threads the CPU engine has: those asked for, which [`number::threads`] limits, or one for each core.
    pub fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }
}

flag_values! {
    /// What updates the matrices of the blocks.
    OptimizerArg for Optimizer {
        /// AdamW for every parameter
        #[value(name = "adamw")]
        AdamW,
        /// Muon for the matrices of attention, MLP and experts, AdamW for embeddings, head, router, norms and biases; with
        /// the learning rate and weight decay of AdamW, and half of its state
        Muon,
    }
}

/// The optimizer, and what it keeps beside bf16 weights.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[command(next_help_heading = heading::MEMORY)]
pub struct StateArgs {
    /// What updates the matrices of the blocks
    #[arg(long, help_heading = heading::OPTIMIZER, value_enum, default_value_t = OptimizerArg::AdamW)]
    pub optimizer: OptimizerArg,
    /// With bf16 weights: how the master weights that the optimizer updates are stored
    #[arg(long, value_enum, default_value_t = MasterArg::F32)]
    pub master: MasterArg,
    /// With bf16 weights: how the moments of the optimizer are stored
    #[arg(long, value_enum, default_value_t = MomentsArg::F32)]
    pub moments: MomentsArg,
    #[command(flatten)]
    #[serde(flatten)]
    pub fp8: Fp8Args,
}

/// How tensors are kept in 8 bits.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = heading::DEVICE)]
pub struct Fp8Args {
    /// With --dtype fp8: what the scales of activations and gradients are made from
    #[arg(long, value_enum, default_value_t = ScalesArg::Delayed)]
    pub fp8_scales: ScalesArg,
    /// With --dtype fp8: the format of gradients
    #[arg(long, value_enum, default_value_t = GradientsArg::E5m2)]
    pub fp8_gradients: GradientsArg,
}

/// The format of gradients in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientsArg {
    /// 3 bits of fraction, 18 powers of two
    E4m3,
    /// 2 bits of fraction, 32 powers of two
    E5m2,
}

flag_values! {
    /// What the scales of activations and gradients in 8 bits are made from.
    ScalesArg for Fp8Scales {
        /// the largest elements of earlier steps; in steps of several micro-steps or ranks, the tensor's own
        Delayed,
        /// the largest element of the tensor itself, at another pass over it
        Current,
    }
}

/// Master weights beside bf16 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterArg {
    /// f32, 4 bytes each; the bf16 weights are rounded stochastically
    F32,
    /// 16-bit residuals beside the bf16 weights, 2 bytes each, which restore the f32 weights exactly; the bf16
    /// weights are rounded to nearest
    Residual,
}

/// Moments of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MomentsArg {
    /// 4 bytes each
    F32,
    /// 2 bytes each, rounded stochastically; the random bits depend on seed, step and index only
    Bf16,
}

impl StateArgs {
    /// What is not the default, to follow a precision in a report.
    pub fn text(self) -> String {
        let mut text = String::new();
        if self.optimizer != OptimizerArg::AdamW {
            text += &format!(", {}", self.optimizer.name());
        }
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
            _ if dtype.is_bf16() => None,
            Self { master: MasterArg::Residual, .. } => Some("--master residual"),
            Self { moments: MomentsArg::Bf16, .. } => Some("--moments bf16"),
            _ => None,
        };
        if let Some(flag) = refused {
            let name = dtype.name();
            bail!("{flag} goes with bf16 weights, not {name}; use --dtype bf16 on a GPU, or leave it out");
        }
        let mut precision = dtype.precision(micro_steps).with_optimizer(self.optimizer.into());
        if let Some(fp8) = &mut precision.fp8 {
            fp8.scales = self.fp8.fp8_scales.into();
            fp8.gradients = match self.fp8.fp8_gradients {
                GradientsArg::E4m3 => Fp8::E4M3,
                GradientsArg::E5m2 => Fp8::E5M2,
            };
        }
        if self.master == MasterArg::Residual {
            precision = precision.with_residual();
        }
        if self.moments == MomentsArg::Bf16 {
            precision = precision.with_bf16_moments();
        }
        Ok(precision)
    }
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
