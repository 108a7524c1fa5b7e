//! Cross entropy, and the load-balancing loss of a router.

use super::map::map1;
use super::pool::{isa, row_pieces};
use super::{Done, Span};
use crate::math::{LANES, exp_flush, max_inline, tree};
use crate::multiversion;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Elements whose sum is one f32 sum; the sums of the blocks are added in f64.
const BLOCK: usize = 4096;

/// Σ e^(x - max)
#[inline(always)]
fn sum_exp<const FMA: bool>(x: &[f32], max: f32) -> f64 {
    let mut total = 0.0;
    for block in x.chunks(BLOCK) {
        let mut lanes = [0.0_f32; LANES];
        let (full, rest) = block.as_chunks::<LANES>();
        for part in full {
            for i in 0..LANES {
                lanes[i] += exp_flush::<FMA>(part[i] - max);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += exp_flush::<FMA>(x - max);
        }
        // The compiler must not see the tree (see `math::sum_inline`).
        total += f64::from(tree(std::hint::black_box(lanes), |a, b| a + b));
    }
    total
}

multiversion! {
    /// log_probs = x - lse on one row; returns the loss of its target.
    fn forward_row<const FMA: bool>(log_probs: Span<f32>, x: Span<f32>, r: Range<usize>, target: usize) -> f64 {
        // SAFETY: the caller's (see `cross_entropy_forward`), passed down; slices end before the next is made.
        unsafe {
            let row = x.get(r.clone());
            let (max, at_target) = (max_inline(row), row[target]);
            let log_sum = sum_exp::<FMA>(row, max).ln();
            let rounded = log_sum as f32;
            map1(log_probs, x, r, |x| (x - max) - rounded);
            log_sum - (f64::from(at_target) - f64::from(max))
        }
    }

    /// d = e^log_probs · scale
    fn backward_row<const FMA: bool>(d: Span<f32>, log_probs: Span<f32>, r: Range<usize>, scale: f32) {
        // SAFETY: the caller's (see `cross_entropy_backward`), passed down.
        unsafe { map1(d, log_probs, r, |x| exp_flush::<FMA>(x) * scale) }
    }
}

/// log_probs = log softmax(logits) per row; loss = mean over rows of -log_probs\[row, target\]. `log_probs` may be
/// `logits`. Nothing happens without rows.
///
/// # Safety
/// See [the module](super); logits and log_probs: rows·vocab, targets: rows, each in 0..vocab, loss: 1.
///
/// # Errors
/// See [the module](super).
pub unsafe fn cross_entropy_forward(
    logits: Span<f32>,
    targets: Span<i32>,
    loss: Span<f32>,
    log_probs: Span<f32>,
) -> Done {
    let (isa, rows) = (isa(), targets.len());
    if rows == 0 {
        return Ok(());
    }
    let width = logits.len() / rows;
    let losses: Vec<AtomicU64> = (0..rows).map(|_| AtomicU64::new(0)).collect();
    row_pieces(rows, width, 16, |range| {
        // SAFETY: nobody writes the targets; tasks have disjoint rows.
        let targets = unsafe { targets.all() };
        for row in range {
            let r = row * width..(row + 1) * width;
            let lost = forward_row(isa, log_probs, logits, r, targets[row] as usize);
            losses[row].store(lost.to_bits(), Ordering::Relaxed);
        }
    })?;
    let total: f64 = losses.iter().map(|x| f64::from_bits(x.load(Ordering::Relaxed))).sum();
    // SAFETY: the tasks are done; `loss` is apart from the rest.
    unsafe { loss.all_mut()[0] = (total / rows as f64) as f32 };
    Ok(())
}

/// d_logits = (e^log_probs - onehot(target)) · scale; `d_logits` may be `log_probs`. For the gradient of the mean, scale
/// is 1 / rows.
///
/// # Safety
/// See [the module](super); log_probs and d_logits: rows·vocab, targets: rows, each in 0..vocab.
///
/// # Errors
/// See [the module](super).
pub unsafe fn cross_entropy_backward(
    log_probs: Span<f32>,
    targets: Span<i32>,
    d_logits: Span<f32>,
    scale: f32,
) -> Done {
    let (isa, rows) = (isa(), targets.len());
    let width = d_logits.len().checked_div(rows).unwrap_or(0);
    row_pieces(rows, width, 8, |range| {
        for row in range {
            // SAFETY: nobody writes the targets; tasks have disjoint rows, and slices end before the next is made.
            unsafe {
                let at = row * width + targets.all()[row] as usize;
                let kept = log_probs.get(at..at + 1)[0];
                backward_row(isa, d_logits, log_probs, row * width..(row + 1) * width, scale);
                // Here p - 1 = e^l - 1 without the cancellation when p is near 1.
                d_logits.get_mut(at..at + 1)[0] = (f64::from(kept).exp_m1() * f64::from(scale)) as f32;
            }
        }
    })
}

/// What a router did: `probs` (rows, experts), `chosen` (rows, k), each in 0..experts.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// Probabilities of all experts.
    pub probs: Span<f32>,
    /// The experts each row was sent to.
    pub chosen: Span<i32>,
    /// Rows; not 0.
    pub rows: usize,
}

/// fractions\[e\] = share of the rows sent to e, means\[e\] = mean probability of e,
/// aux = alpha · experts · Σ fractions · means. An expert chosen twice by a row counts once.
///
/// # Safety
/// See [the module](super); lengths as said, fractions and means: experts, aux: 1.
///
/// # Errors
/// See [the module](super).
pub unsafe fn aux_loss_forward(
    router: &Router,
    aux: Span<f32>,
    [fractions, means]: [Span<f32>; 2],
    alpha: f32,
) -> Done {
    let (rows, experts) = (router.rows, fractions.len());
    let k = router.chosen.len() / rows;
    // SAFETY: one thread; by the contract.
    let (probs, chosen, fractions, means, aux) = unsafe {
        (router.probs.all(), router.chosen.all(), fractions.all_mut(), means.all_mut(), aux.all_mut())
    };
    let (mut counts, mut sums) = (vec![0_u64; experts], vec![0.0_f64; experts]);
    for row in probs.chunks_exact(experts.max(1)) {
        sums.iter_mut().zip(row).for_each(|(sum, &p)| *sum += f64::from(p));
    }
    for row in chosen.chunks_exact(k.max(1)) {
        for (i, &e) in row.iter().enumerate() {
            if !row[..i].contains(&e) {
                counts[e as usize] += 1;
            }
        }
    }
    let mut total = 0.0;
    for e in 0..experts {
        let (fraction, mean) = (counts[e] as f64 / rows as f64, sums[e] / rows as f64);
        (fractions[e], means[e]) = (fraction as f32, mean as f32);
        total += fraction * mean;
    }
    aux[0] = (f64::from(alpha) * experts as f64 * total) as f32;
    Ok(())
}
