//! The programs of both families, op by op: a change of how they are built must not change what is built. Where a program
//! is meant to change, the test prints the new digests.

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::Op;
use ironhorse_core::{Pool, Precision, Program};
use ironhorse_train::model::{ModelConfig, Recompute};
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// Everything that an engine or a report can see of a program, except its random id.
fn dump(program: &Program, into: &mut String) {
    for node in program.nodes() {
        let op = without_fp8(without_ranks(without_masks(without_gains(format!("{:?}", node.op)))))
            .replace(", scaling: None", "");
        writeln!(into, "{} {} {op}", node.section, program.origin(node)).unwrap();
    }
    for param in program.params() {
        writeln!(into, "{}", without_fp8(without_adamw(format!("{param:?}")))).unwrap();
    }
    for value in program.values() {
        writeln!(into, "{value:?}").unwrap();
    }
    for io in ["halt", "x", "y", "losses", "loss", "cross_entropy", "norm", "logits", "layers.1.aux"] {
        writeln!(into, "{io} {:?}", program.io(io)).unwrap();
    }
    let precision = without_fp8(without_adamw(format!("{:?}", program.precision())));
    // the pools of frozen weights and of scales are younger than the digests
    let pools = Pool::ALL.into_iter().map(|pool| (pool, program.layout().bytes(pool)));
    let younger = |pool| matches!(pool, Pool::Frozen | Pool::Scales);
    let sizes: Vec<usize> =
        pools.filter(|&(pool, bytes)| !younger(pool) || bytes > 0).map(|(_, bytes)| bytes).collect();
    writeln!(into, "Layout {{ sizes: {sizes:?} }} {precision}").unwrap();
}

/// Leaves out that AdamW updates a parameter: the digests are the same as when there was no other optimizer.
fn without_adamw(text: String) -> String {
    text.replace(", optimizer: AdamW", "").replace(", update: AdamW { skipped: 0 }", "")
}

/// Leaves out that a program is for one rank: the digests are the same as when there were no others.
fn without_ranks(text: String) -> String {
    text.replace(", slices: None", "").replace(", first: 0 })", " })")
}

/// Leaves out that products are not of 8-bit numbers, and that tokens have no rows of the cache of their own.
fn without_fp8(text: String) -> String {
    text.replace(", fp8: None", "").replace(", rows: None", "")
}

/// Leaves out that attention is only causal: the digests are the same as when there were no other masks.
fn without_masks(text: String) -> String {
    text.replace(", mask: AttentionMask { positions: None, window: None }", "")
        .replace(", positions: None", "")
        .replace(", window: None", "")
}

/// Leaves out what only Gemma 3 has otherwise: the digests are the same as when there was no Gemma 3.
fn without_gains(text: String) -> String {
    let plain = [", gain: Weight", ", q_scale: 1.0", ", gate: Silu", ", factor: 1.0"];
    plain.into_iter().fold(text, |text, usual| text.replace(usual, ""))
}

/// The digests of a model's training steps, one for each level of recomputation, its evaluation, its decoding and its scoring, each in
/// every precision.
fn digests(sizes: &str) -> Vec<String> {
    let config = ModelConfig::parse(sizes).unwrap();
    let precisions = [Precision::F32, Precision::BF16];
    let levels = [Recompute::None, Recompute::Gelu, Recompute::Full, Recompute::Experts];
    let made = |make: &dyn Fn(Precision) -> Program| {
        let mut text = String::new();
        precisions.iter().for_each(|&precision| dump(&make(precision), &mut text));
        Sha256::digest(text).iter().take(8).map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let training =
        levels.iter().map(|&level| made(&|precision| config.training((2, 7), level, precision).unwrap()));
    let evaluation = made(&|precision| config.evaluation((3, 5), precision).unwrap());
    let scoring = made(&|precision| config.scoring((3, 5), precision).unwrap());
    let decoding = made(&|precision| config.decoding(2, precision).unwrap());
    training.chain([evaluation, decoding, scoring]).collect()
}

/// Of a GPT-2, a mixture of experts and a Llama: training at the four levels of recomputation, evaluation, decoding, scoring.
const EXPECTED: [[&str; 7]; 3] = [
    [
        "cf38a0d9b55aebbd",
        "33adec3be7e65c8c",
        "feceb0ba55f4438d",
        "feceb0ba55f4438d",
        "143ae7b9e08a12f1",
        "33df51676b7c33dc",
        "5f4241c8f2e6aea5",
    ],
    [
        "c262d52b6e0be164",
        "6d5f8878e832c19f",
        "3cc817fd2034de8c",
        "66e8291e113b375b",
        "1bb33b9270a9dcd4",
        "4a78e7a7d6d36764",
        "62e4f28d95549e9b",
    ],
    [
        "6e23e007178d98ee",
        "72c874e4b90afe4a",
        "04b2f8ebdb54e06a",
        "04b2f8ebdb54e06a",
        "3442df7a045d2e9b",
        "ac4f9226ae0cb7d1",
        "c76cca99528bef92",
    ],
];

#[test]
fn programs_are_the_same_op_by_op() {
    let experts =
        "hidden=24,layers=2,heads=6,kv_heads=3,head_dim=8,experts=5,top_k=2,ffn=20,vocab=99,context=16";
    let llama = "hidden=24,layers=3,heads=4,ffn=37,vocab=203,context=19,rope_alpha=2";
    let made = ["n_layer=3,n_head=5,n_embd=40,vocab_size=300,max_seq_len=16", experts, llama].map(digests);
    assert_eq!(made, EXPECTED);
}

/// An engine computes a norm inside the layer after it while other parts of that layer are already written.
#[test]
fn a_layer_does_not_write_over_what_the_norm_before_it_reads() {
    let sizes = "n_layer=3,n_head=5,n_embd=40,vocab_size=300,max_seq_len=16";
    let program = ModelConfig::parse(sizes).unwrap().decoding(1, Precision::BF16).unwrap();
    let mut pairs = 0;
    for pair in program.nodes().windows(2) {
        if let (Op::ResidualLayerNormFwd(norm), Op::LinearFwd(_)) = (&pair[0].op, &pair[1].op) {
            pairs += 1;
            let mut written = pair[0].op.writes().chain(pair[1].op.writes());
            assert!(written.all(|to| !norm.a.overlaps(&to) && !norm.b.overlaps(&to)), "{pair:?}");
        }
    }
    assert_eq!(pairs, 2 * 3);
}
