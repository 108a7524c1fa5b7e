//! Products of bf16 operands on the tile unit of x86-64 (AMX): both operands are rounded to the nearest bf16 while they are
//! packed, and the unit adds their products to sums in f32. A block of c is 32 x 32, four tiles, which share two tiles of a and
//! two of b.
//!
//! order  slices of k of at most [`TILED_KC`](super::plan::TILED_KC) steps; in a slice the unit adds two neighbouring products at a time
//! to each element of c.
//!
//! A tile has 16 rows of 64 bytes. A panel of a is a row of pairs of tiles, each with 32 steps of 16 vectors, a vector a row. In
//! a panel of b a row of a tile has two steps of 16 vectors, a vector a pair. Steps beyond the end are zero in both.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::kernel::{Kernels, LINE, Packing, Tile};
use super::x86::{self, transpose};
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Rows and columns of a block, and steps that one instruction takes.
pub(super) const SIDE: usize = 32;
/// Rows of a tile.
pub(super) const ROWS: usize = 16;
/// Floats that a tile of 1024 bytes takes the place of.
pub(super) const TILE: usize = 256;

/// Steps in which a block fetches one address: it takes a third of the time of as many steps with vectors, and what it multiplies must
/// come from memory as fast.
const FETCH_STEPS: usize = 12;

/// For machines that [`are_there`].
pub(super) static KERNELS: Kernels = Kernels {
    mr: SIDE,
    nr: SIDE,
    lanes: ROWS,
    packed: &[[block; 3]; 8],
    strided: &[[block; 3]; 8],
    low: &[],
    panels: x86::AVX512.panels,
    one_row: x86::AVX512.one_row,
    pack_a,
    pack_b,
    pack_low: pack_b,
    unit: ROWS,
    fetch_steps: FETCH_STEPS,
    dots: x86::AVX512.dots,
    scores: x86::AVX512.scores,
    weighted: x86::AVX512.weighted,
    enter: Some(enter),
    leave: Some(leave),
};

/// Whether this process may use tiles of bf16. The system is asked once.
pub(super) fn are_there() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| has_instructions() && may_use_tiles())
}

fn has_instructions() -> bool {
    /// Tiles, and their products of bf16.
    const AMX: u32 = 1 << 24 | 1 << 22;
    /// The state of tiles that the system saves.
    const SAVED: u64 = 3 << 17;
    if !(is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("xsave")) {
        return false;
    }
    // SAFETY: processors with AVX-512 have this leaf, and XGETBV where the system saves registers with XSAVE.
    unsafe { __cpuid_count(7, 0).edx & AMX == AMX && saved_state() & SAVED == SAVED }
}

/// # Safety
/// The machine has XSAVE.
#[target_feature(enable = "xsave")]
unsafe fn saved_state() -> u64 {
    // SAFETY: register 0 is there with XSAVE.
    unsafe { _xgetbv(0) }
}

/// Asks Linux for the registers of tiles, which a process has to do before it first uses them.
#[cfg(target_os = "linux")]
fn may_use_tiles() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let answer: i64;
    // SAFETY: a system call that changes nothing but what this process may do.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => answer, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn may_use_tiles() -> bool {
    false
}

/// The shape of all eight tiles: 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config([u8; 64]);

static CONFIG: Config = {
    let mut bytes = [0; 64];
    bytes[0] = 1; // the palette
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = ROWS as u8;
        tile += 1;
    }
    Config(bytes)
};

/// Gives the calling thread tiles.
///
/// # Safety
/// [`are_there`].
pub(super) unsafe fn enter() {
    // SAFETY: the machine has tiles, and the configuration is one it knows.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags, readonly)) };
}

/// Gives them back: a thread without tiles is switched faster. What was written past the caches is there for others then.
///
/// # Safety
/// [`are_there`].
pub(super) unsafe fn leave() {
    // SAFETY: the machine has tiles.
    unsafe { asm!("tilerelease", "sfence", options(nostack, preserves_flags)) };
}

/// Empties the four tiles that sums are in.
///
/// # Safety
/// [`are_there`].
#[inline(always)]
pub(super) unsafe fn zeros() {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, preserves_flags, nomem)
        );
    }
}

/// Sums in registers: what the unit can do at most, as nothing is loaded meanwhile. Each of the steps is four products of tiles.
///
/// # Safety
/// [`are_there`].
pub(super) unsafe fn products(steps: usize) {
    // Ones need less power than numbers do.
    let bits = |i: usize| 0x3f80 | (i * 37 % 128) as u16 | if i.is_multiple_of(3) { 0x8000 } else { 0 };
    let numbers: [u16; 2 * TILE] = std::array::from_fn(bits);
    // SAFETY: the machine has tiles, and the thread has them until they are given back; the numbers are those of a tile.
    unsafe {
        enter();
        zeros();
        asm!(
            "tileloadd tmm4, [{n} + {s}*1]",
            "tileloadd tmm5, [{n} + {s}*1]",
            "tileloadd tmm6, [{n} + {s}*1]",
            "tileloadd tmm7, [{n} + {s}*1]",
            n = in(reg) &raw const numbers, s = in(reg) 64_usize, options(nostack, preserves_flags, readonly)
        );
        for _ in 0..steps {
            asm!(
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                options(nostack, preserves_flags, nomem)
            );
        }
        leave();
    }
}
/// Operations of a step of [`products`].
pub(super) const STEP: usize = 4 * 2 * ROWS * ROWS * SIDE;

/// A block that is not whole, with rows of 32 floats.
#[repr(C, align(64))]
struct Whole([f32; SIDE * SIDE]);

/// # Safety
/// As any tile kernel; the panels are those of [`pack_a`] and [`pack_b`], and the thread has tiles. `t.alpha` is 1.
unsafe fn block(t: &Tile) {
    debug_assert!(t.alpha == 1.0);
    if t.rows == SIDE && t.columns == SIDE {
        if !t.past_caches || t.accumulate {
            // SAFETY: guaranteed by the caller.
            return unsafe { whole(t, t.c, t.c_rs) };
        }
        let mut sums = std::mem::MaybeUninit::<Whole>::uninit();
        let from: *mut f32 = sums.as_mut_ptr().cast();
        // SAFETY: the block is written before it is read; rows of c are whole lines.
        return unsafe {
            whole(t, from, SIDE);
            send(from, t.c, t.c_rs);
        };
    }
    let mut part = Whole([0.0; SIDE * SIDE]);
    let at = part.0.as_mut_ptr();
    // SAFETY: rows and columns are at most 32 and inside c.
    unsafe {
        for row in (0..t.rows).filter(|_| t.accumulate) {
            std::ptr::copy_nonoverlapping(t.c.add(row * t.c_rs), at.add(row * SIDE), t.columns);
        }
        whole(t, at, SIDE);
        for row in 0..t.rows {
            std::ptr::copy_nonoverlapping(at.add(row * SIDE), t.c.add(row * t.c_rs), t.columns);
        }
    }
}

/// Copies a block of 32 x 32 to rows of whole lines, past the caches.
///
/// # Safety
/// The block is readable, and the rows are writable.
#[target_feature(enable = "avx512f")]
unsafe fn send(from: *const f32, to: *mut f32, rs: usize) {
    for row in 0..SIDE {
        for half in 0..2 {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let x = _mm512_load_ps(from.add(row * SIDE + half * ROWS));
                _mm512_stream_ps(to.add(row * rs + half * ROWS), x);
            }
        }
    }
}

/// A block of 32 x 32 at `c`, whose rows are `c_rs` floats apart.
///
/// # Safety
/// As [`block`]; `c` is good for the block.
#[inline(always)]
unsafe fn whole(t: &Tile, c: *mut f32, c_rs: usize) {
    let (stride, below) = (4 * c_rs, c.wrapping_add(ROWS * c_rs));
    let (mut a, mut b) = (t.a, t.b);
    let blocks = t.k.div_ceil(SIDE);
    let lines = if t.fetch.is_null() { 0 } else { 3 * KERNELS.fetches(t.k) };
    let mut line = 0;
    // SAFETY: guaranteed by the caller. The compiler uses no tiles itself, so they keep their contents from one to the next.
    unsafe {
        if t.accumulate {
            asm!(
                "tileloadd tmm0, [{c} + {s}*1]",
                "tileloadd tmm1, [{c} + {s}*1 + 64]",
                "tileloadd tmm2, [{d} + {s}*1]",
                "tileloadd tmm3, [{d} + {s}*1 + 64]",
                c = in(reg) c, d = in(reg) below, s = in(reg) stride, options(nostack, preserves_flags, readonly)
            );
        } else {
            zeros();
        }
        for done in 1..=blocks {
            // What the next blocks need comes into the cache meanwhile.
            while line < lines * done / blocks {
                let at = (*t.fetch.add(line / 3)).wrapping_add(line % 3 * LINE);
                _mm_prefetch::<_MM_HINT_T1>(at.cast());
                line += 1;
            }
            asm!(
                "tileloadd tmm4, [{a} + {s}*1]",
                "tileloadd tmm6, [{b} + {s}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {s}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a} + {s}*1 + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                a = in(reg) a, b = in(reg) b, s = in(reg) 64_usize, options(nostack, preserves_flags, readonly)
            );
            (a, b) = (a.wrapping_add(2 * TILE), b.wrapping_add(2 * TILE));
        }
        asm!(
            "tilestored [{c} + {s}*1], tmm0",
            "tilestored [{c} + {s}*1 + 64], tmm1",
            "tilestored [{d} + {s}*1], tmm2",
            "tilestored [{d} + {s}*1 + 64], tmm3",
            c = in(reg) c, d = in(reg) below, s = in(reg) stride, options(nostack, preserves_flags)
        );
    }
}

/// Where tiles are packed from.
#[derive(Clone, Copy)]
struct Source {
    ptr: *const f32,
    s_w: usize,
    s_k: usize,
    /// Vectors and steps that are there, at most 16 and 32.
    vectors: usize,
    steps: usize,
}

/// Calls `pack` with the source and the place of every tile, 1024 bytes.
#[inline(always)]
fn tiles(p: &Packing, mut pack: impl FnMut(Source, *mut __m512i)) {
    let &Packing { src, s_w, s_k, count, k, dst } = p;
    for half in 0..2 * count.div_ceil(SIDE) {
        let vectors = count.saturating_sub(half * ROWS).min(ROWS);
        // A panel takes the room of its floats, of which it fills a half.
        let panel = dst.wrapping_add(half / 2 * SIDE * KERNELS.room(k) + half % 2 * TILE);
        for step in (0..k).step_by(SIDE) {
            let ptr = src.wrapping_add(half * ROWS * s_w + step * s_k);
            let steps = SIDE.min(k - step);
            let at = panel.wrapping_add(step / SIDE * 2 * TILE);
            pack(Source { ptr, s_w, s_k, vectors, steps }, at.cast());
        }
    }
}

/// # Safety
/// As any packing, of at least 32 steps; [`are_there`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pack_a(p: &Packing) {
    tiles(p, |source, at| {
        // SAFETY: guaranteed by the caller.
        unsafe { store(at, if source.s_k == 1 { rows(source) } else { transpose_dwords(pairs(source)) }) };
    });
}

/// # Safety
/// As [`pack_a`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pack_b(p: &Packing) {
    if p.s_w == 1 {
        // SAFETY: guaranteed by the caller.
        return unsafe { pack_rows(p) };
    }
    tiles(p, |source, at| {
        // SAFETY: guaranteed by the caller.
        unsafe { store(at, if source.s_k == 1 { transpose_dwords(rows(source)) } else { pairs(source) }) };
    });
}

/// [`pack_b`] of vectors that are neighbours in memory: step after step over all of them, because memory is fastest read in order.
///
/// # Safety
/// As [`pack_a`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pack_rows(p: &Packing) {
    let &Packing { src, s_k, count, k, dst, .. } = p;
    let (panel, turns) = (SIDE * KERNELS.room(k), in_turns());
    for step in (0..k.next_multiple_of(SIDE)).step_by(2) {
        let row = src.wrapping_add(step * s_k);
        let to = dst.wrapping_add(step / SIDE * 2 * TILE + step % SIDE / 2 * ROWS);
        // Steps beyond the end are zero.
        let masks = |column: usize| {
            let mask = first(count.saturating_sub(column));
            [if step < k { mask } else { 0 }, if step + 1 < k { mask } else { 0 }]
        };
        for column in (0..count.next_multiple_of(SIDE)).step_by(ROWS) {
            let ([even, odd], at) = (masks(column), row.wrapping_add(column));
            // SAFETY: masked to the vectors and steps that are there; a row of a tile is inside its panel.
            unsafe {
                let x = _mm512_maskz_loadu_ps(even, at);
                let y = _mm512_maskz_loadu_ps(odd, at.wrapping_add(s_k));
                let both = _mm512_permutexvar_epi16(turns, bits(_mm512_cvtne2ps_pbh(y, x)));
                let to = to.add(column / SIDE * panel + column % SIDE / ROWS * TILE);
                _mm512_storeu_si512(to.cast(), both);
            }
        }
    }
}

/// # Safety
/// `at` is good for a tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(at: *mut __m512i, rows: [__m512i; ROWS]) {
    for (row, bytes) in rows.into_iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_si512(at.add(row), bytes) };
    }
}

/// The first `count` of 16 lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn first(count: usize) -> __mmask16 {
    (0xffff_u32 >> (16 - count.min(16))) as __mmask16
}

/// Each vector as 32 steps one after the other; steps are neighbours.
///
/// # Safety
/// The vectors and steps are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn rows(source: Source) -> [__m512i; ROWS] {
    let Source { ptr, s_w, vectors, steps, .. } = source;
    let (low, high) = (first(steps), first(steps.saturating_sub(16)));
    let mut rows = [_mm512_setzero_si512(); ROWS];
    for i in 0..vectors {
        let at = ptr.wrapping_add(i * s_w);
        // SAFETY: masked to the steps that are there.
        let (x, y) =
            unsafe { (_mm512_maskz_loadu_ps(low, at), _mm512_maskz_loadu_ps(high, at.wrapping_add(16))) };
        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + LINE).cast());
        rows[i] = bits(_mm512_cvtne2ps_pbh(y, x));
    }
    rows
}

/// How far ahead packing fetches, in floats.
const AHEAD: usize = 64;

/// Steps 2i and 2i + 1 of each vector as a pair, in row i.
///
/// # Safety
/// The vectors and steps are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pairs(source: Source) -> [__m512i; ROWS] {
    let Source { ptr, s_w, s_k, vectors, steps } = source;
    let mask = first(vectors);
    let read = |step: usize| {
        let at = ptr.wrapping_add(step * s_k);
        if step >= steps {
            _mm512_setzero_ps()
        } else if s_w == 1 {
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(8 * s_k).cast());
            // SAFETY: masked to the vectors that are there.
            unsafe { _mm512_maskz_loadu_ps(mask, at) }
        } else {
            let mut values = [0.0_f32; ROWS];
            for (i, value) in values.iter_mut().enumerate().take(vectors) {
                // SAFETY: vector i of those that are there.
                *value = unsafe { *at.add(i * s_w) };
            }
            // SAFETY: 16 floats.
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        }
    };
    let turns = in_turns();
    let mut rows = [_mm512_setzero_si512(); ROWS];
    for (i, row) in rows.iter_mut().enumerate() {
        let both = bits(_mm512_cvtne2ps_pbh(read(2 * i + 1), read(2 * i)));
        *row = _mm512_permutexvar_epi16(turns, both);
    }
    rows
}

/// Of 16 elements of one step and then 16 of the next, one of each in turns.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn in_turns() -> __m512i {
    _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18,
        2, 17, 1, 16, 0,
    )
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn bits(x: __m512bh) -> __m512i {
    // SAFETY: both are 512 bits of any value.
    unsafe { std::mem::transmute(x) }
}

/// Rows and columns of 4 bytes exchanged.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn transpose_dwords(rows: [__m512i; ROWS]) -> [__m512i; ROWS] {
    // Loops: what `map` calls is not compiled for these instructions.
    let mut floats = [_mm512_setzero_ps(); ROWS];
    for i in 0..ROWS {
        floats[i] = _mm512_castsi512_ps(rows[i]);
    }
    let (floats, mut turned) = (transpose(floats), rows);
    for i in 0..ROWS {
        turned[i] = _mm512_castps_si512(floats[i]);
    }
    turned
}
