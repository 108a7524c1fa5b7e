//! One file: resumed where an earlier download of it ended, checked, then renamed into place. Until then it is
//! `NAME.incomplete`, which only ever grows, so a process that is killed loses nothing.

use crate::ask::{Asker, Patience, Question};
use crate::check::{Check, Hasher};
use crate::error::{WrongContent, one_line};
use crate::http::{Answer, Failure};
use crate::watch::{Progress, STEP, Watch};
use crate::{Error, Repo, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A file to download.
pub struct Target<'a> {
    /// How messages call it.
    pub what: &'a str,
    /// Its repository, for files of the hub.
    pub repo: Option<&'a Repo>,
    /// The address that it comes from.
    pub url: &'a str,
    /// The file that it becomes.
    pub path: &'a Path,
    /// The file whose lock is held while it is downloaded, also by huggingface_hub.
    pub lock: &'a Path,
    /// Its size, if it is known.
    pub size: Option<u64>,
    /// What is known of its content.
    pub check: Check,
    /// How far the whole download is before this file.
    pub before: Progress<'a>,
}

/// What became of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its size.
    pub bytes: u64,
    /// Bytes that came over the network now.
    pub received: u64,
}

/// The part that is on the disk.
struct Part {
    path: PathBuf,
    file: File,
    /// Bytes in it.
    have: u64,
    hasher: Hasher,
}

impl Part {
    fn open(target: &Target<'_>) -> Result<Self> {
        let mut path = target.path.as_os_str().to_owned();
        path.push(".incomplete");
        let path = PathBuf::from(path);
        let opened = OpenOptions::new().create(true).append(true).open(&path);
        let file = opened.map_err(|error| Error::io(&path, "create", error))?;
        let have = file.metadata().map_err(|error| Error::io(&path, "read", error))?.len();
        let mut part = Self { hasher: Hasher::new(&target.check), path, file, have };
        if target.size.is_some_and(|size| have > size) {
            part.restart(target)?; // of another file
        } else if have > 0 {
            part.hasher = Hasher::resumed(&target.check, &part.path)?;
        }
        Ok(part)
    }

    fn restart(&mut self, target: &Target<'_>) -> Result<()> {
        self.file.set_len(0).map_err(|error| Error::io(&self.path, "write", error))?;
        (self.have, self.hasher) = (0, Hasher::new(&target.check));
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| Error::io(&self.path, "write", error))?;
        self.hasher.add(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }
}

/// Downloads a file, unless another process does so first.
pub fn download(asker: &Asker<'_>, target: &Target<'_>, watch: &mut dyn Watch) -> Result<Done> {
    for file in [target.path, target.lock] {
        let folder = file.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(|error| Error::io(folder, "create", error))?;
    }
    let _lock = lock(target, watch)?;
    if let Ok(found) = std::fs::metadata(target.path)
        && target.size.is_none_or(|size| size == found.len())
    {
        return Ok(Done { bytes: found.len(), received: 0 });
    }
    let mut part = Part::open(target)?;
    let (mut resumed, mut received) = (part.have > 0, 0);
    loop {
        received += receive(asker, target, &mut part, watch)?;
        let wrong = std::mem::replace(&mut part.hasher, Hasher::new(&Check::Size)).wrong(&part.path)?;
        let Some((found, expected)) = wrong else { break };
        if resumed {
            // what an earlier download left may be the wrong part
            watch.note(&format!("{}: the part that was there does not fit; starting again", target.what));
            resumed = false;
            part.restart(target)?;
            continue;
        }
        std::fs::remove_file(&part.path).map_err(|error| Error::io(&part.path, "remove", error))?;
        return Err(wrong_content(target, target.check.field(), found, expected));
    }
    let synced = part.file.sync_all().and_then(|()| std::fs::rename(&part.path, target.path));
    synced.map_err(|error| Error::io(target.path, "write", error))?;
    #[cfg(unix)]
    if let Some(folder) = target.path.parent() {
        let synced = File::open(folder).and_then(|folder| folder.sync_all()); // the name survives a power failure, too
        synced.map_err(|error| Error::io(folder, "sync", error))?;
    }
    Ok(Done { bytes: part.have, received })
}

fn wrong_content(target: &Target<'_>, field: &'static str, found: String, expected: String) -> Error {
    let (what, address) = (target.what.to_owned(), target.url.to_owned());
    Box::new(WrongContent { what, field, found, expected, address }).into()
}

/// Waits until no other process downloads the same file. The lock ends with the process.
fn lock(target: &Target<'_>, watch: &mut dyn Watch) -> Result<File> {
    let opened = OpenOptions::new().create(true).truncate(false).write(true).open(target.lock);
    let file = opened.map_err(|error| Error::io(target.lock, "create", error))?;
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {}
            // a file system without locks: the last to finish wins, with the same bytes
            Err(TryLockError::Error(_)) => return Ok(file),
        }
        if !std::mem::replace(&mut told, true) {
            watch.note(&format!("{}: another process is downloading it; waiting", target.what));
        }
        if watch.progress(target.before).is_break() {
            return Err(Error::Stopped);
        }
        std::thread::sleep(STEP);
    }
}

/// Receives all that is missing; gives the number of bytes that came.
fn receive(asker: &Asker<'_>, target: &Target<'_>, part: &mut Part, watch: &mut dyn Watch) -> Result<u64> {
    let (mut patience, mut received) = (Patience::default(), 0);
    loop {
        if target.size == Some(part.have) {
            return Ok(received);
        }
        let progress = Progress { done: target.before.done + part.have, ..target.before };
        let ask = Question {
            what: target.what,
            repo: target.repo,
            url: target.url,
            from: part.have,
            facts: false,
            progress,
        };
        let answer = asker.answer(&ask, &mut patience, watch)?;
        if !begins(&answer, target, part)? {
            patience.wait(
                &ask,
                "the server sends another part than was asked for",
                Some(Duration::ZERO),
                watch,
            )?;
            continue;
        }
        let had = part.have;
        let ended = read_body(&answer, target, part, watch);
        received += part.have - had;
        if part.have > had {
            patience.renew();
        }
        let length = answer.header("content-length").and_then(|text| text.parse::<u64>().ok());
        match ended? {
            None if target
                .size
                .or(length.map(|length| had + length))
                .is_none_or(|size| size == part.have) =>
            {
                return Ok(received);
            }
            ended => {
                let why = ended.unwrap_or_else(|| "the connection ended early".into());
                let size = target.size.map_or_else(String::new, |size| format!(" of {size}"));
                patience.wait(
                    &ask,
                    &format!("{} after {}{size} bytes", one_line(&why), part.have),
                    None,
                    watch,
                )?;
            }
        }
    }
}

/// Whether the answer is the rest of the file. A server that ignores ranges sends all of it, so the part begins anew.
fn begins(answer: &Answer, target: &Target<'_>, part: &mut Part) -> Result<bool> {
    match answer.status {
        206 => {
            let range = answer.header("content-range").and_then(|text| text.strip_prefix("bytes "));
            let first = range.and_then(|range| range.split('-').next()?.parse::<u64>().ok());
            if first == Some(part.have) {
                return Ok(true);
            }
            part.restart(target)?;
            Ok(false)
        }
        416 => {
            part.restart(target)?; // the part is longer than the file
            Ok(false)
        }
        _ => {
            if part.have > 0 {
                part.restart(target)?;
            }
            Ok(true)
        }
    }
}

/// Writes the body as it arrives; says why it ended, if not well.
fn read_body(
    answer: &Answer,
    target: &Target<'_>,
    part: &mut Part,
    watch: &mut dyn Watch,
) -> Result<Option<String>> {
    loop {
        let progress = Progress { done: target.before.done + part.have, ..target.before };
        let mut stop = || watch.progress(progress).is_break();
        if stop() {
            return Err(Error::Stopped);
        }
        let bytes = match answer.next(&mut stop) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Ok(None),
            Err(Failure::Stopped) => return Err(Error::Stopped),
            Err(Failure::Lost(why) | Failure::Unreachable(why)) => return Ok(Some(why)),
        };
        if let Some(size) = target.size.filter(|size| part.have + bytes.len() as u64 > *size) {
            std::fs::remove_file(&part.path).map_err(|error| Error::io(&part.path, "remove", error))?;
            return Err(wrong_content(
                target,
                "size",
                format!("more than {size} bytes"),
                format!("{size} bytes"),
            ));
        }
        part.add(&bytes)?;
    }
}
