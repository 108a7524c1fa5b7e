//! Moving tokens to their experts and back. Route `token·K + j` is the j-th expert of a token. Sorted by expert, the
//! routes are the rows of the experts' inputs: `order` maps a row to its route, `places` maps a route to its row.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Accum, Checker, Named, named, op};
use crate::{DType, Result, Slot};

/// Sums of K terms, in order.
const FEW_TERMS: Numerics = Numerics::new(Arithmetic::Elementwise(1e-6));

op! {
    /// Sorts the routes by expert (a stable sort). Rows `offsets[e]..offsets[e+1]` belong to expert e. An expert index
    /// outside of 0..E is an input error.
    pub struct RouteSort {
        /// (N·K) i32
        pub order: Slot = Write,
        /// (N,K) i32
        pub places: Slot = Write,
        /// (E+1) i32
        pub offsets: Slot = Write,
        /// (N,K) i32
        pub experts: Slot = Read,
    }
    name "route_sort"
    check(op, c) {
        c.dtypes(named!(op: order, places, offsets, experts), DType::I32)?;
        c.numels(named!(op: order, places), op.experts.numel())?;
        if op.offsets.numel() < 2 {
            let shape = op.offsets.shape;
            return c.fail(format!("`offsets` is {shape}, expected [E + 1] with at least one expert"));
        }
        Ok(())
    }
    numerics { Numerics::EXACT }
    flops(_op) { 0 }
}

op! {
    /// `out[s] = inp[order[s] / K]`: copies each token once for each of its experts.
    pub struct Permute {
        /// (N·K,C)
        pub out: Slot = Write,
        /// (..,C), N rows
        pub inp: Slot = Read,
        /// (N·K) i32
        pub order: Slot = Read,
    }
    name "permute"
    check(op, c) {
        c.same_float(named!(op: out, inp))?;
        c.dtype("order", &op.order, DType::I32)?;
        check_rows(c, named!(op: out, inp, order))
    }
    numerics { Numerics::EXACT }
    flops(_op) { 0 }
}

op! {
    /// `d_inp[n] (+)= Σ_j d_out[places[n,j]]`, in the order of j.
    pub struct PermuteBwd {
        /// (..,C), N rows
        pub d_inp: Slot = Accumulate(accum),
        /// (N·K,C)
        pub d_out: Slot = Read,
        /// (N,K) i32
        pub places: Slot = Read,
        /// Whether `d_inp` is overwritten or added to.
        pub accum: Accum,
    }
    name "permute_bwd"
    check(op, c) {
        c.same_float(named!(op: d_out, d_inp))?;
        check_places(c, named!(op: d_out, d_inp, places))
    }
    numerics { FEW_TERMS }
    flops(op) { op.d_out.numel() as u64 }
}

op! {
    /// `out[n] = Σ_j weights[n,j]·rows[places[n,j]]`, in the order of j.
    pub struct Combine {
        /// (..,C), N rows
        pub out: Slot = Write,
        /// (N·K,C)
        pub rows: Slot = Read,
        /// (N,K) i32
        pub places: Slot = Read,
        /// (N,K) f32
        pub weights: Slot = Read,
    }
    name "combine"
    check(op, c) {
        c.same_float(named!(op: rows, out))?;
        check_places(c, named!(op: rows, out, places))?;
        check_weights(c, named!(op: weights), &op.places)
    }
    numerics { FEW_TERMS }
    flops(op) { 2 * op.rows.numel() as u64 }
}

op! {
    /// Gradients of [`Combine`]: `d_rows[places[n,j]] = weights[n,j]·d_out[n]` and
    /// `d_weights[n,j] = d_out[n] · rows[places[n,j]]`.
    pub struct CombineBwd {
        /// (N·K,C)
        pub d_rows: Slot = Write,
        /// (N,K) f32
        pub d_weights: Slot = Write,
        /// (..,C), N rows
        pub d_out: Slot = Read,
        /// (N·K,C), the input of the forward
        pub rows: Slot = Read,
        /// (N,K) i32
        pub places: Slot = Read,
        /// (N,K) f32
        pub weights: Slot = Read,
    }
    name "combine_bwd"
    check(op, c) {
        c.same_float(named!(op: rows, d_rows, d_out))?;
        check_places(c, named!(op: rows, d_out, places))?;
        c.matrix("d_rows", &op.d_rows, op.rows.shape.rows(), op.rows.shape.cols())?;
        check_weights(c, named!(op: weights, d_weights), &op.places)
    }
    numerics {
        // The gradient of a weight is a dot product.
        Numerics::new(Arithmetic::Sum(3e-6))
    }
    flops(op) { 3 * op.rows.numel() as u64 }
    // A row is no longer needed once the gradient of its weight is computed.
    in_place (d_rows, rows)
}

/// Checks that `rows` has a row for each route and `tokens` one for each token, with the same number of routes per
/// token.
fn check_rows(c: &Checker, &[rows, tokens, routes]: &[Named<'_>; 3]) -> Result<()> {
    let (count, n) = (routes.1.numel(), tokens.1.shape.rows());
    c.matrix(rows.0, rows.1, count, tokens.1.shape.cols())?;
    if count.checked_rem(n).unwrap_or(count) != 0 || (n > 0 && count == 0) {
        let name = routes.0;
        return c
            .fail(format!("`{name}` has {count} elements, expected K for each of {n} tokens, K at least 1"));
    }
    Ok(())
}

/// As above, and checks that `places` has the shape (N,K).
fn check_places(c: &Checker, slots: &[Named<'_>; 3]) -> Result<()> {
    let &[_, (_, tokens), (name, places)] = slots;
    c.dtype(name, places, DType::I32)?;
    check_rows(c, slots)?;
    c.matrix(name, places, tokens.shape.rows(), places.shape.cols())
}

fn check_weights(c: &Checker, weights: &[Named<'_>], places: &Slot) -> Result<()> {
    c.dtypes(weights, DType::F32)?;
    c.matrices(weights, places.shape.rows(), places.shape.cols())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;
    use crate::op::OpSpec;

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
