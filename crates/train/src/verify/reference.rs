//! The references of verification: a model and its debug state, or an answer key.

use super::compare::{Comparison, compare};
use crate::format::WeightSource;
use crate::format::answer_key::AnswerKey;
use crate::format::debug_state::DebugState;
use crate::format::llmc_model::{check_finite, row_len};
use crate::model::{Lora, ModelConfig};
use crate::session::OwnedBatch;
use crate::{Error, Result};
use ironhorse_core::{DropRate, Optimizer, Scalars};
use std::collections::BTreeMap;

/// The optimizer of the answer: how many steps, with which numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Steps the answer took.
    pub steps: usize,
    /// Learning rate and the rest.
    pub scalars: Scalars,
    /// Which optimizer.
    pub optimizer: Optimizer,
}

/// A tensor of a file that contradicts the file's own checksum or the other file.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Its name.
    pub tensor: String,
    /// What is wrong.
    pub what: String,
    /// The comparison, where both sides are available.
    pub comparison: Comparison,
}

/// Answers by tensor name: `act.X`, `dact.X`, `logits`, `loss`, `grad.X`, `losses`, `after.X`.
pub trait Reference {
    /// The model's sizes.
    fn config(&self) -> ModelConfig;
    /// B
    fn batch(&self) -> usize;
    /// T
    fn seq(&self) -> usize;
    /// Tokens, (B,T).
    fn x(&mut self) -> Result<Vec<i32>>;
    /// Targets, (B,T).
    fn y(&mut self) -> Result<Vec<i32>>;
    /// Everything that a step is given.
    fn inputs(&mut self) -> Result<OwnedBatch> {
        Ok(OwnedBatch { x: self.x()?, y: self.y()?, ..OwnedBatch::default() })
    }
    /// The weights to start from.
    fn read_weight(&mut self, name: &str, values: &mut [f32]) -> Result<()>;
    /// An answer; `None` if the reference does not have it.
    fn read(&mut self, name: &str) -> Result<Option<Vec<f32>>>;
    /// The optimizer of `losses` and `after.X`.
    fn optimizer(&self) -> Recipe;
    /// How often elements were dropped; the masks are those of the scalars of [`Reference::optimizer`].
    fn dropout(&self) -> DropRate {
        DropRate::default()
    }
    /// The adapters that were trained in place of the weights.
    fn lora(&self) -> Option<Lora> {
        None
    }
    /// Whether sequences hold several documents.
    fn packed(&self) -> bool {
        false
    }
    /// The β of the loss of pairs, where the loss is that.
    fn preference(&self) -> Option<f32> {
        None
    }
    /// The tolerance for a tensor, given the one for single steps.
    fn tolerance_of(&self, _name: &str, base: f64) -> f64 {
        base
    }
    /// An additional absolute tolerance of single elements of a tensor.
    fn slack_of(&self, _name: &str) -> f64 {
        0.0
    }
    /// The error of PyTorch in bf16 against exact answers, by tensor; `None` if it was not measured.
    fn bf16_errors(&self) -> Option<&BTreeMap<String, f64>> {
        None
    }
    /// The number of optimizer steps with answers; `None` if there are no answers and any number may be run.
    fn most_steps(&self) -> Option<usize> {
        None
    }
    /// Tensors that were changed since the files were written.
    fn damage(&mut self) -> Result<Vec<Damage>> {
        Ok(Vec::new())
    }
}

/// The optimizer of llm.c's test, AdamW at 1e-4 without decay, where no steps are recorded.
fn family_recipe() -> Recipe {
    Recipe { steps: 0, scalars: Scalars { lr: 1e-4, ..Scalars::default() }, optimizer: Optimizer::AdamW }
}

/// A model file and the debug state made from it.
pub struct StateReference {
    model: Box<dyn WeightSource>,
    state: DebugState,
}

impl StateReference {
    /// Both files, opened and checked.
    pub fn new(model: Box<dyn WeightSource>, state: DebugState) -> Self {
        Self { model, state }
    }
}

impl Reference for StateReference {
    fn config(&self) -> ModelConfig {
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

/// An answer key, alone or beside the model file it was made with.
pub struct KeyReference {
    key: AnswerKey,
    model: Option<Box<dyn WeightSource>>,
}

/// The allowed difference from PyTorch after optimizer steps, in multiples of PyTorch's own error against f64: our
/// error may be twice that, and PyTorch's error adds once more.
pub(super) const TORCH_ERRORS: f64 = 3.0;
/// The same for the gradient of a router, whose answer is that of PyTorch in f64 where the difference matters.
pub(super) const ROUTER_ERRORS: f64 = 2.0;
/// Upper bounds of the errors that a key may claim for `losses`, for `after.*` and for routers: a check must be able to
/// fail.
pub(super) const MOST_FOR_LOSSES: f64 = 1e-4;
pub(super) const MOST_FOR_AFTER: f64 = 1e-2;
pub(super) const MOST_FOR_ROUTER: f64 = 1e-3;

impl KeyReference {
    /// The weights of the chosen experts sum to 1, so their gradients are differences: the more confident the router,
    /// the smaller the differences relative to the terms that are subtracted. PyTorch's f32 may lose all digits there.
    /// The answer is then that of f64, and the key records the error of f32.
    fn cancels(&self, name: &str) -> bool {
        let experts = self.key.config().has_experts();
        let routers = name.starts_with("dact.") && name.ends_with(".router_logits");
        experts && (routers || (name.starts_with("grad.") && name.ends_with(".gate.weight")))
    }

    /// Opens a key. If a model is given, its weights are used and must equal those of the key.
    pub fn new(key: AnswerKey, model: Option<Box<dyn WeightSource>>) -> Result<Self> {
        let dtype = &key.meta().dtype;
        if dtype != "f32" {
            let expected = "\"f32\": this engine compares f32 keys";
            return Err(Error::field(key.path(), "metadata `dtype`", format!("{dtype:?}"), expected));
        }
        if let Some(model) = &model
            && !model.config().computes_as(key.config())
        {
            let (found, expected) = (model.config().to_json(), key.config().to_json());
            return Err(Error::field(
                model.path(),
                "config",
                found,
                format!("that of the answer key, {expected}"),
            ));
        }
        Ok(Self { key, model })
    }
}

impl KeyReference {
    /// The weights of the model that differ from those of the key.
    pub fn weight_damage(&mut self) -> Result<Vec<Damage>> {
        let mut found = Vec::new();
        if let Some(model) = &mut self.model {
            for spec in self.key.config().tensors() {
                let [mut given, mut keyed] = [(); 2].map(|()| vec![0.0; spec.shape.numel()]);
                model.read_tensor(&spec.name, &mut given)?;
                self.key.read_tensor(&spec.name, &mut keyed)?;
                // The bits must be the same, because a copy does not round.
                let comparison = compare(&given, &keyed, spec.shape.dims(), 0.0);
                if !comparison.pass {
                    let tensor = format!("param.{}", spec.name);
                    let what = format!("{}: differs from the answer key's {tensor}", model.path().display());
                    found.push(Damage { tensor, what, comparison });
                }
            }
        }
        Ok(found)
    }
}

impl Reference for KeyReference {
    fn config(&self) -> ModelConfig {
        *self.key.config()
    }
    fn batch(&self) -> usize {
        self.key.batch()
    }
    fn seq(&self) -> usize {
        self.key.seq()
    }
    fn x(&mut self) -> Result<Vec<i32>> {
        self.key.x()
    }
    fn y(&mut self) -> Result<Vec<i32>> {
        self.key.y()
    }
    fn read_weight(&mut self, name: &str, values: &mut [f32]) -> Result<()> {
        match &mut self.model {
            _ if Lora::part_of(name).is_ok() => self.key.read_into(&format!("param.{name}"), values),
            Some(model) => model.read_tensor(name, values),
            None => {
                self.key.read_tensor(name, values)?;
                let table = || self.key.config().tensors();
                let cols = || table().iter().find(|spec| spec.name == name).map_or(1, row_len);
                check_finite(self.key.path(), &format!("param.{name}"), values, cols)
            }
        }
    }
    fn read(&mut self, name: &str) -> Result<Option<Vec<f32>>> {
        if self.key.has(name) { self.key.read(name).map(Some) } else { Ok(None) }
    }
    fn dropout(&self) -> DropRate {
        self.key.meta().dropout
    }
    fn lora(&self) -> Option<Lora> {
        self.key.meta().lora
    }
    fn inputs(&mut self) -> Result<OwnedBatch> {
        self.key.inputs()
    }
    fn packed(&self) -> bool {
        self.key.is_packed()
    }
    fn preference(&self) -> Option<f32> {
        self.key.meta().preference
    }
    fn optimizer(&self) -> Recipe {
        let seed = if self.dropout().drops() { self.key.meta().seed.unwrap_or(0) } else { 0 };
        let Some(o) = self.key.optimizer() else {
            let Recipe { steps, optimizer, scalars } = family_recipe();
            return Recipe { steps, optimizer, scalars: Scalars { seed, ..scalars } };
        };
        let scalars = Scalars {
            seed,
            lr: o.lr as f32,
            beta1: o.beta1,
            beta2: o.beta2,
            eps: o.eps as f32,
            weight_decay: o.weight_decay as f32,
            ..Scalars::default()
        };
        Recipe { steps: o.steps, scalars, optimizer: Optimizer::named(&o.name).unwrap_or_default() }
    }
    fn tolerance_of(&self, name: &str, base: f64) -> f64 {
        // One forward and backward has the plain tolerance; only errors that optimizer steps amplify, and gradients
        // with strong cancellation, have a larger one.
        let (times, most) = match name {
            "losses" => (TORCH_ERRORS, MOST_FOR_LOSSES),
            _ if name.starts_with("after.") => (TORCH_ERRORS, MOST_FOR_AFTER),
            _ if self.cancels(name) => (ROUTER_ERRORS, MOST_FOR_ROUTER),
            _ => return base,
        };
        let torch = self.key.meta().torch_error.get(name).copied().unwrap_or(0.0);
        base.max((times * torch).min(most))
    }
    fn slack_of(&self, name: &str) -> f64 {
        // AdamW moves a weight by up to lr per step, however small its gradient is: where the gradient is rounding
        // noise, so is the step. A few elements of a large tensor are like that; the norm of the tensor still has the
        // tolerance.
        let Recipe { steps, scalars, .. } = self.optimizer();
        if name.starts_with("after.") { steps as f64 * f64::from(scalars.lr) } else { 0.0 }
    }
    fn bf16_errors(&self) -> Option<&BTreeMap<String, f64>> {
        Some(&self.key.meta().torch_error_bf16).filter(|errors| !errors.is_empty())
    }
    fn most_steps(&self) -> Option<usize> {
        Some(self.optimizer().steps)
    }
    fn damage(&mut self) -> Result<Vec<Damage>> {
        let mut found = self.weight_damage()?;
        for tensor in self.key.crc_mismatches()? {
            if found.iter().any(|damage| damage.tensor == tensor) {
                continue;
            }
            let path = self.key.path().display();
            let what = format!("{path}: {tensor} does not have the checksum it was written with");
            found.push(Damage { tensor, what, comparison: Comparison::unknown() });
        }
        Ok(found)
    }
}
