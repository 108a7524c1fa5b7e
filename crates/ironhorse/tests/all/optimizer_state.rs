//! The ways to store master weights and moments, without a GPU: the rounding engine on top of the CPU engine simulates
//! one.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use crate::small::{Training, bf16, bits, cpu, fixture, saved, step, values, verified};
use ironhorse::core::op::AdamW;
use ironhorse::core::{
    Builder, DType, EngineExt, Operands, Optimizer, Pool, Precision, RandomRounding, Scalars, Section,
    bf16_to_f32,
};
use ironhorse::train::model::ModelConfig;
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Session, SessionSpec};
use ironhorse::train::verify::Options;
use ironhorse_testkit::check_residual;
use std::path::Path;

const TRAINING: Training = Training { vocab: 203, batch: (2, 17), lr: 3e-3 };
/// Everything that an update changes.
const STATE: [Pool; 4] = [Pool::Params, Pool::Master, Pool::Moment1, Pool::Moment2];
const NARROW: Precision = Precision::BF16;
const CHOICES: [Precision; 6] = [
    NARROW.with_residual(),
    NARROW.with_bf16_moments(),
    NARROW.with_residual().with_bf16_moments(),
    Precision::BF16_F32_GRADS.with_residual().with_bf16_moments(),
    NARROW.with_optimizer(Optimizer::Muon),
    NARROW.with_residual().with_bf16_moments().with_optimizer(Optimizer::Muon),
];

fn model() -> ModelConfig {
    let sizes = "hidden=40,layers=2,heads=6,kv_heads=3,head_dim=10,ffn=37,vocab=203,context=40";
    ModelConfig::parse(&format!("{sizes},experts=5,top_k=2,aux_alpha=0.1")).unwrap()
}

fn session(precision: Precision) -> Session {
    TRAINING.session(bf16(), model(), precision)
}

#[test]
fn a_residual_is_the_f32_master_to_the_bit() {
    for grads in [DType::BF16, DType::F32] {
        check_residual(&mut bf16, grads, 60).unwrap();
    }
}

#[test]
fn a_model_learns_with_every_choice_and_weights_stay_bf16() {
    for precision in CHOICES {
        let mut session = session(precision);
        let losses = TRAINING.steps(&mut session, 1..=30);
        assert!(losses[29] < 0.7 * losses[0], "{losses:?}");
        let param = session.train_program().unwrap().params()[0].clone();
        let [weights, moments] =
            [Pool::Params, Pool::Moment2].map(|pool| values(&mut session, param.in_pool(pool)));
        let is_bf16 = |values: &[f32]| values.iter().all(|value| value.to_bits() & 0xffff == 0);
        assert!(is_bf16(&weights));
        assert_eq!(is_bf16(&moments), precision.moments == DType::BF16);
        let mut masters = Vec::new();
        session.read_param(Pool::Params, &param.name, &mut masters).unwrap();
        assert!(!is_bf16(&masters), "masters have more bits than the weights");
        let far = |(w, m): (&f32, &f32)| (w - m).abs() > m.abs() / 128.0 + 1e-38;
        assert!(!weights.iter().zip(&masters).any(far), "one step of bf16 apart at most");
    }
}

#[test]
fn the_same_seed_gives_the_same_bits_and_another_seed_other_moments() {
    let run = |seed: u64| {
        let mut session = session(NARROW.with_residual().with_bf16_moments());
        let (x, y) = TRAINING.tokens();
        step(&mut session, (&x, &y), &Scalars { seed, ..TRAINING.scalars(1) });
        bits(&mut session, &STATE)
    };
    let (first, again, other) = (run(1), run(1), run(2));
    assert!(first == again);
    // the first step uses the moments before they are rounded
    assert!(first[0] == other[0] && first[1] == other[1]);
    assert!(first[2] != other[2] && first[3] != other[3]);
}

#[test]
fn a_checkpoint_brings_every_bit_back() {
    for precision in [CHOICES[0], CHOICES[2], CHOICES[5], NARROW] {
        let mut session = session(precision);
        TRAINING.steps(&mut session, 1..=3);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("state-{}", std::process::id()));
        let mut checkpoint = saved(&mut session, &folder, 0);
        let spec = SessionSpec { train: Some(TRAINING.batch), precision, ..SessionSpec::default() };
        let mut resumed = Session::new(bf16(), model(), &spec).unwrap();
        assert!(resumed.restore(&mut checkpoint).unwrap(), "byte for byte");
        assert!(
            bits(&mut session, &STATE) == bits(&mut resumed, &STATE),
            "weights, masters or residuals, moments"
        );
        // an engine with f32 state restores the exact values
        let exact = Precision::F32.with_optimizer(precision.optimizer);
        let f32 = SessionSpec { precision: exact, ..spec };
        let mut wider = Session::new(cpu(), model(), &f32).unwrap();
        assert_eq!(wider.restore(&mut checkpoint).unwrap(), precision == Precision::F32);
        let (mut exact, mut widened) = (Vec::new(), Vec::new());
        for spec in model().tensors() {
            for pool in [Pool::Params, Pool::Moment1, Pool::Moment2] {
                session.read_param(pool, &spec.name, &mut exact).unwrap();
                wider.read_param(pool, &spec.name, &mut widened).unwrap();
                assert!(exact == widened, "{} of the {}", spec.name, pool.name());
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(TRAINING.steps(&mut session, 4..=6), TRAINING.steps(&mut resumed, 4..=6));
        assert!(bits(&mut session, &STATE) == bits(&mut resumed, &STATE));
    }
}

#[test]
fn lockstep_and_verify_pass_with_every_choice() {
    for precision in CHOICES {
        let report = TRAINING.lockstep(&mut session(precision), Operands::F32);
        assert!(report.passed(), "{report}");
        let options = Options { precision, ..Options::default() };
        let report = verified(bf16(), &fixture("small_moe.key.safetensors"), &options);
        assert!(report.passed(), "{report}");
        assert!(report.tensors.iter().any(|row| row.name.starts_with("after.")), "{report}");
    }
}

/// The error of bf16 moments: the mean is exact, and the standard deviation is that of a sum of rounding errors,
/// 2⁻⁷·√(0.54/6)/√(1-β²) by norm: 0.23 % for one rounding, and 5.2 % for β = 0.999, 0.75 % for 0.95, 0.54 % for 0.9.
/// Half of the error of the second moment reaches the step, which uses its square root.
#[test]
fn bf16_moments_have_no_mean_error_and_the_spread_of_their_roundings() {
    const N: usize = 4096;
    for (beta, spread) in [(0.999, 0.052), (0.95, 0.0075)] {
        let mut moments = Vec::new();
        for precision in [NARROW, NARROW.with_bf16_moments()] {
            let mut b = Builder::with_precision(precision);
            b.param("w", [N], false);
            let [norm, halt] = ["norm", "halt"].map(|name| b.io(name, [1], DType::F32));
            let [params, grads, moment1, moment2, master] =
                [Pool::Params, Pool::Grads, Pool::Moment1, Pool::Moment2, Pool::Master]
                    .map(|pool| b.flat(pool));
            b.section(Section::Update);
            b.push(AdamW { params, master: Some(master), grads, moment1, moment2, norm, halt, first: 0 })
                .unwrap();
            let program = b.finish().unwrap();
            let mut engine = bf16();
            engine.reserve(program.layout()).unwrap();
            engine.write_f32(norm, &[1.0]).unwrap();
            let mut rng = Rng::new(1);
            for step in 1..=3000 {
                let values: Vec<f32> = (0..N).map(|_| rng.normal() as f32).collect();
                engine.write_f32(grads, &values).unwrap();
                let scalars = Scalars { step, lr: 0.0, beta1: beta, beta2: beta, ..Scalars::default() };
                engine.run(&program, 0..1, &scalars).unwrap();
            }
            let mut values = vec![0.0; N];
            engine.read_f32(moment2, &mut values).unwrap();
            moments.push(values);
        }
        let errors = moments[1].iter().zip(&moments[0]).map(|(got, want)| f64::from(got / want) - 1.0);
        let errors: Vec<f64> = errors.collect();
        let mean = errors.iter().sum::<f64>() / N as f64;
        let rms = (errors.iter().map(|e| e * e).sum::<f64>() / N as f64).sqrt();
        // six standard deviations of a mean over N; the formula is accurate to a few per cent, because mantissas are
        // not exactly log-uniform
        assert!(mean.abs() < 6.0 * spread / (N as f64).sqrt(), "β {beta}: mean {mean:.2e}, spread {rms:.4}");
        assert!((0.6 * spread..1.4 * spread).contains(&rms), "β {beta}: spread {rms:.4}");
    }
}

/// The rounding engine, like every engine that rounds moments, uses the random bits of the element.
#[test]
fn moments_have_the_bits_of_their_seed_step_and_place() {
    let mut session = session(NARROW.with_bf16_moments());
    let mut exact = self::session(NARROW);
    for session in [&mut session, &mut exact] {
        TRAINING.steps(session, 1..=1);
    }
    let [slot, second] = [Pool::Moment1, Pool::Moment2].map(|pool| exact.train_program().unwrap().flat(pool));
    let (want, squares) = (values(&mut exact, slot), values(&mut exact, second));
    let rounding = RandomRounding::new(TRAINING.scalars(1).seed, 1);
    let narrow = session.train_program().unwrap().flat(Pool::Moment1);
    let got = values(&mut session, narrow);
    for (i, ((got, m), v)) in got.iter().zip(want).zip(squares).enumerate() {
        assert_eq!(got.to_bits(), bf16_to_f32(rounding.moments(i as u64, [m, v])[0]).to_bits(), "{i}");
    }
}
