//! The order in which the gradients of micro-steps are added: a binary tree over their numbers.

use super::{Place, Shard};
use std::ops::Range;

/// The sums of `0..count` micro-steps. A node of more than one is the sum of two: it is divided after the largest power of two
/// of micro-steps that is smaller than it. The same tree is computed by any number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumTree {
    count: usize,
}

/// What is added after a micro-step of a rank, whose own gradients are in the gradient pool. Level d is the d-th buffer beside
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// level d = gradients
    Keep(usize),
    /// level d += gradients
    Add(usize),
    /// level d += level d + 1
    Merge(usize),
    /// gradients += level d
    Take(usize),
}

/// A node that a rank computes and sends: one row of what every owner of a slice receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The rank.
    pub rank: usize,
    /// The buffer that the rank has it in: a level, or `None` for the gradient pool itself.
    pub level: Option<usize>,
    /// The micro-steps that are summed in it.
    pub of: Range<usize>,
}

impl Move {
    /// The origin of the ops that do it.
    pub fn origin(self) -> String {
        match self {
            Self::Keep(level) => format!("sum.keep.{level}"),
            Self::Add(level) => format!("sum.add.{level}"),
            Self::Merge(level) => format!("sum.merge.{level}"),
            Self::Take(level) => format!("sum.take.{level}"),
        }
    }
}

impl SumTree {
    /// The tree over this many micro-steps, at least one.
    pub fn new(count: usize) -> Self {
        Self { count: count.max(1) }
    }

    /// The first micro-step of a node's second half.
    fn split(node: &Range<usize>) -> usize {
        node.start + (node.len().div_ceil(2)).next_power_of_two()
    }

    /// Whether the sum of these micro-steps is a node.
    fn is_node(&self, of: &Range<usize>) -> bool {
        let mut node = 0..self.count;
        loop {
            if node == *of {
                return true;
            }
            if node.len() < 2 || of.is_empty() {
                return false;
            }
            let middle = Self::split(&node);
            if of.end <= middle {
                node.end = middle;
            } else if of.start >= middle {
                node.start = middle;
            } else {
                return false;
            }
        }
    }

    /// What a rank that computes these micro-steps in order adds after each, and the nodes it then has, in order: those on
    /// levels, and last the one in the gradient pool.
    fn walk(&self, share: Range<usize>) -> (Vec<Vec<Move>>, Vec<Range<usize>>) {
        let mut levels: Vec<Range<usize>> = Vec::new();
        let mut moves = Vec::new();
        let last = share.end.saturating_sub(1);
        let mut own = 0..0;
        for number in share {
            let mut now = Vec::new();
            own = number..number + 1;
            if number == last {
                while let Some(level) = levels.last().filter(|level| self.is_node(&(level.start..own.end))) {
                    own.start = level.start;
                    levels.pop();
                    now.push(Move::Take(levels.len()));
                }
                moves.push(now);
                break;
            }
            match levels.last_mut() {
                Some(level) if self.is_node(&(level.start..own.end)) => {
                    level.end = own.end;
                    now.push(Move::Add(levels.len() - 1));
                }
                _ => {
                    levels.push(own.clone());
                    now.push(Move::Keep(levels.len() - 1));
                }
            }
            while let [.., before, level] = &mut levels[..]
                && self.is_node(&(before.start..level.end))
            {
                before.end = level.end;
                levels.pop();
                now.push(Move::Merge(levels.len() - 1));
            }
            moves.push(now);
        }
        levels.push(own);
        (moves, levels)
    }

    /// The micro-steps of a rank in order: neighbours or, where gradients are sharded, every `world`-th.
    pub fn share(&self, place: Place, shard: Shard) -> Vec<usize> {
        let world = place.world.max(1);
        let each = self.count / world;
        match shard {
            Shard::Grads => (0..each).map(|i| i * world + place.rank).collect(),
            _ => (place.rank * each..(place.rank + 1) * each).collect(),
        }
    }

    /// What a rank adds after each of its micro-steps.
    pub fn moves(&self, place: Place, shard: Shard) -> Vec<Vec<Move>> {
        let world = place.world.max(1);
        let each = self.count / world;
        match shard {
            // what all ranks computed at the same time was added before: a node of the tree, if the world is a power of two
            Shard::Grads => Self::new(each).walk(0..each).0,
            _ => self.walk(place.rank * each..(place.rank + 1) * each).0,
        }
    }

    /// The levels that a rank needs.
    pub fn levels(&self, place: Place, shard: Shard) -> usize {
        let all = self.moves(place, shard);
        all.iter()
            .flatten()
            .map(|step| match *step {
                Move::Keep(level) | Move::Add(level) | Move::Take(level) => level + 1,
                Move::Merge(level) => level + 2,
            })
            .max()
            .unwrap_or(0)
    }

    /// The nodes that all ranks of a world send, in the order of their micro-steps.
    pub fn rows(&self, world: usize) -> Vec<Row> {
        let world = world.max(1);
        let each = self.count / world;
        (0..world)
            .flat_map(|rank| {
                let nodes = self.walk(rank * each..(rank + 1) * each).1;
                let last = nodes.len() - 1;
                nodes.into_iter().enumerate().map(move |(i, of)| Row {
                    rank,
                    level: (i < last).then_some(i),
                    of,
                })
            })
            .collect()
    }

    /// How the whole is made of [`SumTree::rows`] with a stack: after each row is put on it, how often the two sums on top
    /// become one.
    pub fn merges(&self, world: usize) -> Vec<usize> {
        let mut open: Vec<Range<usize>> = Vec::new();
        let merged = |row: Row| {
            open.push(row.of);
            let before = open.len();
            while let [.., below, top] = &mut open[..]
                && self.is_node(&(below.start..top.end))
            {
                below.end = top.end;
                open.pop();
            }
            before - open.len()
        };
        self.rows(world).into_iter().map(merged).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sum as text shows its order.
    fn plus(a: &str, b: &str) -> String {
        format!("({a}{b})")
    }

    fn whole(node: Range<usize>) -> String {
        if node.len() == 1 {
            return format!("{},", node.start);
        }
        let middle = SumTree::split(&node);
        plus(&whole(node.start..middle), &whole(middle..node.end))
    }

    /// What one rank has after its micro-steps: its levels and its gradients.
    fn computed(tree: SumTree, place: Place, shard: Shard, leaf: impl Fn(usize) -> String) -> Vec<String> {
        let mut levels = vec![String::new(); tree.levels(place, shard)];
        let mut grads = String::new();
        for (i, moves) in tree.moves(place, shard).into_iter().enumerate() {
            grads = leaf(i);
            for step in moves {
                match step {
                    Move::Keep(d) => levels[d] = grads.clone(),
                    Move::Add(d) => levels[d] = plus(&levels[d], &grads),
                    Move::Merge(d) => levels[d] = plus(&levels[d], &levels[d + 1]),
                    Move::Take(d) => grads = plus(&levels[d], &grads),
                }
            }
        }
        levels.push(grads);
        levels
    }

    #[test]
    fn every_world_adds_in_the_same_order() {
        for count in 1..=48 {
            let tree = SumTree::new(count);
            let expected = whole(0..count);
            for world in (1..=count).filter(|world| count % world == 0) {
                let mut rows: Vec<String> = Vec::new();
                for row in tree.rows(world) {
                    let place = Place { rank: row.rank, world };
                    let share = tree.share(place, Shard::State);
                    let mut has = computed(tree, place, Shard::State, |i| format!("{},", share[i]));
                    let at = row.level.unwrap_or(has.len() - 1);
                    rows.push(std::mem::take(&mut has[at]));
                }
                let mut stack: Vec<String> = Vec::new();
                for (row, merges) in rows.into_iter().zip(tree.merges(world)) {
                    stack.push(row);
                    for _ in 0..merges {
                        let top = stack.pop().unwrap();
                        let below = stack.pop().unwrap();
                        stack.push(plus(&below, &top));
                    }
                }
                assert!(
                    stack.len() == 1 && stack[0] == expected,
                    "{count} micro-steps, world {world}: {stack:?}"
                );
                if !world.is_power_of_two() {
                    continue;
                }
                let inner = whole(0..world);
                let round = |i: usize| {
                    let number = |digits: &str| digits.parse::<usize>().unwrap() + i * world;
                    let mut text = String::new();
                    let mut digits = String::new();
                    for c in inner.chars() {
                        match c {
                            '0'..='9' => digits.push(c),
                            ',' => text += &format!("{},", number(&std::mem::take(&mut digits))),
                            other => text.push(other),
                        }
                    }
                    text
                };
                let place = Place { rank: 0, world };
                assert_eq!(computed(tree, place, Shard::Grads, round).last(), Some(&expected));
            }
        }
    }

    #[test]
    fn every_micro_step_is_made_by_one_rank() {
        for (count, world) in [(1, 1), (12, 4), (8, 8), (30, 5)] {
            for shard in [Shard::None, Shard::State, Shard::Grads] {
                let tree = SumTree::new(count);
                let mut all: Vec<usize> =
                    (0..world).flat_map(|rank| tree.share(Place { rank, world }, shard)).collect();
                all.sort_unstable();
                assert_eq!(all, (0..count).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn levels_grow_with_the_logarithm() {
        let levels = |count, world| SumTree::new(count).levels(Place { rank: 0, world }, Shard::State);
        assert_eq!([1, 2, 4, 8, 64].map(|count| levels(count, 1)), [0, 1, 2, 3, 6]);
        assert_eq!([1, 2, 4].map(|world| levels(8, world)), [3, 2, 1]);
        assert_eq!(SumTree::new(8).rows(4).len(), 4);
        assert_eq!(SumTree::new(6).rows(2).len(), 4, "three micro-steps are two nodes");
    }
}
