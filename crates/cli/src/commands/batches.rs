//! The batches of a run as a file, so that another program can train on the same tokens in the same order.

use anyhow::{Result, bail};
use ironhorse::train::data::Batches;
use ironhorse::train::format::atomic::write_file;
use ironhorse::train::format::safetensors::{Dtype, Header, TensorInfo, Writer};
use std::path::Path;

/// The most tokens that are kept: they are gathered in memory.
const MOST_TOKENS: usize = 1 << 28;

/// Writes the next `count` batches as `x` and `y`, and `positions` of packed samples, all I32 (count, B, T).
pub fn save(path: &Path, batches: &mut Batches, count: u64, [batch, seq]: [usize; 2]) -> Result<()> {
    let tokens = usize::try_from(count).ok().and_then(|count| count.checked_mul(batch * seq));
    let Some(tokens) = tokens.filter(|&tokens| tokens <= MOST_TOKENS) else {
        bail!(
            "--save-batches: {count} batches of {batch} x {seq} are more than {MOST_TOKENS} tokens; use fewer --steps"
        );
    };
    let [mut x, mut y, mut positions] = [(); 3].map(|()| vec![0; tokens]);
    let pieces = x.chunks_mut(batch * seq).zip(y.chunks_mut(batch * seq));
    for ((x, y), positions) in pieces.zip(positions.chunks_mut(batch * seq)) {
        batches.next_batch([x, y, positions])?;
    }
    let shape = vec![count as usize, batch, seq];
    let parts = [("x", x), ("y", y), ("positions", positions)];
    let parts = &parts[..if batches.is_packed() { 3 } else { 2 }];
    let info = |(name, _): &(&str, Vec<i32>)| TensorInfo::new(*name, Dtype::I32, shape.clone());
    let tensors: Vec<TensorInfo> = parts.iter().map(info).collect();
    let header = Header::build(&[], &tensors)?;
    write_file(path, |sink| {
        let mut writer = Writer::new(sink, header)?;
        parts.iter().try_for_each(|(name, values)| writer.put_i32(name, values))?;
        writer.finish()
    })?;
    Ok(())
}
