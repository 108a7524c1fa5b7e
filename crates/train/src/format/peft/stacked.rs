//! Adapters of stacked experts, as PEFT writes them where transformers has the experts of a layer as two parameters: one A
//! and one B for gate and up of all experts, and one for their down.
//!
//! A is (E·R,C), expert by expert; gate and up share it. B is (OC,R·E), where experts are the inner index, and gate is above up.

use super::super::safetensors::SafeTensors;
use crate::Result;
use crate::model::{AdapterPart, Target};
use std::io::{Read, Seek};

/// Rank and alpha of some adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Own {
    pub rank: usize,
    pub alpha: f64,
}

/// Which parameters of experts have adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Stacked {
    pub gate_up: Option<Own>,
    pub down: Option<Own>,
}

impl Stacked {
    /// What transformers calls the parameters.
    pub const NAMES: [&str; 2] = ["gate_up_proj", "down_proj"];

    /// The adapters that a target is part of.
    pub fn of(&self, target: Target) -> Option<Own> {
        match target {
            Target::Gate | Target::Up => self.gate_up,
            Target::Down => self.down,
            Target::Q | Target::K | Target::V | Target::O => None,
        }
    }

    /// The module that has the adapters of a parameter: those of down are around those of gate and up where both are.
    fn place(&self, target: Target) -> &'static str {
        let inside = target != Target::Down && self.down.is_some();
        if inside { "mlp.experts.base_layer" } else { "mlp.experts" }
    }

    /// The name of the tensor that has this part.
    pub fn tensor(&self, part: AdapterPart) -> String {
        let which = if part.is_b { "B" } else { "A" };
        format!("model.layers.{}.{}.lora_{which}.weight", part.layer, self.place(part.target))
    }

    /// The targets of a tensor by its name, and whether it is B.
    pub fn targets_of(&self, name: &str) -> Option<(&'static [Target], bool)> {
        let (_, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (place, which) = rest.strip_suffix(".weight")?.rsplit_once(".lora_")?;
        let targets: [&[Target]; 2] = [&[Target::Gate, Target::Up], &[Target::Down]];
        let of = |targets: &&[Target]| self.of(targets[0]).is_some() && self.place(targets[0]) == place;
        Some((targets.into_iter().find(of)?, ["A", "B"].iter().position(|one| *one == which)? == 1))
    }

    /// The shape of the tensor that has this part, of `experts` whose A or B have these rows and columns.
    pub fn shape(part: AdapterPart, own: Own, experts: usize, [rows, cols]: [usize; 2]) -> [usize; 2] {
        let both = if part.target == Target::Down { 1 } else { 2 };
        if part.is_b { [both * rows, own.rank * experts] } else { [own.rank * experts, cols] }
    }
}

/// Stacked tensors that were read: the last A and the last B, of which the experts take their parts one after the other.
#[derive(Debug, Default)]
pub(super) struct Held([(String, Vec<f32>); 2]);

impl Held {
    /// The part of an expert: R rows of A, or its columns of B.
    pub fn part<R: Read + Seek>(
        &mut self,
        file: &mut SafeTensors<R>,
        name: &str,
        part: AdapterPart,
        own: Own,
    ) -> Result<Vec<f32>> {
        let [rows, cols] = match file.float_entry(name)?.0.shape[..] {
            [rows, cols] => [rows, cols],
            _ => return Err(file.field(format!("shape of `{name}`"), "not a matrix", "rows and columns")),
        };
        let (side, expert) = (if part.is_b { cols } else { rows }, part.expert.unwrap_or(0));
        let experts = side / own.rank.max(1);
        if expert >= experts {
            return Err(file.field(format!("`{name}`"), format!("of {experts} experts"), "of more"));
        }
        let held = &mut self.0[usize::from(part.is_b)];
        if held.0 != name {
            let mut values = vec![0.0; rows * cols];
            file.read_f32(name, &mut values)?;
            *held = (name.to_owned(), values);
        }
        let values = &held.1;
        if !part.is_b {
            let each = own.rank * cols;
            return Ok(values[expert * each..(expert + 1) * each].to_vec());
        }
        let lines = match part.target {
            Target::Gate => 0..rows / 2,
            Target::Up => rows / 2..rows,
            _ => 0..rows,
        };
        let line = |row: usize| values[row * cols..(row + 1) * cols].iter().skip(expert).step_by(experts);
        Ok(lines.flat_map(line).copied().collect())
    }
}
