//! After the first step, a training step allocates nothing.

use ironhorse::core::Scalars;
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::{Gpt2Config, ModelConfig};
use ironhorse::train::session::{Session, SessionSpec};

ironhorse_testkit::count_allocations!();

/// One test, because the counters belong to the whole process.
#[test]
fn steps_after_the_first_allocate_nothing() {
    let gpt2 = ModelConfig::Gpt2(Gpt2Config::new(130, 500, 2, 3, 48));
    let sizes = "hidden=48,layers=2,heads=3,kv_heads=1,experts=5,top_k=2,ffn=70,vocab=500,context=130";
    let experts = ModelConfig::parse(sizes).unwrap();
    for (threads, config) in [1, 2, 3].into_iter().flat_map(|threads| [(threads, gpt2), (threads, experts)]) {
        let spec = SessionSpec { train: Some((2, 130)), ..SessionSpec::default() };
        allocations::take_large_bytes();
        let mut session = Session::new(Box::new(CpuEngine::new(threads)), config, &spec).unwrap();
        let planned = session.train_program().unwrap().layout().total();
        let taken = allocations::take_large_bytes();
        let rounding = 7 * (2 << 20); // each pool to whole large pages
        assert!(
            taken <= planned + rounding && taken + 7 * allocations::LARGE >= planned,
            "{taken} for a plan of {planned}"
        );
        session.init(1).unwrap();
        let x: Vec<i32> = (0..260).map(|i| i % 500).collect();
        let y: Vec<i32> = (0..260).map(|i| (i + 1) % 500).collect();
        let mut step = |step: u32| {
            for micro_step in 0..2 {
                let s = Scalars {
                    step,
                    micro_step,
                    loss_scale: 1.0 / 520.0,
                    grad_clip: 1.0,
                    ..Scalars::default()
                };
                session.micro_step(&x, &y, &s).unwrap();
            }
            session.update(&Scalars { step, ..Scalars::default() }).unwrap();
        };
        step(1);
        assert!(allocations::count() > 0, "the counter counts");
        // On a busy machine a worker's thread may start as late as this; what steps allocate they would in every attempt.
        let fewest = (0..3).map(|attempt| {
            let before = allocations::count();
            (2 + 30 * attempt..32 + 30 * attempt).for_each(&mut step);
            allocations::count() - before
        });
        assert_eq!(fewest.min(), Some(0), "{} with {threads} threads", config.kind());
    }
}
