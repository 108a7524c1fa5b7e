//! The checksum of checkpoints, written a second time: bit by bit.

/// CRC-32 as in zlib (reflected, polynomial 0x04c11db7).
pub fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_check_value_of_the_standard() {
        assert_eq!(super::crc32(b"123456789"), 0xcbf4_3926);
    }
}
