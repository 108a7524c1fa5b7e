//! The weights of a model with its adapters in them, and what tells one base from another.

use super::Lora;
use ironhorse_core::parallel;

/// Adds `scale · B·A` to a weight (rows, cols): A is (r, cols), B is (rows, r). Sums are f64, rounded once.
pub fn add_product(weight: &mut [f32], [a, b]: [&[f32]; 2], lora: &Lora) {
    let (rank, scale) = (lora.rank, lora.scale());
    let cols = a.len() / rank.max(1);
    if cols == 0 {
        return;
    }
    parallel::for_each(weight.chunks_mut(cols).zip(b.chunks(rank)), |(row, b)| {
        let mut sums = vec![0.0_f64; cols];
        for (&b, a) in b.iter().zip(a.chunks(cols)) {
            let b = f64::from(b);
            sums.iter_mut().zip(a).for_each(|(sum, &a)| *sum += b * f64::from(a));
        }
        for (weight, sum) in row.iter_mut().zip(sums) {
            *weight = (f64::from(*weight) + scale * sum) as f32;
        }
    });
}

/// The values of a tensor that count for [`BaseDigest`], spread over all of it.
const LOOKED_AT: usize = 1024;

/// What tells one base from another: a checksum over the names of its tensors and some values of each, whatever files they
/// come from.
#[derive(Clone, Debug, Default)]
pub struct BaseDigest(crc32fast::Hasher);

impl BaseDigest {
    /// Adds a tensor; they must come in model order.
    pub fn add(&mut self, name: &str, values: &[f32]) {
        self.0.update(name.as_bytes());
        self.0.update(&(values.len() as u64).to_le_bytes());
        let every = values.len().div_ceil(LOOKED_AT).max(1);
        for value in values.iter().step_by(every) {
            self.0.update(&value.to_bits().to_le_bytes());
        }
    }

    /// The digest of what was added, as text.
    pub fn text(&self) -> String {
        format!("{:08x}", self.0.clone().finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Targets;

    /// B·A of ((1, 2), (3, 4)) and ((1, 0), (0, 1), (1, 1)) is ((1, 2), (3, 4), (4, 6)), here times 2.
    #[test]
    fn a_product_by_hand() {
        let lora = Lora { rank: 2, alpha: 4.0, targets: Targets::parse("q").unwrap() };
        let mut weight = vec![10.0; 6];
        add_product(&mut weight, [&[1.0, 2.0, 3.0, 4.0], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]], &lora);
        assert_eq!(weight, [12.0, 14.0, 16.0, 18.0, 18.0, 22.0]);
    }

    #[test]
    fn another_base_has_another_digest() {
        let digest = |name: &str, values: &[f32]| {
            let mut digest = BaseDigest::default();
            digest.add(name, values);
            digest.text()
        };
        let one = digest("w", &[1.0, 2.0]);
        assert_eq!(one, digest("w", &[1.0, 2.0]));
        assert!(
            [digest("v", &[1.0, 2.0]), digest("w", &[1.0, 2.5]), digest("w", &[1.0])]
                .iter()
                .all(|other| *other != one)
        );
    }
}
