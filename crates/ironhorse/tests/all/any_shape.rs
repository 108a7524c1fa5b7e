//! Programs that are planned when they are first needed compute what those of a whole session compute.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use crate::small::{self, cpu};
use ironhorse::train::generate::sample::Sampler;
use ironhorse::train::generate::{Request, generate};
use ironhorse::train::model::ModelConfig;
use ironhorse::train::session::{Session, SessionSpec, TokenScores, Wanted};

const CONTEXT: usize = 40;
const SIZES: [&str; 3] = [
    "n_layer=2,n_head=2,n_embd=16,vocab_size=131,max_seq_len=40",
    "kind=qwen3,hidden=16,layers=2,heads=2,kv_heads=1,head_dim=6,ffn=20,vocab=131,context=40",
    "kind=gemma3_text,hidden=16,layers=3,heads=2,kv_heads=1,head_dim=6,ffn=20,vocab=131,context=40,window=5,\
     window_every=2,rope_local=50,query_scalar=9,tied=true",
];

fn session(sizes: &str, spec: SessionSpec) -> Session {
    small::session(cpu(), ModelConfig::parse(sizes).unwrap(), &spec, 3)
}

fn tokens(count: usize) -> Vec<i32> {
    (0..count).map(|i| ((i * 37 + 11) % 131) as i32).collect()
}

#[test]
fn logits_and_losses_are_those_of_other_programs() {
    let (shape, kept) = ((3, 12), 9);
    for sizes in SIZES {
        let mut lazy = session(sizes, SessionSpec { eval: Some((1, 1)), ..SessionSpec::default() });
        let x = tokens(shape.0 * shape.1);
        let mut logits = vec![0.0; shape.0 * kept * 131];
        assert!(lazy.logits_of(shape, &x, (kept, &mut logits)).is_err(), "not planned");
        let layout = lazy.plan(Wanted::Logits, shape).unwrap();
        lazy.reserve(&layout).unwrap();
        lazy.logits_of(shape, &x, (kept, &mut logits)).unwrap();
        assert!(lazy.logits_of(shape, &x, (shape.1 + 1, &mut logits)).is_err(), "more than there are");

        // token by token
        let mut whole = session(
            sizes,
            SessionSpec {
                decode: Some(1),
                score: Some((shape.1, shape.0 * shape.1)),
                ..SessionSpec::default()
            },
        );
        let mut row = Vec::new();
        for (sequence, logits) in x.chunks_exact(shape.1).zip(logits.chunks_exact(kept * 131)) {
            for (at, want) in logits.chunks_exact(131).enumerate() {
                whole.decode(&[sequence[at]], at, &mut row).unwrap();
                for (got, want) in row.iter().zip(want) {
                    assert!((got - want).abs() <= 1e-5, "{sizes}: {got} {want}");
                }
            }
        }

        let y: Vec<i32> = x.iter().map(|token| (token + 1) % 131).collect();
        let layout = lazy.plan(Wanted::Losses, shape).unwrap();
        lazy.reserve(&layout).unwrap();
        let (mut losses, mut scores) = (Vec::new(), TokenScores::default());
        lazy.losses_of(shape, [&x, &y], &mut losses).unwrap();
        let at = whole.score_shapes().unwrap().iter().position(|&found| found == shape).unwrap();
        whole.score(at, [&x, &y], &mut scores).unwrap();
        assert_eq!(losses, scores.losses, "the same ops on the same numbers");
        // memory that grew has kept the weights
        let before = logits.clone();
        lazy.logits_of(shape, &x, (kept, &mut logits)).unwrap();
        assert_eq!(logits, before);
    }
}

#[test]
fn a_short_cache_writes_what_a_long_one_writes() {
    for sizes in SIZES {
        let mut lazy = session(sizes, SessionSpec { eval: Some((1, 1)), ..SessionSpec::default() });
        let mut whole = session(sizes, SessionSpec { decode: Some(1), ..SessionSpec::default() });
        let mut held = Vec::new();
        for (count, positions) in [(4, 8), (2, 6), (20, 24), (60, CONTEXT)] {
            let layout = lazy.plan_decoding(positions).unwrap();
            held.push(layout.total());
            lazy.reserve(&layout).unwrap();
            let prompt: Vec<u32> = tokens(4).into_iter().map(|token| token as u32).collect();
            let request = Request {
                prompt: &prompt,
                vocab: 131,
                tokens: count,
                context: Some(CONTEXT),
                stop: &[],
                sampler: Sampler::greedy(),
            };
            let written = generate(&mut lazy, &request, |_| Ok(())).unwrap();
            assert_eq!(written, generate(&mut whole, &request, |_| Ok(())).unwrap(), "{sizes}");
            assert_eq!(written.len(), count);
        }
        assert_eq!(held[0], held[1], "what is planned is kept");
        assert!(held[0] < held[2] && held[2] < held[3], "{sizes}: a shorter cache takes less: {held:?}");
    }
}
