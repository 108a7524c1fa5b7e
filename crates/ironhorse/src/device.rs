//! Choosing an engine.

use ironhorse_core::{Engine, Error, Result};
use ironhorse_cpu::CpuEngine;
use std::fmt;
use std::str::FromStr;

/// Where programs run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The best there is on this machine.
    #[default]
    Auto,
    /// The CPU engine.
    Cpu,
}

impl Device {
    /// The device that will really be used.
    pub fn resolve(self) -> Self {
        Self::Cpu
    }

    /// An engine on this device; `threads` is for the CPU, 0 meaning one for each core.
    pub fn engine(self, threads: usize) -> Box<dyn Engine> {
        match self.resolve() {
            Self::Auto | Self::Cpu => Box::new(CpuEngine::new(threads)),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            other if other == "cuda" || other.starts_with("cuda:") => Err(Error::Engine {
                engine: "cuda",
                what: "this version has no CUDA engine yet; use --device cpu".into(),
            }),
            other => Err(Error::Input(format!("unknown device `{other}`: expected auto or cpu"))),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
        })
    }
}
