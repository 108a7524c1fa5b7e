//! The oracle passes every case; engines that are broken on purpose do not.

use super::*;
use crate::oracle::{Step, execute, parts};
use crate::update::places;
use crate::{Hook, Mode, OracleEngine, Rng, Suite, Wrapped, all_cases, cases_in};
use ironhorse_core::op::{AdamW, Op};
use ironhorse_core::{Param, Precision, Program, RandomRounding, Scalars, bf16_to_f32, f32_to_bf16};
use std::sync::LazyLock;

fn conforms_to_itself(suite: Suite) {
    let summary = suite.run(&mut OracleEngine::new(), &mut |_, _| ());
    summary.assert_ok();
    // an activation that is rounded to 8 bits may go to the neighbouring number
    let mut f32s = summary.passed.iter().filter(|report| report.op != "quantize");
    assert!(f32s.all(|report| report.tolerance <= 1e-5));
    assert_eq!(summary.rows().len(), Op::NAMES.len(), "every op has a case");
}

#[test]
fn the_oracle_conforms_to_itself() {
    conforms_to_itself(Suite { quick: true, ..Suite::new(Mode::F32) });
}

#[test]
#[ignore = "only with --all"]
fn the_oracle_conforms_to_itself_in_full() {
    conforms_to_itself(Suite::new(Mode::F32));
}

/// How [`Rounding`] rounds its results.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Round {
    /// Results to the nearest, weights stochastically.
    Right,
    /// Everything to the nearest, weights too.
    Nearest,
    /// Everything towards 0.
    Truncate,
    /// Correct, but weights round differently in every run.
    Unseeded,
}

/// The simplest bf16 engine: every op, and every part of a fused op, rounds its results.
struct Rounding {
    round: Round,
    runs: u64,
}

/// The oracle with its results rounded.
type Rounded = Wrapped<OracleEngine, Rounding>;

fn rounded(round: Round) -> Rounded {
    Wrapped::new(OracleEngine::new(), Rounding { round, runs: 0 })
}

impl Rounding {
    fn store(&self, oracle: &mut OracleEngine, slot: Slot, random: bool, rng: &mut Rng) -> Result<()> {
        let rounded = |x: f64| -> f64 {
            let bits = match slot.dtype {
                DType::BF16 if random && matches!(self.round, Round::Right | Round::Unseeded) => {
                    ((x as f32).to_bits() + (rng.bits() >> 48) as u32) >> 16
                }
                DType::BF16 if self.round == Round::Truncate => (x as f32).to_bits() >> 16,
                DType::BF16 => u32::from(f32_to_bf16(x as f32)),
                _ => return x as f32 as f64,
            };
            bf16_to_f32(bits as u16).into()
        };
        let values: Vec<f64> = oracle.read_f64(slot)?.into_iter().map(rounded).collect();
        oracle.write_f64(slot, &values)
    }

    /// A moment, rounded with the random bits of its element.
    fn store_moments(
        &self,
        oracle: &mut OracleEngine,
        slot: Slot,
        (params, rounding): (&[Param], RandomRounding),
    ) -> Result<()> {
        let which = usize::from(slot.pool == Pool::Moment2);
        let rounded = |(place, x): (u64, f64)| match self.round {
            Round::Right | Round::Unseeded => rounding.moments(place, [x as f32; 2])[which],
            Round::Nearest => f32_to_bf16(x as f32),
            Round::Truncate => ((x as f32).to_bits() >> 16) as u16,
        };
        let values = places(params, slot).into_iter().zip(oracle.read_f64(slot)?);
        let values: Vec<f64> = values.map(|at| bf16_to_f32(rounded(at)).into()).collect();
        oracle.write_f64(slot, &values)
    }
}

impl Hook<OracleEngine> for Rounding {
    fn run(
        &mut self,
        oracle: &mut OracleEngine,
        program: &Program,
        _: Range<usize>,
        scalars: &Scalars,
    ) -> Result<()> {
        let op = program.nodes()[0].op;
        self.runs += u64::from(self.round == Round::Unseeded);
        let mut rng = Rng::new(scalars.seed + self.runs);
        for part in parts(&op) {
            let step = Step { params: program.params(), scalars };
            execute(oracle.pools_mut(), &part, step)?;
            for arg in part.args().iter().filter(|arg| arg.access.writes()) {
                if let (Pool::Moment1 | Pool::Moment2, DType::BF16) = (arg.slot.pool, arg.slot.dtype) {
                    let rounding = RandomRounding::new(scalars.seed, scalars.step);
                    self.store_moments(oracle, arg.slot, (program.params(), rounding))?;
                    continue;
                }
                self.store(oracle, arg.slot, part.masters().is_some(), &mut rng)?;
            }
        }
        Ok(())
    }
}

fn bf16(round: Round, suite: Suite) -> crate::Summary {
    suite.run(&mut rounded(round), &mut |_, _| ())
}

fn plain_bf16(suite: Suite) {
    let summary = bf16(Round::Right, suite);
    summary.assert_ok();
    assert!(summary.passed.iter().any(|report| report.precision == Precision::BF16_F32_GRADS));
}

#[test]
fn plain_bf16_conforms() {
    plain_bf16(Suite { quick: true, ..Suite::new(Mode::Bf16) });
}

#[test]
#[ignore = "only with --all"]
fn plain_bf16_conforms_in_full() {
    plain_bf16(Suite::new(Mode::Bf16));
}

#[test]
fn truncation_is_caught_in_every_op_that_rounds() {
    let summary = bf16(Round::Truncate, Suite { quick: true, ..Suite::new(Mode::Bf16) });
    let exact = [
        "fill",
        "copy",
        "permute",
        "exchange",
        "all_gather",
        "grad_norm",
        "router_fwd",
        "route_sort",
        "argmax",
        "preference",
    ];
    for row in summary.rows().iter().filter(|row| !exact.contains(&row.op)) {
        // These ops may round intermediate results, which hides the error of the last rounding.
        let adds = row.op.ends_with("lora_fwd") || row.op.ends_with("lora_bwd_input");
        let loose = row.op.starts_with("attention_") || adds;
        assert!(row.failed > 0 || loose, "{}", row.op);
    }
}

#[test]
fn runs_that_differ_are_caught() {
    let suite = Suite { quick: true, twice: true, ..Suite::new(Mode::Bf16) };
    bf16(Round::Right, suite.clone()).assert_ok();
    let summary = bf16(Round::Unseeded, suite);
    assert!(!summary.failed.is_empty());
    for mismatch in &summary.failed {
        let weights = matches!(mismatch.fault, Fault::NotRepeated { place: "params", .. });
        assert!(["adamw", "muon_update"].contains(&mismatch.op) && weights, "{mismatch}");
    }
}

#[test]
fn weights_rounded_to_the_nearest_are_caught() {
    let summary =
        bf16(Round::Nearest, Suite { ops: vec!["adamw".into(), "add".into()], ..Suite::new(Mode::Bf16) });
    assert!(!summary.failed.is_empty());
    for mismatch in &summary.failed {
        assert!(mismatch.op == "adamw" && matches!(mismatch.fault, Fault::Rounding(_)), "{mismatch}");
    }
}

/// An error that an engine can make in weights and residuals, as a change of a (weight, residual) pair.
#[test]
fn a_wrong_residual_is_caught() {
    struct Wrong(fn(f64, f64) -> [f64; 2]);
    impl Hook<Rounded> for Wrong {
        fn run(
            &mut self,
            inner: &mut Rounded,
            program: &Program,
            ops: Range<usize>,
            scalars: &Scalars,
        ) -> Result<()> {
            inner.run(program, ops, scalars)?;
            let oracle = &mut inner.inner;
            let Op::AdamW(AdamW { params, master: Some(master), .. }) = program.nodes()[0].op else {
                return Ok(());
            };
            let (mut w, mut r) = (oracle.read_f64(params)?, oracle.read_f64(master)?);
            for (w, r) in w.iter_mut().zip(&mut r) {
                [*w, *r] = (self.0)(*w, *r);
            }
            oracle.write_f64(params, &w)?;
            oracle.write_f64(master, &r)
        }
    }
    let case = cases_in(Precision::BF16.with_residual(), |op| op == "adamw");
    let case = case.iter().find(|case| case.name.starts_with("flat, decay")).unwrap();
    let check = |wrong| check_engine(&mut Wrapped::new(rounded(Round::Right), Wrong(wrong)), case);
    let report = check(|w, r| [w, r]).unwrap();
    assert!(report.tolerance <= 2e-6, "masters are compared as f32");
    // No residual, a residual without sign, and residuals of a weight rounded to even or towards 0.
    let wrong: [fn(f64, f64) -> [f64; 2]; 3] = [
        |w, _| [w, 0.0],
        |w, r| [w, r.abs()],
        |w, r| [bf16_to_f32(f32_to_bf16(w as f32) - u16::from(r < 0.0)).into(), r],
    ];
    for wrong in wrong {
        let fault = check(wrong).unwrap_err().fault;
        assert!(matches!(fault, Fault::Value { slot: "master", .. }), "{fault:?}");
    }
}

/// What a broken engine does to one slot after the op has run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sabotage {
    /// Scales one element of a written slot.
    Perturb,
    /// Restores the old value of one element of a written slot.
    Skip,
    /// Writes one element after a written slot.
    After,
    /// Writes one element before a written slot.
    Before,
    /// Changes an input.
    Input,
}

struct Broken {
    sabotage: Sabotage,
    /// Index of the slot among those the sabotage applies to.
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

    /// The last f32 of the slot, or the one just outside of it. Flat parameter pools end in a gap, and `qkv` of `rope`
    /// and of `qk_norm_bwd` ends in values, which do not change: for those the first f32.
    fn element(&self, op: &Op) -> Slot {
        let slot = Self::victims(op, self.sabotage)[self.victim];
        let offset = match self.sabotage {
            Sabotage::After => slot.end(),
            Sabotage::Before => slot.offset - slot.dtype.size(),
            _ if matches!(slot.pool, Pool::Params | Pool::Moment1 | Pool::Moment2 | Pool::Master) => {
                slot.offset
            }
            _ if matches!(op, Op::Rope(_) | Op::QkNormBwd(_)) => slot.offset,
            _ => slot.end() - slot.dtype.size(),
        };
        Slot { offset, shape: Shape::new([1]), ..slot }
    }
}

impl Hook<Rounded> for Broken {
    fn run(
        &mut self,
        inner: &mut Rounded,
        program: &Program,
        ops: Range<usize>,
        scalars: &Scalars,
    ) -> Result<()> {
        let element = self.element(&program.nodes()[0].op);
        let old = inner.inner.read_f64(element)?;
        inner.run(program, ops, scalars)?;
        let new = inner.inner.read_f64(element)?[0];
        match self.sabotage {
            Sabotage::Skip => inner.inner.write_f64(element, &old),
            _ => {
                // far above the rounding error of bf16, and at least 1 for integers
                let by = match element.dtype {
                    DType::I32 => 1.0,
                    DType::BF16 => 0.5,
                    _ => 0.01,
                };
                inner.inner.write_f64(element, &[new + by * (new.abs() + 1.0)])
            }
        }
    }
}

static CASES: LazyLock<Vec<Case>> = LazyLock::new(all_cases);
static BF16_CASES: LazyLock<Vec<Case>> = LazyLock::new(|| cases_in(Precision::BF16, |_| true));

/// A case of an op in which every element of every slot affects the result.
fn sensitive(cases: &[Case], op: &str) -> Option<Case> {
    let picked = |case: &&Case| {
        case.op().name() == op
            && case.op().args().iter().all(|arg| arg.slot.numel() > 0)
            && !["in place true", "in place a", "in place A"].iter().any(|not| case.name.contains(not))
    };
    // The op writes the last position of the cache, and no gradient happens to be 0.
    let last = |case: &&Case| op != "attention_cached" || case.name.contains("C48 NH3 at position 36");
    let narrow = |case: &&Case| ["C1 ", "HD1 "].iter().any(|width| case.name.contains(width));
    let wide = |case: &&Case| !["layernorm_bwd", "rmsnorm_bwd", "qk_norm_bwd"].contains(&op) || !narrow(case);
    // Position 0 rotates nothing; with K = 1 the weight is always 1 and has no gradient.
    let turned = |case: &&Case| op != "rope" || case.name.contains("at position 299");
    let choice = |case: &&Case| op != "router_bwd" || case.name.contains("K4");
    // `halt` is neither 0 nor 1 and becomes 1, so leaving it unchanged is noticed.
    let halted = |case: &&Case| op != "grad_norm" || case.name.contains("halted by any value");
    // a rank that is alone gathers nothing
    let works = |case: &&Case| case.op().name() != "all_gather";
    let fitting = cases.iter().filter(works).filter(picked).filter(last).filter(turned).filter(choice);
    fitting.filter(halted).find(wide).cloned()
}

fn faults(sabotage: Sabotage) -> Vec<(String, Fault)> {
    let faults = faults_in(&CASES, sabotage);
    assert!(faults.len() >= Op::NAMES.len() - 2, "{} faults", faults.len());
    let narrow = faults_in(&BF16_CASES, sabotage);
    assert!(narrow.len() >= Op::NAMES.len() - 4, "{} faults in bf16", narrow.len());
    [faults, narrow].concat()
}

fn faults_in(cases: &[Case], sabotage: Sabotage) -> Vec<(String, Fault)> {
    let mut faults = Vec::new();
    for op in Op::NAMES {
        let Some(case) = sensitive(cases, op) else { continue };
        for victim in 0..Broken::victims(case.op(), sabotage).len() {
            let slot = Broken::victims(case.op(), sabotage)[victim];
            if sabotage == Sabotage::Before && slot.offset == 0 {
                continue; // a whole pool
            }
            let mut engine = Wrapped::new(rounded(Round::Right), Broken { sabotage, victim });
            let Err(mismatch) = check_engine(&mut engine, &case) else {
                panic!("{op} ({}): {sabotage:?} of {slot:?} was not caught", case.name);
            };
            faults.push((mismatch.to_string(), mismatch.fault));
        }
    }
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
    assert_eq!(fault, "embedding_fwd (B1 T1 C1 V1): expected an input error, but ran");
}

#[test]
fn mismatches_name_op_case_slot_and_values() {
    let fault = Fault::Value { slot: "out", index: 3, want: 1.0, got: 1.5, error: 0.5, tolerance: 1e-6 };
    let mismatch = Mismatch { op: "add", case: "n5".into(), precision: Precision::F32, fault };
    let text =
        "add (n5): `out` has an error of 5.00e-1, allowed 1.00e-6; worst at [3]: expected 1e0, got 1.5e0";
    assert_eq!(mismatch.to_string(), text);
}
