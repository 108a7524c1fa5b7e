//! Softmax cross-entropy, the mean over rows, and the most likely token.

use super::{Pools, Step, index};
use ironhorse_core::Result;
use ironhorse_core::op::{Argmax, CrossEntropy, CrossEntropyBwd, IGNORED, LossMean};

pub(super) fn cross_entropy(pools: &mut Pools, op: &CrossEntropy, step: Step) -> Result<()> {
    let (mut logits, targets) = (pools.read(op.logits)?, pools.read(op.targets)?);
    let scale = f64::from(step.scalars.loss_scale);
    let mut losses = Vec::new();
    for (row, &target) in logits.chunks_exact_mut(op.logits.shape.cols()).zip(&targets) {
        if target == f64::from(IGNORED) {
            row.fill(0.0);
            losses.push(0.0);
            continue;
        }
        let target = index(target, op.vocab, "target")?;
        let (real, padding) = row.split_at_mut(op.vocab);
        let max = real.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = real.iter().map(|x| (x - max).exp()).sum();
        losses.push(max + sum.ln() - real[target]);
        for (v, x) in real.iter_mut().enumerate() {
            let onehot = if v == target { 1.0 } else { 0.0 };
            *x = ((*x - max).exp() / sum - onehot) * scale;
        }
        padding.fill(0.0);
    }
    pools.write(op.losses, &losses)?;
    if op.grad { pools.write(op.logits, &logits) } else { Ok(()) }
}

/// The softmax from its definition: the losses are not needed for it.
pub(super) fn cross_entropy_bwd(pools: &mut Pools, op: &CrossEntropyBwd, step: Step) -> Result<()> {
    let (mut logits, targets) = (pools.read(op.logits)?, pools.read(op.targets)?);
    let weights = pools.read(op.weights)?;
    let rows = logits.chunks_exact_mut(op.logits.shape.cols());
    for ((row, &target), weight) in rows.zip(&targets).zip(weights) {
        if target == f64::from(IGNORED) {
            row.fill(0.0);
            continue;
        }
        let target = index(target, op.vocab, "target")?;
        let (real, padding) = row.split_at_mut(op.vocab);
        let max = real.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = real.iter().map(|x| (x - max).exp()).sum();
        for (v, x) in real.iter_mut().enumerate() {
            let onehot = if v == target { 1.0 } else { 0.0 };
            *x = ((*x - max).exp() / sum - onehot) * f64::from(step.scalars.loss_scale) * weight;
        }
        padding.fill(0.0);
    }
    pools.write(op.logits, &logits)
}

pub(super) fn argmax(pools: &mut Pools, op: &Argmax) -> Result<()> {
    let logits = pools.read(op.logits)?;
    let rows = logits.chunks_exact(op.logits.shape.cols()).map(|row| &row[..op.vocab]);
    let best = |row: &[f64]| match row.iter().position(|x| x.is_nan()) {
        Some(nan) => nan,
        None => (0..row.len()).find(|&at| row.iter().all(|x| *x <= row[at])).unwrap_or(0),
    };
    pools.write(op.best, &rows.map(|row| best(row) as f64).collect::<Vec<_>>())
}

pub(super) fn mean(pools: &mut Pools, op: &LossMean, step: Step) -> Result<()> {
    let sum: f64 = pools.read(op.losses)?.iter().sum();
    let adds = op.accum.adds(step.scalars.added());
    pools.store(op.loss, &[f64::from(step.scalars.loss_scale) * sum], adds)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, Argmax, CrossEntropy, LossMean};

    const LN3: f32 = 1.098_612_3;

    fn cross_entropy(targets: &[i32], grad: bool) -> (Kit, CrossEntropy) {
        let mut kit = Kit::new("loss");
        kit.scalars.loss_scale = 0.5;
        let op = CrossEntropy {
            losses: kit.slot([1, 2]),
            logits: kit.f32s([1, 2, 3], &[0.0, LN3, 1e9, 700.0, 700.0, f32::NAN]),
            targets: kit.i32s([1, 2], targets),
            vocab: 2,
            grad,
        };
        (kit, op)
    }

    /// Row 0: softmax (1/4, 3/4) and target 0, so the loss is ln 4. Row 1: (1/2, 1/2), ln 2. The third column is
    /// padding.
    #[test]
    fn cross_entropy_by_hand() {
        let (kit, op) = cross_entropy(&[0, 1], true);
        let case = kit.finish(op);
        case.expect_within(op.losses, &[4_f64.ln(), 2_f64.ln()], 1e-6);
        case.expect_within(op.logits, &[-0.375, 0.375, 0.0, 0.25, -0.25, 0.0], 1e-6);
        let (kit, op) = cross_entropy(&[0, 1], false);
        let oracle = kit.finish(op).oracle().unwrap();
        assert_eq!(oracle.read_f64(op.logits).unwrap()[..3], [0.0, f64::from(LN3), 1e9]);
    }

    /// An ignored row has loss 0 and gradient 0, also where its logits are no numbers.
    #[test]
    fn ignored_rows_are_zero() {
        let mut kit = Kit::new("loss");
        let op = CrossEntropy {
            losses: kit.slot([1, 2]),
            logits: kit.f32s([1, 2, 3], &[0.0, LN3, 1e9, f32::NAN, 700.0, f32::NAN]),
            targets: kit.i32s([1, 2], &[0, -100]),
            vocab: 2,
            grad: true,
        };
        let case = kit.finish(op);
        case.expect_within(op.losses, &[4_f64.ln(), 0.0], 1e-6);
        case.expect_within(op.logits, &[-0.75, 0.75, 0.0, 0.0, 0.0, 0.0], 1e-6);
    }

    #[test]
    fn targets_outside_the_vocabulary_are_refused() {
        for target in [2, -1, -99, -101] {
            let (kit, op) = cross_entropy(&[0, target], true);
            let error = kit.finish(op).oracle().unwrap_err();
            assert_eq!(error.to_string(), format!("target {target} is outside the vocabulary of 2"));
        }
    }

    #[test]
    fn argmax_by_hand() {
        let mut kit = Kit::new("argmax");
        let rows = [
            [1.0, 3.0, 3.0, 9.0],
            [-0.0, 0.0, -1.0, 9.0],
            [5.0, f32::NAN, f32::NAN, 9.0],
            [-7.0, -8.0, -7.5, 9.0],
        ];
        let op = Argmax { best: kit.ints([1, 4]), logits: kit.f32s([1, 4, 4], &rows.concat()), vocab: 3 };
        kit.finish(op).expect_f64(op.best, &[1.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn loss_mean_by_hand() {
        for (accum, micro_step, want) in [
            (Accum::Write, 1, 1.5),
            (Accum::FirstWrites, 0, 1.5),
            (Accum::FirstWrites, 1, 8.5),
            (Accum::Add, 0, 8.5),
        ] {
            let mut kit = Kit::new("loss");
            kit.scalars.micro_step = micro_step;
            kit.scalars.loss_scale = 0.25;
            let (loss, losses) = (kit.f32s([], &[7.0]), kit.f32s([1, 3], &[1.0, 2.0, 3.0]));
            kit.finish(LossMean { loss, losses, accum }).expect_f64(loss, &[want]);
        }
    }
}
