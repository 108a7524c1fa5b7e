//! Multiple-choice questions `hellaswag_val.bin`: a header and a stream of uint16, question by question.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::Source;
use super::header::{BinHeader, HEADER_BYTES, magic};
use crate::{Error, Result};

/// One answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerTokens {
    /// Context and answer together.
    pub tokens: Vec<u32>,
    /// The index of the token that the answer begins with.
    pub from: usize,
    /// Characters of the answer; `None` where only its tokens are known.
    pub chars: Option<usize>,
}

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// The answers, at least 2.
    pub choices: Vec<AnswerTokens>,
    /// Which of them is right.
    pub label: usize,
}

/// Begins every question.
const START: u16 = u16::MAX;
/// A question with more answers is taken for damage.
const MOST_CHOICES: u16 = 64;

/// Reads every question of a file.
pub fn open(path: &Path) -> Result<Vec<Example>> {
    read(&mut Source::<File>::open(path)?)
}

/// Reads every question.
pub fn read<R: Read + Seek>(source: &mut Source<R>) -> Result<Vec<Example>> {
    let header = BinHeader::read(source, "multiple-choice file", &[magic::MULTIPLE_CHOICE])?;
    header.version(source, &[1])?;
    let count = header.positive(source, 2, "number of examples")?;
    let body = source.len() - HEADER_BYTES;
    if !body.is_multiple_of(2) {
        return Err(source.field("file size", format!("{} bytes", source.len()), "an even number of bytes"));
    }
    let mut words = Vec::with_capacity((body / 2) as usize);
    source.for_each_chunk(HEADER_BYTES, body, |chunk| {
        words.extend(chunk.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word)));
        Ok(())
    })?;
    let mut stream = Words { words: &words, at: 0, example: 0, path: source.path() };
    // every question takes at least 9 words
    let mut examples = Vec::with_capacity(count.min(words.len() / 9));
    for example in 0..count {
        stream.example = example;
        examples.push(stream.example()?);
    }
    if stream.at != words.len() {
        let left = (words.len() - stream.at) * 2;
        return Err(source.field(
            "file size",
            format!("{left} bytes more"),
            format!("exactly {count} examples"),
        ));
    }
    Ok(examples)
}

struct Words<'a> {
    words: &'a [u16],
    at: usize,
    example: usize,
    path: &'a Path,
}

impl<'a> Words<'a> {
    fn fail(&self, field: &str, found: impl ToString, expected: impl ToString) -> Error {
        Error::field(self.path, format!("example {}: {field}", self.example), found, expected)
    }

    fn take(&mut self, field: &str, count: usize) -> Result<&'a [u16]> {
        let taken = self.words.get(self.at..self.at + count);
        let taken = taken.ok_or_else(|| {
            self.fail(field, format!("{} words", self.words.len() - self.at), format!("{count} words"))
        })?;
        self.at += count;
        Ok(taken)
    }

    fn one(&mut self, field: &str) -> Result<u16> {
        Ok(self.take(field, 1)?[0])
    }

    fn tokens(&mut self, field: &str) -> Result<Vec<u32>> {
        let count = self.one(field)?;
        if count == 0 {
            return Err(self.fail(field, "empty", "at least 1 token"));
        }
        Ok(self.take(field, usize::from(count))?.iter().map(|&token| token.into()).collect())
    }

    fn example(&mut self) -> Result<Example> {
        let begin = self.at;
        let start = self.one("first word")?;
        if start != START {
            return Err(self.fail("first word", start, START));
        }
        let bytes = self.one("size")?;
        self.one("index")?;
        let label = self.one("label")?;
        let count = self.one("number of answers")?;
        if !(2..=MOST_CHOICES).contains(&count) {
            return Err(self.fail("number of answers", count, format!("2 to {MOST_CHOICES}")));
        }
        if label >= count {
            return Err(self.fail("label", label, format!("0 to {}", count - 1)));
        }
        let context = self.tokens("context")?;
        let mut choices = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let tokens = [context.as_slice(), &self.tokens("answer")?].concat();
            choices.push(AnswerTokens { tokens, from: context.len(), chars: None });
        }
        let read = (self.at - begin) * 2;
        if usize::from(bytes) != read {
            return Err(self.fail("size", bytes, format!("{read} bytes")));
        }
        Ok(Example { choices, label: label.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(count: i32, words: &[u16]) -> Source<std::io::Cursor<Vec<u8>>> {
        let mut bytes: Vec<u8> =
            [magic::MULTIPLE_CHOICE, 1, count, 100].iter().flat_map(|f| f.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        Source::memory(bytes, "h.bin")
    }

    const ONE: [u16; 12] = [START, 24, 0, 1, 2, 2, 7, 8, 1, 9, 1, 10];

    #[test]
    fn questions_are_read() {
        let all = read(&mut file(2, &[ONE, ONE].concat())).unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all[1].label, 1);
        assert_eq!(all[1].choices[1], AnswerTokens { tokens: vec![7, 8, 10], from: 2, chars: None });
    }

    #[test]
    fn broken_files_are_named() {
        let refusal = |count, words: &[u16]| read(&mut file(count, words)).unwrap_err().to_string();
        assert_eq!(refusal(2, &ONE), "h.bin: example 1: first word is 0 words, expected 1 words");
        assert!(
            refusal(1, &[&ONE[..], &[3]].concat()).ends_with("2 bytes more, expected exactly 1 examples")
        );
        for (at, word, want) in [
            (0, 3, "example 0: first word is 3, expected 65535"),
            (1, 3, "example 0: size is 3, expected 24 bytes"),
            (3, 2, "example 0: label is 2, expected 0 to 1"),
            (4, 1, "example 0: number of answers is 1, expected 2 to 64"),
            (5, 0, "example 0: context is empty, expected at least 1 token"),
            (5, 9, "example 0: context is 6 words, expected 9 words"),
        ] {
            let mut words = ONE;
            words[at] = word;
            assert_eq!(refusal(1, &words), format!("h.bin: {want}"));
        }
    }
}
