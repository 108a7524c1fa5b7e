//! Fills and copies.

use super::Pools;
use ironhorse_core::Result;
use ironhorse_core::op::{CopySlot, Fill};

pub(super) fn fill(pools: &mut Pools, op: &Fill) -> Result<()> {
    pools.write(op.out, &vec![f64::from(op.value); op.out.numel()])
}

pub(super) fn copy(pools: &mut Pools, op: &CopySlot) -> Result<()> {
    let inp = pools.read(op.inp)?;
    pools.write(op.out, &inp)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{CopySlot, Fill};

    #[test]
    fn fill_by_hand() {
        let mut kit = Kit::new("fill");
        let out = kit.slot([3]);
        kit.finish(Fill { out, value: 2.5 }).expect_f64(out, &[2.5, 2.5, 2.5]);
    }

    #[test]
    fn copy_by_hand() {
        let mut kit = Kit::new("copy");
        let (out, inp) = (kit.slot([2, 2]), kit.f32s([4], &[1.0, -2.0, 3.0, 4.0]));
        kit.finish(CopySlot { out, inp }).expect_f64(out, &[1.0, -2.0, 3.0, 4.0]);
    }
}
