//! Sequences that are written together are, to the bit, what each is when written alone.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use crate::small;
use ironhorse::core::{Operands, Pool};
use ironhorse::cpu::gemm::multiplies_bf16;
use ironhorse::cpu::{CpuEngine, CpuSettings};
use ironhorse::train::generate::sample::{Sampler, SamplerScratch};
use ironhorse::train::generate::{Decoder, End, Event, Job, Likely, Request, Wants, generate};
use ironhorse::train::model::ModelConfig;
use ironhorse::train::session::{CacheToken, Serving, Session, SessionSpec, TokenScores};
use std::collections::{HashMap, HashSet};

const CONTEXT: usize = 90;
const SIZES: [&str; 4] = [
    "n_layer=2,n_head=2,n_embd=16,vocab_size=131,max_seq_len=90",
    "kind=qwen3,hidden=16,layers=2,heads=2,kv_heads=1,head_dim=6,ffn=20,vocab=131,context=90",
    "kind=gemma3_text,hidden=16,layers=3,heads=2,kv_heads=1,head_dim=6,ffn=20,vocab=131,context=90,window=5,\
     window_every=2,rope_local=50,query_scalar=9,tied=true",
    "hidden=16,layers=2,heads=2,kv_heads=1,experts=4,top_k=2,ffn=20,vocab=131,context=90",
];

/// Sizes whose weights are kept in bf16 where products round to it and the machine multiplies it.
const ROUNDED_SIZES: [&str; 3] = [
    "n_layer=2,n_head=2,n_embd=32,vocab_size=131,max_seq_len=90",
    "kind=qwen3,hidden=64,layers=2,heads=2,kv_heads=1,head_dim=16,ffn=96,vocab=131,context=90,tied=true",
    "hidden=32,layers=2,heads=2,kv_heads=1,experts=4,top_k=2,ffn=32,vocab=131,context=90",
];

fn session(sizes: &str, threads: usize, spec: SessionSpec) -> Session {
    rounding(sizes, CpuSettings::from(threads), spec)
}

fn rounding(sizes: &str, settings: CpuSettings, spec: SessionSpec) -> Session {
    small::session(Box::new(CpuEngine::with(settings)), ModelConfig::parse(sizes).unwrap(), &spec, 3)
}

fn served(sizes: &str, sequences: usize, tokens: usize) -> Session {
    let serving = Serving { sequences, context: None, tokens, all_logits: true };
    let mut session = session(sizes, 2, SessionSpec { serving: Some(serving), ..SessionSpec::default() });
    session.settle().unwrap();
    session
}

/// Requests of different lengths, samplers and ends.
fn jobs() -> Vec<Job> {
    let job = |number: usize| {
        let length = [1, 70, 3, 17, 33, 8, 64, 65][number % 8];
        Job {
            prompt: (0..length).map(|i| ((i * 37 + number * 13 + 11) % 131) as u32).collect(),
            vocab: 129,
            tokens: [9, 4, 20, 1, 13, 0, 6, 30][number % 8],
            context: None,
            stop: vec![(number * 31 % 129) as u32],
            sampler: match number % 3 {
                0 => Sampler::greedy(),
                _ => Sampler { temperature: 1.1, top_k: Some(40), top_p: Some(0.95), seed: number as u64 },
            },
            slides: false,
            wants: Wants::default(),
        }
    };
    (0..16).map(job).collect()
}

/// What a decoder writes for all of them, each joining as soon as there is room.
fn together(decoder: &mut Decoder<'_>, jobs: &[Job]) -> Vec<(Vec<u32>, End)> {
    let (mut waiting, mut ids) = (jobs.iter().enumerate(), HashMap::new());
    let mut written: Vec<(Vec<u32>, Option<End>)> = vec![(Vec::new(), None); jobs.len()];
    loop {
        while decoder.has_room() {
            let Some((number, job)) = waiting.next() else { break };
            ids.insert(decoder.join(job.clone()).unwrap(), number);
        }
        if decoder.is_empty() {
            return written.into_iter().map(|(tokens, end)| (tokens, end.unwrap())).collect();
        }
        let step = decoder.step(|id, event| {
            let (tokens, end) = &mut written[ids[&id]];
            assert!(end.is_none(), "something came after the end");
            match event {
                Event::Token(new) => tokens.push(new.token),
                Event::End(why) => *end = Some(why),
                Event::Prompt(_) => panic!("nobody asked for it"),
            }
            Ok(())
        });
        step.unwrap();
    }
}

#[test]
fn what_is_written_does_not_depend_on_who_else_is_served() {
    for sizes in SIZES {
        let jobs = jobs();
        let mut alone = session(sizes, 1, SessionSpec { decode: Some(1), ..SessionSpec::default() });
        let want: Vec<Vec<u32>> = jobs
            .iter()
            .map(|job| {
                let Job { prompt, vocab, tokens, context, stop, sampler, .. } = job;
                let request = Request {
                    prompt,
                    vocab: *vocab,
                    tokens: (*tokens).min(CONTEXT + 1 - prompt.len()),
                    context: *context,
                    stop,
                    sampler: *sampler,
                };
                generate(&mut alone, &request, |_| Ok(())).unwrap()
            })
            .collect();
        assert!(want.iter().any(|tokens| tokens.len() > 5));
        for (sequences, tokens) in [(1, 64), (3, 7), (5, 5), (16, 64), (16, 200)] {
            let mut session = served(sizes, sequences, tokens);
            session.warm_up().unwrap();
            let mut decoder = Decoder::new(&mut session).unwrap();
            let got = together(&mut decoder, &jobs);
            for ((number, (got, end)), want) in got.iter().enumerate().zip(&want) {
                assert_eq!(got, want, "{sizes}: job {number} among {sequences} rows, {tokens} tokens a step");
                let full = jobs[number].prompt.len() + got.len() > CONTEXT;
                let whole = got.len() == jobs[number].tokens || full;
                assert_eq!(*end, if whole { End::Length } else { End::Stop }, "job {number}");
            }
        }
    }
}

/// Products that round to bf16: what is written still does not depend on the others, and is near to what f32 gives.
#[test]
fn rounded_weights_serve_each_as_if_alone() {
    for sizes in ROUNDED_SIZES {
        let jobs = jobs();
        let serve = |threads: usize, operands: Operands, sequences: usize, tokens: usize| {
            let serving = Serving { sequences, context: None, tokens, all_logits: true };
            let spec = SessionSpec { serving: Some(serving), ..SessionSpec::default() };
            let mut session = rounding(sizes, CpuSettings { threads, operands }, spec);
            session.settle().unwrap();
            let tokens =
                [0, 1, 2].map(|position| CacheToken { row: 0, position, token: 9 * position as u32 + 5 });
            let (fed, mut logits) = (session.feed_rows(&tokens, &[2]).unwrap(), Vec::new());
            session.row_logits(fed, fed.row(2, 0), &mut logits).unwrap();
            let written = together(&mut Decoder::new(&mut session).unwrap(), &jobs);
            (logits, written)
        };
        let (logits, want) = serve(1, Operands::Bf16, 1, 64);
        for (threads, sequences, tokens) in [(2, 3, 7), (1, 5, 5), (3, 16, 64), (2, 16, 200)] {
            let got = serve(threads, Operands::Bf16, sequences, tokens);
            assert_eq!(got.0, logits, "{sizes}");
            assert_eq!(got.1, want, "{sizes}: {sequences} rows, {tokens} tokens a step");
        }
        let (exact, _) = serve(2, Operands::F32, 1, 64);
        let most = exact.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let apart = exact.iter().zip(&logits).fold(0.0_f32, |apart, (a, b)| apart.max((a - b).abs()));
        assert!(apart < most / 32.0, "{sizes}: {apart} of {most}");
        assert_eq!(
            apart > 0.0,
            multiplies_bf16(),
            "{sizes}: rounded where the machine has instructions for it"
        );
    }
}

#[test]
fn the_engine_chooses_what_the_host_would() {
    let mut session = served(SIZES[0], 3, 8);
    let tokens = [0, 1, 2].map(|row| CacheToken { row, position: 0, token: 17 * row as u32 + 5 });
    let fed = session.feed_rows(&tokens, &[0, 1, 2]).unwrap();
    let (mut logits, mut scratch, mut seen) = (Vec::new(), SamplerScratch::default(), HashSet::new());
    let usual = Sampler { temperature: 0.7, ..Sampler::default() };
    for row in 0..3 {
        session.row_logits(fed, row, &mut logits).unwrap();
        for sampler in [
            Sampler::greedy(),
            usual,
            Sampler { top_k: Some(9), ..usual },
            Sampler { top_p: Some(0.8), ..usual },
            Sampler { top_k: Some(9), top_p: Some(0.8), ..usual },
        ] {
            for uniform in (0..50).map(|i| f64::from(i) / 50.0) {
                let want = sampler.pick_at(&logits[..129], uniform, &mut scratch).unwrap() as u32;
                let both = sampler.top_k.is_some() && sampler.top_p.is_some();
                let got = session.pick_row(fed, row, 129, &sampler.choice(uniform)).unwrap();
                assert_eq!(got, (!both).then_some(want), "row {row}, {sampler:?}, {uniform}");
                seen.insert(want);
            }
        }
    }
    assert!(seen.len() > 50, "{}", seen.len());
}

/// Whatever is asked for of settled weights, they are the same to whoever asks, and can be replaced.
#[test]
fn settled_weights_are_read_written_and_trained_as_others() {
    let both = SIZES.map(|sizes| (sizes, Operands::F32)).into_iter();
    for (sizes, operands) in both.chain(ROUNDED_SIZES.map(|sizes| (sizes, Operands::Bf16))) {
        let serving = Serving { sequences: 2, context: None, tokens: 8, all_logits: true };
        let spec = SessionSpec {
            serving: Some(serving),
            score: Some((8, 8)),
            train: Some((1, 8)),
            ..SessionSpec::default()
        };
        let spec = [spec, SessionSpec { train: None, ..spec }];
        let tokens =
            [0, 1, 2].map(|position| CacheToken { row: 1, position, token: 7 * position as u32 + 5 });
        let logits = |session: &mut Session| {
            let (fed, mut logits) = (session.feed_rows(&tokens, &[2]).unwrap(), Vec::new());
            session.row_logits(fed, fed.row(2, 0), &mut logits).unwrap();
            logits
        };
        for spec in spec {
            let [mut plain, mut settled] =
                [(); 2].map(|()| rounding(sizes, CpuSettings { threads: 2, operands }, spec));
            settled.settle().unwrap();
            let want = logits(&mut settled);
            // Weights that are trained have other uses, and stay as they are.
            let rounds = operands == Operands::Bf16 && multiplies_bf16() && spec.train.is_none();
            assert_eq!(logits(&mut plain) == want, !rounds, "{sizes}");
            let names: Vec<String> =
                settled.model().tensors().iter().map(|tensor| tensor.name.clone()).collect();
            for (at, name) in names.iter().enumerate() {
                let [mut a, mut b] = [Vec::new(), Vec::new()];
                plain.read_param(Pool::Params, name, &mut a).unwrap();
                settled.read_param(Pool::Params, name, &mut b).unwrap();
                assert_eq!(a, b, "{sizes}: {name}");
                if at == names.len() / 2 {
                    settled.settle().unwrap();
                }
            }
            settled.settle().unwrap();
            let scores = |session: &mut Session| {
                let (shape, mut scores) = (session.score_shapes().unwrap()[0], TokenScores::default());
                let ids: Vec<i32> = (0..shape.0 * shape.1).map(|i| (i * 37 % 129) as i32).collect();
                session.score(0, [&ids, &ids], &mut scores).unwrap();
                scores.losses
            };
            let (got, score) = (scores(&mut settled), scores(&mut plain));
            if rounds {
                // Weights that are not settled round where there are 32 rows, and sum in other parts.
                let near = got.iter().zip(&score).all(|(a, b)| (a - b).abs() < 2e-3 * b.abs());
                assert!(near, "{sizes}: {got:?} and {score:?}");
            } else {
                assert_eq!(got, score, "{sizes}");
            }
            assert_eq!(logits(&mut settled), want, "{sizes}");
            settled.init(4).unwrap();
            plain.init(4).unwrap();
            assert_eq!(logits(&mut settled), logits(&mut plain), "{sizes}");
            assert_ne!(logits(&mut settled), want, "{sizes}");
            settled.init(3).unwrap();
            settled.settle().unwrap();
            assert_eq!(logits(&mut settled), want, "{sizes}");
        }
    }
}

/// The prompt and what follows it go through different programs, which must agree on where the cache has its rows.
#[test]
fn room_for_fewer_positions_changes_nothing() {
    for sizes in SIZES {
        let prompt: Vec<u32> = (0..11).map(|i| i * 37 % 129).collect();
        let write = |decode_context: Option<usize>| {
            let mut session =
                session(sizes, 2, SessionSpec { decode: Some(1), decode_context, ..SessionSpec::default() });
            let request = Request {
                prompt: &prompt,
                vocab: 129,
                tokens: 20,
                context: None,
                stop: &[],
                sampler: Sampler::greedy(),
            };
            generate(&mut session, &request, |_| Ok(())).unwrap()
        };
        assert_eq!(write(Some(31)), write(None), "{sizes}");
    }
}

#[test]
fn one_that_leaves_makes_room_and_changes_nothing() {
    let (jobs, mut session) = (jobs(), served(SIZES[1], 3, 8));
    let mut decoder = Decoder::new(&mut session).unwrap();
    let want = together(&mut decoder, &jobs[2..5]);
    let left = decoder.join(Job { tokens: 50, stop: vec![], ..jobs[1].clone() }).unwrap();
    for _ in 0..3 {
        decoder.step(|_, _| Ok(())).unwrap();
    }
    let ids: Vec<u64> = jobs[2..4].iter().map(|job| decoder.join(job.clone()).unwrap()).collect();
    assert!(!decoder.has_room() && decoder.join(jobs[4].clone()).is_err());
    decoder.leave(left);
    decoder.leave(left);
    let mut ids = [ids, vec![decoder.join(jobs[4].clone()).unwrap()]].concat().into_iter();
    let mut got: HashMap<u64, Vec<u32>> = HashMap::new();
    while !decoder.is_empty() {
        let step = decoder.step(|id, event| {
            if let Event::Token(new) = event {
                got.entry(id).or_default().push(new.token);
            }
            Ok(())
        });
        step.unwrap();
    }
    for (want, _) in want {
        assert_eq!(got.remove(&ids.next().unwrap()).unwrap_or_default(), want);
    }
    assert!(got.is_empty());
}

#[test]
fn prompts_are_scored_as_evaluation_does() {
    for sizes in SIZES {
        let prompt: Vec<u32> = (0..70).map(|i| (i * 37 + 11) % 131).collect();
        let mut whole = session(sizes, 1, SessionSpec { score: Some((69, 69)), ..SessionSpec::default() });
        let [x, y] =
            [&prompt[..69], &prompt[1..]].map(|ids| ids.iter().map(|&id| id as i32).collect::<Vec<_>>());
        let at = whole.score_shapes().unwrap().iter().position(|&(b, t)| b * t >= 69 && t >= 69).unwrap();
        let (batch, seq) = whole.score_shapes().unwrap()[at];
        let pad = |mut ids: Vec<i32>| {
            ids.resize(batch * seq, 0);
            ids
        };
        let mut scores = TokenScores::default();
        whole.score(at, [&pad(x), &pad(y)], &mut scores).unwrap();
        let mut session = served(sizes, 3, 16);
        let mut decoder = Decoder::new(&mut session).unwrap();
        let wants = Wants { logprobs: Some(2), prompt: true };
        let scored =
            decoder.join(Job { prompt, tokens: 2, stop: vec![], wants, ..jobs()[2].clone() }).unwrap();
        // beside it others write, and join in between
        let mut others: Vec<Job> = jobs()[3..5].to_vec();
        let mut told: Vec<Likely> = Vec::new();
        let mut news = 0;
        while !decoder.is_empty() {
            let step = decoder.step(|id, event| {
                match event {
                    Event::Prompt(likely) if id == scored => told.push(likely),
                    Event::Token(new) if id == scored => {
                        let likely = new.likely.unwrap();
                        assert_eq!(likely.top.len(), 2);
                        news += 1;
                    }
                    Event::Prompt(_) => panic!("only one asked for it"),
                    _ => {}
                }
                Ok(())
            });
            step.unwrap();
            others.pop().map(|job| decoder.join(job).unwrap());
        }
        assert_eq!((told.len(), news), (69, 2));
        for (at, likely) in told.iter().enumerate() {
            let loss = f64::from(scores.losses[at]);
            assert!((likely.logprob + loss).abs() < 1e-5, "{sizes}: {at}: {} {loss}", likely.logprob);
            let gap = likely.top[0].1 - likely.top[1].1;
            assert!(gap < 1e-5 || likely.top[0].0 as i32 == scores.best[at], "{sizes}: {at}");
        }
    }
}

#[test]
fn what_cannot_be_written_is_refused() {
    let mut session = served(SIZES[0], 2, 8);
    let mut decoder = Decoder::new(&mut session).unwrap();
    let good = jobs()[2].clone();
    let refused = |decoder: &mut Decoder<'_>, job| decoder.join(job).unwrap_err().to_string();
    let empty = Job { prompt: vec![], ..good.clone() };
    assert!(refused(&mut decoder, empty).contains("the prompt is empty"));
    let unknown = Job { prompt: vec![131], ..good.clone() };
    assert!(refused(&mut decoder, unknown).contains("131"));
    let long = Job { prompt: vec![1; 91], ..good.clone() };
    assert!(refused(&mut decoder, long).contains("91 tokens"));
    let sampler = Sampler { temperature: f32::NAN, ..Sampler::default() };
    assert!(refused(&mut decoder, Job { sampler, ..good.clone() }).contains("temperature"));
    assert!(decoder.is_empty());
    let mut plain = self::session(SIZES[0], 1, SessionSpec { decode: Some(1), ..SessionSpec::default() });
    let mut decoder = Decoder::new(&mut plain).unwrap();
    let wants = Wants { logprobs: Some(0), prompt: true };
    assert!(refused(&mut decoder, Job { wants, ..good }).contains("logits of every token"));
    let none = SessionSpec { eval: Some((1, 1)), ..SessionSpec::default() };
    assert!(Decoder::new(&mut self::session(SIZES[0], 1, none)).is_err());
}
