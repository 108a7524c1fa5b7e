//! The loss of pairs of answers (DPO).

use super::{Ctx, store};
use ironhorse_core::Result;
use ironhorse_core::op::{Preference, check_pairs};

/// Runs on one thread: a batch has some thousand tokens, and their sums have one order.
pub fn preference(ctx: &mut Ctx<'_>, op: &Preference) -> Result<()> {
    let (loss, means, rewards) = (ctx.f32(op.loss)?, ctx.f32(op.means)?, ctx.f32(op.rewards)?);
    let (losses, reference, weights) =
        (ctx.f32(op.losses)?, ctx.f32(op.reference)?, ctx.f32_or_none(op.weights)?);
    let adds = op.accum.adds(ctx.scalars.added());
    let (scale, beta) = (f64::from(ctx.scalars.loss_scale), f64::from(op.beta));
    // SAFETY: one thread, and what is written shares no memory with any other slot (`Op::check`).
    let (pairs, losses, reference, rewards) =
        unsafe { (ctx.i32(op.pairs)?.all(), losses.all(), reference.all(), rewards.all_mut()) };
    check_pairs(pairs, losses.len())?;
    // SAFETY: one thread, and `weights` shares no memory with any other slot (`Op::check`).
    let weights: &mut [f32] = if weights.is_some() { unsafe { weights.all_mut() } } else { &mut [] };
    weights.fill(0.0);
    let (mut total, mut sums) = (0.0, [0.0; 3]);
    for (bounds, rewards) in pairs.chunks_exact(3).zip(rewards.chunks_exact_mut(2)) {
        let [start, middle, end] = [0, 1, 2].map(|i| bounds[i] as usize);
        if start == end {
            rewards.fill(0.0);
            continue;
        }
        let reward = |rows: std::ops::Range<usize>| {
            let tokens = reference[rows.clone()].iter().zip(&losses[rows]);
            beta * tokens.map(|(&theirs, &ours)| f64::from(theirs) - f64::from(ours)).sum::<f64>()
        };
        let [chosen, rejected] = [reward(start..middle), reward(middle..end)];
        let margin = chosen - rejected;
        // -ln σ(margin), without overflow on either side
        total += (-margin.abs()).exp().ln_1p() + (-margin).max(0.0);
        sums[0] += chosen;
        sums[1] += rejected;
        sums[2] += f64::from(u8::from(chosen > rejected));
        rewards.copy_from_slice(&[chosen as f32, rejected as f32]);
        if !weights.is_empty() {
            let weight = (beta / (1.0 + margin.exp())) as f32;
            weights[start..middle].fill(weight);
            weights[middle..end].fill(-weight);
        }
    }
    // SAFETY: one thread, and `loss` and `means` share no memory with any other slot (`Op::check`).
    unsafe {
        store(loss.all_mut(), &[(total * scale) as f32], adds);
        store(means.all_mut(), &sums.map(|sum| (sum * scale) as f32), adds);
    }
    Ok(())
}
