//! The f32 twin of a program with narrower numbers: the same ops over wider memory, for engines that compute in f32 only.

use crate::op::{AdamW, MuonUpdate, Op};
use crate::program::{Layout, Node, Param, Program, Value};
use crate::{DType, Pool, Precision, Result, Slot};

/// How much more memory a twin has: four times as much as 8-bit elements need, or twice as much as 16-bit elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Widening {
    /// Twice the memory, for programs without 8-bit elements.
    #[default]
    Twice,
    /// Four times the memory, for programs with 8-bit elements.
    Fourfold,
}

impl Widening {
    const fn factor(self) -> usize {
        match self {
            Self::Twice => 2,
            Self::Fourfold => 4,
        }
    }
}

impl Slot {
    /// The twin's slot of this tensor; elements of 16 or 8 bits become f32. Tensors that do not overlap here do not overlap
    /// in the twin. Pools laid out like the parameters keep that layout, and have no 8-bit elements; in other pools a view
    /// must begin where its tensor begins, unless its elements are the smallest that there are.
    #[must_use]
    pub fn widened(self, by: Widening) -> Self {
        let wide = matches!(self.dtype, DType::BF16 | DType::I16 | DType::F8(_));
        let factor = match self.pool {
            Pool::Params | Pool::Grads | Pool::Moment1 | Pool::Moment2 | Pool::Master | Pool::Frozen => {
                if wide {
                    2
                } else {
                    1
                }
            }
            Pool::Io | Pool::Cache | Pool::Activations => by.factor(),
            Pool::Scales => 1,
        };
        let offset = self.offset.saturating_mul(factor);
        Self { offset, dtype: if wide { DType::F32 } else { self.dtype }, ..self }
    }
}

impl Layout {
    /// An upper bound of the layout of the twin of any program with this layout.
    #[must_use]
    pub fn widened(&self, by: Widening) -> Self {
        self.widened_where(by, |_| true)
    }

    /// The layout of a twin in which those pools of moments and master weights double that `narrow` selects.
    fn widened_where(&self, by: Widening, narrow: impl Fn(Pool) -> bool) -> Self {
        Self::new(Pool::ALL.map(|pool| match pool {
            Pool::Moment1 | Pool::Moment2 | Pool::Master if !narrow(pool) => self.bytes(pool),
            Pool::Io | Pool::Cache | Pool::Activations => self.bytes(pool).saturating_mul(by.factor()),
            Pool::Scales => self.bytes(pool),
            _ => self.bytes(pool).saturating_mul(2),
        }))
    }
}

impl Program {
    /// What the twin of this program needs at least; programs that share memory need the most that any of them does.
    pub fn widening(&self) -> Widening {
        let mut slots = self.nodes.iter().flat_map(|node| node.op.args()).map(|arg| arg.slot);
        if slots.any(|slot| slot.dtype.size() == 1) { Widening::Fourfold } else { Widening::Twice }
    }

    /// The f32 twin: the same ops in the same order, each tensor at [`Slot::widened`]. The update changes the f32
    /// master weights and leaves the parameters unchanged.
    pub fn widened(&self, by: Widening) -> Result<Self> {
        let by = by.max(self.widening());
        let nodes = self.nodes.iter().map(|node| Ok(Node { op: widened(node.op, by)?, ..*node }));
        let precision = Precision::F32.with_optimizer(self.precision.optimizer);
        let param = |param: &Param| Param { weight: param.weight.widened(by), precision, ..param.clone() };
        Ok(Self {
            id: crate::builder::next_id(),
            nodes: nodes.collect::<Result<_>>()?,
            origins: self.origins.clone(),
            params: self.params.iter().map(param).collect(),
            frozen: self.frozen.iter().map(|(name, slot)| (name.clone(), slot.widened(by))).collect(),
            precision,
            values: self.values.iter().map(|v| Value { slot: v.slot.widened(by), ..v.clone() }).collect(),
            io: self.io.iter().map(|(name, slot)| (name.clone(), slot.widened(by))).collect(),
            layout: self.layout.widened_where(by, |pool| self.precision.of(pool).size() == 2),
            activation_lower_bound: self.activation_lower_bound.saturating_mul(by.factor()),
        })
    }
}

fn widened(op: Op, by: Widening) -> Result<Op> {
    let mut op = match op {
        Op::AdamW(adamw @ AdamW { master: Some(master), .. }) => {
            // the same number of elements as the parameters, in f32
            let params = Slot { shape: adamw.params.shape, ..master };
            AdamW { params, master: None, ..adamw }.into()
        }
        Op::MuonUpdate(update @ MuonUpdate { master: Some(master), .. }) => {
            let params = Slot { shape: update.params.shape, ..master };
            MuonUpdate { params, master: None, ..update }.into()
        }
        other => other,
    };
    op.map_slots(&mut |slot| *slot = slot.widened(by));
    op.check()?;
    Ok(op)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Act, ActFwd, GradNorm};
    use crate::{Builder, Section};

    #[test]
    fn the_twin_has_the_same_ops_in_f32_over_memory_that_fits() {
        let small = Precision::BF16.with_residual().with_bf16_moments();
        for precision in [Precision::BF16, Precision::BF16_F32_GRADS, small] {
            let mut b = Builder::with_precision(precision);
            let w = b.param("w", [33], true);
            let v = b.param("v", [5], true);
            let [norm, halt, loss] = ["norm", "halt", "loss"].map(|name| b.io(name, [1], DType::F32));
            let x = b.activation([33], DType::BF16);
            let y = b.activation([33], DType::BF16);
            b.push(ActFwd { out: x, inp: w, act: Act::Gelu }).unwrap();
            b.push(ActFwd { out: y, inp: x, act: Act::Gelu }).unwrap();
            b.section(Section::Update);
            let grads = b.flat(Pool::Grads);
            b.push(GradNorm { norm, halt, grads, loss, slices: None }).unwrap();
            let [params, master, moment1, moment2] =
                [Pool::Params, Pool::Master, Pool::Moment1, Pool::Moment2].map(|pool| b.flat(pool));
            b.push(AdamW { params, master: Some(master), grads, moment1, moment2, norm, halt, first: 0 })
                .unwrap();
            let program = b.finish().unwrap();
            let twin = program.widened(Widening::Twice).unwrap();
            assert_eq!(twin.nodes().len(), program.nodes().len());
            assert_ne!(twin.id(), program.id());
            for arg in twin.nodes().iter().flat_map(|node| node.op.args()) {
                assert_eq!(arg.slot.dtype, DType::F32);
                assert!(arg.slot.end() <= twin.layout().bytes(arg.slot.pool), "{}", arg.name);
            }
            let Op::AdamW(adamw) = twin.nodes()[3].op else { panic!("the last op is AdamW") };
            assert_eq!((adamw.params.pool, adamw.master), (Pool::Master, None));
            // elements of the parameter table have the same index in the flat pools
            let second = &twin.params()[1];
            assert_eq!(second.weight, v.widened(Widening::Twice));
            assert_eq!(second.weight.offset / 4, v.offset / 2);
            assert_eq!(second.grad().offset, program.params()[1].grad().widened(Widening::Twice).offset);
        }
    }
}
