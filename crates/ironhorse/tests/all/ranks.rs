//! Ranks that share the micro-steps of a step compute what one computes, to the bit, whatever they keep.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use crate::odd_engine::Odd;
use crate::small::{self, bits};
use ironhorse::core::op::Op;
use ironhorse::core::ranks::{Turn, turns};
use ironhorse::core::{
    Communicator, Fp8, Fp8Products, Fp8Scales, Optimizer, Place, Pool, Precision, Scalars, Section, Shard,
    host_memory,
};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::{Lora, ModelConfig, Sums, Targets};
use ironhorse::train::session::{Batch, Session, SessionSpec};
use ironhorse_testkit::thread_ranks;
use std::sync::Arc;

const SHAPE: (usize, usize) = (1, 16);
const STEPS: u32 = 3;

#[derive(Clone, Copy)]
struct Job {
    config: ModelConfig,
    lora: Option<Lora>,
    optimizer: Optimizer,
    accumulate: u32,
    shard: Shard,
    /// Ranks of a machine.
    machine: usize,
    /// Pieces of a bucket; the usual bucket is larger than the models of these tests.
    bucket: usize,
    fp8: Option<Fp8Products>,
}

impl Job {
    fn of(model: &str) -> Self {
        let config = ModelConfig::parse(model).unwrap();
        let (optimizer, shard) = (Optimizer::AdamW, Shard::State);
        Self { config, lora: None, optimizer, accumulate: 4, shard, machine: 1, bucket: 1, fp8: None }
    }

    fn sums(&self, place: Place) -> Sums {
        let Self { shard, accumulate, machine, bucket, .. } = *self;
        Sums { place, shard, accumulate, machine, bucket }
    }
}

fn tokens(vocab: usize, micro_step: usize, step: u32) -> (Vec<i32>, Vec<i32>) {
    small::tokens(vocab, SHAPE.0 * SHAPE.1, u64::from(step) * 1000 + micro_step as u64)
}

/// What a run gives: losses and norms of its steps, and the whole state after the last.
#[derive(Clone, PartialEq)]
struct Outcome {
    results: Vec<[u32; 2]>,
    state: Vec<u8>,
}

fn session(job: Job, ranks: Arc<dyn Communicator>) -> Session {
    let place = ranks.place();
    let sums = Some(job.sums(place));
    let precision = Precision { fp8: job.fp8, ..Precision::F32.with_optimizer(job.optimizer) };
    let spec = SessionSpec { train: Some(SHAPE), lora: job.lora, sums, precision, ..SessionSpec::default() };
    let mut session = Session::new(Box::new(CpuEngine::new(1)), job.config, &spec).unwrap();
    session.join(ranks).unwrap();
    if job.lora.is_some() {
        session.init_base(1).unwrap();
    }
    session.init(2).unwrap();
    session
}

fn train(job: Job, session: &mut Session, steps: std::ops::Range<u32>) -> Vec<[u32; 2]> {
    let mut results = Vec::new();
    for step in steps {
        let count = SHAPE.0 * SHAPE.1 * job.accumulate as usize;
        let scalars = Scalars { grad_clip: 0.01, ..small::scalars(step + 1, count, 1e-2) };
        for number in session.begin_step(job.accumulate as usize) {
            let (x, y) = tokens(job.config.vocab_size(), number, step);
            let scalars = Scalars { micro_step: number as u32, ..scalars };
            session.step(Batch::plain(&x, &y), &scalars).unwrap();
        }
        let (loss, norm) = session.update(&scalars).unwrap();
        assert!(loss.is_finite() && norm > 0.01, "clipped: {loss} {norm}");
        results.push([loss.to_bits(), norm.to_bits()]);
    }
    results
}

fn state(session: &mut Session) -> Vec<u8> {
    let bytes: usize = session.state_slots().unwrap().iter().map(|slot| slot.bytes()).sum();
    let mut memory = host_memory(bytes).unwrap();
    session.snapshot(memory.as_mut()).unwrap();
    memory.bytes().to_vec()
}

/// The outcome of a world; every rank must have the same results and weights.
fn run(job: Job, world: usize) -> Outcome {
    let outcomes: Vec<(Outcome, Vec<u32>)> = std::thread::scope(|scope| {
        let rank = |ranks: Arc<dyn Communicator>| {
            scope.spawn(move || {
                let mut session = session(job, ranks);
                let results = train(job, &mut session, 0..STEPS);
                let weights = bits(&mut session, &[Pool::Params]).remove(0);
                (Outcome { results, state: state(&mut session) }, weights)
            })
        };
        let threads: Vec<_> = thread_ranks(world).into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (outcome, weights) in &outcomes[1..] {
        assert!(outcome.results == outcomes[0].0.results, "ranks disagree about loss and norm");
        assert!(*weights == outcomes[0].1, "ranks have other weights");
    }
    outcomes.into_iter().next().unwrap().0
}

fn check(job: Job, worlds: &[usize]) {
    let alone = run(job, 1);
    for &world in worlds {
        for shard in [Shard::None, Shard::State, Shard::Grads] {
            let muon = job.optimizer == Optimizer::Muon && shard != Shard::None;
            if muon || (shard == Shard::Grads && !world.is_power_of_two()) {
                continue;
            }
            // one bucket; several; machines that add up among themselves first
            let machines = (2..world).filter(|machine| world.is_multiple_of(*machine));
            for (bucket, machine) in
                [(0, 1), (1, 1), (2, 1)].into_iter().chain(machines.map(|machine| (1, machine)))
            {
                let found = run(Job { shard, bucket, machine, ..job }, world);
                let kind = job.config.kind();
                let what =
                    format!("{kind} of world {world}, {}, bucket {bucket}, machine {machine}", shard.name());
                assert_eq!(found.results, alone.results, "{what}");
                assert!(found.state == alone.state, "{what}: the state has other bits");
            }
        }
    }
}

const GPT2: &str = "n_layer=2,n_head=2,n_embd=80,vocab_size=203,context=16";
const LLAMA: &str = "hidden=96,layers=2,heads=4,kv_heads=2,ffn=150,vocab=203,context=16";
const MIXTURE: &str =
    "hidden=64,layers=2,heads=4,experts=5,top_k=2,ffn=72,vocab=203,context=16,aux_alpha=0.1";

#[test]
fn a_gpt2_is_the_same_in_any_world() {
    check(Job::of(GPT2), &[2, 4]);
}

/// A micro-step scales its tensors in 8 bits by itself, so it does not matter who computes it.
#[test]
fn products_of_8_bits_are_the_same_in_any_world() {
    let fp8 =
        Some(Fp8Products { head: true, experts: true, gradients: Fp8::E5M2, scales: Fp8Scales::Delayed });
    let job = Job { fp8, ..Job::of(GPT2) };
    check(job, &[2, 4]);
    assert_ne!(run(job, 1).results, run(Job { fp8: None, ..job }, 1).results);
}

#[test]
fn worlds_that_are_no_powers_of_two_are_the_same() {
    check(Job { accumulate: 6, ..Job::of(GPT2) }, &[2, 3, 6]);
}

/// Eight ranks in machines of two and of four, and a machine whose micro-steps are no node of the tree.
#[test]
fn machines_that_add_up_first_are_the_same() {
    check(Job { accumulate: 8, ..Job::of(GPT2) }, &[8]);
    check(Job { accumulate: 12, ..Job::of(GPT2) }, &[4]);
}

#[test]
fn a_llama_is_the_same_in_any_world() {
    check(Job::of(LLAMA), &[2, 4]);
}

#[test]
fn a_mixture_is_the_same_in_any_world() {
    check(Job::of(MIXTURE), &[2, 4]);
}

#[test]
fn adapters_are_the_same_in_any_world() {
    let lora = Some(Lora { rank: 40, alpha: 16.0, targets: Targets::parse("q,k,v,o,gate,up,down").unwrap() });
    check(Job { lora, ..Job::of(LLAMA) }, &[2, 4]);
}

#[test]
fn muon_is_the_same_in_any_world() {
    check(Job { optimizer: Optimizer::Muon, ..Job::of(GPT2) }, &[2, 4]);
}

#[test]
fn a_rank_keeps_only_its_part() {
    let job = Job::of(GPT2);
    let layout = |world, shard| {
        let sums = Some(Job { shard, ..job }.sums(Place { rank: 0, world }));
        SessionSpec { train: Some(SHAPE), sums, ..SessionSpec::default() }.layout(&job.config).unwrap()
    };
    let whole = layout(2, Shard::None);
    for (shard, pool) in
        [(Shard::State, Pool::Moment1), (Shard::State, Pool::Moment2), (Shard::Grads, Pool::Grads)]
    {
        let part = layout(2, shard);
        let (has, all) = (part.bytes(pool), whole.bytes(pool));
        assert!(has < all * 4 / 5, "{}: {} of {all} bytes of {}", shard.name(), has, pool.name());
    }
}

/// What ranks write of a checkpoint: every element of every pool is written by exactly one, who has it.
#[test]
fn every_element_of_a_checkpoint_is_written_by_one_rank() {
    for (optimizer, precision) in [
        (Optimizer::AdamW, Precision::F32),
        (Optimizer::AdamW, Precision::BF16),
        (Optimizer::AdamW, Precision::BF16.with_residual().with_bf16_moments()),
        (Optimizer::Muon, Precision::F32),
    ] {
        for (world, shard, machine) in [
            (1, Shard::State, 1),
            (2, Shard::None, 1),
            (3, Shard::State, 1),
            (4, Shard::Grads, 1),
            (8, Shard::State, 2),
        ] {
            let job = Job { accumulate: 24, shard, machine, optimizer, ..Job::of(GPT2) };
            if optimizer == Optimizer::Muon && shard != Shard::None {
                continue;
            }
            let mut written: Vec<(Pool, usize, std::ops::Range<usize>)> = Vec::new();
            let mut table = Vec::new();
            for rank in 0..world {
                let sums = Some(job.sums(Place { rank, world }));
                let precision = precision.with_optimizer(optimizer);
                let spec = SessionSpec { train: Some(SHAPE), sums, precision, ..SessionSpec::default() };
                let session = Session::new(Box::new(CpuEngine::new(1)), job.config, &spec).unwrap();
                table = session.train_program().unwrap().params().to_vec();
                for (share, slot) in session.shares().unwrap() {
                    assert_eq!(slot.numel(), share.elements.len());
                    let layout = session.train_program().unwrap().layout().bytes(share.pool);
                    assert!(slot.pool == share.pool && slot.end() <= layout, "rank {rank} has no {slot:?}");
                    written.push((share.pool, share.index, share.elements));
                }
            }
            let mut pools = vec![Pool::Params, Pool::Moment1, Pool::Moment2];
            pools.extend(precision.has_master().then_some(Pool::Master));
            for pool in pools {
                for (index, param) in table.iter().enumerate() {
                    let mut ranges: Vec<_> = written
                        .iter()
                        .filter(|one| (one.0, one.1) == (pool, index))
                        .map(|one| one.2.clone())
                        .collect();
                    ranges.sort_by_key(|range| range.start);
                    let end = ranges.iter().fold(0, |end, range| {
                        assert_eq!(range.start, end, "{pool:?} {} of world {world}", param.name);
                        range.end
                    });
                    assert_eq!(end, param.in_pool(pool).numel(), "{pool:?} {} of world {world}", param.name);
                }
            }
        }
    }
}

/// Gradients are exchanged while the backward computes others: as soon as they are complete, into memory that nothing else uses.
#[test]
fn buckets_are_exchanged_beside_the_backward() {
    let job = Job { accumulate: 4, ..Job::of("n_layer=4,n_head=2,n_embd=128,vocab_size=203,context=16") };
    for (shard, machine) in [(Shard::None, 1), (Shard::State, 1), (Shard::State, 2), (Shard::Grads, 1)] {
        let place = Place { rank: 1, world: 4 };
        let sums = Job { shard, machine, ..job }.sums(place);
        let spec = SessionSpec { train: Some(SHAPE), sums: Some(sums), ..SessionSpec::default() };
        let session = Session::new(Box::new(CpuEngine::new(1)), job.config, &spec).unwrap();
        let program = session.train_program().unwrap();
        let after = sums.after_each(4, program.flat(Pool::Grads).numel());
        let ranges: Vec<_> = after
            .last()
            .unwrap()
            .beside
            .iter()
            .map(|origin| program.range_at(Section::Sum, origin))
            .collect();
        let backward = program.range(Section::Backward);
        let order = turns(program.nodes(), program.micro_step(), &ranges);
        let is_exchange = |turn: &Turn| matches!(program.nodes()[turn.op].op, Op::Exchange(_));
        let exchanges: Vec<usize> = (0..order.len()).filter(|&at| is_exchange(&order[at])).collect();
        // how many ops of the backward come after the exchange has begun
        let behind: Vec<usize> = exchanges
            .iter()
            .map(|&at| order[at..].iter().filter(|turn| backward.contains(&turn.op)).count())
            .collect();
        let (first, beside) = (behind[0], behind.iter().filter(|&&count| count > 0).count());
        let what = format!("{} machine {machine}: {behind:?} of {}", shard.name(), backward.len());
        assert!(exchanges.len() >= 12 && first > backward.len() / 2, "{what}");
        assert!(beside > behind.len() / 2, "{what}");
    }
}

#[test]
fn what_ranks_cannot_share_is_refused() {
    let job = Job::of(GPT2);
    let refused = |world, shard, optimizer| {
        let sums = Some(Job { shard, ..job }.sums(Place { rank: 0, world }));
        let precision = Precision::F32.with_optimizer(optimizer);
        let spec = SessionSpec { train: Some(SHAPE), sums, precision, ..SessionSpec::default() };
        spec.layout(&job.config).unwrap_err().to_string()
    };
    let text = refused(3, Shard::State, Optimizer::AdamW);
    assert!(text.contains("--accumulate, is 4, expected a multiple of the 3 ranks"), "{text}");
    let text = refused(2, Shard::State, Optimizer::Muon);
    assert!(text.contains("use --shard none"), "{text}");
}

/// What `verify --ranks` compares: the gradients and weights of all slices, in the order of the pool.
#[test]
fn gathered_gradients_and_weights_are_those_of_one_rank() {
    // four pieces, so that every rank of two has some
    let job = Job::of("n_layer=1,n_head=2,n_embd=128,vocab_size=256,max_seq_len=16");
    let gathered = |world: usize, shard: Shard| -> [Vec<u32>; 2] {
        let job = Job { shard, ..job };
        let all: Vec<Option<[Vec<u32>; 2]>> = std::thread::scope(|scope| {
            let rank = |ranks: Arc<dyn Communicator>| {
                scope.spawn(move || {
                    let mut session = session(job, ranks);
                    train(job, &mut session, 0..1);
                    let all = [session.gather_gradients().unwrap(), session.gather_weights().unwrap()];
                    let bits = |values: Option<Vec<f32>>| -> Option<Vec<u32>> {
                        Some(values?.iter().map(|value| value.to_bits()).collect())
                    };
                    let [gradients, weights] = all.map(bits);
                    Some([gradients?, weights?])
                })
            };
            let threads: Vec<_> = thread_ranks(world).into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all[1..].iter().all(Option::is_none), "only rank 0 has them");
        all[0].clone().unwrap()
    };
    let alone = gathered(1, Shard::State);
    assert!(alone[0].len() > 3 << 16 && alone[0].iter().filter(|&&bits| bits != 0).count() > 1 << 16);
    for shard in [Shard::None, Shard::State, Shard::Grads] {
        assert!(gathered(2, shard) == alone, "{shard:?}");
    }
}

/// Products of the update (Muon's) and of validation are computed by all ranks, with the algorithms of one of them.
#[test]
fn all_ranks_compute_with_the_algorithms_of_the_leader() {
    let job = Job { optimizer: Optimizer::Muon, shard: Shard::None, ..Job::of(GPT2) };
    let chosen: Vec<Vec<(String, String)>> = std::thread::scope(|scope| {
        let rank = |ranks: Arc<dyn Communicator>| {
            scope.spawn(move || {
                let place = ranks.place();
                let spec = SessionSpec {
                    train: Some(SHAPE),
                    eval: Some((2, 8)),
                    sums: Some(job.sums(place)),
                    precision: Precision::F32.with_optimizer(job.optimizer),
                    ..SessionSpec::default()
                };
                let engine = Odd::new(place.rank);
                let mut session = Session::new(Box::new(engine), job.config, &spec).unwrap();
                session.join(ranks).unwrap();
                let before = session.engine().choices().len();
                session.init(2).unwrap();
                train(job, &mut session, 0..1);
                let (x, y) = tokens(job.config.vocab_size(), 0, 0);
                session.evaluate_batch(Batch::plain(&x, &y)).unwrap();
                let after = session.engine().choices();
                assert!(before > 10 && before == after.len(), "{before} of {} were shared", after.len());
                after
            })
        };
        let threads: Vec<_> = thread_ranks(2).into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(chosen[0].iter().all(|(_, by)| by == "0"));
    assert_eq!(chosen[0], chosen[1]);
}
