//! AttentionShape by tiles of queries and keys with a running softmax: memory grows with the sequence, not its square.

use super::by_type;
use super::elem::Elem;
use super::ptr::Ptr;
use super::real::{Mat, Real};
use super::tiles::{Products, Scratch, Shape, TILE, load_rows, scale, softmax_row, store_rows, tile};
use crate::flat::Done;
use crate::flat::pool::{isa, with_team};
use crate::gemm::Beta;
use crate::isa::Isa;
use crate::team::PerWorker;
use ironhorse_core::eager::{Array, AttentionShape};

/// out = softmax(scale q kᵀ) v, lse = ln Σ e^(scale q kᵀ); see [`AttentionShape`]. `lse` may be null.
///
/// # Safety
/// See [the module](super); sizes as in [`AttentionShape`].
///
/// # Errors
/// See [the module](super).
pub unsafe fn attention(qkv: [Array; 3], [out, lse]: [Array; 2], shape: &AttentionShape) -> Done {
    by_type!(out.float, T => {
        let kept = Ptr::<<T as Elem>::Acc>::of(lse);
        // SAFETY: the caller's.
        unsafe { run(qkv.map(Ptr::<T>::of), Ptr::of(out), kept, Shape(*shape)) }
    })
}

/// # Safety
/// As [`attention`].
unsafe fn run<T: Elem<Acc = A>, A: Real>(qkv: [Ptr<T>; 3], out: Ptr<T>, lse: Ptr<A>, shape: Shape) -> Done {
    let (isa, tiles, heads) = (isa(), shape.0.q_len.div_ceil(TILE), shape.0.batch * shape.0.heads);
    if heads * tiles * shape.0.head_dim == 0 {
        return Ok(());
    }
    with_team(shape.large(), |team, _| {
        let scratch = PerWorker::new(team, |_| Scratch::new(shape.0.head_dim));
        // Late queries see more: they come first, so that the short tasks fill the gaps at the end.
        team.chunks(heads * tiles, 1, |task, worker| {
            let (head, index) = (task.start / tiles, tiles - 1 - task.start % tiles);
            // SAFETY: the team runs one task at a time per worker, and the scratch belongs to this run; tasks own disjoint
            // rows of what is written.
            unsafe { tile_fwd(isa, scratch.get(worker), qkv, (out, lse), &shape, [head, index]) }
        })
    })
}

/// # Safety
/// This task alone uses `scratch` and the rows of `out` and `lse` of this head and tile.
unsafe fn tile_fwd<T: Elem<Acc = A>, A: Real>(
    isa: Isa,
    scratch: &mut Scratch<A>,
    [q, k, v]: [Ptr<T>; 3],
    (out, lse): (Ptr<T>, Ptr<A>),
    shape: &Shape,
    [head, index]: [usize; 2],
) {
    let (a, hd) = (&shape.0, shape.0.head_dim);
    let queries = tile(index, a.q_len);
    let rows = queries.len();
    let [q_tile, k_tile, v_tile, o_tile, ..] = &mut scratch.rows;
    let scores = &mut scratch.scores[0];
    let mut products = Products { scratch: &mut scratch.gemm, isa };
    let (mut max, mut sum) = ([A::NEG_INFINITY; TILE], [A::ZERO; TILE]);
    // SAFETY: these queries exist, and are only read.
    unsafe { load_rows(isa, q_tile, q.at(shape.query(a.q, head, queries.start)), a.q.position, rows, hd) };
    o_tile.fill(A::ZERO);
    // The last query of the tile sees the most.
    let seen_by_tile = shape.sees(queries.end - 1);
    for start in (0..seen_by_tile).step_by(TILE) {
        let cols = TILE.min(seen_by_tile - start);
        let s = &mut scores[..rows * cols];
        let s_mat = Mat::new(s, cols);
        // SAFETY: these keys and values exist, and are only read; the tiles are this worker's own.
        unsafe {
            load_rows(isa, k_tile, k.at(shape.key(a.k, head, start)), a.k.position, cols, hd);
            load_rows(isa, v_tile, v.at(shape.key(a.v, head, start)), a.v.position, cols, hd);
            let ab = [Mat::new(q_tile, hd), Mat::new(k_tile, hd).transposed()];
            products.multiply([rows, cols, hd], A::of(a.scale), ab, s_mat, Beta::Overwrite);
        }
        for (i, row) in s.chunks_exact_mut(cols).enumerate() {
            let seen = shape.sees(queries.start + i).saturating_sub(start).min(cols);
            let (seen, hidden) = row.split_at_mut(seen);
            hidden.fill(A::ZERO);
            if seen.is_empty() {
                continue;
            }
            let (new_max, row_sum) = softmax_row(isa, seen, max[i]);
            let shrink = A::of((max[i] - new_max).wide().exp()); // 0 for the first tile: e^-inf
            sum[i] = sum[i] * shrink + row_sum;
            max[i] = new_max;
            if start > 0 {
                scale(isa, &mut o_tile[i * hd..(i + 1) * hd], shrink);
            }
        }
        // SAFETY: as above.
        unsafe {
            let ab = [s_mat, Mat::new(v_tile, hd)];
            products.multiply([rows, hd, cols], A::ONE, ab, Mat::new(o_tile, hd), Beta::Accumulate);
        }
    }
    for i in 0..rows {
        let sees = shape.sees(queries.start + i) > 0;
        if sees {
            scale(isa, &mut o_tile[i * hd..(i + 1) * hd], A::ONE / sum[i]);
        }
        let kept = if sees { A::of(max[i].wide() + sum[i].wide().ln()) } else { A::NEG_INFINITY };
        // SAFETY: this element belongs to this task.
        unsafe { lse.at(head * a.q_len + queries.start + i).set(kept) };
    }
    // SAFETY: these rows belong to this task.
    unsafe {
        let first = shape.query(a.out, head, queries.start);
        store_rows(isa, out.at(first), o_tile, a.out.position, rows, hd);
    }
}
