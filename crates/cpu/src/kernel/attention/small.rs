//! Tiles of small heads, whose scores stay in the first-level cache; queries and sums are columns, as the scores of a query are.
//!
//! The sums are those of the tiles of other heads, in the same order: which machine has vectors for these kernels changes no bit. Tiles of the
//! processor (AMX) round.

use super::backward::Backward;
use super::product::Mat;
use super::softmax::softmax_columns;
use super::{Forward, SMALL_CHUNK, TILE, TileScratch};
use crate::element::{Elem, Real};
use crate::gemm::{FloatRows, HeadGradients, HeadKernels, HeadScores, HeadSums, QUERIES, ROWS};
use crate::isa::Isa;
use std::ops::Range;

const _: () = assert!(SMALL_CHUNK.is_multiple_of(ROWS));

/// Floats of a worker's memory for a tile.
pub(super) fn room(kernels: &HeadKernels) -> usize {
    (2 * SMALL_CHUNK + 3 * kernels.head_dim) * QUERIES
}

/// Parts of this memory, on cache lines.
struct Room {
    /// Two chunks of scores (keys, [`QUERIES`]).
    scores: [*mut f32; 2],
    /// Queries and gradients of their results as columns: (head_dim, [`QUERIES`]).
    columns: [*mut f32; 2],
    /// Sums as columns.
    sums: *mut f32,
}

impl Room {
    fn new<A: Real>(kernels: &HeadKernels, scratch: &mut TileScratch<A>) -> Self {
        scratch.small.reserve(room(kernels));
        let first = scratch.small.as_mut_ptr();
        let scores = [0, 1].map(|i| first.wrapping_add(i * SMALL_CHUNK * QUERIES));
        let tile = |i: usize| first.wrapping_add((2 * SMALL_CHUNK + i * kernels.head_dim) * QUERIES);
        Self { scores, columns: [tile(0), tile(1)], sums: tile(2) }
    }

    /// The scores of `keys` keys.
    ///
    /// # Safety
    /// `A` is f32, the memory is the caller's alone, and no other slice of these scores lives.
    unsafe fn scores<'a, A: Real>(&self, which: usize, keys: usize) -> &'a mut [A] {
        // SAFETY: guaranteed by the caller; there are at most [`SMALL_CHUNK`] keys.
        unsafe { std::slice::from_raw_parts_mut(self.scores[which].cast(), keys * QUERIES) }
    }
}

/// Rows as the kernels have them.
fn rows<A: Real>(m: Mat<A>, count: usize) -> FloatRows {
    FloatRows { ptr: m.ptr.cast(), rs: m.rs, count }
}

/// What the thread needs for the products of a tile, and gives back.
///
/// # Safety
/// The kernels are of an `Isa` this machine has.
unsafe fn call(prepare: Option<unsafe fn()>) {
    if let Some(prepare) = prepare {
        // SAFETY: guaranteed by the caller.
        unsafe { prepare() };
    }
}

/// A number for each query, as the kernels have them.
fn floats<A: Real>(x: &[A; TILE], f: impl Fn(A) -> A) -> [f32; QUERIES] {
    std::array::from_fn(|i| f(x[i]).wide() as f32)
}

impl<T: Elem> Forward<T> {
    /// As [`Forward::queries_of_one`], for small heads.
    ///
    /// # Safety
    /// As [`Forward::tile`]; the kernels are for this size of heads, which are computed in f32.
    pub(super) unsafe fn queries_of_small(
        &self,
        isa: Isa,
        kernels: &HeadKernels,
        scratch: &mut TileScratch<T::Acc>,
        head: usize,
        queries: Range<usize>,
    ) {
        let (s, a) = (&self.shape, &self.shape.0);
        let room = Room::new(kernels, scratch);
        let (mut max, mut sum) = ([T::Acc::NEG_INFINITY; TILE], [T::Acc::ZERO; TILE]);
        let out = self.queries(self.out, a.out, head, &queries);
        let [q_room, k_room, v_room, o_room, _] = &mut scratch.wide;
        // SAFETY: the inputs are only read; the room and these rows of `out` belong to this task.
        unsafe {
            let q = self.queries(self.q, a.q, head, &queries).load(isa, q_room);
            (kernels.to_columns)(&rows(q, queries.len()), room.columns[0]);
            call(kernels.enter);
            for (number, keys) in self.chunks(head, &queries).enumerate() {
                let count = keys.len();
                let [k, v] = self.keys([keys.start, head], count);
                let [k, v] = [k.load(isa, k_room), v.load(isa, v_room)].map(|m| rows(m, count));
                (kernels.scores)(&HeadScores { keys: k, queries: room.columns[0], out: room.scores[0] });
                let p = room.scores::<T::Acc>(0, count);
                let factor = s.factor(isa, p);
                self.hide(p, &queries, &keys, T::Acc::NEG_INFINITY);
                let shrink = floats(&softmax_columns(isa, p, QUERIES, factor, &mut max, &mut sum), |x| x);
                if let Some(drops) = self.drops {
                    drops.apply(isa, (p, QUERIES), head * a.q_len + queries.start, [&queries, &keys]);
                }
                let (weights, keeps) = (room.scores[0], (number > 0).then_some(&shrink));
                (kernels.sums)(&HeadSums { weights, rows: v, sums: room.sums, keeps });
            }
            call(kernels.leave);
            let (o, by) = (out.matrix(o_room), floats(&sum, |sum| T::Acc::ONE / sum));
            (kernels.from_columns)(room.sums, &by, &rows(o, queries.len()));
            self.finish(head, &queries, o, [&max, &sum]);
            out.store(isa, o_room);
        }
    }
}

impl<T: Elem> Backward<T> {
    /// As [`Backward::tile`], for small heads.
    ///
    /// # Safety
    /// As [`Backward::tile`]; the kernels are for this size of heads, which are computed in f32.
    pub(super) unsafe fn small_tile(
        &self,
        (isa, kernels): (Isa, &HeadKernels),
        scratch: &mut TileScratch<T::Acc>,
        (head, queries): (usize, &Range<usize>),
        chunks: impl Iterator<Item = Range<usize>>,
        [d_q, d_k, d_v]: [Option<Mat<T::Acc>>; 3],
    ) {
        let a = &self.from.shape.0;
        let room = Room::new(kernels, scratch);
        // Room 3 belongs to `d_q`.
        let [q_room, k_room, v_room, _, d_o_room] = &mut scratch.wide;
        let of = |x, strides| self.from.queries(x, strides, head, queries);
        // SAFETY: the inputs are only read; the room and the gradients belong to this task.
        unsafe {
            let q = rows(of(self.from.q, a.q).load(isa, q_room), queries.len());
            let d_o = rows(of(self.d_out, a.out).load(isa, d_o_room), queries.len());
            let out = rows(of(self.from.out, a.out).load(isa, k_room), queries.len());
            for (rows, columns) in [(q, room.columns[0]), (d_o, room.columns[1]), (out, room.sums)] {
                (kernels.to_columns)(&rows, columns);
            }
            let mut delta = [0.0; QUERIES];
            (kernels.dots)([room.columns[1], room.sums], &mut delta);
            let columns = self.columns(head, queries, |i| T::Acc::of(delta[i].into()));
            let mut any = false;
            call(kernels.enter);
            for keys in chunks {
                let count = keys.len();
                let [k, v] = self.from.keys([keys.start, head], count);
                let [k, v] = [k.load(isa, k_room), v.load(isa, v_room)].map(|m| rows(m, count));
                for (keys, i) in [(k, 0), (v, 1)] {
                    (kernels.scores)(&HeadScores { keys, queries: room.columns[i], out: room.scores[i] });
                }
                let scores = [0, 1].map(|i| room.scores::<T::Acc>(i, count));
                self.gradients_of_scores(isa, scores, &columns, (head, [queries, &keys]));
                let [p, ds] = room.scores;
                if d_q.is_some() {
                    let keeps = any.then_some(&[1.0; QUERIES]);
                    (kernels.sums)(&HeadSums { weights: ds, rows: k, sums: room.sums, keeps });
                }
                for (weights, from, d) in [(ds, q, d_k), (p, d_o, d_v)] {
                    if let Some(d) = d {
                        let to = rows(d.rows_from(keys.start), count);
                        (kernels.gradients)(&HeadGradients { weights, rows: from, to });
                    }
                }
                any = true;
            }
            call(kernels.leave);
            if let Some(d_q) = d_q.filter(|_| any) {
                (kernels.from_columns)(room.sums, &[1.0; QUERIES], &rows(d_q, queries.len()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Heads, Reach};
    use super::*;
    use crate::gemm::multiplies_bf16;
    use crate::isa::IsaKind;
    use crate::memory::Span;
    use ironhorse_core::Operands;
    use ironhorse_core::eager::{AttentionShape, Strides};
    use ironhorse_core::op::AttentionMask;
    use std::io::Write;

    /// Results and gradients of one sequence, queries, keys and values side by side: [out, lse, d_qkv, own].
    fn run(
        (isa, operands): (Isa, Operands),
        [t, heads, hd]: [usize; 3],
        window: Option<usize>,
    ) -> [Vec<f32>; 4] {
        let strides = |position: usize| Strides { batch: t * position, head: hd, position };
        let (qkv, out) = (strides((heads + 2) * hd), strides(heads * hd));
        let shape = Heads(
            AttentionShape {
                batch: 1,
                heads,
                kv_heads: 1,
                q_len: t,
                kv_len: t,
                head_dim: hd,
                scale: f64::from(1.2 / (hd as f32).sqrt()),
                causal: true,
                q: qkv,
                k: qkv,
                v: qkv,
                out,
            },
            operands,
        );
        // Numbers that bf16 has.
        let value = |i: usize| ((i * 7919 + i / 977) % 257) as f32 / 64.0 - 2.0;
        let mut given = [qkv.batch, out.batch].map(|len| (0..len).map(value).collect::<Vec<_>>());
        let mut results =
            [out.batch, heads * t, qkv.batch, 2 * heads * t * hd].map(|len| vec![f32::NAN; len]);
        let [qkv, d_out] = given.each_mut().map(|x| Span::of_slice(x));
        let [out, lse, d_qkv, own] = results.each_mut().map(|x| Span::of_slice(x));
        let parts = |x: Span<f32>| [0, heads, heads + 1].map(|before| x.part(before * hd..x.len()));
        let ([q, k, v], [d_q, d_k, d_v]) = (parts(qkv), parts(d_qkv));
        let mask = AttentionMask { positions: None, window };
        let mut scratch = TileScratch::new::<f32>(isa, &shape);
        // SAFETY: the windows are as large as the shape says; nobody else uses them.
        unsafe {
            let from = Forward { shape, q, k, v, out, lse, drops: None, reach: Reach::new(None, &mask) };
            (0..heads * shape.tiles()).for_each(|task| from.tile(isa, &mut scratch, task));
            let call = Backward { from, d_out, d_q, d_k, d_v };
            assert_eq!(call.own_elements(), own.len());
            (0..heads).for_each(|head| call.head(isa, &mut scratch, own, head));
        }
        // The gradients of keys and values are in `own`, and their places in `d_qkv` are not written.
        results[2].chunks_mut((heads + 2) * hd).for_each(|row| row[heads * hd..].fill(0.0));
        results
    }

    /// On a machine with tiles: results and gradients differ from those without by the rounding of probabilities and of their gradients;
    /// the gradients of scores are differences of two numbers, one of which comes from rounded results, so they carry it several times.
    #[test]
    fn tiles_round_and_nothing_else() {
        let tiles = Isa::of_kind(IsaKind::Avx512).filter(|_| multiplies_bf16());
        let Some(isa) = tiles else {
            let _ = writeln!(
                std::io::stderr(),
                "tiles_round_and_nothing_else: NOT TESTED, this machine has no tiles"
            );
            return;
        };
        for hd in [16, 32, 64, 128] {
            for t in [1, 2, 15, 32, 33, 64, 130, 300] {
                for window in [None, Some(1), Some(50), Some(129)] {
                    let [got, want] = [Operands::Bf16, Operands::F32]
                        .map(|operands| run((isa, operands), [t, 2, hd], window));
                    for ((got, want), what) in got.iter().zip(&want).zip(["out", "lse", "d_q", "d_k, d_v"]) {
                        let place = format!("{what}, heads of {hd}, {t} tokens, window {window:?}");
                        let norm = |x: &mut dyn Iterator<Item = f32>| {
                            x.map(|x| f64::from(x * x)).sum::<f64>().sqrt()
                        };
                        let far = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
                        let size = norm(&mut want.iter().copied());
                        assert!(far <= 6.0 / 512.0 * size, "{place}: {far:e} of {size:e}");
                        assert!(got.iter().all(|x| x.is_finite()), "{place}");
                        let rounds = what != "lse" && t > 2 && window != Some(1);
                        assert!(!rounds || far > 1e-4 * size, "{place}: not rounded, {far:e} of {size:e}");
                    }
                }
            }
        }
    }

    /// Compares, on a machine with AVX-512, the kernels with the products of all other heads.
    #[test]
    fn kernels_change_no_bit() {
        let sets = [IsaKind::Avx512, IsaKind::Avx2Fma].map(Isa::of_kind);
        let [Some(with), Some(without)] = sets else {
            // Written past the capture of the test harness: a pass that tested nothing must not look like any other.
            let _ =
                writeln!(std::io::stderr(), "kernels_change_no_bit: NOT TESTED, this machine has no AVX-512");
            return;
        };
        for hd in [16, 32] {
            for t in [2, 15, 32, 33, 64, 130, 300] {
                for window in [None, Some(1), Some(50), Some(129)] {
                    let [got, want] =
                        [with, without].map(|isa| run((isa, Operands::F32), [t, 2, hd], window));
                    for ((got, want), what) in got.iter().zip(&want).zip(["out", "lse", "d_q", "d_k, d_v"]) {
                        let differ = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
                        assert_eq!(differ, None, "{what}, heads of {hd}, {t} tokens, window {window:?}");
                        assert!(got.iter().all(|x| x.is_finite()), "{what}, heads of {hd}, {t} tokens");
                    }
                }
            }
        }
    }
}
