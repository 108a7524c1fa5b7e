//! Cases of 8-bit numbers and their products.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::op::{Accum, Act, Amax, MatmulFp8, PreAct, Quantize, ScaleUpdate};
use ironhorse_core::{Fp8, Precision};

/// The ops of products of 8-bit numbers: GPUs before compute capability 8.9 do not have them.
pub const FP8_OPS: &[&str] =
    &["amax", "quantize", "matmul_fp8", "scale_update", "grouped_fp8", "grouped_fp8_bwd_weight"];

/// The ops whose cases are here.
pub(super) const OWN: &[&str] = &["amax", "quantize", "matmul_fp8", "scale_update"];

/// (rows, columns) of tensors
const SHAPES: [[usize; 2]; 7] = [[16, 16], [48, 32], [128, 128], [144, 272], [272, 144], [0, 32], [1024, 48]];
/// (M, N, K)
const PRODUCTS: [[usize; 3]; 7] = [
    [16, 16, 16],
    [48, 80, 32],
    [128, 256, 128],
    [144, 272, 400],
    [16, 3072, 64],
    [64, 48, 2048],
    [256, 768, 768],
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(amax(p, shape, None));
        for format in Fp8::ALL {
            let forms = FORMS.into_iter().chain(Act::ALL.iter().flat_map(|&act| forms_of(act)));
            cases.extend(forms.map(|form| quantize(p, shape, format, form)));
        }
    }
    cases.extend([amax(p, [48, 32], Some(f32::NAN)), amax(p, [48, 32], Some(f32::NEG_INFINITY))]);
    for format in Fp8::ALL {
        for (name, known) in
            [("none", 0.0), ("infinite", f32::INFINITY), ("too small", 0.25), ("tiny", 1e-30)]
        {
            cases.push(quantize(p, [48, 32], format, Form { amax: (name, Some(known)), ..PLAIN }));
        }
        cases.push(quantize(p, [48, 32], format, Form { wild: true, seen: Some(1.0), ..PLAIN }));
    }
    // scales are f32 whatever the rest is, so they have no cases of their own in bf16, where nothing depends on it
    if p == Precision::F32 {
        cases.extend([1, 9, 33, 1000].map(|n| scale_update(p, n)));
    }
    for (i, shape) in PRODUCTS.into_iter().enumerate() {
        for formats in [[Fp8::E4M3; 2], [Fp8::E4M3, Fp8::E5M2], [Fp8::E5M2, Fp8::E4M3]] {
            cases.push(matmul(p, shape, formats, (i % 2 == 0, false), (Accum::Write, 0), true));
            cases.extend(ACCUMS.map(|accum| matmul(p, shape, formats, (false, true), accum, false)));
        }
    }
    cases
}

/// Scales that are new, that grow, shrink, stay, and of steps with infinity and NaN; `n` of them.
fn scale_update(p: Precision, n: usize) -> Case {
    let mut kit = Kit::with_precision(p, format!("{n} scales"));
    let scales = kit.stat([n, 2]);
    let pairs = [
        [0.0, 3.5],
        [1.0, 2.0],
        [3.1, 0.7],
        [3.1, 3.0],
        [0.3, 0.0],
        [0.0, 0.0],
        [1.7, f32::INFINITY],
        [1.9, f32::NAN],
        [1e-40, 1e-42],
    ];
    kit.set(scales, pairs.into_iter().cycle().take(n).flatten().collect());
    kit.exact = true;
    kit.finish(ScaleUpdate { scales })
}

/// What is quantised, and what else is made of it.
#[derive(Clone, Copy)]
struct Form {
    act: Option<Act>,
    back: bool,
    rows: bool,
    columns: bool,
    d_bias: Option<(Accum, u32)>,
    margin: i32,
    /// What the largest element so far was, where the op is to find a larger one.
    seen: Option<f32>,
    /// What a case's name says about the largest element, and the number that replaces it.
    amax: (&'static str, Option<f32>),
    /// Whether there are infinity and NaN among the elements.
    wild: bool,
}

const PLAIN: Form = Form {
    act: None,
    back: false,
    rows: true,
    columns: true,
    d_bias: None,
    margin: 0,
    seen: None,
    amax: ("known", None),
    wild: false,
};
const FORMS: [Form; 5] = [
    PLAIN,
    Form { columns: false, margin: 1, seen: Some(0.0), ..PLAIN },
    Form { rows: false, margin: -3, seen: Some(2.0), ..PLAIN },
    Form { d_bias: Some((Accum::Write, 1)), seen: Some(4.0), ..PLAIN },
    Form { d_bias: Some((Accum::FirstWrites, 1)), ..PLAIN },
];

/// Forward and backward of an activation.
fn forms_of(act: Act) -> [Form; 4] {
    let form = Form { act: Some(act), margin: if act.is_bounded() { 0 } else { 4 }, ..PLAIN };
    let back = Form { back: true, d_bias: Some((Accum::FirstWrites, 0)), margin: form.margin.max(1), ..form };
    [form, Form { seen: Some(0.5), ..form }, back, Form { d_bias: Some((Accum::Add, 0)), ..back }]
}

fn amax(p: Precision, [rows, cols]: [usize; 2], odd: Option<f32>) -> Case {
    let mut kit = Kit::with_precision(p, format!("{rows}x{cols}, with {odd:?}"));
    let (amax, inp) = (kit.stat([1]), kit.slot([rows, cols]));
    let mut values = kit.rng.uniforms(rows * cols, -5.0, 3.0);
    if let (Some(odd), Some(value)) = (odd, values.get_mut(rows * cols / 3)) {
        *value = odd;
    }
    kit.set(inp, values);
    kit.exact = true;
    kit.finish(Amax { amax, inp })
}

fn quantize(p: Precision, [rows, cols]: [usize; 2], format: Fp8, form: Form) -> Case {
    let Form { act, back, rows: has_rows, columns, d_bias, margin, seen, amax: (known, amax), wild } = form;
    let of = act.map_or("itself".into(), |act| format!("{act} back {back}"));
    let sums = d_bias.map_or(String::new(), |(accum, micro_step)| format!(" d_bias {accum:?} {micro_step}"));
    let name = format!(
        "{rows}x{cols} {format} of {of}, rows {has_rows} columns {columns} margin {margin}{sums} amax {known} seen {seen:?} wild {wild}"
    );
    let mut kit = Kit::with_precision(p, name);
    let (accum, micro_step) = d_bias.unwrap_or((Accum::Write, 0));
    kit.scalars.micro_step = micro_step;
    let out = has_rows.then(|| kit.fp8([rows, cols], format));
    let out_t = columns.then(|| kit.fp8([cols, rows], format));
    let (inverse, bound) = (kit.stat([1]), kit.stat([1]));
    let (d_bias, inp) = (d_bias.map(|_| kit.grad([cols])), kit.slot([rows, cols]));
    let mut values = kit.rng.uniforms(rows * cols, -3.0, 3.0);
    // of all sizes, so that subnormal numbers and zeros come up too
    values.iter_mut().enumerate().for_each(|(i, x)| *x *= 0.5f32.powi(i as i32 % 24));
    if wild && let [first, second, third, ..] = &mut values[..] {
        (*first, *second, *third) = (f32::INFINITY, f32::NAN, f32::NEG_INFINITY);
    }
    let values = kit.set(inp, values);
    let most = values.iter().fold(0.0_f32, |most, x| if x.is_finite() { most.max(x.abs()) } else { most });
    kit.set(bound, vec![amax.unwrap_or(most)]);
    let pre = act.filter(|_| back).map(|act| PreAct { act, slot: kit.slot([rows, cols]) });
    if let Some(pre) = pre {
        kit.draw(pre.slot, -4.0, 4.0);
    }
    let act = act.filter(|_| !back);
    let seen = seen.map(|seen| {
        let slot = kit.stat([1]);
        kit.set(slot, vec![seen]);
        slot
    });
    kit.finish(Quantize {
        out,
        out_t,
        inverse,
        d_bias,
        inp,
        pre,
        amax: bound,
        seen,
        act,
        format,
        margin,
        unknown: 3,
        accum,
    })
}

fn matmul(
    p: Precision,
    [m, n, k]: [usize; 3],
    formats: [Fp8; 2],
    (bias, gradient): (bool, bool),
    (accum, micro_step): (Accum, u32),
    fast: bool,
) -> Case {
    let [of_a, of_b] = formats;
    let name = format!(
        "{m}x{n}x{k} {of_a} {of_b} bias {bias} gradient {gradient} {accum:?} {micro_step} fast {fast}"
    );
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    kit.large = m * n * k > 10_000_000;
    let out = if gradient { kit.grad([m, n]) } else { kit.slot([m, n]) };
    let bias = bias.then(|| kit.param([n]));
    let [a, b] = [([m, k], of_a), ([n, k], of_b)].map(|(shape, format)| {
        let slot = kit.fp8(shape, format);
        kit.draw_fp8(slot, [-100.0, 100.0], Some(format));
        slot
    });
    let [a_inverse, b_inverse] = [0.125, 1.0 / 4096.0].map(|inverse| {
        let slot = kit.stat([1]);
        kit.set(slot, vec![inverse]);
        slot
    });
    kit.finish(MatmulFp8 { out, bias, a, b, a_inverse, b_inverse, accum, fast })
}
