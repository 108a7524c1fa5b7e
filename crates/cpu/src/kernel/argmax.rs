//! The index of the largest of each row.

use crate::element::{LANES, tree};
use crate::isa::Isa;
use crate::multiversion;

/// Logits that are searched for their largest at once.
const LONG: usize = 8192;

/// Orders floats as integers: -NaN, -inf, ..., -0, 0, ..., inf, NaN. Comparing these also finds NaN at no cost.
#[inline(always)]
fn order_key(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    bits ^ ((bits >> 31) & i32::MAX)
}

multiversion! {
    /// The keys of the largest and the smallest; see [`order_key`].
    fn extremes<const FMA: bool>(x: &[f32]) -> [i32; 2] {
        let (mut tops, mut bottoms) = ([i32::MIN; LANES], [i32::MAX; LANES]);
        let mut look = |i: usize, x: f32| {
            let key = order_key(x);
            tops[i] = tops[i].max(key);
            bottoms[i] = bottoms[i].min(key);
        };
        let (full, rest) = x.as_chunks::<LANES>();
        for part in full {
            (0..LANES).for_each(|i| look(i, part[i]));
        }
        match x.last_chunk::<LANES>() {
            // The last elements once more: those already seen change nothing.
            Some(last) => (0..LANES).for_each(|i| look(i, last[i])),
            None => rest.iter().enumerate().for_each(|(i, &x)| look(i, x)),
        }
        // The compiler must not see the trees (see `element::totals`).
        let (tops, bottoms) = std::hint::black_box((tops, bottoms));
        [tree(tops, i32::max), tree(bottoms, i32::min)]
    }

    /// The index of the first `value`.
    fn find<const FMA: bool>(x: &[f32], value: f32) -> Option<usize> {
        let (full, rest) = x.as_chunks::<LANES>();
        let holds = |part: &[f32; LANES]| part.iter().map(|&x| u32::from(x == value)).fold(0, |a, b| a | b) != 0;
        let start = full.iter().position(holds).unwrap_or(full.len()) * LANES;
        let near = if start < full.len() * LANES { &x[start..start + LANES] } else { rest };
        near.iter().position(|&x| x == value).map(|i| start + i)
    }
}

/// Finds the largest and its index in one pass. Written by hand, because compilers keep the running maximum in memory here.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    const PARTS: usize = 4;
    /// Elements looked at together, and the least a row must have.
    pub const WIDE: usize = 16 * PARTS;

    /// The index of the first of the largest; `None` if there is a NaN. Rows have at least [`WIDE`] and fewer than 2³¹ elements.
    #[target_feature(enable = "avx512f")]
    pub fn place(x: &[f32]) -> Option<usize> {
        let numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let mut tops = [_mm512_set1_ps(f32::NEG_INFINITY); PARTS];
        let mut places = [_mm512_setzero_si512(); PARTS];
        let mut nan: __mmask16 = 0;
        let starts = (0..x.len() / WIDE).map(|number| number * WIDE);
        // The last elements once more: those already seen change nothing.
        for start in starts.chain([x.len() - WIDE]) {
            for part in 0..PARTS {
                let first = start + part * 16;
                debug_assert!(first + 16 <= x.len());
                // SAFETY: start + WIDE is at most the length of x.
                let v = unsafe { _mm512_loadu_ps(x.as_ptr().add(first)) };
                let better = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(v, tops[part]);
                tops[part] = _mm512_mask_mov_ps(tops[part], better, v);
                let here = _mm512_add_epi32(numbers, _mm512_set1_epi32(first as i32));
                places[part] = _mm512_mask_mov_epi32(places[part], better, here);
                nan |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            }
        }
        let top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
        let top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
        let mut first = _mm512_set1_epi32(-1);
        for part in 0..PARTS {
            let holds = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(tops[part], top);
            first = _mm512_mask_min_epu32(first, holds, first, places[part]);
        }
        (nan == 0).then(|| _mm512_reduce_min_epu32(first) as usize)
    }
}

/// The index of the largest, the lowest among equals; the first NaN if there is one.
pub fn argmax_row(isa: Isa, row: &[f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if isa.kind() == crate::isa::IsaKind::Avx512 && row.len() >= avx512::WIDE {
        // SAFETY: an `Isa` of this kind exists only where these instructions were detected.
        let place = unsafe { avx512::place(row) };
        return place.unwrap_or_else(|| row.iter().position(|x| x.is_nan()).unwrap_or(0));
    }
    let mut best = (f32::NEG_INFINITY, 0);
    for (number, block) in row.chunks(LONG).enumerate() {
        let [top, bottom] = extremes(isa, block);
        let found = |i: usize| number * LONG + i;
        if (top > order_key(f32::INFINITY) || bottom < order_key(f32::NEG_INFINITY))
            && let Some(i) = block.iter().position(|x| x.is_nan())
        {
            return found(i);
        }
        // A key is its own inverse.
        let max = f32::from_bits(order_key(f32::from_bits(top as u32)) as u32);
        if max > best.0
            && let Some(i) = find(isa, block, max)
        {
            best = (max, found(i));
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(x: &[f32]) -> usize {
        let better = |best: usize, i: usize| if x[i] > x[best] { i } else { best };
        x.iter().position(|x| x.is_nan()).unwrap_or_else(|| (0..x.len()).fold(0, better))
    }

    #[test]
    fn every_instruction_set_finds_the_first_largest() {
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 24
        };
        for len in [1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 1000, 8191, 8192, 8193, 20_000] {
            for case in 0..40 {
                // Many ties; zeros of both signs; now and then infinities and NaN of both signs.
                let mut x: Vec<f32> = (0..len).map(|_| (next() % 7) as f32 - 3.0).collect();
                x.iter_mut()
                    .filter(|x| **x == 0.0)
                    .for_each(|x| *x *= if next() % 2 == 0 { 1.0 } else { -1.0 });
                if case % 4 == 1 {
                    x.iter_mut().for_each(|x| *x = if *x > 0.0 { -0.0 } else { *x });
                }
                let mut put = |value: f32| x[(next() as usize * 256 + next() as usize) % len] = value;
                match case % 8 {
                    2 => put(f32::NAN),
                    3 => (0..5).for_each(|_| put(-f32::NAN)),
                    4 => (0..3).for_each(|_| put(f32::INFINITY)),
                    5 => x.fill(f32::NEG_INFINITY),
                    _ => {}
                }
                for isa in Isa::supported() {
                    assert_eq!(argmax_row(isa, &x), plain(&x), "{isa:?}, {len} elements, case {case}");
                }
            }
        }
    }
}
