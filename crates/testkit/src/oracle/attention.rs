//! Causal self-attention with the whole matrix of probabilities.

use super::{Pools, Step};
use ironhorse_core::op::{AttentionBwd, AttentionCached, AttentionFwd};
use ironhorse_core::{Error, Result, Slot};

/// Sizes, and where things lie in packed (B,T,3C) and plain (B,T,C) tensors.
#[derive(Clone, Copy)]
struct Dims {
    batch: usize,
    seq: usize,
    heads: usize,
    /// HD
    size: usize,
}

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;

impl Dims {
    fn new(out: &Slot, heads: usize) -> Self {
        let dims = out.shape.dims();
        Self { batch: dims[0], seq: dims[1], heads, size: dims[2] / heads }
    }

    fn width(&self) -> usize {
        self.heads * self.size
    }

    fn scale(&self) -> f64 {
        1.0 / (self.size as f64).sqrt()
    }

    /// Where a head's vector of q, k or v starts in (B,T,3C).
    fn packed(&self, [b, t, part, h]: [usize; 4]) -> usize {
        ((b * self.seq + t) * 3 + part) * self.width() + h * self.size
    }

    /// Where a head's vector starts in (B,T,C).
    fn plain(&self, [b, t, h]: [usize; 3]) -> usize {
        (b * self.seq + t) * self.width() + h * self.size
    }

    /// Every (b, h, t).
    fn rows(self) -> impl Iterator<Item = (usize, usize, usize)> {
        let heads = move |b| (0..self.heads).flat_map(move |h| (0..self.seq).map(move |t| (b, h, t)));
        (0..self.batch).flat_map(heads)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `to += factor·from`.
fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

fn log_sum_exp(scores: &[f64]) -> f64 {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln()
}

pub(super) fn fwd(pools: &mut Pools, op: &AttentionFwd) -> Result<()> {
    let dims = Dims::new(&op.out, op.heads);
    let qkv = pools.read(op.qkv)?;
    let vector = |at: [usize; 4]| &qkv[dims.packed(at)..][..dims.size];
    let mut out = vec![0.0; op.out.numel()];
    let mut lse = vec![0.0; op.lse.numel()];
    for (b, h, t) in dims.rows() {
        let query = vector([b, t, Q, h]);
        let scores: Vec<f64> = (0..=t).map(|s| dot(query, vector([b, s, K, h])) * dims.scale()).collect();
        let row_lse = log_sum_exp(&scores);
        lse[(b * dims.heads + h) * dims.seq + t] = row_lse;
        for s in 0..=t {
            let p = (scores[s] - row_lse).exp();
            add_scaled(&mut out[dims.plain([b, t, h])..][..dims.size], p, vector([b, s, V, h]));
        }
    }
    pools.write(op.out, &out)?;
    pools.write(op.lse, &lse)
}

/// With `p = softmax` from `lse` and `D[t] = d_out[t]·out[t]`: `d_v[s] += p·d_out[t]`,
/// `d_score = p·(d_out[t]·v[s] - D[t])`, `d_q[t] += d_score·k[s]/√HD`, `d_k[s] += d_score·q[t]/√HD`.
pub(super) fn bwd(pools: &mut Pools, op: &AttentionBwd) -> Result<()> {
    let dims = Dims::new(&op.out, op.heads);
    let (qkv, lse) = (pools.read(op.qkv)?, pools.read(op.lse)?);
    let (out, d_out) = (pools.read(op.out)?, pools.read(op.d_out)?);
    let vector = |at: [usize; 4]| &qkv[dims.packed(at)..][..dims.size];
    let mut d_qkv = vec![0.0; op.d_qkv.numel()];
    for (b, h, t) in dims.rows() {
        let here = dims.plain([b, t, h]);
        let (d_row, row) = (&d_out[here..][..dims.size], &out[here..][..dims.size]);
        let query = vector([b, t, Q, h]);
        for s in 0..=t {
            let (key, value) = (vector([b, s, K, h]), vector([b, s, V, h]));
            let p = (dot(query, key) * dims.scale() - lse[(b * dims.heads + h) * dims.seq + t]).exp();
            let d_score = p * (dot(d_row, value) - dot(d_row, row)) * dims.scale();
            add_scaled(&mut d_qkv[dims.packed([b, t, Q, h])..][..dims.size], d_score, key);
            add_scaled(&mut d_qkv[dims.packed([b, s, K, h])..][..dims.size], d_score, query);
            add_scaled(&mut d_qkv[dims.packed([b, s, V, h])..][..dims.size], p, d_row);
        }
    }
    pools.write(op.d_qkv, &d_qkv)
}

pub(super) fn cached(pools: &mut Pools, op: &AttentionCached, step: Step) -> Result<()> {
    let now = Dims::new(&op.out, op.heads); // one position
    let past = Dims { seq: op.keys.shape.dims()[1], ..now };
    let position = step.scalars.position as usize;
    if position >= past.seq {
        let what = format!("position {position} is beyond the cache of {} positions", past.seq);
        return Err(Error::Input(what));
    }
    let qkv = pools.read(op.qkv)?;
    let (mut keys, mut values) = (pools.read(op.keys)?, pools.read(op.values)?);
    let mut out = vec![0.0; op.out.numel()];
    for (b, h, _) in now.rows() {
        let vector = |part| &qkv[now.packed([b, 0, part, h])..][..now.size];
        let new = past.plain([b, position, h]);
        keys[new..][..now.size].copy_from_slice(vector(K));
        values[new..][..now.size].copy_from_slice(vector(V));
        let row = |s| past.plain([b, s, h])..past.plain([b, s, h]) + now.size;
        let scores: Vec<f64> = (0..=position).map(|s| dot(vector(Q), &keys[row(s)]) * now.scale()).collect();
        let lse = log_sum_exp(&scores);
        for s in 0..=position {
            let p = (scores[s] - lse).exp();
            add_scaled(&mut out[now.plain([b, 0, h])..][..now.size], p, &values[row(s)]);
        }
    }
    pools.write(op.keys, &keys)?;
    pools.write(op.values, &values)?;
    pools.write(op.out, &out)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{AttentionBwd, AttentionCached, AttentionFwd};

    const LN3: f32 = 1.098_612_3;
    /// Two positions, one head of size 1; q, k, v each. Scores of row 1: (ln 3, 0), so p = (3/4, 1/4).
    const QKV: [f32; 6] = [5.0, 1.0, 8.0, LN3, 0.0, 16.0];

    #[test]
    fn fwd_by_hand() {
        let mut kit = Kit::new("attention");
        let (out, lse, qkv) = (kit.slot([1, 2, 1]), kit.slot([1, 1, 2]), kit.f32s([1, 2, 3], &QKV));
        let case = kit.finish(AttentionFwd { out, lse, qkv, heads: 1 });
        case.expect_within(out, &[8.0, 10.0], 1e-6);
        case.expect_within(lse, &[5.0, 4_f64.ln()], 1e-6);
    }

    /// Two heads of size 4 do not see each other, and the score is divided by √4.
    #[test]
    fn fwd_of_two_heads_by_hand() {
        let mut kit = Kit::new("attention");
        let (out, lse) = (kit.slot([1, 2, 8]), kit.slot([1, 2, 2]));
        let mut data = vec![0.0; 48];
        data[24] = 2.0 * LN3; // q of position 1, head 0
        data[8] = 1.0; // k of position 0, head 0
        data[16..24].copy_from_slice(&[8.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]); // v of position 0
        data[40..48].copy_from_slice(&[16.0, 0.0, 0.0, 4.0, 3.0, 0.0, 0.0, 0.0]); // v of position 1
        let qkv = kit.f32s([1, 2, 24], &data);
        let case = kit.finish(AttentionFwd { out, lse, qkv, heads: 2 });
        let row0 = [8.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
        let row1 = [10.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0];
        case.expect_within(out, &[row0, row1].concat(), 1e-6);
        case.expect_within(lse, &[0.0, 4_f64.ln(), 0.0, 2_f64.ln()], 1e-6);
    }

    /// d_out = (1, 2). Row 0 has p = 1 and no score gradient. Row 1: D = 2·10, d_score = (3/4·(16-20), 1/4·(32-20)) =
    /// (-3, 3); d_q1 = -3·k0 + 3·k1 = -3; d_k = (-3, 3)·ln 3; d_v = (1 + 3/4·2, 1/4·2).
    #[test]
    fn bwd_by_hand() {
        let mut kit = Kit::new("attention");
        let op = AttentionBwd {
            d_qkv: kit.slot([1, 2, 3]),
            d_out: kit.f32s([1, 2, 1], &[1.0, 2.0]),
            qkv: kit.f32s([1, 2, 3], &QKV),
            out: kit.f32s([1, 2, 1], &[8.0, 10.0]),
            lse: kit.f32s([2], &[5.0, 4_f32.ln()]),
            heads: 1,
        };
        let k = 3.0 * 3_f64.ln();
        kit.finish(op).expect_within(op.d_qkv, &[0.0, -k, 2.5, -3.0, k, 0.5], 1e-5);
    }

    /// The second row of [`fwd_by_hand`], with the first in the cache and nothing yet in the third place.
    #[test]
    fn cached_by_hand() {
        let mut kit = Kit::new("attention");
        kit.scalars.position = 1;
        let out = kit.slot([1, 1, 1]);
        let keys = kit.f32s([1, 3, 1], &[1.0, f32::NAN, 77.0]);
        let values = kit.f32s([1, 3, 1], &[8.0, f32::NAN, 88.0]);
        let qkv = kit.f32s([1, 1, 3], &QKV[3..]);
        let op = AttentionCached { out, keys, values, qkv, heads: 1 };
        let case = kit.finish(op);
        case.expect_within(out, &[10.0], 1e-6);
        case.expect_f64(keys, &[1.0, 0.0, 77.0]);
        case.expect_f64(values, &[8.0, 16.0, 88.0]);
    }
}
