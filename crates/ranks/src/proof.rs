//! Both sides of a connection prove that they know the token of the run, without sending it.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The first bytes of both sides; the digit changes with the messages.
const MAGIC: &[u8; 8] = b"IHRANKS1";
/// How long the whole proof may take, however slowly a stranger sends it.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest introduction.
const MOST: usize = 4096;

/// How a rank that connects introduces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Its rank.
    pub rank: usize,
    /// How many ranks it believes there are.
    pub world: usize,
    /// Its machine.
    pub host: String,
    /// The port on which it listens for other ranks.
    pub port: u16,
    /// Version and commit of its program.
    pub version: String,
}

/// Sixteen random bytes.
fn nonce() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}

/// A token that nobody can guess.
pub fn new_token() -> io::Result<String> {
    let bytes = [nonce()?, nonce()?].concat();
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Hashes twice, so that nothing can be added to what was hashed.
fn prove(token: &str, role: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut inner = Sha256::new();
    for part in [token.as_bytes(), role].iter().chain(parts) {
        inner.update((part.len() as u64).to_le_bytes());
        inner.update(part);
    }
    Sha256::new().chain_update(token.as_bytes()).chain_update(inner.finalize()).finalize().into()
}

/// Compares without telling by its time how much is equal.
fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

fn refused(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text.into())
}

/// A connection on which everything has to be said before a time.
struct Timed<'a> {
    stream: &'a mut TcpStream,
    until: Instant,
}

impl<'a> Timed<'a> {
    fn new(stream: &'a mut TcpStream, patience: Duration) -> Self {
        Self { stream, until: Instant::now() + patience }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(out)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn greeting(from: &mut impl Read) -> io::Result<[u8; 16]> {
    let magic: [u8; 8] = array(from)?;
    if &magic != MAGIC {
        return Err(refused("it does not speak as a rank of this version does"));
    }
    array(from)
}

/// Introduces this rank to the one that listens; its refusal is the error.
pub fn introduce(to: &mut TcpStream, token: &str, hello: &Hello) -> io::Result<()> {
    let to = &mut Timed::new(to, PATIENCE);
    let mine = nonce()?;
    to.write_all(&[MAGIC, &mine[..]].concat())?;
    let theirs = greeting(to)?;
    let text = serde_json::to_vec(hello)?;
    let proof = prove(token, b"join", &[&mine, &theirs, &text]);
    to.write_all(&[&proof[..], &(text.len() as u32).to_le_bytes(), &text].concat())?;
    let answer: [u8; 32] = array(to).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            refused("it hung up, as a rank of another run does, which has another token")
        }
        _ => error,
    })?;
    if !same(&answer, &prove(token, b"welcome", &[&theirs, &mine])) {
        return Err(refused("it does not know the token of this run"));
    }
    let length = u32::from_le_bytes(array(to)?) as usize;
    let mut refusal = vec![0; length.min(MOST)];
    to.read_exact(&mut refusal)?;
    if refusal.is_empty() { Ok(()) } else { Err(refused(String::from_utf8_lossy(&refusal))) }
}

/// Learns who connects; `judge` may refuse it with a reason, which it is told.
pub fn receive(
    from: &mut TcpStream,
    token: &str,
    judge: impl FnOnce(&Hello) -> Result<(), String>,
) -> io::Result<Hello> {
    receive_within(from, token, judge, PATIENCE)
}

fn receive_within(
    from: &mut TcpStream,
    token: &str,
    judge: impl FnOnce(&Hello) -> Result<(), String>,
    patience: Duration,
) -> io::Result<Hello> {
    let from = &mut Timed::new(from, patience);
    let theirs = greeting(from)?;
    let mine = nonce()?;
    from.write_all(&[MAGIC, &mine[..]].concat())?;
    let proof: [u8; 32] = array(from)?;
    let length = u32::from_le_bytes(array(from)?) as usize;
    if length > MOST {
        return Err(refused("its introduction is too long"));
    }
    let mut text = vec![0; length];
    from.read_exact(&mut text)?;
    if !same(&proof, &prove(token, b"join", &[&theirs, &mine, &text])) {
        return Err(refused("it does not know the token of this run"));
    }
    let hello: Hello = serde_json::from_slice(&text)?;
    let refusal = judge(&hello).err().unwrap_or_default();
    let welcome = prove(token, b"welcome", &[&mine, &theirs]);
    from.write_all(&[&welcome[..], &(refusal.len() as u32).to_le_bytes(), refusal.as_bytes()].concat())?;
    if refusal.is_empty() { Ok(hello) } else { Err(refused(refusal)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn hello() -> Hello {
        Hello { rank: 1, world: 2, host: "there".into(), port: 9, version: "1".into() }
    }

    fn meet(tokens: [&str; 2], refuse: Option<&str>) -> [Result<(), String>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let judge = |_: &Hello| refuse.map_or(Ok(()), |text| Err(text.to_owned()));
                receive(&mut stream, tokens[0], judge).map(|found| assert_eq!(found, hello()))
            });
            let client = introduce(&mut TcpStream::connect(at).unwrap(), tokens[1], &hello());
            [server.join().unwrap(), client].map(|result| result.map_err(|error| error.to_string()))
        })
    }

    #[test]
    fn only_those_who_know_the_token_meet() {
        assert_eq!(meet(["secret", "secret"], None), [Ok(()), Ok(())]);
        let [server, client] = meet(["secret", "guess"], None);
        assert_eq!(server, Err("it does not know the token of this run".into()));
        assert!(client.is_err());
        let told = Err("another version".to_owned());
        assert_eq!(meet(["secret", "secret"], Some("another version")), [told.clone(), told]);
        assert_ne!(new_token().unwrap(), new_token().unwrap());
    }

    #[test]
    fn what_is_no_rank_is_refused() {
        for bytes in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n........................."[..], &[0; 200]] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            stranger.write_all(bytes).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            let text = receive(&mut stream, "secret", |_| Ok(())).unwrap_err().to_string();
            assert!(text.contains("does not speak as a rank"), "{text}");
        }
    }

    /// One byte now and then would reset a limit on each read.
    #[test]
    fn a_stranger_who_dawdles_is_dropped() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let server = std::thread::spawn(move || {
            let patience = Duration::from_millis(200);
            receive_within(&mut stream, "secret", |_| Ok(()), patience).unwrap_err().kind()
        });
        for byte in MAGIC.iter().chain(&[7; 16]) {
            if server.is_finished() || stranger.write_all(&[*byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let kind = server.join().unwrap();
        assert!(matches!(kind, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{kind}");
    }
}
