//! Text to tokens and back, whatever the tokenizer is.

use crate::Result;
use crate::format::Sink;
use crate::format::hf::TextTokens;
use crate::format::tokenizer::{KeptTokenizer, NamedFiles, TOKENIZER, Tokenizer};

/// A tokenizer. llm.c's `tokenizer.bin` is one; those of Hugging Face and tiktoken are in a crate of their own.
pub trait Codec: Send + Sync {
    /// The number of ids; every id is less.
    fn vocab_size(&self) -> usize;

    /// The token between texts.
    fn eot(&self) -> Option<u32>;

    /// The ids of a text.
    fn encode(&self, text: &[u8]) -> Result<Vec<u32>>;

    /// The bytes that the ids stand for.
    fn decode(&self, ids: &[u32]) -> Result<Vec<u8>>;

    /// The files to keep beside weights, names and contents.
    fn files(&self) -> Result<NamedFiles>;

    /// What is kept of it beside weights.
    fn kept(&self) -> Result<KeptTokenizer> {
        let tokens = self.eot().map_or(TextTokens::Last, TextTokens::Eot);
        Ok(KeptTokenizer { files: self.files()?, tokens })
    }

    /// The tokens at which generation stops.
    fn ends(&self) -> Vec<u32> {
        self.eot().into_iter().collect()
    }

    /// The text that the ids stand for; bytes that are not UTF-8 become U+FFFD.
    fn decode_lossy(&self, ids: &[u32]) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.decode(ids)?).into_owned())
    }

    /// What generation starts from: the token between texts, then the prompt.
    fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let text = self.encode(text.as_bytes())?;
        Ok(self.eot().into_iter().chain(text).collect())
    }
}

impl Codec for Tokenizer {
    fn vocab_size(&self) -> usize {
        Tokenizer::vocab_size(self)
    }

    fn eot(&self) -> Option<u32> {
        Some(self.eot)
    }

    fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        Tokenizer::encode(self, text)
    }

    fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        Tokenizer::decode(self, ids)
    }

    fn files(&self) -> Result<NamedFiles> {
        let mut bytes = Vec::new();
        self.write_to(&mut Sink::new(&mut bytes, TOKENIZER.as_ref()))?;
        Ok(vec![(TOKENIZER.to_owned(), bytes)])
    }
}

/// Decodes token by token. The text of a token may depend on those before it, and a character may be several tokens.
#[derive(Default)]
pub struct Stream {
    /// Tokens whose text is out, the last few of them.
    before: Vec<u32>,
}

impl Stream {
    /// Tokens before a new one that its text may depend on.
    const CONTEXT: usize = 8;

    /// The bytes that the next token adds.
    pub fn next(&mut self, codec: &dyn Codec, token: u32) -> Result<Vec<u8>> {
        let old = codec.decode(&self.before)?;
        self.before.push(token);
        let new = codec.decode(&self.before)?;
        if self.before.len() > Self::CONTEXT {
            self.before.remove(0);
        }
        let same = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
        Ok(new[same.min(new.len())..].to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_by_token_gives_the_whole_text() {
        let bytes = Tokenizer::bytes();
        let text = "héllo wörld, and more than eight tokens".as_bytes();
        let ids = bytes.prompt(std::str::from_utf8(text).unwrap()).unwrap();
        assert_eq!(ids[0], 0);
        let mut stream = Stream::default();
        let told: Vec<u8> = ids[1..].iter().flat_map(|&id| stream.next(&bytes, id).unwrap()).collect();
        assert_eq!(told, text);
    }
}
