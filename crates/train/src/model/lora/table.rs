//! The parameter table of adapters, and how they start.

use super::{Lora, Target};
use crate::model::{ModelConfig, MoeConfig, TensorSpec};
use crate::rng::Rng;
use crate::{Error, Result};
use std::ops::Range;

/// What all targets of one product share: q, k and v are one product, and so are gate and up.
const PRODUCTS: [&[Target]; 4] =
    [&[Target::Q, Target::K, Target::V], &[Target::O], &[Target::Gate, Target::Up], &[Target::Down]];

/// The adapters of one product.
pub(in crate::model) struct ProductAdapters {
    /// The name of the first A, and of the first B.
    pub names: [String; 2],
    /// The columns of the product's result that each changes.
    pub columns: Vec<Range<usize>>,
}

/// Rows and columns of a target's weight.
fn dims(sizes: &MoeConfig, target: Target) -> [usize; 2] {
    let (c, f) = (sizes.hidden, sizes.ffn);
    let (q, kv) = (sizes.n_head * sizes.head_dim, sizes.n_kv_head * sizes.head_dim);
    match target {
        Target::Q => [q, c],
        Target::K | Target::V => [kv, c],
        Target::O => [c, q],
        Target::Gate | Target::Up => [f, c],
        Target::Down => [c, f],
    }
}

/// `model.layers.3.self_attn.q_proj.lora_A.weight`
fn tensor_name(layer: usize, target: Target, which: &str) -> String {
    format!("model.layers.{layer}.{}.lora_{which}.weight", target.place())
}

impl Lora {
    /// The adapters' parameter table in model order. Call [`Lora::check`] first.
    pub fn tensors(&self, config: &ModelConfig) -> Vec<TensorSpec> {
        self.groups(config).into_iter().flatten().collect()
    }

    /// The table by groups: all A of a product lie in memory without gaps, and so do all B.
    pub(in crate::model) fn groups(&self, config: &ModelConfig) -> Vec<Vec<TensorSpec>> {
        let ModelConfig::Moe(sizes) = config else { return Vec::new() };
        let mut groups = Vec::new();
        for layer in 0..sizes.n_layer {
            for product in PRODUCTS {
                let targets: Vec<Target> =
                    product.iter().copied().filter(|&target| self.targets.has(target)).collect();
                if targets.is_empty() {
                    continue;
                }
                let spec = |which: &str, target: Target| {
                    let [rows, cols] = dims(sizes, target);
                    let shape = if which == "A" { [self.rank, cols] } else { [rows, self.rank] };
                    TensorSpec::new(tensor_name(layer, target, which), shape)
                };
                groups.extend(
                    ["A", "B"]
                        .map(|which| targets.iter().map(|&target| spec(which, target)).collect::<Vec<_>>()),
                );
            }
        }
        groups
    }

    /// The adapters of the product that has this target, if it has any.
    pub(in crate::model) fn of_product(
        &self,
        config: &ModelConfig,
        layer: usize,
        target: Target,
    ) -> Option<ProductAdapters> {
        let ModelConfig::Moe(sizes) = config else { return None };
        let product = PRODUCTS.into_iter().find(|product| product.contains(&target))?;
        let (mut columns, mut first, mut column) = (Vec::new(), None, 0);
        for &target in product {
            let [rows, _] = dims(sizes, target);
            if self.targets.has(target) {
                first.get_or_insert(target);
                columns.push(column..column + rows);
            }
            column += rows;
        }
        let names = ["A", "B"].map(|which| first.map(|target| tensor_name(layer, target, which)));
        let [Some(a), Some(b)] = names else { return None };
        Some(ProductAdapters { names: [a, b], columns })
    }

    /// Calls `put(name, values)` for every tensor in model order: A uniform within ±1/√C of its columns (Kaiming's with
    /// a = √5), B 0, so that the adapters change nothing at first. Each tensor has its own random stream.
    pub fn random(
        &self,
        config: &ModelConfig,
        seed: u64,
        mut put: impl FnMut(&str, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let root = Rng::new(seed);
        for (i, tensor) in self.tensors(config).iter().enumerate() {
            let mut values = vec![0.0; tensor.shape.numel()];
            if tensor.name.ends_with(".lora_A.weight") {
                let (mut rng, bound) = (root.fork(i as u64), 1.0 / (tensor.shape.cols() as f64).sqrt());
                values.iter_mut().for_each(|x| *x = ((2.0 * rng.uniform_f64() - 1.0) * bound) as f32);
            }
            put(&tensor.name, &values)?;
        }
        Ok(())
    }

    /// The target and layer of an adapter's tensor, and whether it is B; the error names what it is not.
    pub fn part_of(name: &str) -> Result<(usize, Target, bool)> {
        let parts = || -> Option<(usize, Target, bool)> {
            let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
            let (place, which) = rest.strip_suffix(".weight")?.rsplit_once(".lora_")?;
            let target = Target::ALL.into_iter().find(|target| target.place() == place)?;
            Some((layer.parse().ok()?, target, ["A", "B"].iter().position(|one| *one == which)? == 1))
        };
        let expected = "a name such as model.layers.0.self_attn.q_proj.lora_A.weight";
        parts().ok_or_else(|| Error::unknown("tensor of an adapter", name, expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Targets;

    fn made(targets: &str) -> (Lora, ModelConfig) {
        let config = ModelConfig::parse("kind=llama,C=24,L=2,NH=6,NKV=2,HD=6,F=20,V=99").unwrap();
        (Lora { rank: 3, alpha: 6.0, targets: Targets::parse(targets).unwrap() }, config)
    }

    #[test]
    fn the_table_has_the_names_and_shapes_of_peft() {
        let (lora, config) = made("v,q,down");
        let table = lora.tensors(&config);
        let told: Vec<_> = table[..6].iter().map(|spec| (&*spec.name, spec.shape.dims())).collect();
        assert_eq!(
            told,
            [
                ("model.layers.0.self_attn.q_proj.lora_A.weight", &[3, 24][..]),
                ("model.layers.0.self_attn.v_proj.lora_A.weight", &[3, 24]),
                ("model.layers.0.self_attn.q_proj.lora_B.weight", &[36, 3]),
                ("model.layers.0.self_attn.v_proj.lora_B.weight", &[12, 3]),
                ("model.layers.0.mlp.down_proj.lora_A.weight", &[3, 20]),
                ("model.layers.0.mlp.down_proj.lora_B.weight", &[24, 3]),
            ]
        );
        assert_eq!(table.len(), 12);
        assert!(table.iter().all(|spec| spec.decay && spec.matrices == 0));
        let qkv = lora.of_product(&config, 1, Target::K).unwrap();
        assert_eq!(qkv.columns, [0..36, 48..60]);
        assert_eq!(qkv.names[1], "model.layers.1.self_attn.q_proj.lora_B.weight");
        assert!(lora.of_product(&config, 1, Target::Up).is_none());
        for spec in &table {
            let (layer, target, is_b) = Lora::part_of(&spec.name).unwrap();
            assert_eq!(tensor_name(layer, target, if is_b { "B" } else { "A" }), spec.name);
        }
        assert!(Lora::part_of("model.layers.0.lm_head.lora_A.weight").is_err());
    }

    #[test]
    fn a_start_changes_nothing_and_is_that_of_its_seed() {
        let (lora, config) = made("all");
        let start = |seed| {
            let mut all = Vec::new();
            lora.random(&config, seed, |name, values| {
                all.push((name.to_owned(), values.to_vec()));
                Ok(())
            })
            .unwrap();
            all
        };
        assert!(start(1) == start(1) && start(1) != start(2));
        for (name, values) in start(1) {
            if name.ends_with("lora_B.weight") {
                assert!(values.iter().all(|&x| x == 0.0), "{name}");
                continue;
            }
            let columns = values.len() as f32 / 3.0;
            let most = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            assert!((0.7..=1.0).contains(&(most * columns.sqrt())), "{name} {most}");
        }
    }
}
