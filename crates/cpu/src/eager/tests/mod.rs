//! Every forward against a plain f64 reference, every backward against central differences of the f64 forward, and the
//! other types against the f64 run of the same inputs.
#![allow(clippy::unwrap_used)]

mod attention;
mod calls;
mod elementwise;
mod rows;

use super::{read, set_threads, write};
use crate::element::{Bf16, Elem, F16, Real};
use calls::Done;
use ironhorse_core::eager::{Array, Float};
use std::sync::Mutex;

/// Whether an array has the type of the call or that of its sums.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Elements,
    Sums,
}
use Kind::{Elements, Sums};

/// One call: inputs, lengths of outputs, and the op.
struct Case<'a> {
    inputs: Vec<(Kind, Vec<f64>)>,
    outputs: Vec<(Kind, usize)>,
    call: &'a dyn Fn(&[Array], &[Array]) -> Done,
}

const GUARD: f64 = -7.0;

/// Memory that starts one element behind a 16-byte boundary, with guards on both sides.
struct Memory {
    words: Vec<u128>,
    float: Float,
    len: usize,
}

impl Memory {
    fn new(float: Float, x: &[f64]) -> Self {
        let bytes = (x.len() + 2) * float.size();
        let memory = Self { words: vec![0; bytes.div_ceil(16) + 1], float, len: x.len() };
        let all = [GUARD].iter().chain(x).chain(&[GUARD]);
        // SAFETY: there is room for all.
        all.enumerate().for_each(|(i, &x)| unsafe { write(memory.base(), i, x) });
        memory
    }

    fn base(&self) -> Array {
        Array { at: self.words.as_ptr().cast_mut().cast(), float: self.float }
    }

    fn array(&self) -> Array {
        let at = self.base().at.wrapping_byte_add(self.float.size());
        Array { at, float: self.float }
    }

    fn values(&self) -> Vec<f64> {
        // SAFETY: all of them exist.
        let get = |i: usize| unsafe { read(self.base(), i) };
        assert_eq!([get(0), get(self.len + 1)], [GUARD; 2], "written outside");
        (1..=self.len).map(get).collect()
    }
}

fn kind_of(kind: Kind, float: Float) -> Float {
    if kind == Sums { float.acc() } else { float }
}

/// The outputs of a case; those that are named in `null` are not wanted, and empty.
fn run(case: &Case<'_>, float: Float, null: &[usize]) -> Vec<Vec<f64>> {
    let inputs: Vec<Memory> =
        case.inputs.iter().map(|(kind, x)| Memory::new(kind_of(*kind, float), x)).collect();
    let outputs: Vec<Memory> = case
        .outputs
        .iter()
        .map(|&(kind, len)| Memory::new(kind_of(kind, float), &vec![123.0; len]))
        .collect();
    let from: Vec<Array> = inputs.iter().map(Memory::array).collect();
    let none = |i: usize, array: Array| if null.contains(&i) { Array::none(array.float) } else { array };
    let to: Vec<Array> = outputs.iter().enumerate().map(|(i, x)| none(i, x.array())).collect();
    (case.call)(&from, &to).unwrap();
    let values = |(i, x): (usize, &Memory)| if null.contains(&i) { Vec::new() } else { x.values() };
    outputs.iter().enumerate().map(values).collect()
}

/// Multiples of 1/64 in -2..2: every type holds them.
fn random(len: usize, seed: u32) -> Vec<f64> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 24) / 64.0 - 2.0
    };
    (0..len).map(|_| next()).collect()
}

/// What every type holds.
fn rounded(x: &[f64]) -> Vec<f64> {
    x.iter().map(|&x| Bf16::store(F16::store(x as f32).load()).load().wide()).collect()
}

fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let same = got == want || (got.is_nan() && want.is_nan());
        assert!(
            same || (got - want).abs() <= tolerance * want.abs().max(1.0),
            "{what}[{i}]: {got}, expected {want}"
        );
    }
}

/// f32, bf16 and f16 against f64: one rounding to the type, beside errors of f32 arithmetic relative to the largest result (or 1:
/// what cancels). Each output is left out once, which must change no other.
fn types_agree(case: &Case<'_>, what: &str) {
    let want = run(case, Float::F64, &[]);
    for float in [Float::F64, Float::F32, Float::BF16, Float::F16] {
        let got = run(case, float, &[]);
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            let unit = match kind_of(case.outputs[k].0, float) {
                Float::F64 => 0.0,
                Float::F32 => 2f64.powi(-24),
                Float::BF16 => 2f64.powi(-8),
                Float::F16 => 2f64.powi(-11),
            };
            let largest = want.iter().filter(|x| x.is_finite()).fold(1.0_f64, |a, b| a.max(b.abs()));
            for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
                // 2^-25: half of the smallest f16.
                let allowed = unit * want.abs() * 1.01 + 4e-6 * largest + 2f64.powi(-25);
                let same = got == want || (got.is_nan() && want.is_nan());
                assert!(
                    same || (got - want).abs() <= allowed,
                    "{what}, {float:?}, output {k}[{i}]: {got}, f64 has {want}, allowed {allowed:e}"
                );
            }
        }
        for null in 0..case.outputs.len() {
            let mut less = run(case, float, &[null]);
            less[null] = got[null].clone();
            assert!(same_bits(&less, &got), "{what}, {float:?}: output {null} is null");
        }
    }
}

fn same_bits(a: &[Vec<f64>], b: &[Vec<f64>]) -> bool {
    a.iter().flatten().map(|x| x.to_bits()).eq(b.iter().flatten().map(|x| x.to_bits()))
}

/// Checks that a case has the same bits with 1 and 3 threads.
fn threads_agree(case: &Case<'_>, what: &str) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for float in [Float::F64, Float::F32, Float::BF16] {
        set_threads(1);
        let one = run(case, float, &[]);
        set_threads(3);
        let three = run(case, float, &[]);
        set_threads(0);
        assert!(same_bits(&one, &three), "{what}, {float:?}: other bits with 3 threads");
    }
}

/// Σ d · ∂f/∂x for each input, by central differences.
fn differences(f: &dyn Fn(&[Vec<f64>]) -> Vec<f64>, inputs: &[Vec<f64>], d: &[f64]) -> Vec<Vec<f64>> {
    const STEP: f64 = 1e-5;
    let mut inputs = inputs.to_vec();
    let mut all = Vec::new();
    for k in 0..inputs.len() {
        let mut gradient = Vec::new();
        for i in 0..inputs[k].len() {
            let x = inputs[k][i];
            inputs[k][i] = x + STEP;
            let above = f(&inputs);
            inputs[k][i] = x - STEP;
            let below = f(&inputs);
            inputs[k][i] = x;
            let slope = above.iter().zip(&below).zip(d).map(|((a, b), d)| (a - b) * d).sum::<f64>();
            gradient.push(slope / (2.0 * STEP));
        }
        all.push(gradient);
    }
    all
}

fn elements(x: &[Vec<f64>]) -> Vec<(Kind, Vec<f64>)> {
    x.iter().map(|x| (Elements, x.clone())).collect()
}
