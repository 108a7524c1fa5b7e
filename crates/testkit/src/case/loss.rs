//! Cases of the loss.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Argmax, CrossEntropy, CrossEntropyBwd, IGNORED, LossMean};

/// (B, T, V, Vp)
const SHAPES: [[usize; 4]; 11] = [
    [1, 1, 1, 1],
    [1, 1, 1, 5],
    [1, 31, 5, 5],
    [2, 33, 31, 33],
    [1, 37, 129, 129],
    [1, 65, 80, 128],
    [2, 65, 1003, 1024],
    [1, 1, 4099, 4160],
    [0, 3, 48, 64],
    [1, 4, 50_257, 50_304], // GPT-2
    [2, 33, 256, 256],
];
/// A row of more than one multiprocessor's shared memory holds.
const WIDE: [usize; 4] = [1, 3, 131_069, 131_200];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for grad in [false, true] {
        cases.extend(SHAPES.map(|shape| cross_entropy(p, shape, grad, (-3.0, 3.0))));
        cases.push(cross_entropy(p, [1, 33, 1003, 1024], grad, (80.0, 110.0))); // exp overflows unless the maximum is subtracted
        cases.push(cross_entropy(p, [1, 33, 1003, 1024], grad, (-110.0, -100.0)));
        cases.push(cross_entropy(p, WIDE, grad, (-3.0, 3.0)));
    }
    for grad in [false, true] {
        for shape in SHAPES {
            cases.push(masked(p, shape, grad, |_| true));
            // some of several rows
            if shape[0] * shape[1] > 1 {
                cases.push(masked(p, shape, grad, |row| row % 3 != 1));
            }
        }
    }
    cases.push(masked(p, WIDE, true, |row| row % 3 != 1));
    for shape in SHAPES.into_iter().chain([WIDE]) {
        cases.push(bwd(p, shape, |_| false, (-3.0, 3.0)));
        if shape[0] * shape[1] > 0 {
            cases.push(bwd(p, shape, |row| row % 3 != 1, (-3.0, 3.0)));
        }
    }
    cases.push(bwd(p, [1, 33, 1003, 1024], |_| false, (80.0, 95.0)));
    cases.push(bwd(p, [1, 33, 1003, 1024], |_| false, (-115.0, -100.0)));
    for shape in SHAPES {
        cases.extend(
            [Logits::Different, Logits::Ties, Logits::Equal, Logits::Nan].map(|kind| argmax(p, shape, kind)),
        );
    }
    for n in [0, 1, 31, 33, 129, 1003, 4099] {
        cases.extend(ACCUMS.map(|(accum, micro_step)| {
            let mut kit = Kit::with_precision(p, format!("n{n} {accum:?} micro-step {micro_step}"));
            kit.scalars.micro_step = micro_step;
            kit.scalars.loss_scale = 1.0 / (3 * n.max(1)) as f32;
            let (loss, losses) = (kit.stat([]), kit.stat([1, n]));
            kit.draw(losses, 0.0, 12.0);
            kit.finish(LossMean { loss, losses, accum })
        }));
    }
    cases
}

/// The padding holds NaN: the op may set it to 0 but must not read it.
fn cross_entropy(p: Precision, [b, t, vocab, padded]: [usize; 4], grad: bool, (lo, hi): (f32, f32)) -> Case {
    let mut kit =
        Kit::with_precision(p, format!("B{b} T{t} V{vocab} of {padded} grad {grad} logits {lo} to {hi}"));
    kit.scalars.loss_scale = 1.0 / (b * t).max(1) as f32;
    let op = CrossEntropy {
        losses: kit.stat([b, t]),
        logits: kit.slot([b, t, padded]),
        targets: kit.tokens([b, t], vocab),
        vocab,
        grad,
    };
    let mut logits = kit.rng.uniforms(op.logits.numel(), lo, hi);
    for row in logits.chunks_exact_mut(padded) {
        row[vocab..].fill(f32::NAN);
    }
    kit.set(op.logits, logits);
    kit.finish(op)
}

/// Rows that are ignored, the first of them with logits that are no numbers.
fn masked(p: Precision, [b, t, vocab, padded]: [usize; 4], grad: bool, ignored: fn(usize) -> bool) -> Case {
    let rows = b * t;
    let count = (0..rows).filter(|&row| !ignored(row)).count();
    let mut kit =
        Kit::with_precision(p, format!("B{b} T{t} V{vocab} of {padded} grad {grad}, {count} rows count"));
    let mut targets: Vec<i32> = (0..rows).map(|_| kit.rng.below(vocab) as i32).collect();
    targets.iter_mut().enumerate().filter(|&(row, _)| ignored(row)).for_each(|(_, target)| *target = IGNORED);
    kit.scalars = kit.scalars.counting(&targets);
    let op = CrossEntropy {
        losses: kit.stat([b, t]),
        logits: kit.slot([b, t, padded]),
        targets: kit.i32s([b, t], &targets),
        vocab,
        grad,
    };
    let mut logits = kit.rng.uniforms(op.logits.numel(), -3.0, 3.0);
    for (row, x) in logits.chunks_exact_mut(padded).enumerate() {
        x[vocab..].fill(f32::NAN);
        // without `grad` the logits stay as they are, and NaN would not equal NaN
        if grad && ignored(row) && row < 4 {
            x[row % vocab] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e9][row];
        }
    }
    kit.set(op.logits, logits);
    kit.finish(op)
}

/// The gradient from losses that are those of the logits, with weights of either sign; the first ignored rows have logits and
/// weights that are no numbers.
fn bwd(
    p: Precision,
    [b, t, vocab, padded]: [usize; 4],
    ignored: fn(usize) -> bool,
    (lo, hi): (f32, f32),
) -> Case {
    let rows = b * t;
    let count = (0..rows).filter(|&row| !ignored(row)).count();
    let mut kit = Kit::with_precision(
        p,
        format!("B{b} T{t} V{vocab} of {padded}, {count} rows count, logits {lo} to {hi}"),
    );
    kit.scalars.loss_scale = 1.0 / rows.max(1) as f32;
    let mut targets: Vec<i32> = (0..rows).map(|_| kit.rng.below(vocab) as i32).collect();
    targets.iter_mut().enumerate().filter(|&(row, _)| ignored(row)).for_each(|(_, target)| *target = IGNORED);
    let op = CrossEntropyBwd {
        logits: kit.slot([b, t, padded]),
        targets: kit.i32s([b, t], &targets),
        losses: kit.stat([b, t]),
        weights: kit.stat([b, t]),
        vocab,
    };
    let mut logits = kit.rng.uniforms(op.logits.numel(), lo, hi);
    let mut weights = kit.rng.uniforms(rows, -1.0, 1.0);
    for (row, x) in logits.chunks_exact_mut(padded).enumerate() {
        x[vocab..].fill(f32::NAN);
        if ignored(row) && row < 4 {
            x[row % vocab] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e9][row];
            weights[row] = [f32::NAN, f32::INFINITY, f32::NAN, 1.0][row];
        }
    }
    let logits = kit.set(op.logits, logits);
    kit.set(op.weights, weights);
    let loss = |(x, &target): (&[f32], &i32)| match usize::try_from(target) {
        Ok(target) => {
            let sum: f64 = x[..vocab].iter().map(|x| f64::from(x - hi).exp()).sum();
            (sum.ln() - f64::from(x[target] - hi)) as f32
        }
        Err(_) => 0.0,
    };
    let losses = logits.chunks_exact(padded).zip(&targets).map(loss).collect();
    kit.set(op.losses, losses);
    kit.finish(op)
}

/// What an argmax chooses from.
#[derive(Clone, Copy, Debug)]
enum Logits {
    Different,
    /// A few values, the largest many times, so that threads, warps and blocks find it at different columns.
    Ties,
    /// 0 and -0 in turns.
    Equal,
    /// Rows with one NaN or two.
    Nan,
}

/// A case of argmax whose padding holds a number that would win.
fn argmax(p: Precision, [b, t, vocab, padded]: [usize; 4], kind: Logits) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} V{vocab} of {padded} {kind:?}"));
    let (best, logits) = (kit.ints([b, t]), kit.slot([b, t, padded]));
    let mut values = kit.rng.uniforms(logits.numel(), -3.0, 3.0);
    for (at, row) in values.chunks_exact_mut(padded).enumerate() {
        let (real, padding) = row.split_at_mut(vocab);
        match kind {
            Logits::Different => {}
            Logits::Ties => real.iter_mut().for_each(|x| *x = x.round()),
            Logits::Equal => {
                real.iter_mut().enumerate().for_each(|(v, x)| *x = if v % 2 == 0 { -0.0 } else { 0.0 })
            }
            Logits::Nan => {
                real[(at * 37 + vocab / 2) % vocab] = f32::NAN;
                real[at * 101 % vocab] = f32::NAN;
            }
        }
        padding.fill(if at % 2 == 0 { f32::INFINITY } else { f32::NAN });
    }
    kit.set(logits, values);
    kit.finish(Argmax { best, logits, vocab })
}
