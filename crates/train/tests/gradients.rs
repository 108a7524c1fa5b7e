//! The backward of every model, against finite differences of its forward, in f64: the loss and, of mixtures, every layer's
//! auxiliary loss, through experts and router.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use ironhorse_core::{DropRate, Precision};
use ironhorse_testkit::{ProgramGradients, check_program_gradients};
use ironhorse_train::model::{Adapted, Gpt2Config, Lora, ModelConfig, Recompute, StepOptions, Targets};

fn check(config: ModelConfig, recomputes: &[Recompute], shape: (usize, usize)) {
    recomputes.iter().for_each(|&recompute| check_step(config, recompute.into(), shape));
}

fn check_step(config: ModelConfig, options: StepOptions, (batch, seq): (usize, usize)) {
    check_model(config.into(), options, (batch, seq));
}

fn check_model(model: Adapted, options: StepOptions, (batch, seq): (usize, usize)) {
    let (config, program) = (model.config, model.training((batch, seq), options, Precision::F32).unwrap());
    let at = |i: usize| ((i * 7 + 3) % config.vocab_size()) as i32;
    let check = ProgramGradients {
        program: &program,
        tokens: &(0..batch * seq).map(at).collect::<Vec<_>>(),
        targets: &(1..=batch * seq).map(at).collect::<Vec<_>>(),
        positions: &if options.packed { documents(batch, seq) } else { Vec::new() },
        more: &if options.preference.is_some() { pairs(batch, seq) } else { Vec::new() },
        seed: 4,
        samples: 12,
        tolerance: 1e-6,
    };
    let worst = check_program_gradients(&check);
    let worst = worst.unwrap_or_else(|wrong| panic!("{}, {options:?}: {wrong}", config.to_json()));
    assert!(worst < 1e-6);
}

/// Positions in documents of 3, 1, 2 and 4 tokens, again and again, cut off where a sequence ends.
fn documents(batch: usize, seq: usize) -> Vec<i32> {
    let row: Vec<i32> = [3, 1, 2, 4].into_iter().cycle().flat_map(|length| 0..length).take(seq).collect();
    row.repeat(batch)
}

/// In each sequence a pair of 3 and 1 tokens, one of 2 and 4, and 2 tokens without a pair, as far as it is long enough; and losses of
/// a reference.
fn pairs(batch: usize, seq: usize) -> Vec<(&'static str, Vec<f64>)> {
    let rows = (0..batch).flat_map(|b| [0, 3, 4, 4, 6, 10].map(|at| (b * seq + at.min(seq)) as f64));
    let mut bounds: Vec<f64> = rows.collect();
    bounds.resize(batch * seq / 2 * 3, (batch * seq) as f64);
    let reference = (0..batch * seq).map(|i| 0.3 + (i * 13 % 7) as f64 / 2.0).collect();
    vec![("pairs", bounds), ("reference", reference)]
}

/// Of documents that are pairs, whole and with adapters.
#[test]
fn every_gradient_of_preferences_is_the_derivative_of_their_loss() {
    let experts =
        "hidden=8,layers=2,heads=2,kv_heads=1,experts=4,top_k=2,ffn=6,vocab=11,context=12,aux_alpha=0.5";
    let qwen =
        "kind=qwen3,hidden=8,layers=2,heads=2,kv_heads=1,head_dim=4,ffn=6,vocab=11,context=12,tied=true";
    let [experts, qwen] = [experts, qwen].map(|sizes| ModelConfig::parse(sizes).unwrap());
    let options = |packed, beta| StepOptions { packed, preference: Some(beta), ..StepOptions::default() };
    for config in [experts, qwen, Gpt2Config::new(12, 11, 2, 2, 8).into()] {
        check_step(config, options(true, 0.7), (2, 12));
    }
    let full = StepOptions { recompute: Recompute::Full, ..options(false, 0.1) };
    check_step(Gpt2Config::new(12, 11, 1, 2, 8).into(), full, (3, 12));
    let lora = Lora { rank: 3, alpha: 3.0, targets: Targets::parse("all").unwrap() };
    check_model(Adapted { config: qwen, lora: Some(lora) }, options(true, 0.5), (2, 12));
}

fn check_sizes(sizes: &str, batch: usize, seq: usize) {
    let all = [Recompute::None, Recompute::Gelu, Recompute::Full, Recompute::Experts];
    check(ModelConfig::parse(sizes).unwrap(), &all, (batch, seq));
}

#[test]
fn every_gradient_of_gpt2_is_the_derivative_of_its_loss() {
    for (config, batch, seq) in [
        (Gpt2Config::new(9, 11, 2, 2, 8), 2, 7),
        (Gpt2Config::new(5, 7, 1, 1, 4), 1, 1),
        (Gpt2Config::new(6, 13, 3, 5, 10), 3, 5),
    ] {
        check(config.into(), &[Recompute::None, Recompute::Gelu, Recompute::Full], (batch, seq));
    }
}

/// The masks are fixed by the scalars, so the loss is a smooth function of the parameters.
#[test]
fn every_gradient_of_gpt2_with_dropout_is_the_derivative_of_its_loss() {
    let dropout = DropRate::new(0.3).unwrap();
    for (config, shape) in
        [(Gpt2Config::new(9, 11, 2, 2, 8), (2, 7)), (Gpt2Config::new(20, 13, 1, 3, 18), (1, 20))]
    {
        for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
            check_step(config.into(), StepOptions { recompute, dropout, ..StepOptions::default() }, shape);
        }
    }
}

#[test]
fn every_gradient_of_packed_sequences_is_the_derivative_of_their_loss() {
    let experts =
        "hidden=8,layers=2,heads=2,kv_heads=1,experts=4,top_k=2,ffn=6,vocab=11,context=9,aux_alpha=0.5";
    let llama = "hidden=8,layers=2,heads=2,kv_heads=1,ffn=6,vocab=11,context=9";
    let configs = [experts, llama].map(|sizes| ModelConfig::parse(sizes).unwrap());
    for config in configs.into_iter().chain([Gpt2Config::new(9, 11, 2, 2, 8).into()]) {
        check_step(config, StepOptions { packed: true, ..StepOptions::default() }, (2, 9));
    }
    let dropout = DropRate::new(0.3).unwrap();
    let options = StepOptions { recompute: Recompute::Full, dropout, packed: true, ..StepOptions::default() };
    check_step(Gpt2Config::new(9, 11, 1, 2, 8).into(), options, (2, 9));
}

#[test]
fn every_gradient_of_a_mixture_is_the_derivative_of_its_loss() {
    check_sizes(
        "hidden=8,layers=2,heads=2,kv_heads=1,experts=4,top_k=2,ffn=6,vocab=11,context=9,aux_alpha=0.5",
        2,
        7,
    );
    check_sizes(
        "hidden=6,layers=1,heads=6,kv_heads=3,head_dim=4,experts=3,top_k=1,ffn=5,vocab=7,context=5,rope_alpha=3",
        3,
        5,
    );
    check_sizes("hidden=8,layers=1,heads=2,experts=5,top_k=5,ffn=3,vocab=7,context=5", 2, 3);
    check_sizes("hidden=8,layers=1,heads=2,experts=4,top_k=2,ffn=6,vocab=11,context=9", 1, 1);
}

/// Two parts of 64 and 26 tokens: with a head that is the token table, one that is not, one that is frozen, and micro-steps that add.
#[test]
fn every_gradient_through_a_head_in_parts_is_the_derivative_of_the_loss() {
    let options = StepOptions { head_chunks: 2, ..StepOptions::default() };
    check_step(Gpt2Config::new(45, 11, 1, 2, 8).into(), options, (2, 45));
    let sizes = "hidden=8,layers=1,heads=2,kv_heads=1,ffn=6,vocab=11,context=45";
    let experts = ModelConfig::parse(&format!("{sizes},experts=3,top_k=2,aux_alpha=0.5")).unwrap();
    check_step(experts, StepOptions { recompute: Recompute::Full, ..options }, (2, 45));
    let config = ModelConfig::parse(&format!("kind=llama,{sizes}")).unwrap();
    let lora = Lora { rank: 2, alpha: 3.0, targets: Targets::parse("all").unwrap() };
    check_model(Adapted { config, lora: Some(lora) }, options, (2, 45));
}

/// Adapters of all targets and of some, on frozen models with biases, norms of heads, tied heads and experts.
#[test]
fn every_gradient_of_adapters_is_the_derivative_of_the_loss() {
    let sizes = "hidden=10,layers=2,heads=4,kv_heads=2,head_dim=4,ffn=6,vocab=11,context=9";
    for (kind, targets, rank) in [
        ("kind=llama", "all", 3),
        ("kind=qwen2,tied=true", "q,v,up", 2),
        ("kind=qwen3", "k,o,gate,down", 1),
        ("kind=qwen3_moe,experts=3,top_k=2", "q,k,v,o", 5),
        ("kind=qwen3_moe,experts=5,top_k=2", "all", 3),
        ("kind=moe,experts=3,top_k=3", "v,up,down", 2),
        ("kind=moe,experts=7,top_k=1", "gate", 1),
        ("kind=gemma3_text,tied=true,window=3,window_every=2", "all", 2),
    ] {
        let config = ModelConfig::parse(&format!("{kind},{sizes}")).unwrap();
        let lora = Lora { rank, alpha: 3.0, targets: Targets::parse(targets).unwrap() };
        let all = [Recompute::None, Recompute::Full, Recompute::Gelu, Recompute::Experts];
        for recompute in all.into_iter().take(if config.has_experts() { 4 } else { 2 }) {
            check_model(Adapted { config, lora: Some(lora) }, recompute.into(), (2, 7));
        }
    }
}

#[test]
fn every_gradient_of_a_llama_is_the_derivative_of_its_loss() {
    check_sizes("hidden=8,layers=2,heads=2,kv_heads=1,ffn=6,vocab=11,context=9", 2, 7);
    check_sizes("hidden=10,layers=1,heads=3,kv_heads=3,head_dim=4,ffn=5,vocab=7,context=5", 1, 1);
}

/// Through biases, norms of heads, scaled rotations and a head that is the token table.
#[test]
fn every_gradient_of_the_families_is_the_derivative_of_its_loss() {
    let llama3 = "rope_type=llama3,rope_factor=8,rope_original=6,rope_base=30";
    check_sizes(
        &format!("kind=llama,hidden=8,layers=2,heads=2,ffn=6,vocab=11,context=9,tied=true,{llama3}"),
        2,
        7,
    );
    check_sizes("kind=qwen2,hidden=10,layers=2,heads=3,kv_heads=1,head_dim=4,ffn=5,vocab=7,context=5", 2, 5);
    check_sizes(
        "kind=qwen3,hidden=8,layers=2,heads=4,kv_heads=2,head_dim=6,ffn=5,vocab=11,context=9,tied=true",
        2,
        7,
    );
    check_sizes(
        "kind=qwen3_moe,hidden=8,layers=1,heads=2,head_dim=6,experts=4,top_k=2,ffn=6,vocab=11,context=9",
        2,
        5,
    );
    // norms of small sums are steep: without a larger eps the truncation error of the differences shows
    let gemma3 = "window=3,window_every=2,rope_base=900,rope_local=30,query_scalar=9,tied=true,rms_eps=0.1";
    check_sizes(
        &format!(
            "kind=gemma3_text,hidden=8,layers=3,heads=4,kv_heads=2,head_dim=6,ffn=5,vocab=11,context=9,{gemma3}"
        ),
        2,
        7,
    );
}
