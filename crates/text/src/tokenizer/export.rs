//! A vocabulary as the files that other programs read: `tokenizer.json` (transformers) and llm.c's `tokenizer.bin`.

use ironhorse_train::format::tokenizer::Tokenizer as BinTokenizer;
use serde_json::{Map, Value, json};

use super::alphabet::spell;
use super::bpe::Bpe;
use super::merges::{Merges, NEVER};
use super::split::Pattern;

/// The `tokenizer.json` of a vocabulary whose ids are ranks.
pub fn tokenizer_json(bpe: &Bpe) -> String {
    let is_added = |id: usize| bpe.added().iter().any(|added| added.id as usize == id);
    let (mut vocab, mut merges) = (Map::new(), Vec::new());
    for (id, token) in bpe.tokens().iter().enumerate().filter(|(_, token)| !token.is_empty()) {
        // an added token keeps its id in `tokenizers` only if the vocabulary has it, too
        if is_added(id) {
            vocab.insert(String::from_utf8_lossy(token).into_owned(), id.into());
            continue;
        }
        vocab.insert(spell(token), id.into());
        if let Some((left, right)) = halves(bpe, id as u32) {
            merges.push(json!([spell(left), spell(right)]));
        }
    }
    let mut added: Vec<_> = bpe.added().iter().collect();
    added.sort_by_key(|token| token.id);
    let added: Vec<Value> = added
        .into_iter()
        .map(|token| {
            json!({
                "id": token.id, "content": token.content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": token.special,
            })
        })
        .collect();
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer(bpe.pattern()),
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
            "vocab": vocab, "merges": merges,
        },
    });
    format!("{json:#}\n")
}

/// The `pre_tokenizer` of a pattern.
pub fn pre_tokenizer(pattern: Pattern) -> Value {
    let byte_level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    match pattern {
        Pattern::Gpt2 => byte_level(true),
        other => json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": other.regex()}, "behavior": "Isolated", "invert": false},
            byte_level(false),
        ]}),
    }
}

/// The two tokens that merge into a token: what its bytes become by the merges before its own. None for a byte, and for
/// a token that merges do not reach.
fn halves(bpe: &Bpe, id: u32) -> Option<(&[u8], &[u8])> {
    let token = &bpe.tokens()[id as usize];
    let mut symbols: Vec<u32> = token.iter().map(|&byte| bpe.byte(byte)).collect();
    while symbols.len() > 2 {
        let (at, rank) = lowest(bpe.merges(), &symbols).filter(|&(_, rank)| rank < id)?;
        symbols[at] = bpe.merges().result(rank);
        symbols.remove(at + 1);
    }
    let [left, right] = symbols[..] else { return None };
    Some((&bpe.tokens()[left as usize], &bpe.tokens()[right as usize]))
}

fn lowest(merges: &Merges, symbols: &[u32]) -> Option<(usize, u32)> {
    let ranks = symbols.windows(2).map(|pair| merges.rank(pair[0], pair[1])).enumerate();
    ranks.filter(|&(_, rank)| rank != NEVER).min_by_key(|&(at, rank)| (rank, at))
}

/// llm.c's file, in which every token has 1 to 255 bytes: ids that stand for nothing get a name. None if a token is
/// longer, or if there is no end-of-text token.
pub fn tokenizer_bin(bpe: &Bpe, eot: Option<u32>) -> Option<BinTokenizer> {
    let named = |(id, token): (usize, &Vec<u8>)| match token.is_empty() {
        true => format!("<|unused{id}|>").into_bytes(),
        false => token.clone(),
    };
    let tokens: Vec<Vec<u8>> = bpe.tokens().iter().enumerate().map(named).collect();
    tokens.iter().all(|token| token.len() <= 255).then_some(BinTokenizer { tokens, eot: eot? })
}

#[cfg(test)]
mod tests {
    use super::super::bpe::Encoder;
    use super::super::{json::byte_level, named::NAMED};
    use super::*;

    #[test]
    fn a_named_vocabulary_survives_its_tokenizer_json() {
        let text =
            "The quick brown fox's 1234 jumps…\n\n  over  \tl'été \u{4f60}\u{597d} <|endoftext|> 😀 ZZZZqqqq";
        for named in &NAMED[..3] {
            let before = named.bpe().unwrap();
            let after = byte_level(tokenizer_json(&before).as_bytes()).unwrap();
            assert_eq!((before.tokens(), before.added()), (after.tokens(), after.added()));
            let ids = [&before, &after].map(|bpe| {
                let mut out = Vec::new();
                Encoder::new(bpe).encode(text, &mut out);
                out
            });
            assert_eq!(ids[0], ids[1], "{}", named.name);
            assert_eq!(before.decode(&ids[0]).unwrap(), text.as_bytes());
        }
    }

    #[test]
    fn gpt2_in_the_file_of_llm_c() {
        let bpe = NAMED[0].bpe().unwrap();
        let bin = tokenizer_bin(&bpe, Some(50256)).unwrap();
        assert_eq!((bin.tokens.len(), bin.tokens[0].as_slice()), (50257, b"!".as_slice()));
        assert_eq!(bin.tokens[50256], b"<|endoftext|>");
        assert!(tokenizer_bin(&bpe, None).is_none());
    }
}
