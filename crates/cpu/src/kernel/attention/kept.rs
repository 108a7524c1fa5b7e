//! Attention of one token over keys and values that are kept: generation and serving.
//!
//! All heads of a token go over its keys together, some hundred rows at a time, and then over its values: a row has all heads side by
//! side, so what comes from memory are long streams. While some rows are computed the next are fetched.
//!
//! order  as [`one_query`](super::one_query): the bits of a head depend on nothing but its query, keys and values.

use super::few::{QueryScratch, softmax_row};
use crate::gemm::{Scores, Weighted, add_weighted, keys_in_slice, scores};
use crate::isa::Isa;
use crate::kernel::elementwise::add_to;
use crate::memory::{Span, Streams};
use std::ops::Range;

/// Floats of rows at a time: two such chunks, the one that is computed and the one that is fetched, are a part of a second-level cache.
const CHUNK: usize = 96 << 10;
/// Scores of a token at a time, at most, unless one head of keys has more.
const MOST_SCORES: usize = 64 << 10;
/// A token and what it attends to.
pub struct Kept {
    /// (heads, head_dim)
    pub q: Span<f32>,
    /// (heads, head_dim)
    pub out: Span<f32>,
    /// Rows of `width`, the first of which is the first that the token reaches: (keys, kv_heads, head_dim)
    pub keys: Span<f32>,
    pub values: Span<f32>,
    pub width: usize,
    pub head_dim: usize,
    /// Heads of queries for each of keys.
    pub share: usize,
    /// The factor of the scores; positive.
    pub scale: f32,
    /// Whether keys and values have to come from memory.
    pub fetches: bool,
}

impl Kept {
    /// The number of scores that a worker needs room for, with at most this many keys and heads.
    pub fn most_scores([keys, heads]: [usize; 2], share: usize) -> usize {
        (keys * heads).min(MOST_SCORES.max(keys * share))
    }

    /// The rows that are used first, to be fetched ahead.
    pub fn first_rows(&self) -> Span<f32> {
        self.keys.part(0..self.keys.len().min(self.chunk() * self.width))
    }

    /// Rows of a chunk.
    fn chunk(&self) -> usize {
        (CHUNK / self.width.max(1)).next_multiple_of(16)
    }

    fn count(&self) -> usize {
        self.keys.len() / self.width.max(1)
    }

    /// Attention of the heads that use these heads of keys and values. `next` is what is fetched towards the end.
    ///
    /// # Safety
    /// The caller may read the queries, keys and values, and alone uses these heads of `out`.
    pub unsafe fn attend(
        &self,
        isa: Isa,
        room: &mut QueryScratch<f32>,
        kv_heads: Range<usize>,
        next: Option<Span<f32>>,
    ) {
        let least = (MOST_SCORES / (self.share * self.count()).max(1)).max(1);
        for first in kv_heads.clone().step_by(least) {
            let some = first..kv_heads.end.min(first + least);
            // Pieces of rows are no streams.
            let whole = self.fetches && some.len() * self.head_dim == self.width;
            let next = next.filter(|_| some.end == kv_heads.end);
            // SAFETY: guaranteed by the caller.
            unsafe { self.some_heads(isa, room, some, (whole, next)) };
        }
    }

    /// # Safety
    /// As [`Kept::attend`].
    unsafe fn some_heads(
        &self,
        isa: Isa,
        room: &mut QueryScratch<f32>,
        kv_heads: Range<usize>,
        (fetches, next): (bool, Option<Span<f32>>),
    ) {
        let (hd, share, count, stride) = (self.head_dim, self.share, self.count(), self.width);
        let heads = kv_heads.start * share..kv_heads.end * share;
        let (rows, sums) = room.parts([heads.len() * count, heads.len() * hd]);
        let chunks = |keys: Range<usize>| {
            let size = self.chunk();
            keys.clone().step_by(size).map(move |at| at..keys.end.min(at + size))
        };
        let of = |x: Span<f32>, rows: Range<usize>| x.part(rows.start * stride..rows.end * stride);
        // What comes after some rows: more of them, or the first of `then`.
        let ahead = |x: Span<f32>, rows: &Range<usize>, then: Option<Span<f32>>| {
            let more = rows.end..count.min(rows.end + self.chunk());
            let span = if more.is_empty() { then } else { fetches.then(|| of(x, more)) };
            span.map(Streams::new)
        };
        if fetches {
            Streams::new(self.first_rows()).fetch(1);
        }
        let values_first = fetches.then(|| of(self.values, 0..count.min(self.chunk())));
        for keys in chunks(0..count) {
            let mut ahead = ahead(self.keys, &keys, values_first);
            for (i, head) in heads.clone().enumerate() {
                // SAFETY: the query and these rows are inside of what the caller may read; the scores are of this call alone.
                unsafe {
                    let first = keys.start * stride + head / share * hd;
                    scores(
                        isa,
                        &Scores {
                            head_dim: hd,
                            query: self.q.get(head * hd..(head + 1) * hd).as_ptr(),
                            keys: self
                                .keys
                                .get(first..(keys.end - 1) * stride + (head / share + 1) * hd)
                                .as_ptr(),
                            stride,
                            count: keys.len(),
                            out: rows[i * count + keys.start..][..keys.len()].as_mut_ptr(),
                        },
                    );
                }
                if let Some(ahead) = &mut ahead {
                    ahead.fetch(heads.len());
                }
            }
        }
        for row in rows.chunks_exact_mut(count.max(1)).take(heads.len()) {
            softmax_row(isa, row, self.scale);
        }
        // SAFETY: guaranteed by the caller.
        let out = unsafe { self.out.get_mut(heads.start * hd..heads.end * hd) };
        if count == 0 {
            out.fill(0.0);
        }
        for slice in (0..count).step_by(keys_in_slice(count).max(1)) {
            let end = count.min(slice + keys_in_slice(count));
            // The first slice is summed where the result is.
            let to = if slice == 0 { &mut *out } else { &mut *sums };
            for keys in chunks(slice..end) {
                let mut ahead = ahead(self.values, &keys, next);
                for (i, kv) in kv_heads.clone().enumerate().step_by(if share == 1 { GROUP } else { 1 }) {
                    let together = if share == 1 { GROUP.min(kv_heads.end - kv) } else { share };
                    let first = keys.start * stride + kv * hd;
                    let last = (keys.end - 1) * stride + (kv + if share == 1 { together } else { 1 }) * hd;
                    // SAFETY: these rows are inside of what the caller may read; weights and sums are of this call alone.
                    unsafe {
                        add_weighted(
                            isa,
                            &Weighted {
                                head_dim: hd,
                                heads: together,
                                weights: rows[i * share * count + keys.start..].as_ptr(),
                                weights_head: count,
                                values: self.values.get(first..last).as_ptr(),
                                values_head: if share == 1 { hd } else { 0 },
                                stride,
                                count: keys.len(),
                                sums: to[i * share * hd..][..together * hd].as_mut_ptr(),
                                begins: keys.start == slice,
                            },
                        );
                    }
                    if let Some(ahead) = &mut ahead {
                        ahead.fetch(kv_heads.len().div_ceil(if share == 1 { GROUP } else { 1 }));
                    }
                }
            }
            if slice > 0 {
                add_to(isa, out, &sums[..out.len()]);
            }
        }
    }
}

/// Heads whose values are summed at a time where each has its own.
const GROUP: usize = 4;

#[cfg(test)]
mod tests {
    use super::super::{Forward, Heads, Reach, one_query};
    use super::*;
    use ironhorse_core::Operands;
    use ironhorse_core::eager::{AttentionShape, Strides};

    fn numbers(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    /// A window of a test's own numbers.
    fn span(x: &mut [f32]) -> Span<f32> {
        // SAFETY: they outlive the window.
        unsafe { Span::from_raw(x.as_mut_ptr(), x.len()) }
    }

    /// Attention of a token by [`Kept`], some heads at a time, and by one query after the other.
    fn both(isa: Isa, [hd, kv_heads, share, count]: [usize; 4], at_a_time: usize) -> [Vec<f32>; 2] {
        let (heads, width) = (kv_heads * share, kv_heads * hd);
        let (mut q, mut k, mut v) =
            (numbers(heads * hd, 1), numbers(count * width, 2), numbers(count * width, 3));
        let [q, k, v] = [&mut q, &mut k, &mut v].map(|x| span(x));
        let mut found = [vec![f32::NAN; heads * hd], vec![f32::NAN; heads * hd]];
        let [ours, theirs] = &mut found;
        let scale = 1.0 / (hd as f32).sqrt();
        let kept =
            Kept { q, out: span(ours), keys: k, values: v, width, head_dim: hd, share, scale, fetches: true };
        let mut room = QueryScratch::default();
        for first in (0..kv_heads).step_by(at_a_time) {
            let next = Some(kept.first_rows());
            // SAFETY: the windows are this test's own numbers, in the sizes that `kept` names.
            unsafe { kept.attend(isa, &mut room, first..kv_heads.min(first + at_a_time), next) };
        }
        let of = |position| Strides { batch: 0, head: hd, position };
        let shape = Heads(
            AttentionShape {
                batch: 1,
                heads,
                kv_heads,
                q_len: 1,
                kv_len: count,
                head_dim: hd,
                scale: f64::from(scale),
                causal: true,
                q: of(heads * hd),
                k: of(width),
                v: of(width),
                out: of(heads * hd),
            },
            Operands::F32,
        );
        let (out, lse) = (span(theirs), Span::none(heads));
        let call = Forward { shape, q, k, v, out, lse, drops: None, reach: Reach::ALL };
        let mut room = QueryScratch::new(count, hd);
        // SAFETY: the windows are this test's own numbers, in the sizes of `shape`.
        (0..heads).for_each(|head| unsafe { one_query(isa, &mut room, &call, [head, 0]) });
        found
    }

    #[test]
    fn heads_together_have_the_bits_of_each_alone() {
        for isa in Isa::supported() {
            for hd in [1, 15, 16, 31, 33, 64, 80, 128, 200] {
                for count in [1, 2, 15, 16, 17, 33, 129, 400, 801] {
                    for [kv_heads, share] in [[1, 1], [5, 1], [3, 2], [2, 7]] {
                        let [ours, theirs] = both(isa, [hd, kv_heads, share, count], kv_heads);
                        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        let what = format!("{} {hd} {count} {kv_heads}x{share}", isa.name());
                        assert!(ours.iter().all(|x| x.is_finite()), "{what}");
                        assert_eq!(bits(&ours), bits(&theirs), "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_tasks_of_a_token_change_nothing() {
        let isa = Isa::detect();
        let whole = both(isa, [64, 12, 1, 300], 12);
        for at_a_time in [1, 5, 7] {
            assert_eq!(both(isa, [64, 12, 1, 300], at_a_time), whole, "{at_a_time}");
        }
        // more scores than there is room for at a time: 40 heads of 2000 keys
        let [ours, theirs] = both(isa, [16, 40, 1, 2000], 40);
        assert_eq!(ours, theirs);
    }
}
