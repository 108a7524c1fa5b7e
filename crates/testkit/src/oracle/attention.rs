//! Causal self-attention, computed with the full matrix of probabilities.

use super::dropout::Factors;
use super::{Pools, Step, positions};
use ironhorse_core::op::{AttentionBwd, AttentionCached, AttentionFwd, AttentionMask, check_cache_rows};
use ironhorse_core::{Error, Result, Slot};

/// Sizes and offsets in packed (B,T,W) and plain (B,T,C) tensors; W = (NH + 2·NKV)·HD.
#[derive(Clone, Copy)]
struct Dims {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    /// HD
    size: usize,
}

/// Query, key or value.
#[derive(Clone, Copy)]
enum Part {
    Q,
    K,
    V,
}
use Part::{K, Q, V};

impl Dims {
    fn new(out: &Slot, heads: usize, kv_heads: usize) -> Self {
        let dims = out.shape.dims();
        Self { batch: dims[0], seq: dims[1], heads, kv_heads, size: dims[2] / heads }
    }

    fn scale(&self) -> f64 {
        1.0 / (self.size as f64).sqrt()
    }

    /// The key/value head that a query head uses.
    fn kv_head(&self, h: usize) -> usize {
        h / (self.heads / self.kv_heads)
    }

    /// The offset in (B,T,W) of q of a head, or of the k or v that it uses.
    fn packed(&self, part: Part, [b, t, h]: [usize; 3]) -> usize {
        let before = match part {
            Q => h,
            K => self.heads + self.kv_head(h),
            V => self.heads + self.kv_heads + self.kv_head(h),
        };
        ((b * self.seq + t) * (self.heads + 2 * self.kv_heads) + before) * self.size
    }

    /// The offset in (B,T,C) of a head's vector.
    fn plain(&self, [b, t, h]: [usize; 3]) -> usize {
        ((b * self.seq + t) * self.heads + h) * self.size
    }

    /// The offset in a cache (B,T,NKV·HD) of the key or value that a head uses.
    fn cached(&self, [b, t, h]: [usize; 3]) -> usize {
        ((b * self.seq + t) * self.kv_heads + self.kv_head(h)) * self.size
    }

    /// The rows of scores: every (b, h, t).
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

/// Whether a query reaches a key, for each sequence: from the definition, document by document.
struct Reached {
    /// (B,T): the number of each token's document in its sequence.
    documents: Vec<usize>,
    seq: usize,
    window: usize,
}

impl Reached {
    fn new(pools: &Pools, mask: &AttentionMask, dims: Dims) -> Result<Self> {
        let mut documents = vec![0; dims.batch * dims.seq];
        let positions = positions(pools, mask.positions, dims.seq)?.unwrap_or_default();
        for (i, &position) in positions.iter().enumerate().filter(|(i, _)| i % dims.seq > 0) {
            documents[i] = documents[i - 1] + usize::from(position == 0.0);
        }
        Ok(Self { documents, seq: dims.seq, window: mask.window.unwrap_or(usize::MAX) })
    }

    /// The keys of query `t`.
    fn keys(&self, b: usize, t: usize) -> impl Iterator<Item = usize> {
        let document = move |t: usize| self.documents[b * self.seq + t];
        (0..=t).filter(move |&s| document(s) == document(t) && t - s < self.window)
    }
}

/// The forward. With `drop`, probabilities are multiplied with its factors after the softmax.
pub(super) fn fwd(pools: &mut Pools, op: &AttentionFwd, drop: Option<Factors>) -> Result<()> {
    let dims = Dims::new(&op.out, op.heads, op.kv_heads);
    let (qkv, reached) = (pools.read(op.qkv)?, Reached::new(pools, &op.mask, dims)?);
    let vector = |part, at: [usize; 3]| &qkv[dims.packed(part, at)..][..dims.size];
    let mut out = vec![0.0; op.out.numel()];
    let mut lse = vec![0.0; op.lse.numel()];
    for (b, h, t) in dims.rows() {
        let query = vector(Q, [b, t, h]);
        let score = |s| dot(query, vector(K, [b, s, h])) * dims.scale();
        let scores: Vec<f64> = reached.keys(b, t).map(score).collect();
        let row_lse = log_sum_exp(&scores);
        let row = (b * dims.heads + h) * dims.seq + t;
        lse[row] = row_lse;
        for (s, score) in reached.keys(b, t).zip(scores) {
            let p = (score - row_lse).exp() * drop.map_or(1.0, |drop| drop.at(row, s));
            add_scaled(&mut out[dims.plain([b, t, h])..][..dims.size], p, vector(V, [b, s, h]));
        }
    }
    pools.write(op.out, &out)?;
    pools.write(op.lse, &lse)
}

/// With `p = softmax` from `lse` and `D[t] = d_out[t]·out[t]`: `d_v[s] += p·d_out[t]`,
/// `d_score = p·(d_out[t]·v[s] - D[t])`, `d_q[t] += d_score·k[s]/√HD`, `d_k[s] += d_score·q[t]/√HD`. With `drop` and its
/// factor f of a probability: `d_v[s] += p·f·d_out[t]`, `d_score = p·(f·d_out[t]·v[s] - D[t])`.
pub(super) fn bwd(pools: &mut Pools, op: &AttentionBwd, drop: Option<Factors>) -> Result<()> {
    let dims = Dims::new(&op.out, op.heads, op.kv_heads);
    let (qkv, lse) = (pools.read(op.qkv)?, pools.read(op.lse)?);
    let (out, d_out) = (pools.read(op.out)?, pools.read(op.d_out)?);
    let reached = Reached::new(pools, &op.mask, dims)?;
    let vector = |part, at: [usize; 3]| &qkv[dims.packed(part, at)..][..dims.size];
    let mut d_qkv = vec![0.0; op.d_qkv.numel()];
    for (b, h, t) in dims.rows() {
        let here = dims.plain([b, t, h]);
        let (d_row, row) = (&d_out[here..][..dims.size], &out[here..][..dims.size]);
        let query = vector(Q, [b, t, h]);
        for s in reached.keys(b, t) {
            let (key, value) = (vector(K, [b, s, h]), vector(V, [b, s, h]));
            let at = (b * dims.heads + h) * dims.seq + t;
            let factor = drop.map_or(1.0, |drop| drop.at(at, s));
            let p = (dot(query, key) * dims.scale() - lse[at]).exp();
            let d_score = p * (factor * dot(d_row, value) - dot(d_row, row)) * dims.scale();
            add_scaled(&mut d_qkv[dims.packed(Q, [b, t, h])..][..dims.size], d_score, key);
            add_scaled(&mut d_qkv[dims.packed(K, [b, s, h])..][..dims.size], d_score, query);
            add_scaled(&mut d_qkv[dims.packed(V, [b, s, h])..][..dims.size], p * factor, d_row);
        }
    }
    pools.write(op.d_qkv, &d_qkv)
}

/// The sequence of the cache and the position of each token; `None` for tokens that are not used.
fn places(pools: &Pools, op: &AttentionCached, step: Step) -> Result<Vec<Option<[usize; 2]>>> {
    let [sequences, context] = [0, 1].map(|i| op.keys.shape.dims()[i]);
    if let (Some(rows), Some(positions)) = (op.rows, op.positions) {
        let [rows, positions] = [pools.read(rows)?, pools.read(positions)?]
            .map(|all| all.iter().map(|&x| x as i32).collect::<Vec<_>>());
        check_cache_rows(&rows, &positions, [sequences, context])?;
        let place =
            |(row, position): (i32, i32)| (position >= 0).then_some([row as usize, position as usize]);
        return Ok(rows.into_iter().zip(positions).map(place).collect());
    }
    let position = step.scalars.position as usize;
    if position >= context {
        let what = format!("position {position} is beyond the cache of {context} positions");
        return Err(Error::Input(what));
    }
    Ok((0..sequences).map(|b| Some([b, position])).collect())
}

pub(super) fn cached(pools: &mut Pools, op: &AttentionCached, step: Step) -> Result<()> {
    let now = Dims::new(&op.out, op.heads, op.kv_heads); // one position
    let past = Dims { seq: op.keys.shape.dims()[1], ..now };
    let places = places(pools, op, step)?;
    let qkv = pools.read(op.qkv)?;
    let (mut keys, mut values) = (pools.read(op.keys)?, pools.read(op.values)?);
    let mut out = vec![0.0; op.out.numel()];
    let used = |b: usize, h: usize| places[b].map(|[row, position]| (b, h, row, position));
    let all = || now.rows().filter_map(|(b, h, _)| used(b, h));
    let vector = |part, b, h| &qkv[now.packed(part, [b, 0, h])..][..now.size];
    for (b, h, row, position) in all() {
        let new = past.cached([row, position, h]);
        keys[new..][..now.size].copy_from_slice(vector(K, b, h));
        values[new..][..now.size].copy_from_slice(vector(V, b, h));
    }
    for (b, h, row, position) in all() {
        let at = |s| past.cached([row, s, h])..past.cached([row, s, h]) + now.size;
        let reached = (0..=position).filter(|s| op.window.is_none_or(|window| position - s < window));
        let score = |s| dot(vector(Q, b, h), &keys[at(s)]) * now.scale();
        let scores: Vec<f64> = reached.clone().map(score).collect();
        let lse = log_sum_exp(&scores);
        for (s, score) in reached.zip(scores) {
            let p = (score - lse).exp();
            add_scaled(&mut out[now.plain([b, 0, h])..][..now.size], p, &values[at(s)]);
        }
    }
    pools.write(op.keys, &keys)?;
    pools.write(op.values, &values)?;
    pools.write(op.out, &out)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{AttentionBwd, AttentionCached, AttentionFwd, AttentionMask};

    const LN3: f32 = 1.098_612_3;
    /// Two positions, one head of size 1; q, k, v each. Scores of row 1: (ln 3, 0), so p = (3/4, 1/4).
    const QKV: [f32; 6] = [5.0, 1.0, 8.0, LN3, 0.0, 16.0];

    #[test]
    fn fwd_by_hand() {
        let mut kit = Kit::new("attention");
        let (out, lse, qkv) = (kit.slot([1, 2, 1]), kit.slot([1, 1, 2]), kit.f32s([1, 2, 3], &QKV));
        let case =
            kit.finish(AttentionFwd { out, lse, qkv, heads: 1, kv_heads: 1, mask: AttentionMask::CAUSAL });
        case.expect_within(out, &[8.0, 10.0], 1e-6);
        case.expect_within(lse, &[5.0, 4_f64.ln()], 1e-6);
    }

    /// [`QKV`] as two documents, then with a window of one: each position has its own value. Of three positions with a window
    /// of two, the last is as row 1 of [`fwd_by_hand`].
    #[test]
    fn masked_fwd_by_hand() {
        for (positions, window) in [(Some([0, 0]), None), (None, Some(1))] {
            let mut kit = Kit::new("attention");
            let (out, lse, qkv) = (kit.slot([1, 2, 1]), kit.slot([1, 1, 2]), kit.f32s([1, 2, 3], &QKV));
            let positions = positions.map(|positions| kit.i32s([1, 2], &positions));
            let mask = AttentionMask { positions, window };
            let case = kit.finish(AttentionFwd { out, lse, qkv, heads: 1, kv_heads: 1, mask });
            case.expect_within(out, &[8.0, 16.0], 1e-6);
            case.expect_within(lse, &[5.0, 0.0], 1e-6);
        }
        let mut kit = Kit::new("attention");
        let qkv = kit.f32s([1, 3, 3], &[&[1.0, 2.0, 3.0], &QKV[..]].concat());
        let (out, lse) = (kit.slot([1, 3, 1]), kit.slot([1, 1, 3]));
        let mask = AttentionMask { positions: None, window: Some(2) };
        let case = kit.finish(AttentionFwd { out, lse, qkv, heads: 1, kv_heads: 1, mask });
        let p = 1.0 / (1.0 + 5_f64.exp()); // of scores 10 and 5
        case.expect_within(out, &[3.0, 3.0 * (1.0 - p) + 8.0 * p, 10.0], 1e-6);
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
        let case =
            kit.finish(AttentionFwd { out, lse, qkv, heads: 2, kv_heads: 2, mask: AttentionMask::CAUSAL });
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
            kv_heads: 1,
            mask: AttentionMask::CAUSAL,
        };
        let k = 3.0 * 3_f64.ln();
        kit.finish(op).expect_within(op.d_qkv, &[0.0, -k, 2.5, -3.0, k, 0.5], 1e-5);
    }

    /// The second row of [`fwd_by_hand`], with the first in the cache; the third position is still empty.
    #[test]
    fn cached_by_hand() {
        let mut kit = Kit::new("attention");
        kit.scalars.position = 1;
        let out = kit.slot([1, 1, 1]);
        let keys = kit.f32s([1, 3, 1], &[1.0, f32::NAN, 77.0]);
        let values = kit.f32s([1, 3, 1], &[8.0, f32::NAN, 88.0]);
        let qkv = kit.f32s([1, 1, 3], &QKV[3..]);
        let op = AttentionCached {
            out,
            keys,
            values,
            qkv,
            rows: None,
            positions: None,
            heads: 1,
            kv_heads: 1,
            window: None,
        };
        let case = kit.finish(op);
        case.expect_within(out, &[10.0], 1e-6);
        case.expect_f64(keys, &[1.0, 0.0, 77.0]);
        case.expect_f64(values, &[8.0, 16.0, 88.0]);
    }

    /// The two positions of [`QKV`] with a second head of queries, all 0: it sees the same keys with equal weights.
    const GROUPED: [f32; 8] = [5.0, 0.0, 1.0, 8.0, LN3, 0.0, 0.0, 16.0];

    #[test]
    fn grouped_fwd_by_hand() {
        let mut kit = Kit::new("attention");
        let (out, lse, qkv) = (kit.slot([1, 2, 2]), kit.slot([1, 2, 2]), kit.f32s([1, 2, 4], &GROUPED));
        let case =
            kit.finish(AttentionFwd { out, lse, qkv, heads: 2, kv_heads: 1, mask: AttentionMask::CAUSAL });
        case.expect_within(out, &[8.0, 8.0, 10.0, 12.0], 1e-6);
        case.expect_within(lse, &[5.0, 4_f64.ln(), 0.0, 2_f64.ln()], 1e-6);
    }

    /// [`bwd_by_hand`] plus a head with d_out = (3, 4): of row 1 D = 4·12, d_score = (1/2·(32-48), 1/2·(64-48)) = (-8,
    /// 8); d_q1 = -8·k0 + 8·k1 = -8; d_k is unchanged because the queries are 0; d_v increases by (3 + 1/2·4, 1/2·4).
    #[test]
    fn grouped_bwd_by_hand() {
        let mut kit = Kit::new("attention");
        let op = AttentionBwd {
            d_qkv: kit.slot([1, 2, 4]),
            d_out: kit.f32s([1, 2, 2], &[1.0, 3.0, 2.0, 4.0]),
            qkv: kit.f32s([1, 2, 4], &GROUPED),
            out: kit.f32s([1, 2, 2], &[8.0, 8.0, 10.0, 12.0]),
            lse: kit.f32s([1, 2, 2], &[5.0, 4_f32.ln(), 0.0, 2_f32.ln()]),
            heads: 2,
            kv_heads: 1,
            mask: AttentionMask::CAUSAL,
        };
        let k = 3.0 * 3_f64.ln();
        kit.finish(op).expect_within(op.d_qkv, &[0.0, 0.0, -k, 7.5, -3.0, -8.0, k, 2.5], 1e-5);
    }

    /// The second row of [`grouped_fwd_by_hand`], with the first in a cache of one head.
    #[test]
    fn grouped_cached_by_hand() {
        let mut kit = Kit::new("attention");
        kit.scalars.position = 1;
        let out = kit.slot([1, 1, 2]);
        let [keys, values] = [1.0, 8.0].map(|first| kit.f32s([1, 2, 1], &[first, f32::NAN]));
        let qkv = kit.f32s([1, 1, 4], &GROUPED[4..]);
        let op = AttentionCached {
            out,
            keys,
            values,
            qkv,
            rows: None,
            positions: None,
            heads: 2,
            kv_heads: 1,
            window: None,
        };
        let case = kit.finish(op);
        case.expect_within(out, &[10.0, 12.0], 1e-6);
        case.expect_f64(keys, &[1.0, 0.0]);
        case.expect_f64(values, &[8.0, 16.0]);
    }
}
