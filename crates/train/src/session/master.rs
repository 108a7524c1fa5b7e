//! Master weights in the memory of an engine, however they are kept.

use ironhorse_core::parallel::{self, PIECE};
use ironhorse_core::{
    DType, Engine, EngineExt, Result, Slot, bf16_to_f32, f32_to_bf16, join_master, split_master,
};

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
        parallel::for_each(values.chunks_mut(PIECE).zip(weights.chunks(PIECE)), |(values, weights)| {
            for (value, &weight) in values.iter_mut().zip(weights) {
                *value = join_master(f32_to_bf16(weight), *value as i16);
            }
        });
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
    let mut part = vec![0.0; values.len()]; // one buffer for both in turn: a matrix may take a gigabyte
    map(values, &mut part, |value| bf16_to_f32(split_master(value).0));
    engine.write_f32(params, &part)?;
    map(values, &mut part, |value| f32::from(split_master(value).1));
    engine.write_f32(master, &part)
}

/// `to[i] = f(from[i])`, on all cores.
fn map(from: &[f32], to: &mut [f32], f: impl Fn(f32) -> f32 + Sync) {
    parallel::for_each(to.chunks_mut(PIECE).zip(from.chunks(PIECE)), |(to, from)| {
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = f(from));
    });
}

/// Whether a slot of master weights holds only what the parameters lack.
pub(crate) fn is_residual(master: &Slot) -> bool {
    master.dtype == DType::I16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_split_as_one_number_is() {
        let mut rng = crate::rng::Rng::new(9);
        let mut values: Vec<f32> =
            (0..2 * PIECE + 77).map(|_| f32::from_bits(rng.next_u64() as u32)).collect();
        values[..4].copy_from_slice(&[f32::NAN, f32::INFINITY, -0.0, f32::MAX]);
        let (mut weights, mut residuals) = (vec![0.0; values.len()], vec![0.0; values.len()]);
        map(&values, &mut weights, |value| bf16_to_f32(split_master(value).0));
        map(&values, &mut residuals, |value| f32::from(split_master(value).1));
        for (i, &value) in values.iter().enumerate() {
            let (weight, residual) = split_master(value);
            assert_eq!(weights[i].to_bits(), bf16_to_f32(weight).to_bits(), "{i}");
            assert_eq!(residuals[i], f32::from(residual), "{i}");
        }
    }
}
