//! Ranks that are threads of one process, to test what they compute without a network.

use ironhorse_core::ranks::RESUMABLE;
use ironhorse_core::{Communicator, Error, Place, Result};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// One rank; its messages go through channels.
pub struct ThreadRank {
    place: Place,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Mutex<Receiver<Vec<u8>>>>,
}

/// The ranks of a world.
pub fn thread_ranks(world: usize) -> Vec<Arc<dyn Communicator>> {
    let mut to: Vec<Vec<Sender<Vec<u8>>>> = (0..world).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<Mutex<Receiver<Vec<u8>>>>> = (0..world).map(|_| Vec::new()).collect();
    for sends in &mut to {
        for receives in &mut from {
            let (sender, receiver) = channel();
            sends.push(sender);
            receives.push(Mutex::new(receiver));
        }
    }
    let ranks = to.into_iter().zip(from).enumerate();
    ranks
        .map(|(rank, (to, from))| {
            Arc::new(ThreadRank { place: Place { rank, world }, to, from }) as Arc<dyn Communicator>
        })
        .collect()
}

impl ThreadRank {
    fn lost(&self, rank: usize) -> Error {
        let (host, what) = ("this process".into(), "its thread has ended".into());
        Error::RankLost { rank, host, what, code: RESUMABLE }
    }

    fn receive(&self, rank: usize) -> Result<Vec<u8>> {
        let from = self.from[rank].lock().unwrap_or_else(PoisonError::into_inner);
        from.recv().map_err(|_| self.lost(rank))
    }
}

impl Communicator for ThreadRank {
    fn place(&self) -> Place {
        self.place
    }

    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<()> {
        for (rank, (to, bytes)) in self.to.iter().zip(send).enumerate() {
            to.send(bytes.to_vec()).map_err(|_| self.lost(rank))?;
        }
        for (rank, into) in receive.iter_mut().enumerate() {
            let bytes = self.receive(rank)?;
            if bytes.len() != into.len() {
                let (found, expected) = (bytes.len(), into.len());
                return Err(Error::Program(format!("rank {rank} sent {found} bytes, expected {expected}")));
            }
            into.copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn share(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        for (rank, to) in self.to.iter().enumerate() {
            to.send(message.to_vec()).map_err(|_| self.lost(rank))?;
        }
        (0..self.place.world).map(|rank| self.receive(rank)).collect()
    }

    fn give_up(&self, _why: &str, _code: u8) {}
}
