//! Which pairs of tokens merge, and in what order.

use std::collections::HashMap;

/// The rank of a pair that does not merge.
pub const NEVER: u32 = u32::MAX;

/// Pairs of tokens with their ranks (the lowest merges first): a hash table with open addressing.
#[derive(Clone, Debug)]
pub struct Merges {
    keys: Vec<u64>,
    ranks: Vec<u32>,
    shift: u32,
    /// The token that a merge of this rank gives.
    result: Vec<u32>,
}

const EMPTY: u64 = u64::MAX;

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Merges {
    /// Merges in order of rank: left, right and result. Of equal pairs the last counts, as in `tokenizers`.
    pub fn in_order(list: &[(u32, u32, u32)]) -> Self {
        let mut merges = Self::with_capacity(list.len());
        for (rank, &(left, right, result)) in (0..).zip(list) {
            merges.insert(left, right, rank);
            merges.result.push(result);
        }
        merges
    }

    /// Merges of a vocabulary whose ids are ranks, as in tiktoken: two tokens merge when their bytes together are a
    /// token, whose id is the rank.
    pub fn of_ranks(tokens: &[Vec<u8>], ids: &HashMap<&[u8], u32>) -> Self {
        let mut list = Vec::new();
        for (rank, token) in (0..).zip(tokens) {
            // of equal tokens and of those left out, the table has only one or none
            if token.len() < 2 || ids.get(token.as_slice()) != Some(&rank) {
                continue;
            }
            for cut in 1..token.len() {
                let (left, right) = token.split_at(cut);
                if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                    list.push((left, right, rank));
                }
            }
        }
        let mut merges = Self::with_capacity(list.len());
        list.iter().for_each(|&(left, right, rank)| merges.insert(left, right, rank));
        merges.result = (0..tokens.len() as u32).collect();
        merges
    }

    fn with_capacity(count: usize) -> Self {
        let size = (count * 2).next_power_of_two().max(16);
        Self {
            keys: vec![EMPTY; size],
            ranks: vec![NEVER; size],
            shift: 64 - size.trailing_zeros(),
            result: Vec::new(),
        }
    }

    #[inline]
    fn slot(&self, key: u64) -> usize {
        let mut at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        while self.keys[at] != key && self.keys[at] != EMPTY {
            at = (at + 1) & (self.keys.len() - 1);
        }
        at
    }

    fn insert(&mut self, left: u32, right: u32, rank: u32) {
        let key = key(left, right);
        let slot = self.slot(key);
        self.keys[slot] = key;
        self.ranks[slot] = rank;
    }

    /// The rank of a pair, [`NEVER`] if it does not merge.
    #[inline]
    pub fn rank(&self, left: u32, right: u32) -> u32 {
        self.ranks[self.slot(key(left, right))]
    }

    /// The token that a merge of this rank gives.
    #[inline]
    pub fn result(&self, rank: u32) -> u32 {
        self.result[rank as usize]
    }
}

/// Symbols up to which the pair to merge is found by looking at all.
const SHORT: usize = 48;

/// Merges the symbols of one word, the pair of the lowest rank first and of equal ones the leftmost, and appends the
/// tokens to `out`.
pub fn merge(merges: &Merges, symbols: impl ExactSizeIterator<Item = u32>, out: &mut Vec<u32>) {
    if symbols.len() <= SHORT { merge_short(merges, symbols, out) } else { merge_long(merges, symbols, out) }
}

fn merge_short(merges: &Merges, symbols: impl ExactSizeIterator<Item = u32>, out: &mut Vec<u32>) {
    let (mut ids, mut ranks) = ([0u32; SHORT], [NEVER; SHORT]);
    let mut count = symbols.len();
    symbols.zip(&mut ids).for_each(|(symbol, id)| *id = symbol);
    for at in 1..count {
        ranks[at - 1] = merges.rank(ids[at - 1], ids[at]);
    }
    while count > 1 {
        let (mut at, mut lowest) = (0, NEVER);
        for (index, &rank) in ranks[..count - 1].iter().enumerate() {
            if rank < lowest {
                (at, lowest) = (index, rank);
            }
        }
        if lowest == NEVER {
            break;
        }
        ids[at] = merges.result(lowest);
        ids.copy_within(at + 2..count, at + 1);
        ranks.copy_within(at + 1..count, at);
        count -= 1;
        ranks[count - 1] = NEVER;
        if at + 1 < count {
            ranks[at] = merges.rank(ids[at], ids[at + 1]);
        }
        if at > 0 {
            ranks[at - 1] = merges.rank(ids[at - 1], ids[at]);
        }
    }
    out.extend_from_slice(&ids[..count]);
}

/// Merges with a heap, in O(n log n): one word may be the whole text.
fn merge_long(merges: &Merges, symbols: impl ExactSizeIterator<Item = u32>, out: &mut Vec<u32>) {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;
    const GONE: u32 = u32::MAX;

    let mut ids: Vec<u32> = symbols.collect();
    let count = ids.len();
    let mut next: Vec<usize> = (1..=count).collect();
    let mut previous: Vec<usize> = (0..count).map(|at| at.wrapping_sub(1)).collect();
    let pair = |ids: &[u32], next: &[usize], at: usize| match next[at] {
        right if right < count => merges.rank(ids[at], ids[right]),
        _ => NEVER,
    };
    let mut heap: BinaryHeap<Reverse<(u32, usize)>> = (0..count)
        .map(|at| Reverse((pair(&ids, &next, at), at)))
        .filter(|Reverse((rank, _))| *rank != NEVER)
        .collect();
    while let Some(Reverse((rank, at))) = heap.pop() {
        // the symbols may have changed since this was pushed; what they make now was pushed, too
        if ids[at] == GONE || pair(&ids, &next, at) != rank {
            continue;
        }
        let right = next[at];
        ids[at] = merges.result(rank);
        ids[right] = GONE;
        next[at] = next[right];
        if next[at] < count {
            previous[next[at]] = at;
        }
        for at in [previous[at], at] {
            if at < count {
                let rank = pair(&ids, &next, at);
                if rank != NEVER {
                    heap.push(Reverse((rank, at)));
                }
            }
        }
    }
    out.extend(ids.into_iter().filter(|&id| id != GONE));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn merged(run: impl Fn(&mut Vec<u32>)) -> Vec<u32> {
        let mut out = Vec::new();
        run(&mut out);
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]
        #[test]
        fn the_heap_merges_as_the_loop_does(
            symbols in prop::collection::vec(0u32..4, 0..SHORT),
            pairs in prop::collection::vec((0u32..12, 0u32..12), 0..30),
        ) {
            // each merge makes a token of its own, which later merges may take
            let list: Vec<_> = (4..).zip(&pairs).map(|(id, &(l, r))| (l.min(id - 1), r.min(id - 1), id)).collect();
            let merges = Merges::in_order(&list);
            let short = merged(|out| merge_short(&merges, symbols.iter().copied(), out));
            let long = merged(|out| merge_long(&merges, symbols.iter().copied(), out));
            assert_eq!(short, long);
        }
    }

    #[test]
    fn a_long_run_of_one_letter_takes_no_quadratic_time() {
        let list: Vec<_> = (0..12).map(|n| (n, n, n + 1)).collect(); // aa, aaaa, ...
        let merges = Merges::in_order(&list);
        let started = std::time::Instant::now();
        let out = merged(|out| merge(&merges, std::iter::repeat_n(0, 1 << 20), out));
        assert_eq!(out, vec![12; (1 << 20) >> 12]);
        assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
    }

    #[test]
    fn ranks_are_ids() {
        let tokens: Vec<Vec<u8>> = ["a", "b", "c", "bc", "ab", "abc"].map(|t| t.as_bytes().to_vec()).to_vec();
        let ids: HashMap<&[u8], u32> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
        let merges = Merges::of_ranks(&tokens, &ids);
        assert_eq!(merged(|out| merge(&merges, [0, 1, 2].into_iter(), out)), [5]); // a bc, although ab c is a merge, too
        assert_eq!(merged(|out| merge(&merges, [0, 1, 0].into_iter(), out)), [4, 0]);
        assert_eq!(merges.rank(0, 0), NEVER);
    }
}
