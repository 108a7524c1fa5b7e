//! Cross entropy of rows of logits, and the gradient.

use super::elem::Elem;
use super::map::{largest, map, sum_exp};
use super::ptr::{Classes, Ptr, fill_nan, read, write};
use super::real::Real;
use super::{by_type, versions};
use crate::flat::Done;
use crate::flat::pool::{isa, row_pieces};
use ironhorse_core::eager::{Array, Rows, Targets};

versions! {
    /// The largest of a row, and ln Σ e^(x - largest).
    fn row_sum<T: Elem, const FMA: bool>(x: &[T]) -> [f64; 2] {
        let max = largest(x);
        [max.wide(), sum_exp::<_, FMA>(x, max).ln()]
    }

    /// d = e^(x - lse) factor
    fn d_row<T: Elem, const FMA: bool>(x: Ptr<T>, d: Ptr<T>, cols: usize, lse: T::Acc, factor: T::Acc) {
        // SAFETY: the caller's (see `cross_entropy_bwd`), passed down.
        unsafe { map([x], [d], cols, |[x]| [(x - lse).exp::<FMA>() * factor]) }
    }
}

/// losses\[row\] = lse\[row\] - logits\[row, target\], lse = ln Σ e^logits; 0 where the target is `ignore`, NaN where it is
/// not a column. `lse` may be null. Without columns both are NaN.
///
/// # Safety
/// See [the module](super); targets, losses and lse: rows.
///
/// # Errors
/// See [the module](super).
pub unsafe fn cross_entropy(
    logits: Array,
    targets: Targets,
    [losses, lse]: [Array; 2],
    rows: Rows,
    ignore: i64,
) -> Done {
    let (isa, cols, targets) = (isa(), rows.cols, Classes::of(targets));
    if cols == 0 {
        // SAFETY: the caller's.
        unsafe { fill_nan([losses, lse], rows.rows) };
        return Ok(());
    }
    by_type!(logits.float, T => {
        type Acc = <T as Elem>::Acc;
        let (logits, losses, lse) = (Ptr::<T>::of(logits), Ptr::of(losses), Ptr::of(lse));
        row_pieces(rows.rows, cols, 16, |range| {
            for row in range {
                // SAFETY: the caller's; tasks have disjoint rows.
                unsafe {
                    let (x, target) = (logits.at(row * cols).slice(cols), targets.get(row));
                    let [max, log_sum] = row_sum(isa, x);
                    let at_target = usize::try_from(target).ok().and_then(|i| x.get(i));
                    let loss = match at_target {
                        _ if target == ignore => 0.0,
                        Some(x) => log_sum - (x.load().wide() - max),
                        None => f64::NAN,
                    };
                    losses.at(row).set(Acc::of(loss));
                    lse.at(row).set(Acc::of(max + log_sum));
                }
            }
        })
    })
}

/// loss\[0\] = Σ losses, divided by the number of targets that are not `ignore` if `mean`; inv_count\[0\] is that factor. No such
/// target: the mean is NaN. `loss` is of any type, and either may be null.
///
/// # Safety
/// See [the module](super); losses and targets: rows.
///
/// # Errors
/// See [the module](super).
pub unsafe fn cross_entropy_mean(
    losses: Array,
    targets: Targets,
    [loss, inv_count]: [Array; 2],
    rows: usize,
    ignore: i64,
    mean: bool,
) -> Done {
    let targets = Classes::of(targets);
    // SAFETY: the caller's; one thread.
    unsafe {
        let total: f64 = (0..rows).map(|row| read(losses, row)).sum();
        let count = if mean { (0..rows).filter(|&row| targets.get(row) != ignore).count() } else { 1 };
        write(loss, 0, total / count as f64);
        write(inv_count, 0, 1.0 / count as f64);
    }
    Ok(())
}

/// d_logits = (e^(logits - lse) - onehot(target)) d_loss\[per_row ? row : 0\] inv_count\[0\]; no inv_count is 1. 0 where the
/// target is `ignore`, NaN where it is not a column. `d_logits` may be `logits`; `d_loss` is of any type.
///
/// # Safety
/// See [the module](super); targets and lse: rows, d_loss: rows or 1, inv_count: 1 or null.
///
/// # Errors
/// See [the module](super).
pub unsafe fn cross_entropy_bwd(
    [d_loss, logits, lse, inv_count]: [Array; 4],
    targets: Targets,
    d_logits: Array,
    rows: Rows,
    ignore: i64,
    per_row: bool,
) -> Done {
    let (isa, cols, targets) = (isa(), rows.cols, Classes::of(targets));
    if d_logits.at.is_null() || rows.elements() == 0 {
        return Ok(());
    }
    // SAFETY: the caller's.
    let share = if inv_count.at.is_null() { 1.0 } else { unsafe { read(inv_count, 0) } };
    // SAFETY: the caller's; there is a row.
    let d_losses: Vec<f64> =
        (0..if per_row { rows.rows } else { 1 }).map(|row| unsafe { read(d_loss, row) } * share).collect();
    by_type!(logits.float, T => {
        type Acc = <T as Elem>::Acc;
        let (logits, lse, to) = (Ptr::<T>::of(logits), Ptr::<Acc>::of(lse), Ptr::of(d_logits));
        row_pieces(rows.rows, cols, 12, |range| {
            for row in range {
                let (x, to) = (logits.at(row * cols), to.at(row * cols));
                let factor = d_losses[if per_row { row } else { 0 }];
                // SAFETY: the caller's; tasks have disjoint rows, and no slice lives while another is written.
                unsafe {
                    let (target, lse) = (targets.get(row), lse.at(row).get());
                    if target == ignore {
                        to.slice_mut(cols).fill(T::store(Acc::ZERO));
                        continue;
                    }
                    let Some(at) = usize::try_from(target).ok().filter(|&i| i < cols) else {
                        to.slice_mut(cols).fill(T::store(Acc::of(f64::NAN)));
                        continue;
                    };
                    let log_p = x.at(at).get().load().wide() - lse.wide();
                    d_row(isa, x, to, cols, lse, Acc::of(factor));
                    // p - 1 = e^log_p - 1 without the cancellation when p is near 1.
                    to.at(at).set(T::store(Acc::of(log_p.exp_m1() * factor)));
                }
            }
        })
    })
}
