//! Rotary position embedding of packed queries and keys.

use super::embedding::beyond_context;
use super::mask::check_shape;
use super::numerics::{Arithmetic, Numerics};
use super::spec::{named, op};
use crate::Slot;

/// How the speeds at which pairs turn are changed for longer contexts. The angles of one position are in f64, so every
/// engine has the same tables.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// The frequencies stay as they are.
    #[default]
    None,
    /// All pairs turn `factor` times slower.
    Linear {
        /// How much longer the context became.
        factor: f64,
    },
    /// The scaling of Llama 3.1: pairs that turn less than `low` times in the `original` context are `factor` times slower, those
    /// that turn more than `high` times are as fast as before, and those between are in between.
    Llama3 {
        /// How much longer the context became.
        factor: f64,
        /// Turns below which a pair is slowed down by all of `factor`.
        low: f64,
        /// Turns above which a pair keeps its speed.
        high: f64,
        /// The context that the model was first trained for.
        original: u32,
    },
}

impl RopeScaling {
    /// The new speed of a pair that turned by `frequency` radians a position.
    pub fn scaled(self, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low, high, original } => {
                let turns = f64::from(original) * frequency / std::f64::consts::TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                frequency * (kept + (1.0 - kept) / factor)
            }
        }
    }

    /// What is wrong with it.
    fn problem(self) -> Option<String> {
        let positive = |name: &str, value: f64| {
            let fits = value.is_finite() && value > 0.0;
            (!fits).then(|| format!("`{name}` of the scaling is {value}, expected a positive number"))
        };
        match self {
            Self::None => None,
            Self::Linear { factor } => positive("factor", factor),
            Self::Llama3 { factor, low, high, original } => {
                let ordered = || {
                    let fits = low < high && original > 0;
                    let told = format!("{low}, {high} and {original}");
                    (!fits).then(|| format!("`low`, `high` and `original` of the scaling are {told}"))
                };
                positive("factor", factor)
                    .or(positive("low", low))
                    .or(positive("high", high))
                    .or_else(ordered)
            }
        }
    }
}

op! {
    /// Rotates every head of queries and keys in place according to its position; values are unchanged. The pair `(i, i + HD/2)` of
    /// a head at position `p` is rotated by the angle `p·θ^(-2i/HD)` with `θ = base·alpha^(HD/(HD-2))`, whose speed `scaling` may
    /// change: `(a, b) → (a·cos - b·sin, a·sin + b·cos)`. Angles, sines and cosines are computed in f64 and rounded to f32.
    ///
    /// The gradient of a rotation is the inverse rotation: the backward is the same op on the gradient, with `back`.
    pub struct Rope {
        /// (B,T,W), W = (NH + 2·NKV)·HD: packed as for attention
        pub qkv: Slot = Update,
        /// NH
        pub heads: usize,
        /// NKV, a divisor of NH
        pub kv_heads: usize,
        /// The wavelengths of the pairs run from 2π to 2π·base.
        pub base: f32,
        /// NTK-aware scaling: stretches the wavelengths for a context longer than the model was trained for; 1 for none.
        pub alpha: f32,
        /// How the speeds were changed for a context longer than the model was first trained for.
        pub scaling: RopeScaling,
        /// Rotates the other way.
        pub back: bool,
        /// Start at the scalar `position`, or where `positions` say, instead of 0.
        pub at_position: bool,
        /// (B,T) i32, the position of each token where sequences hold several documents; with `at_position`, of tokens that
        /// continue sequences in a cache: any below the context, or -1 for a token that is not used.
        pub positions: Option<Slot> = Read,
        /// Positions at or beyond this are an input error.
        pub context: usize,
    }
    name "rope"
    check(op, c) {
        c.same_float(named!(op: qkv))?;
        let [_, seq, width] = *op.qkv.shape.dims() else {
            return c.fail(format!("`qkv` is {}, expected [B, T, W]", op.qkv.shape));
        };
        let (heads, kv_heads) = (op.heads, op.kv_heads);
        if heads == 0 || kv_heads == 0 || heads % kv_heads != 0 {
            return c.fail(format!("{kv_heads} heads of keys and values do not divide {heads} heads"));
        }
        let parts = heads + 2 * kv_heads;
        if width % parts != 0 {
            return c.fail(format!("{heads} + 2·{kv_heads} heads do not divide the width {width}"));
        }
        if !(width / parts).is_multiple_of(2) {
            return c.fail(format!("the head dimension is {}, expected an even number", width / parts));
        }
        for (name, value) in [("base", op.base), ("alpha", op.alpha)] {
            if !(value.is_finite() && value > 0.0) {
                return c.fail(format!("`{name}` is {value}, expected a positive number"));
            }
        }
        op.scaling.problem().map_or(Ok(()), |what| c.fail(what))?;
        if seq > op.context {
            return c.fail(beyond_context(seq, op.context));
        }
        match &op.positions {
            Some(positions) => check_shape(c, positions, op.qkv.shape.dims()),
            None => Ok(()),
        }
    }
    numerics {
        // Sine and cosine rounded once, two products and a sum: at most 3 F32_UNIT, largest where the sum cancels.
        Numerics::new(Arithmetic::Elementwise(2e-7))
    }
    flops(op) { 3 * op.turned() }
    // Values are not accessed.
    bytes(op) { 2 * op.turned() * op.qkv.dtype.size() as u64 }
    positions(op) {
        let seq = op.qkv.shape.dims().get(1).copied().unwrap_or(0);
        (op.at_position && op.positions.is_none()).then(|| (op.context + 1).saturating_sub(seq))
    }
}

impl Rope {
    /// HD; 0 if `qkv` has no heads or fewer columns than heads.
    pub fn head_dim(&self) -> usize {
        let parts = self.heads.saturating_add(self.kv_heads.saturating_mul(2));
        self.qkv.shape.cols().checked_div(parts).unwrap_or(0)
    }

    /// The difference between the angles of pair `i` at adjacent positions.
    pub fn frequency(&self, i: usize) -> f64 {
        let hd = self.head_dim() as f64;
        let theta = f64::from(self.base) * f64::from(self.alpha).powf(hd / (hd - 2.0));
        self.scaling.scaled(theta.powf(-2.0 * i as f64 / hd))
    }

    /// The number of elements of queries and keys.
    fn turned(&self) -> u64 {
        (self.qkv.shape.rows() * (self.heads + self.kv_heads) * self.head_dim()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::OpSpec;
    use crate::{DType, Pool};

    fn rope(shape: [usize; 3], heads: usize, kv_heads: usize) -> Rope {
        let qkv = Slot { pool: Pool::Io, offset: 0, shape: shape.into(), dtype: DType::F32 };
        let (base, alpha, scaling) = (10_000.0, 1.0, RopeScaling::None);
        let (back, at_position, positions) = (false, false, None);
        Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context: 8 }
    }

    #[test]
    fn scalings_slow_pairs_down() {
        let op = rope([1, 8, 3 * 64], 1, 1);
        let linear = Rope { scaling: RopeScaling::Linear { factor: 4.0 }, ..op };
        assert_eq!(linear.frequency(7), op.frequency(7) / 4.0);
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
        let llama3 = Rope { base: 500_000.0, scaling, ..op };
        let plain = Rope { scaling: RopeScaling::None, ..llama3 };
        let ratios: Vec<f64> = (0..32).map(|i| llama3.frequency(i) / plain.frequency(i)).collect();
        assert_eq!((ratios[0], ratios[31]), (1.0, 0.125));
        assert!(ratios.windows(2).all(|pair| pair[1] <= pair[0]), "{ratios:?}");
        // a pair that turns 2.5 times in the original context is halfway between
        let middle = std::f64::consts::TAU * 2.5 / 8192.0;
        assert!((scaling.scaled(middle) / middle - 0.5625).abs() < 1e-12);
        let text = |scaling| Rope { scaling, ..op }.check().unwrap_err().to_string();
        assert_eq!(
            text(RopeScaling::Linear { factor: 0.0 }),
            "rope: `factor` of the scaling is 0, expected a positive number"
        );
        assert_eq!(
            text(RopeScaling::Llama3 { factor: 8.0, low: 4.0, high: 4.0, original: 8192 }),
            "rope: `low`, `high` and `original` of the scaling are 4, 4 and 8192"
        );
    }

    #[test]
    fn frequencies_are_those_of_the_paper_and_alpha_stretches_them() {
        let op = rope([1, 8, 3 * 64], 1, 1);
        assert_eq!(op.frequency(0), 1.0);
        assert!((op.frequency(16) - 0.01).abs() < 1e-15);
        // The slowest pair rotates alpha times slower: the exponent HD/(HD - 2) is chosen for this.
        let wide = Rope { alpha: 8.0, ..op };
        assert!((wide.frequency(31) - op.frequency(31) / 8.0).abs() < 1e-15);
        assert_eq!(wide.frequency(0), 1.0);
        assert_eq!(Rope { alpha: 8.0, ..rope([1, 8, 6], 1, 1) }.frequency(0), 1.0, "a head of two");
        assert_eq!(op.bytes(), Some(2 * 8 * 2 * 64 * 4));
    }

    #[test]
    fn what_cannot_be_turned_is_refused() {
        let text = |op: Rope| op.check().unwrap_err().to_string();
        rope([2, 8, 40], 6, 2).check().unwrap();
        assert_eq!(
            text(rope([2, 9, 40], 6, 2)),
            "rope: sequence length 9 is beyond the model's context of 8 positions"
        );
        assert_eq!(text(rope([2, 8, 41], 6, 2)), "rope: 6 + 2·2 heads do not divide the width 41");
        assert_eq!(text(rope([2, 8, 30], 6, 2)), "rope: the head dimension is 3, expected an even number");
        assert_eq!(text(rope([2, 8, 40], 6, 4)), "rope: 4 heads of keys and values do not divide 6 heads");
        let positions = Some(Slot { shape: [2, 7].into(), dtype: DType::I32, ..rope([2, 8, 40], 6, 2).qkv });
        let op = Rope { positions, ..rope([2, 8, 40], 6, 2) };
        assert_eq!(text(op), "rope: `positions` is [2, 7], expected [2, 8]");
        assert_eq!(Rope { positions: None, at_position: true, ..op }.positions(), Some(1));
        assert_eq!(Rope { at_position: true, ..op }.positions(), None, "the tokens have their own");
        let op = Rope { base: f32::NAN, ..rope([2, 8, 40], 6, 2) };
        assert_eq!(text(op), "rope: `base` is NaN, expected a positive number");
    }
}
