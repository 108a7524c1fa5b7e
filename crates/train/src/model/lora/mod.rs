//! Low-rank adapters (LoRA) of a model whose own weights are frozen: `W·x + (alpha/r)·B·A·x`.
//!
//! ```text
//! targets.rs   which weights have adapters        table.rs      the adapters' parameter table and how they start
//! programs.rs  the programs of a model with them  merged.rs     the weights with the adapters in them
//! ```

mod merged;
mod programs;
mod table;
mod targets;

pub use merged::{BaseDigest, add_product};
pub use programs::Adapted;
pub use table::AdapterPart;
pub use targets::{Target, Targets};

use super::ModelConfig;
use crate::{Error, Result};

/// The adapters of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// r: rows of A and columns of B.
    pub rank: usize,
    /// LoRA alpha: the product is scaled by alpha / r.
    pub alpha: f64,
    /// Which weights have one.
    pub targets: Targets,
}

impl Lora {
    /// The factor of the product: alpha / r.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Refuses adapters that this model cannot have.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let ModelConfig::Moe(sizes) = config else {
            return Err(Error::Unsupported(format!(
                "adapters of a model of kind {}: only models of Llama's design have the weights that --targets names",
                config.kind()
            )));
        };
        let widest = sizes.hidden.max(sizes.ffn).max(sizes.qkv_width());
        if self.rank == 0 || self.rank > widest {
            let expected = format!("from 1 to {widest}, the widest layer of the model");
            return Err(Error::input("the rank of adapters", self.rank, expected));
        }
        let scale = self.scale() as f32;
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::input("the alpha of adapters", self.alpha, "a number above 0"));
        }
        if self.targets.is_empty() {
            return Err(Error::input("the targets of adapters", "empty", Target::listed()));
        }
        Ok(())
    }

    /// Adapters that can stand for each of several: of the largest rank, with a factor of 1, on all their targets.
    pub fn covering(all: &[Self]) -> Option<Self> {
        let first = *all.first()?;
        if all.iter().all(|one| *one == first) {
            return Some(first);
        }
        let rank = all.iter().map(|one| one.rank).max().unwrap_or(first.rank);
        let targets = all.iter().fold(first.targets, |targets, one| targets.with(one.targets));
        Some(Self { rank, alpha: rank as f64, targets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(rank: usize, alpha: f64, targets: &str) -> Lora {
        Lora { rank, alpha, targets: Targets::parse(targets).unwrap() }
    }

    #[test]
    fn what_a_model_cannot_have_is_refused() {
        let llama = ModelConfig::parse("kind=llama,C=24,L=2,NH=6,NKV=2,HD=4,F=20,V=99").unwrap();
        lora(4, 8.0, "all").check(&llama).unwrap();
        let refused = |lora: Lora, config: &ModelConfig| lora.check(config).unwrap_err().to_string();
        assert_eq!(
            refused(lora(0, 8.0, "q"), &llama),
            "the rank of adapters is 0, expected from 1 to 40, the widest layer of the model"
        );
        assert!(refused(lora(41, 8.0, "q"), &llama).contains("is 41, expected from 1 to 40"));
        assert_eq!(
            refused(lora(4, 0.0, "q"), &llama),
            "the alpha of adapters is 0, expected a number above 0"
        );
        let gpt2 = ModelConfig::parse("d12").unwrap();
        assert!(refused(lora(4, 8.0, "q"), &gpt2).contains("adapters of a model of kind gpt2"));
        let mixture = ModelConfig::parse("kind=qwen3_moe,C=24,L=2,NH=6,E=4,K=2,F=20,V=99").unwrap();
        lora(4, 8.0, "q,up").check(&mixture).unwrap();
    }

    #[test]
    fn one_set_of_adapters_can_stand_for_several() {
        let (a, b) = (lora(4, 8.0, "q,v"), lora(16, 8.0, "v,down"));
        assert_eq!(Lora::covering(&[]), None);
        assert_eq!(Lora::covering(&[a, a]), Some(a));
        assert_eq!(Lora::covering(&[a, b]), Some(lora(16, 16.0, "q,v,down")));
    }
}
