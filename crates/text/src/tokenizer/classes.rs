//! The classes of characters that split patterns distinguish, by table lookup: Unicode's general categories as the
//! crate `regex-syntax` has them, which is what regular expressions in Rust see.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// Uppercase and titlecase letters.
pub const UPPER: u8 = 1;
/// Lowercase letters.
pub const LOWER: u8 = 2;
/// Letters without case, and modifiers.
pub const OTHER: u8 = 4;
/// Combining marks.
pub const MARK: u8 = 8;
/// Numbers.
pub const NUMBER: u8 = 16;
/// White space.
pub const SPACE: u8 = 32;
/// Carriage return and line feed, which are white space too.
pub const NEWLINE: u8 = 64;
/// All letters.
pub const LETTER: u8 = UPPER | LOWER | OTHER;

const PAGE: usize = 256;
const PAGES: usize = 0x11_0000 / PAGE;

/// The class of every character, in pages, of which equal ones are stored once.
pub struct Classes {
    page_of: Vec<u16>,
    pages: Vec<[u8; PAGE]>,
}

static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::build);

/// The table; built on first use, in a few milliseconds.
pub fn classes() -> &'static Classes {
    &CLASSES
}

/// What a regex calls each class.
const PROPERTIES: [(&str, u8); 7] = [
    (r"[\p{Lu}\p{Lt}]", UPPER),
    (r"\p{Ll}", LOWER),
    (r"[\p{Lm}\p{Lo}]", OTHER),
    (r"\p{M}", MARK),
    (r"\p{N}", NUMBER),
    (r"\s", SPACE),
    (r"[\r\n]", NEWLINE),
];

impl Classes {
    fn build() -> Self {
        let mut flat = vec![0u8; PAGE * PAGES];
        for (property, class) in PROPERTIES {
            let parsed = regex_syntax::parse(property).map(|hir| hir.into_kind());
            if let Ok(HirKind::Class(Class::Unicode(ranges))) = parsed {
                for range in ranges.ranges() {
                    let (start, end) = (range.start() as usize, range.end() as usize);
                    flat[start..=end].iter_mut().for_each(|of| *of |= class);
                }
            }
        }
        let mut table = Self { page_of: Vec::new(), pages: Vec::new() };
        for page in flat.as_chunks::<PAGE>().0 {
            let known = table.pages.iter().position(|other| other == page);
            let at = known.unwrap_or_else(|| {
                table.pages.push(*page);
                table.pages.len() - 1
            });
            table.page_of.push(at as u16); // there are 4352 pages
        }
        table
    }

    /// The class of the character that starts at `text[at]`, and its length in bytes. `text` is UTF-8.
    #[inline(always)]
    pub fn at(&self, text: &[u8], at: usize) -> (u8, usize) {
        let first = text[at];
        if first < 0x80 {
            return (self.pages[0][usize::from(first)], 1); // ASCII is on the first page
        }
        self.beyond_ascii(text, at)
    }

    fn beyond_ascii(&self, text: &[u8], at: usize) -> (u8, usize) {
        let low = |offset: usize| text.get(at + offset).map_or(0, |&byte| u32::from(byte & 0x3f));
        let first = u32::from(text[at]);
        let (code, len) = match first {
            0..0xe0 => ((first & 0x1f) << 6 | low(1), 2),
            0xe0..0xf0 => ((first & 0x0f) << 12 | low(1) << 6 | low(2), 3),
            _ => ((first & 0x07) << 18 | low(1) << 12 | low(2) << 6 | low(3), 4),
        };
        let page = self.page_of.get(code as usize / PAGE).copied().unwrap_or(0);
        (self.pages[usize::from(page)][code as usize % PAGE], len)
    }

    /// The end of the run of characters from `at` on whose class has one of the bits of `set`.
    #[inline]
    pub fn run(&self, text: &[u8], mut at: usize, set: u8) -> usize {
        while at < text.len() {
            let (class, len) = self.at(text, at);
            if class & set == 0 {
                break;
            }
            at += len;
        }
        at
    }

    /// The end of the run of characters from `at` on whose class has none of the bits of `set`.
    #[inline]
    pub fn run_without(&self, text: &[u8], mut at: usize, set: u8) -> usize {
        while at < text.len() {
            let (class, len) = self.at(text, at);
            if class & set != 0 {
                break;
            }
            at += len;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_has_the_class_that_a_regex_gives_it() {
        let table = classes();
        for (pattern, class) in PROPERTIES.into_iter().chain([(r"\p{L}", LETTER)]) {
            let regex = fancy_regex::Regex::new(pattern).unwrap();
            for c in (0..=0x10_ffff).filter_map(char::from_u32) {
                let text = c.to_string();
                let (found, len) = table.at(text.as_bytes(), 0);
                assert_eq!(len, text.len());
                assert_eq!(found & class != 0, regex.is_match(&text).unwrap(), "{c:?} {pattern}");
            }
        }
    }
}
