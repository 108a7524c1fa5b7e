//! The communicator over TCP: one connection for each pair of ranks.
//!
//! A thread for each connection reads what arrives, so that nobody waits for anybody to read; one more sends heartbeats and looks for
//! ranks that are silent, or that make a step and do not get on with it. The first failure is the one that counts: it is told to all, and every call fails with it.

use crate::wire::{self, Kind, Pulse, Writer};
use ironhorse_core::{Communicator, Error, Place, Result};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often a call that waits looks for a failure.
const LOOK: Duration = Duration::from_millis(50);
/// A call that waits and has not looked for so long hangs.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Heartbeats come at least this often.
const BEAT: Duration = Duration::from_secs(5);
/// How long a rank that notices a closed connection waits for another's word about the cause.
const WORD: Duration = Duration::from_millis(300);

/// A rank that is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blame {
    rank: usize,
    host: String,
    what: String,
}

/// Another rank.
pub(crate) struct Peer {
    pub rank: usize,
    pub host: String,
    pub stream: TcpStream,
}

/// A connection and what arrived on it.
struct Link {
    host: String,
    writer: Mutex<Writer>,
    /// Only to be shut down.
    handle: TcpStream,
    arrived: Mutex<Receiver<Vec<u8>>>,
    /// Milliseconds after the start at which something arrived last.
    heard: AtomicU64,
    finished: AtomicBool,
    work: Work,
}

/// How a rank gets on with its work, as far as it is known.
#[derive(Default)]
struct Work {
    /// How often it has got on.
    count: AtomicU64,
    /// It makes a step, and waits for nobody.
    works: AtomicBool,
    /// Milliseconds after the start at which it got on, or did not work.
    at: AtomicU64,
}

impl Work {
    /// Takes what is known now, and gives how many milliseconds the rank has worked without getting on.
    fn update(&self, pulse: Pulse, now: u64) -> u64 {
        let before = self.count.swap(pulse.count, Ordering::Relaxed);
        let worked = self.works.swap(pulse.works, Ordering::Relaxed);
        if before != pulse.count || !pulse.works || !worked {
            self.at.store(now, Ordering::Relaxed);
        }
        self.stuck(now)
    }

    fn stuck(&self, now: u64) -> u64 {
        match self.works.load(Ordering::Relaxed) {
            true => now.saturating_sub(self.at.load(Ordering::Relaxed)),
            false => 0,
        }
    }
}

/// What the threads of a rank share.
struct Shared {
    place: Place,
    timeout: Duration,
    start: Instant,
    /// `None` for this rank itself.
    links: Vec<Option<Link>>,
    failure: OnceLock<Blame>,
    done: AtomicBool,
    /// How this rank gets on.
    count: AtomicU64,
    in_step: AtomicBool,
    /// Calls that wait for another rank.
    waiting: AtomicUsize,
    /// Milliseconds after the start at which such a call looked around last.
    looked: AtomicU64,
    work: Work,
}

/// A rank connected to all others.
pub struct TcpRanks {
    shared: Arc<Shared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TcpRanks {
    /// Takes over connections to all other ranks. A rank that is silent for `timeout` is lost.
    pub(crate) fn new(place: Place, timeout: Duration, peers: Vec<Peer>) -> std::io::Result<Self> {
        let mut links: Vec<Option<Link>> = (0..place.world).map(|_| None).collect();
        let mut readers: Vec<(usize, TcpStream, Sender<Vec<u8>>)> = Vec::new();
        for Peer { rank, host, stream } in peers {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(LOOK))?;
            let (sender, arrived) = channel();
            readers.push((rank, stream.try_clone()?, sender));
            links[rank] = Some(Link {
                host,
                handle: stream.try_clone()?,
                writer: Mutex::new(Writer::new(stream)),
                arrived: Mutex::new(arrived),
                heard: AtomicU64::new(0),
                finished: AtomicBool::new(false),
                work: Work::default(),
            });
        }
        let shared = Arc::new(Shared {
            place,
            timeout,
            start: Instant::now(),
            links,
            failure: OnceLock::new(),
            done: AtomicBool::new(false),
            count: AtomicU64::new(0),
            in_step: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            looked: AtomicU64::new(0),
            work: Work::default(),
        });
        for (rank, stream, sender) in readers {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .spawn(move || shared.listen(rank, stream, &sender))?;
        }
        let beating = shared.clone();
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || beating.beat())?;
        Ok(Self { shared })
    }

    /// Where each rank is.
    pub fn hosts(&self) -> Vec<String> {
        let here = crate::host();
        self.shared
            .links
            .iter()
            .map(|link| link.as_ref().map_or(here.clone(), |link| link.host.clone()))
            .collect()
    }
}

impl TcpRanks {
    /// The addresses of the connection to each rank, here and there; `None` for this rank itself.
    pub fn addresses(&self) -> Vec<Option<[SocketAddr; 2]>> {
        let of = |link: &Link| Some([link.handle.local_addr().ok()?, link.handle.peer_addr().ok()?]);
        self.shared.links.iter().map(|link| link.as_ref().and_then(of)).collect()
    }
}

impl Shared {
    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Reads what a rank sends until it has finished or is lost.
    fn listen(&self, rank: usize, mut stream: TcpStream, sender: &Sender<Vec<u8>>) {
        let Some(link) = &self.links[rank] else { return };
        loop {
            match wire::read(&mut stream) {
                Ok((kind, bytes)) => {
                    link.heard.store(self.now(), Ordering::Relaxed);
                    match kind {
                        Kind::Data => drop(sender.send(bytes)), // nobody waits after a failure
                        Kind::Heartbeat => {
                            if let Some(pulse) = Pulse::read(&bytes) {
                                link.work.update(pulse, self.now());
                            }
                        }
                        Kind::Goodbye => return link.finished.store(true, Ordering::Relaxed),
                        Kind::Blame => {
                            if let Ok(blame) = serde_json::from_slice(&bytes) {
                                self.fail(blame);
                            }
                        }
                    }
                }
                Err(error) => {
                    if !self.done.load(Ordering::Relaxed) && self.failure.get().is_none() {
                        // a rank that ends because of another has told so; its word may be on the way
                        std::thread::sleep(WORD);
                        let what = match error.kind() {
                            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                                "its process has ended".to_owned()
                            }
                            _ => format!("the connection to it is lost ({error})"),
                        };
                        self.fail(Blame { rank, host: link.host.clone(), what });
                    }
                    return;
                }
            }
        }
    }

    /// Remembers the first failure and tells the others.
    fn fail(&self, blame: Blame) {
        if self.done.load(Ordering::Relaxed) || self.failure.set(blame.clone()).is_err() {
            return;
        }
        self.tell(&blame);
    }

    fn tell(&self, blame: &Blame) {
        let text = serde_json::to_vec(blame).unwrap_or_default();
        let message = [&wire::header(Kind::Blame, text.len())[..], &text].concat();
        for (rank, link) in self.links.iter().enumerate() {
            if let Some(link) = link.as_ref().filter(|_| rank != blame.rank) {
                let _ = lock(&link.writer).write(&[&message], &|_| false);
            }
        }
    }

    /// Sends heartbeats, and looks for ranks that send none.
    fn beat(&self) {
        let every = (self.timeout / 6).min(BEAT).max(Duration::from_millis(20));
        let mut next = Instant::now();
        let mut looked = self.now();
        while !self.done.load(Ordering::Relaxed) && self.failure.get().is_none() {
            std::thread::sleep(LOOK.min(every));
            // a process that was stopped itself has heard nothing meanwhile: the others get their time again
            let slept = self.now().saturating_sub(looked);
            looked = self.now();
            if slept > every.as_millis() as u64 * 3 {
                for link in self.links.iter().flatten() {
                    link.heard.store(looked, Ordering::Relaxed);
                    link.work.at.store(looked, Ordering::Relaxed);
                }
                self.work.at.store(looked, Ordering::Relaxed);
            }
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + every;
            let pulse = self.pulse();
            self.work.update(pulse, self.now());
            for (rank, link) in self.links.iter().enumerate() {
                let Some(link) = link else { continue };
                if let Ok(mut writer) = link.writer.try_lock() {
                    // one that has begun must be ended
                    let go_on =
                        |begun| begun && self.failure.get().is_none() && !self.done.load(Ordering::Relaxed);
                    let _ = writer.write(&[&pulse.message()], &go_on);
                }
                let silent = self.now().saturating_sub(link.heard.load(Ordering::Relaxed));
                if silent > self.timeout.as_millis() as u64 && !link.finished.load(Ordering::Relaxed) {
                    let seconds = self.timeout.as_secs_f64();
                    let what = format!("nothing was heard of it for {seconds} s (--rank-timeout)");
                    self.fail(Blame { rank, host: link.host.clone(), what });
                }
            }
            self.look_for_stuck();
        }
    }

    /// How this rank gets on.
    fn pulse(&self) -> Pulse {
        let count = self.count.load(Ordering::Relaxed);
        // one that hangs while it waits looks no more
        let looked = self.now().saturating_sub(self.looked.load(Ordering::Relaxed));
        let waits = self.waiting.load(Ordering::Relaxed) > 0 && looked < LOOK_AGAIN.as_millis() as u64;
        Pulse { count, works: self.in_step.load(Ordering::Relaxed) && !waits }
    }

    /// Looks for ranks that make a step and have not got on for too long. Where one hangs on a GPU all of them do: it is the one that
    /// has come least far.
    fn look_for_stuck(&self) {
        let (now, limit) = (self.now(), self.timeout.as_millis() as u64);
        let here = crate::host();
        let works = self.links.iter().enumerate().map(|(rank, link)| match link {
            Some(link) => (rank, &link.host, &link.work),
            None => (rank, &here, &self.work),
        });
        let stuck = works.filter(|(_, _, work)| work.stuck(now) > limit);
        let least = stuck.min_by_key(|(rank, _, work)| (work.count.load(Ordering::Relaxed), *rank));
        if let Some((rank, host, _)) = least {
            let seconds = self.timeout.as_secs_f64();
            let what = format!(
                "its process lives, but it has not got on with its step for {seconds} s (--rank-timeout): does its device or its file system hang?"
            );
            self.fail(Blame { rank, host: host.clone(), what });
        }
    }

    /// The failure, if there is one.
    fn check(&self) -> Result<()> {
        match self.failure.get().cloned() {
            None => Ok(()),
            Some(Blame { rank, host, what }) => Err(Error::RankLost { rank, host, what }),
        }
    }

    /// An error on a connection: what is behind it is found out by the thread that reads it.
    fn lost(&self, rank: usize) -> Error {
        let until = Instant::now() + self.timeout;
        while Instant::now() < until {
            if let Err(error) = self.check() {
                return error;
            }
            std::thread::sleep(LOOK);
        }
        let host = self.links[rank].as_ref().map_or_else(String::new, |link| link.host.clone());
        Error::RankLost { rank, host, what: "it does not take messages".into() }
    }

    fn send(&self, rank: usize, bytes: &[u8]) -> Result<()> {
        self.check()?;
        let Some(link) = &self.links[rank] else { return Ok(()) };
        let _waits = self.waits();
        let go_on = |_| {
            self.looks();
            self.failure.get().is_none()
        };
        let sent = lock(&link.writer).write(&[&wire::header(Kind::Data, bytes.len()), bytes], &go_on);
        sent.map_err(|_| self.lost(rank))
    }

    fn receive(&self, rank: usize) -> Result<Vec<u8>> {
        let Some(link) = &self.links[rank] else { return Ok(Vec::new()) };
        let _waits = self.waits();
        let arrived = lock(&link.arrived);
        loop {
            match arrived.recv_timeout(LOOK) {
                Ok(bytes) => return Ok(bytes),
                Err(RecvTimeoutError::Timeout) => {
                    self.looks();
                    self.check()?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    if link.finished.load(Ordering::Relaxed) {
                        let what =
                            "it has finished, and this rank has not: they did not do the same".to_owned();
                        return Err(Error::RankLost { rank, host: link.host.clone(), what });
                    }
                    return Err(self.lost(rank));
                }
            }
        }
    }

    /// Says, until it is dropped, that this rank waits for another.
    fn waits(&self) -> Waits<'_> {
        self.looks();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waits(self)
    }

    fn looks(&self) {
        self.looked.store(self.now(), Ordering::Relaxed);
    }

    /// The other ranks, beginning with the next one: not all send to the same at once.
    fn others(&self) -> impl Iterator<Item = usize> {
        let Place { rank, world } = self.place;
        (1..world).map(move |next| (rank + next) % world)
    }
}

/// A call that waits for another rank.
struct Waits<'a>(&'a Shared);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Communicator for TcpRanks {
    fn place(&self) -> Place {
        self.shared.place
    }

    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<()> {
        let Place { rank, world } = self.shared.place;
        if send.len() != world || receive.len() != world || send[rank].len() != receive[rank].len() {
            return Err(Error::Program(
                "an exchange has a message for every rank, and room for one of each".into(),
            ));
        }
        receive[rank].copy_from_slice(send[rank]);
        for to in self.shared.others() {
            self.shared.send(to, send[to])?;
        }
        for from in self.shared.others() {
            let bytes = self.shared.receive(from)?;
            if bytes.len() != receive[from].len() {
                let (found, expected) = (bytes.len(), receive[from].len());
                return Err(Error::Program(format!("rank {from} sent {found} bytes, expected {expected}")));
            }
            receive[from].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn share(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![Vec::new(); self.shared.place.world];
        for to in self.shared.others() {
            self.shared.send(to, message)?;
        }
        for from in self.shared.others() {
            all[from] = self.shared.receive(from)?;
        }
        all[self.shared.place.rank] = message.to_vec();
        Ok(all)
    }

    fn failure(&self) -> Option<Error> {
        self.shared.check().err()
    }

    fn give_up(&self, why: &str) {
        if self.shared.failure.get().is_none() {
            let blame = Blame { rank: self.shared.place.rank, host: crate::host(), what: why.to_owned() };
            self.shared.fail(blame);
        }
    }

    fn in_step(&self, begins: bool) {
        self.shared.in_step.store(begins, Ordering::Relaxed);
    }

    fn gets_on(&self) {
        self.shared.count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for TcpRanks {
    /// Says goodbye, unless something failed: the others then know that this one did not die.
    fn drop(&mut self) {
        let failed = self.shared.failure.get().is_some();
        self.shared.done.store(true, Ordering::Relaxed);
        for link in self.shared.links.iter().flatten() {
            if !failed {
                let _ = lock(&link.writer).write(&[&wire::header(Kind::Goodbye, 0)], &|_| false);
            }
            let _ = link.handle.shutdown(Shutdown::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_rank_that_works_and_does_not_get_on_is_stuck() {
        let work = Work::default();
        let pulse = |count, works| Pulse { count, works };
        assert_eq!(work.update(pulse(0, false), 1000), 0, "between steps nobody is watched");
        assert_eq!(work.update(pulse(0, true), 5000), 0, "the step begins");
        assert_eq!(work.update(pulse(0, true), 7000), 2000);
        assert_eq!(work.update(pulse(1, true), 8000), 0, "it got on");
        assert_eq!(work.update(pulse(1, true), 9000), 1000);
        assert_eq!(work.stuck(9500), 1500, "also where no heartbeat has come since");
        assert_eq!(work.update(pulse(1, false), 9900), 0, "it waits for another");
        assert_eq!(work.update(pulse(2, true), 12_000), 0);
        assert_eq!(work.update(pulse(2, true), 12_500), 500);
    }
}
