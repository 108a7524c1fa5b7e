//! Addition.

use super::Pools;
use ironhorse_core::Result;
use ironhorse_core::op::Add;

pub(super) fn add(pools: &mut Pools, op: &Add) -> Result<()> {
    let (a, b) = (pools.read(op.a)?, pools.read(op.b)?);
    let out: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    pools.write(op.out, &out)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::Add;

    #[test]
    fn add_by_hand() {
        let mut kit = Kit::new("add");
        let (out, a, b) = (kit.slot([2]), kit.f32s([2], &[1.0, 2.0]), kit.f32s([2], &[0.5, -4.0]));
        kit.finish(Add { out, a, b }).expect_f64(out, &[1.5, -2.0]);
        let mut kit = Kit::new("in place");
        let (a, b) = (kit.f32s([2], &[1.0, 2.0]), kit.f32s([2], &[0.5, -4.0]));
        kit.finish(Add { out: b, a, b }).expect_f64(b, &[1.5, -2.0]);
    }
}
