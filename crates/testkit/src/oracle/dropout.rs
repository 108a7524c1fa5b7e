//! Dropout of activations.

use super::{Pools, Step};
use ironhorse_core::op::Dropout;
use ironhorse_core::{DropMask, DropSite, Result, Scalars};

/// The factors of the elements of a matrix: 0 where dropped, else 1 / (1 - rate).
#[derive(Clone, Copy)]
pub(super) struct Factors {
    mask: DropMask,
    scale: f64,
}

impl Factors {
    /// The factors for rows of `cols` elements.
    pub fn new(drop: DropSite, scalars: &Scalars, cols: usize) -> Self {
        Self { mask: DropMask::new(drop, scalars, cols), scale: 1.0 / (1.0 - drop.rate.rate()) }
    }

    pub fn at(&self, row: usize, col: usize) -> f64 {
        if self.mask.row(row as u64).keeps(col) { self.scale } else { 0.0 }
    }
}

pub(super) fn dropout(pools: &mut Pools, op: &Dropout, step: Step) -> Result<()> {
    let cols = op.out.shape.cols();
    let factors = Factors::new(op.drop, step.scalars, cols);
    let inp = pools.read(op.inp)?;
    let out: Vec<f64> = inp.iter().enumerate().map(|(i, x)| x * factors.at(i / cols, i % cols)).collect();
    pools.write(op.out, &out)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Dropout, Op};
    use ironhorse_core::{DropMask, DropRate, DropSite};

    /// Half of 64 ones become 2, the others 0, and the gradient has the mask of the value.
    #[test]
    fn kept_elements_are_scaled_and_the_mask_is_that_of_the_scalars() {
        let drop = DropSite { rate: DropRate::new(0.5).unwrap(), site: 3 };
        let made = |step| {
            let mut kit = Kit::new("dropout");
            kit.scalars.step = step;
            let (out, inp) = (kit.slot([4, 16]), kit.f32s([4, 16], &[1.0; 64]));
            let case = kit.finish(Dropout { out, inp, drop });
            let values = case.oracle().unwrap().read_f64(out).unwrap();
            let mask = DropMask::new(drop, &case.scalars, 16);
            for (i, &value) in values.iter().enumerate() {
                assert_eq!(value, if mask.row(i as u64 / 16).keeps(i % 16) { 2.0 } else { 0.0 });
            }
            let Op::Dropout(_) = case.op() else { unreachable!() };
            values
        };
        let (one, two) = (made(1), made(2));
        let kept = one.iter().filter(|&&value| value > 0.0).count();
        assert!((16..48).contains(&kept), "{kept}");
        assert_ne!(one, two);
        assert_eq!(one, made(1));
    }
}
