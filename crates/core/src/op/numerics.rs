//! The accuracy of each op's results, from which tests and `verify` derive their tolerances.

/// The largest relative error of one rounding to f32: 2⁻²⁴.
pub const F32_UNIT: f64 = 5.960_464_477_539_063e-8;
/// The largest relative error of one rounding to bf16, which keeps 8 significant bits: 2⁻⁸.
pub const BF16_UNIT: f64 = 1.0 / 256.0;

/// The kind of f32 arithmetic of an op, with the largest error ‖got−want‖/‖want‖ against exact arithmetic.
///
/// The bounds were measured with the oracle's code compiled for f32, every sum in plain order, over all conformance
/// cases (largest errors: layer norms 2.4e-6, linear 9.3e-7, attention 3.9e-6, cross-entropy 2.2e-7, AdamW 1.3e-6).
/// None is above 1e-5.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arithmetic {
    /// No arithmetic: the bits must be the same.
    Exact,
    /// One rounded addition per element.
    Addition,
    /// A few rounding errors per element, and sums of at most a handful of terms.
    Elementwise(f64),
    /// Long sums of positive terms: nothing cancels.
    PositiveSum(f64),
    /// Long sums that may cancel: dot products, and exponentials of scores.
    Sum(f64),
}

impl Arithmetic {
    /// The tolerance of an f32 result against the exact one.
    pub fn error(self) -> f64 {
        match self {
            Self::Exact => 0.0,
            Self::Addition => 1.1 * F32_UNIT,
            Self::Elementwise(error) | Self::PositiveSum(error) | Self::Sum(error) => error,
        }
    }

    /// The tolerance between the f32 results of two engines that may sum in different orders.
    pub fn between_engines(self) -> f64 {
        match self {
            Self::Exact => 0.0,
            Self::Addition => 2.2 * F32_UNIT,
            Self::Elementwise(_) => 2e-6,
            Self::PositiveSum(_) => 5e-6,
            Self::Sum(_) => 1e-5,
        }
    }
}

/// A matrix product that an engine may compute on tensor cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Product {
    /// Activations times weights, or times gradients.
    Linear,
    /// Attention scores, whose absolute error becomes a relative error of their exponentials, and the products with
    /// values and gradients.
    Attention,
    /// Attention over a cache. In bf16 it is held to sums in f32 without tensor cores, also where prompts use them.
    CachedAttention,
    /// A product of 8-bit numbers, which are multiplied exactly in f32; the sums on tensor cores have an error.
    Fp8 {
        /// The largest relative error of a sum, see [`Product::fp8_sum`].
        sum: f64,
    },
}

impl Product {
    /// The largest relative error of a sum of products of 8-bit numbers. Hopper's tensor cores keep 13 bits after the point of the
    /// running sum and cut off the rest, once for every 32 products: at most 2⁻¹³ of the sum so far. After four times that the sum is
    /// added to an f32 and begins anew, unless the product is `fast`: then there are as many cuts as the sum has parts of 32. Parts of
    /// terms of both signs are independent, so over a tensor the sums so far are on average 2/3 of the last one; and what is cut off is
    /// on average half of the most.
    pub fn fp8_sum(terms: usize, fast: bool) -> f64 {
        let cut = 1.0 / 8192.0;
        if fast { (terms.div_ceil(32) as f64 * cut / 3.0).max(4.0 * cut) } else { 4.0 * cut }
    }
}

/// Everything that limits the accuracy of one result of an op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numerics {
    /// The arithmetic in f32.
    pub arithmetic: Arithmetic,
    /// The matrix product it contains.
    pub product: Option<Product>,
    /// How many intermediate roundings to bf16 an engine may make, each weighted by its effect on the result.
    pub inner_roundings: f64,
    /// Whether an engine may use the hardware's tanh in bf16, whose error is 2⁻¹¹.
    pub fast_tanh: bool,
    /// A bf16 result is rounded stochastically instead of to the nearest.
    pub random_rounding: bool,
    /// The tolerance between two engines in bf16, if it is not the default: one [`BF16_UNIT`] for a bf16 result (over a
    /// tensor, rounding to the nearest has an error of 0.4 of it), [`Arithmetic::between_engines`] for an f32 result.
    pub bf16_engines: Option<f64>,
}

impl Numerics {
    /// The numerics of copied bits.
    pub const EXACT: Self = Self::new(Arithmetic::Exact);

    /// The numerics of this arithmetic, with no other source of error.
    pub const fn new(arithmetic: Arithmetic) -> Self {
        Self {
            arithmetic,
            product: None,
            inner_roundings: 0.0,
            fast_tanh: false,
            random_rounding: false,
            bf16_engines: None,
        }
    }

    /// These numerics with a matrix product.
    #[must_use]
    pub const fn product(self, product: Product) -> Self {
        Self { product: Some(product), ..self }
    }

    /// These numerics with this many intermediate roundings to bf16.
    #[must_use]
    pub const fn inner_roundings(self, inner_roundings: f64) -> Self {
        Self { inner_roundings, ..self }
    }

    /// These numerics with the hardware's tanh in bf16.
    #[must_use]
    pub const fn fast_tanh(self) -> Self {
        Self { fast_tanh: true, ..self }
    }

    /// These numerics with stochastic rounding of bf16 results.
    #[must_use]
    pub const fn random_rounding(self) -> Self {
        Self { random_rounding: true, ..self }
    }

    /// These numerics with this tolerance between two engines in bf16.
    #[must_use]
    pub const fn bf16_engines(self, apart: f64) -> Self {
        Self { bf16_engines: Some(apart), ..self }
    }
}
