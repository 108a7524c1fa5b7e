//! A tiny template language: text with choices and with words that a cast fills in.
//!
//! | written | becomes |
//! | --- | --- |
//! | `[a\|b\|c]` | one of the alternatives, each equally likely; they may be templates themselves, or empty |
//! | `{thing}` | the cast's word for `thing` |
//! | `{Thing}` | the same with a capital letter |
//! | `{a thing}` `{A thing}` | the same after "a" or "an" |

use crate::rng::Rng;
use std::borrow::Cow;

/// The words of one story by name, in small letters: who is in it, where, with what. Every cast has the same names in the
/// same order, so that a template can say where a word is.
#[derive(Debug)]
pub(super) struct Cast {
    words: Vec<(&'static str, Cow<'static, str>)>,
}

impl Cast {
    /// One without words, with room for this many.
    pub(super) fn with_capacity(names: usize) -> Self {
        Self { words: Vec::with_capacity(names) }
    }

    /// Sets the words of a name.
    pub(super) fn set(&mut self, name: &'static str, words: impl Into<Cow<'static, str>>) {
        self.words.push((name, words.into()));
    }

    /// Sets the words of several names.
    pub(super) fn set_all<const N: usize>(&mut self, names: [&'static str; N], words: [&'static str; N]) {
        names.into_iter().zip(words).for_each(|(name, words)| self.set(name, words));
    }

    /// Sets three names to pronouns: he/she, him/her, his/her.
    pub(super) fn set_pronouns(&mut self, names: [&'static str; 3], female: bool) {
        self.set_all(names, if female { ["she", "her", "her"] } else { ["he", "him", "his"] });
    }

    /// The index of a name's words.
    fn place(&self, name: &str) -> Option<usize> {
        self.words.iter().position(|(own, _)| *own == name)
    }
}

// Every run without data begins by making megabytes of this text, in tests with little optimisation: a template is read
// once, names are looked up then, and the loops over bytes are plain ones.

/// A template that was read.
#[derive(Debug)]
pub(super) struct Template(Vec<Part>);

#[derive(Debug)]
enum Part {
    Text(String),
    Word(Word),
    Choice(Vec<Template>),
}

/// What stands in braces.
#[derive(Debug)]
struct Word {
    written: String,
    /// The index of its words in the cast; `None` if the name is unknown.
    place: Option<usize>,
    article: bool,
    capital: bool,
}

impl Template {
    /// Reads a template for casts with the names of this one. What a bracket that never closes begins is text.
    pub(super) fn new(text: &str, cast: &Cast) -> Self {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some(at) = opening(rest)
            && let Some((end, bars)) = closing(&rest.as_bytes()[at..])
        {
            parts.push(Part::Text(rest[..at].to_owned()));
            let inner = &rest[at + 1..at + end];
            parts.push(if rest.as_bytes()[at] == b'[' {
                Part::Choice(alternatives(inner, &bars).map(|text| Self::new(text, cast)).collect())
            } else {
                Part::Word(Word::new(inner, cast))
            });
            rest = &rest[at + end + 1..];
        }
        parts.push(Part::Text(rest.to_owned()));
        Self(parts)
    }

    /// Appends one expansion.
    pub(super) fn expand(&self, cast: &Cast, rng: &mut Rng, out: &mut String) {
        for part in &self.0 {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Word(word) => word.substitute(cast, out),
                Part::Choice(options) => options[rng.index(options.len())].expand(cast, rng, out),
            }
        }
    }
}

/// Appends one expansion of a template that is read this once.
pub(super) fn expand_text(text: &str, cast: &Cast, rng: &mut Rng, out: &mut String) {
    let mut rest = text;
    while let Some(at) = opening(rest)
        && let Some((end, bars)) = closing(&rest.as_bytes()[at..])
    {
        out.push_str(&rest[..at]);
        let inner = &rest[at + 1..at + end];
        if rest.as_bytes()[at] == b'[' {
            let chosen = alternatives(inner, &bars).nth(rng.index(bars.len() + 1));
            expand_text(chosen.unwrap_or_default(), cast, rng, out);
        } else {
            Word::new(inner, cast).substitute(cast, out);
        }
        rest = &rest[at + end + 1..];
    }
    out.push_str(rest);
}

impl Word {
    fn new(inner: &str, cast: &Cast) -> Self {
        let (article, name) = inner.split_once(' ').unwrap_or(("", inner));
        Self {
            written: format!("{{{inner}}}"),
            place: cast.place(&name.to_ascii_lowercase()),
            article: !article.is_empty(),
            capital: inner.starts_with(|c: char| c.is_ascii_uppercase()),
        }
    }

    /// Appends the cast's words. An unknown name stays in its braces, which the tests look for.
    fn substitute(&self, cast: &Cast, out: &mut String) {
        let Some((_, words)) = self.place.and_then(|place| cast.words.get(place)) else {
            out.push_str(&self.written);
            return;
        };
        let start = out.len();
        if self.article {
            out.push_str(if words.starts_with(['a', 'e', 'i', 'o', 'u']) { "an " } else { "a " });
        }
        out.push_str(words);
        if self.capital {
            let capital = out[start..start + 1].to_ascii_uppercase();
            out.replace_range(start..start + 1, &capital);
        }
    }
}

/// The position of the first bracket that opens: two searches of the library, which reads several bytes at a time.
fn opening(text: &str) -> Option<usize> {
    let square = text.find('[');
    text[..square.unwrap_or(text.len())].find('{').or(square)
}

/// The position of the bracket that closes the one at 0, and those of the bars between them outside of inner brackets.
fn closing(text: &[u8]) -> Option<(usize, Vec<usize>)> {
    let (mut depth, mut bars, mut i) = (0_usize, Vec::new(), 0);
    while i < text.len() {
        match text[i] {
            b'[' | b'{' => depth += 1,
            b']' | b'}' if depth == 1 => return Some((i, bars)),
            b']' | b'}' => depth -= 1,
            b'|' if depth == 1 => bars.push(i),
            _ => {}
        }
        i += 1;
    }
    None
}

/// The alternatives of a choice; `bars` count from the bracket before `inner`.
fn alternatives<'a>(inner: &'a str, bars: &'a [usize]) -> impl Iterator<Item = &'a str> {
    let starts = std::iter::once(0).chain(bars.iter().copied());
    let ends = bars.iter().map(|bar| bar - 1).chain([inner.len()]);
    starts.zip(ends).map(|(start, end)| &inner[start..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(template: &str, seed: u64) -> String {
        let mut cast = Cast::with_capacity(5);
        cast.set("thing", "orange kite");
        cast.set("place", "the mill");
        cast.set_pronouns(["he", "him", "his"], true);
        let (mut out, mut once) = (String::new(), String::new());
        Template::new(template, &cast).expand(&cast, &mut Rng::new(seed), &mut out);
        expand_text(template, &cast, &mut Rng::new(seed), &mut once);
        assert_eq!(out, once, "a template that is kept and one that is not");
        out
    }

    #[test]
    fn words_articles_capitals() {
        assert_eq!(one("{He} saw {a thing}.", 0), "She saw an orange kite.");
        assert_eq!(one("{A thing} flew. {Place} stood.", 0), "An orange kite flew. The mill stood.");
        assert_eq!(one("{his} {nobody}", 0), "her {nobody}");
    }

    #[test]
    fn choices_nest_and_reach_every_option() {
        let mut seen: Vec<String> = (0..200).map(|seed| one("x[a|[b|{him}]c||d]y", seed)).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen, ["xay", "xbcy", "xdy", "xhercy", "xy"]);
    }

    #[test]
    fn broken_templates_do_not_panic() {
        for text in ["[a", "{a", "a]", "[a}b", "{", "[", "", "[]", "{}"] {
            one(text, 0);
        }
    }
}
