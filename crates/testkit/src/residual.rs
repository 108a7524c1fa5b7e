//! Checks that bf16 weights with a 16-bit residual give the same bits as an f32 master, step after step.

use crate::Rng;
use crate::case::read;
use ironhorse_core::op::AdamW;
use ironhorse_core::{
    Builder, DType, Engine, EngineExt, Pool, Precision, Program, Result, Scalars, Section, bf16_to_f32,
    f32_to_bf16, join_master, split_master,
};

/// Parameters as (elements, decay): more elements than a block of a kernel, odd sizes, and a gap between two.
const SIZES: [(usize, bool); 3] = [(4097, true), (1, false), (701, false)];
/// Bit patterns of f32 at which rounding to bf16 changes, and special values.
const LOW: [u32; 8] = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x4000, 0xc000];
const HIGH: [u32; 10] = [0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x3f80, 0xbf81, 0x7f00, 0xff00, 0x7f7f];

/// An engine with an AdamW program over these parameters.
struct Run {
    engine: Box<dyn Engine>,
    program: Program,
    op: AdamW,
}

impl Run {
    fn new(mut engine: Box<dyn Engine>, precision: Precision) -> Result<Self> {
        let mut b = Builder::with_precision(precision);
        for (i, (n, decay)) in SIZES.into_iter().enumerate() {
            b.param(format!("{i}"), [n], decay);
        }
        let [norm, halt] = ["norm", "halt"].map(|name| b.io(name, [1], DType::F32));
        let [params, grads, moment1, moment2, master] =
            [Pool::Params, Pool::Grads, Pool::Moment1, Pool::Moment2, Pool::Master].map(|pool| b.flat(pool));
        let op = AdamW { params, master: Some(master), grads, moment1, moment2, norm, halt, first: 0 };
        b.section(Section::Update);
        b.push(op)?;
        let program = b.finish()?;
        engine.reserve(program.layout())?;
        Ok(Self { engine, program, op })
    }

    fn master(&self) -> ironhorse_core::Slot {
        self.op.master.unwrap_or(self.op.params)
    }

    fn set_masters(&mut self, values: &[f32]) -> Result<()> {
        let split: Vec<(u16, i16)> = values.iter().map(|&value| split_master(value)).collect();
        let weights: Vec<f32> = split.iter().map(|&(weight, _)| bf16_to_f32(weight)).collect();
        self.engine.write_f32(self.op.params, &weights)?;
        let residuals: Vec<f32> = split.iter().map(|&(_, residual)| residual.into()).collect();
        let master = self.master();
        let whole = master.dtype == DType::F32;
        self.engine.write_f32(master, if whole { values } else { &residuals })
    }

    fn masters(&mut self) -> Result<Vec<f32>> {
        let master = self.master();
        let held = read(self.engine.as_mut(), master)?;
        if master.dtype == DType::F32 {
            return Ok(held);
        }
        let weights = read(self.engine.as_mut(), self.op.params)?;
        Ok(weights.iter().zip(held).map(|(&w, r)| join_master(f32_to_bf16(w), r as i16)).collect())
    }

    fn step(&mut self, grads: &[f32], norm: f32, scalars: &Scalars) -> Result<()> {
        self.engine.write_f32(self.op.grads, grads)?;
        self.engine.write_f32(self.op.norm, &[norm])?;
        self.engine.run(&self.program, 0..1, scalars)?;
        self.engine.synchronize()
    }
}

/// Runs AdamW on two engines from `make`, one with an f32 master and one with a residual. Initial masters include
/// denormals, ties and the largest numbers; gradients include 0, denormals, large numbers, infinities and NaN. After
/// every step masters and moments must have the same bits, and each weight must be the bf16 nearest to its master.
///
/// # Errors
/// An engine failed, or the text says what differs.
pub fn check_residual(
    make: &mut dyn FnMut() -> Box<dyn Engine>,
    grads: DType,
    steps: u32,
) -> std::result::Result<(), String> {
    let base = Precision { grads, ..Precision::BF16 };
    let said = |error: ironhorse_core::Error| error.to_string();
    let mut whole = Run::new(make(), base).map_err(said)?;
    let mut pair = Run::new(make(), base.with_residual()).map_err(said)?;
    let mut rng = Rng::new(11);
    let n = whole.op.params.numel();
    let inside = |i: usize| whole_holds(&whole.program, i);
    let places: Vec<bool> = (0..n).map(inside).collect();
    let start: Vec<f32> = (0..n).map(|i| if places[i] { start_value(i, &mut rng) } else { 0.0 }).collect();
    for run in [&mut whole, &mut pair] {
        run.set_masters(&start).map_err(said)?;
    }
    for step in 1..=steps {
        let scale = 10.0_f32.powi(rng.below(46) as i32 - 42);
        let bad = step % 7 == 0;
        let mut values = rng.uniforms(n, -scale, scale);
        values.iter_mut().step_by(5).for_each(|value| *value = 0.0);
        values.iter_mut().zip(&places).filter(|(_, inside)| !**inside).for_each(|(value, _)| *value = 0.0);
        if bad {
            (values[0], values[1]) = (f32::NAN, f32::INFINITY);
        }
        let norm = if bad { [f32::NAN, f32::INFINITY][step as usize % 2] } else { scale * (n as f32).sqrt() };
        let scalars =
            Scalars { step, lr: 1e-3, weight_decay: 0.1, grad_clip: 1.0, seed: 5, ..Scalars::default() };
        for run in [&mut whole, &mut pair] {
            run.step(&values, norm, &scalars).map_err(said)?;
        }
        let (want, got) = (whole.masters().map_err(said)?, pair.masters().map_err(said)?);
        same(&format!("step {step}: the master"), &want, &got)?;
        for (name, pool) in [("first moment", Pool::Moment1), ("second moment", Pool::Moment2)] {
            let [want, got] = [&mut whole, &mut pair]
                .map(|run| read(run.engine.as_mut(), run.program.flat(pool)).map_err(said));
            same(&format!("step {step}: the {name}"), &want?, &got?)?;
        }
        let nearest: Vec<f32> = want.iter().map(|&w| bf16_to_f32(split_master(w).0)).collect();
        let weights = read(pair.engine.as_mut(), pair.op.params).map_err(said)?;
        same(&format!("step {step}: the weight"), &nearest, &weights)?;
    }
    Ok(())
}

fn whole_holds(program: &Program, element: usize) -> bool {
    let holds = |first: usize, n: usize| (first..first + n).contains(&element);
    program.params().iter().any(|p| holds(p.weight.offset / p.weight.dtype.size(), p.weight.numel()))
}

/// The patterns above in turn, then arbitrary finite numbers, then numbers of the size of weights.
fn start_value(i: usize, rng: &mut Rng) -> f32 {
    let special = HIGH.len() * LOW.len();
    let any = f32::from_bits(rng.bits() as u32);
    match i {
        _ if i < special => f32::from_bits(HIGH[i / LOW.len()] << 16 | LOW[i % LOW.len()]),
        _ if i < 2000 && any.is_finite() => any,
        _ => rng.uniform(-1.0, 1.0),
    }
}

fn same(what: &str, want: &[f32], got: &[f32]) -> std::result::Result<(), String> {
    let differ =
        |(_, (a, b)): &(usize, (&f32, &f32))| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
    match want.iter().zip(got).enumerate().find(differ) {
        Some((i, (a, b))) => {
            Err(format!("{what} [{i}] is {b:e} ({:08x}), expected {a:e} ({:08x})", b.to_bits(), a.to_bits()))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OracleEngine;

    /// The oracle keeps an f32 master in f64, but rounds weight and residual: the bits differ.
    #[test]
    fn masters_that_part_are_found() {
        let said = check_residual(&mut || Box::new(OracleEngine::new()), DType::BF16, 3).unwrap_err();
        assert!(said.starts_with("step ") && said.contains("expected"), "{said}");
    }
}
