//! Memory that belongs to one worker each.

use super::Team;
use std::cell::UnsafeCell;

/// One `T` for each worker of a team, each on its own cache lines.
pub struct PerWorker<T> {
    items: Vec<Padded<T>>,
}

#[repr(align(128))]
struct Padded<T>(UnsafeCell<T>);

// SAFETY: the items are reached through `&mut self`, or by `get`, whose contract is one thread for each worker number.
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T> PerWorker<T> {
    /// `make(worker)` for each worker of `team`.
    pub fn new(team: &Team, make: impl FnMut(usize) -> T) -> Self {
        Self { items: (0..team.threads()).map(make).map(|item| Padded(UnsafeCell::new(item))).collect() }
    }

    /// The item of `worker`.
    ///
    /// # Safety
    /// `worker` is below the team's thread count, it is the number the team gave to the running task, the task holds no
    /// other reference to this item, and no other run that uses these items is under way (see [`Team::run`]).
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, worker: usize) -> &mut T {
        // SAFETY: the team runs no two tasks at the same time with one worker number; the caller holds no second
        // reference. The index is checked.
        unsafe { &mut *self.items[worker].0.get() }
    }

    /// All items, for preparing and for combining in a fixed order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut().map(|item| item.0.get_mut())
    }
}
