//! How weights start: as GPT-2's do, seeded and the same on every platform.

use super::{ModelConfig, TensorSpec};
use crate::Result;
use crate::rng::Rng;
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, PoisonError};

/// Standard deviation of GPT-2's weights, and of Mixtral's.
const STD: f64 = 0.02;

/// Tensors that may wait for their turn while the next one is made.
const WAITING: usize = 2;

/// Calls `put(name, values)` for every tensor in model order: normal(0, 0.02), residual projections scaled by 1/√(2L),
/// norms 1, biases 0, padding rows of the vocabulary 0. Each tensor has its own random stream, so a change of one
/// size leaves the others alone. The next tensors are made while `put` works.
pub fn random(
    config: &ModelConfig,
    seed: u64,
    mut put: impl FnMut(&str, &[f32]) -> Result<()>,
) -> Result<()> {
    let root = Rng::new(seed);
    let tensors = config.tensors();
    let (made, ready) = sync_channel(WAITING);
    let all = &tensors;
    let make = move || {
        for (i, tensor) in all.iter().enumerate() {
            // a failure of `put` ends the other side
            if made.send(values_of(config, tensor, root.fork(i as u64))).is_err() {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(make);
        let ready = ready; // gone when this ends, also early: the maker stops then
        tensors.iter().zip(ready.iter()).try_for_each(|(tensor, values)| put(&tensor.name, &values))
    })
}

fn values_of(config: &ModelConfig, tensor: &TensorSpec, rng: Rng) -> Vec<f32> {
    let name = tensor.name.as_str();
    let mut values = vec![0.0; tensor.shape.numel()];
    if tensor.shape.dims().len() == 2 {
        let residual = RESIDUAL.iter().any(|end| name.ends_with(end));
        let std = if residual { STD / ((2 * config.layers()) as f64).sqrt() } else { STD };
        let real: usize = config.unpadded_shape(tensor).iter().product();
        normals(&mut values[..real], rng, std);
    } else if name.ends_with(".weight") {
        values.fill(1.0);
    }
    values
}

/// How the names of the matrices end whose products the residual stream adds up.
const RESIDUAL: [&str; 4] = ["c_proj.weight", "o_proj.weight", ".w2.weight", "down_proj.weight"];

/// Numbers that one thread draws at a time.
const PIECE: usize = 1 << 16;

/// Fills with normal(0, std), on all cores: passing over random words costs little beside making numbers of them, so each
/// piece starts from the state that the pieces before it would have left.
fn normals(values: &mut [f32], mut rng: Rng, std: f64) {
    let pieces = Mutex::new(values.chunks_mut(PIECE).map(|piece| {
        let start = rng.clone();
        (0..2 * piece.len()).for_each(|_| _ = rng.next_u64());
        (start, piece)
    }));
    let work = || {
        loop {
            let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((mut rng, piece)) = next else { break };
            piece.iter_mut().for_each(|value| *value = (rng.normal() * std) as f32);
        }
    };
    let helpers = std::thread::available_parallelism().map_or(1, usize::from) - 1;
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // where no more threads are to be had, those there are do the work
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
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
