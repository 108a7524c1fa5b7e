//! What the assistant says, by a template that does not mark it: the difference between the conversation up to a turn, as the
//! assistant sees it, and up to the turn's end.

use std::ops::Range;

use serde_json::Value;

use super::generation::{CLOSE, OPEN};
use super::record::is_assistant;
use super::template::Rendered;
use crate::{Error, Result};

/// Renders messages, with or without what a template writes where the assistant is to speak next.
pub type Render<'a> = &'a dyn Fn(&[Value], bool) -> Result<Rendered>;
/// The end of the special token that a text ends with, but for white space, and the token's length.
pub type SpecialEnd<'a> = &'a dyn Fn(&str) -> Option<(usize, usize)>;

/// The parts of `whole`, which is all messages rendered, that the assistant says.
pub fn spans(
    render: Render<'_>,
    messages: &[Value],
    whole: &str,
    ends: SpecialEnd<'_>,
) -> Result<Vec<Range<usize>>> {
    let turns: Vec<usize> = (0..messages.len()).filter(|&at| is_assistant(&messages[at])).collect();
    let by_prefix: Option<Vec<_>> =
        turns.iter().map(|&at| by_prefix(render, messages, at, whole, ends)).collect();
    match by_prefix {
        Some(spans) if spans.windows(2).all(|pair| pair[0].end <= pair[1].start) => Ok(spans),
        _ => by_content(render, messages, &turns, whole, ends),
    }
}

/// The turn of message `at`: from where the assistant is to speak to the end of the turn.
fn by_prefix(
    render: Render<'_>,
    messages: &[Value],
    at: usize,
    whole: &str,
    ends: SpecialEnd<'_>,
) -> Option<Range<usize>> {
    // without the cue for the assistant the text before is a prefix for certain; the cue may say more than the turn has,
    // such as the begin of a thought
    let before = if at == 0 { String::new() } else { render(&messages[..at], false).ok()?.text };
    let cued = if at == 0 { String::new() } else { render(&messages[..at], true).ok()?.text };
    let start = common(whole, &cued);
    if start < before.len() || !whole.starts_with(&before) {
        return None;
    }
    let after = render(&messages[..=at], false).ok()?.text;
    let special = ends(&after).filter(|(end, length)| end - length >= before.len());
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

/// The length of what two texts begin with.
fn common(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

/// Marks in the messages themselves, for templates whose text before a turn depends on what follows it.
fn by_content(
    render: Render<'_>,
    messages: &[Value],
    turns: &[usize],
    whole: &str,
    ends: SpecialEnd<'_>,
) -> Result<Vec<Range<usize>>> {
    let unclear = || {
        Error::Setting(
            "the chat template does not tell what the assistant says from the rest; put {% generation %} and \
             {% endgeneration %} around it, or learn everything with --mask none"
                .into(),
        )
    };
    let mut marked = messages.to_vec();
    for &at in turns {
        let content = marked[at]["content"].as_str().ok_or_else(unclear)?;
        let (lead, text) = content.split_at(content.len() - content.trim_start().len());
        let (text, trail) = text.split_at(text.trim_end().len());
        marked[at]["content"] = format!("{lead}{OPEN}{text}{CLOSE}{trail}").into();
    }
    let Rendered { text, mut spans } = render(&marked, false)?;
    let says = |&&at: &&usize| messages[at]["content"].as_str().is_some_and(|text| !text.trim().is_empty());
    let said: Vec<usize> = turns.iter().filter(says).copied().collect();
    if text != whole || spans.len() != said.len() {
        return Err(unclear());
    }
    for (span, at) in spans.iter_mut().zip(said) {
        span.start -= own_space(render, &messages[..at], &whole[..span.start]);
        // the token that ends the turn follows at once
        let rest = &whole[span.end..];
        let token = (1..=rest.len().min(LONGEST)).filter(|&length| rest.is_char_boundary(length));
        let token = token.filter(|&length| ends(&rest[..length]) == Some((length, length))).max();
        span.end += token.unwrap_or(0);
    }
    Ok(spans)
}

/// Bytes of white space at the end of `before`, the text up to what is said, that the template does not write for the
/// assistant to go on from: they are the first thing that is said.
fn own_space(render: Render<'_>, messages: &[Value], before: &str) -> usize {
    let space = |text: &str| text.len() - text.trim_end().len();
    let cued = if messages.is_empty() { None } else { render(messages, true).ok() };
    cued.map_or(0, |cued| space(before).saturating_sub(space(&cued.text)))
}

/// The most bytes of a token that ends a turn.
const LONGEST: usize = 64;
