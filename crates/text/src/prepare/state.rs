//! What is decided in the order of the inputs: which documents are new, what each is for, where shards end.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::time::{Duration, Instant};

use ironhorse_train::format::shards::ShardKind;

use super::encode::{Encoded, Piece};
use super::journal::{FORMAT, Identity, InputFacts, Journal, Manifest, TokenizerFacts, VERSION, hashes_path};
use super::shards::Shards;
use super::{Progress, Settings};
use crate::read::{Input, Use};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// How often it is written down how far the work is.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// A preparation on its way.
pub struct State<'a> {
    settings: &'a Settings,
    journal: Journal,
    train: Shards,
    val: Shards,
    seen: HashSet<u128>,
    /// The hashes of `seen` in the order in which they came; only with --dedup.
    hashes: Option<BufWriter<File>>,
    read: u64,
    saved: Instant,
}

impl<'a> State<'a> {
    /// Begins, or goes on with what a journal says.
    pub fn new(
        settings: &'a Settings,
        tokenizer: &Tokenizer,
        identity: Identity,
        journal: Option<Journal>,
    ) -> Result<Self> {
        let kind = ShardKind::for_vocab(tokenizer.vocab_size());
        let shards =
            |of| Shards::new(&settings.out, format!("{}_{of}", settings.name), kind, settings.shard_tokens);
        let journal = journal.unwrap_or(Journal {
            identity,
            inputs: Vec::new(),
            units: 0,
            crc: 0,
            read: 0,
            counts: Default::default(),
            train: Default::default(),
            val: Default::default(),
            current: None,
            hashes: 0,
        });
        let (mut train, mut val) = (shards("train"), shards("val"));
        train.resume(journal.train.0.clone(), journal.train.1)?;
        val.resume(journal.val.0.clone(), journal.val.1)?;
        let (read, saved) = (journal.read, Instant::now());
        let mut state =
            Self { settings, journal, train, val, seen: HashSet::new(), hashes: None, read, saved };
        if settings.dedup {
            state.open_hashes()?;
        }
        state.save()?; // from here on there is always a place to go on from
        Ok(state)
    }

    fn open_hashes(&mut self) -> Result<()> {
        let path = hashes_path(self.settings);
        let failed = |source| Error::io(&path, "go on with", source);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        let len = self.journal.hashes * 16;
        let mut bytes = Vec::new();
        Read::by_ref(&mut file).take(len).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 != len {
            let problem =
                format!("is {} bytes long, expected at least {len}; --overwrite starts over", bytes.len());
            return Err(Error::input(&path, problem));
        }
        self.seen.extend(bytes.as_chunks::<16>().0.iter().map(|hash| u128::from_le_bytes(*hash)));
        file.set_len(len).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed)?;
        self.hashes = Some(BufWriter::new(file));
        Ok(())
    }

    /// The input to go on with, units of it that are done, and their checksum.
    pub fn position(&self) -> (usize, u64, u32) {
        (self.journal.inputs.len(), self.journal.units, self.journal.crc)
    }

    /// How far it is.
    pub fn progress(&self, total: u64) -> Progress {
        let counts = &self.journal.counts;
        Progress {
            read: self.read,
            total,
            tokens: counts.train_tokens + counts.val_tokens,
            documents: counts.train_documents + counts.val_documents,
        }
    }

    /// Writes the next unit. After an error the last place that was saved counts.
    pub fn write(&mut self, unit: Encoded) -> Result<()> {
        let mut at = 0;
        for piece in &unit.pieces {
            let tokens = &unit.tokens[at..at + piece.tokens];
            at += piece.tokens;
            self.piece(piece, tokens)?;
        }
        self.journal.counts.add(&unit.counts);
        self.read = self.journal.read + unit.read;
        self.journal.units = unit.number + 1;
        self.journal.crc = unit.crc;
        if let Some(end) = unit.end {
            self.journal.read += end.bytes;
            let path = String::new(); // the manifest has it
            self.journal.inputs.push(InputFacts { path, bytes: end.bytes, sha256: end.sha256 });
            (self.journal.units, self.journal.crc) = (0, 0);
        }
        if self.saved.elapsed() >= SAVE_EVERY { self.save() } else { Ok(()) }
    }

    fn piece(&mut self, piece: &Piece, tokens: &[u32]) -> Result<()> {
        if let Some(hash) = piece.hash {
            let chosen = if hash.fraction() < self.settings.val { Use::Val } else { Use::Train };
            let purpose = piece.purpose.unwrap_or(chosen);
            let new = !self.settings.dedup || self.seen.insert(hash.0);
            self.journal.current = new.then_some(purpose);
            let counts = &mut self.journal.counts;
            match self.journal.current {
                None => counts.duplicates += 1,
                Some(Use::Train) => counts.train_documents += 1,
                Some(Use::Val) => counts.val_documents += 1,
            }
            if let Some(file) = self.hashes.as_mut().filter(|_| new) {
                let written = file.write_all(&hash.0.to_le_bytes());
                written.map_err(|source| Error::io(&hashes_path(self.settings), "write", source))?;
                self.journal.hashes += 1;
            }
        }
        let counts = &mut self.journal.counts;
        let shards = match self.journal.current {
            None => return Ok(()),
            Some(Use::Train) => {
                counts.train_tokens += tokens.len() as u64;
                &mut self.train
            }
            Some(Use::Val) => {
                counts.val_tokens += tokens.len() as u64;
                &mut self.val
            }
        };
        counts.bytes += piece.bytes;
        shards.push(tokens)
    }

    /// Writes down how far it is.
    pub fn save(&mut self) -> Result<()> {
        if let Some(file) = &mut self.hashes {
            let synced = file.flush().and_then(|()| file.get_ref().sync_data());
            synced.map_err(|source| Error::io(&hashes_path(self.settings), "write", source))?;
        }
        self.journal.train = self.train.sync()?;
        self.journal.val = self.val.sync()?;
        self.journal.write(self.settings)?;
        self.saved = Instant::now();
        Ok(())
    }

    /// Finishes the last shards, writes the tokenizer's files and the manifest.
    pub fn finish(
        mut self,
        inputs: &[Input],
        tokenizer: &Tokenizer,
        eot: u32,
        settings: &Settings,
    ) -> Result<Manifest> {
        let counts = self.journal.counts.clone();
        if counts.train_tokens + counts.val_tokens == 0 {
            Journal::remove(settings);
            let problem = "no document has any text, so there is nothing to write";
            return Err(Error::input(&inputs[0].path, problem));
        }
        self.save()?; // with all units done: from here on only this is repeated
        let (train, val) = (self.train.finish()?, self.val.finish()?);
        for (name, bytes) in tokenizer.files()? {
            let path = settings.out.join(name);
            ironhorse_train::format::atomic::write_file(&path, |sink| sink.put(&bytes))?;
        }
        let facts = TokenizerFacts {
            name: tokenizer.name().to_owned(),
            sha256: tokenizer.sha256().to_owned(),
            vocab_size: tokenizer.vocab_size(),
            eot,
        };
        let names = inputs.iter().map(|input| input.path.display().to_string());
        let inputs = names.zip(self.journal.inputs.clone()).map(|(path, facts)| InputFacts { path, ..facts });
        let manifest = Manifest {
            format: FORMAT.into(),
            version: VERSION,
            tokenizer: facts,
            train,
            val,
            counts,
            inputs: inputs.collect(),
            identity: self.journal.identity.clone(),
        };
        manifest.write(&settings.out)?;
        Journal::remove(settings);
        Ok(manifest)
    }
}
