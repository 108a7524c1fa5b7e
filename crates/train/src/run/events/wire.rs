//! What event files are made of: protobuf fields, and records with checksums.
//!
//! A record is its length (u64), the masked CRC-32C of those eight bytes, the message, and the masked CRC-32C of the message,
//! all little-endian.

/// CRC-32C (Castagnoli) of every byte, reflected.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// The CRC-32C of bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, &byte| (crc >> 8) ^ TABLE[((crc ^ u32::from(byte)) & 0xff) as usize])
}

/// A checksum as records keep it: that of data which holds checksums itself would otherwise be weak.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// A message as a record.
pub fn record(message: &[u8]) -> Vec<u8> {
    let len = (message.len() as u64).to_le_bytes();
    [&len, &masked(&len)[..], message, &masked(message)].concat()
}

/// The message of the record at the start of `bytes`, and the bytes after it; `None` where there is no whole and right one.
pub fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    let (crc, rest) = rest.split_first_chunk::<4>()?;
    let size = usize::try_from(u64::from_le_bytes(*len)).ok().filter(|_| *crc == masked(len))?;
    let (message, rest) = rest.split_at_checked(size)?;
    let (crc, rest) = rest.split_first_chunk::<4>()?;
    (*crc == masked(message)).then_some((message, rest))
}

/// A message being written.
#[derive(Debug, Default)]
pub struct Message(pub Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire: u32) {
        self.varint(u64::from(field << 3 | wire));
    }

    /// A whole number.
    pub fn number(mut self, field: u32, value: u64) -> Self {
        self.key(field, 0);
        self.varint(value);
        self
    }

    /// A double.
    pub fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A float.
    pub fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A text, bytes, or a message.
    pub fn bytes(mut self, field: u32, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref();
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    /// Doubles, packed.
    pub fn doubles(self, field: u32, values: impl Iterator<Item = f64>) -> Self {
        let packed: Vec<u8> = values.flat_map(f64::to_le_bytes).collect();
        self.bytes(field, packed)
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A field of a message that is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Field<'a> {
    Number(u64),
    /// Eight or four bytes: a double or a float.
    Fixed(&'a [u8]),
    Bytes(&'a [u8]),
}

/// The fields of a message with their numbers; ends where it is not one.
pub fn fields(mut bytes: &[u8]) -> impl Iterator<Item = (u32, Field<'_>)> {
    fn varint(bytes: &mut &[u8]) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = bytes.split_first()?;
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }
    fn take<'a>(bytes: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = bytes.split_at_checked(len)?;
        *bytes = rest;
        Some(taken)
    }
    std::iter::from_fn(move || {
        let key = varint(&mut bytes)?;
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)?),
            1 => Field::Fixed(take(&mut bytes, 8)?),
            2 => {
                let len = usize::try_from(varint(&mut bytes)?).ok()?;
                Field::Bytes(take(&mut bytes, len)?)
            }
            5 => Field::Fixed(take(&mut bytes, 4)?),
            _ => return None,
        };
        Some(((key >> 3) as u32, field))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_castagnolis() {
        // the check value of CRC-32C, and those of RFC 3720
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    #[test]
    fn a_record_is_read_back_and_a_damaged_one_is_not() {
        let message = Message::default().number(2, 300).bytes(3, "text").double(1, 0.5).float(4, -1.5);
        let bytes = record(&message.0);
        let (read, rest) = split_record(&bytes).unwrap();
        assert!(rest.is_empty());
        let all: Vec<_> = fields(read).collect();
        assert_eq!(all[..2], [(2, Field::Number(300)), (3, Field::Bytes(b"text"))]);
        assert_eq!(
            all[2..],
            [(1, Field::Fixed(&0.5_f64.to_le_bytes())), (4, Field::Fixed(&(-1.5_f32).to_le_bytes()))]
        );
        for at in 0..bytes.len() {
            assert_eq!(split_record(&bytes[..at]), None, "cut at {at}");
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert_eq!(split_record(&wrong), None, "wrong at {at}");
        }
    }
}
