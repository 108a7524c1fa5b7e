//! Cross-entropy over the last dimension.

use super::call::TorchCall;
use super::kernel::{Outputs, ops};
use super::tensor::{Dtype, Tensor, refuse};
use ironhorse::core::eager::{Array, CrossEntropy, CrossEntropyBwd, CrossEntropyMean, Rows, Targets};
use ironhorse::eager;
use ironhorse::ops::Result;

ops! {
    "cross_entropy",
        "(Tensor logits, Tensor targets, int ignore_index, int reduction, bool wide) \
         -> (Tensor loss, Tensor lse, Tensor inv_count)",
        (logits: tensor, targets: tensor, ignore: int, reduction: int, wide: boolean)
        => cross_entropy(logits, targets, ignore, reduction, wide);
    "cross_entropy_bwd",
        "(Tensor d_loss, Tensor logits, Tensor targets, Tensor lse, Tensor inv_count, int ignore_index, int reduction) \
         -> Tensor",
        (d_loss: tensor, logits: tensor, targets: tensor, lse: tensor, inv_count: tensor, ignore: int, reduction: int)
        => cross_entropy_bwd(Kept { d_loss, logits, targets, lse, inv_count }, ignore, reduction);
}

/// How the losses of the rows are reduced; the numbers are `_REDUCTIONS` of python/ironhorse/torch/loss.py.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduction {
    None,
    Mean,
    Sum,
}

impl Reduction {
    fn new(op: &str, number: i64) -> Result<Self> {
        match number {
            0 => Ok(Self::None),
            1 => Ok(Self::Mean),
            2 => Ok(Self::Sum),
            _ => refuse(op, "reduction", number, "0 (none), 1 (mean) or 2 (sum)"),
        }
    }
}

/// The targets of a checked tensor.
fn targets_of<T: Tensor>(call: &TorchCall, targets: &T) -> Result<Targets> {
    match targets.dtype() {
        Dtype::I64 => Ok(Targets::I64(targets.data().cast_const().cast())),
        Dtype::I32 => Ok(Targets::I32(targets.data().cast_const().cast())),
        dtype => refuse(call.op, "targets", dtype, "int64 or int32"),
    }
}

/// Checks that every target in host memory is a class or `ignore`, as torch demands on the CPU. On a GPU the check would have
/// to wait for the targets: rows whose target is out of range become NaN there.
fn in_range(call: &TorchCall, targets: Targets, rows: Rows, ignore: i64) -> Result {
    let at = |i: usize| -> i64 {
        match targets {
            // SAFETY: one target per row, in host memory; i is below the number of rows.
            Targets::I64(at) => unsafe { *at.add(i) },
            // SAFETY: one target per row, in host memory; i is below the number of rows.
            Targets::I32(at) => unsafe { i64::from(*at.add(i)) },
        }
    };
    let bad = |&i: &usize| at(i) != ignore && !usize::try_from(at(i)).is_ok_and(|class| class < rows.cols);
    match (0..rows.rows).find(bad) {
        None => Ok(()),
        Some(i) => {
            let expected = format_args!("an index in 0..{}, or ignore_index {ignore}", rows.cols);
            refuse(call.op, &format!("targets[{i}]"), at(i), expected)
        }
    }
}

fn cross_entropy<T: Tensor>(
    logits: T,
    targets: T,
    ignore: i64,
    reduction: i64,
    wide: bool,
) -> Result<Outputs<T>> {
    let call = TorchCall::new("cross_entropy", "logits", &logits)?;
    let reduction = Reduction::new(call.op, reduction)?;
    let rows = call.rows("logits", &logits)?;
    if rows.rows > 0 && rows.cols == 0 {
        let found = format_args!("{} rows of 0 classes", rows.rows);
        return refuse(call.op, "logits", found, "at least 1 class in the last dimension");
    }
    let sizes = logits.sizes()[..logits.sizes().len() - 1].to_vec();
    call.sized("targets", &targets, &sizes)?;
    let (logits, targets) = (call.dense(logits)?, call.dense(targets)?);
    let classes = targets_of(&call, &targets)?;
    if call.on_host() {
        in_range(&call, classes, rows, ignore)?;
    }
    let acc = call.acc();
    let (losses, lse): (T, T) = (call.out(&sizes, acc)?, call.out(&sizes, acc)?);
    let out = if wide { acc } else { call.float };
    let each = reduction == Reduction::None;
    let loss: Option<T> = if each { None } else { Some(call.out(&[], out)?) };
    let inv_count = call.wanted::<T>(!each, &[], acc)?;
    let each_row = CrossEntropy {
        logits: call.array(&logits),
        targets: classes,
        losses: losses.array(acc),
        lse: lse.array(acc),
        rows,
        ignore,
    };
    let all = loss.as_ref().map(|loss| CrossEntropyMean {
        losses: losses.array(acc),
        targets: classes,
        loss: loss.array(out),
        inv_count: inv_count.array,
        rows: rows.rows,
        ignore,
        mean: reduction == Reduction::Mean,
    });
    call.run::<T>(|at| {
        // SAFETY: the tensors were checked: logits have the rows, the others one element a row, contiguous; outputs are new.
        unsafe { eager::run(at, &each_row) }?;
        // SAFETY: as above; one element each.
        all.map_or(Ok(()), |all| unsafe { eager::run(at, &all) })
    })?;
    let loss = match loss {
        Some(loss) => loss,
        None if out == acc => losses,
        None => {
            let narrow: T = call.out(&sizes, out)?;
            narrow.copy_from(&losses)?;
            narrow
        }
    };
    Ok([Some(loss), Some(lse), Some(inv_count.tensor)])
}

/// What the backward needs.
struct Kept<T> {
    d_loss: T,
    logits: T,
    targets: T,
    lse: T,
    inv_count: T,
}

fn cross_entropy_bwd<T: Tensor>(kept: Kept<T>, ignore: i64, reduction: i64) -> Result<Outputs<T>> {
    let Kept { d_loss, logits, targets, lse, inv_count } = kept;
    let call = TorchCall::new("cross_entropy_bwd", "logits", &logits)?;
    let per_row = Reduction::new(call.op, reduction)? == Reduction::None;
    let rows = call.rows("logits", &logits)?;
    let sizes = logits.sizes()[..logits.sizes().len() - 1].to_vec();
    call.sized("targets", &targets, &sizes)?;
    call.tensor("lse", &lse, call.acc(), &sizes)?;
    call.sized("d_loss", &d_loss, if per_row { &sizes } else { &[] })?;
    let Dtype::Float(loss_type) = d_loss.dtype() else {
        return refuse(call.op, "d_loss", d_loss.dtype(), "a floating-point type");
    };
    if !per_row {
        call.tensor("inv_count", &inv_count, call.acc(), &[])?;
    }
    let (d_loss, logits) = (call.dense(d_loss)?, call.dense(logits)?);
    let (targets, lse) = (call.dense(targets)?, call.dense(lse)?);
    let d_logits: T = call.out(logits.sizes(), call.float)?;
    let op = CrossEntropyBwd {
        d_loss: d_loss.array(loss_type),
        logits: call.array(&logits),
        lse: call.statistic(&lse),
        inv_count: if per_row { Array::none(call.acc()) } else { call.statistic(&inv_count) },
        targets: targets_of(&call, &targets)?,
        d_logits: call.array(&d_logits),
        rows,
        ignore,
        per_row,
    };
    // SAFETY: the tensors were checked and are contiguous; d_logits is new.
    unsafe { call.eager::<T>(&op) }?;
    Ok([Some(d_logits), None, None])
}
