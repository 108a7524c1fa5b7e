//! Builds a case: declares slots with guards between them and fills those that the op reads.

use super::{Case, Data, Drawn, Earlier, Input, round_to};
use crate::Rng;
use ironhorse_core::op::{AdamW, Op};
use ironhorse_core::{Builder, DType, Fp8, Layout, Pool, Precision, Scalars, Shape, Slot};
use std::sync::Arc;

/// The number of elements of a guard: one cache line.
const GUARD: usize = 16;

/// Builds one [`Case`]. Slots without given values hold random values if the op reads them, NaN if it only writes them.
#[derive(Debug)]
pub struct Kit {
    /// The scalars to run with.
    pub scalars: Scalars,
    /// The random numbers of the case, seeded by its name.
    pub rng: Rng,
    /// See [`Case::floor`].
    pub floor: f64,
    /// See [`Case::scores`].
    pub scores: f64,
    /// See [`Case::large`].
    pub large: bool,
    /// See [`Case::exact`].
    pub exact: bool,
    precision: Precision,
    name: String,
    pub(crate) builder: Builder,
    given: Vec<Input>,
    count: usize,
}

impl Kit {
    /// A case of this name, in f32.
    pub fn new(name: impl Into<String>) -> Self {
        Self::with_precision(Precision::F32, name)
    }

    /// A case of this name in these element types. Its random numbers are those of the f32 case, rounded.
    pub fn with_precision(precision: Precision, name: impl Into<String>) -> Self {
        let name = name.into();
        let rng = Rng::named(&name);
        Self {
            scalars: Scalars::default(),
            rng,
            floor: 0.0,
            scores: 0.0,
            large: false,
            exact: false,
            precision,
            name: name + &suffix(precision),
            builder: Builder::with_precision(precision),
            given: Vec::new(),
            count: 0,
        }
    }

    /// A slot among the inputs and results, of the activations' element type.
    pub fn slot(&mut self, shape: impl Into<Shape>) -> Slot {
        self.typed(shape, self.precision.weights)
    }

    /// An f32 slot whatever the precision: statistics, losses, the norm.
    pub fn stat(&mut self, shape: impl Into<Shape>) -> Slot {
        self.typed(shape, DType::F32)
    }

    /// A slot of 8-bit numbers; in f32 a slot that holds such numbers.
    pub fn fp8(&mut self, shape: impl Into<Shape>, format: Fp8) -> Slot {
        let wide = self.precision.weights == DType::F32;
        self.typed(shape, if wide { DType::F32 } else { DType::F8(format) })
    }

    fn typed(&mut self, shape: impl Into<Shape>, dtype: DType) -> Slot {
        self.guard();
        self.builder.io(format!("slot {}", self.count), shape, dtype)
    }

    fn guard(&mut self) {
        self.count += 1;
        self.builder.io(format!("guard {}", self.count), [GUARD], DType::F32);
    }

    /// A slot of the activations' element type with these values.
    pub fn f32s(&mut self, shape: impl Into<Shape>, values: &[f32]) -> Slot {
        let slot = self.slot(shape);
        self.set(slot, values.to_vec());
        slot
    }

    /// An i32 slot with these values.
    pub fn i32s(&mut self, shape: impl Into<Shape>, values: &[i32]) -> Slot {
        let slot = self.typed(shape, DType::I32);
        self.given.push(Input { slot, data: Data::I32(values.to_vec()) });
        slot
    }

    /// An i32 slot to be written.
    pub fn ints(&mut self, shape: impl Into<Shape>) -> Slot {
        self.typed(shape, DType::I32)
    }

    /// An i32 slot with random values below `limit`; the last one is `limit - 1`.
    pub fn tokens(&mut self, shape: impl Into<Shape>, limit: usize) -> Slot {
        let shape = shape.into();
        let mut values: Vec<i32> = (0..shape.numel()).map(|_| self.rng.below(limit) as i32).collect();
        if let Some(last) = values.last_mut() {
            *last = limit as i32 - 1;
        }
        self.i32s(shape, &values)
    }

    /// An i32 slot (B,T) of the positions of tokens in documents of random lengths, 1 to `longest`; the last of a sequence
    /// is cut off.
    pub fn documents(&mut self, [batch, seq]: [usize; 2], longest: usize) -> Slot {
        let mut values = Vec::with_capacity(batch * seq);
        for row in 1..=batch {
            while values.len() < row * seq {
                let length = (1 + self.rng.below(longest)).min(row * seq - values.len());
                values.extend(0..length as i32);
            }
        }
        self.i32s([batch, seq], &values)
    }

    /// A parameter, after another one that no op may change.
    pub fn param(&mut self, shape: impl Into<Shape>) -> Slot {
        self.count += 1;
        self.builder.param(format!("guard {}", self.count), [GUARD], true);
        self.builder.param(format!("param {}", self.count), shape, true)
    }

    /// The gradient of a new parameter.
    pub fn grad(&mut self, shape: impl Into<Shape>) -> Slot {
        let weight = self.param(shape);
        self.builder.grad(weight)
    }

    /// A slot of the key/value cache.
    pub fn cache(&mut self, shape: impl Into<Shape>) -> Slot {
        self.builder.cache([GUARD], DType::F32);
        self.builder.cache(shape, self.precision.weights)
    }

    /// Sets the values of a slot, rounded to its element type; returns the rounded values.
    pub fn set(&mut self, slot: Slot, mut values: Vec<f32>) -> Vec<f32> {
        round_to(slot.dtype, &mut values);
        self.given.push(Input { slot, data: Data::F32(values.clone()) });
        values
    }

    /// Random values in a slot, drawn when the case is run.
    pub fn draw(&mut self, slot: Slot, lo: f32, hi: f32) {
        self.draw_fp8(slot, [lo, hi], None);
    }

    /// As [`Self::draw`], with values that are rounded to 8 bits even if the slot is wider.
    pub(crate) fn draw_fp8(&mut self, slot: Slot, range: [f32; 2], fp8: Option<Fp8>) {
        let data = Data::Drawn(Drawn { rng: self.rng.clone(), range, fp8 });
        self.rng.skip(slot.numel());
        self.given.push(Input { slot, data });
    }

    /// What a slot holds after an earlier op.
    pub(crate) fn result(&mut self, slot: Slot, earlier: &Arc<Earlier>, number: usize) {
        self.given.push(Input { slot, data: Data::Result(Arc::clone(earlier), number) });
    }

    /// Sets random values in a slot and returns them.
    pub fn random(&mut self, slot: Slot, lo: f32, hi: f32) -> Vec<f32> {
        let values = self.rng.uniforms(slot.numel(), lo, hi);
        self.set(slot, values)
    }

    /// The case of this op. Slots that it reads and that have no values yet get random ones.
    pub fn finish(mut self, op: impl Into<Op>) -> Case {
        let op = op.into();
        for arg in op.args() {
            let given = self.given.iter().any(|input| input.slot == arg.slot);
            if arg.access.reads_at(self.scalars.micro_step) && !given && arg.slot.numel() > 0 {
                self.draw(arg.slot, -1.0, 1.0);
            }
        }
        self.guard();
        self.builder.cache([GUARD], DType::F32);
        self.builder.push(op).unwrap_or_else(|error| panic!("case {}: {error}", self.name));
        let program = self.builder.finish().unwrap_or_else(|error| panic!("case {}: {error}", self.name));
        let reserve = program.layout().union(&margin(self.precision, program.num_params()));
        let Self { name, scalars, given: inputs, floor, scores, large, exact, .. } = self;
        Case { name, program, scalars, inputs, reserve, floor, scores, large, exact }
    }
}

/// The suffix of the name of a case in these element types.
pub(super) fn suffix(precision: Precision) -> String {
    let mut text = String::new();
    for (is_so, part) in [
        (precision.weights == DType::BF16, ", bf16"),
        (precision.weights != precision.grads, ", f32 gradients"),
        (precision.has_residual(), ", residual"),
        (precision.moments == DType::BF16, ", bf16 moments"),
    ] {
        text += if is_so { part } else { "" };
    }
    text
}

/// A layout whose parameter pools are larger than any case with this many parameters, gaps between them included.
fn margin(precision: Precision, params: usize) -> Layout {
    let mut b = Builder::with_precision(precision);
    b.param("all", [params + 128 * GUARD], false);
    let [norm, halt] = ["norm", "halt"].map(|name| b.io(name, [1], DType::F32));
    let [params, grads, moment1, moment2, master] =
        [Pool::Params, Pool::Grads, Pool::Moment1, Pool::Moment2, Pool::Master].map(|pool| b.flat(pool));
    let master = precision.has_master().then_some(master);
    b.push(AdamW { params, master, grads, moment1, moment2, norm, halt, first: 0 })
        .expect("flat pools fit adamw");
    *b.finish().expect("one op over io and parameters").layout()
}
