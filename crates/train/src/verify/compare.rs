//! Comparing two tensors number by number.

use serde::Serialize;

/// A single wrong element must be found even if the norm of the whole tensor hides it. Each element may differ by this
/// many times the tolerance, relative to its absolute value plus the root mean square of its row, its column or the
/// tensor, whichever is largest. (Rows of an embedding's gradient, and columns of a weight's, differ in magnitude by
/// orders of magnitude, and the rounding error is proportional to both.)
const STRAY: f64 = 10.0;

/// How far two tensors may differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowed {
    /// ‖got − want‖ / ‖want‖; each element by ten times that.
    pub relative: f64,
    /// An additional absolute tolerance of each element.
    pub element: f64,
    /// How many elements may differ by all of `element` at once: the relative error may grow by the norm of such a
    /// difference.
    pub elements: f64,
}

impl From<f64> for Allowed {
    fn from(relative: f64) -> Self {
        Self { relative, element: 0.0, elements: 0.0 }
    }
}

/// How two tensors differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Dimensions.
    pub shape: Vec<usize>,
    /// ‖got − want‖ / ‖want‖; NaN if either holds a NaN.
    pub rel_error: f64,
    /// The allowed relative error.
    pub tolerance: f64,
    /// `rel_error / tolerance`.
    pub ratio: f64,
    /// The element with the largest difference.
    pub worst: Option<Worst>,
    /// The first element that is wrong, when the comparison fails.
    pub first_wrong: Option<Worst>,
    /// Equal within the tolerance, as a whole and in each element.
    pub pass: bool,
}

impl Comparison {
    /// A failure without numbers, because a checksum only tells that something changed.
    pub(super) fn unknown() -> Self {
        let shape = Vec::new();
        Self {
            shape,
            rel_error: f64::NAN,
            tolerance: 0.0,
            ratio: f64::NAN,
            worst: None,
            first_wrong: None,
            pass: false,
        }
    }
}

/// One element of both tensors.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Its index.
    pub index: Vec<usize>,
    /// The reference's value.
    pub expected: f32,
    /// The engine's value.
    pub got: f32,
    /// Their distance in representable f32 values.
    pub ulps: u64,
}

impl Worst {
    fn new(shape: &[usize], flat: usize, expected: f32, got: f32) -> Self {
        Self { index: index_of(shape, flat), expected, got, ulps: ulp_distance(expected, got) }
    }
}

/// The index of an element, given its place in row-major order.
pub(super) fn index_of(shape: &[usize], flat: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    let mut rest = flat;
    for (i, &dim) in index.iter_mut().zip(shape).rev() {
        *i = rest % dim.max(1);
        rest /= dim.max(1);
    }
    index
}

/// Compares tensors of the same size.
pub fn compare(got: &[f32], want: &[f32], shape: &[usize], allowed: impl Into<Allowed>) -> Comparison {
    let Allowed { relative, element: slack, elements } = allowed.into();
    let (mut diff_sq, mut want_sq) = (0.0_f64, 0.0_f64);
    let (mut worst, mut worst_diff) = (None, -1.0_f64);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let diff = (f64::from(g) - f64::from(w)).abs();
        diff_sq += diff * diff;
        want_sq += f64::from(w) * f64::from(w);
        if diff > worst_diff || (diff.is_nan() && !worst_diff.is_nan()) {
            (worst, worst_diff) = (Some(i), diff);
        }
    }
    let rel_error = match (diff_sq.sqrt(), want_sq.sqrt()) {
        (0.0, _) => 0.0,
        (diff, norm) => diff / norm, // infinite if the reference is all 0 and the result is not
    };
    let together = slack * elements.sqrt();
    let tolerance = if together > 0.0 { relative + together / want_sq.sqrt() } else { relative };
    let rms = (want_sq / want.len().max(1) as f64).sqrt();
    let cols = shape.last().copied().unwrap_or(1).max(1);
    let square = |w: f32| f64::from(w) * f64::from(w);
    let rows = (want.len() / cols).max(1) as f64;
    let mut column = vec![0.0; if rows > 1.0 { cols } else { 0 }];
    for want in want.chunks(cols) {
        column.iter_mut().zip(want).for_each(|(sum, &w)| *sum += square(w) / rows);
    }
    let first_beyond = |factor: f64| {
        got.chunks(cols).zip(want.chunks(cols)).enumerate().find_map(|(row, (got, want))| {
            let row_sq = want.iter().map(|&w| square(w)).sum::<f64>() / cols as f64;
            let col = got.iter().zip(want).enumerate().position(|(col, (&g, &w))| {
                let line = row_sq.max(column.get(col).copied().unwrap_or(0.0)).sqrt();
                let diff = (f64::from(g) - f64::from(w)).abs();
                diff.is_nan() || diff > slack + factor * relative * (rms.max(line) + f64::from(w).abs())
            })?;
            Some(row * cols + col)
        })
    };
    let stray = first_beyond(STRAY);
    let pass = rel_error <= tolerance && stray.is_none();
    let element = |i: usize| Worst::new(shape, i, want[i], got[i]);
    let first_wrong = if pass { None } else { stray.or_else(|| first_beyond(1.0)).or(worst).map(element) };
    let ratio = if rel_error == 0.0 { 0.0 } else { rel_error / tolerance };
    let (shape, worst) = (shape.to_vec(), worst.map(element));
    Comparison { shape, rel_error, tolerance, ratio, worst, first_wrong, pass }
}

/// The distance of two values in representable f32 values; `u64::MAX` if either is NaN.
pub fn ulp_distance(a: f32, b: f32) -> u64 {
    if a.is_nan() || b.is_nan() {
        return u64::MAX;
    }
    // Maps the bits to integers in the order of the real numbers; +0 and -0 map to the same.
    let ordered = |x: f32| {
        let bits = i64::from(x.to_bits() & 0x7fff_ffff);
        if x.is_sign_negative() { -bits } else { bits }
    };
    ordered(a).abs_diff(ordered(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulps_count_representable_numbers() {
        assert_eq!(ulp_distance(1.0, 1.0), 0);
        assert_eq!(ulp_distance(0.0, -0.0), 0);
        assert_eq!(ulp_distance(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(ulp_distance(f32::from_bits(1), -f32::from_bits(1)), 2);
        assert_eq!(ulp_distance(f32::NAN, 0.0), u64::MAX);
    }

    #[test]
    fn equal_tensors_pass_and_small_noise_too() {
        let want: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin()).collect();
        assert_eq!(compare(&want, &want, &[1000], 1e-5).rel_error, 0.0);
        let noisy: Vec<f32> = want.iter().map(|w| w * (1.0 + 3e-6)).collect();
        assert!(compare(&noisy, &want, &[10, 100], 1e-5).pass);
    }

    #[test]
    fn one_changed_element_is_found_even_when_the_norm_hides_it() {
        let want = vec![1.0_f32; 1_000_000];
        let mut got = want.clone();
        got[654_321] += 0.005; // 5e-6 of the norm
        let result = compare(&got, &want, &[1000, 1000], 1e-5);
        assert!(result.rel_error < 1e-5 && !result.pass);
        assert_eq!(result.first_wrong.unwrap().index, [654, 321]);
    }

    #[test]
    fn slack_is_for_single_elements_not_for_the_norm() {
        let want = vec![1.0_f32; 1_000_000];
        let mut got = want.clone();
        got[654_321] += 0.0009;
        assert!(!compare(&got, &want, &[1000, 1000], 1e-5).pass);
        let allowed = Allowed { element: 1e-3, ..Allowed::from(1e-5) };
        assert!(compare(&got, &want, &[1000, 1000], allowed).pass);
        got[654_321] += 0.0005;
        assert!(!compare(&got, &want, &[1000, 1000], allowed).pass);
        let two = Allowed { elements: 2.0, ..allowed };
        got[654_321] = 1.0009;
        got[0] = 1.0009;
        assert!(compare(&got, &want, &[1000, 1000], two).pass);
        got.fill(1.0001);
        assert!(!compare(&got, &want, &[1000, 1000], two).pass, "two, not all");
        assert!(
            !compare(&got, &want, &[1000, 1000], allowed).pass,
            "each within the slack, together too far"
        );
    }

    #[test]
    fn nan_never_passes() {
        let result = compare(&[1.0, f32::NAN], &[1.0, 2.0], &[2], 1e-5);
        assert!(!result.pass && result.rel_error.is_nan());
        assert_eq!(result.first_wrong.unwrap().index, [1]);
        assert!(!compare(&[1.0], &[0.0], &[1], 1e-5).pass, "a reference of zeros asks for zeros");
        assert!(compare(&[0.0], &[0.0], &[1], 1e-5).pass);
        assert!(!compare(&[f32::NAN], &[f32::NAN], &[1], 1e-5).pass);
    }

    #[test]
    fn scalars_have_an_empty_index() {
        let result = compare(&[1.1], &[1.0], &[], 1e-5);
        assert_eq!(result.first_wrong.unwrap().index, Vec::<usize>::new());
    }
}
