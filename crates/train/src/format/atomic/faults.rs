//! Makes the N-th change to the disk fail, for tests: for this thread with [`inject`], or for the whole process with
//! the environment variable `IRONHORSE_FAULT=N:KIND`. Not part of release builds.

use std::cell::Cell;
use std::io::{self, ErrorKind};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The variable that holds the fault of a process.
pub const VARIABLE: &str = "IRONHORSE_FAULT";

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The disk is full.
    Enospc,
    /// The disk is broken.
    Eio,
    /// The file system does not support the operation (ENOSYS, as FUSE reports it).
    Enosys,
    /// The file system does not support the operation (EINVAL, as network file systems report it).
    Einval,
    /// A write accepts half of the bytes, and the next write finds the disk full. Other operations find it full at
    /// once.
    Short,
    /// The process dies, as by SIGKILL; a write accepts half of the bytes before.
    Abort,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "enospc" => Self::Enospc,
            "eio" => Self::Eio,
            "enosys" => Self::Enosys,
            "einval" => Self::Einval,
            "short" => Self::Short,
            "abort" => Self::Abort,
            _ => return Err(format!("`{text}`, expected enospc, eio, enosys, einval, short or abort")),
        })
    }
}

impl Kind {
    /// The error, or the end of the process.
    fn strike(self) -> io::Error {
        match self {
            Self::Enospc | Self::Short => ErrorKind::StorageFull.into(),
            Self::Eio => io::Error::other("input/output error (simulated)"),
            Self::Enosys => ErrorKind::Unsupported.into(),
            Self::Einval => ErrorKind::InvalidInput.into(),
            Self::Abort => std::process::abort(),
        }
    }
}

/// The N-th operation from now, counted from 1, and how it fails.
#[derive(Clone, Copy)]
struct Fault {
    left: u64,
    kind: Kind,
}

thread_local! {
    static FAULT: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// A fault of this thread; removed when dropped.
#[must_use = "dropped at once, it has no effect"]
pub struct Injected {
    // not Send, because it belongs to one thread
    _own: std::marker::PhantomData<*const ()>,
}

/// Lets the `number`-th operation of this thread fail, counted from 1.
pub fn inject(number: u64, kind: Kind) -> Injected {
    FAULT.set(Some(Fault { left: number, kind }));
    Injected { _own: std::marker::PhantomData }
}

impl Injected {
    /// Whether the fault has occurred.
    pub fn fired(&self) -> bool {
        FAULT.get().is_none()
    }
}

impl Drop for Injected {
    fn drop(&mut self) {
        FAULT.set(None);
    }
}

/// The kind of fault of this operation, if it has one.
fn due() -> io::Result<Option<Kind>> {
    if let Some(fault) = FAULT.get() {
        let left = fault.left.saturating_sub(1);
        FAULT.set((left > 0).then_some(Fault { left, ..fault }));
        if left == 0 {
            return Ok(Some(fault.kind));
        }
    }
    of_process()
}

fn of_process() -> io::Result<Option<Kind>> {
    static PLAN: OnceLock<Option<Result<(u64, Kind), String>>> = OnceLock::new();
    static DONE: AtomicU64 = AtomicU64::new(0);
    let plan = PLAN.get_or_init(|| std::env::var(VARIABLE).ok().map(|text| parse(&text)));
    match plan {
        None => Ok(None),
        Some(Err(text)) => Err(io::Error::other(format!("{VARIABLE} is {text}"))),
        Some(Ok((number, kind))) => {
            Ok((DONE.fetch_add(1, Ordering::Relaxed) + 1 == *number).then_some(*kind))
        }
    }
}

fn parse(text: &str) -> Result<(u64, Kind), String> {
    let (number, kind) = text.split_once(':').ok_or(format!("`{text}`, expected N:KIND"))?;
    let number = number.parse().map_err(|_| format!("`{text}`, expected a number before the colon"))?;
    Ok((number, kind.parse()?))
}

/// Counts an operation that is not a write.
pub(super) fn operation() -> io::Result<()> {
    due()?.map_or(Ok(()), |kind| Err(kind.strike()))
}

/// A write that does not accept all of its bytes.
pub(super) struct ShortWrite {
    /// The number of bytes it accepts.
    pub(super) bytes: usize,
    kind: Kind,
}

impl ShortWrite {
    /// What happens after the bytes were accepted.
    pub(super) fn finish(self) {
        match self.kind {
            Kind::Abort => drop(Kind::Abort.strike()),
            // the caller tries the rest, and finds the disk full
            _ => FAULT.set(Some(Fault { left: 1, kind: Kind::Enospc })),
        }
    }
}

/// Counts a write of this many bytes.
pub(super) fn write(len: usize) -> io::Result<Option<ShortWrite>> {
    match due()? {
        None => Ok(None),
        // a write of 0 bytes would be treated as the end of the file
        Some(kind @ (Kind::Short | Kind::Abort)) if len > 1 => Ok(Some(ShortWrite { bytes: len / 2, kind })),
        Some(kind) => Err(kind.strike()),
    }
}
