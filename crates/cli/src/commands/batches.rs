//! The batches of a run as a file, so that another program can train on the same tokens in the same order.

use anyhow::{Result, bail};
use ironhorse::train::data::Loader;
use ironhorse::train::format::atomic::write_file;
use ironhorse::train::format::safetensors::{Dtype, Header, TensorInfo, Writer};
use std::path::Path;

/// The most tokens that are kept: they are gathered in memory.
const MOST_TOKENS: usize = 1 << 28;

/// Writes the next `count` batches of `loader` as `x` and `y`, both I32 (count, B, T).
pub fn save(path: &Path, loader: &mut Loader, count: u64, [batch, seq]: [usize; 2]) -> Result<()> {
    let tokens = usize::try_from(count).ok().and_then(|count| count.checked_mul(batch * seq));
    let Some(tokens) = tokens.filter(|&tokens| tokens <= MOST_TOKENS) else {
        bail!(
            "--save-batches: {count} batches of {batch} x {seq} are more than {MOST_TOKENS} tokens; use fewer --steps"
        );
    };
    let (mut x, mut y) = (vec![0; tokens], vec![0; tokens]);
    for (x, y) in x.chunks_mut(batch * seq).zip(y.chunks_mut(batch * seq)) {
        loader.next_batch(x, y)?;
    }
    let shape = vec![count as usize, batch, seq];
    let tensors = ["x", "y"].map(|name| TensorInfo::new(name, Dtype::I32, shape.clone()));
    let header = Header::build(&[], &tensors)?;
    write_file(path, |sink| {
        let mut writer = Writer::new(sink, header)?;
        writer.put_i32("x", &x)?;
        writer.put_i32("y", &y)?;
        writer.finish()
    })?;
    Ok(())
}
