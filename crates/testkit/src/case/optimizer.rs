//! Cases of the gradient norm and AdamW, on whole pools.

use super::{Case, Data, Kit, is_choice};
use ironhorse_core::op::{AdamW, GradNorm, Op};
use ironhorse_core::{DType, Pool, Precision, Scalars, Slot, bf16_to_f32, split_master};

/// Parameter groups as (elements of each member, decay). There are no gaps within a group; odd sizes leave gaps between
/// groups, and decay differs between neighbouring groups.
type Table = &'static [(&'static [usize], bool)];
/// Alignment of groups in bytes.
const ALIGN: usize = 64;

const ONE: Table = &[(&[1], true)];
const FLAT: Table = &[(&[1003], false)];
const MIXED: Table = &[
    (&[5], true),
    (&[231], false),
    (&[1], true),
    (&[31], true),
    (&[129], false),
    (&[16], true),
    (&[33], false),
];
const LARGE: Table = &[(&[129], false), (&[70_001], true), (&[7], false)];
/// A matrix, its bias and the next matrix, all of them multiples of a vector.
const LAYERS: Table = &[(&[786_432 / 8], true), (&[768], false), (&[147_456], true)];

/// Members of a group that are not aligned.
const GROUPS: Table =
    &[(&[7], false), (&[5, 1, 30, 3], true), (&[9], false), (&[31, 33, 4097], true), (&[2, 2], false)];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, table) in [
        ("one", ONE),
        ("flat", FLAT),
        ("mixed", MIXED),
        ("large", LARGE),
        ("layers", LAYERS),
        ("groups", GROUPS),
    ] {
        if !is_choice(p) {
            cases.extend([1.0, 1e-4].map(|scale| grad_norm(p, name, table, scale, Bad::default())));
        }
        // How the state is stored does not depend on the settings: two settings are enough for each of the other ways.
        for (what, scalars) in
            settings().into_iter().filter(|(what, _)| !is_choice(p) || what.contains("decay"))
        {
            cases.push(adamw(p, &format!("{name}, {what}"), table, scalars, 1.0));
        }
    }
    cases.push(shared(p));
    // Gradients so small that the 1e-6 which PyTorch adds to the norm matters.
    let clip = Scalars { grad_clip: 1e-5, ..base() };
    cases.push(adamw(p, "mixed, clipped tiny gradients", MIXED, clip, 1e-5));
    // A skipped step changes nothing.
    for (norm, halt) in [(f32::NAN, 0.0), (f32::INFINITY, 0.0), (1.0, 1.0), (1.0, f32::NAN)] {
        let mut case = adamw(p, &format!("mixed, norm {norm}, halt {halt}"), MIXED, base(), 1.0);
        let Op::AdamW(op) = *case.op() else { continue };
        for (slot, value) in [(op.norm, norm), (op.halt, halt)] {
            for input in case.inputs.iter_mut().filter(|input| input.slot == slot) {
                input.data = Data::F32(vec![value]);
            }
        }
        case.exact = true;
        cases.push(case);
    }
    if !is_choice(p) {
        cases.extend(bad_steps(p));
    }
    cases
}

/// The inputs of a gradient norm besides ordinary gradients.
#[derive(Clone, Copy, Default)]
struct Bad {
    halt: f32,
    loss: f32,
    /// the last gradient
    grad: Option<f32>,
}

/// Steps that must be skipped, and steps after a skipped one.
fn bad_steps(p: Precision) -> Vec<Case> {
    let none = Bad::default();
    let mut cases = Vec::new();
    for (name, bad) in [
        ("halted", Bad { halt: 1.0, ..none }),
        ("halted by any value", Bad { halt: 0.5, ..none }),
        ("halted by NaN", Bad { halt: f32::NAN, ..none }),
        ("loss NaN", Bad { loss: f32::NAN, ..none }),
        ("loss inf", Bad { loss: f32::INFINITY, ..none }),
        ("loss -inf", Bad { loss: f32::NEG_INFINITY, ..none }),
        ("largest loss", Bad { loss: f32::MAX, ..none }),
        ("gradient NaN", Bad { grad: Some(f32::NAN), ..none }),
        ("gradient inf", Bad { grad: Some(f32::INFINITY), ..none }),
        ("gradient NaN, halted, loss NaN", Bad { halt: 1.0, loss: f32::NAN, grad: Some(f32::NAN) }),
    ] {
        cases.push(grad_norm(p, &format!("flat, {name}"), FLAT, 1.0, bad));
    }
    // Squares that overflow f32 although the norm does not; a norm that overflows f32; squares that underflow to 0 in
    // f32.
    cases.extend([1e25, 3e38, 1e-25].map(|scale| grad_norm(p, "flat", FLAT, scale, none)));
    cases
}

/// A learning rate far above the usual, so that a wrong update is not hidden by the weight it is added to.
fn base() -> Scalars {
    Scalars { step: 3, lr: 0.25, ..Scalars::default() }
}

fn settings() -> [(&'static str, Scalars); 6] {
    [
        ("plain", base()),
        ("first step", Scalars { step: 1, ..base() }),
        ("step 10000", Scalars { step: 10_000, ..base() }),
        ("decay", Scalars { weight_decay: 0.4, ..base() }),
        ("decay, clipped", Scalars { weight_decay: 0.4, grad_clip: 0.25, beta1: 0.8, beta2: 0.95, ..base() }),
        ("clip not reached", Scalars { grad_clip: 1e6, eps: 1e-3, ..base() }),
    ]
}

/// Declares the parameters; the op runs over the whole of each pool.
pub(crate) fn flat_pools(kit: &mut Kit, table: Table) -> AdamW {
    for (i, &(sizes, decay)) in table.iter().enumerate() {
        let named = sizes.iter().enumerate().map(|(j, &n)| (format!("param {i}.{j}"), [n]));
        kit.builder.param_group(named, decay);
    }
    whole_pools(kit)
}

/// The op over the whole of each pool, once all parameters are declared.
fn whole_pools(kit: &mut Kit) -> AdamW {
    let [params, grads, moment1, moment2, master] =
        [Pool::Params, Pool::Grads, Pool::Moment1, Pool::Moment2, Pool::Master]
            .map(|pool| kit.builder.flat(pool));
    let master = kit.builder.precision().has_master().then_some(master);
    AdamW { params, master, grads, moment1, moment2, norm: kit.stat([1]), halt: kit.stat([1]), first: 0 }
}

/// Values for a flat pool, with 0 in the gaps.
fn flat(kit: &mut Kit, table: &[(&[usize], bool)], lo: f32, hi: f32) -> Vec<f32> {
    let mut all = Vec::new();
    let align = ALIGN / kit.builder.precision().weights.size();
    for &(sizes, _) in table {
        all.extend(kit.rng.uniforms(sizes.iter().sum(), lo, hi));
        all.resize(all.len().next_multiple_of(align), 0.0);
    }
    all
}

fn grad_norm(p: Precision, name: &str, table: Table, scale: f32, bad: Bad) -> Case {
    let mut kit = Kit::with_precision(p, format!("{name}, gradients of {scale}"));
    let AdamW { norm, halt, grads, .. } = flat_pools(&mut kit, table);
    let loss = kit.stat([1]);
    let mut values = flat(&mut kit, table, -scale, scale);
    if let (Some(last), Some(grad)) = (values.last_mut(), bad.grad) {
        *last = grad;
    }
    kit.set(grads, values);
    kit.set(halt, vec![bad.halt]);
    kit.set(loss, vec![bad.loss]);
    kit.finish(GradNorm { norm, halt, grads, loss, slices: None })
}

fn adamw(p: Precision, name: &str, table: Table, scalars: Scalars, scale: f32) -> Case {
    let mut kit = Kit::with_precision(p, name);
    kit.scalars = scalars;
    let op = flat_pools(&mut kit, table);
    let values = flat(&mut kit, table, -scale, scale);
    let grads = kit.set(op.grads, values);
    let norm = grads.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
    kit.set(op.norm, vec![norm as f32]);
    kit.set(op.halt, vec![0.0]);
    for (slot, lo, hi) in
        [(op.params, -1.0, 1.0), (op.moment1, -scale, scale), (op.moment2, 0.0, scale * scale)]
    {
        let values = flat(&mut kit, table, lo, hi);
        set_masters(&mut kit, slot, op.master.filter(|_| slot == op.params), values);
    }
    kit.finish(op)
}

/// Sets flat weights and the master weights that go with them, if there are any.
pub(super) fn set_masters(kit: &mut Kit, slot: Slot, master: Option<Slot>, mut values: Vec<f32>) {
    match master {
        Some(master) if master.dtype == DType::I16 => {
            let split: Vec<_> = values.iter().map(|&value| split_master(value)).collect();
            kit.set(master, split.iter().map(|&(_, residual)| residual.into()).collect());
            values = split.iter().map(|&(weight, _)| bf16_to_f32(weight)).collect();
        }
        Some(master) => drop(kit.set(master, values.clone())),
        None => {}
    }
    kit.set(slot, values);
}

/// Parameters between those of another optimizer, which must not change and have no second moments.
const SHARED: Table = &[
    (&[7], false),
    (&[129], true),
    (&[4097], true),
    (&[33], false),
    (&[48], true),
    (&[64], true),
    (&[1], true),
    (&[2500], true),
];
/// The indices in [`SHARED`] of the parameters that AdamW has.
const SHARED_ADAMW: [usize; 4] = [1, 3, 4, 7];

fn shared(p: Precision) -> Case {
    let mut kit = Kit::with_precision(p, "beside another optimizer");
    kit.scalars = Scalars { weight_decay: 0.4, ..base() };
    for (i, &(sizes, decay)) in SHARED.iter().enumerate() {
        let n: usize = sizes.iter().sum();
        if SHARED_ADAMW.contains(&i) {
            kit.builder.param(format!("param {i}"), [n], decay);
        } else {
            kit.builder.muon_group([(format!("param {i}"), [n, 1], 1)], decay);
        }
    }
    let op = whole_pools(&mut kit);
    kit.set(op.norm, vec![1.0]);
    kit.set(op.halt, vec![0.0]);
    for slot in [op.grads, op.moment1] {
        let values = flat(&mut kit, SHARED, -1.0, 1.0);
        kit.set(slot, values);
    }
    let values = flat(&mut kit, &SHARED_ADAMW.map(|i| SHARED[i]), 0.0, 1.0);
    kit.set(op.moment2, values);
    let values = flat(&mut kit, SHARED, -1.0, 1.0);
    set_masters(&mut kit, op.params, op.master, values);
    kit.finish(op)
}
