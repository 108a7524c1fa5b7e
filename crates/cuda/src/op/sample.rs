//! Choosing the next token on the device.

use crate::Result;
use crate::args::{Args, Grid};
use crate::device::Stream;
use crate::kernels::Spec;
use ironhorse_core::{DType, TokenChoice};

/// Threads of the one block that looks at the row.
const THREADS: u32 = 1024;

/// One row of logits, and where the chosen token goes: one i32, -1 when the logits allow none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub out: u64,
    pub logits: u64,
    pub dtype: DType,
    /// Columns that count.
    pub vocab: usize,
}

fn spec(dtype: DType) -> Result<Spec> {
    Spec::act("sampling/sample.cu", dtype)
}

/// Chooses a token of the row. The settings were validated by the caller.
pub(crate) fn sample(stream: &Stream, row: &Row, choice: &TokenChoice) -> Result<()> {
    let mut args = Args::new()
        .ptr(row.out)
        .ptr(row.logits)
        .u64(choice.uniform.to_bits())
        .u32(row.vocab as u32)
        .f32(choice.temperature)
        .u32(choice.top_k.map_or(0, |k| k.min(u32::MAX as usize) as u32))
        .f32(choice.top_p.unwrap_or(0.0));
    let function = stream.device().function(&spec(row.dtype)?.kernel("sample"))?;
    stream.launch(function, Grid::linear(1, THREADS), &mut args)
}

pub(super) fn specs() -> Vec<Spec> {
    Spec::all_types(spec)
}
