//! GPT-2's way of writing bytes as printable characters, in which `vocab.json` and `tokenizer.json` spell tokens.

use std::collections::HashMap;
use std::sync::LazyLock;

/// The character of every byte: itself where it is printable Latin-1, else the next free one from U+0100 on.
static CHARACTERS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return char::from(byte as u8);
        }
        next += 1;
        char::from_u32(next - 1).unwrap_or(' ')
    })
});

static BYTES: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| CHARACTERS.iter().copied().zip(0..=u8::MAX).collect());

/// The spelling of a token.
pub fn spell(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| CHARACTERS[usize::from(byte)]).collect()
}

/// The bytes of a spelled token, if all of its characters stand for bytes.
pub fn bytes_of(spelled: &str) -> Option<Vec<u8>> {
    spelled.chars().map(|c| BYTES.get(&c).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        assert_eq!(spell(b" a\n\xc3\xa9"), "ĠaĊÃ©");
        assert_eq!(spell(&[0, 0x20, 0x7f, 0xa0, 0xad]), "ĀĠġłŃ"); // as in GPT-2's vocab.json
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes_of(&spell(&all)).unwrap(), all);
        assert_eq!(bytes_of("a b"), None);
    }
}
