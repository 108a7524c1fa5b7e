//! Weights and the optimizer's state, between the engine and files.

use super::master::{is_residual, read_master, write_master};
use super::{Session, ranks};
use crate::format::checkpoint::{Checkpoint, CheckpointParts, widen};
use crate::{Error, Result};
use ironhorse_core::op::Op;
use ironhorse_core::{DType, Engine, EngineExt, Param, Pool, Shape, Slot, bf16_to_f32, split_master};

impl Session {
    /// Fills one of the pools laid out like the parameters: `read(name, values)` for every tensor in model order.
    pub fn load(&mut self, pool: Pool, mut read: impl FnMut(&str, &mut [f32]) -> Result<()>) -> Result<()> {
        let mut values = Vec::new();
        let masters = if pool == Pool::Params { self.master_slots()? } else { Vec::new() };
        for (i, (name, slot)) in self.param_slots(pool)?.into_iter().enumerate() {
            values.clear();
            values.resize(slot.numel(), 0.0);
            read(&name, &mut values)?;
            let masters = masters.get(i).unwrap_or(&ranks::NO_MASTERS);
            write_weights(self.engine.as_mut(), (slot, masters), &values)?;
        }
        Ok(())
    }

    /// Where the master weights are, if this session trains with them.
    pub(super) fn master_slots(&self) -> Result<Vec<ranks::Masters>> {
        match &self.programs.train {
            Some(program) if program.precision().has_master() => {
                let residual = program.precision().has_residual();
                let of = |param: &Param| {
                    self.pieces(Pool::Master, param).map(|pieces| ranks::Masters { pieces, residual })
                };
                program.params().iter().map(of).collect()
            }
            _ => Ok(Vec::new()),
        }
    }

    /// The pool that holds the weights to keep: the master weights where there are any.
    pub fn weights_pool(&self) -> Pool {
        let has_master = self.programs.train.as_ref().is_some_and(|program| program.precision().has_master());
        // a rank that has a part of the master weights has all weights rounded
        let whole = !self.ranks.sums.is_some_and(|sums| sums.shards_state());
        if has_master && whole { Pool::Master } else { Pool::Params }
    }

    /// Copies one tensor out of a pool laid out like the parameters; for the weights, their most precise copy.
    pub fn read_param(&mut self, pool: Pool, name: &str, values: &mut Vec<f32>) -> Result<()> {
        let param = self.any_program()?.params().iter().find(|param| param.name == name).cloned();
        let param = param.ok_or_else(|| Error::unknown("tensor", name, "one of the model's parameters"))?;
        self.read_in_pool(pool, &param, values)
    }

    /// [`Session::read_param`] by the row of the parameter table.
    pub(crate) fn read_in_pool(&mut self, pool: Pool, param: &Param, values: &mut Vec<f32>) -> Result<()> {
        let pool = if pool == Pool::Params { self.weights_pool() } else { pool };
        let slot = param.in_pool(pool);
        let residual = pool == Pool::Master && is_residual(&slot);
        Ok(read_master(self.engine.as_mut(), [param.weight, slot], residual, values)?)
    }

    /// Copies one tensor of a pool out as the engine stores it; where this rank has a part of it only, the rest is 0.
    pub fn read_state(&mut self, pool: Pool, index: usize, bytes: &mut Vec<u8>) -> Result<()> {
        let param = self.table_row(index)?;
        let size = param.precision.of(pool).size();
        bytes.clear();
        bytes.resize(param.in_pool(pool).bytes(), 0);
        for (at, slot) in self.pieces(pool, &param)? {
            self.engine.read_bytes(slot, &mut bytes[at * size..at * size + slot.bytes()])?;
        }
        Ok(())
    }

    /// Copies one tensor of a pool in that [`Session::read_state`] copied out; of it what this rank has.
    pub fn write_state(&mut self, pool: Pool, index: usize, bytes: &[u8]) -> Result<()> {
        let param = self.table_row(index)?;
        let (whole, size) = (param.in_pool(pool), param.precision.of(pool).size());
        if bytes.len() != whole.bytes() {
            return Ok(ironhorse_core::check_host_bytes(&whole, bytes.len())?);
        }
        for (at, slot) in self.pieces(pool, &param)? {
            self.engine.write_bytes(slot, &bytes[at * size..at * size + slot.bytes()])?;
        }
        Ok(())
    }

    /// The largest elements of earlier steps, from which a step scales its tensors in 8 bits; empty where there are none. Between
    /// steps those of a step are 0.
    pub fn scales(&mut self) -> Result<Vec<f32>> {
        let slot = self.scale_slot()?;
        let mut values = vec![0.0; slot.numel()];
        self.engine.read_f32(slot, &mut values)?;
        Ok(values.into_iter().step_by(2).collect())
    }

    /// Restores what [`Session::scales`] gave. Says whether there are as many: otherwise nothing is known of earlier steps.
    pub fn set_scales(&mut self, scales: &[f32]) -> Result<bool> {
        let slot = self.scale_slot()?;
        let same = 2 * scales.len() == slot.numel();
        let known = if same { scales } else { &[] };
        let mut values: Vec<f32> = known.iter().flat_map(|&scale| [scale, 0.0]).collect();
        values.resize(slot.numel(), 0.0);
        self.engine.write_f32(slot, &values)?;
        Ok(same)
    }

    /// The scales of the training program, as pairs; of a pool that may have more room.
    pub(super) fn scale_slot(&self) -> Result<Slot> {
        let update = self.train_program()?.nodes().iter().rev().find_map(|node| match node.op {
            Op::ScaleUpdate(op) => Some(op.scales),
            _ => None,
        });
        let none = Slot { pool: Pool::Scales, offset: 0, shape: Shape::new([0, 2]), dtype: DType::F32 };
        Ok(update.unwrap_or(none))
    }

    pub(super) fn table_row(&self, index: usize) -> Result<Param> {
        let param = self.train_program()?.params().get(index);
        param.cloned().ok_or_else(|| {
            ironhorse_core::Error::Program(format!("the model has no tensor number {index}")).into()
        })
    }

    /// Restores the state of a checkpoint of the same model: byte for byte where the element types are the same, else
    /// converted. Says whether it was byte for byte.
    pub fn restore(&mut self, checkpoint: &mut Checkpoint) -> Result<bool> {
        let precision = self.train_program()?.precision();
        let table = self.model.tensors();
        let theirs = checkpoint.precision()?;
        if theirs.optimizer != precision.optimizer {
            let found = format!("that of {}", theirs.optimizer.name());
            let expected = format!(
                "that of {}, as the run asks for; resume with --optimizer {}, or start a new run from the weights with --init",
                precision.optimizer.name(),
                theirs.optimizer.name()
            );
            return Err(Error::field(checkpoint.path(), "optimizer state", found, expected));
        }
        let optimizer = precision.optimizer;
        let same = CheckpointParts::pools(precision) == CheckpointParts::pools(theirs)
            && CheckpointParts::pools(precision).iter().all(|&pool| precision.of(pool) == theirs.of(pool));
        let known = self.set_scales(&checkpoint.trainer().scales())?;
        let mut bytes = Vec::new();
        if same {
            for pool in CheckpointParts::pools(precision) {
                for (index, spec) in table.iter().enumerate().filter(|(_, spec)| spec.is_in(pool, optimizer))
                {
                    let param = self.table_row(index)?;
                    for (at, slot) in self.pieces(pool, &param)? {
                        checkpoint.read_part(pool, spec, at..at + slot.numel(), &mut bytes)?;
                        self.engine.write_bytes(slot, &bytes)?;
                    }
                }
            }
            return Ok(known);
        }
        self.load(Pool::Params, |name, values| checkpoint.read_tensor(name, values))?;
        for pool in [Pool::Moment1, Pool::Moment2] {
            for (index, spec) in table.iter().enumerate().filter(|(_, spec)| spec.is_in(pool, optimizer)) {
                let param = self.table_row(index)?;
                for (at, slot) in self.pieces(pool, &param)? {
                    checkpoint.read_part(pool, spec, at..at + slot.numel(), &mut bytes)?;
                    let mut values = vec![0.0; slot.numel()];
                    widen(theirs.of(pool), &bytes, &mut values);
                    self.engine.write_f32(slot, &values)?;
                }
            }
        }
        Ok(false)
    }

    pub(super) fn param_slots(&self, pool: Pool) -> Result<Vec<(String, Slot)>> {
        if pool == Pool::Frozen {
            return Ok(self.any_program()?.frozen().to_vec());
        }
        let params = self.any_program()?.params();
        Ok(params.iter().map(|param| (param.name.clone(), param.in_pool(pool))).collect())
    }
}

/// Copies weights in, with what there is of the master that goes with them.
pub(super) fn write_weights(
    engine: &mut dyn Engine,
    (slot, masters): (Slot, &ranks::Masters),
    values: &[f32],
) -> Result<()> {
    let covered: usize = masters.pieces.iter().map(|(_, master)| master.numel()).sum();
    // other ranks have the rest of the masters
    if covered < values.len() && masters.residual {
        let nearest = |&value: &f32| bf16_to_f32(split_master(value).0);
        engine.write_f32(slot, &values.iter().map(nearest).collect::<Vec<_>>())?;
    } else if covered < values.len() || values.is_empty() {
        engine.write_f32(slot, values)?;
    }
    for &(at, master) in &masters.pieces {
        let offset = slot.offset + at * slot.dtype.size();
        let weights = Slot { offset, shape: master.shape, ..slot };
        let part = &values[at..at + master.numel()];
        write_master(engine, [weights, master], masters.residual, part)?;
    }
    Ok(())
}
