//! The backward of GPT-2, against finite differences of its forward, in f64.

use ironhorse_core::Precision;
use ironhorse_testkit::{ProgramGradients, check_program_gradients};
use ironhorse_train::model::{Gpt2Config, ModelConfig, Recompute};

#[test]
fn every_gradient_of_gpt2_is_the_derivative_of_its_loss() {
    for (config, batch, seq) in [
        (Gpt2Config::new(9, 11, 2, 2, 8), 2, 7),
        (Gpt2Config::new(5, 7, 1, 1, 4), 1, 1),
        (Gpt2Config::new(6, 13, 3, 5, 10), 3, 5),
    ] {
        for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
            let model = ModelConfig::from(config);
            let program = model.training((batch, seq), recompute, Precision::F32).unwrap();
            let at = |i: usize| ((i * 7 + 3) % config.vocab_size) as i32;
            let check = ProgramGradients {
                program: &program,
                tokens: &(0..batch * seq).map(at).collect::<Vec<_>>(),
                targets: &(1..=batch * seq).map(at).collect::<Vec<_>>(),
                seed: 4,
                samples: 12,
                tolerance: 1e-6,
            };
            let worst =
                check_program_gradients(&check).unwrap_or_else(|wrong| panic!("{recompute:?}: {wrong}"));
            assert!(worst < 1e-6);
        }
    }
}
