//! Cases of Muon's momentum and step, on whole pools.

use super::optimizer::set_masters;
use super::{Case, Data, Kit, is_choice};
use ironhorse_core::op::{MuonMomentum, MuonUpdate, Op};
use ironhorse_core::{Pool, Precision, Scalars, Slot};

/// A tensor: rows, columns and the matrices that it stacks; 0 of a parameter of AdamW.
type Tensor = [usize; 3];

/// Groups of adjacent tensors and whether they decay; the matrices of an op as (rows, columns, first, count).
struct Table {
    name: &'static str,
    groups: &'static [(&'static [Tensor], bool)],
    batch: [usize; 4],
}

const TABLES: [Table; 6] = [
    Table { name: "one", groups: &[(&[[1, 1, 1]], true)], batch: [1, 1, 0, 1] },
    Table { name: "alone", groups: &[(&[[31, 33, 1]], true)], batch: [31, 33, 0, 1] },
    Table {
        name: "between others",
        groups: &[
            (&[[5, 1, 0]], false),
            (&[[12, 8, 3]], true),
            (&[[12, 1, 0]], false),
            (&[[4, 8, 1]], false),
            (&[[8, 4, 1]], true),
            (&[[12, 8, 3]], true),
        ],
        batch: [4, 8, 2, 4],
    },
    // members of a group that start anywhere
    Table {
        name: "odd groups",
        groups: &[(&[[3, 7, 1], [5, 7, 1], [5, 7, 1]], true), (&[[9, 1, 0]], true), (&[[5, 7, 1]], false)],
        batch: [5, 7, 0, 3],
    },
    Table {
        name: "layers",
        groups: &[(&[[384, 128, 3]], true), (&[[128, 128, 1]], true)],
        batch: [128, 128, 0, 4],
    },
    Table {
        name: "wide",
        groups: &[(&[[64, 256, 1]], true), (&[[64, 256, 1]], true)],
        batch: [64, 256, 1, 1],
    },
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    let clipped = Scalars { grad_clip: 0.25, weight_decay: 0.4, ..base() };
    let wide_clip = Scalars { grad_clip: 1e6, ..base() };
    for table in &TABLES {
        for (what, scalars) in
            [("plain", base()), ("decay, clipped", clipped), ("clip not reached", wide_clip)]
        {
            if is_choice(p) && !what.contains("decay") {
                continue; // how the state is stored does not depend on the settings
            }
            let name = format!("{}, {what}", table.name);
            cases.push(momentum(p, &name, table, scalars, 1.0));
            cases.push(update(p, &name, table, scalars));
        }
    }
    let [odd, alone] = [&TABLES[3], &TABLES[1]];
    cases.push(momentum(p, "odd groups, tiny gradients", odd, base(), 1e-12));
    // no direction
    cases.push(momentum(p, "alone, gradients of 0", alone, base(), 0.0));
    // A skipped step changes neither weights nor momentum.
    for (norm, halt) in [(f32::NAN, 0.0), (f32::INFINITY, 0.0), (1.0, 1.0), (1.0, f32::NAN)] {
        let what = format!("odd groups, norm {norm}, halt {halt}");
        for mut case in [momentum(p, &what, odd, base(), 1.0), update(p, &what, odd, base())] {
            let slots = match *case.op() {
                Op::MuonMomentum(op) => [op.norm, op.halt],
                Op::MuonUpdate(op) => [op.norm, op.halt],
                _ => continue,
            };
            for (slot, value) in slots.into_iter().zip([norm, halt]) {
                let inputs = case.inputs.iter_mut().filter(|input| input.slot == slot);
                inputs.for_each(|input| input.data = Data::F32(vec![value]));
            }
            case.exact = true;
            cases.push(case);
        }
    }
    cases
}

/// A learning rate far above the usual, so that a wrong update is not hidden by the weight it is added to.
fn base() -> Scalars {
    Scalars { step: 3, lr: 0.25, ..Scalars::default() }
}

fn declare(kit: &mut Kit, table: &Table) -> [Slot; 2] {
    for (i, &(tensors, decay)) in table.groups.iter().enumerate() {
        let name = |j: usize| format!("param {i}.{j}");
        if tensors.iter().all(|&[_, _, matrices]| matrices > 0) {
            let named = tensors.iter().enumerate().map(|(j, &[rows, cols, n])| (name(j), [rows, cols], n));
            kit.builder.muon_group(named, decay);
        } else {
            let named = tensors.iter().enumerate().map(|(j, &[rows, cols, _])| (name(j), [rows, cols]));
            kit.builder.param_group(named, decay);
        }
    }
    [kit.stat([1]), kit.stat([1])]
}

fn momentum(p: Precision, name: &str, table: &Table, scalars: Scalars, scale: f32) -> Case {
    let mut kit = Kit::with_precision(p, name);
    kit.scalars = scalars;
    let [norm, halt] = declare(&mut kit, table);
    let [rows, cols, first, count] = table.batch;
    let [grads, moment1] = [Pool::Grads, Pool::Moment1].map(|pool| kit.builder.flat(pool));
    let out = kit.slot([count, rows, cols]);
    kit.draw(moment1, -scale, scale);
    let values = kit.random(grads, -scale, scale);
    let total = values.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
    kit.set(norm, vec![total as f32]);
    kit.set(halt, vec![0.0]);
    kit.finish(MuonMomentum { out, moment1, grads, norm, halt, first, momentum: 0.95 })
}

fn update(p: Precision, name: &str, table: &Table, scalars: Scalars) -> Case {
    let mut kit = Kit::with_precision(p, name);
    kit.scalars = scalars;
    let [norm, halt] = declare(&mut kit, table);
    let [rows, cols, first, count] = table.batch;
    let [params, master] = [Pool::Params, Pool::Master].map(|pool| kit.builder.flat(pool));
    let master = p.has_master().then_some(master);
    let inp = kit.slot([count, rows, cols]);
    let values = kit.rng.uniforms(params.numel(), -1.0, 1.0);
    set_masters(&mut kit, params, master, values);
    kit.set(norm, vec![1.0]);
    kit.set(halt, vec![0.0]);
    kit.finish(MuonUpdate {
        params,
        master,
        inp,
        norm,
        halt,
        first,
        scale: MuonUpdate::scale_of([rows, cols]),
    })
}
