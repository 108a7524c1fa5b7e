//! The backward in parts: one that sums d_q in a fixed order keeps the gradients of all scores of a part.

use super::attention_bwd::DqSum;
use super::attention_fwd::{Shape, Steps};
use super::graph::{ALIGNMENT, Role};
use super::plan::Plan;
use super::{Direction, Session};
use crate::{Error, Result};
use std::rc::Rc;

/// Scratch memory that a part may use; a part of one head of keys may need more.
const MOST_SCRATCH: usize = 512 << 20;
/// Bytes of an element.
const ELEMENT: u64 = 2;
/// Bytes of a row's statistic.
const STATISTIC: u64 = 4;

/// Addresses of the tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub out: u64,
    pub lse: u64,
    pub d_out: u64,
    pub d_q: u64,
    pub d_k: u64,
    pub d_v: u64,
}

/// Some heads of some sequences.
pub(crate) struct AttentionPart {
    /// The first sequence.
    sequence: u64,
    /// The first head of keys.
    kv_head: u64,
    shape: Shape,
    pub plan: Rc<Plan>,
}

/// A backward.
pub(crate) struct AttentionParts {
    whole: Shape,
    dq_sum: DqSum,
    pub all: Vec<AttentionPart>,
    /// Bytes of scratch memory, which all parts use in turn.
    pub scratch: usize,
}

impl AttentionParts {
    /// Splits an attention so that no part needs more scratch memory than allowed: by sequences, and where one is too much
    /// by heads.
    pub(super) fn new(session: &mut Session, dq_sum: DqSum, whole: &Shape) -> Result<Self> {
        // What is known before the first plan: the fixed order keeps dS of all heads.
        let guess = |shape: &Shape| {
            let d_s = shape.heads * shape.q_len * shape.kv_len * ELEMENT as i64;
            let d_s = if dq_sum == DqSum::Fixed { d_s as usize } else { 0 };
            PartScratch::new(shape, dq_sum, d_s).total
        };
        let sequence = Shape { batch: 1, ..*whole };
        let group = heads_of(&sequence, 1);
        let mut split = if guess(&sequence) <= MOST_SCRATCH {
            Split::Sequences((MOST_SCRATCH / guess(&sequence)).clamp(1, whole.batch as usize))
        } else {
            Split::Heads((MOST_SCRATCH / guess(&group)).clamp(1, whole.kv_heads as usize))
        };
        loop {
            let mut all = Vec::new();
            let mut scratch = 0;
            for (sequence, kv_head, shape) in split.shapes(whole) {
                let plan = session.plan(Direction::Backward(dq_sum), &shape)?;
                scratch = scratch.max(PartScratch::new(&shape, dq_sum, plan.workspace).total);
                all.push(AttentionPart { sequence, kv_head, shape, plan });
            }
            match split.smaller(scratch, whole) {
                Some(smaller) if scratch > MOST_SCRATCH => split = smaller,
                _ if all.len() > 1 && !(whole.q_len as u64 * STATISTIC).is_multiple_of(ALIGNMENT) => {
                    let len = whole.q_len;
                    return Err(Error::Unsupported(format!(
                        "cuDNN attention: in parts, statistics of {len} queries do not begin at multiples of 16 bytes"
                    )));
                }
                _ => return Ok(Self { whole: *whole, dq_sum, all, scratch }),
            }
        }
    }

    /// The addresses of a part's tensors, and of its workspace.
    pub fn addresses(&self, part: &AttentionPart, at: &Backward, scratch: u64) -> ([(Role, u64); 11], u64) {
        let Shape { heads, kv_heads, q_len, q, k, v, out, .. } = self.whole;
        let head = part.kv_head * (heads / kv_heads) as u64;
        let skip = |base: u64, [batch, step, _]: Steps, head: u64| {
            base + (part.sequence * batch as u64 + head * step as u64) * ELEMENT
        };
        let room = PartScratch::new(&part.shape, self.dq_sum, part.plan.workspace);
        let rows = (part.sequence * heads as u64 + head) * q_len as u64;
        let roles = [
            (Role::Q, skip(at.q, q, head)),
            (Role::K, skip(at.k, k, part.kv_head)),
            (Role::V, skip(at.v, v, part.kv_head)),
            (Role::DQ, skip(at.d_q, q, head)),
            (Role::DK, skip(at.d_k, k, part.kv_head)),
            (Role::DV, skip(at.d_v, v, part.kv_head)),
            (Role::Out, skip(at.out, out, head)),
            (Role::DOut, skip(at.d_out, out, head)),
            (Role::Stats, at.lse + rows * STATISTIC),
            (Role::RowSum, scratch),
            (Role::DqSums, scratch + room.dq_sums as u64),
        ];
        (roles, scratch + room.workspace as u64)
    }
}

/// The shape with `kv_heads` heads of keys only, and the queries they serve.
fn heads_of(shape: &Shape, kv_heads: i64) -> Shape {
    Shape { heads: shape.heads / shape.kv_heads * kv_heads, kv_heads, ..*shape }
}

/// How an attention is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// Parts of at most this many sequences.
    Sequences(usize),
    /// Parts of one sequence and at most this many heads of keys.
    Heads(usize),
}

impl Split {
    /// First sequence, first head of keys and shape of each part.
    fn shapes(self, whole: &Shape) -> Vec<(u64, u64, Shape)> {
        match self {
            Self::Sequences(most) => split(whole.batch as usize, most)
                .map(|(start, count)| (start as u64, 0, Shape { batch: count as i64, ..*whole }))
                .collect(),
            Self::Heads(most) => (0..whole.batch as u64)
                .flat_map(|sequence| {
                    split(whole.kv_heads as usize, most).map(move |(start, count)| {
                        let one = Shape { batch: 1, ..*whole };
                        (sequence, start as u64, heads_of(&one, count as i64))
                    })
                })
                .collect(),
        }
    }

    /// The next smaller parts, after these needed `scratch` bytes; `None` if there are none.
    fn smaller(self, scratch: usize, whole: &Shape) -> Option<Self> {
        let fewer = |most: usize| (most * MOST_SCRATCH / scratch.max(1)).clamp(1, most - 1);
        match self {
            Self::Sequences(1) if whole.kv_heads > 1 => Some(Self::Heads(whole.kv_heads as usize - 1)),
            Self::Sequences(1) | Self::Heads(1) => None,
            Self::Sequences(most) => Some(Self::Sequences(fewer(most))),
            Self::Heads(most) => Some(Self::Heads(fewer(most))),
        }
    }
}

/// `count` things in parts of at most `most`, as equal as can be: (start, length) of each.
fn split(count: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let parts = count.div_ceil(most);
    (0..parts).map(move |i| {
        let start = i * count / parts;
        (start, (i + 1) * count / parts - start)
    })
}

/// The offsets of a part's scratch tensors in scratch memory, and its size.
struct PartScratch {
    dq_sums: usize,
    workspace: usize,
    total: usize,
}

impl PartScratch {
    fn new(shape: &Shape, dq_sum: DqSum, workspace: usize) -> Self {
        let rows = (shape.batch * shape.heads * shape.q_len) as usize;
        let sums = if dq_sum == DqSum::AnyOrder { rows * shape.head_dim as usize * 4 } else { 0 };
        let dq_sums = (rows * 4).next_multiple_of(256);
        let at = dq_sums + sums.next_multiple_of(256);
        Self { dq_sums, workspace: at, total: at + workspace }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn parts_cover_the_batch_once() {
        for count in [1, 2, 7, 64, 65] {
            for most in [1, 2, 21, 64, 100] {
                let parts: Vec<_> = split(count, most).collect();
                let mut next = 0;
                for &(start, len) in &parts {
                    assert_eq!(start, next);
                    assert!(len >= 1 && len <= most);
                    next += len;
                }
                assert_eq!(next, count);
                let lens: HashSet<_> = parts.iter().map(|part| part.1).collect();
                assert!(lens.len() <= 2, "at most two plans");
            }
        }
    }

    #[test]
    fn parts_of_heads_keep_groups_together() {
        let whole = Shape::packed(2, [12, 4], 1024, 64);
        let parts = Split::Heads(3).shapes(&whole);
        let heads: Vec<_> = parts.iter().map(|(b, h, shape)| (*b, *h, shape.heads, shape.kv_heads)).collect();
        assert_eq!(heads, [(0, 0, 6, 2), (0, 2, 6, 2), (1, 0, 6, 2), (1, 2, 6, 2)]);
        assert!(parts.iter().all(|(_, _, shape)| shape.batch == 1 && shape.q == whole.q));
        let parts = Split::Sequences(1).shapes(&whole);
        assert_eq!(parts.iter().map(|part| (part.0, part.2.heads)).collect::<Vec<_>>(), [(0, 12), (1, 12)]);
    }

    #[test]
    fn parts_shrink_until_they_are_one_head() {
        let whole = Shape::packed(8, [12, 4], 1024, 64);
        let too_much = MOST_SCRATCH * 2;
        assert_eq!(Split::Sequences(8).smaller(too_much, &whole), Some(Split::Sequences(4)));
        assert_eq!(Split::Sequences(1).smaller(too_much, &whole), Some(Split::Heads(3)));
        assert_eq!(Split::Heads(3).smaller(MOST_SCRATCH + 1, &whole), Some(Split::Heads(2)));
        assert_eq!(Split::Heads(1).smaller(too_much, &whole), None);
        let single = Shape::packed(8, [12, 1], 1024, 64);
        assert_eq!(Split::Sequences(1).smaller(too_much, &single), None);
    }
}
