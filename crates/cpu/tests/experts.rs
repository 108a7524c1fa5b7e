//! A layer of experts, forward and backward: it gives the same bits for any number of threads, and allocates nothing
//! after the first run, whatever the routing.
#![allow(clippy::unwrap_used)]

use ironhorse_core::op::*;
use ironhorse_core::{Builder, DType, Engine, EngineExt, Operands, Pool, Program, Scalars, Slot};
use ironhorse_cpu::{CpuEngine, CpuSettings};

ironhorse_testkit::count_allocations!();

const N: usize = 420;
const F: usize = 220;
const E: usize = 6;
const K: usize = 3;
const R: usize = N * K;

/// Norm, rotation, router and experts; every op of the family once, with SwiGLU inside the product before it or as an op of its own. All
/// slots are io, so no memory is reused. The gate and what the experts give, and what is given values.
fn layer(act_inside: bool, c: usize) -> (Program, [Slot; 2], Vec<Slot>) {
    let mut b = Builder::new();
    let mut slots = Vec::new();
    let mut io = |b: &mut Builder, shape: &[usize], dtype| {
        let slot = match *shape {
            [n] => b.io(format!("{}", slots.len()), [n], dtype),
            [n, m] => b.io(format!("{}", slots.len()), [n, m], dtype),
            [n, m, l] => b.io(format!("{}", slots.len()), [n, m, l], dtype),
            _ => unreachable!(),
        };
        slots.push(slot);
        slot
    };
    let mut f32s = |b: &mut Builder, shape: &[usize]| io(b, shape, DType::F32);
    let x = f32s(&mut b, &[1, N, c]);
    let [y, res, inp, d_inp, d_x, out, d_out] = [(); 7].map(|()| f32s(&mut b, &[1, N, c]));
    let [norm, d_norm] = [(); 2].map(|()| f32s(&mut b, &[c]));
    let rstd = f32s(&mut b, &[N]);
    let [gate, d_gate] = [(); 2].map(|()| f32s(&mut b, &[E, c]));
    let [logits, probs, d_logits] = [(); 3].map(|()| f32s(&mut b, &[N, E]));
    let [weights, d_weights] = [(); 2].map(|()| f32s(&mut b, &[N, K]));
    let (load, aux, entropy) = (f32s(&mut b, &[E]), f32s(&mut b, &[1]), f32s(&mut b, &[1]));
    let [rows_in, rows, d_rows, d_rows_in] = [(); 4].map(|()| f32s(&mut b, &[R, c]));
    let (h, a, d_a) = (f32s(&mut b, &[R, 2 * F]), f32s(&mut b, &[R, F]), f32s(&mut b, &[R, F]));
    let d_h = h; // in place, as models have it
    let [w13, d_w13] = [(); 2].map(|()| f32s(&mut b, &[E, 2 * F, c]));
    let [w2, d_w2] = [(); 2].map(|()| f32s(&mut b, &[E, c, F]));
    let [experts, places] = [(); 2].map(|()| io(&mut b, &[N, K], DType::I32));
    let (order, offsets) = (io(&mut b, &[R], DType::I32), io(&mut b, &[E + 1], DType::I32));

    let (base, alpha) = (1e4, 8.0);
    let (scaling, back, at_position, positions) = (RopeScaling::None, false, false, None);
    let (heads, kv_heads, context) = (3, 1, N);
    let rope = Rope { qkv: y, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context };
    let (accum_inp, accum, eps, gain) = (Accum::Write, Accum::FirstWrites, 1e-5, Gain::Weight);
    let ops: Vec<Op> = vec![
        CopySlot { out: y, inp: x }.into(),
        rope.into(),
        Rope { qkv: y, back: true, ..rope }.into(),
        ResidualRmsNormFwd { residual: res, out: inp, rstd, a: x, b: y, weight: norm, eps, gain }.into(),
        RmsNormFwd { out: d_inp, rstd, inp: res, weight: norm, eps, gain }.into(),
        RmsNormApply { out: d_inp, inp: res, rstd, weight: norm, gain }.into(),
        LinearFwd { out: logits, pre: None, inp, weight: gate, bias: None }.into(),
        RouterFwd { probs, weights, experts, logits }.into(),
        RouteSort { order, places, offsets, experts }.into(),
        RouterLoad { load, aux, entropy: Some(entropy), probs, offsets, alpha: 0.01, accum }.into(),
        Permute { out: rows_in, inp, order }.into(),
        GroupedLinearFwd { out: h, act: act_inside.then_some(a), inp: rows_in, weight: w13, offsets }.into(),
        if act_inside {
            CopySlot { out: d_a, inp: a }.into()
        } else {
            SwigluFwd { out: a, inp: h, gate: Gate::Silu }.into()
        },
        GroupedLinearFwd { out: rows, act: None, inp: a, weight: w2, offsets }.into(),
        Combine { out, rows, places, weights }.into(),
        CopySlot { out: d_out, inp: out }.into(),
        CombineBwd { d_rows, d_weights, d_out, rows, places, weights }.into(),
        GroupedLinearBwdWeight { d_weight: d_w2, d_out: d_rows, inp: a, offsets, accum }.into(),
        GroupedLinearBwdInput { d_inp: d_a, d_out: d_rows, weight: w2, offsets }.into(),
        SwigluBwd { d_inp: d_h, act: None, d_out: d_a, inp: h, gate: Gate::Silu }.into(),
        GroupedLinearBwdWeight { d_weight: d_w13, d_out: d_h, inp: rows_in, offsets, accum }.into(),
        GroupedLinearBwdInput { d_inp: d_rows_in, d_out: d_h, weight: w13, offsets }.into(),
        RouterBwd { d_logits, d_weights, probs, weights, experts, load, alpha: 0.01 }.into(),
        LinearBwdWeight { d_weight: d_gate, d_bias: None, d_out: d_logits, inp, accum }.into(),
        LinearBwdInput { d_inp, d_out: d_logits, weight: gate, pre: None }.into(),
        PermuteBwd { d_inp, d_out: d_rows_in, places, accum: Accum::Add }.into(),
        RmsNormBwd {
            d_inp: d_x,
            d_weight: d_norm,
            d_out: d_inp,
            inp: res,
            rstd,
            weight: norm,
            accum_inp,
            accum,
            gain,
        }
        .into(),
    ];
    ops.into_iter().for_each(|op| b.push(op).unwrap());
    let given = vec![x, norm, gate, w13, w2];
    (b.finish().unwrap(), [gate, rows], given)
}

fn run(engine: &mut CpuEngine, program: &Program, micro_step: u32) {
    let scalars = Scalars { loss_scale: 1.0 / N as f32, micro_step, ..Scalars::default() };
    engine.run(program, 0..program.nodes().len(), &scalars).unwrap();
}

/// One test, because the counter belongs to the whole process.
#[test]
fn layers_of_experts() {
    let exact = check(Operands::F32, 80);
    // Of 60 columns the gradients of weights are summed in slices, where an expert has many rows.
    let rounded = check(Operands::Bf16, 80);
    check(Operands::Bf16, 60);
    let (exact, rounded) = (exact.iter(), rounded.iter());
    let far = exact.zip(rounded).filter(|(a, b)| (**a - **b).abs() > 1e-4 * a.abs()).count();
    assert!(far > N * 80, "experts do not round: {far} numbers differ");
}

/// Checks a layer of this width, and returns what the experts give.
fn check(operands: Operands, width: usize) -> Vec<f32> {
    let (program, [gate, rows], given) = layer(true, width);
    let (by_op, ..) = layer(false, width);
    let name = |threads: usize| format!("{operands:?}, {width} columns, {threads} threads");
    let bytes = program.layout().bytes(Pool::Io);
    let everything = Slot { pool: Pool::Io, offset: 0, shape: [bytes / 4].into(), dtype: DType::F32 };
    let values = |slot: Slot, seed: usize| -> Vec<f32> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 1000) as f32 / 500.0 - 1.0;
        (0..slot.numel()).map(value).collect()
    };
    let (mut first, mut result): (Option<Vec<u32>>, _) = (None, vec![0.0; rows.numel()]);
    for threads in [1, 2, 3, 8] {
        let mut engine = CpuEngine::with(CpuSettings { threads, operands });
        engine.reserve(program.layout()).unwrap();
        for (seed, &slot) in given.iter().enumerate() {
            engine.write_f32(slot, &values(slot, seed)).unwrap();
        }
        run(&mut engine, &program, 0);
        run(&mut engine, &program, 1);
        let mut all = vec![0.0; everything.numel()];
        engine.read_f32(everything, &mut all).unwrap();
        engine.read_f32(rows, &mut result).unwrap();
        let bits: Vec<u32> = all.iter().map(|x| x.to_bits()).collect();
        assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{}", name(threads));

        // Ops that the engine joins give the same bits one by one, wherever experts have few rows or many.
        for micro_step in [0, 1] {
            let scalars = Scalars { loss_scale: 1.0 / N as f32, micro_step, ..Scalars::default() };
            (0..by_op.nodes().len()).for_each(|i| engine.run(&by_op, i..i + 1, &scalars).unwrap());
        }
        engine.read_f32(everything, &mut all).unwrap();
        assert!(all.iter().map(|x| x.to_bits()).eq(bits), "{}, one op at a time", name(threads));

        // Different routing in each round; in the last, all tokens go to the same experts.
        let gates: Vec<Vec<f32>> =
            (0..4).map(|i| if i == 3 { vec![0.0; gate.numel()] } else { values(gate, 10 + i) }).collect();
        let fewest = (0..5).map(|_| {
            let before = allocations::count();
            for gates in &gates {
                engine.write_f32(gate, gates).unwrap();
                run(&mut engine, &program, 0);
            }
            allocations::count() - before
        });
        assert_eq!(fewest.min(), Some(0), "{}", name(threads));
    }
    result
}
