//! Shards of one kind, one after the other. The one being written has a temporary name and can be gone on with.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ironhorse_train::format::shards::ShardKind;

use super::journal::ShardFacts;
use crate::read::hash_file;
use crate::{Error, Result};

/// Bytes of a shard's header.
const HEADER: u64 = 1024;

/// A series of shards.
pub struct Shards {
    folder: PathBuf,
    /// The names up to the number: `NAME_train`.
    stem: String,
    kind: ShardKind,
    most: usize,
    finished: Vec<ShardFacts>,
    current: Option<Current>,
    bytes: Vec<u8>,
}

struct Current {
    file: BufWriter<File>,
    path: PathBuf,
    tokens: usize,
}

impl Shards {
    /// A series without shards.
    pub fn new(folder: &Path, stem: String, kind: ShardKind, most: usize) -> Self {
        Self {
            folder: folder.to_owned(),
            stem,
            kind,
            most,
            finished: Vec::new(),
            current: None,
            bytes: Vec::new(),
        }
    }

    /// Goes on after `finished` shards and `tokens` of the next.
    pub fn resume(&mut self, finished: Vec<ShardFacts>, tokens: usize) -> Result<()> {
        for facts in finished {
            self.check_finished(&facts)?;
            self.finished.push(facts);
        }
        let (path, done) = (self.partial_path(), self.final_path());
        // the process died between giving the shard its name and writing that down
        if done.exists() {
            std::fs::rename(&done, &path).map_err(|source| Error::io(&done, "rename", source))?;
        }
        if tokens == 0 {
            return Ok(());
        }
        if tokens >= self.most {
            let problem = format!("has {tokens} tokens by the journal, expected fewer than {}", self.most);
            return Err(Error::input(&path, format!("{problem}; --overwrite starts over")));
        }
        let failed = |source| Error::io(&path, "go on with", source);
        let mut file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let len = HEADER + (tokens * self.kind.size()) as u64;
        let found = file.metadata().map_err(failed)?.len();
        if found < len {
            let problem = format!("is {found} bytes long, expected at least {len}; --overwrite starts over");
            return Err(Error::input(&path, problem));
        }
        file.set_len(len).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed)?;
        self.current = Some(Current { file: BufWriter::with_capacity(1 << 20, file), path, tokens });
        Ok(())
    }

    /// An error unless the next shard is there as the journal says.
    fn check_finished(&self, facts: &ShardFacts) -> Result<()> {
        let (path, expected) = (self.final_path(), HEADER + (facts.tokens * self.kind.size()) as u64);
        let found = std::fs::metadata(&path).map_err(|source| Error::io(&path, "go on after", source))?.len();
        if (facts.file.as_str(), facts.bytes, found) != (self.name().as_str(), expected, expected) {
            let by_journal = format!("{} of {} bytes by the journal", facts.file, facts.bytes);
            let problem = format!("is {found} bytes long, {by_journal}, expected {expected} bytes");
            return Err(Error::input(&path, format!("{problem}; --overwrite starts over")));
        }
        Ok(())
    }

    fn name(&self) -> String {
        format!("{}_{:06}.bin", self.stem, self.finished.len())
    }

    fn final_path(&self) -> PathBuf {
        self.folder.join(self.name())
    }

    fn partial_path(&self) -> PathBuf {
        self.folder.join(format!(".{}.partial", self.name()))
    }

    /// Appends tokens; a full shard is finished and the next begun.
    pub fn push(&mut self, mut tokens: &[u32]) -> Result<()> {
        while !tokens.is_empty() {
            let room = self.most - self.current.as_ref().map_or(0, |current| current.tokens);
            let (now, later) = tokens.split_at(room.min(tokens.len()));
            self.append(now)?;
            tokens = later;
            if self.current.as_ref().is_some_and(|current| current.tokens == self.most) {
                self.finish_current()?;
            }
        }
        Ok(())
    }

    fn append(&mut self, tokens: &[u32]) -> Result<()> {
        self.bytes.clear();
        match self.kind {
            // the vocabulary is at most 65536, so that every id fits
            ShardKind::U16 => tokens.iter().for_each(|&id| self.bytes.extend((id as u16).to_le_bytes())),
            ShardKind::U32 => tokens.iter().for_each(|&id| self.bytes.extend(id.to_le_bytes())),
        }
        let mut current = match self.current.take() {
            Some(current) => current,
            None => self.begin()?,
        };
        let written = current.file.write_all(&self.bytes);
        written.map_err(|source| Error::io(&current.path, "write", source))?;
        current.tokens += tokens.len();
        self.current = Some(current);
        Ok(())
    }

    fn begin(&self) -> Result<Current> {
        let path = self.partial_path();
        let file = File::create(&path).map_err(|source| Error::io(&path, "create", source))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let header = file.write_all(&[0; HEADER as usize]);
        header.map_err(|source| Error::io(&path, "write", source))?;
        Ok(Current { file, path, tokens: 0 })
    }

    /// Writes the header and gives the shard its name.
    fn finish_current(&mut self) -> Result<()> {
        let Some(Current { mut file, path, tokens }) = self.current.take() else { return Ok(()) };
        let header = self.kind.header(&path, tokens)?;
        let failed = |source| Error::io(&path, "write", source);
        file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&header)).map_err(failed)?;
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(failed)?;
        drop(file);
        let to = self.final_path();
        std::fs::rename(&path, &to).map_err(|source| Error::io(&to, "rename into place", source))?;
        let end = hash_file(&to)?;
        self.finished.push(ShardFacts { file: self.name(), tokens, bytes: end.bytes, sha256: end.sha256 });
        Ok(())
    }

    /// Makes what was pushed durable. Returns the shards that are finished and the tokens of the one that is not.
    pub fn sync(&mut self) -> Result<(Vec<ShardFacts>, usize)> {
        if let Some(current) = &mut self.current {
            let synced = current.file.flush().and_then(|()| current.file.get_ref().sync_data());
            synced.map_err(|source| Error::io(&current.path, "write", source))?;
        }
        Ok((self.finished.clone(), self.current.as_ref().map_or(0, |current| current.tokens)))
    }

    /// Finishes the last shard.
    pub fn finish(&mut self) -> Result<Vec<ShardFacts>> {
        self.finish_current()?;
        Ok(self.finished.clone())
    }
}
