//! The host memory that the state is copied into while a thread writes it.

use super::{Observer, Saver};
use crate::host::{available_memory, human_bytes};
use crate::session::Session;
use ironhorse_core::{HostMemory, Slot};
use std::thread::JoinHandle;

/// Snapshots take at most this share of the memory that is free, in percent.
const MEMORY_PERCENT: u64 = 60;

/// Where the snapshot's memory is.
pub enum Memory {
    /// Not needed yet.
    Unmade,
    /// A thread is allocating it.
    Making(JoinHandle<ironhorse_core::Result<Box<dyn HostMemory>>>),
    /// Ready for a copy.
    Ready(Box<dyn HostMemory>),
    /// In use by the thread that writes.
    Away,
    /// There is too little memory: the step waits for the disk.
    None,
}

impl Saver {
    pub(super) fn make_memory(&mut self, session: &mut Session, observer: &mut dyn Observer) {
        let bytes: usize = match session.shares() {
            Ok(shares) if !session.place().is_alone() => shares.iter().map(|(_, slot)| slot.bytes()).sum(),
            _ => self.slots.iter().map(Slot::bytes).sum(),
        };
        let free = available_memory();
        if free.is_some_and(|free| bytes as u64 > free / 100 * MEMORY_PERCENT) {
            let (needs, has) = (human_bytes(bytes as u64), human_bytes(free.unwrap_or(0)));
            observer.note(&format!(
                "saving is synchronous (as with --save-sync): a copy of the state needs {needs} \
                 of host memory and {has} are free"
            ));
            self.memory = Memory::None;
            return;
        }
        let make = session.engine().host_memory();
        self.memory = Memory::Making(std::thread::spawn(move || make(bytes)));
    }

    /// The snapshot's memory, waited for if it is being made; `None` where there is too little.
    pub(super) fn take_memory(&mut self, observer: &mut dyn Observer) -> Option<Box<dyn HostMemory>> {
        match std::mem::replace(&mut self.memory, Memory::None) {
            Memory::Ready(memory) => Some(memory),
            Memory::Making(thread) => match thread.join() {
                Ok(Ok(memory)) => Some(memory),
                Ok(Err(error)) => {
                    observer.note(&format!("saving is synchronous (as with --save-sync): {error}"));
                    None
                }
                Err(_) => None,
            },
            Memory::Unmade | Memory::Away | Memory::None => None,
        }
    }
}
