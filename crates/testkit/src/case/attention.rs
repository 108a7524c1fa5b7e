//! Cases of attention.

mod masked;

use super::dropout::drop_of;
use super::{Case, Earlier, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{
    AttentionBwd, AttentionCached, AttentionDropoutBwd, AttentionDropoutFwd, AttentionFwd, AttentionMask,
};
use std::sync::Arc;

/// (B, T, C, NH)
const SHAPES: [[usize; 4]; 11] = [
    [1, 1, 1, 1],
    [3, 1, 48, 3],
    [2, 2, 5, 1],
    [2, 33, 5, 5],
    [2, 37, 48, 3],
    [1, 31, 128, 2],
    [1, 65, 80, 5],
    [1, 130, 129, 3],
    [1, 17, 160, 1],
    [0, 7, 48, 3],
    [2, 0, 48, 3],
];

/// More (B, T, C, NH), with head sizes of 64 and 128: whole tiles, and a few rows more.
const TILES: [[usize; 4]; 9] = [
    [1, 33, 64, 1],
    [2, 64, 128, 2],
    [1, 128, 256, 2],
    [1, 129, 192, 3],
    [2, 200, 128, 2],
    [1, 256, 128, 2],
    [1, 384, 128, 2],
    [1, 256, 256, 2],
    [1, 130, 384, 3],
];

/// (B, T, C, NH, NKV) with as many heads as it takes to give each its own block of a large GPU.
const MANY: [[usize; 5]; 2] = [[6, 128, 704, 11, 11], [67, 128, 128, 2, 1]];

/// (B, T, C, NH, NKV) of grouped-query attention, for every kind of kernel.
const GROUPED: [[usize; 5]; 15] = [
    [2, 1, 8, 4, 1],
    [2, 33, 30, 6, 2],
    [1, 70, 102, 6, 3],
    [2, 37, 48, 4, 1],
    [2, 65, 96, 6, 2],
    [1, 67, 160, 2, 1],
    [1, 130, 128, 4, 2],
    [1, 128, 128, 2, 1],
    [1, 100, 256, 2, 1],
    [1, 20, 1028, 4, 2],
    [1, 128, 768, 12, 4],
    [2, 256, 768, 12, 4],
    [1, 550, 64, 4, 1],
    [0, 7, 48, 6, 2],
    [2, 0, 48, 6, 2],
];

/// (B, maxT, C, NH), positions
const CACHES: [([usize; 4], &[usize]); 13] = [
    ([1, 1, 1, 1], &[0]),
    ([2, 37, 48, 3], &[0, 1, 18, 36]),
    ([1, 130, 129, 3], &[30, 65, 129]),
    ([3, 65, 64, 1], &[31, 64]),
    ([5, 33, 5, 5], &[32]),
    ([0, 4, 48, 3], &[2]),
    ([2, 256, 768, 12], &[0, 128, 255]),
    ([1, 600, 128, 2], &[0, 63, 64, 127, 128, 129, 300, 599]),
    ([2, 300, 256, 2], &[31, 64, 299]),
    ([65, 140, 256, 4], &[139]),
    ([2, 140, 256, 1], &[0, 64, 139]),
    // longer than the blocks of a cluster take at once: few heads, and many
    ([1, 1300, 128, 2], &[1023, 1299]),
    ([16, 1100, 128, 2], &[1030]),
];

/// (B, maxT, C, NH, NKV), positions
const GROUPED_CACHES: [([usize; 5], &[usize]); 6] = [
    ([2, 37, 48, 4, 1], &[0, 1, 36]),
    ([1, 130, 30, 6, 2], &[30, 129]),
    ([2, 65, 384, 6, 2], &[31, 64]),
    ([0, 4, 48, 6, 2], &[2]),
    ([2, 256, 768, 12, 4], &[0, 128, 255]),
    ([1, 400, 512, 4, 2], &[127, 256, 399]),
];

/// (S, maxT, C, NH, NKV), then the sequence and position of each token; a position of -1 is a token that is not used.
type Placed = ([usize; 5], &'static [(i32, i32)]);
const PLACED: [Placed; 11] = [
    ([1, 1, 1, 1, 1], &[(0, 0)]),
    ([1, 1, 1, 1, 1], &[(0, -1)]),
    ([4, 37, 48, 3, 3], &[(0, 36), (2, 0), (3, 17)]),
    ([2, 37, 48, 4, 1], &[(0, 0), (0, 1), (0, 2), (1, 30), (1, 31), (0, -1), (7, -1)]),
    ([3, 130, 30, 6, 2], &[(0, 129), (1, 64), (1, 65), (2, 0)]),
    ([3, 300, 256, 4, 2], &[(0, 299), (1, 31), (1, 32), (2, 127), (2, 128), (-9, -1)]),
    ([2, 600, 768, 12, 4], &[(0, 599), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]),
    ([3, 300, 256, 2, 1], &[(0, 299), (1, 63), (1, 64), (2, 0), (0, -1)]),
    ([3, 140, 512, 2, 1], &[(0, 139), (1, 31), (1, 32), (2, 0), (0, -1)]),
    ([33, 33, 64, 1, 1], &[(1, 32), (5, 7), (31, 31), (32, 0)]),
    ([2, 9, 48, 6, 2], &[]),
];

/// (S, maxT, C, NH, NKV), window, then the sequence, the first position and the number of tokens that follow each other: prompts. A
/// first position of -1 is that of tokens that are not used.
type Runs = ([usize; 5], Option<usize>, &'static [(i32, i32, usize)]);
const RUNS: [Runs; 13] = [
    ([1, 70, 64, 1, 1], None, &[(0, 0, 64)]),
    ([1, 70, 128, 1, 1], None, &[(0, 2, 67)]),
    ([2, 80, 128, 2, 1], None, &[(0, 0, 40), (1, 3, 30)]),
    ([2, 90, 256, 2, 1], None, &[(0, 10, 60), (1, 80, 10), (0, -1, 9)]),
    // after a token that is written, so that no group of 64 begins with a prompt
    ([3, 110, 256, 4, 1], None, &[(0, 109, 1), (1, 7, 100), (2, 0, 20), (0, -1, 7)]),
    ([2, 300, 512, 4, 1], None, &[(0, 200, 70), (1, 299, 1)]),
    ([2, 600, 128, 2, 2], None, &[(0, 599, 1), (1, 500, 69)]),
    // of the same sequence too, and of lengths around the least that tensor cores take
    ([4, 50, 64, 1, 1], None, &[(0, 0, 7), (1, 20, 8), (2, 5, 9), (2, 30, 16), (3, 0, 24)]),
    // more rows and heads than blocks
    ([3, 80, 1024, 16, 4], None, &[(0, 79, 1), (1, 0, 70), (2, 5, 59)]),
    ([1, 70, 256, 1, 1], None, &[(0, 1, 65)]),
    ([2, 150, 128, 1, 1], Some(40), &[(0, 0, 70), (1, 60, 64)]),
    ([2, 200, 128, 2, 1], Some(17), &[(0, 199, 1), (1, 100, 80)]),
    ([1, 140, 256, 2, 1], Some(100), &[(0, 50, 80)]),
];

/// Sizes of a case.
#[derive(Clone, Copy)]
struct Size {
    b: usize,
    /// T, or maxT of a cache
    t: usize,
    /// C
    c: usize,
    heads: usize,
    kv_heads: usize,
}

impl From<[usize; 5]> for Size {
    fn from([b, t, c, heads, kv_heads]: [usize; 5]) -> Self {
        Self { b, t, c, heads, kv_heads }
    }
}

/// Sizes with NKV = NH.
impl From<[usize; 4]> for Size {
    fn from([b, t, c, heads]: [usize; 4]) -> Self {
        [b, t, c, heads, heads].into()
    }
}

impl Size {
    /// NKV·HD
    fn kv_width(&self) -> usize {
        self.c / self.heads * self.kv_heads
    }

    /// (NH + 2·NKV)·HD
    fn packed(&self) -> usize {
        self.c + 2 * self.kv_width()
    }

    fn name(&self, length: &str) -> String {
        let Self { b, t, c, heads, kv_heads } = self;
        let group = if kv_heads == heads { String::new() } else { format!(" NKV{kv_heads}") };
        format!("B{b} {length}{t} C{c} NH{heads}{group}")
    }
}

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = SHAPES.into_iter().chain(TILES).map(Size::from);
    for size in sizes.chain(GROUPED.into_iter().chain(MANY).map(Size::from)) {
        cases.push(fwd(p, size, 1.0));
        cases.push(bwd(p, size, 1.0));
    }
    // Scores above 100: exp overflows unless the maximum is subtracted. Head sizes 16 and 64 use different kernels.
    for size in [[1, 65, 64, 4], [1, 65, 128, 2]].map(Size::from) {
        for spread in [4.0, 10.0] {
            cases.push(fwd(p, size, spread));
            cases.push(bwd(p, size, spread));
        }
    }
    let caches = CACHES.map(|(shape, positions)| (Size::from(shape), positions));
    let grouped = GROUPED_CACHES.map(|(shape, positions)| (Size::from(shape), positions));
    for (size, positions) in caches.into_iter().chain(grouped) {
        cases.extend(positions.iter().map(|&position| cached(p, size, position, None)));
    }
    for (size, places) in PLACED {
        cases.push(placed(p, size.into(), places, None));
    }
    for (size, window, runs) in RUNS {
        let place = |row, at, i| (row, if at < 0 { at } else { at + i });
        let run = |&(row, at, count): &(i32, i32, usize)| (0..count as i32).map(move |i| place(row, at, i));
        let places: Vec<(i32, i32)> = runs.iter().flat_map(run).collect();
        cases.push(placed(p, size.into(), &places, window));
    }
    // Heads of 12, and of all widths that have a kernel of their own.
    for (size, window) in [
        ([3, 70, 48, 4, 2], 1),
        ([3, 70, 48, 4, 2], 7),
        ([3, 70, 48, 4, 2], 40),
        ([3, 70, 256, 4, 2], 40),
        ([3, 70, 256, 2, 1], 40),
        ([3, 70, 512, 2, 1], 40),
    ] {
        cases.push(placed(p, size.into(), &[(0, 69), (1, 2), (1, 3), (1, 4), (2, 6), (2, 7)], Some(window)));
    }
    cases.extend(masked::cases(p));
    cases
}

/// Cases of all these shapes with dropout of the probabilities.
pub(super) fn dropout_cases(p: Precision) -> Vec<Case> {
    let sizes = SHAPES.into_iter().chain(TILES).map(Size::from);
    let mut cases = Vec::new();
    for (number, size) in sizes.chain(GROUPED.map(Size::from)).enumerate() {
        cases.extend([dropout_fwd(p, size, number), dropout_bwd(p, size, number)]);
    }
    cases.extend(masked::dropout_cases(p));
    cases
}

/// Scores have a standard deviation of about spread²/3; the largest of thousands is four or five times that.
fn mark(kit: &mut Kit, Size { b, t, c, .. }: Size, spread: f32) {
    kit.scores = 1.5 * f64::from(spread * spread);
    kit.large = b * t * t * c > 3_000_000;
}

fn fwd_op(kit: &mut Kit, size: Size, spread: f32) -> AttentionFwd {
    mark(kit, size, spread);
    let Size { b, t, c, heads, kv_heads } = size;
    let (out, lse, qkv) = (kit.slot([b, t, c]), kit.stat([b, heads, t]), kit.slot([b, t, size.packed()]));
    kit.draw(qkv, -spread, spread);
    AttentionFwd { out, lse, qkv, heads, kv_heads, mask: AttentionMask::CAUSAL }
}

fn fwd(p: Precision, size: Size, spread: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("{} spread {spread}", size.name("T")));
    let op = fwd_op(&mut kit, size, spread);
    kit.finish(op)
}

fn dropout_kit(p: Precision, size: Size, number: usize) -> Kit {
    let mut kit = Kit::with_precision(p, size.name("T"));
    kit.scalars = drop_of(number).1;
    kit
}

fn dropout_fwd(p: Precision, size: Size, number: usize) -> Case {
    let mut kit = dropout_kit(p, size, number);
    let op = dropout_fwd_op(&mut kit, size, number);
    kit.finish(op)
}

fn dropout_fwd_op(kit: &mut Kit, size: Size, number: usize) -> AttentionDropoutFwd {
    let AttentionFwd { out, lse, qkv, heads, kv_heads, mask } = fwd_op(kit, size, 1.0);
    AttentionDropoutFwd { out, lse, qkv, heads, kv_heads, mask, drop: drop_of(number).0 }
}

/// A case as [`bwd`] makes it, with dropout of the probabilities.
fn dropout_bwd(p: Precision, size: Size, number: usize) -> Case {
    let mut kit = dropout_kit(p, size, number);
    let forward = dropout_fwd_op(&mut kit, size, number);
    let results = results(kit.finish(forward), forward.attention());
    let mut kit = dropout_kit(p, size, number);
    let AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask } =
        bwd_op(&mut kit, size, 1.0, &results);
    let drop = drop_of(number).0;
    kit.finish(AttentionDropoutBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask, drop })
}

/// What a backward reads of its forward.
fn results(case: Case, op: AttentionFwd) -> Arc<Earlier> {
    Earlier::new(case, &[op.qkv, op.out, op.lse])
}

fn bwd_op(kit: &mut Kit, size: Size, spread: f32, results: &Arc<Earlier>) -> AttentionBwd {
    let Size { b, t, c, heads, kv_heads } = size;
    mark(kit, size, spread);
    let (d_qkv, d_out) = (kit.slot([b, t, size.packed()]), kit.slot([b, t, c]));
    let (qkv, out, lse) = (kit.slot([b, t, size.packed()]), kit.slot([b, t, c]), kit.stat([b, heads, t]));
    for (number, slot) in [qkv, out, lse].into_iter().enumerate() {
        kit.result(slot, results, number);
    }
    AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask: AttentionMask::CAUSAL }
}

/// `out` and `lse` are the results of the oracle's forward, rounded to f32.
fn bwd(p: Precision, size: Size, spread: f32) -> Case {
    let name = format!("{} spread {spread}", size.name("T"));
    let mut kit = Kit::with_precision(p, name.as_str());
    let forward = fwd_op(&mut kit, size, spread);
    let results = results(kit.finish(forward), forward);
    let mut kit = Kit::with_precision(p, name);
    let op = bwd_op(&mut kit, size, spread, &results);
    kit.finish(op)
}

/// The cache holds NaN from `position` on, which may be written but not read, and before the window.
fn cached(p: Precision, size: Size, position: usize, window: Option<usize>) -> Case {
    let Size { b, t: context, c, heads, kv_heads } = size;
    let last = window.map_or(String::new(), |window| format!(" window {window}"));
    let mut kit = Kit::with_precision(p, format!("{} at position {position}{last}", size.name("maxT")));
    kit.scalars.position = position as u32;
    let width = size.kv_width();
    let [keys, values] = [(); 2].map(|()| kit.cache([b, context, width]));
    for slot in [keys, values] {
        let mut data = kit.rng.uniforms(slot.numel(), -1.0, 1.0);
        for row in data.chunks_exact_mut(context * width) {
            row[position * width..].fill(f32::NAN);
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            row[..first * width].fill(f32::NAN);
        }
        kit.set(slot, data);
    }
    let (out, qkv) = (kit.slot([b, 1, c]), kit.slot([b, 1, size.packed()]));
    kit.finish(AttentionCached {
        out,
        keys,
        values,
        qkv,
        rows: None,
        positions: None,
        heads,
        kv_heads,
        window,
    })
}

/// The places of tokens in a case's name: each token, or the positions of those that follow each other.
fn places_name(places: &[(i32, i32)]) -> String {
    let follows = |a: &(i32, i32), b: &(i32, i32)| a.0 == b.0 && a.1 >= 0 && a.1 + 1 == b.1;
    let runs = places.chunk_by(follows).map(|run| match run {
        [(row, first), .., (_, last)] => format!("({row}, {first} to {last})"),
        _ => format!("{run:?}").trim_matches(['[', ']']).to_owned(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// Tokens of several sequences. The cache holds NaN at the positions that are written, and at all that no token may read.
fn placed(p: Precision, size: Size, places: &[(i32, i32)], window: Option<usize>) -> Case {
    let Size { b: sequences, t: context, c, heads, kv_heads } = size;
    let last = window.map_or(String::new(), |window| format!(" window {window}"));
    let mut kit =
        Kit::with_precision(p, format!("{} places {}{last}", size.name("maxT"), places_name(places)));
    kit.scalars.position = u32::MAX; // must not be used
    let (width, tokens) = (size.kv_width(), places.len());
    kit.large = tokens * context * c > 3_000_000;
    let [keys, values] = [(); 2].map(|()| kit.cache([sequences, context, width]));
    let readable = |row: usize, position: usize| {
        let here = || places.iter().filter(|&&(r, at)| at >= 0 && r as usize == row);
        let reaches = |at: i32| at as usize > position && window.is_none_or(|w| at as usize - position < w);
        here().any(|&(_, at)| reaches(at)) && !here().any(|&(_, at)| at as usize == position)
    };
    for slot in [keys, values] {
        let mut data = kit.rng.uniforms(slot.numel(), -1.0, 1.0);
        for (i, vector) in data.chunks_exact_mut(width).enumerate() {
            if !readable(i / context, i % context) {
                vector.fill(f32::NAN);
            }
        }
        kit.set(slot, data);
    }
    let (out, qkv) = (kit.slot([tokens, 1, c]), kit.slot([tokens, 1, size.packed()]));
    let mut column = |of: fn(&(i32, i32)) -> i32| {
        let values: Vec<i32> = places.iter().map(of).collect();
        Some(kit.i32s([tokens, 1], &values))
    };
    let (rows, positions) = (column(|place| place.0), column(|place| place.1));
    kit.finish(AttentionCached { out, keys, values, qkv, rows, positions, heads, kv_heads, window })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::op::Op;

    #[test]
    fn the_widest_scores_overflow_an_f32_exponential() {
        let case = fwd(Precision::F32, [1, 65, 64, 4].into(), 10.0);
        let Op::AttentionFwd(op) = *case.op() else { unreachable!() };
        let lse = case.oracle().unwrap().read_f64(op.lse).unwrap();
        let largest = lse.into_iter().fold(0.0, f64::max) as f32;
        assert_eq!(largest.exp(), f32::INFINITY, "{largest}");
    }
}
