//! Messages on a connection: their kind, their length, their bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Part of an exchange.
    Data = 1,
    /// The sender is there.
    Heartbeat = 2,
    /// The sender has finished; nothing follows.
    Goodbye = 3,
    /// A rank is lost, maybe the sender: JSON of [`Blame`](super::tcp::Blame).
    Blame = 4,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Data, Self::Heartbeat, Self::Goodbye, Self::Blame].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The largest message: a bucket of f32, with room for larger ones.
const MOST: u64 = 1 << 33;

/// The first bytes of a message.
pub fn header(kind: Kind, length: usize) -> [u8; 9] {
    let mut header = [0; 9];
    header[0] = kind as u8;
    header[1..].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// Reads one message; waits for it.
pub fn read(from: &mut TcpStream) -> io::Result<(Kind, Vec<u8>)> {
    let mut header = [0; 9];
    from.read_exact(&mut header)?;
    let [kind, length @ ..] = header;
    let (kind, length) = (Kind::of(kind), u64::from_le_bytes(length));
    let (Some(kind), true) = (kind, length <= MOST) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a message of a rank"));
    };
    let mut bytes = Vec::new();
    // grows with what arrives: a length alone does not take memory
    from.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, bytes))
}

/// Writes bytes; `go_on` is asked whenever the other side does not take any for a while.
pub fn write(to: &mut TcpStream, mut bytes: &[u8], go_on: &dyn Fn() -> bool) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                if !go_on() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
