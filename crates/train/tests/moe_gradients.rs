//! The backward of mixtures, against finite differences of its forward, in f64: the loss and
//! every layer's auxiliary loss, through experts and router.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use ironhorse_core::Precision;
use ironhorse_testkit::{ProgramGradients, check_program_gradients};
use ironhorse_train::model::{ModelConfig, Recompute};

fn check(sizes: &str, batch: usize, seq: usize) {
    let config = ModelConfig::parse(sizes).unwrap();
    let all = [Recompute::None, Recompute::Gelu, Recompute::Full, Recompute::Experts];
    for recompute in all {
        let program = config.training((batch, seq), recompute, Precision::F32).unwrap();
        let at = |i: usize| ((i * 7 + 3) % config.vocab_size()) as i32;
        let check = ProgramGradients {
            program: &program,
            tokens: &(0..batch * seq).map(at).collect::<Vec<_>>(),
            targets: &(1..=batch * seq).map(at).collect::<Vec<_>>(),
            seed: 4,
            samples: 12,
            tolerance: 1e-6,
        };
        check_program_gradients(&check).unwrap_or_else(|wrong| panic!("{sizes}, {recompute:?}: {wrong}"));
    }
}

#[test]
fn every_gradient_of_a_mixture_is_the_derivative_of_its_loss() {
    check(
        "hidden=8,layers=2,heads=2,kv_heads=1,experts=4,top_k=2,ffn=6,vocab=11,context=9,aux_alpha=0.5",
        2,
        7,
    );
    check(
        "hidden=6,layers=1,heads=6,kv_heads=3,head_dim=4,experts=3,top_k=1,ffn=5,vocab=7,context=5,rope_alpha=3",
        3,
        5,
    );
    check("hidden=8,layers=1,heads=2,experts=5,top_k=5,ffn=3,vocab=7,context=5", 2, 3);
    check("hidden=8,layers=1,heads=2,experts=4,top_k=2,ffn=6,vocab=11,context=9", 1, 1);
}

#[test]
fn every_gradient_of_a_llama_is_the_derivative_of_its_loss() {
    check("hidden=8,layers=2,heads=2,kv_heads=1,ffn=6,vocab=11,context=9", 2, 7);
    check("hidden=10,layers=1,heads=3,kv_heads=3,head_dim=4,ffn=5,vocab=7,context=5", 1, 1);
}
