//! What verification compares with: a model and its debug state, or an answer key.

use super::compare::Comparison;
use crate::Result;
use crate::format::debug_state::DebugState;
use crate::format::llmc_model::ModelFile;
use crate::model::Gpt2Config;
use ironhorse_core::Scalars;

/// The optimizer of the answer: how many steps, with which numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Steps the answer took.
    pub steps: usize,
    /// Learning rate and the rest.
    pub scalars: Scalars,
}

/// A tensor of a file that contradicts the file's own checksum or the other file.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Its name.
    pub tensor: String,
    /// What is wrong.
    pub what: String,
    /// The numbers, where both sides are there to compare.
    pub comparison: Comparison,
}

/// Answers by tensor name: `act.X`, `dact.X`, `logits`, `loss`, `grad.X`, `losses`, `after.X`.
pub trait Reference {
    /// The model's sizes.
    fn config(&self) -> &Gpt2Config;
    /// B
    fn batch(&self) -> usize;
    /// T
    fn seq(&self) -> usize;
    /// Tokens, (B,T).
    fn x(&mut self) -> Result<Vec<i32>>;
    /// Targets, (B,T).
    fn y(&mut self) -> Result<Vec<i32>>;
    /// The weights to start from.
    fn read_weight(&mut self, name: &str, values: &mut [f32]) -> Result<()>;
    /// An answer; `None` if the reference does not have it.
    fn read(&mut self, name: &str) -> Result<Option<Vec<f32>>>;
    /// The optimizer of `losses` and `after.X`.
    fn optimizer(&self) -> Recipe;
    /// The tolerance for a tensor, given the one for single steps.
    fn tolerance_of(&self, _name: &str, base: f64) -> f64 {
        base
    }
    /// Tensors that were changed since the files were written.
    fn damage(&mut self) -> Result<Vec<Damage>> {
        Ok(Vec::new())
    }
}

/// The test of the llm.c family: ten steps of AdamW at 1e-4 without decay on the one batch.
fn family_recipe() -> Recipe {
    Recipe { steps: 10, scalars: Scalars { lr: 1e-4, ..Scalars::default() } }
}

/// A model file and the debug state made from it.
pub struct StateReference {
    model: ModelFile,
    state: DebugState,
}

impl StateReference {
    /// Both files, opened and checked.
    pub fn new(model: ModelFile, state: DebugState) -> Self {
        Self { model, state }
    }
}

impl Reference for StateReference {
    fn config(&self) -> &Gpt2Config {
        self.model.config()
    }
    fn batch(&self) -> usize {
        self.state.batch()
    }
    fn seq(&self) -> usize {
        self.state.seq()
    }
    fn x(&mut self) -> Result<Vec<i32>> {
        self.state.x()
    }
    fn y(&mut self) -> Result<Vec<i32>> {
        self.state.y()
    }
    fn read_weight(&mut self, name: &str, values: &mut [f32]) -> Result<()> {
        self.model.read_tensor(name, values)
    }
    fn read(&mut self, name: &str) -> Result<Option<Vec<f32>>> {
        if name == "loss" {
            return Ok(Some(vec![self.state.loss()?]));
        }
        if name == "logits" {
            let mut values = vec![0.0; self.state.num_logits()];
            self.state.read_logits(0, &mut values)?;
            return Ok(Some(values));
        }
        let Some(param) = name.strip_prefix("grad.") else { return Ok(None) };
        let spec = self.config().tensors().into_iter().find(|spec| spec.name == param);
        let Some(spec) = spec else { return Ok(None) };
        let mut values = vec![0.0; spec.shape.numel()];
        self.state.read_grad(param, &mut values)?;
        Ok(Some(values))
    }
    fn optimizer(&self) -> Recipe {
        family_recipe()
    }
}
