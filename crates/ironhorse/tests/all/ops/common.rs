//! Numbers and comparisons.

pub use ironhorse::ops::{Code, OpError, Stream};

pub const S: Stream = Stream::DEFAULT;

/// Awkward sizes, and one that is large enough for several threads.
pub const SIZES: [usize; 9] = [0, 1, 2, 31, 32, 33, 1000, 16_385, 200_003];

/// Rows and columns: single, odd, tall, wide, large enough for several threads.
pub const SHAPES: [(usize, usize); 10] =
    [(0, 5), (5, 0), (1, 1), (1, 31), (33, 1), (7, 33), (64, 64), (3, 10_007), (301, 129), (2, 100_001)];

/// Numbers in -1..1 that depend on the seed alone.
pub fn random(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Like [`random`], times `factor`.
pub fn spread(len: usize, seed: u32, factor: f32) -> Vec<f32> {
    random(len, seed).iter().map(|x| x * factor).collect()
}

pub fn f64s(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

pub fn ints(len: usize, seed: u32, below: usize) -> Vec<i32> {
    random(len, seed)
        .iter()
        .map(|x| (((x + 1.0) / 2.0 * below as f32) as i32).min(below as i32 - 1))
        .collect()
}

/// Checks that each element is within `relative` or `absolute` of its reference.
#[track_caller]
pub fn close(got: &[f32], want: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(got) - want).abs();
        assert!(off <= relative * want.abs() + absolute, "element {i}: {got}, exactly {want}");
    }
}

#[track_caller]
pub fn invalid(result: Result<(), OpError>, text: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.code, Code::InvalidValue, "{error}");
    assert!(error.text.contains(text), "'{error}' does not say '{text}'");
}

/// The length as `i64`, the type of size arguments.
pub fn n(len: usize) -> i64 {
    len as i64
}
