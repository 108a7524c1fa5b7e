//! One row of queries against rows of keys and values in place: what attention over a cache multiplies. Products of one row with so few columns
//! are bound by the latency of multiply-adds and by joining sums, so 16 keys and several heads are computed at a time.
//!
//! order  a score is a dot product as that of [`dots`](super::dots); a weighted sum of values is a chain of multiply-adds from zero in
//! each slice, which are added in order, as [`gemm_local`](super::gemm_local) has it.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::dots::JOINED;
use super::kernel::Simd;
use super::plan::slice_len;
use crate::isa::Isa;

/// Vectors of a value that are summed at a time.
const WIDE: usize = 4;

/// A query and some rows of keys.
pub(crate) struct Scores {
    pub head_dim: usize,
    pub query: *const f32,
    /// Row t is at `keys + t * stride`.
    pub keys: *const f32,
    pub stride: usize,
    pub count: usize,
    /// A score for each row.
    pub out: *mut f32,
}

/// Weights of some heads and their rows of values.
pub(crate) struct Weighted {
    pub head_dim: usize,
    pub heads: usize,
    /// Weight t of a head is at `weights + head * weights_head + t`.
    pub weights: *const f32,
    pub weights_head: usize,
    /// Row t of a head is at `values + head * values_head + t * stride`. Heads that share values have a `values_head` of 0.
    pub values: *const f32,
    pub values_head: usize,
    pub stride: usize,
    pub count: usize,
    /// (heads, head_dim): the sums so far.
    pub sums: *mut f32,
    /// Nothing is summed so far, whatever is there.
    pub begins: bool,
}

pub(super) type ScoreKernel = unsafe fn(&Scores);
pub(super) type WeightedKernel = unsafe fn(&Weighted);

/// The scores of a query.
///
/// # Safety
/// The query and the keys are readable, `out` is writable and overlaps neither.
pub(crate) unsafe fn scores(isa: Isa, s: &Scores) {
    if s.count > 0 {
        // SAFETY: guaranteed by the caller; the kernel is of an `Isa` this machine has.
        unsafe { (super::kernels(isa).scores)(s) };
    }
}

/// Adds weights times values to the sums.
///
/// # Safety
/// Weights and values are readable; the sums are writable and overlap neither.
pub(crate) unsafe fn add_weighted(isa: Isa, w: &Weighted) {
    // SAFETY: guaranteed by the caller; the kernel is of an `Isa` this machine has.
    unsafe { (super::kernels(isa).weighted)(w) };
}

/// Keys in a slice: where a sum of values begins anew.
pub(crate) fn keys_in_slice(keys: usize) -> usize {
    slice_len(keys)
}

/// # Safety
/// The machine has the instructions of `S`; as [`scores`], for at least one key.
#[inline(always)]
pub(super) unsafe fn score<S: Simd, const V: usize>(s: &Scores) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match s.head_dim {
            64 => keys_by_16::<S, V, 4>(s),
            128 => keys_by_16::<S, V, 8>(s),
            _ => keys_by_16::<S, V, 0>(s),
        }
    }
}

/// As [`score`]; `N` times 16 is the size of a head, or `N` is 0.
///
/// # Safety
/// As [`score`].
#[inline(always)]
unsafe fn keys_by_16<S: Simd, const V: usize, const N: usize>(s: &Scores) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut done = 0;
        while done + JOINED <= s.count {
            let mut sums = [S::splat(0.0); JOINED];
            let mut key = s.keys.wrapping_add(done * s.stride);
            for j in 0..JOINED {
                sums[j] = lanes::<S, V, N>(s, key);
                key = key.wrapping_add(s.stride);
            }
            let mut out = [0.0; JOINED];
            S::join(sums, JOINED, &mut out);
            s.out.add(done).cast::<[f32; JOINED]>().write_unaligned(out);
            done += JOINED;
        }
        if done < s.count {
            let mut sums = [S::splat(0.0); JOINED];
            for j in 0..JOINED {
                // Beyond the end it is the last key once more: cheaper than a loop of another length.
                sums[j] = lanes::<S, V, N>(s, s.keys.add((done + j).min(s.count - 1) * s.stride));
            }
            let mut out = [0.0; JOINED];
            S::join(sums, s.count - done, &mut out);
            std::ptr::copy_nonoverlapping(out.as_ptr(), s.out.add(done), s.count - done);
        }
    }
}

/// The products of the query with a key in 16 lanes, which are joined to those of a vector.
///
/// # Safety
/// As [`score`].
#[inline(always)]
unsafe fn lanes<S: Simd, const V: usize, const N: usize>(s: &Scores, key: *const f32) -> S {
    // SAFETY: guaranteed by the caller; all reads are below the size of a head or masked.
    unsafe {
        let mut sums = [S::splat(0.0); V];
        let whole = if N > 0 { N } else { s.head_dim / (V * S::LANES) };
        for step in 0..whole {
            for v in 0..V {
                let at = (step * V + v) * S::LANES;
                sums[v] = S::load(s.query.add(at)).mul_add(S::load(key.add(at)), sums[v]);
            }
        }
        if N == 0 {
            for v in 0..V {
                let at = (whole * V + v) * S::LANES;
                if at < s.head_dim {
                    let mask = S::mask((s.head_dim - at).min(S::LANES));
                    let query = S::load_masked(s.query.add(at), mask);
                    sums[v] = query.mul_add(S::load_masked(key.add(at), mask), sums[v]);
                }
            }
        }
        let mut width = V / 2;
        while width > 0 {
            (0..width).for_each(|v| sums[v] = sums[v].add(sums[v + width]));
            width /= 2;
        }
        sums[0]
    }
}

/// # Safety
/// The machine has the instructions of `S`; as [`add_weighted`].
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd>(w: &Weighted) {
    // As many heads at a time as there are registers for.
    let most = S::MR / 2;
    let mut head = 0;
    while head < w.heads {
        // SAFETY: guaranteed by the caller.
        head += unsafe {
            match (w.heads - head).min(most) {
                4.. => heads::<S, 4>(w, head),
                2.. => heads::<S, 2>(w, head),
                _ => heads::<S, 1>(w, head),
            }
        };
    }
}

/// `H` heads from `head` on; gives `H`.
///
/// # Safety
/// As [`weigh`].
#[inline(always)]
unsafe fn heads<S: Simd, const H: usize>(w: &Weighted, head: usize) -> usize {
    let mut at = 0;
    // SAFETY: guaranteed by the caller: the columns are below the size of a head.
    unsafe {
        while at + WIDE * S::LANES <= w.head_dim {
            columns::<S, H, WIDE>(w, [head, at], S::LANES);
            at += WIDE * S::LANES;
        }
        while at < w.head_dim {
            columns::<S, H, 1>(w, [head, at], S::LANES.min(w.head_dim - at));
            at += S::LANES;
        }
    }
    H
}

/// `C` vectors of `H` heads, the last of which has so many columns.
///
/// # Safety
/// As [`weigh`].
#[inline(always)]
unsafe fn columns<S: Simd, const H: usize, const C: usize>(
    w: &Weighted,
    [head, at]: [usize; 2],
    last: usize,
) {
    // SAFETY: guaranteed by the caller; the last vector is masked.
    unsafe {
        let mask = S::mask(last);
        let mut sums = [[S::splat(0.0); C]; H];
        let out = w.sums.add(head * w.head_dim + at);
        if !w.begins {
            for h in 0..H {
                for c in 0..C {
                    let mask = if c < C - 1 { S::mask(S::LANES) } else { mask };
                    sums[h][c] = S::load_masked(out.add(h * w.head_dim + c * S::LANES), mask);
                }
            }
        }
        let mut values = w.values.add(head * w.values_head + at);
        let weights = w.weights.add(head * w.weights_head);
        for t in 0..w.count {
            for h in 0..H {
                let x = S::splat(*weights.add(h * w.weights_head + t));
                let row = values.add(h * w.values_head);
                for c in 0..C {
                    let from = row.add(c * S::LANES);
                    let value = if c < C - 1 { S::load(from) } else { S::load_masked(from, mask) };
                    sums[h][c] = x.mul_add(value, sums[h][c]);
                }
            }
            values = values.wrapping_add(w.stride);
        }
        for h in 0..H {
            for c in 0..C {
                let mask = if c < C - 1 { S::mask(S::LANES) } else { mask };
                sums[h][c].store_masked(out.add(h * w.head_dim + c * S::LANES), mask);
            }
        }
    }
}
