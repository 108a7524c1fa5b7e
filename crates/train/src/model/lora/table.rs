//! The parameter table of adapters, and how they start.

use super::{Lora, Target};
use crate::model::moe::EXPERT_NAMES;
use crate::model::{ModelConfig, MoeConfig, TensorSpec};
use crate::rng::Rng;
use crate::{Error, Result};
use std::ops::Range;

/// What all targets of one product share: q, k and v are one product, and so are gate and up.
const PRODUCTS: [&[Target]; 4] =
    [&[Target::Q, Target::K, Target::V], &[Target::O], &[Target::Gate, Target::Up], &[Target::Down]];

/// Whose a tensor of an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterPart {
    /// The layer.
    pub layer: usize,
    /// The weight in it.
    pub target: Target,
    /// The expert whose weight it is, in a mixture's gate, up and down.
    pub expert: Option<usize>,
    /// Whether it is B.
    pub is_b: bool,
}

/// The adapters of one product; of a mixture's experts, those of the first.
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

/// `model.layers.3.self_attn.q_proj.lora_A.weight`, or `model.layers.3.mlp.experts.5.gate_proj.lora_A.weight`
fn tensor_name(sizes: &MoeConfig, part: AdapterPart) -> String {
    let AdapterPart { layer, target, expert, is_b } = part;
    let place = match expert {
        Some(expert) => {
            let names = sizes.expert_names();
            format!("{}.{expert}.{}", names.experts, names.of(target))
        }
        None => target.place(),
    };
    format!("model.layers.{layer}.{place}.lora_{}.weight", if is_b { "B" } else { "A" })
}

/// The experts that have a weight of this target each; one `None` where the weight is the layer's.
fn experts(sizes: &MoeConfig, target: Target) -> Vec<Option<usize>> {
    match sizes.n_experts {
        count if count > 0 && Target::MLP.contains(&target) => (0..count).map(Some).collect(),
        _ => vec![None],
    }
}

impl Lora {
    /// The adapters' parameter table in model order. Call [`Lora::check`] first.
    pub fn tensors(&self, config: &ModelConfig) -> Vec<TensorSpec> {
        self.groups(config).into_iter().flatten().collect()
    }

    /// The table by groups: all A of a product lie in memory without gaps, expert by expert where there are experts, and so
    /// do all B.
    pub(in crate::model) fn groups(&self, config: &ModelConfig) -> Vec<Vec<TensorSpec>> {
        let ModelConfig::Moe(sizes) = config else { return Vec::new() };
        let mut groups = Vec::new();
        for layer in 0..sizes.n_layer {
            for product in PRODUCTS {
                let targets: Vec<Target> =
                    product.iter().copied().filter(|&target| self.targets.has(target)).collect();
                let Some(&first) = targets.first() else { continue };
                let experts = experts(sizes, first);
                groups.extend([false, true].map(|is_b| {
                    let parts = experts.iter().flat_map(|&expert| {
                        targets.iter().map(move |&target| AdapterPart { layer, target, expert, is_b })
                    });
                    let spec = |part: AdapterPart| {
                        TensorSpec::new(tensor_name(sizes, part), self.shape(sizes, part.target, is_b))
                    };
                    parts.map(spec).collect::<Vec<_>>()
                }));
            }
        }
        groups
    }

    /// Rows and columns of A or B of a target.
    fn shape(&self, sizes: &MoeConfig, target: Target, is_b: bool) -> [usize; 2] {
        let [rows, cols] = dims(sizes, target);
        if is_b { [rows, self.rank] } else { [self.rank, cols] }
    }

    /// How many numbers A or B of a target has, of one expert where there are experts.
    pub fn numel(&self, config: &ModelConfig, target: Target, is_b: bool) -> usize {
        match config {
            ModelConfig::Moe(sizes) => self.shape(sizes, target, is_b).iter().product(),
            ModelConfig::Gpt2(_) => 0,
        }
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
        let target = first?;
        let expert = experts(sizes, target)[0];
        let names = [false, true].map(|is_b| tensor_name(sizes, AdapterPart { layer, target, expert, is_b }));
        Some(ProductAdapters { names, columns })
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

    /// Whose a tensor is by its name; the error says what names are expected.
    pub fn part_of(name: &str) -> Result<AdapterPart> {
        let parts = || -> Option<AdapterPart> {
            let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
            let (place, which) = rest.strip_suffix(".weight")?.rsplit_once(".lora_")?;
            let (target, expert) = place_of(place)?;
            let is_b = ["A", "B"].iter().position(|one| *one == which)? == 1;
            Some(AdapterPart { layer: layer.parse().ok()?, target, expert, is_b })
        };
        let expected = "a name such as model.layers.0.self_attn.q_proj.lora_A.weight";
        parts().ok_or_else(|| Error::unknown("tensor of an adapter", name, expected))
    }
}

/// The target of `self_attn.q_proj`, or the target and expert of `mlp.experts.5.gate_proj`.
fn place_of(place: &str) -> Option<(Target, Option<usize>)> {
    if let Some(target) = Target::ALL.into_iter().find(|target| target.place() == place) {
        return Some((target, None));
    }
    EXPERT_NAMES.into_iter().find_map(|names| {
        let (expert, module) = place.strip_prefix(names.experts)?.strip_prefix('.')?.split_once('.')?;
        let target = Target::MLP.into_iter().find(|&target| names.of(target) == module)?;
        Some((target, Some(expert.parse().ok()?)))
    })
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
        named_by_their_parts(&config, &table);
        for wrong in
            ["0.lm_head", "0.mlp.experts.gate_proj", "0.mlp.experts.x.gate_proj", "0.mlp.experts.1.w1"]
        {
            assert!(Lora::part_of(&format!("model.layers.{wrong}.lora_A.weight")).is_err(), "{wrong}");
        }
    }

    fn named_by_their_parts(config: &ModelConfig, table: &[TensorSpec]) {
        let ModelConfig::Moe(sizes) = config else { panic!("{config:?}") };
        for spec in table {
            assert_eq!(tensor_name(sizes, Lora::part_of(&spec.name).unwrap()), spec.name);
        }
    }

    #[test]
    fn every_expert_has_its_own() {
        let sizes = "C=24,L=2,NH=6,NKV=2,HD=6,E=3,K=2,F=20,V=99";
        for (kind, experts, modules) in [
            ("moe", "block_sparse_moe.experts", ["w1", "w3", "w2"]),
            ("qwen3_moe", "mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
        ] {
            let config = ModelConfig::parse(&format!("kind={kind},{sizes}")).unwrap();
            let lora = Lora { rank: 3, alpha: 6.0, targets: Targets::parse("o,gate,up,down").unwrap() };
            let groups = lora.groups(&config);
            assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 6, 6, 3, 3].repeat(2));
            let told: Vec<_> = groups[2].iter().map(|spec| (&*spec.name, spec.shape.dims())).collect();
            let [gate, up, down] = modules;
            let name = |expert: usize, module: &str, which: &str| {
                format!("model.layers.0.{experts}.{expert}.{module}.lora_{which}.weight")
            };
            assert_eq!(told[0], (&*name(0, gate, "A"), &[3, 24][..]));
            assert_eq!(told[1], (&*name(0, up, "A"), &[3, 24][..]));
            assert_eq!(told[4], (&*name(2, gate, "A"), &[3, 24][..]));
            assert_eq!(
                (&*groups[5][2].name, groups[5][2].shape.dims()),
                (&*name(2, down, "B"), &[24, 3][..])
            );
            let both = lora.of_product(&config, 0, Target::Up).unwrap();
            assert_eq!(
                (both.names, both.columns),
                ([name(0, gate, "A"), name(0, gate, "B")], vec![0..20, 20..40])
            );
            assert_eq!(lora.numel(&config, Target::Down, false), 3 * 20);
            named_by_their_parts(&config, &lora.tensors(&config));
        }
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
