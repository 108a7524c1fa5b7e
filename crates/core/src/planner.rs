//! The liveness planner: buffers that are never needed at the same time share memory.

use crate::slot::align_up;

/// One buffer to place: its size and the inclusive range of op indices during which its contents are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Size in bytes.
    pub bytes: usize,
    /// The op that first writes it.
    pub first: usize,
    /// The op that last uses it.
    pub last: usize,
}

impl Lifetime {
    fn meets(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// The placement of all buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Byte offset of each buffer, in the order given.
    pub offsets: Vec<usize>,
    /// Bytes the pool needs: one past the highest byte in use.
    pub peak: usize,
    /// The most bytes alive at any one op: a lower bound of every placement.
    pub lower_bound: usize,
}

/// Places buffers, largest first, each in the lowest gap that is free during its whole lifetime.
pub fn place(buffers: &[Lifetime]) -> Placement {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(buffers[i].bytes), buffers[i].first, i));

    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(buffers.len()); // by offset
    for i in order {
        let mut offset = 0;
        for &j in placed.iter().filter(|&&j| buffers[j].meets(&buffers[i])) {
            if offset + buffers[i].bytes <= offsets[j] {
                break;
            }
            offset = offset.max(align_up(offsets[j] + buffers[j].bytes));
        }
        offsets[i] = offset;
        let at = placed.partition_point(|&j| offsets[j] <= offset);
        placed.insert(at, i);
    }
    let peak = (0..buffers.len()).map(|i| offsets[i] + buffers[i].bytes).max().unwrap_or(0);
    Placement { offsets, peak, lower_bound: lower_bound(buffers) }
}

fn lower_bound(buffers: &[Lifetime]) -> usize {
    let mut events: Vec<(usize, bool, usize)> = Vec::with_capacity(2 * buffers.len());
    for buffer in buffers {
        events.push((buffer.first, true, buffer.bytes));
        events.push((buffer.last + 1, false, buffer.bytes)); // ends sort before starts at the same op
    }
    events.sort_unstable();
    let (mut alive, mut most) = (0_usize, 0);
    for (_, starts, bytes) in events {
        alive = if starts { alive + bytes } else { alive - bytes };
        most = most.max(alive);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lifetimes() -> impl Strategy<Value = Vec<Lifetime>> {
        let one = (0_usize..5000, 0_usize..60, 0_usize..30).prop_map(|(bytes, first, length)| Lifetime {
            bytes,
            first,
            last: first + length,
        });
        proptest::collection::vec(one, 0..80)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn no_two_live_buffers_overlap_and_the_peak_is_real(buffers in lifetimes()) {
            let plan = place(&buffers);
            let mut end = 0;
            for (i, a) in buffers.iter().enumerate() {
                prop_assert_eq!(plan.offsets[i] % crate::slot::ALIGN, 0);
                end = end.max(plan.offsets[i] + a.bytes);
                for (j, b) in buffers.iter().enumerate().skip(i + 1) {
                    let apart = plan.offsets[i] + a.bytes <= plan.offsets[j]
                        || plan.offsets[j] + b.bytes <= plan.offsets[i];
                    prop_assert!(apart || !a.meets(b) || a.bytes == 0 || b.bytes == 0, "{} and {} overlap", i, j);
                }
            }
            prop_assert_eq!(plan.peak, end);
            prop_assert!(plan.peak >= plan.lower_bound);
            prop_assert!(plan.peak <= buffers.iter().map(|b| align_up(b.bytes)).sum::<usize>());
        }
    }

    #[test]
    fn buffers_apart_in_time_share_memory() {
        let buffers = [
            Lifetime { bytes: 640, first: 0, last: 1 },
            Lifetime { bytes: 640, first: 2, last: 3 },
            Lifetime { bytes: 64, first: 1, last: 2 },
        ];
        let plan = place(&buffers);
        assert_eq!(plan.peak, 704);
        assert_eq!(plan.lower_bound, 704);
    }
}
