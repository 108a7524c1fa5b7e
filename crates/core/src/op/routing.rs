//! Moving tokens to their experts and back. Route `token·K + j` is the j-th expert of a token. Sorted by expert, the
//! routes are the rows of the experts' inputs: `order` maps a row to its route, `places` maps a route to its row.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{DType, Result, Slot};

/// Sums of K terms, in order.
const FEW_TERMS: Numerics = Numerics::new(Arithmetic::Elementwise(1e-6));

/// Sorts the routes by expert (a stable sort). Rows `offsets[e]..offsets[e+1]` belong to expert e. An expert index
/// outside of 0..E is an input error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteSort {
    /// (N·K) i32
    pub order: Slot,
    /// (N,K) i32
    pub places: Slot,
    /// (E+1) i32
    pub offsets: Slot,
    /// (N,K) i32
    pub experts: Slot,
}

impl OpSpec for RouteSort {
    const NAME: &'static str = "route_sort";
    slots!(Write order, Write places, Write offsets, Read experts);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        let all = [
            ("order", &self.order),
            ("places", &self.places),
            ("offsets", &self.offsets),
            ("experts", &self.experts),
        ];
        all.iter().try_for_each(|(name, slot)| c.dtype(name, slot, DType::I32))?;
        c.numel("order", &self.order, self.experts.numel())?;
        c.numel("places", &self.places, self.experts.numel())?;
        if self.offsets.numel() < 2 {
            return c.fail(format!(
                "`offsets` is {}, expected [E + 1] with at least one expert",
                self.offsets.shape
            ));
        }
        Ok(())
    }

    fn numerics(&self, _: &str) -> Numerics {
        Numerics::EXACT
    }

    fn flops(&self) -> u64 {
        0
    }
}

/// `out[s] = inp[order[s] / K]`: copies each token once for each of its experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Permute {
    /// (N·K,C)
    pub out: Slot,
    /// (..,C), N rows
    pub inp: Slot,
    /// (N·K) i32
    pub order: Slot,
}

impl OpSpec for Permute {
    const NAME: &'static str = "permute";
    slots!(Write out, Read inp, Read order);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("out", &self.out), ("inp", &self.inp)])?;
        c.dtype("order", &self.order, DType::I32)?;
        check_rows(&c, ("out", &self.out), ("inp", &self.inp), ("order", &self.order))
    }

    fn numerics(&self, _: &str) -> Numerics {
        Numerics::EXACT
    }

    fn flops(&self) -> u64 {
        0
    }
}

/// `d_inp[n] (+)= Σ_j d_out[places[n,j]]`, in the order of j.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PermuteBwd {
    /// (..,C), N rows
    pub d_inp: Slot,
    /// (N·K,C)
    pub d_out: Slot,
    /// (N,K) i32
    pub places: Slot,
    /// Whether `d_inp` is overwritten or added to.
    pub accum: Accum,
}

impl OpSpec for PermuteBwd {
    const NAME: &'static str = "permute_bwd";
    slots!(Accumulate(accum) d_inp, Read d_out, Read places);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_out", &self.d_out), ("d_inp", &self.d_inp)])?;
        check_places(&c, ("d_out", &self.d_out), ("d_inp", &self.d_inp), &self.places)
    }

    fn numerics(&self, _: &str) -> Numerics {
        FEW_TERMS
    }

    fn flops(&self) -> u64 {
        self.d_out.numel() as u64
    }
}

/// `out[n] = Σ_j weights[n,j]·rows[places[n,j]]`, in the order of j.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Combine {
    /// (..,C), N rows
    pub out: Slot,
    /// (N·K,C)
    pub rows: Slot,
    /// (N,K) i32
    pub places: Slot,
    /// (N,K) f32
    pub weights: Slot,
}

impl OpSpec for Combine {
    const NAME: &'static str = "combine";
    slots!(Write out, Read rows, Read places, Read weights);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("rows", &self.rows), ("out", &self.out)])?;
        check_places(&c, ("rows", &self.rows), ("out", &self.out), &self.places)?;
        check_weights(&c, ("weights", &self.weights), &self.places)
    }

    fn numerics(&self, _: &str) -> Numerics {
        FEW_TERMS
    }

    fn flops(&self) -> u64 {
        2 * self.rows.numel() as u64
    }
}

/// Gradients of [`Combine`]: `d_rows[places[n,j]] = weights[n,j]·d_out[n]` and
/// `d_weights[n,j] = d_out[n] · rows[places[n,j]]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CombineBwd {
    /// (N·K,C)
    pub d_rows: Slot,
    /// (N,K) f32
    pub d_weights: Slot,
    /// (..,C), N rows
    pub d_out: Slot,
    /// (N·K,C), the input of the forward
    pub rows: Slot,
    /// (N,K) i32
    pub places: Slot,
    /// (N,K) f32
    pub weights: Slot,
}

impl OpSpec for CombineBwd {
    const NAME: &'static str = "combine_bwd";
    slots!(Write d_rows, Write d_weights, Read d_out, Read rows, Read places, Read weights);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("rows", &self.rows), ("d_rows", &self.d_rows), ("d_out", &self.d_out)])?;
        check_places(&c, ("rows", &self.rows), ("d_out", &self.d_out), &self.places)?;
        c.matrix("d_rows", &self.d_rows, self.rows.shape.rows(), self.rows.shape.cols())?;
        check_weights(&c, ("weights", &self.weights), &self.places)?;
        check_weights(&c, ("d_weights", &self.d_weights), &self.places)
    }

    fn numerics(&self, _: &str) -> Numerics {
        // The gradient of a weight is a dot product.
        Numerics::new(Arithmetic::Sum(3e-6))
    }

    fn flops(&self) -> u64 {
        3 * self.rows.numel() as u64
    }

    /// A row is no longer needed once the gradient of its weight is computed.
    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("d_rows", "rows")]
    }
}

type Named<'a> = (&'a str, &'a Slot);

/// Checks that `rows` has a row for each route and `tokens` one for each token, with the same number of routes per
/// token.
fn check_rows(c: &Checker, rows: Named, tokens: Named, routes: Named) -> Result<()> {
    let (count, n) = (routes.1.numel(), tokens.1.shape.rows());
    c.matrix(rows.0, rows.1, count, tokens.1.shape.cols())?;
    if count.checked_rem(n).unwrap_or(count) != 0 || (n > 0 && count == 0) {
        return c.fail(format!(
            "`{}` has {count} elements, expected K for each of {n} tokens, K at least 1",
            routes.0
        ));
    }
    Ok(())
}

/// The same, and checks that `places` has the shape (N,K).
fn check_places(c: &Checker, rows: Named, tokens: Named, places: &Slot) -> Result<()> {
    c.dtype("places", places, DType::I32)?;
    check_rows(c, rows, tokens, ("places", places))?;
    c.matrix("places", places, tokens.1.shape.rows(), places.shape.cols())
}

fn check_weights(c: &Checker, weights: Named, places: &Slot) -> Result<()> {
    c.all_f32(&[weights])?;
    c.matrix(weights.0, weights.1, places.shape.rows(), places.shape.cols())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    fn slot(offset: usize, shape: [usize; 2], dtype: DType) -> Slot {
        Slot { pool: Pool::Io, offset, shape: shape.into(), dtype }
    }

    #[test]
    fn routes_must_fit_the_tokens() {
        let op = |tokens, routes| Permute {
            out: slot(0, [routes, 3], DType::F32),
            inp: slot(1000, [tokens, 3], DType::F32),
            order: slot(2000, [1, routes], DType::I32),
        };
        for (tokens, routes) in [(4, 8), (1, 1), (0, 0)] {
            op(tokens, routes).check().unwrap();
        }
        let text = |op: Permute| op.check().unwrap_err().to_string();
        assert_eq!(
            text(op(4, 6)),
            "permute: `order` has 6 elements, expected K for each of 4 tokens, K at least 1"
        );
        assert_eq!(
            text(op(4, 0)),
            "permute: `order` has 0 elements, expected K for each of 4 tokens, K at least 1"
        );
        assert_eq!(
            text(op(0, 6)),
            "permute: `order` has 6 elements, expected K for each of 0 tokens, K at least 1"
        );
    }
}
