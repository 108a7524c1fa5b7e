//! The words that were encoded lately. Text repeats its words: looking one up is many times faster than merging it.

/// The longest word in the cache, in bytes.
pub const LONGEST: usize = 16;
/// The most tokens of a word in the cache.
const MOST: usize = 6;
/// Words: 3 MiB, so that it stays in the caches of a core.
const SLOTS: usize = 1 << 16;

/// A word of at most [`LONGEST`] bytes: its bytes as a number, and its length.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word {
    bytes: u128,
    len: u8,
}

#[derive(Clone, Copy)]
struct Slot {
    bytes: u128,
    ids: [u32; MOST],
    /// 0 in an empty slot.
    len: u8,
    count: u8,
}

/// Words and their tokens; a new word replaces the one in its slot.
pub struct Cache {
    slots: Vec<Slot>,
}

impl Cache {
    /// An empty one.
    pub fn new() -> Self {
        Self { slots: vec![Slot { bytes: 0, ids: [0; MOST], len: 0, count: 0 }; SLOTS] }
    }

    /// The word `text[start..end]`, which is not empty and at most [`LONGEST`] bytes long.
    #[inline]
    pub fn key(&self, text: &[u8], start: usize, end: usize) -> Word {
        let len = end - start;
        let bytes = match text.get(start..start + LONGEST).and_then(|word| word.first_chunk::<LONGEST>()) {
            Some(all) => u128::from_le_bytes(*all) & (u128::MAX >> (8 * (LONGEST - len))),
            None => {
                let mut all = [0; LONGEST];
                all[..len].copy_from_slice(&text[start..end]);
                u128::from_le_bytes(all)
            }
        };
        Word { bytes, len: len as u8 }
    }

    #[inline]
    fn slot(word: Word) -> usize {
        let (low, high) = (word.bytes as u64, (word.bytes >> 64) as u64);
        let mixed = (low ^ u64::from(word.len)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ high.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0x1656_67b1_9e37_79f9);
        (mixed >> (64 - SLOTS.trailing_zeros())) as usize
    }

    /// Appends the tokens of a word, if it is known.
    #[inline]
    pub fn get(&self, word: Word, out: &mut Vec<u32>) -> bool {
        let slot = &self.slots[Self::slot(word)];
        let known = slot.bytes == word.bytes && slot.len == word.len;
        if known {
            match slot.count {
                1 => out.push(slot.ids[0]),
                count => out.extend_from_slice(&slot.ids[..usize::from(count)]),
            }
        }
        known
    }

    /// Keeps the tokens of a word.
    pub fn put(&mut self, word: Word, tokens: &[u32]) {
        if tokens.len() > MOST {
            return;
        }
        let mut ids = [0; MOST];
        ids[..tokens.len()].copy_from_slice(tokens);
        self.slots[Self::slot(word)] =
            Slot { bytes: word.bytes, ids, len: word.len, count: tokens.len() as u8 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_equal_bytes_and_other_lengths_differ() {
        let mut cache = Cache::new();
        let text = b"a\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let (one, two) = (cache.key(text, 0, 1), cache.key(text, 0, 2));
        assert!(one != two);
        cache.put(one, &[1]);
        cache.put(two, &[1, 2]);
        let mut out = Vec::new();
        assert!(cache.get(two, &mut out) && out == [1, 2]);
        // at the end of the text the key is the same as in the middle
        assert!(cache.key(b"xab", 1, 3) == cache.key(b"xab and more than sixteen", 1, 3));
        assert!(!cache.get(cache.key(b"never", 0, 5), &mut out));
        cache.put(cache.key(b"many", 0, 4), &[0; MOST + 1]);
        assert!(!cache.get(cache.key(b"many", 0, 4), &mut out));
    }
}
