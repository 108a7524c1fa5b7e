//! The order of tensors in the `.bin` files: layers are stacked inside a tensor, so `h.0.ln_1.weight` is followed by
//! `h.1.ln_1.weight`. The model file and the gradients of the debug state share it.

use std::collections::HashMap;
use std::path::Path;

use super::{Elem, Span};
use crate::model::{Gpt2Config, TensorSpec};
use crate::{Error, Result};

/// Tensors of one transformer block.
const PER_LAYER: usize = 12;

/// The parameter table in file order, with the position of each tensor.
#[derive(Clone, Debug)]
pub(super) struct Stacked {
    tensors: Vec<(TensorSpec, u64)>,
    by_name: HashMap<String, usize>,
}

/// The number of parameters in a file of these sizes. Needs a validated configuration.
pub(super) fn total_elements(config: &Gpt2Config) -> u64 {
    config.num_params() as u64
}

impl Stacked {
    /// Needs a validated configuration whose size was compared with the file's: the table grows with `n_layer`.
    pub fn new(config: &Gpt2Config) -> Self {
        let table = config.tensors();
        let layers = config.n_layer;
        let blocks =
            (0..PER_LAYER).flat_map(|part| (0..layers).map(move |layer| 2 + layer * PER_LAYER + part));
        let last = 2 + layers * PER_LAYER;
        let order = [0, 1].into_iter().chain(blocks).chain([last, last + 1]);
        let mut tensors = Vec::with_capacity(table.len());
        let mut by_name = HashMap::with_capacity(table.len());
        let mut offset = 0;
        for index in order {
            let spec = table[index].clone();
            by_name.insert(spec.name.clone(), tensors.len());
            let numel = spec.shape.numel() as u64;
            tensors.push((spec, offset));
            offset += numel;
        }
        Self { tensors, by_name }
    }

    /// The tensors in file order, with the index of their first number.
    pub fn tensors(&self) -> &[(TensorSpec, u64)] {
        &self.tensors
    }

    /// Where the tensors are in `file`, in file order, if the first starts at `start`. `vocab_size` is that of the model:
    /// the rows of `wte` that pad it are left out.
    pub fn spans(
        &self,
        file: &Path,
        start: u64,
        elem: Elem,
        vocab_size: usize,
    ) -> impl Iterator<Item = Span> {
        self.tensors.iter().map(move |(spec, index)| {
            let mut shape = spec.shape.dims().to_vec();
            if spec.name == "wte.weight" {
                shape[0] = vocab_size;
            }
            let offset = start + index * elem.size() as u64;
            Span { name: spec.name.clone(), dtype: elem.into(), shape, file: file.to_owned(), offset }
        })
    }

    /// The place of a tensor in [`Stacked::tensors`].
    pub fn find(&self, name: &str) -> Result<usize> {
        let found = self.by_name.get(name).copied();
        found.ok_or_else(|| Error::unknown("tensor", name, "a name such as wte.weight or h.0.ln_1.bias"))
    }
}

/// Lets a caller produce one tensor in a zeroed buffer.
pub(super) fn filled(
    spec: &TensorSpec,
    values: &mut Vec<f32>,
    fill: impl FnOnce(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    values.clear();
    values.resize(spec.shape.numel(), 0.0);
    fill(spec, values)
}

/// Checks the length of a buffer for a tensor.
pub(super) fn expect_numel(name: &str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::input(
        format!("size of the buffer for tensor `{name}`"),
        found,
        format!("{expected} elements"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_stacked_and_nothing_is_left_out() {
        let config = Gpt2Config::new(8, 5, 2, 1, 2);
        let stacked = Stacked::new(&config);
        let names: Vec<_> = stacked.tensors().iter().map(|(spec, _)| &*spec.name).collect();
        assert_eq!(&names[..4], ["wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.1.ln_1.weight"]);
        assert_eq!(&names[names.len() - 3..], ["h.1.mlp.c_proj.bias", "ln_f.weight", "ln_f.bias"]);
        assert_eq!(names.len(), config.tensors().len());
        let (last, offset) = stacked.tensors().last().unwrap();
        assert_eq!(offset + last.shape.numel() as u64, total_elements(&config));
        assert!(stacked.find("h.2.ln_1.weight").is_err());
    }
}
