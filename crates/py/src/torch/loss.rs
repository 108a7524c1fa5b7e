//! Cross-entropy over the last dimension.

use super::call::Call;
use super::kernel::{Outputs, op};
use super::tensor::{Dtype, Tensor, refuse};
use ironhorse::core::eager::{Array, Rows, Targets};
use ironhorse::eager;
use ironhorse::ops::Result;

op!(CrossEntropy, "cross_entropy",
    "(Tensor logits, Tensor targets, int ignore_index, int reduction, bool wide) \
     -> (Tensor loss, Tensor lse, Tensor inv_count)",
    (logits: tensor, targets: tensor, ignore: int, reduction: int, wide: boolean)
    cross_entropy(logits, targets, ignore, reduction, wide));
op!(CrossEntropyBwd, "cross_entropy_bwd",
    "(Tensor d_loss, Tensor logits, Tensor targets, Tensor lse, Tensor inv_count, int ignore_index, int reduction) \
     -> Tensor",
    (d_loss: tensor, logits: tensor, targets: tensor, lse: tensor, inv_count: tensor, ignore: int, reduction: int)
    cross_entropy_bwd([d_loss, logits, targets, lse, inv_count], ignore, reduction));

/// What becomes of the losses of the rows; the numbers are `_REDUCTIONS` of python/ironhorse/torch/loss.py.
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

/// The class numbers of a checked tensor.
fn targets_of<T: Tensor>(call: &Call, targets: &T) -> Result<Targets> {
    match targets.dtype() {
        Dtype::I64 => Ok(Targets::I64(targets.data().cast_const().cast())),
        Dtype::I32 => Ok(Targets::I32(targets.data().cast_const().cast())),
        dtype => refuse(call.op, "targets", dtype, "int64 or int32"),
    }
}

/// Every class number of the host is one, as torch asks on the CPU. On a GPU nobody can look without waiting: such rows
/// become NaN there.
fn in_range(call: &Call, targets: Targets, rows: Rows, ignore: i64) -> Result {
    let at = |i: usize| -> i64 {
        match targets {
            // SAFETY: one number a row, on the host; i is below.
            Targets::I64(at) => unsafe { *at.add(i) },
            // SAFETY: as above.
            Targets::I32(at) => unsafe { i64::from(*at.add(i)) },
        }
    };
    let bad = |&i: &usize| at(i) != ignore && !usize::try_from(at(i)).is_ok_and(|class| class < rows.cols);
    match (0..rows.rows).find(bad) {
        None => Ok(()),
        Some(i) => {
            let expected = format_args!("0 to {} exclusive, or ignore_index {ignore}", rows.cols);
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
    let call = Call::new("cross_entropy", "logits", &logits)?;
    let reduction = Reduction::new(call.op, reduction)?;
    let rows = call.rows("logits", &logits)?;
    if rows.rows > 0 && rows.cols == 0 {
        let found = format_args!("{} rows of 0 classes", rows.rows);
        return refuse(call.op, "logits", found, "at least 1 class in the last dimension");
    }
    let sizes = logits.sizes()[..logits.sizes().len() - 1].to_vec();
    call.sides("targets", &targets, &sizes)?;
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
    call.run::<T>(|at| {
        let outputs = [losses.array(acc), lse.array(acc)];
        // SAFETY: logits have the rows, the others one element a row, side by side, where the call runs; outputs are new.
        unsafe { eager::cross_entropy(at, logits.array(call.float), classes, outputs, rows, ignore)? };
        let Some(loss) = &loss else { return Ok(()) };
        let (outputs, mean) = ([loss.array(out), inv_count.array], reduction == Reduction::Mean);
        // SAFETY: as above; one element each.
        unsafe { eager::cross_entropy_mean(at, losses.array(acc), classes, outputs, rows.rows, ignore, mean) }
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

fn cross_entropy_bwd<T: Tensor>(tensors: [T; 5], ignore: i64, reduction: i64) -> Result<Outputs<T>> {
    let [d_loss, logits, targets, lse, inv_count] = tensors;
    let call = Call::new("cross_entropy_bwd", "logits", &logits)?;
    let each = Reduction::new(call.op, reduction)? == Reduction::None;
    let rows = call.rows("logits", &logits)?;
    let sizes = logits.sizes()[..logits.sizes().len() - 1].to_vec();
    call.sides("targets", &targets, &sizes)?;
    call.tensor("lse", &lse, call.acc(), &sizes)?;
    call.sides("d_loss", &d_loss, if each { &sizes } else { &[] })?;
    let Dtype::Float(loss_type) = d_loss.dtype() else {
        return refuse(call.op, "d_loss", d_loss.dtype(), "a floating type");
    };
    if !each {
        call.tensor("inv_count", &inv_count, call.acc(), &[])?;
    }
    let (d_loss, logits, targets, lse) =
        (call.dense(d_loss)?, call.dense(logits)?, call.dense(targets)?, call.dense(lse)?);
    let classes = targets_of(&call, &targets)?;
    let d_logits: T = call.out(logits.sizes(), call.float)?;
    let factor = if each { Array::none(call.acc()) } else { inv_count.array(call.acc()) };
    let inputs = [d_loss.array(loss_type), logits.array(call.float), lse.array(call.acc()), factor];
    let d = d_logits.array(call.float);
    // SAFETY: as forward.
    call.run::<T>(|at| unsafe { eager::cross_entropy_bwd(at, inputs, classes, d, rows, ignore, each) })?;
    Ok([Some(d_logits), None, None])
}
