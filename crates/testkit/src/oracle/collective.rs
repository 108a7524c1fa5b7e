//! What a rank exchanges when it is alone, and sums of rows.

use super::Pools;
use ironhorse_core::op::{AllGather, Exchange, TreeSum};
use ironhorse_core::{Error, Place, Result};

/// The oracle has nobody to talk to.
fn alone(place: Place) -> Result<()> {
    if place.is_alone() { Ok(()) } else { Err(Error::Program("the oracle runs without other ranks".into())) }
}

pub(super) fn exchange(pools: &mut Pools, op: &Exchange) -> Result<()> {
    alone(op.place)?;
    match op.inp {
        Some(inp) => {
            let node = pools.read(inp)?;
            pools.write(op.out, &node)
        }
        None => Ok(()),
    }
}

pub(super) fn all_gather(_pools: &mut Pools, op: &AllGather) -> Result<()> {
    alone(op.slices.place)
}

pub(super) fn tree_sum(pools: &mut Pools, op: &TreeSum) -> Result<()> {
    let (width, rows) = (op.out.numel(), pools.read(op.inp)?);
    let sum = |i: usize| rows[i..].iter().step_by(width.max(1)).sum();
    pools.write(op.out, &(0..width).map(sum).collect::<Vec<f64>>())
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::Place;
    use ironhorse_core::op::{Exchange, TreeSum};
    use ironhorse_core::ranks::Among;

    #[test]
    fn sums_by_hand() {
        let mut kit = Kit::new("rows");
        let (out, inp) = (kit.slot([2]), kit.f32s([3, 2], &[1.0, 2.0, 0.5, -4.0, 8.0, 16.0]));
        kit.finish(TreeSum { out, inp, micro_steps: 3, world: 3 }).expect_f64(out, &[9.5, 14.0]);
        let mut kit = Kit::new("alone");
        let (out, inp) = (kit.slot([1, 2]), kit.f32s([2], &[1.0, 2.0]));
        let (inp, place) = (Some(inp), Place::ALONE);
        let op = Exchange { out, inp, round: 0, micro_steps: 3, place, among: Among::All, divided: true };
        kit.finish(op).expect_f64(out, &[1.0, 2.0]);
    }
}
