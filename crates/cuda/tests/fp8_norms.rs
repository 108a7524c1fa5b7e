//! A norm or its backward, and the tensor in 8 bits made of its result, computed together on a real GPU: the same bits as one after the
//! other. `cargo test -p ironhorse-cuda --test fp8_norms -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

mod joined;

use ironhorse_core::op::{
    Accum, Act, Add, Gain, LayerNormBwd, PreAct, Quantize, ResidualLayerNormFwd, ResidualRmsNormFwd,
    RmsNormBwd,
};
use ironhorse_core::{
    Builder, DType, Engine, EngineExt, Fp8, Precision, Program, Scalars, Slot, bf16_to_f32, f32_to_bf16,
    power_of_two,
};
use ironhorse_cuda::CudaEngine;
use ironhorse_testkit::Rng;
use std::fmt::Debug;

/// What a case varies.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    width: usize,
    /// The gain of an RMS norm; `None` is a layer norm.
    rms: Option<Gain>,
    /// The residual replaces `a`.
    in_place: bool,
    /// Another op reads the norm's result too.
    read: bool,
    /// The largest element of earlier steps.
    amax: f32,
}

/// A norm, its result in 8 bits and perhaps another use of it; also their inputs and their outputs.
fn program(case: Case) -> (Program, Vec<Slot>, Vec<Slot>) {
    let Case { rows, width, rms, in_place, read, .. } = case;
    let mut builder = Builder::with_precision(Precision::BF16);
    let [weight, bias] = ["norm.w", "norm.b"].map(|name| builder.param(name, [width], false));
    let [a, b, out] = ["a", "b", "out"].map(|name| builder.io(name, [rows, 1, width], DType::BF16));
    let residual = if in_place { a } else { builder.io("residual", [rows, 1, width], DType::BF16) };
    let [mean, rstd] = ["mean", "rstd"].map(|name| builder.io(name, [rows, 1], DType::F32));
    let format = Fp8::E4M3;
    let by_rows = builder.io("q", [rows, width], DType::F8(format));
    let by_columns = builder.io("q_t", [width, rows], DType::F8(format));
    let [inverse, amax, seen] = ["inverse", "amax", "seen"].map(|name| builder.io(name, [1], DType::F32));
    let twice = builder.io("twice", [rows, 1, width], DType::BF16);
    let mut outputs = vec![residual, rstd, by_rows, by_columns, inverse, seen];
    let eps = 1e-5;
    match rms {
        Some(gain) => {
            builder.push(ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps, gain }).unwrap()
        }
        None => {
            outputs.push(mean);
            builder
                .push(ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps })
                .unwrap();
        }
    }
    let quantize =
        Quantize { out_t: Some(by_columns), ..joined::quantize(out, by_rows, [inverse, amax, seen]) };
    builder.push(quantize).unwrap();
    if read {
        builder.push(Add { out: twice, a: out, b: out }).unwrap();
        outputs.extend([out, twice]);
    }
    (builder.finish().unwrap(), vec![weight, bias, a, b, amax, seen], outputs)
}

/// The bits of all outputs after running the ops, in one range or each by itself, and the names of the kernels of one range.
fn run(engine: &mut CudaEngine, case: Case, together: bool) -> (Vec<Vec<u32>>, Vec<String>) {
    let (program, inputs, outputs) = program(case);
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(7);
    let mut values: Vec<Vec<f32>> = inputs.iter().map(|slot| rng.uniforms(slot.numel(), -1.0, 1.0)).collect();
    values[4] = vec![case.amax];
    values[5] = vec![0.0];
    joined::set(engine, &outputs, f32::NAN);
    // The first run is eager, the second recorded, the third replayed.
    for _ in 0..3 {
        for (slot, values) in inputs.iter().zip(&values) {
            engine.write_f32(*slot, values).unwrap();
        }
        joined::run(engine, &program, together, &Scalars::default());
    }
    (joined::bits(engine, &outputs), joined::kernels(engine, &program))
}

#[test]
#[ignore = "needs a GPU"]
fn a_norm_that_is_quantised_on_the_way_has_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    for (rows, width, joined) in [
        (32, 768, true),
        (1024, 768, true),
        (96, 1600, true),
        (64, 2048, true),
        (48, 768, false),
        (64, 240, false),
    ] {
        for rms in [None, Some(Gain::Weight), Some(Gain::OnePlusWeight)] {
            for (in_place, read, amax) in [(false, false, 3.0), (true, false, 0.0), (false, true, 0.4)] {
                let case = Case { rows, width, rms, in_place, read, amax };
                let (together, names) = run(&mut engine, case, true);
                assert_eq!(together, run(&mut engine, case, false).0, "{case:?}");
                assert_eq!(names.len() == 1 + usize::from(read), joined, "{case:?} {names:?}");
            }
        }
    }
}

/// The backward of a norm, and its result in 8 bits.
#[derive(Clone, Copy, Debug)]
struct NormBwd {
    rows: usize,
    width: usize,
    /// The gain of an RMS norm; `None` is a layer norm.
    rms: Option<Gain>,
    accum_inp: Accum,
    /// How sums over rows are written, and their type.
    accum: Accum,
    sums: DType,
    /// The result is summed over rows for a bias.
    bias: bool,
    format: Fp8,
    amax: f32,
    /// Numbers that no step should meet, in some rows of the inputs.
    odd: &'static [f32],
}

const PLAIN: NormBwd = NormBwd {
    rows: 96,
    width: 768,
    rms: None,
    accum_inp: Accum::Add,
    accum: Accum::Write,
    sums: DType::F32,
    bias: true,
    format: Fp8::E5M2,
    amax: 2.0,
    odd: &[],
};
/// An RMS norm, which has no sums of its result.
const RMS: NormBwd = NormBwd { rms: Some(Gain::Weight), bias: false, ..PLAIN };

/// What a quantiser could be given, or could overwrite, in place of its own.
struct Others {
    inp: Slot,
    d_out: Slot,
    rstd: Slot,
    /// 16 bytes more than the result in 8 bits needs.
    spare: Slot,
}

/// Changes a quantiser of the result of a norm's backward.
type Change = fn(&mut Quantize, &Others);

/// A program, what it reads, and what it writes: tensors of which all bits are the same, and sums.
struct Ops {
    program: Program,
    given: Vec<(Slot, Vec<f32>)>,
    same: Vec<Slot>,
    sums: Vec<Slot>,
}

fn norm_bwd_ops(case: NormBwd, change: Change) -> Ops {
    let NormBwd { rows, width, rms, accum_inp, accum, format, .. } = case;
    let mut builder = Builder::with_precision(Precision::BF16);
    let [inp, d_out, d_inp] =
        ["inp", "d_out", "d_inp"].map(|name| builder.io(name, [rows, 1, width], DType::BF16));
    let weight = builder.io("weight", [width], DType::BF16);
    let [mean, rstd] = ["mean", "rstd"].map(|name| builder.io(name, [rows, 1], DType::F32));
    let [d_weight, d_shift, d_bias] =
        ["d_weight", "d_shift", "d_bias"].map(|name| builder.io(name, [width], case.sums));
    let q = builder.io("q", [rows, width], DType::F8(format));
    let q_t = builder.io("q_t", [width, rows], DType::F8(format));
    let spare = builder.io("spare", [rows * width + 16], DType::F8(format));
    let [inverse, amax, seen] = ["inverse", "amax", "seen"].map(|name| builder.io(name, [1], DType::F32));
    match rms {
        Some(gain) => {
            builder.push(RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum, gain })
        }
        None => builder.push(LayerNormBwd {
            d_inp,
            d_weight,
            d_bias: d_shift,
            d_out,
            inp,
            mean,
            rstd,
            weight,
            accum_inp,
            accum,
        }),
    }
    .unwrap();
    let plain = joined::quantize(d_inp, q, [inverse, amax, seen]);
    let d_bias = case.bias.then_some(d_bias);
    let mut quantize = Quantize { out_t: Some(q_t), d_bias, unknown: 6, accum, ..plain };
    change(&mut quantize, &Others { inp, d_out, rstd, spare });
    builder.push(quantize).unwrap();

    let mut rng = Rng::new(23);
    let sums = [Some(d_weight), rms.is_none().then_some(d_shift), d_bias];
    let sums: Vec<Slot> = sums.into_iter().flatten().collect();
    let mut given: Vec<(Slot, Vec<f32>)> = [inp, d_out, d_inp, weight, mean, rstd]
        .iter()
        .chain(sums.iter().filter(|_| accum == Accum::Add))
        .map(|slot| (*slot, rng.uniforms(slot.numel(), -1.0, 1.0)))
        .collect();
    let [(_, inp), (_, d_out), (_, d_inp), ..] = &mut given[..] else { unreachable!() };
    spoil(case, [inp, d_out, d_inp]);
    given.extend([(amax, vec![case.amax]), (seen, vec![0.0])]);
    let same = [Some(quantize.inp), quantize.out, quantize.out_t, Some(quantize.inverse), quantize.seen];
    Ops { program: builder.finish().unwrap(), given, same: same.into_iter().flatten().collect(), sums }
}

/// Puts odd numbers where they show: all of them in every fourth row of d_inp, to which a d_out of zeros adds nothing, one in each row behind
/// that of d_out, and one in each behind that of the input.
fn spoil(case: NormBwd, [inp, d_out, d_inp]: [&mut Vec<f32>; 3]) {
    let odd = case.odd;
    for row in (0..case.rows).filter(|_| !odd.is_empty()) {
        let start = row * case.width;
        let (one, at) = (odd[row / 4 % odd.len()], start + 11 * row % case.width);
        match row % 4 {
            0 => {
                d_out[start..start + case.width].fill(0.0);
                let old = d_inp[start..start + case.width].iter_mut();
                old.zip(odd.iter().cycle().skip(row / 4)).for_each(|(old, odd)| *old = *odd);
            }
            1 => d_out[at] = one,
            2 => inp[at] = one,
            _ => {}
        }
    }
}

/// What a run of [`Ops`] gives.
struct Results {
    /// The bits of the result in bf16 and in 8 bits, of its scale and of its largest element, as far as they are written.
    bits: Vec<Vec<u32>>,
    sums: Vec<f32>,
    names: Vec<String>,
}

fn norm_bwd(engine: &mut CudaEngine, case: NormBwd, change: Change, together: bool) -> Results {
    let Ops { program, given, same, sums } = norm_bwd_ops(case, change);
    engine.reserve(program.layout()).unwrap();
    joined::set(engine, same.iter().chain(&sums), f32::NAN);
    for _ in 0..3 {
        for (slot, values) in &given {
            engine.write_f32(*slot, values).unwrap();
        }
        joined::run(engine, &program, together, &Scalars::default());
    }
    let bits = joined::bits(engine, &same);
    let sums = joined::bits(engine, &sums).into_iter().flatten().map(f32::from_bits).collect();
    Results { bits, sums, names: joined::kernels(engine, &program) }
}

/// Fails unless a case gives finite results of the same bits together and apart, and sums of almost the same. Gives the results together.
fn check_norm_bwd(engine: &mut CudaEngine, case: NormBwd, change: Change, about: impl Debug) -> Results {
    let [together, apart] = [true, false].map(|together| norm_bwd(engine, case, change, together));
    joined::check_same(&together.bits, &apart.bits, &about);
    // of numbers of some units; in bf16 their last bit may differ
    let last = if case.sums == DType::BF16 { f32::powi(2.0, -7) } else { 0.0 };
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * case.rows as f32 + last * a.abs().max(b.abs());
    assert!(together.sums.len() >= case.width, "{about:?}");
    assert!(together.sums.iter().zip(&apart.sums).all(close), "{about:?}");
    together
}

fn is_joined(case: NormBwd, names: &[String]) -> bool {
    joined::has(names, if case.rms.is_some() { "rmsnorm_bwd_fp8" } else { "layernorm_bwd_fp8" })
}

#[test]
#[ignore = "needs a GPU"]
fn a_gradient_of_a_norm_that_is_quantised_on_the_way_has_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let shifted = Some(Gain::OnePlusWeight);
    for (case, takes) in [
        (PLAIN, true),
        // more chunks of rows than blocks, and one chunk
        (NormBwd { rows: 12_832, ..PLAIN }, true),
        (NormBwd { rows: 32, width: 1024, format: Fp8::E4M3, ..PLAIN }, true),
        (NormBwd { width: 256, accum_inp: Accum::Write, ..PLAIN }, true),
        (NormBwd { rows: 6432, width: 512, ..RMS }, true),
        (NormBwd { width: 1024, accum_inp: Accum::Write, amax: 0.0, ..RMS }, true),
        (NormBwd { amax: 1e-3, ..PLAIN }, true),
        // a layer norm without the sums of its result; weights' gradients of either type that are added to
        (NormBwd { bias: false, ..PLAIN }, true),
        (NormBwd { bias: false, accum: Accum::Add, ..PLAIN }, true),
        (NormBwd { accum: Accum::Add, ..PLAIN }, true),
        (NormBwd { sums: DType::BF16, ..PLAIN }, true),
        (NormBwd { sums: DType::BF16, accum: Accum::Add, ..PLAIN }, true),
        (NormBwd { sums: DType::BF16, accum: Accum::Add, ..RMS }, true),
        (NormBwd { rms: shifted, accum: Accum::Add, ..RMS }, true),
        (NormBwd { rms: shifted, width: 1024, format: Fp8::E4M3, sums: DType::BF16, ..RMS }, true),
        // rows that are no whole chunks, and widths that leave lanes without work
        (NormBwd { rows: 48, ..PLAIN }, false),
        (NormBwd { width: 1600, ..PLAIN }, false),
        (NormBwd { width: 784, ..PLAIN }, false),
    ] {
        let names = check_norm_bwd(&mut engine, case, |_, _| (), case).names;
        assert_eq!(is_joined(case, &names), takes && joined::is_hopper(), "{case:?} {names:?}");
    }
}

/// Numbers that are not finite; large ones, whose squares are not; and small ones.
const ODD: [f32; 12] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    3e38,
    -3e38,
    1e30,
    -1e26,
    -0.0,
    1e-40, // subnormal
    -1e-39,
    1e-30,
    -3e-34,
];

#[test]
#[ignore = "needs a GPU"]
fn odd_numbers_and_scales_in_a_gradient_of_a_norm_have_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let shifted = NormBwd { rms: Some(Gain::OnePlusWeight), format: Fp8::E4M3, ..RMS };
    let cases = [PLAIN, NormBwd { format: Fp8::E4M3, accum_inp: Accum::Write, ..PLAIN }, RMS, shifted];
    // exponents of scales: the largest and the smallest there are, and the one where nothing is known
    let scales =
        [(2f32.powi(-93), 100), (1e-35, 100), (1e-40, 100), (3e38, -100), (f32::INFINITY, 6), (f32::NAN, 6)];
    for odd in [&ODD[..], &ODD[3..], &ODD[7..]] {
        for (amax, exponent) in scales {
            for case in cases.map(|case| NormBwd { odd, amax, ..case }) {
                let nothing: Change = |_, _| ();
                let [together, apart] =
                    [true, false].map(|together| norm_bwd(&mut engine, case, nothing, together));
                // Sums in another order differ where an infinity meets another one.
                assert!(together.bits == apart.bits, "{case:?}");
                assert_eq!(is_joined(case, &together.names), joined::is_hopper(), "{case:?}");
                let [d_inp, _, _, inverse, _] = &together.bits[..] else { unreachable!() };
                assert_eq!(inverse[..], [power_of_two(-exponent).to_bits()], "{case:?}");
                let adds = case.accum_inp == Accum::Add;
                let missing = odd.iter().find(|odd| adds && !d_inp.iter().any(|bits| is_bf16(*bits, **odd)));
                assert_eq!(missing, None, "{case:?}: d_inp has no such number");
            }
        }
    }
}

/// Whether these are the bits of a number after rounding to bf16.
fn is_bf16(bits: u32, number: f32) -> bool {
    let [found, wanted] = [f32::from_bits(bits), bf16_to_f32(f32_to_bf16(number))];
    bits == wanted.to_bits() || found.is_nan() && wanted.is_nan()
}

#[test]
#[ignore = "needs a GPU"]
fn a_gradient_of_a_norm_is_quantised_by_itself_where_one_kernel_cannot() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let cases: [(&str, NormBwd, Change); 10] = [
        ("an RMS norm has no sums of its result", NormBwd { bias: true, ..RMS }, |_, _| ()),
        ("an activation", PLAIN, |op, _| op.act = Some(Act::Gelu)),
        ("the slope of an activation", PLAIN, |op, others| {
            op.pre = Some(PreAct { act: Act::Gelu, slot: others.inp });
        }),
        ("nobody asks for the largest element", PLAIN, |op, _| op.seen = None),
        ("rows alone", PLAIN, |op, _| op.out_t = None),
        ("columns alone", PLAIN, |op, _| op.out = None),
        ("rows overwrite what the norm reads", PLAIN, |op, others| op.out = over(op.out, others.d_out, 0)),
        ("columns overwrite it", PLAIN, |op, others| op.out_t = over(op.out_t, others.inp, 0)),
        ("the scale overwrites it", PLAIN, |op, others| {
            op.inverse = Slot { shape: op.inverse.shape, ..others.rstd };
        }),
        ("columns begin at half a vector", PLAIN, |op, others| op.out_t = over(op.out_t, others.spare, 8)),
    ];
    for (why, case, change) in cases {
        let names = check_norm_bwd(&mut engine, case, change, why).names;
        assert!(!is_joined(case, &names), "{why}: {names:?}");
        assert!(names.iter().any(|name| name.starts_with("quantize")), "{why}: {names:?}");
    }
}

/// The result in 8 bits where another tensor is, some bytes behind its beginning.
fn over(result: Option<Slot>, other: Slot, bytes: usize) -> Option<Slot> {
    result.map(|result| Slot { pool: other.pool, offset: other.offset + bytes, ..result })
}
