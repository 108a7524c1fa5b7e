//! Rotary position embedding.

use super::pool::{pieces, row_pieces};
use super::trig::sin_cos_slice;
use super::{Done, Span};
use crate::isa::Isa;
use crate::multiversion;

pub use ironhorse_core::eager::Pairs;

/// The sizes of one call.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Sequences.
    pub batch: usize,
    /// Positions in each.
    pub seq: usize,
    /// Heads at each position.
    pub heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Position of the first token: how many a cache holds already.
    pub offset: usize,
    /// What is rotated together.
    pub pairs: Pairs,
}

multiversion! {
    fn rotate_interleaved<const FMA: bool>(head: &mut [f32], sin: &[f32], cos: &[f32]) {
        for ((pair, &s), &c) in head.as_chunks_mut::<2>().0.iter_mut().zip(sin).zip(cos) {
            let [a, b] = *pair;
            *pair = [a * c - b * s, a * s + b * c];
        }
    }

    fn rotate_halves<const FMA: bool>(head: &mut [f32], sin: &[f32], cos: &[f32]) {
        let (first, second) = head.split_at_mut(sin.len());
        for (((a, b), &s), &c) in first.iter_mut().zip(second).zip(sin).zip(cos) {
            (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
        }
    }
}

/// freqs\[p, i\] = p / base^(2i/d) for p < max_seq, i < d/2, d = head_dim: the angles. Computed in
/// f64, rounded once.
///
/// # Safety
/// See [the module](super); freqs: max_seq·head_dim/2.
///
/// # Errors
/// See [the module](super).
pub unsafe fn rope_freqs(freqs: Span<f32>, head_dim: usize, base: f64) -> Done {
    let (half, d) = (head_dim / 2, head_dim as f64);
    let steps: Vec<f64> = (0..half).map(|i| 1.0 / base.powf(2.0 * i as f64 / d)).collect();
    row_pieces(freqs.len().checked_div(half).unwrap_or(0), half, 1, |positions| {
        for p in positions {
            // SAFETY: tasks have disjoint positions.
            let row = unsafe { freqs.get_mut(p * half..(p + 1) * half) };
            row.iter_mut().zip(&steps).for_each(|(angle, step)| *angle = (p as f64 * step) as f32);
        }
    })
}

/// out = x (batch, seq, heads, head_dim), each pair rotated by the angle of its position, `freqs[offset + s, i]`; `out`
/// may be `x`.
///
/// # Safety
/// See [the module](super); x and out as said, freqs: at least (offset + seq)·head_dim/2.
///
/// # Errors
/// See [the module](super).
pub unsafe fn rope_forward(x: Span<f32>, freqs: Span<f32>, out: Span<f32>, r: &Rope) -> Done {
    let (isa, half, width) = (Isa::detect(), r.head_dim / 2, r.heads * r.head_dim);
    if out.is_empty() {
        return Ok(());
    }
    let rotate = match r.pairs {
        Pairs::Interleaved => rotate_interleaved,
        Pairs::Halves => rotate_halves,
    };
    pieces(r.seq, 8, r.batch * width * 6, |positions| {
        let (mut sin, mut cos) = (vec![0.0; half], vec![0.0; half]);
        for s in positions {
            let at = (r.offset + s) * half;
            // SAFETY: nobody writes the angles.
            sin_cos_slice(&mut sin, &mut cos, unsafe { freqs.get(at..at + half) });
            for b in 0..r.batch {
                let token = (b * r.seq + s) * width;
                // SAFETY: tasks have disjoint positions of `out`, which is `x` or shares no memory with it.
                let row = unsafe { out.get_mut(token..token + width) };
                if !out.is(x) {
                    // SAFETY: `x` is apart from `out` here, and nobody writes it.
                    row.copy_from_slice(unsafe { x.get(token..token + width) });
                }
                row.chunks_exact_mut(r.head_dim).for_each(|head| rotate(isa, head, &sin, &cos));
            }
        }
    })
}
