//! Vocabularies whose ids are ranks: tiktoken's rank files (`*.tiktoken`, Llama 3's `tokenizer.model`) and llm.c's
//! `tokenizer.bin`.

use std::collections::HashSet;

use ironhorse_train::format::tokenizer::Tokenizer as BinTokenizer;

use super::bpe::{Added, Bpe, BpeParts, Source};
use super::export::tokenizer_bin;
use super::json::MOST_GAPS;
use super::named::NAMED;
use super::split::Pattern;

/// A rank file has neither the split pattern nor the special tokens; which they are is known by the number of ranks.
struct Family {
    ranks: usize,
    pattern: Pattern,
    special: fn() -> Vec<(String, u32)>,
    eot: u32,
}

const FAMILIES: [Family; 7] = [
    Family { ranks: 50256, pattern: Pattern::Gpt2, special: || end_of_text(50256), eot: 50256 },
    Family { ranks: 50281, pattern: Pattern::Gpt2, special: || end_of_text(50256), eot: 50256 },
    Family { ranks: 100_256, pattern: Pattern::CL100K_TAIL, special: || end_of_text(100_257), eot: 100_257 },
    Family { ranks: 199_998, pattern: Pattern::O200k, special: || end_of_text(199_999), eot: 199_999 },
    Family { ranks: 128_000, pattern: Pattern::CL100K, special: llama3, eot: 128_001 },
    Family { ranks: 200_000, pattern: Pattern::O200k, special: llama4, eot: 200_001 },
    Family { ranks: 151_643, pattern: Pattern::QWEN2, special: qwen, eot: 151_643 },
];

fn end_of_text(id: u32) -> Vec<(String, u32)> {
    vec![("<|endoftext|>".into(), id)]
}

/// The 256 special tokens of Llama 3.
fn llama3() -> Vec<(String, u32)> {
    let known = |offset| match offset {
        0 => Some("begin_of_text"),
        1 => Some("end_of_text"),
        4 => Some("finetune_right_pad_id"),
        5 => Some("step_id"),
        6 => Some("start_header_id"),
        7 => Some("end_header_id"),
        8 => Some("eom_id"),
        9 => Some("eot_id"),
        10 => Some("python_tag"),
        11 => Some("image"),
        _ => None,
    };
    let mut reserved = 0;
    let mut name = |offset: u32| match known(offset) {
        Some(name) => format!("<|{name}|>"),
        None => {
            reserved += 1;
            format!("<|reserved_special_token_{}|>", reserved - 1)
        }
    };
    (0..256).map(|offset| (name(offset), 128_000 + offset)).collect()
}

/// The first special tokens of Llama 4; what follows is for images.
fn llama4() -> Vec<(String, u32)> {
    ["<|begin_of_text|>", "<|end_of_text|>"].map(String::from).into_iter().zip(200_000..).collect()
}

fn qwen() -> Vec<(String, u32)> {
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from).into_iter().zip(151_643..).collect()
}

/// A rank file: lines of a token in base64 and its rank. Returns the vocabulary and its end-of-text token.
pub fn read_tiktoken(text: &[u8]) -> Result<(Bpe, u32), String> {
    let text = std::str::from_utf8(text).map_err(|_| "is not UTF-8".to_owned())?;
    let mut tokens: Vec<Vec<u8>> = Vec::new();
    let most = text.lines().count() + MOST_GAPS;
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.is_empty()) {
        let wrong = || format!("line {number} is not a token in base64 and its rank");
        let (token, rank) = line.split_once(' ').ok_or_else(wrong)?;
        let token = base64(token).filter(|token| !token.is_empty()).ok_or_else(wrong)?;
        let rank = rank.trim().parse().ok().filter(|&rank: &usize| rank < most).ok_or_else(wrong)?;
        if rank >= tokens.len() {
            tokens.resize(rank + 1, Vec::new());
        }
        if !tokens[rank].is_empty() {
            return Err(format!("line {number} has rank {rank}, which another token has"));
        }
        tokens[rank] = token;
    }
    let family = FAMILIES.iter().find(|family| family.ranks == tokens.len()).ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().map(|family| family.ranks.to_string()).collect();
        let known = known.join(", ");
        format!(
            "has {} ranks, expected {known}: a rank file does not say how text is split; use the tokenizer.json of this vocabulary",
            tokens.len()
        )
    })?;
    let added = (family.special)().into_iter().map(|(content, id)| Added { content, id, special: true });
    let bpe = Bpe::new(BpeParts {
        tokens,
        merges: Source::Ids,
        pattern: family.pattern,
        nfc: false,
        added: added.collect(),
    })?;
    Ok((bpe, family.eot))
}

/// Decodes base64 (RFC 4648) with or without padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=');
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut word, mut bits) = (0u32, 0);
    for letter in text.bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        word = word << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((word >> bits) as u8);
        }
    }
    (bits < 6).then_some(bytes)
}

/// The merges of llm.c's `tokenizer.bin`, which has only the bytes of its tokens. The tokens of a vocabulary that is
/// part of the program are that vocabulary. Otherwise the ids are taken for ranks if the tokens could have been made in
/// the order of their ids: the 256 bytes are tokens, and every longer one but the end-of-text token is two of lower id.
/// The split pattern is then GPT-2's, the only one that llm.c writes such files for. None if the ids are not ranks.
pub fn of_bin(bin: &BinTokenizer) -> Option<Bpe> {
    for named in NAMED.iter().filter(|named| named.eot == bin.eot) {
        let Ok(bpe) = named.bpe() else { continue };
        if bpe.vocab_size() == bin.vocab_size() && tokenizer_bin(&bpe, Some(named.eot)).as_ref() == Some(bin)
        {
            return Some(bpe);
        }
    }
    let mut before: HashSet<&[u8]> =
        bin.tokens.iter().filter(|token| token.len() == 1).map(Vec::as_slice).collect();
    if before.len() < 256 {
        return None;
    }
    for (id, token) in (0..).zip(&bin.tokens).filter(|(_, token)| token.len() > 1) {
        let made = (1..token.len()).any(|cut| {
            let (left, right) = token.split_at(cut);
            before.contains(left) && before.contains(right)
        });
        if id == bin.eot {
            continue;
        }
        if !made {
            return None;
        }
        before.insert(token);
    }
    let content = String::from_utf8_lossy(bin.tokens.get(bin.eot as usize)?).into_owned();
    let single = bin.tokens[bin.eot as usize].len() == 1;
    let added = if single { Vec::new() } else { vec![Added { content, id: bin.eot, special: true }] };
    let tokens = bin.tokens.clone();
    Bpe::new(BpeParts { tokens, merges: Source::Ids, pattern: Pattern::Gpt2, nfc: false, added }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_decoded() {
        assert_eq!(base64("IQ==").unwrap(), b"!");
        assert_eq!(base64("YWI=").unwrap(), b"ab");
        assert_eq!(base64("YWJj").unwrap(), b"abc");
        assert_eq!(base64("").unwrap(), b"");
        assert!(base64("!").is_none() && base64("A").is_none());
    }

    #[test]
    fn a_wrong_rank_file_is_named() {
        let why = |text: &str| read_tiktoken(text.as_bytes()).unwrap_err();
        assert!(why("IQ== 0\nIQ==").starts_with("line 2 is not"));
        assert!(why("IQ== 99999999999").starts_with("line 1 is not"));
        assert!(why("IQ== 0\nIg== 0").contains("line 2 has rank 0"));
        assert!(why("IQ== 0").contains("has 1 ranks, expected 50256"));
        assert!(read_tiktoken(&[0xff]).is_err());
    }

    #[test]
    fn ids_that_are_not_ranks_are_seen() {
        let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        let with = |more: &[&str]| BinTokenizer {
            tokens: bytes.iter().cloned().chain(more.iter().map(|t| t.as_bytes().to_vec())).collect(),
            eot: 256,
        };
        assert!(of_bin(&with(&["<end>", "ab", "abc"])).is_some());
        assert!(of_bin(&with(&["<end>", "abc", "ab"])).is_none());
        assert!(of_bin(&BinTokenizer { tokens: vec![b"a".to_vec()], eot: 0 }).is_none());
    }

    #[test]
    fn gpt2_is_known_in_the_file_of_llm_c() {
        let bpe = NAMED[0].bpe().unwrap();
        let bin = tokenizer_bin(&bpe, Some(50256)).unwrap();
        let again = of_bin(&bin).unwrap();
        assert_eq!((again.tokens(), again.pattern()), (bpe.tokens(), Pattern::Gpt2));
    }
}
