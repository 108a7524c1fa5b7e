//! The choices a user has.

use std::path::PathBuf;

/// Which attention runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// Our backward for Hopper where it takes the shape; else cuDNN where it is present and accepts it, else our other kernels.
    #[default]
    Auto,
    /// cuDNN, or an error.
    Cudnn,
    /// Our own flash-attention kernels.
    Own,
    /// Our own kernels that use no tensor cores.
    Plain,
}

/// How the engine works.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Index of the GPU.
    pub device: usize,
    /// f32 products may round their operands to tf32.
    pub tf32: bool,
    /// Allow results whose last bits differ from run to run, where that is faster.
    pub fast: bool,
    /// Which attention runs.
    pub attention: Attention,
    /// Replay sections as CUDA graphs.
    pub graphs: bool,
    /// What ranks exchange goes on beside what they compute.
    pub overlap: bool,
    /// The folder that keeps compiled kernels and chosen algorithms; `None` means the user's cache folder.
    pub cache: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        let attention = Attention::Auto;
        Self { device: 0, tf32: false, fast: false, attention, graphs: true, overlap: true, cache: None }
    }
}
