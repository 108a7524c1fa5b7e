//! Messages on a connection: their kind, their length, their bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Part of an exchange.
    Data = 1,
    /// The sender is there: its [`Pulse`].
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

/// What a heartbeat says of the work of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulse {
    /// How often the rank has made progress.
    pub count: u64,
    /// 0 unless it is its turn: it makes a step, and waits for nobody. Else how many times the usual limit it has to get on.
    pub limits: u8,
}

impl Pulse {
    const BYTES: usize = 9;

    /// The whole message.
    pub fn message(self) -> [u8; 9 + Self::BYTES] {
        let mut message = [0; 9 + Self::BYTES];
        message[..9].copy_from_slice(&header(Kind::Heartbeat, Self::BYTES));
        message[9..17].copy_from_slice(&self.count.to_le_bytes());
        message[17] = self.limits;
        message
    }

    /// What a message says.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let (count, limits) = bytes.split_first_chunk()?;
        Some(Self { count: u64::from_le_bytes(*count), limits: *limits.first()? })
    }
}

/// The first bytes of a message.
pub fn header(kind: Kind, length: usize) -> [u8; 9] {
    let mut header = [0; 9];
    header[0] = kind as u8;
    header[1..].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// Reads one message; waits for it.
pub fn read(mut from: &TcpStream) -> io::Result<(Kind, Vec<u8>)> {
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

/// The side of a connection that sends. What follows half a message would be taken for its other half, so nothing does.
pub struct Writer {
    stream: Arc<TcpStream>,
    cut: bool,
}

impl Writer {
    /// Sends on a connection whose timeout of writing says how often `go_on` is asked.
    pub fn new(stream: Arc<TcpStream>) -> Self {
        Self { stream, cut: false }
    }

    /// Writes the parts of one message. Where the other side takes nothing for a while, `go_on` is asked, and told whether some of
    /// the message has been taken.
    pub fn write(&mut self, parts: &[&[u8]], go_on: &dyn Fn(bool) -> bool) -> io::Result<()> {
        if self.cut {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut begun = false;
        for part in parts {
            let mut bytes = *part;
            while !bytes.is_empty() {
                let error = match (&*self.stream).write(bytes) {
                    Ok(0) => io::ErrorKind::WriteZero.into(),
                    Ok(count) => {
                        (begun, bytes) = (true, &bytes[count..]);
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error)
                        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
                    {
                        if go_on(begun) {
                            continue;
                        }
                        io::ErrorKind::TimedOut.into()
                    }
                    Err(error) => error,
                };
                self.cut = begun;
                return Err(error);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn a_pulse_is_read_as_it_was_sent() {
        for pulse in [Pulse { count: 1 << 40, limits: 10 }, Pulse::default()] {
            assert_eq!(Pulse::read(&pulse.message()[9..]), Some(pulse));
        }
        assert_eq!(Pulse::read(&[]), None);
    }

    #[test]
    fn nothing_follows_half_a_message() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(10))).unwrap();
        let mut writer = Writer::new(Arc::new(stream));
        let large = vec![7; 64 << 20]; // more than the system keeps for both sides
        let message = header(Kind::Data, large.len());
        let error = writer.write(&[&message, &large], &|begun| !begun).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let beat = writer.write(&[&Pulse::default().message()], &|_| true).unwrap_err();
        assert_eq!(beat.kind(), io::ErrorKind::BrokenPipe);
        drop(writer);
        let error = read(&reader).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "a part is not taken for the whole");
    }
}
