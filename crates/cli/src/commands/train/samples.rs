//! The lines of chat data as samples or pairs of them: read, split for validation, cut, and what is left out of them.

use super::{TrainArgs, pairs};
use anyhow::{Context, Result, bail};
use ironhorse::text::chat::{Chat, ChatFiles, Counts};
use ironhorse::train::Error as TrainError;
use ironhorse::train::data::survey::facts_of_memory;
use ironhorse::train::data::{Sample, SourceFacts};
use ironhorse::train::run::Control;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What chats are read with.
pub struct Reading<'a> {
    pub chat: &'a Chat,
    pub args: &'a TrainArgs,
    pub control: &'a Control,
}

/// A sample or, of preferences, two of them, the chosen one first.
pub struct Unit {
    pub samples: Vec<Sample>,
    path: Arc<Path>,
    line: u64,
}

impl Unit {
    /// Its tokens.
    pub fn length(&self) -> usize {
        self.samples.iter().map(|sample| sample.ids.len()).sum()
    }

    fn place(&self) -> String {
        format!("{} line {}", self.path.display(), self.line)
    }

    /// A number from 0 to 1: of a sample its own, of a pair that of its question, which several pairs may share.
    fn lot(&self) -> f64 {
        match &self.samples[..] {
            [chosen, _] => {
                let ids: Vec<i32> = chosen.prompt().into_iter().map(|id| id as i32).collect();
                Sample { learned: vec![false; ids.len()], ids }.lot()
            }
            samples => samples.first().map_or(0.0, Sample::lot),
        }
    }

    /// Why a pair cannot be learned: `whole` are the answers that had something to learn before they were cut.
    fn useless(&self, whole: usize) -> Option<Useless> {
        let left = self.samples.iter().filter(|sample| sample.targets() > 0).count();
        match &self.samples[..] {
            samples if whole < samples.len() => Some(Useless::Silent),
            samples if left < samples.len() => Some(Useless::Question),
            [chosen, rejected] if chosen == rejected => Some(Useless::Alike),
            _ => None,
        }
    }
}

/// Why a pair is left out.
#[derive(Clone, Copy)]
enum Useless {
    Equal,
    Silent,
    Question,
    Alike,
}

impl Useless {
    const ALL: [Self; 4] = [Self::Equal, Self::Silent, Self::Question, Self::Alike];

    fn text(self) -> &'static str {
        match self {
            Self::Equal => "chosen and rejected are equal",
            Self::Silent => "of an answer nothing is learned",
            Self::Question => "the question alone is too long, and an answer is all cut off",
            Self::Alike => "the answers are too long, and differ only in what is cut off",
        }
    }
}

/// How many lines something is true of, and which is the first.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub count: u64,
    pub first: String,
}

impl Tally {
    /// Counts a line.
    pub fn add(&mut self, place: impl FnOnce() -> String) {
        if self.count == 0 {
            self.first = place();
        }
        self.count += 1;
    }
}

/// Chats that were read.
#[derive(Default)]
pub struct Read {
    pub units: Vec<Unit>,
    pub counts: Counts,
    pub facts: Vec<SourceFacts>,
    /// Lines whose roles are out of order, and what is wrong with the first.
    pub disorder: Tally,
    /// Pairs that were cut.
    cut: Tally,
    /// Pairs that are left out, as in [`Useless::ALL`].
    useless: [Tally; 4],
}

impl Reading<'_> {
    /// Reads all lines. Pairs whose answers are equal are left out.
    pub fn read(&self, paths: &[PathBuf]) -> Result<Read> {
        let files = ChatFiles::new(paths)?;
        let mut read = Read::default();
        let mask = self.args.template.mask();
        if self.args.dpo {
            for line in files.pairs(self.chat, mask) {
                let line = line?;
                self.add(&mut read, (&line.path, line.line), line.pair.into(), line.disorder)?;
            }
        } else {
            for line in files.samples(self.chat, mask, None) {
                let line = line?;
                self.add(&mut read, (&line.path, line.line), vec![line.sample], line.disorder)?;
            }
        }
        for facts in &mut read.facts {
            facts.path = std::path::absolute(&facts.path).unwrap_or_else(|_| facts.path.clone());
        }
        if read.units.is_empty() {
            read.refuse_useless(paths)?;
        }
        Ok(read)
    }

    /// Adds what a line of a file holds.
    fn add(
        &self,
        read: &mut Read,
        (path, line): (&Path, u64),
        samples: Vec<Sample>,
        disorder: Option<String>,
    ) -> Result<()> {
        if self.control.stop_reason().is_some() {
            return Err(TrainError::Stopped.into());
        }
        if read.facts.last().is_none_or(|facts| facts.path != path) {
            let bytes = std::fs::read(path).with_context(|| format!("{}: cannot read", path.display()))?;
            read.facts.push(SourceFacts { tokens: 0, max_token: 0, ..facts(path, &bytes) });
        }
        let known = read.units.last().filter(|unit| *unit.path == *path).map(|unit| unit.path.clone());
        let unit = Unit { samples, path: known.unwrap_or_else(|| path.into()), line };
        if let Some(facts) = read.facts.last_mut() {
            facts.tokens += unit.length() as u64;
            let ids = unit.samples.iter().flat_map(|sample| &sample.ids);
            facts.max_token = facts.max_token.max(ids.copied().max().unwrap_or(0).unsigned_abs());
        }
        if let Some(what) = disorder {
            read.disorder.add(|| format!("{} {what}", unit.place()));
        }
        match &unit.samples[..] {
            [chosen, rejected] if chosen == rejected => {
                read.useless[Useless::Equal as usize].add(|| unit.place());
            }
            samples if samples.iter().all(|sample| !sample.ids.is_empty()) => read.units.push(unit),
            _ => {}
        }
        Ok(())
    }
}

fn facts(path: &Path, bytes: &[u8]) -> SourceFacts {
    SourceFacts { path: path.to_owned(), ..facts_of_memory("chat", bytes) }
}

impl Read {
    /// Takes out a part for validation. What a sample holds decides, of a pair the question, so that the part is the same in every
    /// run and no sample is on both sides. A fraction above 0 takes at least one of several samples.
    pub fn split(&mut self, fraction: f64) -> Self {
        let part = Self { facts: self.facts.clone(), ..Self::default() };
        if fraction <= 0.0 || self.units.len() < 2 {
            return part;
        }
        let least = self.units.iter().map(Unit::lot).fold(f64::INFINITY, f64::min);
        let all = std::mem::take(&mut self.units);
        let (val, train): (Vec<_>, Vec<_>) = all.into_iter().partition(|unit| {
            let lot = unit.lot();
            lot < fraction || lot <= least
        });
        self.units = train;
        Self { units: val, ..part }
    }

    /// The samples, none longer than `seq`, counted. One of which nothing is learned would only cost time.
    pub fn cut(&mut self, seq: usize) -> Vec<Sample> {
        let mut samples: Vec<Sample> = self.units.drain(..).flat_map(|unit| unit.samples).collect();
        for sample in &mut samples {
            let cut = sample.cut(seq);
            self.counts.add_sample(sample, cut);
        }
        samples.retain(|sample| sample.targets() > 0);
        samples
    }

    /// The pairs, none longer than `seq` together, counted. One that says nothing of which answer is better is left out.
    pub fn cut_pairs(&mut self, seq: usize) -> Vec<[Sample; 2]> {
        let mut made = Vec::with_capacity(self.units.len());
        for mut unit in self.units.drain(..) {
            let whole = unit.samples.iter().filter(|sample| sample.targets() > 0).count();
            let cut = pairs::cut(&mut unit.samples, seq);
            if let Some(why) = unit.useless(whole) {
                self.useless[why as usize].add(|| unit.place());
                continue;
            }
            if cut.iter().any(|&cut| cut > 0) {
                self.cut.add(|| unit.place());
            }
            unit.samples.iter().zip(cut).for_each(|(sample, cut)| self.counts.add_sample(sample, cut));
            made.extend(<[Sample; 2]>::try_from(unit.samples));
        }
        made
    }

    /// What of pairs was cut and left out, as the end of a line; empty if nothing.
    pub fn pairs_text(&self) -> String {
        let mut text = String::new();
        if self.cut.count > 0 {
            let Counts { truncated, cut, .. } = self.counts;
            text += &format!(
                "; {truncated} of pairs longer than a row were cut by {cut} in all, because the answers are too long (first: {})",
                self.cut.first
            );
        }
        for (why, tally) in Useless::ALL.into_iter().zip(&self.useless).filter(|(_, tally)| tally.count > 0) {
            text += &format!("; {} left out: {} (first: {})", tally.count, why.text(), tally.first);
        }
        text
    }

    /// The error of pairs of which none is left, where any were left out.
    pub fn refuse_useless(&self, paths: &[PathBuf]) -> Result<()> {
        let all: u64 = self.useless.iter().map(|tally| tally.count).sum();
        if all == 0 {
            return Ok(());
        }
        let long =
            [Useless::Question, Useless::Alike].iter().any(|&why| self.useless[why as usize].count > 0);
        let help = if long { "give a larger --seq" } else { "give pairs whose answers differ" };
        let file = paths.first().map_or_else(String::new, |path| path.display().to_string());
        bail!("{file}: none of {all} pairs can be learned{}; {help}", self.pairs_text())
    }
}
