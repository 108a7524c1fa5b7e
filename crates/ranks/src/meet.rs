//! The rendezvous: rank 0 listens, the others come, and then all connect to all.

use crate::proof::{self, Hello};
use crate::tcp::{Peer, TcpRanks};
use crate::{Environment, host};
use ironhorse_core::ranks::RESUMABLE;
use ironhorse_core::{Error, Place, Result};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How often to try again.
const AGAIN: Duration = Duration::from_millis(100);
/// Strangers that are answered at a time.
const STRANGERS: usize = 64;
/// Files that a run has open besides its connections, at most: shards of data, checkpoints, libraries, devices.
const OTHER_FILES: u64 = 1024;
/// The longest table of ranks.
const MOST: usize = 1 << 22;

/// What a rank needs to meet the others.
pub struct Meeting<'a> {
    /// Which rank this is, and where rank 0 listens.
    pub environment: &'a Environment,
    /// Version and commit of this program, which must be those of all.
    pub version: &'a str,
    /// How long the others may take to come.
    pub patience: Duration,
    /// How long a rank may be silent before it is lost.
    pub timeout: Duration,
    /// Called with a message for each connection that is refused.
    pub note: &'a dyn Fn(&str),
    /// Called while the rank waits; says whether to stop.
    pub stop: &'a dyn Fn() -> bool,
}

/// The host and address at which a rank listens.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    host: String,
    at: SocketAddr,
}

/// A connection that was accepted, or why not.
type Came = (SocketAddr, io::Result<(Hello, TcpStream)>);

fn io_error(what: &str, error: &io::Error) -> Error {
    Error::Input(format!("{what}: {error}"))
}

/// Listens at all addresses of this machine, of IPv4 and IPv6.
fn listen(port: u16) -> io::Result<TcpListener> {
    let only = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|text| text.trim() != "0");
    let both = (!only).then(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)));
    match both {
        Some(Ok(listener)) => Ok(listener),
        // a system without IPv6
        _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
    }
}

/// The socket that the launcher left as standard input, which is empty from then on: what this process starts must not get it, and
/// it is closed when all have come.
#[cfg(unix)]
fn take_stdin() -> io::Result<TcpListener> {
    use std::os::fd::AsFd;
    let given = io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(TcpListener::from(given))
}

/// Allows this process as many open files as the system lets it have, where the usual limit is below what so many ranks need.
fn allow_descriptors(world: usize) {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut limit = getrlimit(Resource::Nofile);
        let needed = world as u64 + OTHER_FILES;
        if limit.current.is_some_and(|current| current < needed) {
            limit.current = limit.maximum;
            let _ = setrlimit(Resource::Nofile, limit); // else a connection is refused, and says so
        }
    }
    #[cfg(not(unix))]
    let _ = world;
}

/// The address of a rank as seen by a rank that reached rank 0 at `leader`: ranks on the machine of rank 0 may have come to it by a
/// loopback address, which on other machines means the machine itself.
fn seen_from(leader: IpAddr, row: SocketAddr) -> SocketAddr {
    match row.ip().is_loopback() && !leader.is_loopback() {
        true => SocketAddr::new(leader, row.port()),
        false => row,
    }
}

/// Whether the other side has not hung up.
fn is_open(stream: &TcpStream) -> bool {
    let look = || {
        stream.set_nonblocking(true)?;
        let read = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        read
    };
    match look() {
        Ok(count) => count > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

impl Meeting<'_> {
    /// Meets all other ranks.
    ///
    /// # Errors
    /// They do not come in time, or one has another version or believes in another world.
    pub fn meet(&self) -> Result<TcpRanks> {
        let Place { rank, world } = self.environment.place;
        let until = Instant::now() + self.patience;
        allow_descriptors(world);
        let mut peers = if rank == 0 { self.lead(until)? } else { self.follow(until)? };
        peers.sort_by_key(|peer| peer.rank);
        debug_assert_eq!(peers.len() + 1, world);
        TcpRanks::new(self.environment.place, self.timeout, peers)
            .map_err(|error| io_error("cannot use the connections to other ranks", &error))
    }

    fn hello(&self, port: u16) -> Hello {
        let Place { rank, world } = self.environment.place;
        Hello { rank, world, host: host(), port, version: self.version.to_owned() }
    }

    /// Why a rank cannot take part.
    fn judge(place: Place, version: &str, hello: &Hello) -> std::result::Result<(), String> {
        if hello.world != place.world || hello.rank >= place.world || hello.rank == place.rank {
            let (rank, world) = (hello.rank, hello.world);
            return Err(format!("rank {rank} of {world} came to rank {} of {}", place.rank, place.world));
        }
        if hello.version != version {
            let (rank, theirs) = (hello.rank, &hello.version);
            return Err(format!(
                "rank {rank} on {} runs version {theirs}, rank {} runs {version}: use the same program everywhere",
                hello.host, place.rank
            ));
        }
        Ok(())
    }

    /// The socket that rank 0 listens on.
    fn listener(&self) -> Result<TcpListener> {
        let Environment { port, listens_on_stdin, by, .. } = self.environment;
        #[cfg(unix)]
        if *listens_on_stdin {
            return take_stdin().map_err(|error| io_error("the launcher's socket", &error));
        }
        #[cfg(not(unix))]
        let _ = listens_on_stdin;
        listen(*port).map_err(|error| {
            Error::Input(format!(
                "rank 0 cannot listen on port {port}, which follows from {by}: {error}; is another run there? Set MASTER_PORT to a free one"
            ))
        })
    }

    /// Accepts connections and lets each prove itself in a thread, until `stop`.
    fn accept(&self, listener: TcpListener) -> Result<Receiver<Came>> {
        let (sender, came) = channel();
        listener.set_nonblocking(true).map_err(|error| io_error("cannot listen", &error))?;
        let (token, place, version) =
            (self.environment.token.clone(), self.environment.place, self.version.to_owned());
        let door = move |sender: Sender<Came>| {
            let inside = std::sync::Arc::new(());
            loop {
                match listener.accept() {
                    Ok((mut stream, at)) if std::sync::Arc::strong_count(&inside) <= STRANGERS => {
                        let (sender, token, version, held) =
                            (sender.clone(), token.clone(), version.clone(), inside.clone());
                        std::thread::spawn(move || {
                            let judge = |hello: &Hello| Self::judge(place, &version, hello);
                            let made = stream
                                .set_nonblocking(false)
                                .and_then(|()| proof::receive(&mut stream, &token, judge));
                            let _ = sender.send((at, made.map(|hello| (hello, stream))));
                            drop(held);
                        });
                    }
                    Ok(_) => {} // too many at once: dropped
                    Err(_) => std::thread::sleep(AGAIN / 4),
                }
                // the receiver is gone when all have come
                if sender
                    .send((SocketAddr::from(([0, 0, 0, 0], 0)), Err(io::ErrorKind::WouldBlock.into())))
                    .is_err()
                {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("rendezvous".into())
            .spawn(move || door(sender))
            .map_err(|error| io_error("cannot start a thread", &error))?;
        Ok(came)
    }

    /// Waits for the ranks of `expected` to come.
    fn wait(
        &self,
        came: &Receiver<Came>,
        expected: &[usize],
        until: Instant,
    ) -> Result<Vec<(Hello, TcpStream)>> {
        let mut here: Vec<(Hello, TcpStream)> = Vec::new();
        while here.len() < expected.len() {
            match came.recv_timeout(AGAIN) {
                Ok((_, Ok((hello, stream)))) => {
                    let known = here.iter().position(|(other, _)| other.rank == hello.rank);
                    match (expected.contains(&hello.rank), known) {
                        (true, Some(at)) if is_open(&here[at].1) => (self.note)(&format!(
                            "refused a second rank {} ({}): one from {} is here; do two runs have the same port and token? IRONHORSE_TOKEN keeps them apart",
                            hello.rank, hello.host, here[at].0.host
                        )),
                        // a rank that was started again after its first connection broke
                        (true, Some(at)) => here[at] = (hello, stream),
                        (true, None) => here.push((hello, stream)),
                        (false, _) => {
                            (self.note)(&format!("rank {} came, which nobody expected", hello.rank))
                        }
                    }
                }
                Ok((at, Err(error))) if error.kind() == io::ErrorKind::PermissionDenied => {
                    (self.note)(&format!("refused a connection of {at}: {error}"));
                    if error.to_string().contains("use the same program everywhere") {
                        return Err(Error::Input(error.to_string()));
                    }
                }
                Ok((at, Err(error))) if error.kind() != io::ErrorKind::WouldBlock => {
                    (self.note)(&format!("refused a connection of {at}: {error}"));
                }
                _ => {}
            }
            self.check_time(until, || {
                let missing: Vec<String> = expected
                    .iter()
                    .filter(|rank| !here.iter().any(|(hello, _)| hello.rank == **rank))
                    .map(ToString::to_string)
                    .collect();
                format!("rank {} did not come", missing.join(", "))
            })?;
        }
        Ok(here)
    }

    fn check_time(&self, until: Instant, what: impl FnOnce() -> String) -> Result<()> {
        if (self.stop)() {
            return Err(Error::Input("stopped while the ranks were meeting".into()));
        }
        if Instant::now() < until {
            return Ok(());
        }
        let (seconds, Environment { address, port, .. }) = (self.patience.as_secs(), self.environment);
        Err(Error::Input(format!(
            "{} in {seconds} s; rank 0 is at {address}, port {port}: is that port open between the machines, and did every rank start?",
            what()
        )))
    }

    /// Rank 0: waits for all, and tells each where the others are.
    fn lead(&self, until: Instant) -> Result<Vec<Peer>> {
        let world = self.environment.place.world;
        let came = self.accept(self.listener()?)?;
        let others: Vec<usize> = (1..world).collect();
        let here = self.wait(&came, &others, until)?;
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut table = vec![Row { host: host(), at: nowhere }; world];
        for (hello, stream) in &here {
            let ip = stream.peer_addr().map_or(IpAddr::from([0, 0, 0, 0]), |at| at.ip().to_canonical());
            table[hello.rank] = Row { host: hello.host.clone(), at: SocketAddr::new(ip, hello.port) };
        }
        let text = serde_json::to_vec(&table).unwrap_or_default();
        let message = [&(text.len() as u32).to_le_bytes()[..], &text].concat();
        let mut peers = Vec::new();
        for (hello, mut stream) in here {
            let lost = |error: &io::Error| Error::RankLost {
                rank: hello.rank,
                host: hello.host.clone(),
                what: format!("it left while the ranks were meeting ({error})"),
                code: RESUMABLE,
            };
            stream.write_all(&message).map_err(|error| lost(&error))?;
            peers.push(Peer { rank: hello.rank, host: hello.host.clone(), stream });
        }
        Ok(peers)
    }

    /// Meets the others as any rank but 0: goes to rank 0, then connects to the ranks below it and waits for those above.
    fn follow(&self, until: Instant) -> Result<Vec<Peer>> {
        let Environment { place, address, port, token, .. } = self.environment;
        let listener = listen(0).map_err(|error| io_error("cannot listen", &error))?;
        let own = listener.local_addr().map_or(0, |at| at.port());
        let hello = self.hello(own);
        let (mut leader, at) = self.connect(
            until,
            || (address.as_str(), *port).to_socket_addrs().map(Iterator::collect::<Vec<_>>),
            &hello,
        )?;
        let table = self.table(&mut leader, until)?;
        if table.len() != place.world {
            return Err(Error::Input(format!(
                "rank 0 knows {} ranks, expected {}",
                table.len(),
                place.world
            )));
        }
        let came = self.accept(listener)?;
        let mut peers = Vec::new();
        for (rank, row) in table.iter().enumerate().take(place.rank).skip(1) {
            let (stream, _) = self.connect(until, || Ok(vec![seen_from(at.ip(), row.at)]), &hello)?;
            peers.push(Peer { rank, host: row.host.clone(), stream });
        }
        let above: Vec<usize> = (place.rank + 1..place.world).collect();
        for (hello, stream) in self.wait(&came, &above, until)? {
            peers.push(Peer { rank: hello.rank, host: hello.host, stream });
        }
        let host = table.first().map_or_else(|| at.to_string(), |row| row.host.clone());
        peers.push(Peer { rank: 0, host, stream: leader });
        let _ = token;
        Ok(peers)
    }

    /// Connects to a rank, again and again until it is there.
    fn connect(
        &self,
        until: Instant,
        addresses: impl Fn() -> io::Result<Vec<SocketAddr>>,
        hello: &Hello,
    ) -> Result<(TcpStream, SocketAddr)> {
        let mut last = String::new();
        loop {
            match addresses() {
                Ok(all) => {
                    for at in all {
                        match TcpStream::connect_timeout(&at, Duration::from_secs(2)) {
                            Ok(mut stream) => {
                                match proof::introduce(&mut stream, &self.environment.token, hello) {
                                    Ok(()) => return Ok((stream, at)),
                                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                                        return Err(Error::Input(format!(
                                            "{at} refused rank {}: {error}",
                                            hello.rank
                                        )));
                                    }
                                    Err(error) => last = format!("{at}: {error}"),
                                }
                            }
                            Err(error) => last = format!("{at}: {error}"),
                        }
                    }
                }
                Err(error) => last = error.to_string(),
            }
            std::thread::sleep(AGAIN);
            self.check_time(until, || format!("rank {} cannot reach another rank ({last})", hello.rank))?;
        }
    }

    /// Receives the addresses of all ranks from rank 0, which waits for the last of them.
    fn table(&self, leader: &mut TcpStream, until: Instant) -> Result<Vec<Row>> {
        let lost = |error: &io::Error| Error::RankLost {
            rank: 0,
            host: self.environment.address.clone(),
            what: format!("it left while the ranks were meeting ({error})"),
            code: RESUMABLE,
        };
        leader.set_read_timeout(Some(AGAIN)).map_err(|error| lost(&error))?;
        let mut bytes = Vec::new();
        let mut expected = 4;
        while bytes.len() < expected {
            let mut piece = vec![0; expected - bytes.len()];
            match leader.read(&mut piece) {
                Ok(0) => return Err(lost(&io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => bytes.extend_from_slice(&piece[..count]),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    self.check_time(until, || "not all ranks came".into())?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(&error)),
            }
            if let (4, Some(&length)) = (bytes.len(), bytes.first_chunk()) {
                expected = 4 + (u32::from_le_bytes(length) as usize).min(MOST);
            }
        }
        serde_json::from_slice(&bytes[4..])
            .map_err(|error| Error::Input(format!("the table of ranks: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_that_of_rank_0_for_other_machines() {
        let [near, far]: [SocketAddr; 2] = ["127.0.0.1:9", "10.0.0.2:9"].map(|at| at.parse().unwrap());
        let [loopback, name, leader]: [IpAddr; 3] =
            ["127.0.0.1", "127.0.1.1", "10.0.0.1"].map(|at| at.parse().unwrap());
        assert_eq!(seen_from(leader, near), "10.0.0.1:9".parse().unwrap());
        for (from, row) in [(loopback, near), (name, near), (loopback, far), (leader, far)] {
            assert_eq!(seen_from(from, row), row);
        }
    }

    #[test]
    fn both_kinds_of_addresses_are_listened_to() {
        let listener = listen(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn a_connection_is_open_until_it_is_closed() {
        let listener = listen(0).unwrap();
        let at = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
        let other = TcpStream::connect(at).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert!(is_open(&stream));
        drop(other);
        let until = Instant::now() + Duration::from_secs(10);
        while is_open(&stream) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!is_open(&stream));
    }
}
