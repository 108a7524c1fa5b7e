//! Work on all cores that needs no order.

use std::sync::{Mutex, PoisonError};

/// Numbers that one thread takes at a time: much more than it costs to take them, and few enough for every core to have
/// some of a matrix.
pub const PIECE: usize = 1 << 16;

/// Calls `work` once for every item, on all cores; in which order and where is left open.
pub fn for_each<T: Send>(items: impl ExactSizeIterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let helpers = match items.len() {
        0 | 1 => 0, // asking for the cores reads files: too much for a loss that is read in every step
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
            // where no more threads are to be had, those there are do the work
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
