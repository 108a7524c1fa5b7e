//! Tokenizer files `gpt2_tokenizer.bin`, version 2: the bytes of every token.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::header::{BinHeader, HEADER_BYTES, magic};
use super::hf::TextTokens;
use super::{Sink, Source, atomic};
use crate::{Error, Result};

/// The file's name beside weights.
pub const TOKENIZER: &str = "tokenizer.bin";

/// Names and contents of files.
pub type NamedFiles = Vec<(String, Vec<u8>)>;

/// The files that make up tokenizers, chat templates included: Hugging Face's, llm.c's.
const FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TOKENIZER,
];
/// How `transformers` generates with a model.
const GENERATION: &str = "generation_config.json";

/// Whether a file beside weights belongs to a tokenizer.
pub fn is_tokenizer_file(name: &str) -> bool {
    FILES.contains(&name)
}

/// Whether a file beside weights says how they are used, and goes where they go.
pub(super) fn is_companion(name: &str) -> bool {
    is_tokenizer_file(name) || name == GENERATION
}

/// The files in a folder that say how its weights are used, as they are: those of the tokenizer, and `generation_config.json`.
pub fn tokenizer_files(folder: &Path) -> Result<NamedFiles> {
    let names = FILES.iter().chain([&GENERATION]);
    let paths = names.map(|name| (name, folder.join(name))).filter(|(_, path)| path.is_file());
    paths
        .map(|(name, path)| {
            let bytes = std::fs::read(&path).map_err(|source| Error::io(&path, "read", source))?;
            Ok(((*name).to_owned(), bytes))
        })
        .collect()
}

/// A tokenizer as it is kept beside weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptTokenizer {
    /// Its files.
    pub files: NamedFiles,
    /// What `config.json` is to say of the tokens before and after a text.
    pub tokens: TextTokens,
}

/// The bytes of every token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokenizer {
    /// Token `id` stands for the bytes `tokens[id]`, 1 to 255 of them.
    pub tokens: Vec<Vec<u8>>,
    /// The token that ends a text.
    pub eot: u32,
}

impl Tokenizer {
    /// The tokenizer whose 256 tokens are the bytes; token 0 ends a text.
    pub fn bytes() -> Self {
        Self { tokens: (0..=u8::MAX).map(|byte| vec![byte]).collect(), eot: 0 }
    }

    /// Reads a file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(&mut Source::<File>::open(path)?)
    }

    /// Reads a whole tokenizer.
    pub fn read<R: Read + Seek>(source: &mut Source<R>) -> Result<Self> {
        let header = BinHeader::read(source, "tokenizer", &[magic::TOKENIZER])?;
        header.version(source, &[2])?;
        let count = header.positive(source, 2, "number of tokens")?;
        let body = source.len() - HEADER_BYTES;
        // every token takes at least a length and a byte
        if count as u64 > body / 2 {
            let expected = format!("at most {} in {body} bytes", body / 2);
            return Err(source.field("number of tokens", count, expected));
        }
        let eot = header.get(3);
        let Some(eot) = u32::try_from(eot).ok().filter(|&eot| (eot as usize) < count) else {
            return Err(source.field("end-of-text token", eot, format!("0 to {}", count - 1)));
        };
        if body > count as u64 * 256 {
            let expected = format!("at most 256 bytes for each of {count} tokens");
            return Err(source.field("file size", format!("{} bytes", source.len()), expected));
        }
        let mut bytes = vec![0; body as usize]; // the file has so many
        source.read_at(HEADER_BYTES, &mut bytes)?;
        let (mut tokens, mut rest) = (Vec::with_capacity(count), &bytes[..]);
        while tokens.len() < count
            && let Some((&len, after)) = rest.split_first()
        {
            if len == 0 {
                return Err(source.field(format!("length of token {}", tokens.len()), 0, "1 to 255"));
            }
            let Some((token, after)) = after.split_at_checked(len.into()) else { break };
            tokens.push(token.to_vec());
            rest = after;
        }
        if tokens.len() < count || !rest.is_empty() {
            let found = format!("{} bytes with {} whole tokens", source.len(), tokens.len());
            let more = format!("{found} and {} bytes more", rest.len());
            let found = if tokens.len() == count { more } else { found };
            return Err(source.field("file size", found, format!("exactly {count} tokens")));
        }
        Ok(Self { tokens, eot })
    }

    /// Writes a file atomically.
    pub fn write(&self, path: &Path) -> Result<()> {
        atomic::write_file(path, |sink| self.write_to(sink))
    }

    /// Writes into `sink`.
    pub fn write_to(&self, sink: &mut Sink<'_>) -> Result<()> {
        let count = self.tokens.len();
        let Some(fields) = i32::try_from(count).ok().zip(i32::try_from(self.eot).ok()).filter(|f| f.1 < f.0)
        else {
            let expected = format!("below the number of tokens, {count}");
            return Err(Error::field(sink.path(), "end-of-text token", self.eot, expected));
        };
        BinHeader::new(&[magic::TOKENIZER, 2, fields.0, fields.1]).write(sink)?;
        for (id, token) in self.tokens.iter().enumerate() {
            let Some(len) = u8::try_from(token.len()).ok().filter(|&len| len > 0) else {
                let found = format!("{} bytes", token.len());
                return Err(Error::field(sink.path(), format!("token {id}"), found, "1 to 255 bytes"));
            };
            sink.put(&[len])?;
            sink.put(token)?;
        }
        Ok(())
    }

    /// The number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// The bytes the tokens stand for.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            let Some(token) = self.tokens.get(id as usize) else {
                let last = self.tokens.len().saturating_sub(1);
                return Err(Error::input(format!("token {index}"), id, format!("0 to {last}")));
            };
            bytes.extend_from_slice(token);
        }
        Ok(bytes)
    }

    /// The text the tokens stand for; bytes that are not UTF-8 become U+FFFD.
    pub fn decode_lossy(&self, ids: &[u32]) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.decode(ids)?).into_owned())
    }

    /// Encodes a text with the longest matching token at each position. For the byte tokenizer this is exact. For a BPE
    /// vocabulary it is an approximation: the tokens decode to the text, but they are not always those that BPE merges
    /// would give. An end-of-text marker spelled out in the text is encoded as ordinary text.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        let mut index: HashMap<&[u8], u32> = HashMap::with_capacity(self.tokens.len());
        for (id, token) in (0u32..).zip(&self.tokens) {
            if id != self.eot || token.len() == 1 {
                index.entry(token).or_insert(id);
            }
        }
        let longest = index.keys().map(|token| token.len()).max().unwrap_or(0);
        let mut ids = Vec::new();
        let mut at = 0;
        while at < text.len() {
            let most = longest.min(text.len() - at);
            let found = (1..=most).rev().find_map(|len| index.get(&text[at..at + len]).map(|&id| (id, len)));
            let Some((id, len)) = found else {
                let found = format!("{:#04x}, which is in no token of the vocabulary", text[at]);
                return Err(Error::input(format!("byte {at} of the text"), found, "a byte of a token"));
            };
            ids.push(id);
            at += len;
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(count: i32, eot: i32, tokens: &[&str]) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            [magic::TOKENIZER, 2, count, eot].iter().flat_map(|f| f.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        for token in tokens {
            bytes.push(token.len() as u8);
            bytes.extend_from_slice(token.as_bytes());
        }
        bytes
    }

    fn read(bytes: Vec<u8>) -> Result<Tokenizer> {
        Tokenizer::read(&mut Source::memory(bytes, "t.bin"))
    }

    fn refusal(bytes: Vec<u8>) -> String {
        read(bytes).unwrap_err().to_string()
    }

    const TOKENS: [&str; 5] = ["a", "b", "ab", "é", "<|end|>"];

    #[test]
    fn the_round_trip_is_byte_identical() {
        let before = bytes(5, 4, &TOKENS);
        let tokenizer = read(before.clone()).unwrap();
        assert_eq!(tokenizer.tokens, TOKENS.map(|token| token.as_bytes().to_vec()));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.bin");
        tokenizer.write(&path).unwrap();
        assert!(std::fs::read(&path).unwrap() == before);
        assert_eq!(Tokenizer::open(&path).unwrap(), tokenizer);
    }

    #[test]
    fn a_large_vocabulary_crosses_chunks() {
        let tokens: Vec<Vec<u8>> = (0..60_000u32).map(|id| id.to_string().into_bytes()).collect();
        let tokenizer = Tokenizer { tokens, eot: 7 };
        let mut file = Vec::new();
        tokenizer.write_to(&mut Sink::new(&mut file, Path::new("t"))).unwrap();
        assert!(read(file).unwrap() == tokenizer);
    }

    #[test]
    fn text_there_and_back() {
        let bytes_only = Tokenizer::bytes();
        let ids = bytes_only.encode("héllo\0".as_bytes()).unwrap();
        assert_eq!(ids, [104, 195, 169, 108, 108, 111, 0]);
        assert_eq!(bytes_only.decode_lossy(&ids).unwrap(), "héllo\0");
        assert_eq!(bytes_only.decode_lossy(&[195]).unwrap(), "\u{fffd}");
        let tokenizer = read(bytes(5, 4, &TOKENS)).unwrap();
        assert_eq!(tokenizer.encode("abbaé".as_bytes()).unwrap(), [2, 1, 0, 3]);
        let text = tokenizer.encode(b"abc").unwrap_err().to_string();
        let found = "0x63, which is in no token of the vocabulary, expected a byte of a token";
        assert_eq!(text, format!("byte 2 of the text is {found}"));
        assert!(tokenizer.encode(b"<|end|>").is_err());
        assert_eq!(tokenizer.decode(&[0, 9]).unwrap_err().to_string(), "token 1 is 9, expected 0 to 4");
    }

    #[test]
    fn broken_files_are_named() {
        assert!(refusal(bytes(-1, 0, &TOKENS)).contains("number of tokens (header field 2) is -1"));
        assert_eq!(
            refusal(bytes(i32::MAX, 0, &TOKENS)),
            "t.bin: number of tokens is 2147483647, expected at most 9 in 18 bytes"
        );
        assert_eq!(refusal(bytes(5, 5, &TOKENS)), "t.bin: end-of-text token is 5, expected 0 to 4");
        assert!(refusal(bytes(5, -1, &TOKENS)).contains("end-of-text token is -1"));
        assert!(refusal(bytes(6, 0, &TOKENS)).ends_with("with 5 whole tokens, expected exactly 6 tokens"));
        assert!(
            refusal(bytes(4, 0, &TOKENS))
                .ends_with("with 4 whole tokens and 8 bytes more, expected exactly 4 tokens")
        );
        assert_eq!(
            refusal(bytes(3, 0, &["a", "", "b", "c"])),
            "t.bin: length of token 1 is 0, expected 1 to 255"
        );
        assert!(refusal(bytes(5, 4, &TOKENS)[..1030].to_vec()).contains("number of tokens is 5"));
        let empty = Tokenizer { tokens: vec![vec![]], eot: 0 };
        let mut file = Vec::new();
        assert!(empty.write_to(&mut Sink::new(&mut file, Path::new("t"))).is_err());
    }
}
