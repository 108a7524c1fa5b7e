//! The communicator over TCP: one connection for each pair of ranks.
//!
//! A thread for each connection reads what arrives, so that nobody waits for anybody to read; one more sends heartbeats and looks
//! for ranks that are silent, or that make a step and no progress in it. The first failure is the one that counts: it is told to
//! all, and every call fails with it.

use crate::wire::{self, Kind, Pulse, Writer};
use crate::work::{OwnWork, Work};
use ironhorse_core::ranks::{AT_FIRST, RESUMABLE, Watched};
use ironhorse_core::{Communicator, Error, Place, Result};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often a call that waits looks for a failure.
const LOOK: Duration = Duration::from_millis(50);
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
    /// The exit code of the run.
    code: u8,
}

/// Another rank.
pub(crate) struct Peer {
    pub rank: usize,
    pub host: String,
    pub stream: TcpStream,
}

/// A connection and what arrived on it. One descriptor for all who use it: there are as many connections as ranks.
struct Link {
    host: String,
    stream: Arc<TcpStream>,
    writer: Mutex<Writer>,
    arrived: Mutex<Receiver<Vec<u8>>>,
    /// Milliseconds after the start at which something arrived last.
    heard: AtomicU64,
    finished: AtomicBool,
    work: Work,
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
    own: OwnWork,
    /// The progress of this rank, as the others see it.
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
        let mut readers: Vec<(usize, Arc<TcpStream>, Sender<Vec<u8>>)> = Vec::new();
        for Peer { rank, host, stream } in peers {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(LOOK))?;
            let ((sender, arrived), stream) = (channel(), Arc::new(stream));
            readers.push((rank, stream.clone(), sender));
            links[rank] = Some(Link {
                host,
                writer: Mutex::new(Writer::new(stream.clone())),
                stream,
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
            own: OwnWork::default(),
            work: Work::default(),
        });
        for (rank, stream, sender) in readers {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .spawn(move || shared.listen(rank, &stream, &sender))?;
        }
        let beating = shared.clone();
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || beating.beat())?;
        Ok(Self { shared })
    }

    /// The host of each rank.
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
    /// Calls `then` in a thread of its own once a rank is lost. That thread keeps no connection open.
    pub fn when_lost(&self, then: impl FnOnce(&Error) + Send + 'static) {
        let shared = self.shared.clone();
        let watch = move || {
            while !shared.done.load(Ordering::Relaxed) {
                if let Err(error) = shared.check() {
                    return then(&error);
                }
                std::thread::sleep(LOOK);
            }
        };
        // without a thread, ranks end as far as they can by themselves
        let _ = std::thread::Builder::new().name("lost ranks".into()).spawn(watch);
    }

    /// The addresses of the connection to each rank, here and there; `None` for this rank itself.
    pub fn addresses(&self) -> Vec<Option<[SocketAddr; 2]>> {
        let of = |link: &Link| Some([link.stream.local_addr().ok()?, link.stream.peer_addr().ok()?]);
        self.shared.links.iter().map(|link| link.as_ref().and_then(of)).collect()
    }
}

impl Shared {
    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Reads what a rank sends until it has finished or is lost.
    fn listen(&self, rank: usize, stream: &TcpStream, sender: &Sender<Vec<u8>>) {
        let Some(link) = &self.links[rank] else { return };
        loop {
            match wire::read(stream) {
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
                        self.lose(rank, &link.host, what);
                    }
                    return;
                }
            }
        }
    }

    /// A rank is lost: the run can be resumed.
    fn lose(&self, rank: usize, host: &str, what: String) {
        self.fail(Blame { rank, host: host.to_owned(), what, code: RESUMABLE });
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
                    link.work.forgive(looked);
                }
                self.work.forgive(looked);
            }
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + every;
            let pulse = self.own.pulse(self.now());
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
                    self.lose(rank, &link.host, what);
                }
            }
            self.look_for_stuck();
        }
    }

    /// Looks for ranks that make a step and have not made progress for too long. Where one rank hangs on a GPU all of them do: the one
    /// to blame is the one that has made the least progress.
    fn look_for_stuck(&self) {
        let (now, limit) = (self.now(), self.timeout.as_millis() as u64);
        let here = crate::host();
        let works = self.links.iter().enumerate().map(|(rank, link)| match link {
            Some(link) => (rank, &link.host, &link.work),
            None => (rank, &here, &self.work),
        });
        let stuck = works.filter_map(|(rank, host, work)| Some((rank, host, work, work.stuck(limit, now)?)));
        let least = stuck.min_by_key(|(rank, _, work, _)| (work.count(), *rank));
        if let Some((rank, host, _, limits)) = least {
            let seconds = self.timeout.as_secs_f64() * f64::from(limits);
            let first = if limits > 1 {
                format!(", {limits} times as long for the first steps")
            } else {
                String::new()
            };
            let what = format!(
                "its process lives, but it has not got on with its step for {seconds} s (--rank-timeout{first}): does its device or its file system hang?"
            );
            self.lose(rank, host, what);
        }
    }

    /// The failure, if there is one.
    fn check(&self) -> Result<()> {
        match self.failure.get().cloned() {
            None => Ok(()),
            Some(Blame { rank, host, what, code }) => Err(Error::RankLost { rank, host, what, code }),
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
        Error::RankLost { rank, host, what: "it does not take messages".into(), code: RESUMABLE }
    }

    fn send(&self, rank: usize, bytes: &[u8]) -> Result<()> {
        self.check()?;
        let Some(link) = &self.links[rank] else { return Ok(()) };
        let _waits = self.own.waits(self.now());
        let go_on = |_| {
            self.own.looks(self.now());
            self.failure.get().is_none()
        };
        let sent = lock(&link.writer).write(&[&wire::header(Kind::Data, bytes.len()), bytes], &go_on);
        sent.map_err(|_| self.lost(rank))
    }

    fn receive(&self, rank: usize) -> Result<Vec<u8>> {
        let Some(link) = &self.links[rank] else { return Ok(Vec::new()) };
        let _waits = self.own.waits(self.now());
        let arrived = lock(&link.arrived);
        loop {
            match arrived.recv_timeout(LOOK) {
                Ok(bytes) => return Ok(bytes),
                Err(RecvTimeoutError::Timeout) => {
                    self.own.looks(self.now());
                    self.check()?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    if link.finished.load(Ordering::Relaxed) {
                        let what =
                            "it has finished, and this rank has not: they did not do the same".to_owned();
                        return Err(Error::RankLost { rank, host: link.host.clone(), what, code: RESUMABLE });
                    }
                    return Err(self.lost(rank));
                }
            }
        }
    }

    /// The other ranks, beginning with the next one: not all send to the same at once.
    fn others(&self) -> impl Iterator<Item = usize> {
        let Place { rank, world } = self.place;
        (1..world).map(move |next| (rank + next) % world)
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

    fn give_up(&self, why: &str, code: u8) {
        if self.shared.failure.get().is_none() {
            let (rank, host) = (self.shared.place.rank, crate::host());
            self.shared.fail(Blame { rank, host, what: why.to_owned(), code });
        }
    }

    fn in_step(&self, step: Option<Watched>) {
        self.shared.own.in_step(step);
    }

    fn patience(&self) -> Option<Duration> {
        Some(self.shared.timeout * AT_FIRST)
    }

    fn whereabouts(&self) -> Vec<String> {
        let hosts = self.hosts().into_iter().zip(self.addresses()).enumerate();
        hosts
            .filter_map(|(rank, (host, at))| Some(format!("rank {rank} on {host} at {}", at?[1].ip())))
            .collect()
    }

    fn gets_on(&self) {
        self.shared.own.gets_on();
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
            let _ = link.stream.shutdown(Shutdown::Write);
        }
    }
}
