//! Direct preference optimisation (DPO): the loss of pairs of a chosen and a rejected answer.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, named, op};
use crate::{DType, Error, Result, Slot};

op! {
    /// The loss of pairs of answers to the same question, from the `losses` of their tokens and those that a `reference`
    /// model gives them.
    ///
    /// `pairs` holds three row numbers for each pair p: its chosen text is the rows `[p][0]` to `[p][1]`, the rejected one
    /// follows up to `[p][2]`. All row numbers together do not fall; a pair without rows does not count. Of pair p
    /// - `reward = beta·Σ (reference - losses)` over the rows of a text: beta·ln(π/π_ref), of the chosen and of the rejected;
    /// - `margin = reward of the chosen - reward of the rejected`;
    /// - `loss (+)= loss_scale·Σ_p -ln σ(margin)`: the mean over the pairs of a step with `loss_scale` = 1/(its pairs);
    /// - `means (+)= loss_scale·Σ_p` of both rewards and of 1 where the chosen's is larger;
    /// - `weights` = ∂(Σ_p -ln σ(margin))/∂losses: beta·σ(-margin) in the rows of the chosen, the negative of it in those of
    ///   the rejected, 0 elsewhere.
    pub struct Preference {
        /// one f32
        pub loss: Slot = Accumulate(accum),
        /// (3) f32
        pub means: Slot = Accumulate(accum),
        /// (P,2) f32, of the chosen and of the rejected; 0 where a pair does not count
        pub rewards: Slot = Write,
        /// (B,T) f32; only a backward needs them
        pub weights: Option<Slot> = Write,
        /// (B,T) f32, 0 where a target is [`IGNORED`](super::IGNORED)
        pub losses: Slot = Read,
        /// (B,T) f32, the same of the reference
        pub reference: Slot = Read,
        /// (P,3) i32
        pub pairs: Slot = Read,
        /// How much a reward counts: large values hold the model close to the reference.
        pub beta: f32,
        /// Whether `loss` and `means` are overwritten or added to.
        pub accum: Accum,
    }
    name "preference"
    check(op, c) {
        c.dtypes(named!(op: loss, means, rewards, losses, reference), DType::F32)?;
        c.dtype("pairs", &op.pairs, DType::I32)?;
        c.numel("loss", &op.loss, 1)?;
        c.numel("means", &op.means, 3)?;
        let (count, rows) = (op.pairs.shape.rows(), op.losses.numel());
        c.matrix("pairs", &op.pairs, count, 3)?;
        c.matrix("rewards", &op.rewards, count, 2)?;
        c.numel("reference", &op.reference, rows)?;
        if let Some(weights) = &op.weights {
            c.dtype("weights", weights, DType::F32)?;
            c.numel("weights", weights, rows)?;
        }
        if !(op.beta.is_finite() && op.beta > 0.0) {
            return c.fail(format!("`beta` is {}, expected a number above 0", op.beta));
        }
        Ok(())
    }
    numerics {
        // Differences and sums in f64, so that rewards near 0 keep their digits; a result is rounded once and, added to
        // what was there, once more.
        Numerics::new(Arithmetic::Elementwise(3e-7))
    }
    flops(op) { 3 * op.losses.numel() as u64 }
}

/// Refuses `pairs` whose row numbers fall or are not among the `rows` of a batch.
pub fn check_pairs(pairs: &[i32], rows: usize) -> Result<()> {
    let mut before = 0;
    for (index, &row) in pairs.iter().enumerate() {
        if row < before || row as usize > rows {
            return Err(Error::Input(bad_pair(row, index, rows)));
        }
        before = row;
    }
    Ok(())
}

/// The error of a row number of pairs; `index` counts all of them.
pub fn bad_pair(row: i32, index: usize, rows: usize) -> String {
    format!("row {row} at index {index} of the pairs is below the one before it, or outside 0 to {rows}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_pairs_do_not_fall() {
        for fine in [&[0, 2, 4, 4, 4, 4][..], &[1, 1, 3, 3, 4, 4], &[]] {
            check_pairs(fine, 4).unwrap();
        }
        for (wrong, at) in [([0, 2, 5], 2), ([-1, 2, 4], 0), ([0, 3, 2], 2), ([i32::MAX, 2, 4], 0)] {
            assert_eq!(check_pairs(&wrong, 4).unwrap_err().to_string(), bad_pair(wrong[at], at, 4));
        }
    }
}
