//! A tiny template language: text with choices and with words that a cast fills in.
//!
//! | written | becomes |
//! | --- | --- |
//! | `[a\|b\|c]` | one of the alternatives, each equally likely; they may be templates themselves, or empty |
//! | `{thing}` | the cast's word for `thing` |
//! | `{Thing}` | the same with a capital letter |
//! | `{a thing}` `{A thing}` | the same after "a" or "an" |

use crate::rng::Rng;

/// The words of one story by name: who is in it, where, with what.
#[derive(Debug, Default)]
pub(super) struct Cast {
    words: Vec<(&'static str, String)>,
}

impl Cast {
    /// Sets the words of a name.
    pub(super) fn set(&mut self, name: &'static str, words: impl Into<String>) {
        self.words.push((name, words.into()));
    }

    /// Sets the words of several names.
    pub(super) fn set_all<const N: usize>(&mut self, names: [&'static str; N], words: [&str; N]) {
        names.into_iter().zip(words).for_each(|(name, words)| self.set(name, words));
    }

    /// Sets three names to pronouns: he/she, him/her, his/her.
    pub(super) fn set_pronouns(&mut self, names: [&'static str; 3], female: bool) {
        self.set_all(names, if female { ["she", "her", "her"] } else { ["he", "him", "his"] });
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.words.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, words)| words.as_str())
    }

    /// Appends the words of `{inner}`. An unknown name stays in its braces, which the tests look for.
    fn substitute(&self, inner: &str, out: &mut String) {
        let (article, name) = inner.split_once(' ').map_or(("", inner), |(a, n)| (a, n));
        let Some(words) = self.get(name) else {
            out.extend(["{", inner, "}"]);
            return;
        };
        let start = out.len();
        if !article.is_empty() {
            out.push_str(if words.starts_with(['a', 'e', 'i', 'o', 'u']) { "an " } else { "a " });
        }
        out.push_str(words);
        if inner.starts_with(|c: char| c.is_ascii_uppercase()) {
            let capital = out[start..start + 1].to_ascii_uppercase();
            out.replace_range(start..start + 1, &capital);
        }
    }
}

/// Appends one expansion of the template.
pub(super) fn expand(template: &str, cast: &Cast, rng: &mut Rng, out: &mut String) {
    let mut rest = template;
    while let Some(at) = opening(rest.as_bytes()) {
        out.push_str(&rest[..at]);
        let Some((end, options)) = closing(&rest[at..]) else {
            out.push_str(&rest[at..]);
            return;
        };
        let inner = &rest[at + 1..at + end];
        if rest.as_bytes()[at] == b'[' {
            expand(alternative(inner, rng.index(options)), cast, rng, out);
        } else {
            cast.substitute(inner, out);
        }
        rest = &rest[at + end + 1..];
    }
    out.push_str(rest);
}

// Every run without data begins by making this text, in tests with little optimisation: the loops over bytes are plain ones.

/// The position of the first bracket that opens.
fn opening(text: &[u8]) -> Option<usize> {
    let mut i = 0;
    while i < text.len() {
        if matches!(text[i], b'[' | b'{') {
            return Some(i);
        }
        i += 1;
    }
    None
}

/// The position of the bracket that closes the one at 0, and how many alternatives lie between them.
fn closing(text: &str) -> Option<(usize, usize)> {
    let (text, mut i) = (text.as_bytes(), 0);
    let (mut depth, mut options) = (0_usize, 1);
    while i < text.len() {
        match text[i] {
            b'[' | b'{' => depth += 1,
            b']' | b'}' if depth == 1 => return Some((i, options)),
            b']' | b'}' => depth -= 1,
            b'|' if depth == 1 => options += 1,
            _ => {}
        }
        i += 1;
    }
    None
}

/// The alternative of that number; alternatives are separated by the bars outside of inner brackets.
fn alternative(text: &str, number: usize) -> &str {
    let (mut depth, mut seen, mut start) = (0_usize, 0, 0);
    let (bytes, mut i) = (text.as_bytes(), 0);
    while i < bytes.len() {
        match bytes[i] {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth -= 1,
            b'|' if depth == 0 && seen == number => return &text[start..i],
            b'|' if depth == 0 => (seen, start) = (seen + 1, i + 1),
            _ => {}
        }
        i += 1;
    }
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(template: &str, seed: u64) -> String {
        let mut cast = Cast::default();
        cast.set("thing", "orange kite");
        cast.set("place", "the mill");
        cast.set_pronouns(["he", "him", "his"], true);
        let mut out = String::new();
        expand(template, &cast, &mut Rng::new(seed), &mut out);
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
