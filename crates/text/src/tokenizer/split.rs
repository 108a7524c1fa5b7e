//! Splitting text into words before BPE, by hand: what the known regular expressions match, without a regex engine.
//!
//! None of the patterns looks behind, so a word depends only on the text from its start on: a text can be cut at any
//! end of a word, and [`safe_cut`] finds such an end without splitting from the beginning.

use super::classes::{LETTER, LOWER, MARK, NEWLINE, NUMBER, OTHER, SPACE, UPPER, classes};

/// GPT-2's pattern; `p50k_base` has it, too.
pub const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// GPT-2's pattern as tiktoken writes it.
const GPT2_TIKTOKEN: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The pattern of Llama 3, and of `cl100k_base` as Hugging Face has it.
pub const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of `cl100k_base` in tiktoken since 0.8: white space at the end of a text is one word. Tiktoken writes it
/// with possessive quantifiers, which not all regex engines know, and with `$` for `\z`.
pub const CL100K_TAIL: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of Qwen 2 and 3: one digit at a time.
pub const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// [`QWEN2`] where combining marks belong to words.
const QWEN_MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of `o200k_base`.
pub const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A pattern that [`Pattern::next`] splits by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// GPT-2, `r50k_base`, `p50k_base`.
    Gpt2,
    /// `cl100k_base` and its relatives.
    Cl100k(Cl100k),
    /// `o200k_base`.
    O200k,
}

/// How the relatives of `cl100k_base` differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cl100k {
    /// The most digits of a number in one word.
    pub digits: usize,
    /// Whether combining marks belong to words.
    pub marks: bool,
    /// Whether white space at the end of a text is one word.
    pub tail: bool,
}

impl Pattern {
    /// Three digits to a word: Llama 3, `cl100k_base` of Hugging Face.
    pub const CL100K: Self = Self::Cl100k(Cl100k { digits: 3, marks: false, tail: false });
    /// `cl100k_base` of tiktoken.
    pub const CL100K_TAIL: Self = Self::Cl100k(Cl100k { digits: 3, marks: false, tail: true });
    /// One digit to a word: Qwen 2 and 3.
    pub const QWEN2: Self = Self::Cl100k(Cl100k { digits: 1, marks: false, tail: false });
    /// [`Self::QWEN2`] with combining marks in words: later versions of Qwen.
    pub const QWEN_MARKS: Self = Self::Cl100k(Cl100k { digits: 1, marks: true, tail: false });

    /// The pattern that a regular expression describes, if it is one of the constants above.
    pub fn of_regex(regex: &str) -> Option<Self> {
        Some(match regex {
            GPT2 | GPT2_TIKTOKEN => Self::Gpt2,
            CL100K => Self::CL100K,
            CL100K_TAIL => Self::CL100K_TAIL,
            QWEN2 => Self::QWEN2,
            QWEN_MARKS => Self::QWEN_MARKS,
            O200K => Self::O200k,
            _ => return None,
        })
    }

    /// The pattern as a regular expression.
    pub fn regex(self) -> &'static str {
        match self {
            Self::Gpt2 => GPT2,
            Self::Cl100k(Cl100k { marks: true, .. }) => QWEN_MARKS,
            Self::Cl100k(Cl100k { digits: 1, .. }) => QWEN2,
            Self::Cl100k(Cl100k { tail: true, .. }) => CL100K_TAIL,
            Self::Cl100k(_) => CL100K,
            Self::O200k => O200K,
        }
    }

    /// The end of the word that starts at `text[at]`; `text` is UTF-8 and `at` the start of a character in it.
    #[inline]
    pub fn next(self, text: &[u8], at: usize) -> usize {
        match self {
            Self::Gpt2 => gpt2(text, at),
            Self::Cl100k(of) => cl100k(text, at, of),
            Self::O200k => o200k(text, at),
        }
    }
}

fn gpt2(text: &[u8], at: usize) -> usize {
    let table = classes();
    let first = text[at];
    if first == b'\'' {
        let len = contraction(text, at, false);
        if len > 0 {
            return at + len;
        }
    }
    let (mut class, mut len) = table.at(text, at);
    let mut start = at;
    if first == b' ' && at + 1 < text.len() {
        let (next, next_len) = table.at(text, at + 1);
        if next & SPACE == 0 {
            (class, len, start) = (next, next_len, at + 1);
        }
    }
    let after = start + len;
    if class & LETTER != 0 {
        table.run(text, after, LETTER)
    } else if class & NUMBER != 0 {
        table.run(text, after, NUMBER)
    } else if class & SPACE != 0 {
        spaces(text, at)
    } else {
        table.run_without(text, after, LETTER | NUMBER | SPACE)
    }
}

fn cl100k(text: &[u8], at: usize, of: Cl100k) -> usize {
    let table = classes();
    let first = text[at];
    if first == b'\'' {
        let len = contraction(text, at, true);
        if len > 0 {
            return at + len;
        }
    }
    let letters = if of.marks { LETTER | MARK } else { LETTER };
    let (class, len) = table.at(text, at);
    if class & letters != 0 {
        return table.run(text, at + len, letters);
    }
    if class & NUMBER != 0 {
        return numbers(text, at, of.digits);
    }
    let next = if at + len < text.len() { table.at(text, at + len) } else { (SPACE, 0) };
    if class & NEWLINE == 0 && next.0 & letters != 0 {
        return table.run(text, at + len + next.1, letters);
    }
    let words = letters | NUMBER | SPACE;
    let punctuation = if class & SPACE == 0 {
        Some(at + len)
    } else {
        (first == b' ' && next.0 & words == 0).then_some(at + 1 + next.1)
    };
    match punctuation {
        Some(after) => table.run(text, table.run_without(text, after, words), NEWLINE),
        None => spaces_and_lines(text, at, of.tail),
    }
}

fn o200k(text: &[u8], at: usize) -> usize {
    let table = classes();
    let (class, len) = table.at(text, at);
    if class & NUMBER != 0 {
        return numbers(text, at, 3);
    }
    // a character that is not a letter may come before the word; a mark may be that, or the word's first character
    let prefix = (class & (LETTER | NEWLINE) == 0).then_some(at + len);
    let own = (class & (LETTER | MARK) != 0).then_some(at);
    let starts = || [prefix, own].into_iter().flatten();
    let word = starts().find_map(|start| ends_in_lower(text, start));
    let word = word.or_else(|| starts().find_map(|start| upper(text, start)));
    if let Some(end) = word {
        let more = if text.get(end) == Some(&b'\'') { contraction(text, end, true) } else { 0 };
        return end + more;
    }
    let words = LETTER | NUMBER | SPACE;
    let punctuation = if class & SPACE == 0 {
        Some(at + len)
    } else {
        let next = if at + 1 < text.len() { table.at(text, at + 1) } else { (SPACE, 0) };
        (text[at] == b' ' && next.0 & words == 0).then_some(at + 1 + next.1)
    };
    match punctuation {
        Some(after) => {
            let mut end = table.run_without(text, after, words);
            while text.get(end).is_some_and(|byte| matches!(byte, b'\r' | b'\n' | b'/')) {
                end += 1;
            }
            end
        }
        None => spaces_and_lines(text, at, false),
    }
}

/// Uppercase, then at least one that is lowercase or without case: `[Lu Lt Lm Lo M]*[Ll Lm Lo M]+`. Where no lowercase
/// letter follows, the last character without case is the end, because the first part gives back what it took.
fn ends_in_lower(text: &[u8], start: usize) -> Option<usize> {
    let table = classes();
    let (mut at, mut caseless) = (start, None);
    while at < text.len() {
        let (class, len) = table.at(text, at);
        if class & LOWER != 0 {
            return Some(table.run(text, at + len, LOWER | OTHER | MARK));
        }
        if class & (UPPER | OTHER | MARK) == 0 {
            break;
        }
        at += len;
        if class & UPPER == 0 {
            caseless = Some(at);
        }
    }
    caseless
}

/// At least one of `[Lu Lt Lm Lo M]`, with no lowercase letter after it.
fn upper(text: &[u8], start: usize) -> Option<usize> {
    let end = classes().run(text, start, UPPER | OTHER | MARK);
    (end > start).then_some(end)
}

/// Up to `most` numbers.
fn numbers(text: &[u8], at: usize, most: usize) -> usize {
    let table = classes();
    let mut end = at;
    for _ in 0..most {
        if end == text.len() {
            break;
        }
        let (class, len) = table.at(text, end);
        if class & NUMBER == 0 {
            break;
        }
        end += len;
    }
    end
}

/// The end of white space that holds no line end that matters: all but the last character, which goes with the word
/// that follows, unless there is only that one or the text ends.
fn spaces(text: &[u8], at: usize) -> usize {
    let table = classes();
    let (mut end, mut last) = (at, at);
    while end < text.len() {
        let (class, len) = table.at(text, end);
        if class & SPACE == 0 {
            return if last > at { last } else { end };
        }
        last = end;
        end += len;
    }
    end
}

/// White space up to its last line end; without one as [`spaces`]. With `tail` all of it at the end of the text.
fn spaces_and_lines(text: &[u8], at: usize, tail: bool) -> usize {
    let table = classes();
    let (mut end, mut line) = (at, None);
    while end < text.len() {
        let (class, len) = table.at(text, end);
        if class & SPACE == 0 {
            break;
        }
        end += len;
        if class & NEWLINE != 0 {
            line = Some(end);
        }
    }
    if tail && end == text.len() {
        return end;
    }
    line.unwrap_or_else(|| spaces(text, at))
}

/// The length of `'s 't 're 've 'm 'll 'd` at the apostrophe `text[at]`, 0 if it is none of them. Without regard to
/// case the long s, U+017F, is an s, too.
fn contraction(text: &[u8], at: usize, any_case: bool) -> usize {
    let letter = |offset: usize| {
        let byte = text.get(at + offset).copied().unwrap_or(0);
        if any_case { byte.to_ascii_lowercase() } else { byte }
    };
    match (letter(1), letter(2)) {
        (b's' | b'd' | b'm' | b't', _) => 2,
        (b'l', b'l') | (b'v', b'e') | (b'r', b'e') => 3,
        (0xc5, 0xbf) if any_case => 3,
        _ => 0,
    }
}

/// The kind of place at which a text may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Between a letter and what cannot belong to its word under any [`Pattern`].
    AfterLetter,
    /// Only between an ASCII letter and ASCII white space: for tokenizers that also normalise, or look for tokens of
    /// several words' characters.
    BeforeSpace,
}

/// The last place in `text` where every [`Pattern`] ends a word whatever follows the text, if there is one: the ids of
/// the two parts are those of the whole. `text` may end in the middle of a character.
pub fn safe_cut(text: &[u8], cut: Cut) -> Option<usize> {
    let table = classes();
    let mut after = text.len();
    while after > 0 {
        let mut before = after - 1;
        while before > 0 && text[before] & 0xc0 == 0x80 {
            before -= 1;
        }
        if after < text.len() && is_character(text, before, after) && is_complete(text, after) {
            let ends = match cut {
                Cut::BeforeSpace => text[before].is_ascii_alphabetic() && text[after].is_ascii_whitespace(),
                Cut::AfterLetter => {
                    let follows = table.at(text, after).0;
                    table.at(text, before).0 & LETTER != 0
                        && follows & (LETTER | MARK) == 0
                        && text[after] != b'\''
                }
            };
            if ends {
                return Some(after);
            }
        }
        after = before;
    }
    None
}

/// The length of a character by its first byte.
fn width(first: u8) -> usize {
    match first {
        0..0xc0 => 1,
        0xc0..0xe0 => 2,
        0xe0..0xf0 => 3,
        _ => 4,
    }
}

/// Whether the character at `at` is there as a whole, and valid: bytes that are not UTF-8 are replaced before they are
/// split, and must not be taken for letters here.
fn is_complete(text: &[u8], at: usize) -> bool {
    is_character(text, at, at + width(text[at]))
}

fn is_character(text: &[u8], start: usize, end: usize) -> bool {
    text.get(start..end).is_some_and(|bytes| std::str::from_utf8(bytes).is_ok())
}

#[cfg(test)]
mod tests;
