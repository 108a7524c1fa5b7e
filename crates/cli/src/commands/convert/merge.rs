//! How far a base with an adapter merged into its weights is from the two side by side: merging rounds every weight.

use crate::hardware::check_memory;
use anyhow::Result;
use ironhorse::Device;
use ironhorse::cuda::Settings;
use ironhorse::train::format::open_weights;
use ironhorse::train::format::peft::AdapterFolder;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Session, SessionSpec};
use serde::Serialize;
use std::path::Path;

/// Texts that are continued, and tokens of each.
const TEXTS: usize = 4;
const TOKENS: usize = 48;

/// What differs, over the tokens that the two side by side choose.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Difference {
    /// Positions that were compared.
    pub positions: usize,
    /// The mean Kullback-Leibler divergence of the merged from the unmerged, in nats.
    pub kl_mean: f64,
    /// The largest.
    pub kl_max: f64,
    /// The part of the positions at which both choose the same token.
    pub greedy_agreement: f64,
}

impl Difference {
    pub fn text(&self) -> String {
        format!(
            "merged and unmerged: KL {:.2e} nats in the mean and {:.2e} at most, the same greedy token at {:.2} % of {} positions",
            self.kl_mean,
            self.kl_max,
            100.0 * self.greedy_agreement,
            self.positions
        )
    }
}

/// Continues random tokens greedily with base and adapter side by side, and reads the same tokens with the merged folder.
pub fn difference(
    base: &Path,
    adapter: &mut AdapterFolder,
    merged: &Path,
    device: Device,
) -> Result<Difference> {
    let mut source = open_weights(base)?;
    let config = source.config();
    let spec = SessionSpec { decode: Some(TEXTS), lora: Some(adapter.lora()), ..SessionSpec::default() };
    let mut session = session_on(device, config, &spec)?;
    session.load_base(base, |name, values| source.read_tensor(name, values))?;
    session.load_adapter(adapter)?;
    let mut rng = Rng::new(1);
    let mut tokens: Vec<Vec<i32>> = vec![(0..TEXTS).map(|_| rng.index(config.vocab_size()) as i32).collect()];
    let mut told = Vec::new();
    for at in 0..TOKENS.min(config.max_seq_len()) {
        let rows = step(&mut session, &tokens[at], at)?;
        tokens.push(rows.iter().map(|row| best(row) as i32).collect());
        told.push(rows);
    }
    drop(session); // one model at a time
    let mut source = open_weights(merged)?;
    let mut session = session_on(device, config, &SessionSpec { lora: None, ..spec })?;
    session.load_base(merged, |name, values| source.read_tensor(name, values))?;
    let (mut sum, mut kl_max, mut same, mut positions) = (0.0, 0.0_f64, 0, 0);
    for (at, want) in told.iter().enumerate() {
        for (want, got) in want.iter().zip(step(&mut session, &tokens[at], at)?) {
            let kl = divergence(want, &got);
            (sum, kl_max, positions) = (sum + kl, kl_max.max(kl), positions + 1);
            same += usize::from(best(want) == best(&got));
        }
    }
    let count = positions.max(1) as f64;
    Ok(Difference { positions, kl_mean: sum / count, kl_max, greedy_agreement: same as f64 / count })
}

fn session_on(device: Device, config: ModelConfig, spec: &SessionSpec) -> Result<Session> {
    let engine = device.engine(0, &Settings::default())?;
    check_memory(engine.as_ref(), &config, spec)?;
    Ok(Session::new(engine, config, spec)?)
}

/// The logarithms of the probabilities after these tokens, a row for each text.
fn step(session: &mut Session, tokens: &[i32], position: usize) -> Result<Vec<Vec<f64>>> {
    let (vocab, padded) = (session.config().vocab_size(), session.config().padded_vocab_size());
    let mut logits = Vec::new();
    session.decode(tokens, position, &mut logits)?;
    Ok(logits.chunks(padded).map(|row| log_softmax(&row[..vocab])).collect())
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(f64::from(x)));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - most).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - most - sum.ln()).collect()
}

/// The first of the largest.
fn best(row: &[f64]) -> usize {
    (0..row.len()).fold(0, |best, at| if row[at] > row[best] { at } else { best })
}

/// Σ p·(ln p − ln q), which rounding can make a little less than 0.
fn divergence(p: &[f64], q: &[f64]) -> f64 {
    p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_by_hand() {
        let p = log_softmax(&[0.0, 0.0]);
        let q = log_softmax(&[0.0, 3_f32.ln()]);
        // ½ ln(½ / ¼) + ½ ln(½ / ¾)
        let want = 0.5 * 2_f64.ln() + 0.5 * (2.0_f64 / 3.0).ln();
        assert!((divergence(&p, &q) - want).abs() < 1e-7);
        assert_eq!((divergence(&p, &p), best(&q), best(&p)), (0.0, 1, 0));
    }
}
