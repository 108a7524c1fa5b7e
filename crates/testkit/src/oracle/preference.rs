//! The loss of pairs of answers (DPO).

use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{Preference, check_pairs};

pub(super) fn preference(pools: &mut Pools, op: &Preference, step: Step) -> Result<()> {
    let (losses, reference, pairs) =
        (pools.read(op.losses)?, pools.read(op.reference)?, pools.read(op.pairs)?);
    check_pairs(&pairs.iter().map(|&row| row as i32).collect::<Vec<_>>(), losses.len())?;
    let beta = f64::from(op.beta);
    let (mut loss, mut means, mut rewards) = (0.0, [0.0; 3], Vec::new());
    let mut weights = vec![0.0; losses.len()];
    for pair in pairs.chunks_exact(3) {
        let [start, middle, end] = [0, 1, 2].map(|i| pair[i] as usize);
        let reward = |start: usize, end: usize| -> f64 {
            beta * (start..end).map(|row| reference[row] - losses[row]).sum::<f64>()
        };
        let [chosen, rejected] = [reward(start, middle), reward(middle, end)];
        rewards.extend([chosen, rejected]);
        if start == end {
            continue;
        }
        let margin = chosen - rejected;
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        // -ln σ(x) is -x where e^-x overflows
        loss += if margin < -700.0 { -margin } else { (-margin).exp().ln_1p() };
        let larger = if chosen > rejected { 1.0 } else { 0.0 };
        means.iter_mut().zip([chosen, rejected, larger]).for_each(|(sum, x)| *sum += x);
        weights[start..middle].fill(beta * sigmoid(-margin));
        weights[middle..end].fill(-beta * sigmoid(-margin));
    }
    let (scale, adds) = (f64::from(step.scalars.loss_scale), op.accum.adds(step.scalars.added()));
    pools.write(op.rewards, &rewards)?;
    if let Some(slot) = op.weights {
        pools.write(slot, &weights)?;
    }
    pools.store(op.loss, &[scale * loss], adds)?;
    pools.store(op.means, &means.map(|mean| scale * mean), adds)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, Preference};

    /// Two pairs of five rows and one that does not count. Pair 0: rewards 0.5·(1 + 2) and 0.5·(-1), so a margin of 2. Pair 1: 0.5·0 and
    /// 0.5·4, so -2.
    fn pairs(accum: Accum) -> (Kit, Preference) {
        let mut kit = Kit::new("preference");
        (kit.scalars.loss_scale, kit.scalars.micro_step) = (0.5, 1);
        let op = Preference {
            loss: kit.f32s([], &[10.0]),
            means: kit.f32s([3], &[1.0, 2.0, 3.0]),
            rewards: kit.slot([3, 2]),
            weights: Some(kit.slot([2, 4])),
            losses: kit.f32s([2, 4], &[9.0, 1.0, 1.0, 3.0, 5.0, 2.0, 1.0, 7.0]),
            reference: kit.f32s([2, 4], &[0.0, 2.0, 3.0, 2.0, 5.0, 6.0, 1.0, 0.0]),
            pairs: kit.i32s([3, 3], &[1, 3, 4, 4, 5, 7, 7, 7, 7]),
            beta: 0.5,
            accum,
        };
        (kit, op)
    }

    #[test]
    fn preference_by_hand() {
        let (kit, op) = pairs(Accum::Write);
        let case = kit.finish(op);
        case.expect_f64(op.rewards, &[1.5, -0.5, 0.0, 2.0, 0.0, 0.0]);
        // ln(1 + e^-2) and ln(1 + e^2)
        case.expect_within(op.loss, &[0.5 * (0.126_928_011 + 2.126_928_011)], 1e-9);
        case.expect_f64(op.means, &[0.75, 0.75, 0.5]);
        // 0.5·σ(-2) and 0.5·σ(2)
        let (few, many) = (0.059_601_461, 0.440_398_539);
        let want = [0.0, few, few, -few, many, -many, -many, 0.0];
        case.expect_within(op.weights.unwrap(), &want, 1e-9);
        let (kit, op) = pairs(Accum::FirstWrites);
        kit.finish(op).expect_f64(op.means, &[1.75, 2.75, 3.5]);
    }
}
