//! Conformance cases: programs of one op, with all inputs.

mod activation;
mod attention;
mod collective;
mod dropout;
mod elementwise;
mod embedding;
mod fp8;
mod grouped;
mod grouped_fp8;
mod grouped_lora;
mod kit;
mod layernorm;
mod linear;
mod lora;
mod loss;
mod matmul;
mod memory;
mod muon;
mod norm;
mod optimizer;
mod preference;
mod qk_norm;
mod refusal;
mod rmsnorm;
mod rope;
mod router;
mod routing;
mod swiglu;

pub use fp8::FP8_OPS;
pub use kit::Kit;
#[cfg(test)]
pub(crate) use optimizer::flat_pools;
pub use refusal::{refusals, refusals_in};

use crate::{OracleEngine, Rng};
use ironhorse_core::op::{Accum, ActBwd, ActFwd, Op};
use ironhorse_core::{
    DType, Engine, EngineExt, Fp8, Layout, Pool, Precision, Program, Result, Scalars, Slot, bf16_to_f32,
    f32_to_bf16,
};
use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

/// The contents of a slot before the op runs.
#[derive(Clone, Debug)]
pub enum Data {
    /// Numbers for float slots.
    F32(Vec<f32>),
    /// Random numbers for float slots, drawn when the case is run. Most lists of cases are made to choose a few of them, and the
    /// largest have gigabytes.
    Drawn(Drawn),
    /// One of the results of an earlier op, for float slots.
    Result(Arc<Earlier>, usize),
    /// Numbers for integer slots.
    I32(Vec<i32>),
}

/// Random numbers that were not drawn yet.
#[derive(Clone, Debug)]
pub struct Drawn {
    rng: Rng,
    range: [f32; 2],
    /// The format of 8 bits that the numbers are rounded to, even if the slot is wider.
    fp8: Option<Fp8>,
}

/// A forward whose results a backward reads: the oracle's, rounded to f32. It is computed when a case that reads them is run.
#[derive(Debug)]
pub struct Earlier {
    case: Case,
    slots: Vec<Slot>,
    results: OnceLock<Vec<Vec<f32>>>,
}

impl Earlier {
    /// The contents of these slots after this case.
    pub(crate) fn new(case: Case, slots: &[Slot]) -> Arc<Self> {
        Arc::new(Self { case, slots: slots.to_vec(), results: OnceLock::new() })
    }

    fn result(&self, number: usize) -> &[f32] {
        let results = self.results.get_or_init(|| {
            let oracle = self.case.oracle().expect("the forward runs on the oracle");
            let read = |&slot| oracle.read_f64(slot).expect("a slot of the case");
            self.slots.iter().map(|slot| read(slot).into_iter().map(|x| x as f32).collect()).collect()
        });
        &results[number]
    }
}

/// A slot and what it holds before the op runs.
#[derive(Clone, Debug)]
pub struct Input {
    /// The slot.
    pub slot: Slot,
    /// What the slot holds.
    pub data: Data,
}

impl Input {
    /// What a float slot holds, rounded to its element type; nothing for integers.
    pub fn floats(&self) -> Cow<'_, [f32]> {
        let mut values = match &self.data {
            Data::F32(values) => return values.into(),
            Data::I32(_) => return Cow::default(),
            Data::Drawn(Drawn { rng, range: [lo, hi], fp8 }) => {
                let mut values = rng.clone().uniforms(self.slot.numel(), *lo, *hi);
                fp8.iter().for_each(|format| round_to(DType::F8(*format), &mut values));
                values
            }
            Data::Result(earlier, number) => earlier.result(*number).to_vec(),
        };
        round_to(self.slot.dtype, &mut values);
        values.into()
    }
}

/// Rounds to an element type.
fn round_to(dtype: DType, values: &mut [f32]) {
    match dtype {
        DType::BF16 => values.iter_mut().for_each(|value| *value = bf16_to_f32(f32_to_bf16(*value))),
        DType::F8(format) => values.iter_mut().for_each(|value| *value = format.quantize(*value)),
        _ => {}
    }
}

/// One op with all its inputs.
#[derive(Clone, Debug)]
pub struct Case {
    /// Shape and options, unique within the op.
    pub name: String,
    /// A program of this one op.
    pub program: Program,
    /// The scalars to run it with.
    pub scalars: Scalars,
    /// The initial contents of the slots. Written slots that are not listed hold NaN: the op must not read them.
    pub inputs: Vec<Input>,
    /// The layout to reserve: more than the program needs, so that writes outside its slots are noticed.
    pub reserve: Layout,
    /// Added to ‖want‖ in the relative error: the magnitude of terms that cancel in exact arithmetic.
    pub floor: f64,
    /// The largest attention score to expect; 0 for other ops.
    pub scores: f64,
    /// Slow on the oracle: only a self-test of a device runs this case, no test suite.
    pub large: bool,
    /// The op must not change any bit.
    pub exact: bool,
}

impl Case {
    /// The op.
    pub fn op(&self) -> &Op {
        &self.program.nodes()[0].op
    }

    /// The element types.
    pub fn precision(&self) -> Precision {
        self.program.precision()
    }

    /// The number of elements of all slots together.
    pub fn elements(&self) -> usize {
        self.op().args().iter().map(|arg| arg.slot.numel()).sum()
    }

    /// The oracle's contents of the slots that the op writes, in the order of its arguments.
    pub fn expected(&self) -> Result<Vec<Vec<f64>>> {
        let oracle = self.oracle()?;
        self.op().writes().map(|slot| oracle.read_f64(slot)).collect()
    }

    /// Writes the inputs to an engine's memory, and NaN or the smallest integer to written slots without an input.
    pub fn load(&self, engine: &mut dyn Engine) -> Result<()> {
        for slot in self.op().writes() {
            if self.inputs.iter().any(|input| input.slot.overlaps(&slot)) {
                continue;
            }
            match slot.dtype {
                DType::I32 => engine.write_i32(slot, &vec![i32::MIN; slot.numel()])?,
                _ => engine.write_f32(slot, &vec![f32::NAN; slot.numel()])?,
            }
        }
        for input in &self.inputs {
            match &input.data {
                Data::I32(values) => engine.write_i32(input.slot, values)?,
                Data::F32(_) | Data::Drawn(_) | Data::Result(..) => {
                    engine.write_f32(input.slot, &input.floats())?;
                }
            }
        }
        Ok(())
    }

    /// The oracle after it has run this case.
    pub fn oracle(&self) -> Result<OracleEngine> {
        let mut oracle = OracleEngine::new();
        oracle.reserve(&self.reserve)?;
        self.load(&mut oracle)?;
        oracle.run(&self.program, 0..1, &self.scalars)?;
        Ok(oracle)
    }

    #[cfg(test)]
    pub(crate) fn expect_f64(&self, slot: Slot, want: &[f64]) {
        self.expect_within(slot, want, 0.0);
    }

    #[cfg(test)]
    pub(crate) fn expect_within(&self, slot: Slot, want: &[f64], tolerance: f64) {
        let got = self.oracle().unwrap().read_f64(slot).unwrap();
        let near = |(got, want): (&f64, &f64)| (got - want).abs() <= tolerance * want.abs().max(1.0);
        assert!(got.len() == want.len() && got.iter().zip(want).all(near), "got {got:?}, want {want:?}");
    }
}

/// The contents of a slot of an engine.
pub(crate) fn read(engine: &mut dyn Engine, slot: Slot) -> Result<Vec<f32>> {
    if slot.dtype == DType::I32 {
        let mut data = vec![0; slot.numel()];
        engine.read_i32(slot, &mut data)?;
        return Ok(data.into_iter().map(|value| value as f32).collect()); // indices: exact up to 2²⁴
    }
    let mut data = vec![0.0; slot.numel()];
    engine.read_f32(slot, &mut data)?;
    Ok(data)
}

/// Every [`Accum`], each with the micro-steps in which it behaves differently.
const ACCUMS: [(Accum, u32); 4] =
    [(Accum::Write, 1), (Accum::Add, 0), (Accum::FirstWrites, 0), (Accum::FirstWrites, 1)];

/// All f32 cases of all ops except the large ones, by family in the order of `Op::NAMES`.
pub fn all_cases() -> Vec<Case> {
    let mut cases = cases_in(Precision::F32, |_| true);
    cases.retain(|case| !case.large);
    cases
}

/// The cases in these element types, including large ones, of the ops whose name `wanted` accepts. An op has no cases
/// in a precision that does not change any of its slots: all of `loss_mean` is f32, `route_sort` has only integers.
pub fn cases_in(precision: Precision, wanted: impl Fn(&str) -> bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (ops, make) in FAMILIES {
        // only the update depends on how master weights and moments are stored
        if ops.iter().any(|op| wanted(op))
            && (!is_choice(precision) || ops.iter().any(|op| UPDATES.contains(op)))
        {
            cases.extend(make(precision).into_iter().filter(|case| wanted(case.op().name()) && is_own(case)));
        }
    }
    cases
}

/// Ops that depend on how master weights and moments are stored.
const UPDATES: [&str; 3] = ["adamw", "muon_momentum", "muon_update"];

/// The ops of a family and the function that makes its cases.
type Family = (&'static [&'static str], fn(Precision) -> Vec<Case>);
const FAMILIES: &[Family] = &[
    (&["embedding_fwd", "embedding_bwd"], embedding::cases),
    (&["layernorm_fwd", "residual_layernorm_fwd", "layernorm_apply", "layernorm_bwd"], layernorm::cases),
    (&["rmsnorm_fwd", "residual_rmsnorm_fwd", "rmsnorm_apply", "rmsnorm_bwd"], rmsnorm::cases),
    (&["linear_fwd", "linear_bwd_input", "linear_bwd_weight"], linear::cases),
    (&["lora_fwd", "lora_bwd_hidden", "lora_bwd_weight", "lora_bwd_input"], lora::cases),
    (ActFwd::NAMES, activation::fwd_cases),
    (ActBwd::NAMES, activation::bwd_cases),
    (&["add"], elementwise::cases),
    (&["swiglu_fwd", "swiglu_bwd"], swiglu::cases),
    (&["qk_norm_fwd", "qk_norm_bwd"], qk_norm::cases),
    (&["rope"], rope::cases),
    (&["attention_fwd", "attention_bwd", "attention_cached"], attention::cases),
    (&["dropout"], dropout::cases),
    (&["attention_dropout_fwd", "attention_dropout_bwd"], attention::dropout_cases),
    (&["router_fwd", "router_bwd", "router_load"], router::cases),
    (&["route_sort", "permute", "permute_bwd", "combine", "combine_bwd"], routing::cases),
    (&["grouped_linear_fwd", "grouped_linear_bwd_input", "grouped_linear_bwd_weight"], grouped::cases),
    (
        &["grouped_lora_fwd", "grouped_lora_bwd_hidden", "grouped_lora_bwd_weight", "grouped_lora_bwd_input"],
        grouped_lora::cases,
    ),
    (&["cross_entropy", "cross_entropy_bwd", "argmax", "loss_mean"], loss::cases),
    (&["preference"], preference::cases),
    (&["grad_norm", "adamw"], optimizer::cases),
    (&["muon_momentum", "muon_update"], muon::cases),
    (&["matmul"], matmul::cases),
    (fp8::OWN, fp8::cases),
    (&["grouped_fp8", "grouped_fp8_bwd_weight"], grouped_fp8::cases),
    (&["fill", "copy"], memory::cases),
    (&["exchange", "tree_sum", "all_gather"], collective::cases),
];

/// Whether master weights or moments are not stored in f32.
pub(crate) fn is_choice(precision: Precision) -> bool {
    precision.has_residual() || precision.moments != DType::F32
}

/// Whether the op depends on the precision of its case: with bf16 it has a slot of bf16 or 8-bit numbers, and with f32
/// gradients beside bf16 also an f32 gradient.
fn is_own(case: &Case) -> bool {
    let args = case.op().args();
    let has_bf16 = args.iter().any(|arg| matches!(arg.slot.dtype, DType::BF16 | DType::F8(_)));
    let has_f32_grads = args.iter().any(|arg| arg.slot.pool == Pool::Grads && arg.slot.dtype == DType::F32);
    match case.precision() {
        Precision::F32 => true,
        precision if is_choice(precision) => true,
        Precision::BF16 => has_bf16,
        _ => has_bf16 && has_f32_grads,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::LazyLock;

    const PRECISIONS: [Precision; 7] = [
        Precision::F32,
        Precision::BF16,
        Precision::BF16_F32_GRADS,
        Precision::BF16.with_residual(),
        Precision::BF16_F32_GRADS.with_residual(),
        Precision::BF16.with_bf16_moments(),
        Precision::BF16.with_residual().with_bf16_moments(),
    ];

    /// The cases in each of [`PRECISIONS`]. Making them costs more than what is checked of them.
    static EVERY: LazyLock<[Vec<Case>; 7]> = LazyLock::new(|| PRECISIONS.map(|p| cases_in(p, |_| true)));

    /// The f32 cases.
    fn f32_cases() -> &'static [Case] {
        &EVERY[0]
    }

    #[test]
    fn bf16_cases_hold_bf16_numbers_and_f32_statistics() {
        let cases = &EVERY[1];
        let f32_only = ["scale_update", "loss_mean", "preference", "router_load", "route_sort"];
        for op in Op::NAMES.iter().filter(|op| !f32_only.contains(op)) {
            assert!(cases.iter().any(|case| case.op().name() == *op), "{op}");
        }
        for input in cases.iter().flat_map(|case| &case.inputs) {
            if input.slot.dtype == DType::BF16 {
                assert!(input.floats().iter().all(|value| value.is_nan() || value.to_bits() & 0xffff == 0));
            }
        }
        let wide = ["mean", "rstd", "lse", "losses", "norm", "moment1", "moment2", "master"];
        let wide = [&wide[..], &["probs", "weights", "d_weights", "load"]].concat();
        for arg in cases.iter().flat_map(|case| case.op().args()).filter(|arg| wide.contains(&arg.name)) {
            assert_eq!(arg.slot.dtype, DType::F32, "{}", arg.name);
        }
        let mixed = &EVERY[2];
        let ops: HashSet<_> = mixed.iter().map(|case| case.op().name()).collect();
        let want = ["embedding_bwd", "layernorm_bwd", "linear_bwd_weight", "adamw", "muon_momentum"];
        let more = ["rmsnorm_bwd", "qk_norm_bwd", "grouped_linear_bwd_weight", "lora_bwd_weight"];
        let want = [
            &want[..],
            &more,
            &["grouped_lora_bwd_weight", "quantize", "matmul_fp8", "grouped_fp8_bwd_weight"],
        ]
        .concat();
        assert_eq!(ops, HashSet::from_iter(want));
    }

    #[test]
    fn every_op_has_cases_and_every_case_its_own_name() {
        for name in Op::NAMES {
            let count = f32_cases().iter().filter(|case| !case.large && case.op().name() == *name).count();
            assert!(count >= 3, "{name} has {count} cases");
        }
        let all: Vec<&Case> = EVERY.iter().flatten().collect();
        let names: HashSet<_> = all.iter().map(|case| (case.op().name(), &case.name)).collect();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn every_op_has_its_stem_in_the_names() {
        let page = include_str!("../../../../docs/names.md");
        let stems = page.split("## Stems").nth(1).and_then(|rest| rest.split("## Sections").next());
        let stems: Vec<&str> = stems.unwrap().split('`').skip(1).step_by(2).collect();
        for name in Op::NAMES {
            assert!(stems.iter().any(|stem| name.starts_with(stem)), "{name} is not in docs/names.md");
        }
    }

    #[test]
    fn an_op_with_a_product_names_its_operands() {
        for case in f32_cases().iter().filter(|case| !case.large) {
            let op = case.op();
            let results = op.args().into_iter().filter(|arg| arg.access.writes());
            let has_product = results.into_iter().any(|arg| op.numerics(arg.name).product.is_some());
            assert_eq!(!op.operands().is_empty(), has_product, "{}", op.name());
        }
    }

    #[test]
    fn options_are_present_and_absent() {
        let ops: Vec<Op> = f32_cases().iter().filter(|case| !case.large).map(|case| *case.op()).collect();
        let has = |what: &str, f: &dyn Fn(&Op) -> bool| assert!(ops.iter().any(f), "no case: {what}");
        for want in [false, true] {
            has("pre", &|op| matches!(op, Op::LinearFwd(op) if op.pre.is_some() == want));
            has("bias", &|op| matches!(op, Op::LinearFwd(op) if op.bias.is_some() == want));
            has("pre", &|op| matches!(op, Op::LinearBwdInput(op) if op.pre.is_some() == want));
            has("d_bias", &|op| matches!(op, Op::LinearBwdWeight(op) if op.d_bias.is_some() == want));
            has("grad", &|op| matches!(op, Op::CrossEntropy(op) if op.grad == want));
            let padded =
                |op: &Op| matches!(op, Op::CrossEntropy(op) if (op.vocab < op.logits.shape.cols()) == want);
            has("padding", &padded);
            has("weights", &|op| matches!(op, Op::Preference(op) if op.weights.is_some() == want));
            has("position", &|op| matches!(op, Op::EmbeddingFwd(op) if op.at_position == want));
            has("act_fwd in place", &|op| matches!(op, Op::ActFwd(op) if (op.out == op.inp) == want));
            has("act_bwd in place", &|op| matches!(op, Op::ActBwd(op) if (op.d_inp == op.d_out) == want));
            has("dropout in place", &|op| matches!(op, Op::Dropout(op) if (op.out == op.inp) == want));
            has("add in place a", &|op| matches!(op, Op::Add(op) if (op.out == op.a) == want));
            has("add in place b", &|op| matches!(op, Op::Add(op) if (op.out == op.b) == want));
            let a = |op: &Op| matches!(op, Op::ResidualLayerNormFwd(op) if (op.residual == op.a) == want);
            let b = |op: &Op| matches!(op, Op::ResidualLayerNormFwd(op) if (op.residual == op.b) == want);
            has("residual in place a", &a);
            has("residual in place b", &b);
            let a = |op: &Op| matches!(op, Op::ResidualRmsNormFwd(op) if (op.residual == op.a) == want);
            let b = |op: &Op| matches!(op, Op::ResidualRmsNormFwd(op) if (op.residual == op.b) == want);
            has("residual in place a", &a);
            has("residual in place b", &b);
            has("wpe", &|op| matches!(op, Op::EmbeddingFwd(op) if op.wpe.is_some() == want));
            has("d_wpe", &|op| matches!(op, Op::EmbeddingBwd(op) if op.d_wpe.is_some() == want));
            has("rope position", &|op| matches!(op, Op::Rope(op) if op.at_position == want));
            has("rope back", &|op| matches!(op, Op::Rope(op) if op.back == want));
            has("entropy", &|op| matches!(op, Op::RouterLoad(op) if op.entropy.is_some() == want));
            has("qk_norm in place", &|op| matches!(op, Op::QkNormFwd(op) if (op.out == op.inp) == want));
            has("swiglu in place", &|op| matches!(op, Op::SwigluBwd(op) if (op.d_inp == op.inp) == want));
            has("swiglu again", &|op| matches!(op, Op::SwigluBwd(op) if op.act.is_some() == want));
            let again = |op: &Op| matches!(op, Op::SwigluBwd(op) if (op.act == Some(op.d_out)) == want);
            has("swiglu again in place", &again);
            has("experts' swiglu", &|op| matches!(op, Op::GroupedLinearFwd(op) if op.act.is_some() == want));
            has("experts beside", &|op| matches!(op, Op::GroupedFp8(op) if op.beside == want));
            has("combine in place", &|op| matches!(op, Op::CombineBwd(op) if (op.d_rows == op.rows) == want));
        }
        for accum in [Accum::Write, Accum::Add, Accum::FirstWrites] {
            has("accum", &|op| matches!(op, Op::EmbeddingBwd(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::LayerNormBwd(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::LayerNormBwd(op) if op.accum_inp == accum));
            has("accum", &|op| matches!(op, Op::LinearBwdWeight(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::LossMean(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::Preference(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::EmbeddingBwd(op) if op.accum_wte == accum));
            has("accum", &|op| matches!(op, Op::RmsNormBwd(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::RmsNormBwd(op) if op.accum_inp == accum));
            has("accum", &|op| matches!(op, Op::QkNormBwd(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::PermuteBwd(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::GroupedLinearBwdWeight(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::GroupedLoraBwdWeight(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::GroupedFp8BwdWeight(op) if op.accum == accum));
            has("accum", &|op| matches!(op, Op::RouterLoad(op) if op.accum == accum));
        }
    }

    #[test]
    fn everything_read_is_given() {
        for case in EVERY.iter().flatten() {
            for arg in case.op().args().iter().filter(|arg| arg.slot.numel() > 0) {
                let given = case.inputs.iter().any(|input| input.slot == arg.slot);
                let reads = arg.access.reads_at(case.scalars.micro_step);
                assert!(given || !reads, "{} {}: {}", case.op().name(), case.name, arg.name);
            }
        }
    }
}
