//! The oracle conforms; engines broken on purpose do not.

use super::*;
use crate::OracleEngine;
use ironhorse_core::{Layout, Program, Scalars};
use std::ops::Range;
use std::sync::LazyLock;

#[test]
fn the_oracle_conforms_to_itself() {
    let summary = run_all(&mut || Box::new(OracleEngine::new()));
    summary.assert_ok();
    assert!(summary.passed.iter().all(|report| report.tolerance <= 1e-5));
}

/// What a broken engine does to one slot after the op has run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sabotage {
    /// Scales one element of a written slot.
    Perturb,
    /// Leaves one element of a written slot as it was.
    Skip,
    /// Writes one element beyond a written slot.
    After,
    /// Writes one element before a written slot.
    Before,
    /// Changes an input.
    Input,
}

struct Broken {
    inner: OracleEngine,
    sabotage: Sabotage,
    /// Which slot of those the sabotage applies to.
    victim: usize,
}

impl Broken {
    /// The slots this sabotage can apply to.
    fn victims(op: &Op, sabotage: Sabotage) -> Vec<Slot> {
        let args = op.args().into_iter();
        let inputs = |arg: &Arg| arg.access == Access::Read && arg.slot.dtype != DType::I32;
        let wanted =
            args.filter(|arg| if sabotage == Sabotage::Input { inputs(arg) } else { arg.access.writes() });
        wanted.map(|arg| arg.slot).collect()
    }

    /// The last f32 of the victim, or one just outside of it. Flat parameter pools end in a gap: there the first.
    fn element(&self, op: &Op) -> Slot {
        let slot = Self::victims(op, self.sabotage)[self.victim];
        let offset = match self.sabotage {
            Sabotage::After => slot.end(),
            Sabotage::Before => slot.offset - 4,
            _ if matches!(slot.pool, Pool::Params | Pool::Moment1 | Pool::Moment2) => slot.offset,
            _ => slot.end() - 4,
        };
        Slot { offset, shape: Shape::new([1]), ..slot }
    }
}

impl Engine for Broken {
    fn name(&self) -> &str {
        "broken"
    }
    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.inner.reserve(layout)
    }
    fn allocated(&self) -> usize {
        self.inner.allocated()
    }
    fn write_f32(&mut self, slot: Slot, data: &[f32]) -> Result<()> {
        self.inner.write_f32(slot, data)
    }
    fn read_f32(&mut self, slot: Slot, data: &mut [f32]) -> Result<()> {
        self.inner.read_f32(slot, data)
    }
    fn write_i32(&mut self, slot: Slot, data: &[i32]) -> Result<()> {
        self.inner.write_i32(slot, data)
    }
    fn read_i32(&mut self, slot: Slot, data: &mut [i32]) -> Result<()> {
        self.inner.read_i32(slot, data)
    }
    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        let element = self.element(&program.nodes()[0].op);
        let old = self.inner.read_f64(element)?;
        self.inner.run(program, ops, scalars)?;
        let new = self.inner.read_f64(element)?[0];
        match self.sabotage {
            Sabotage::Skip => self.inner.write_f64(element, &old),
            _ => self.inner.write_f64(element, &[new * 1.01 + 0.01]),
        }
    }
}

static CASES: LazyLock<Vec<Case>> = LazyLock::new(all_cases);

/// The case of an op on which every element of every slot matters.
fn sensitive(op: &str) -> Case {
    let picked = |case: &&Case| {
        case.op().name() == op
            && case.op().args().iter().all(|arg| arg.slot.numel() > 0)
            && !["in place true", "in place a", "in place A"].iter().any(|not| case.name.contains(not))
    };
    // The cache's last place is written by the op, and gradients do not happen to be 0.
    let last = |case: &&Case| op != "attention_cached" || case.name.ends_with("C48 NH3 at position 36");
    let wide = |case: &&Case| op != "layernorm_bwd" || !case.name.contains("C1 ");
    CASES.iter().filter(picked).filter(last).find(wide).cloned().unwrap()
}

fn faults(sabotage: Sabotage) -> Vec<(String, Fault)> {
    let mut faults = Vec::new();
    for op in Op::NAMES {
        let case = sensitive(op);
        for victim in 0..Broken::victims(case.op(), sabotage).len() {
            let slot = Broken::victims(case.op(), sabotage)[victim];
            if sabotage == Sabotage::Before && slot.offset == 0 {
                continue; // a whole pool
            }
            let mut engine = Broken { inner: OracleEngine::new(), sabotage, victim };
            let Err(mismatch) = check_engine(&mut engine, &case) else {
                panic!("{op} ({}): {sabotage:?} of {slot:?} was not caught", case.name);
            };
            faults.push((mismatch.to_string(), mismatch.fault));
        }
    }
    assert!(faults.len() >= Op::NAMES.len() - 2, "{} faults", faults.len());
    faults
}

#[test]
fn a_wrong_element_is_caught() {
    for (text, fault) in faults(Sabotage::Perturb) {
        assert!(matches!(fault, Fault::Value { .. }), "{text}");
    }
}

#[test]
fn an_unwritten_element_is_caught() {
    for (text, fault) in faults(Sabotage::Skip) {
        assert!(matches!(fault, Fault::NotFinite { .. } | Fault::Value { .. }), "{text}");
    }
}

#[test]
fn writing_beyond_a_slot_is_caught() {
    for sabotage in [Sabotage::After, Sabotage::Before] {
        for (text, fault) in faults(sabotage) {
            assert!(matches!(fault, Fault::Touched { .. }), "{text}");
        }
    }
}

#[test]
fn a_changed_input_is_caught() {
    for (text, fault) in faults(Sabotage::Input) {
        assert!(matches!(fault, Fault::Touched { .. }), "{text}");
    }
}

#[test]
fn accepting_a_token_beyond_the_vocabulary_is_caught() {
    let case = &CASES[0];
    let fault = check_refusal(&mut OracleEngine::new(), case).unwrap_err().to_string();
    assert_eq!(fault, "embedding_fwd (B1 T1 C1 V1): should refuse with an input error, but ran");
}

#[test]
fn mismatches_name_op_case_slot_and_values() {
    let fault = Fault::Value { slot: "out", index: 3, want: 1.0, got: 1.5, error: 0.5, tolerance: 1e-6 };
    let mismatch = Mismatch { op: "add", case: "n5".into(), fault };
    let text = "add (n5): `out` is off by 5.00e-1, allowed 1.00e-6; worst at [3]: expected 1e0, got 1.5e0";
    assert_eq!(mismatch.to_string(), text);
}
