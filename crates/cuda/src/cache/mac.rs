//! HMAC-SHA256 (RFC 2104): only who has the key can make an entry that is loaded.

use sha2::{Digest, Sha256};

/// Bytes of a key and of a code.
pub(super) const BYTES: usize = 32;
/// Bytes that SHA-256 takes at a time.
const BLOCK: usize = 64;

/// The code of some parts, each with its length before it.
pub(super) fn code(key: &[u8; BYTES], parts: &[&[u8]]) -> [u8; BYTES] {
    let mut inner = Sha256::new();
    inner.update(pad(key, 0x36));
    for part in parts {
        inner.update((part.len() as u64).to_le_bytes());
        inner.update(part);
    }
    finish(key, inner)
}

/// Whether two codes are equal, in a time that does not depend on where they differ.
pub(super) fn equal(a: &[u8; BYTES], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn finish(key: &[u8; BYTES], inner: Sha256) -> [u8; BYTES] {
    let mut outer = Sha256::new();
    outer.update(pad(key, 0x5c));
    outer.update(inner.finalize());
    outer.finalize().into()
}

fn pad(key: &[u8; BYTES], with: u8) -> [u8; BLOCK] {
    let mut padded = [with; BLOCK];
    padded.iter_mut().zip(key).for_each(|(padded, key)| *padded ^= key);
    padded
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 1, whose key of 20 bytes is the same as one filled up with zeros.
    #[test]
    fn is_the_code_of_the_standard() {
        let mut key = [0; BYTES];
        key[..20].fill(0x0b);
        let mut inner = Sha256::new();
        inner.update(pad(&key, 0x36));
        inner.update(b"Hi There");
        let text: String = finish(&key, inner).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(text, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    }

    #[test]
    fn depends_on_the_key_and_on_every_part() {
        let base = code(&[1; BYTES], &[b"a", b"bc"]);
        assert!(equal(&base, &code(&[1; BYTES], &[b"a", b"bc"])));
        assert!(!equal(&base, &code(&[2; BYTES], &[b"a", b"bc"])));
        assert!(!equal(&base, &code(&[1; BYTES], &[b"ab", b"c"])));
        assert!(!equal(&base, &base[..31]));
    }
}
