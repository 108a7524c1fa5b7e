//! The router of a mixture of experts. Tokens are spread over threads.

use super::Ctx;
use crate::element::dot;
use crate::kernel::routing::{self, Made};
use ironhorse_core::op::{RouterBwd, RouterFwd, RouterLoad};
use ironhorse_core::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Tokens a task handles.
const ROWS: usize = 32;

pub fn router_fwd(ctx: &mut Ctx<'_>, op: &RouterFwd) -> Result<()> {
    let (probs, weights) = (ctx.f32(op.probs)?, ctx.f32(op.weights)?);
    let (experts, logits) = (ctx.i32(op.experts)?, ctx.f32(op.logits)?);
    let (isa, all, k) = (ctx.isa, op.probs.shape.cols(), op.experts.shape.cols());
    let first_bad = AtomicUsize::new(usize::MAX);
    ctx.chunks(op.probs.shape.rows(), ROWS, |rows, _| {
        for row in rows {
            let (r, chosen) = (row * all..(row + 1) * all, row * k..(row + 1) * k);
            // SAFETY: tasks have disjoint rows of what is written, which shares no memory with `logits`.
            let (x, p, w, e) = unsafe {
                let (w, e) = (weights.get_mut(chosen.clone()), experts.get_mut(chosen));
                (logits.get(r.clone()), probs.get_mut(r), w, e)
            };
            if !routing::choose(isa, x, p, w, e) {
                first_bad.fetch_min(row, Ordering::Relaxed);
            }
        }
    })?;
    match first_bad.into_inner() {
        usize::MAX => Ok(()),
        row => {
            // SAFETY: nothing writes the logits.
            let x = unsafe { logits.get(row * all..(row + 1) * all) };
            let logit = x.iter().find(|x| !x.is_finite()).copied().unwrap_or(f32::NAN);
            Err(Error::Input(format!("router: a logit of token {row} is {logit}")))
        }
    }
}

/// The factor of a mean over all rows of the step.
fn row_scale(ctx: &Ctx<'_>) -> f64 {
    f64::from(ctx.scalars.loss_scale) * f64::from(ctx.scalars.counted)
}

pub fn router_bwd(ctx: &mut Ctx<'_>, op: &RouterBwd) -> Result<()> {
    let (d_logits, d_weights) = (ctx.f32(op.d_logits)?, ctx.f32(op.d_weights)?);
    let (probs, weights) = (ctx.f32(op.probs)?, ctx.f32(op.weights)?);
    let (experts, load) = (ctx.i32(op.experts)?, ctx.f32(op.load)?);
    let (isa, all, k) = (ctx.isa, op.probs.shape.cols(), op.experts.shape.cols());
    let scale = (row_scale(ctx) * f64::from(op.alpha) * all as f64) as f32;
    // SAFETY: nothing writes experts and load while the op runs.
    let (experts, load) = unsafe { (experts.all(), load.all()) };
    super::check_below("expert", experts, all)?;
    ctx.chunks(op.probs.shape.rows(), ROWS, |rows, _| {
        for row in rows {
            let (r, chosen) = (row * all..(row + 1) * all, row * k..(row + 1) * k);
            // SAFETY: tasks have disjoint rows of `d_logits`, which shares no memory with anything read.
            let (d, probs, weights, d_w) = unsafe {
                let (w, d_w) = (weights.get(chosen.clone()), d_weights.get(chosen.clone()));
                (d_logits.get_mut(r.clone()), probs.get(r), w, d_w)
            };
            let made = Made { probs, weights, experts: &experts[chosen] };
            routing::choose_bwd(isa, d, d_w, made, (load, scale));
        }
    })
}

pub fn router_load(ctx: &mut Ctx<'_>, op: &RouterLoad) -> Result<()> {
    let (load, aux) = (ctx.f32(op.load)?, ctx.f32(op.aux)?);
    let (probs, offsets) = (ctx.f32(op.probs)?, ctx.i32(op.offsets)?);
    let entropy = op.entropy.map(|slot| ctx.f32(slot)).transpose()?;
    let (isa, rows, all) = (ctx.isa, op.probs.shape.rows(), op.probs.shape.cols());
    let adds = op.accum.adds(ctx.scalars.added());
    // SAFETY: one thread writes `load`, before the tasks read it; `offsets` is only read.
    let load = unsafe {
        let (load, offsets) = (load.all_mut(), offsets.all());
        for (load, pair) in load.iter_mut().zip(offsets.windows(2)) {
            *load = (f64::from(pair[1]) - f64::from(pair[0])) as f32 / rows.max(1) as f32;
        }
        &*load
    };
    // First the sums for `aux`, then those for `entropy`.
    let tasks = rows.div_ceil(ROWS);
    let partials = ctx.partials(2 * tasks);
    ctx.chunks(rows, ROWS, |range, _| {
        let (task, mut sum, mut bits) = (range.start / ROWS, 0.0, 0.0);
        for row in range {
            // SAFETY: nothing writes `probs` while the op runs.
            let p = unsafe { probs.get(row * all..(row + 1) * all) };
            sum += f64::from(dot(isa, p, load));
            if entropy.is_some() {
                bits -= p.iter().filter(|&&p| p > 0.0).map(|&p| f64::from(p * p.ln())).sum::<f64>();
            }
        }
        // SAFETY: every task has partial sums of its own.
        unsafe {
            partials.set(task, sum);
            partials.set(tasks + task, bits);
        }
    })?;
    let row_scale = row_scale(ctx);
    // SAFETY: all tasks are done; one thread, and the results share no memory with anything else.
    unsafe {
        let (sums, bits) = partials.all().split_at(tasks);
        let (sum, bits) = (sums.iter().sum::<f64>(), bits.iter().sum::<f64>());
        let value = row_scale * f64::from(op.alpha) * all as f64 * sum;
        super::store(aux.all_mut(), &[value as f32], adds);
        if let Some(entropy) = entropy {
            super::store(entropy.all_mut(), &[(row_scale * bits) as f32], adds);
        }
    }
    Ok(())
}
