//! The vocabularies of tiktoken, by name. `build.rs` packs their ranks out of the crate `tiktoken-rs` (MIT).

use std::io::Read;

use super::bpe::{Added, Bpe, BpeParts, Source};
use super::split::Pattern;
use crate::{Error, Result};

/// A vocabulary that is part of the program.
pub struct Named {
    /// Its name.
    pub name: &'static str,
    packed: &'static [u8],
    /// Ids that are ranks.
    ranks: usize,
    pattern: Pattern,
    special: &'static [(&'static str, u32)],
    /// Its document separator.
    pub eot: u32,
}

const P50K: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/p50k_base.ranks"));
const CL100K: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cl100k_base.ranks"));
const O200K: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/o200k_base.ranks"));
const END: &str = "<|endoftext|>";

/// The tokenizers that are known by name. The ranks of GPT-2 are the first of `p50k_base`.
pub const NAMED: [Named; 4] = [
    Named {
        name: "gpt2",
        packed: P50K,
        ranks: 50256,
        pattern: Pattern::Gpt2,
        special: &[(END, 50256)],
        eot: 50256,
    },
    Named {
        name: "p50k_base",
        packed: P50K,
        ranks: 50281,
        pattern: Pattern::Gpt2,
        special: &[(END, 50256)],
        eot: 50256,
    },
    Named {
        name: "cl100k_base",
        packed: CL100K,
        ranks: 100_256,
        pattern: Pattern::CL100K_TAIL,
        special: &[
            (END, 100_257),
            ("<|fim_prefix|>", 100_258),
            ("<|fim_middle|>", 100_259),
            ("<|fim_suffix|>", 100_260),
            ("<|endofprompt|>", 100_276),
        ],
        eot: 100_257,
    },
    Named {
        name: "o200k_base",
        packed: O200K,
        ranks: 199_998,
        pattern: Pattern::O200k,
        special: &[(END, 199_999), ("<|endofprompt|>", 200_018)],
        eot: 199_999,
    },
];

/// The vocabulary of a name; `r50k_base` is tiktoken's name for GPT-2's.
pub fn find(name: &str) -> Option<&'static Named> {
    let name = if name == "r50k_base" { "gpt2" } else { name };
    NAMED.iter().find(|named| named.name == name)
}

impl Named {
    /// The bytes of every rank.
    pub fn ranks(&self) -> Result<Vec<Vec<u8>>> {
        let mut raw = Vec::new();
        let unpacked = flate2::read::DeflateDecoder::new(self.packed).read_to_end(&mut raw);
        unpacked.map_err(|error| Error::tokenizer(self.name, error))?;
        let mut tokens = Vec::with_capacity(self.ranks);
        let mut rest = raw.as_slice();
        while let Some((&len, after)) = rest.split_first().filter(|_| tokens.len() < self.ranks) {
            let (token, after) = after
                .split_at_checked(usize::from(len))
                .ok_or_else(|| Error::tokenizer(self.name, "its ranks are damaged"))?;
            tokens.push(token.to_vec());
            rest = after;
        }
        Ok(tokens)
    }

    /// The tables of the vocabulary.
    pub fn bpe(&self) -> Result<Bpe> {
        let added =
            self.special.iter().map(|&(content, id)| Added { content: content.into(), id, special: true });
        let parts = BpeParts {
            tokens: self.ranks()?,
            merges: Source::Ids,
            pattern: self.pattern,
            nfc: false,
            added: added.collect(),
        };
        Bpe::new(parts).map_err(|problem| Error::tokenizer(self.name, problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    /// RFC 4648, with padding.
    fn base64(bytes: &[u8]) -> String {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for chunk in bytes.chunks(3) {
            let word =
                chunk.iter().fold(0u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
            for place in 0..4 {
                let letter = LETTERS[(word >> (18 - 6 * place) & 63) as usize];
                text.push(if place <= chunk.len() { letter.into() } else { '=' });
            }
        }
        text
    }

    #[test]
    fn the_ranks_are_those_that_openai_publishes() {
        // the hashes of the rank files, as tiktoken's openai_public.py states them
        let published = [
            ("gpt2", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"),
            ("p50k_base", "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"),
            ("cl100k_base", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"),
            ("o200k_base", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"),
        ];
        for (name, want) in published {
            let ranks = find(name).unwrap().ranks().unwrap();
            let lines = ranks.iter().enumerate().filter(|(_, token)| !token.is_empty());
            let file: String = lines.map(|(rank, token)| format!("{} {rank}\n", base64(token))).collect();
            assert_eq!(format!("{:x}", Sha256::digest(file)), want, "{name}");
        }
        assert_eq!(find("r50k_base").unwrap().name, "gpt2");
        assert!(find("gpt3").is_none());
    }
}
