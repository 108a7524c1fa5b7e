//! How exact the results of an op can be. Each op says it of itself; tests and `verify` derive their tolerances from it.

/// The most that one rounding to f32 can be off, relative to the value: 2⁻²⁴.
pub const F32_UNIT: f64 = 5.960_464_477_539_063e-8;
/// The same for bf16, which keeps 8 bits: 2⁻⁸.
pub const BF16_UNIT: f64 = 1.0 / 256.0;

/// What an op does in f32, and how far its result may then be from exact arithmetic: ‖got−want‖/‖want‖.
///
/// The bounds were measured with the oracle's code compiled for f32, every sum in plain order, over all conformance cases
/// (largest errors: layer norms 2.4e-6, linear 9.3e-7, attention 3.9e-6, cross-entropy 2.2e-7, AdamW 1.3e-6). None is
/// above 1e-5.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arithmetic {
    /// None: the bits must be the same.
    Exact,
    /// One rounded addition per element.
    Addition,
    /// A few roundings per element, with at most a handful of terms in a sum.
    Elementwise(f64),
    /// Long sums of positive terms: nothing cancels.
    PositiveSum(f64),
    /// Long sums that may cancel, dot products, exponentials of scores.
    Sum(f64),
}

impl Arithmetic {
    /// How far an f32 result may be from the exact one.
    pub fn error(self) -> f64 {
        match self {
            Self::Exact => 0.0,
            Self::Addition => 1.1 * F32_UNIT,
            Self::Elementwise(error) | Self::PositiveSum(error) | Self::Sum(error) => error,
        }
    }

    /// How far the f32 results of two engines may be apart, each with an order of summation of its own.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// Activations with weights, or with gradients.
    Linear,
    /// Scores, whose absolute error is a relative one of their exponentials, and the products with values and gradients.
    Attention,
    /// The same for a single query: in bf16 it stays off the tensor cores.
    CachedAttention,
}

/// What limits the exactness of one result of an op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numerics {
    /// The arithmetic in f32.
    pub arithmetic: Arithmetic,
    /// The matrix product it contains.
    pub product: Option<Product>,
    /// How many roundings to bf16 an engine may make before that of the result, each weighted by what it does to the result.
    pub inner_roundings: f64,
    /// In bf16, an engine may use the hardware's tanh, which is off by 2⁻¹¹.
    pub fast_tanh: bool,
    /// A bf16 result is rounded up or down at random instead of to the nearest.
    pub random_rounding: bool,
    /// In bf16, how far two engines may be apart, where it is not one [`BF16_UNIT`] for a bf16 result (rounding to the
    /// nearest is off by 0.4 of it over a tensor) and [`Arithmetic::between_engines`] for an f32 result.
    pub bf16_engines: Option<f64>,
}

impl Numerics {
    /// Copied bits.
    pub const EXACT: Self = Self::new(Arithmetic::Exact);

    /// This arithmetic, and nothing else that costs digits.
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

    /// With a matrix product.
    #[must_use]
    pub const fn product(self, product: Product) -> Self {
        Self { product: Some(product), ..self }
    }

    /// With roundings to bf16 before that of the result.
    #[must_use]
    pub const fn inner_roundings(self, inner_roundings: f64) -> Self {
        Self { inner_roundings, ..self }
    }

    /// With the hardware's tanh in bf16.
    #[must_use]
    pub const fn fast_tanh(self) -> Self {
        Self { fast_tanh: true, ..self }
    }

    /// With bf16 results rounded at random.
    #[must_use]
    pub const fn random_rounding(self) -> Self {
        Self { random_rounding: true, ..self }
    }

    /// With this distance between two engines in bf16.
    #[must_use]
    pub const fn bf16_engines(self, apart: f64) -> Self {
        Self { bf16_engines: Some(apart), ..self }
    }
}
