//! How weights start: as GPT-2's do, seeded and the same on every platform.

use super::{ModelConfig, TensorSpec};
use crate::Result;
use crate::rng::{Leap, Rng};
use ironhorse_core::parallel::{self, PIECE};
use std::sync::LazyLock;
use std::sync::mpsc::{channel, sync_channel};

/// Standard deviation of GPT-2's weights, and of Mixtral's.
const STD: f64 = 0.02;

/// Tensors that may wait for `put` while the next one is made.
const WAITING: usize = 2;

/// Calls `put(name, values)` for every tensor in model order: normal(0, 0.02), residual projections scaled by 1/√(2L),
/// norms 1 (their weight is 0 where they multiply by 1 + weight), biases 0, padding rows of the vocabulary 0. Each tensor
/// has its own random stream, so a change of one size leaves the others alone. The next tensors are made while `put` works.
pub fn random(
    config: &ModelConfig,
    seed: u64,
    mut put: impl FnMut(&str, &[f32]) -> Result<()>,
) -> Result<()> {
    let root = Rng::new(seed);
    let tensors = config.tensors();
    let (made, ready) = sync_channel(WAITING);
    let (done, used) = channel(); // buffers are reused: fresh pages for every tensor would cost as much as its conversion
    let all = &tensors;
    let make = move || {
        for (i, tensor) in all.iter().enumerate() {
            let mut values: Vec<f32> = used.try_recv().unwrap_or_default();
            fill(config, tensor, root.fork(i as u64), &mut values);
            // the other side is gone if `put` failed
            if made.send(values).is_err() {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(make);
        let ready = ready; // dropped when this closure returns, also on an error, which ends the other thread
        tensors.iter().zip(ready.iter()).try_for_each(|(tensor, values)| {
            put(&tensor.name, &values)?;
            let _ = done.send(values); // fails if the other thread has ended, which is fine
            Ok(())
        })
    })
}

/// Makes `values` those of the tensor, whatever it held.
fn fill(config: &ModelConfig, tensor: &TensorSpec, rng: Rng, values: &mut Vec<f32>) {
    let name = tensor.name.as_str();
    values.resize(tensor.shape.numel(), 0.0);
    if tensor.shape.dims().len() == 2 {
        let residual = RESIDUAL.iter().any(|end| name.ends_with(end));
        let std = if residual { STD / ((2 * config.layers()) as f64).sqrt() } else { STD };
        let real: usize = config.unpadded_shape(tensor).iter().product();
        let (drawn, padding) = values.split_at_mut(real);
        normals(drawn, rng, std);
        padding.fill(0.0);
    } else {
        values.fill(if name.ends_with(".weight") { config.norm_start() } else { 0.0 });
    }
}

/// How the names of the matrices end whose products the residual stream adds up.
const RESIDUAL: [&str; 4] = ["c_proj.weight", "o_proj.weight", ".w2.weight", "down_proj.weight"];

/// Skips the random words of one piece; a normal number uses two.
static LEAP: LazyLock<Leap> = LazyLock::new(|| Leap::over_pow2((2 * PIECE).ilog2()));
const _: () = assert!(PIECE.is_power_of_two());

/// Fills with normal(0, std), on all cores: each piece starts from the state that the pieces before it would have left.
fn normals(values: &mut [f32], mut rng: Rng, std: f64) {
    let pieces = values.chunks_mut(PIECE).map(|piece| {
        let start = rng.clone();
        if piece.len() == PIECE {
            rng.leap(&LEAP);
        }
        (start, piece)
    });
    parallel::for_each(pieces, |(mut rng, piece)| {
        piece.iter_mut().for_each(|value| *value = (rng.normal() * std) as f32);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Gpt2Config;

    #[test]
    fn pieces_are_those_of_one_stream() {
        let mut pieced = vec![0.0; 2 * PIECE + 77];
        normals(&mut pieced, Rng::new(3), 0.5);
        let mut rng = Rng::new(3);
        assert!(pieced.iter().all(|&value| value == (rng.normal() * 0.5) as f32));
    }

    #[test]
    fn every_tensor_is_that_of_its_own_stream() {
        // large, small and padded tensors in turn: memory that goes round must not show what it held
        let config = ModelConfig::Gpt2(Gpt2Config::new(16, 1000, 3, 2, 128));
        let tensors = config.tensors();
        let mut seen = 0;
        random(&config, 7, |name, values| {
            let mut rng = Rng::new(7).fork(seen as u64);
            let tensor = &tensors[seen];
            assert_eq!((name, values.len()), (tensor.name.as_str(), tensor.shape.numel()));
            let real: usize = config.unpadded_shape(tensor).iter().product();
            for (i, &value) in values.iter().enumerate() {
                let std = if name.ends_with("c_proj.weight") { 0.02 / 6_f64.sqrt() } else { 0.02 };
                let want = match tensor.shape.dims().len() {
                    2 if i < real => (rng.normal() * std) as f32,
                    1 if name.ends_with(".weight") => 1.0,
                    _ => 0.0,
                };
                assert_eq!(value.to_bits(), want.to_bits(), "{name} {i}");
            }
            seen += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, tensors.len());
    }

    #[test]
    fn weights_have_gpt2s_spread_and_padding_is_zero() {
        let config = ModelConfig::Gpt2(Gpt2Config::new(16, 1000, 2, 2, 64));
        let mut seen = 0;
        random(&config, 7, |name, values| {
            seen += 1;
            let var = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64;
            match name {
                "wte.weight" => {
                    assert!(values[1000 * 64..].iter().all(|&v| v == 0.0));
                    assert!(values[..1000 * 64].iter().any(|&v| v != 0.0));
                }
                "h.1.mlp.c_fc.weight" => assert!((var.sqrt() - 0.02).abs() < 1e-3),
                "h.1.mlp.c_proj.weight" => assert!((var.sqrt() - 0.01).abs() < 1e-3),
                "h.0.ln_1.weight" => assert!(values.iter().all(|&v| v == 1.0)),
                "h.0.ln_1.bias" => assert!(values.iter().all(|&v| v == 0.0)),
                _ => {}
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, config.tensors().len());
    }
}
