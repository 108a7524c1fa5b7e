//! The head of a file: metadata, then for every tensor its name, shape, type and place.

use super::numbers::GgufType;

/// The first bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;
/// Tensors start at multiples of this many bytes, counted from the end of the head, which is padded to one, too. It is what
/// readers assume of a file without `general.alignment`.
pub const ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A size or an id.
    U32(u32),
    /// A constant.
    F32(f32),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// An array of int32.
    I32s(Vec<i32>),
    /// An array of f32.
    F32s(Vec<f32>),
    /// An array of texts.
    Texts(Vec<String>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// The format's number of the type of an array.
const ARRAY: u32 = 9;

impl Value {
    /// The format's number of this type, of an array that of its elements.
    fn code(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::I32s(_) => 5,
            Self::F32(_) | Self::F32s(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) | Self::Texts(_) => 8,
        }
    }

    /// The length of an array.
    fn len(&self) -> Option<usize> {
        match self {
            Self::I32s(values) => Some(values.len()),
            Self::F32s(values) => Some(values.len()),
            Self::Texts(values) => Some(values.len()),
            Self::U32(_) | Self::F32(_) | Self::Bool(_) | Self::Text(_) => None,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        if let Some(len) = self.len() {
            out.extend(ARRAY.to_le_bytes());
            out.extend(self.code().to_le_bytes());
            out.extend((len as u64).to_le_bytes());
        } else {
            out.extend(self.code().to_le_bytes());
        }
        match self {
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Text(text) => put_text(out, text),
            Self::I32s(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
            Self::F32s(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
            Self::Texts(texts) => texts.iter().for_each(|text| put_text(out, text)),
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its dimensions, outermost first; the file has them the other way round.
    pub dims: Vec<usize>,
    /// The type of its numbers.
    pub kind: GgufType,
}

impl TensorInfo {
    /// Bytes of its numbers, without padding.
    pub fn bytes(&self) -> u64 {
        self.kind.bytes(self.dims.iter().map(|&dim| dim as u64).product())
    }

    /// Bytes after it until the next tensor may start.
    pub fn padding(&self) -> u64 {
        padding(self.bytes())
    }
}

/// Bytes from `len` to the next multiple of the alignment.
fn padding(len: u64) -> u64 {
    len.next_multiple_of(ALIGNMENT) - len
}

/// The head of a file with these metadata and tensors, padded.
pub fn encode(keys: &[(String, Value)], tensors: &[TensorInfo]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        put_text(&mut out, key);
        value.put(&mut out);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        put_text(&mut out, &tensor.name);
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().rev().for_each(|&dim| out.extend((dim as u64).to_le_bytes()));
        out.extend(tensor.kind.code().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes() + tensor.padding();
    }
    out.resize(out.len() + padding(out.len() as u64) as usize, 0);
    out
}
