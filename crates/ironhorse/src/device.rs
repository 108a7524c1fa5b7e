//! Choosing an engine.

use ironhorse_core::{Engine, Error, Result};
use ironhorse_cpu::{CpuEngine, CpuSettings};
use ironhorse_cuda::{CudaEngine, Settings};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// The device that programs run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first GPU that can be used, else the CPU.
    #[default]
    Auto,
    /// The CPU engine.
    Cpu,
    /// The CUDA engine on the GPU of this index.
    Cuda(usize),
}

impl Device {
    /// The device that will really be used: for `Auto` the first GPU if the CUDA engine can run on it, else the CPU.
    pub fn resolve(self) -> Self {
        static BEST: OnceLock<Device> = OnceLock::new();
        match self {
            Self::Auto => *BEST.get_or_init(best),
            chosen => chosen,
        }
    }

    /// An engine on this device, with what was asked for of the CPU (or only its threads, 0 meaning one for each core) and of
    /// the GPU.
    pub fn engine(self, cpu: impl Into<CpuSettings>, settings: &Settings) -> Result<Box<dyn Engine>> {
        match self.resolve() {
            Self::Auto | Self::Cpu => Ok(Box::new(CpuEngine::with(cpu.into()))),
            Self::Cuda(device) => Ok(Box::new(CudaEngine::new(Settings { device, ..settings.clone() })?)),
        }
    }
}

/// The first GPU if the CUDA engine can run on it. Warns about a GPU that cannot be used.
fn best() -> Device {
    match ironhorse_cuda::usable(0) {
        Ok(()) => Device::Cuda(0),
        Err(error) => {
            if ironhorse_cuda::devices().is_ok_and(|gpus| !gpus.is_empty()) {
                tracing::warn!("there is a GPU, but the CPU is used: {error}");
            }
            Device::Cpu
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::Input(format!("unknown device `{text}`: expected auto, cpu, cuda or cuda:N"));
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            other => {
                let index = other.strip_prefix("cuda:").ok_or_else(unknown)?;
                let digits = index.bytes().all(|byte| byte.is_ascii_digit());
                let index = index.parse().ok().filter(|_| digits);
                index.map(Self::Cuda).ok_or_else(unknown)
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_written() {
        for (text, device) in [
            ("auto", Device::Auto),
            ("cpu", Device::Cpu),
            ("cuda:0", Device::Cuda(0)),
            ("cuda:12", Device::Cuda(12)),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        for wrong in
            ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "CUDA", "cuda0", "cuda:99999999999999999999"]
        {
            let error = wrong.parse::<Device>().unwrap_err().to_string();
            assert!(error.contains("expected auto, cpu, cuda or cuda:N"), "{error}");
        }
    }
}
