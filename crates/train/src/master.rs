//! Master weights in the memory of an engine, however they are kept.

use ironhorse_core::{DType, Engine, Result, Slot, bf16_to_f32, f32_to_bf16, join_master, split_master};

/// Copies master weights out: `master` itself where it is f32, else what `params` and the 16 bits beside them make.
pub(crate) fn read_master(
    engine: &mut dyn Engine,
    [params, master]: [Slot; 2],
    residual: bool,
    values: &mut Vec<f32>,
) -> Result<()> {
    values.clear();
    values.resize(master.numel(), 0.0);
    engine.read_f32(master, values)?;
    if residual {
        let mut weights = vec![0.0; params.numel()];
        engine.read_f32(params, &mut weights)?;
        for (value, weight) in values.iter_mut().zip(weights) {
            *value = join_master(f32_to_bf16(weight), *value as i16);
        }
    }
    Ok(())
}

/// Copies master weights in, and the parameters that go with them.
pub(crate) fn write_master(
    engine: &mut dyn Engine,
    [params, master]: [Slot; 2],
    residual: bool,
    values: &[f32],
) -> Result<()> {
    if !residual {
        engine.write_f32(params, values)?;
        return engine.write_f32(master, values);
    }
    let split = |&value: &f32| {
        let (weight, residual) = split_master(value);
        (bf16_to_f32(weight), f32::from(residual))
    };
    let (weights, residuals): (Vec<f32>, Vec<f32>) = values.iter().map(split).unzip();
    engine.write_f32(params, &weights)?;
    engine.write_f32(master, &residuals)
}

/// Whether a slot of master weights holds only what the parameters lack.
pub(crate) fn is_residual(master: &Slot) -> bool {
    master.dtype == DType::I16
}
