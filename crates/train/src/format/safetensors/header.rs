//! The header: which tensors, of what type and shape, where.

use std::collections::HashMap;

use crate::format::Elem;

macro_rules! dtypes {
    ($($variant:ident $name:literal $size:literal $doc:literal,)*) => {
        /// Element types of safetensors.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Dtype {
            $(#[doc = $doc] $variant,)*
        }

        impl Dtype {
            const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name in the header.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bytes of one element.
            pub const fn size(self) -> usize {
                match self { $(Self::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" 1 "One byte, 0 or 1.",
    U8 "U8" 1 "Unsigned byte.",
    I8 "I8" 1 "Signed byte.",
    F8E5M2 "F8_E5M2" 1 "8-bit float, 5 bits of exponent.",
    F8E4M3 "F8_E4M3" 1 "8-bit float, 4 bits of exponent.",
    I16 "I16" 2 "16-bit integer.",
    U16 "U16" 2 "Unsigned 16-bit integer.",
    F16 "F16" 2 "IEEE half precision.",
    BF16 "BF16" 2 "The upper half of an f32.",
    I32 "I32" 4 "32-bit integer.",
    U32 "U32" 4 "Unsigned 32-bit integer.",
    F32 "F32" 4 "IEEE single precision.",
    F64 "F64" 8 "IEEE double precision.",
    I64 "I64" 8 "64-bit integer.",
    U64 "U64" 8 "Unsigned 64-bit integer.",
}

impl Dtype {
    /// The type of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        Self::ALL.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ")
    }

    /// The encoding for a conversion to f32, if that is possible.
    pub const fn elem(self) -> Option<Elem> {
        match self {
            Self::F32 => Some(Elem::F32),
            Self::BF16 => Some(Elem::BF16),
            Self::F16 => Some(Elem::F16),
            _ => None,
        }
    }
}

impl From<Elem> for Dtype {
    fn from(elem: Elem) -> Self {
        match elem {
            Elem::F32 => Self::F32,
            Elem::BF16 => Self::BF16,
            Elem::F16 => Self::F16,
        }
    }
}

/// The types that can be converted to f32, for messages.
pub(super) const FLOATS: &str = "F32, BF16 or F16";

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// A tensor of that name, type and shape.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }
}

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// First byte, counted from the end of the header.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

impl Entry {
    /// How many elements.
    pub fn numel(&self) -> usize {
        // the header was checked: the bytes are inside the file, so the quotient fits
        ((self.end - self.begin) / self.dtype.size() as u64) as usize
    }
}

/// Bytes of a tensor, or `None` where the product overflows.
pub(super) fn byte_len(dtype: Dtype, shape: &[usize]) -> Option<u64> {
    shape.iter().try_fold(dtype.size() as u64, |bytes, &dim| bytes.checked_mul(dim as u64))
}

/// A whole header, with its bytes.
#[derive(Clone, Debug)]
pub struct Header {
    pub(super) raw: Vec<u8>,
    pub(super) metadata: Vec<(String, String)>,
    pub(super) entries: Vec<Entry>,
    pub(super) by_name: HashMap<String, usize>,
    /// Indices of `entries` in the order of the file.
    pub(super) file_order: Vec<usize>,
}

impl Header {
    /// The tensors in the order of the header.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tensors in the order of the file.
    pub fn file_order(&self) -> impl Iterator<Item = &Entry> {
        self.file_order.iter().map(|&index| &self.entries[index])
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&index| &self.entries[index])
    }

    /// The metadata in the order of the header.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// One value of the metadata.
    pub fn meta(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|pair| pair.0 == key).map(|pair| &*pair.1)
    }

    /// The first bytes of a file: the length of the header, and the header.
    pub fn start(&self) -> Vec<u8> {
        [&(self.raw.len() as u64).to_le_bytes(), &self.raw[..]].concat()
    }

    /// Bytes of the data, all tensors together.
    pub fn data_len(&self) -> u64 {
        self.file_order.last().map_or(0, |&index| self.entries[index].end)
    }
}
