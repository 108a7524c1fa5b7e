//! AdamW with every way to store its state, on a real GPU with 24 GiB free: checks that a residual gives the bits of an
//! f32 master, and times each way. `cargo test --release -p ironhorse-cuda --test adamw -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::AdamW;
use ironhorse_core::{Builder, DType, Engine, EngineExt, Pool, Precision, Scalars, Section};
use ironhorse_cuda::{CudaEngine, Settings};
use ironhorse_testkit::check_residual;
use std::time::Instant;

/// The number of parameters of the timed update: the state is much larger than any cache.
const PARAMS: usize = 1 << 30;
/// The number of runs.
const TIMES: u32 = 20;

fn engine() -> Box<dyn Engine> {
    Box::new(CudaEngine::new(Settings::default()).unwrap())
}

#[test]
#[ignore = "needs a GPU"]
fn a_residual_is_the_f32_master_to_the_bit() {
    for grads in [DType::BF16, DType::F32] {
        check_residual(&mut engine, grads, 200).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn speed() {
    let base = Precision::BF16;
    println!("{:10} {:10} {:>9} {:>9} {:>14}", "master", "moments", "ms", "GB/s", "bytes/element");
    for p in [base, base.with_residual(), base.with_bf16_moments(), base.with_residual().with_bf16_moments()]
    {
        let mut b = Builder::with_precision(p);
        b.param("w", [PARAMS], true);
        let [norm, halt] = ["norm", "halt"].map(|name| b.io(name, [1], DType::F32));
        let [params, grads, moment1, moment2, master] =
            [Pool::Params, Pool::Grads, Pool::Moment1, Pool::Moment2, Pool::Master].map(|pool| b.flat(pool));
        b.section(Section::Update);
        b.push(AdamW { params, master: Some(master), grads, moment1, moment2, norm, halt, first: 0 })
            .unwrap();
        let program = b.finish().unwrap();
        let mut engine = engine();
        engine.reserve(program.layout()).unwrap();
        engine.write_f32(norm, &[1.0]).unwrap();
        let mut time = |times: u32| {
            let start = Instant::now();
            for step in 1..=times {
                engine.run(&program, 0..1, &Scalars { step, ..Scalars::default() }).unwrap();
            }
            engine.synchronize().unwrap();
            start.elapsed().as_secs_f64() / f64::from(times)
        };
        time(3);
        let seconds = time(TIMES);
        let bytes = program.nodes()[0].op.bytes();
        println!(
            "{:10} {:10} {:9.3} {:9.0} {:14.1}",
            p.master.name(),
            p.moments.name(),
            seconds * 1e3,
            bytes as f64 / seconds / 1e9,
            bytes as f64 / PARAMS as f64
        );
    }
}
