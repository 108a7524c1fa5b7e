//! Several samples in one row on the CPU engine: what is computed of a sample is what is computed of it alone.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use crate::small;
use ironhorse::core::{Engine, EngineExt, Precision, Program, Scalars, Section, Slot};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::data::{LoaderConfig, PackedLoader, Sample};
use ironhorse::train::model::{Gpt2Config, ModelConfig, StepOptions};
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Batch, Session, SessionSpec};

const SEQ: usize = 150;
const VOCAB: usize = 203;
/// 150 in each row: a document of one token, some longer than a tile of attention, and the end of a row within a tile.
const LENGTHS: [&[usize]; 2] = [&[1, 70, 37, 2, 40], &[100, 1, 1, 48]];

fn configs() -> [ModelConfig; 4] {
    let experts = "hidden=40,layers=2,heads=6,kv_heads=3,head_dim=10,experts=5,top_k=2,ffn=37,vocab=203,context=150,aux_alpha=0";
    let llama = "hidden=40,layers=2,heads=5,kv_heads=1,ffn=37,vocab=203,context=150";
    let mistral = format!("kind=mistral,window=20,{llama}");
    let [experts, llama, mistral] =
        [experts, llama, &mistral].map(|sizes| ModelConfig::parse(sizes).unwrap());
    [Gpt2Config::new(SEQ, VOCAB, 2, 5, 40).into(), experts, llama, mistral]
}

/// A program on its own engine, with random weights that depend on the model alone.
struct Model {
    engine: CpuEngine,
    program: Program,
}

/// The tokens, targets and positions of a batch.
type Inputs = [Vec<i32>; 3];

impl Model {
    fn new(program: Program, threads: usize) -> Self {
        let mut engine = CpuEngine::new(threads);
        engine.reserve(program.layout()).unwrap();
        let mut rng = Rng::new(7);
        for param in program.params() {
            let spread = (3.0 / param.shape().cols() as f64).sqrt();
            let value = |rng: &mut Rng| ((2.0 * rng.uniform_f64() - 1.0) * spread) as f32;
            let values: Vec<f32> = (0..param.weight.numel()).map(|_| value(&mut rng)).collect();
            engine.write_f32(param.weight, &values).unwrap();
        }
        Self { engine, program }
    }

    fn run(&mut self, [x, y, positions]: &Inputs, sections: &[Section], loss_scale: f32) {
        let io = |name: &str| self.program.io(name).unwrap();
        self.engine.write_i32(io("x"), x).unwrap();
        self.engine.write_i32(io("y"), y).unwrap();
        if let Some(slot) = self.program.io("positions") {
            self.engine.write_i32(slot, positions).unwrap();
        }
        let scalars = Scalars { loss_scale, ..Scalars::default() };
        for &section in sections {
            self.engine.run_section(&self.program, section, &scalars).unwrap();
        }
    }

    fn read(&mut self, slot: Slot) -> Vec<f32> {
        let mut values = vec![0.0; slot.numel()];
        self.engine.read_f32(slot, &mut values).unwrap();
        values
    }

    /// The logits after a forward: nothing is computed after them that could take their memory.
    fn logits(&mut self) -> Vec<f32> {
        let value = self.program.values().iter().find(|value| value.name == "logits").unwrap();
        self.read(value.slot)
    }

    fn gradients(&mut self) -> Vec<Vec<f32>> {
        let slots: Vec<Slot> = self.program.params().iter().map(|param| param.grad()).collect();
        slots.into_iter().map(|slot| self.read(slot)).collect()
    }
}

/// The samples one by one, and all of them in two rows.
fn samples() -> (Vec<Inputs>, Inputs) {
    let mut rng = Rng::new(3);
    let mut ids = |count: usize| (0..count).map(|_| rng.index(VOCAB) as i32).collect::<Vec<_>>();
    let alone: Vec<Inputs> = LENGTHS
        .concat()
        .into_iter()
        .map(|length| [ids(length), ids(length), (0..length as i32).collect()])
        .collect();
    let packed = [0, 1, 2].map(|part| alone.iter().flat_map(|sample| sample[part].clone()).collect());
    (alone, packed)
}

/// Attention begins a tile with each document, and no other op looks at more than one token; so the bits are the same, but for
/// samples of up to 4 tokens: products with so few rows have another order of summation.
#[test]
fn packed_logits_are_those_of_the_samples_one_by_one() {
    for config in configs() {
        let (alone, packed) = samples();
        let program = config.packed_evaluation((2, SEQ), Precision::F32).unwrap();
        let logits = [1, 2].map(|threads| {
            let mut model = Model::new(program.clone(), threads);
            model.run(&packed, &[Section::Forward], 1.0);
            model.logits()
        });
        let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&logits[0]), bits(&logits[1]), "threads");
        let width = logits[0].len() / (2 * SEQ);
        let mut first = 0;
        for sample in &alone {
            let length = sample[0].len();
            let mut model = Model::new(config.evaluation((1, length), Precision::F32).unwrap(), 1);
            model.run(sample, &[Section::Forward], 1.0);
            let here = &logits[0][first * width..(first + length) * width];
            let alone = model.logits();
            if length > 4 {
                assert_eq!(bits(&alone), bits(here), "{} of {length}", config.kind());
            }
            // Two layers of sums of 40 terms, each off by a few units of f32.
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
            assert!(alone.iter().zip(here).all(close), "{} of {length}", config.kind());
            first += length;
        }
    }
}

/// The sums over tokens have another order: they differ by rounding errors, F32_UNIT·√300 or 1e-6 of a gradient, and by a
/// few times that where terms cancel.
#[test]
fn packed_gradients_are_the_sum_of_those_of_the_samples() {
    for config in configs() {
        let (alone, packed) = samples();
        let (both, scale) = ([Section::Forward, Section::Backward], 1.0 / (2 * SEQ) as f32);
        let options = StepOptions { packed: true, ..StepOptions::default() };
        let mut model = Model::new(config.training((2, SEQ), options, Precision::F32).unwrap(), 2);
        model.run(&packed, &both, scale);
        let got = model.gradients();
        let mut want: Vec<Vec<f64>> = got.iter().map(|tensor| vec![0.0; tensor.len()]).collect();
        for sample in &alone {
            let options = StepOptions::default();
            let program = config.training((1, sample[0].len()), options, Precision::F32).unwrap();
            let mut single = Model::new(program, 1);
            single.run(sample, &both, scale);
            for (sum, part) in want.iter_mut().zip(single.gradients()) {
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += f64::from(part));
            }
        }
        for ((param, got), want) in model.program.params().iter().zip(&got).zip(&want) {
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let size = norm(&mut want.iter().copied());
            let error = norm(&mut got.iter().zip(want).map(|(&got, want)| f64::from(got) - want));
            assert!(error <= 5e-6 * size, "{} {}: {error:e} of {size:e}", config.kind(), param.name);
        }
    }
}

/// What a token of one document is changes nothing in another.
#[test]
fn documents_do_not_see_each_other() {
    // two layers of windows of 20 keys reach 38 tokens beyond the first
    for (config, end) in configs().into_iter().zip([71, 71, 71, 44]) {
        let (_, packed) = samples();
        let mut changed = packed.clone();
        changed[0][5] = (changed[0][5] + 1) % VOCAB as i32;
        let program = config.packed_evaluation((2, SEQ), Precision::F32).unwrap();
        let mut model = Model::new(program, 1);
        let [before, after] = [packed, changed].map(|batch| {
            model.run(&batch, &[Section::Forward], 1.0);
            model.logits()
        });
        let width = before.len() / (2 * SEQ);
        let differs = |t: usize| before[t * width..(t + 1) * width] != after[t * width..(t + 1) * width];
        let seen: Vec<usize> = (0..2 * SEQ).filter(|&t| differs(t)).collect();
        assert_eq!(seen, (5..end).collect::<Vec<_>>(), "{}", config.kind());
    }
}

#[test]
fn a_session_takes_what_the_loader_packs_and_nothing_else() {
    let config = LoaderConfig { batch: 2, seq: 16, vocab: VOCAB, seed: 1, shuffle: true };
    let sample = |length: i32| Sample { ids: (0..length).collect(), learned: vec![true; length as usize] };
    let mut loader = PackedLoader::new([9, 3, 4, 12, 4].map(sample).into(), config).unwrap();
    let [mut x, mut y, mut positions] = [(); 3].map(|()| vec![0; 32]);
    assert_eq!(loader.next_batch([&mut x, &mut y, &mut positions]).unwrap().tokens, 32);
    let shape = Some((2, 16));
    let spec = SessionSpec { train: shape, eval: shape, packed: true, ..SessionSpec::default() };
    let mut session = small::session(Box::new(CpuEngine::new(2)), configs()[2], &spec, 1);
    let scalars = Scalars { step: 1, ..Scalars::default() }.counting(&y);
    let packed = Batch { positions: Some(&positions), ..Batch::plain(&x, &y) };
    let want = session.evaluate_batch(packed).unwrap();
    session.step(packed, &scalars).unwrap();
    assert_eq!(session.update(&scalars).unwrap().0, want);
    let text = session.micro_step(&x, &y, &scalars).unwrap_err().to_string();
    assert_eq!(text, "batch is without positions, expected those of packed sequences");
    positions[3] += 1;
    let packed = Batch { positions: Some(&positions), ..Batch::plain(&x, &y) };
    let text = session.evaluate_batch(packed).unwrap_err().to_string();
    assert!(text.contains("at index 3 is neither 0 nor the position before it plus 1"), "{text}");
    let plain = SessionSpec { eval: shape, ..SessionSpec::default() };
    let mut plain = Session::new(Box::new(CpuEngine::new(2)), configs()[2], &plain).unwrap();
    assert!(plain.evaluate_batch(packed).is_err());
}
