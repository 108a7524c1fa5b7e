//! The one decoder: sequences join and leave the rows of a cache, and every step continues all of them.
//!
//! A step takes one token of each sequence that is writing; what room is left goes to prompts, in the order they came, so that a long
//! one is read in pieces and nobody waits for its end. What a sequence writes depends on its own tokens, sampler and seed. The
//! others only decide which program computes it: on the CPU engine all of them give the same bits, on CUDA products of other
//! heights may round otherwise.

use super::likely::Likely;
use super::sample::{Sampler, SamplerScratch};
use crate::rng::Rng;
use crate::session::{CacheToken, Fed, Session};
use crate::{Error, Result};

/// A text to continue.
#[derive(Clone, Debug)]
pub struct Job {
    /// The beginning; must not be empty.
    pub prompt: Vec<u32>,
    /// Only tokens below this are chosen.
    pub vocab: usize,
    /// The most tokens to add.
    pub tokens: usize,
    /// How far back the model may look, at most what the session has room for.
    pub context: Option<usize>,
    /// End before any of these tokens.
    pub stop: Vec<u32>,
    /// How to choose.
    pub sampler: Sampler,
    /// Whether the older half is forgotten when the context is full; else the text ends there, and a prompt that is too long is refused.
    pub slides: bool,
    /// What is told beside the tokens.
    pub wants: Wants,
}

/// What is told beside the tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// How likely each token was, with this many others.
    pub logprobs: Option<usize>,
    /// The same of the tokens of the prompt; needs a session with all logits.
    pub prompt: bool,
}

/// A token that was written.
#[derive(Clone, Debug)]
pub struct New {
    /// It.
    pub token: u32,
    /// If [`Wants::logprobs`].
    pub likely: Option<Likely>,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The text ended at a token of [`Job::stop`].
    Stop,
    /// [`Job::tokens`] are there, or the context is full.
    Length,
}

/// What a step did for one sequence.
#[derive(Clone, Debug)]
pub enum Event {
    /// How likely the next token of the prompt was, from its second on, if [`Wants::prompt`].
    Prompt(Likely),
    /// A new token.
    Token(New),
    /// Nothing more comes; its row is free.
    End(End),
}

/// A sequence in a row of the cache.
struct Sequence {
    id: u64,
    job: Job,
    rng: Rng,
    /// Prompt and what was written.
    all: Vec<u32>,
    /// The first token that is in the cache.
    start: usize,
    /// Tokens before this one are in the cache.
    fed: usize,
    context: usize,
    written: usize,
    scored: bool,
}

/// Sequences that are written together.
pub struct Decoder<'a> {
    session: &'a mut Session,
    rows: Vec<Option<Sequence>>,
    /// The most tokens of a step.
    most: usize,
    context: usize,
    all_logits: bool,
    next: u64,
    scratch: SamplerScratch,
    logits: Vec<f32>,
}

/// The part of a step that belongs to one sequence.
#[derive(Clone, Copy)]
struct Piece {
    row: usize,
    /// The number of its first token in the step, and how many it has.
    first: usize,
    count: usize,
    /// The number of its pick, if the next token follows this piece.
    pick: Option<usize>,
}

impl<'a> Decoder<'a> {
    /// A decoder without sequences, with as many rows as the session serves.
    pub fn new(session: &'a mut Session) -> Result<Self> {
        let serving = session.serves()?;
        let own = session.config().max_seq_len();
        Ok(Self {
            rows: (0..serving.sequences).map(|_| None).collect(),
            most: serving.most(),
            context: serving.context.unwrap_or(own),
            all_logits: serving.all_logits,
            session,
            next: 0,
            scratch: SamplerScratch::default(),
            logits: Vec::new(),
        })
    }

    /// Whether no sequence is there.
    pub fn is_empty(&self) -> bool {
        self.rows.iter().all(Option::is_none)
    }

    /// Whether another sequence may join.
    pub fn has_room(&self) -> bool {
        self.rows.iter().any(Option::is_none)
    }

    /// How many sequences are there.
    pub fn len(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// Positions that a sequence may have.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Adds a sequence; gives the number that its events carry.
    pub fn join(&mut self, job: Job) -> Result<u64> {
        let context = self.check(&job)?;
        let free = self.rows.iter().position(Option::is_none);
        let row = free.ok_or_else(|| {
            Error::input("sequences to write", self.rows.len() + 1, "no more than there are rows")
        })?;
        let id = self.next;
        self.next += 1;
        let start = job.prompt.len().saturating_sub(context);
        let (all, rng) = (job.prompt.clone(), job.sampler.rng());
        let scored = job.wants.prompt && job.wants.logprobs.is_some();
        self.rows[row] = Some(Sequence { id, job, rng, all, start, fed: start, context, written: 0, scored });
        Ok(id)
    }

    /// Refuses what cannot be written; gives how far back the model looks.
    pub fn check(&self, job: &Job) -> Result<usize> {
        job.sampler.validate()?;
        let vocab = self.session.config().vocab_size();
        let context = job.context.map_or(self.context, |context| context.clamp(1, self.context));
        if job.prompt.is_empty() {
            return Err(Error::input("the prompt", "empty", "at least one token to continue from"));
        }
        if let Some(token) = job.prompt.iter().find(|&&token| token as usize >= vocab) {
            let expected = format!("less than the model's vocabulary of {vocab}");
            return Err(Error::input("prompt token", token, expected));
        }
        if !job.slides && job.prompt.len() > context {
            let found = format!("{} tokens", job.prompt.len());
            return Err(Error::input("the prompt", found, format!("at most {context}, the context")));
        }
        if job.wants.prompt && !self.all_logits {
            return Err(Error::Unsupported("this session was not made for logits of every token".into()));
        }
        Ok(context)
    }

    /// Removes a sequence before its end; nothing happens if it is not there.
    pub fn leave(&mut self, id: u64) {
        for row in &mut self.rows {
            if row.as_ref().is_some_and(|sequence| sequence.id == id) {
                *row = None;
            }
        }
    }

    /// Continues all sequences, and tells what came of it. An error of `on` ends the step.
    pub fn step(&mut self, mut on: impl FnMut(u64, Event) -> Result<()>) -> Result<()> {
        self.end_done(&mut on)?;
        let (tokens, pieces, picks) = self.plan();
        if tokens.is_empty() {
            return Ok(());
        }
        let scores = |piece: &Piece| self.rows[piece.row].as_ref().is_some_and(|s| s.scores(s.fed));
        // Every token is a pick where a prompt is scored: only the program with all logits has room for them.
        let every: Vec<usize> = (0..tokens.len()).collect();
        let fed = self.session.feed_rows(&tokens, if pieces.iter().any(scores) { &every } else { &picks })?;
        for piece in pieces {
            self.take(piece, fed, &mut on)?;
        }
        self.end_done(&mut on)
    }

    /// Ends the sequences that have all their tokens, or whose context is full.
    fn end_done(&mut self, on: &mut impl FnMut(u64, Event) -> Result<()>) -> Result<()> {
        for row in &mut self.rows {
            let Some(sequence) = row else { continue };
            let read = !sequence.scored || sequence.fed + 1 >= sequence.job.prompt.len();
            let full = !sequence.job.slides && sequence.all.len() > sequence.context;
            if read && (sequence.written >= sequence.job.tokens || full) {
                let id = sequence.id;
                *row = None;
                on(id, Event::End(End::Length))?;
            }
        }
        Ok(())
    }

    /// The tokens of the next step in the order of rows and positions, whose they are, and after which a token is chosen.
    fn plan(&mut self) -> (Vec<CacheToken>, Vec<Piece>, Vec<usize>) {
        let mut counts = vec![0; self.rows.len()];
        let mut left = self.most;
        for (count, sequence) in counts.iter_mut().zip(&mut self.rows) {
            let Some(sequence) = sequence else { continue };
            sequence.slide();
            if sequence.pending() == 1 {
                *count = 1;
                left -= 1;
            }
        }
        let mut prompts: Vec<(u64, usize)> = self
            .rows
            .iter()
            .enumerate()
            .filter_map(|(row, sequence)| {
                sequence.as_ref().filter(|sequence| sequence.pending() > 1).map(|sequence| (sequence.id, row))
            })
            .collect();
        prompts.sort_unstable();
        for (_, row) in prompts {
            let pending = self.rows[row].as_ref().map_or(0, Sequence::pending);
            counts[row] = pending.min(left);
            left -= counts[row];
        }
        let (mut tokens, mut pieces, mut picks) = (Vec::new(), Vec::new(), Vec::new());
        for (row, (sequence, &count)) in self.rows.iter().zip(&counts).enumerate() {
            let Some(sequence) = sequence.as_ref().filter(|_| count > 0) else { continue };
            let (first, fed) = (tokens.len(), sequence.fed);
            tokens.extend((fed..fed + count).map(|at| CacheToken {
                row,
                position: at - sequence.start,
                token: sequence.all[at],
            }));
            let chooses = fed + count == sequence.all.len() && sequence.written < sequence.job.tokens;
            let pick = chooses.then(|| {
                picks.push(tokens.len() - 1);
                picks.len() - 1
            });
            pieces.push(Piece { row, first, count, pick });
        }
        (tokens, pieces, picks)
    }

    /// What a step gave one sequence.
    fn take(&mut self, piece: Piece, fed: Fed, on: &mut impl FnMut(u64, Event) -> Result<()>) -> Result<()> {
        let Piece { row, first, count, pick } = piece;
        let Some(sequence) = &mut self.rows[row] else { return Ok(()) };
        let (id, from, vocab) = (sequence.id, sequence.fed, self.session.config().vocab_size());
        sequence.fed += count;
        if sequence.scores(from) {
            let top = sequence.job.wants.logprobs.unwrap_or(0);
            for at in from..(from + count).min(sequence.job.prompt.len() - 1) {
                self.session.row_logits(fed, first + at - from, &mut self.logits)?;
                on(id, Event::Prompt(Likely::of(&self.logits[..vocab], sequence.all[at + 1], top)))?;
            }
        }
        let Some(pick) = pick else { return Ok(()) };
        let last = fed.row(first + count - 1, pick);
        let (sampler, choice) = (sequence.job.sampler, sequence.job.vocab.min(vocab));
        let uniform = sampler.uniform(&mut sequence.rng);
        let chosen = self.session.pick_row(fed, last, choice, &sampler.choice(uniform))?;
        if chosen.is_none() || sequence.job.wants.logprobs.is_some() {
            self.session.row_logits(fed, last, &mut self.logits)?;
        }
        let token = match chosen {
            Some(token) => token,
            None => sampler.pick_at(&self.logits[..choice], uniform, &mut self.scratch)? as u32,
        };
        if sequence.job.stop.contains(&token) {
            self.rows[row] = None;
            return on(id, Event::End(End::Stop));
        }
        sequence.all.push(token);
        sequence.written += 1;
        let likely = sequence.job.wants.logprobs.map(|top| Likely::of(&self.logits[..vocab], token, top));
        on(id, Event::Token(New { token, likely }))
    }
}

impl Sequence {
    /// Tokens that are not in the cache yet.
    fn pending(&self) -> usize {
        self.all.len() - self.fed
    }

    /// Whether the tokens of the prompt from number `fed` on are scored.
    fn scores(&self, fed: usize) -> bool {
        self.scored && fed + 1 < self.job.prompt.len()
    }

    /// Forgets the older half of a full context.
    fn slide(&mut self) {
        if self.job.slides && self.all.len() - self.start > self.context {
            self.start = self.all.len() - (self.context / 2).max(1);
            self.fed = self.start;
        }
    }
}
