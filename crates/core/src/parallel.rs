//! Runs independent pieces of work on all cores.

use std::sync::{Mutex, PoisonError};

/// How many numbers to give a thread at a time: enough to outweigh the cost of scheduling, and few enough that a matrix
/// has a piece for every core.
pub const PIECE: usize = 1 << 16;

/// Calls `work` once for every item, on all cores, in no particular order.
pub fn for_each<T: Send>(items: impl ExactSizeIterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let helpers = match items.len() {
        0 | 1 => 0, // available_parallelism reads files: too slow for a loss that is read in every step
        len => std::thread::available_parallelism().map_or(1, usize::from).min(len) - 1,
    };
    let items = Mutex::new(items);
    let take = || {
        loop {
            let next = items.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(item) = next else { break };
            work(item);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // if a thread cannot be started, the others do its share
            let _ = std::thread::Builder::new().spawn_scoped(scope, take);
        }
        take();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_met_once() {
        for count in [0, 1, 2, 1000] {
            let mut seen = vec![0; count];
            for_each(seen.iter_mut().enumerate(), |(i, seen)| *seen += i + 1);
            assert!(seen.iter().enumerate().all(|(i, &seen)| seen == i + 1), "{count}");
        }
    }
}
