//! What the assistant says, by a template that does not mark it: the difference between the conversation up to a turn, as the
//! assistant sees it, and up to the turn's end.

use std::ops::Range;

use serde_json::Value;

use super::generation::{CLOSE, OPEN};
use super::record::is_assistant;
use super::template::Rendered;
use crate::{Error, Result};

/// The most bytes of a token that ends a turn.
const LONGEST: usize = 64;

/// A conversation whose turns are looked for.
pub struct Turns<'a> {
    /// Renders messages, with or without what the template writes where the assistant is to speak next.
    pub render: &'a dyn Fn(&[Value], bool) -> Result<Rendered>,
    /// The end of the special token that a text ends with, but for white space, and the token's length.
    pub special: &'a dyn Fn(&str) -> Option<(usize, usize)>,
    /// The conversation.
    pub messages: &'a [Value],
    /// The whole conversation, rendered.
    pub whole: &'a str,
}

impl Turns<'_> {
    /// The parts of the text that the assistant says in the messages from `first` on.
    pub fn spans(&self, first: usize) -> Result<Vec<Range<usize>>> {
        let turns: Vec<usize> =
            (first..self.messages.len()).filter(|&at| is_assistant(&self.messages[at])).collect();
        let by_prefix: Option<Vec<_>> = turns.iter().map(|&at| self.by_prefix(at)).collect();
        match by_prefix {
            Some(spans) if spans.windows(2).all(|pair| pair[0].end <= pair[1].start) => Ok(spans),
            _ => self.by_content(&turns),
        }
    }

    /// The turn of message `at`: from where the assistant is to speak to the end of the turn.
    fn by_prefix(&self, at: usize) -> Option<Range<usize>> {
        let Self { whole, messages, .. } = *self;
        let text = |messages, cue| (self.render)(messages, cue).ok().map(|rendered| rendered.text);
        let (before, start) = match at {
            // nothing is before it: what the template writes for the assistant at the end, it writes here too
            0 => {
                let cued = text(messages, true)?;
                let cue = cued.strip_prefix(whole).filter(|cue| !cue.is_empty())?;
                (0, whole.find(cue)? + cue.len())
            }
            // without the cue the text before is a prefix for certain; the cue may say more than the turn has, such as the
            // begin of a thought
            _ => {
                let before = text(&messages[..at], false)?;
                let start = common(whole, &text(&messages[..at], true)?);
                (whole.starts_with(&before).then_some(before.len())?, start)
            }
        };
        if start < before {
            return None;
        }
        let after = text(&messages[..=at], false)?;
        let special = (self.special)(&after).filter(|(end, length)| end - length >= before);
        if whole.starts_with(&after) {
            // what follows the end of the turn, a line end mostly, is not the assistant's
            let end = special.map_or(after.len(), |(end, _)| end);
            return (start < end).then_some(start..end);
        }
        // a turn that is not the last may look otherwise, without its thoughts: it ends with the same token
        let (end, length) = special?;
        let token = &after[end - length..end];
        let said = messages[at]["content"].as_str().map_or(0, |text| text.matches(token).count());
        let (found, _) = whole[start..].match_indices(token).nth(said)?;
        Some(start..start + found + length)
    }

    /// Finds turns by marks in the messages themselves, for templates whose text before a turn depends on what follows it.
    fn by_content(&self, turns: &[usize]) -> Result<Vec<Range<usize>>> {
        let unclear = || {
            Error::Setting(
                "the chat template does not tell what the assistant says from the rest; put {% generation %} and \
                 {% endgeneration %} around it, or learn everything with --mask none"
                    .into(),
            )
        };
        let mut marked = self.messages.to_vec();
        for &at in turns {
            let content = marked[at]["content"].as_str().ok_or_else(unclear)?;
            let (lead, text) = content.split_at(content.len() - content.trim_start().len());
            let (text, trail) = text.split_at(text.trim_end().len());
            marked[at]["content"] = format!("{lead}{OPEN}{text}{CLOSE}{trail}").into();
        }
        let Rendered { text, mut spans } = (self.render)(&marked, false)?;
        let content = |at: usize| self.messages[at]["content"].as_str().unwrap_or_default();
        let said: Vec<usize> = turns.iter().copied().filter(|&at| !content(at).trim().is_empty()).collect();
        if text != self.whole || spans.len() != said.len() {
            return Err(unclear());
        }
        for (span, at) in spans.iter_mut().zip(said) {
            span.start -= self.own_space(at, span.start);
            // the token that ends the turn follows at once
            let rest = &self.whole[span.end..];
            let lengths = (1..=rest.len().min(LONGEST)).filter(|&length| rest.is_char_boundary(length));
            let token =
                lengths.filter(|&length| (self.special)(&rest[..length]) == Some((length, length))).max();
            span.end += token.unwrap_or(0);
        }
        Ok(spans)
    }

    /// Bytes of white space before `start`, where what message `at` says begins, that the template does not write for the
    /// assistant to go on from: they are the first thing that is said.
    fn own_space(&self, at: usize, start: usize) -> usize {
        let space = |text: &str| text.len() - text.trim_end().len();
        let cued = if at == 0 { None } else { (self.render)(&self.messages[..at], true).ok() };
        cued.map_or(0, |cued| space(&self.whole[..start]).saturating_sub(space(&cued.text)))
    }
}

/// The length of what two texts begin with.
fn common(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}
