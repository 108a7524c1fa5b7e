//! The built-in corpus: short stories from a railway valley, made from a seed and the same on every machine.
//!
//! Training and validation stories are disjoint: a hash of its text decides which split a story belongs to.

use super::grammar::{Template, expand_text};
use super::plots::{OPENING, PLOTS};
use super::world::draw_cast;
use crate::rng::{Rng, mix64};
use std::collections::HashSet;
use std::sync::LazyLock;

/// The byte, and token, that ends a story.
pub const END_OF_TEXT: u8 = 0;

/// One story in this many is for validation.
const VALIDATION_SHARE: u64 = 16;

/// Words a story may have.
const WORDS: std::ops::RangeInclusive<usize> = 60..=140;

/// The split a story belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// For training.
    Train,
    /// For validation.
    Validation,
}

/// Endless stories of 60 to 140 words in ASCII, none of them twice, none in both splits (of any seed).
///
/// ```
/// use ironhorse_train::data::corpus::{Split, stories};
/// let story = stories(1, Split::Train).next().unwrap();
/// assert!(story.is_ascii() && story.split_whitespace().count() >= 60);
/// ```
pub fn stories(seed: u64, split: Split) -> impl Iterator<Item = String> {
    let mut rng = Rng::new(seed).fork(split as u64);
    let mut told = HashSet::new();
    std::iter::repeat_with(move || tell(&mut rng)).filter(move |story| {
        let hash = hash(story);
        let split_of_story =
            if hash.is_multiple_of(VALIDATION_SHARE) { Split::Validation } else { Split::Train };
        split_of_story == split && WORDS.contains(&words(story)) && told.insert(hash)
    })
}

/// Whole stories, each followed by [`END_OF_TEXT`], until there are at least `bytes` bytes.
pub fn corpus(seed: u64, split: Split, bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes + 1024);
    let mut stories = stories(seed, split);
    while out.len() < bytes
        && let Some(story) = stories.next()
    {
        out.extend_from_slice(story.as_bytes());
        out.push(END_OF_TEXT);
    }
    out
}

/// The parts of the story of each plot.
static STORIES: LazyLock<Vec<[Template; 9]>> = LazyLock::new(|| {
    let parts = PLOTS.iter().map(|plot| {
        [OPENING, " {weather} ", plot.premise, "\n", plot.problem, "\n", plot.rescue, "\n", plot.ending]
    });
    let cast = draw_cast(&mut Rng::new(0));
    parts.map(|parts| parts.map(|part| Template::new(part, &cast))).collect()
});

/// One story, of any length and for any split.
fn tell(rng: &mut Rng) -> String {
    let cast = draw_cast(rng);
    let mut draft = String::with_capacity(1024);
    for part in &STORIES[rng.index(STORIES.len())] {
        part.expand(&cast, rng, &mut draft);
    }
    // The words of the weather contain choices too.
    let mut story = String::with_capacity(draft.len());
    expand_text(&draft, &cast, rng, &mut story);
    story
}

/// How many words an ASCII text has: a plain loop, as it reads all the text that is made.
fn words(text: &str) -> usize {
    let (bytes, mut count, mut inside, mut i) = (text.as_bytes(), 0, false, 0);
    while i < bytes.len() {
        let letter = bytes[i] > b' ';
        count += usize::from(letter && !inside);
        (inside, i) = (letter, i + 1);
    }
    count
}

fn hash(text: &str) -> u64 {
    let (words, rest) = text.as_bytes().as_chunks();
    let mix = |hash: u64, word: u64| mix64(hash.rotate_left(23) ^ word);
    let hash = words.iter().fold(text.len() as u64, |hash, &word| mix(hash, u64::from_be_bytes(word)));
    match rest {
        [] => hash,
        rest => mix(hash, rest.iter().fold(0, |word, &byte| word << 8 | u64::from(byte))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(n: usize) -> Vec<String> {
        stories(1, Split::Train).take(n).collect()
    }

    /// `cargo test -p ironhorse-train three_stories -- --nocapture` shows what the text is like.
    #[test]
    fn three_stories() {
        first(3).iter().for_each(|story| println!("{story}\n"));
    }

    #[test]
    fn the_same_everywhere() {
        let text = corpus(1, Split::Train, 100_000);
        assert_eq!(text, corpus(1, Split::Train, 100_000));
        assert_eq!((text.len(), crc32fast::hash(&text)), (100_036, 2_008_675_951));
        assert_ne!(text, corpus(2, Split::Train, 100_000));
    }

    #[test]
    fn corpus_is_whole_stories() {
        let text = corpus(3, Split::Train, 5000);
        assert!((5000..6000).contains(&text.len()) && text.ends_with(&[END_OF_TEXT]));
        let told: Vec<String> = stories(3, Split::Train).take(text.split(|&b| b == 0).count() - 1).collect();
        assert_eq!(text, (told.join("\0") + "\0").into_bytes());
        assert!(corpus(3, Split::Train, 0).is_empty());
    }

    #[test]
    fn train_and_validation_never_meet() {
        let train: HashSet<String> = first(5000).into_iter().collect();
        for seed in [1, 2] {
            let validation: HashSet<String> = stories(seed, Split::Validation).take(500).collect();
            assert_eq!((train.len(), validation.len()), (5000, 500));
            assert!(train.is_disjoint(&validation));
        }
    }

    #[test]
    fn stories_hardly_ever_repeat_even_unfiltered() {
        let mut rng = Rng::new(8);
        let told: HashSet<String> = (0..5000).map(|_| tell(&mut rng)).collect();
        assert!(told.len() >= 4999, "{}", told.len());
        let openings: HashSet<&str> = told.iter().filter_map(|s| s.lines().nth(1)).collect();
        assert!(openings.len() > 2500, "{} second paragraphs", openings.len());
    }

    #[test]
    fn every_length_is_right_without_the_filter() {
        let mut rng = Rng::new(9);
        for _ in 0..20_000 {
            let story = tell(&mut rng);
            let words = words(&story);
            assert_eq!(words, story.split_whitespace().count(), "{story}");
            assert!(WORDS.contains(&words), "{words} words: {story}");
        }
    }

    #[test]
    fn the_text_is_clean() {
        for story in first(2000) {
            let bad =
                ["  ", " .", " ,", " !", " ?", "..", " \n", "\n "].into_iter().find(|b| story.contains(b));
            assert_eq!(bad, None, "{story}");
            let plain = |c: char| c.is_ascii_alphabetic() || " \n.,!?\"".contains(c);
            assert!(story.chars().all(plain), "{story}");
            assert_eq!(story.lines().count(), 4, "{story}");
            for paragraph in story.lines() {
                assert!(paragraph.starts_with(|c: char| c.is_ascii_uppercase() || c == '"'), "{story}");
                assert!(paragraph.trim_end_matches('"').ends_with(['.', '!', '?']), "{story}");
                assert_eq!(paragraph.matches('"').count() % 2, 0, "{story}");
            }
        }
    }

    #[test]
    fn sentences_start_with_a_capital_and_articles_agree() {
        for story in first(2000) {
            let words: Vec<&str> = story.split_whitespace().collect();
            for pair in words.windows(2) {
                let next = pair[1].trim_start_matches('"').chars().next().unwrap();
                // After `"Stop!"` the tag goes on in small letters: `said he`.
                if pair[0].ends_with(['.', '!', '?']) || pair[0].ends_with(".\"") {
                    assert!(next.is_ascii_uppercase(), "{pair:?} in {story}");
                }
                let vowel = "aeiou".contains(next.to_ascii_lowercase());
                match pair[0].trim_start_matches('"').to_ascii_lowercase().as_str() {
                    "a" => assert!(!vowel, "{pair:?} in {story}"),
                    "an" => assert!(vowel, "{pair:?} in {story}"),
                    _ => {}
                }
            }
        }
    }
}
