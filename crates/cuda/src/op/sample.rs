//! Choosing the next token on the device.

use super::elementwise::ctype;
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::{Grid, Lower};
use ironhorse_core::DType;

/// One row of logits and how to choose from it. The draw is a function of the scalars `seed` and `position`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Address of the chosen token, one i32; -1 when the logits allow none.
    pub out: u64,
    /// Address of the row.
    pub logits: u64,
    /// Its element type.
    pub dtype: DType,
    /// Columns that count.
    pub vocab: usize,
    /// 0 takes the largest logit, the lowest index among equals.
    pub temperature: f32,
    /// Keep this many of the most likely tokens and what ties with the last of them.
    pub top_k: Option<usize>,
    /// Keep the most likely tokens that together reach this probability.
    pub top_p: Option<f32>,
}

fn spec(dtype: DType) -> Result<Spec> {
    Ok(Spec::new("sample.cu").define("ACT", ctype(dtype)?))
}

/// Adds the launch. The settings were validated by the caller.
#[allow(dead_code, reason = "no op asks for it yet")]
pub(crate) fn sample(cx: &mut Lower<'_>, sample: &Sample) -> Result<()> {
    let args = Args::new()
        .ptr(sample.out)
        .ptr(sample.logits)
        .ptr(cx.scalars)
        .u32(sample.vocab as u32)
        .f32(sample.temperature)
        .u32(sample.top_k.map_or(0, |k| k.min(u32::MAX as usize) as u32))
        .f32(sample.top_p.unwrap_or(0.0));
    let function = cx.kernel(&spec(sample.dtype)?, "sample")?;
    cx.launch("sample", function, Grid::linear(1, 1024), args);
    Ok(())
}

pub(super) fn specs() -> Vec<Spec> {
    [DType::F32, DType::BF16].into_iter().filter_map(|dtype| spec(dtype).ok()).collect()
}
