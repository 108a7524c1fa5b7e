//! Writing tensors in the order of the header, streamed.

use super::header::{Dtype, FLOATS, Header};
use crate::format::Sink;
use crate::{Error, Result};

/// Writes the header, then the tensors one after the other.
pub struct Writer<'a, 'out> {
    sink: &'a mut Sink<'out>,
    header: Header,
    next: usize,
}

impl<'a, 'out> Writer<'a, 'out> {
    /// Writes the header: a new one, or that of a file to copy.
    pub fn new(sink: &'a mut Sink<'out>, header: Header) -> Result<Self> {
        sink.put(&header.start())?;
        Ok(Self { sink, header, next: 0 })
    }

    fn wrong(&self, field: impl Into<String>, found: impl ToString, expected: impl ToString) -> Error {
        Error::field(self.sink.path(), field, found, expected)
    }

    /// The type of the next tensor, which must have this name and size.
    fn expect(&mut self, name: &str, numel: usize) -> Result<Dtype> {
        let Some(&index) = self.header.file_order.get(self.next) else {
            return Err(self.wrong("tensor", format!("`{name}`"), "no more tensors"));
        };
        let entry = &self.header.entries[index];
        if entry.name != name {
            return Err(self.wrong("tensor", format!("`{name}`"), format!("`{}`", entry.name)));
        }
        if entry.numel() != numel {
            let expected = format!("{} elements", entry.numel());
            return Err(self.wrong(format!("size of `{name}`"), numel, expected));
        }
        self.next += 1;
        Ok(entry.dtype)
    }

    /// Writes the next tensor, converted to the type in the header.
    pub fn put_f32(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let dtype = self.expect(name, values.len())?;
        match dtype.elem() {
            Some(elem) => self.sink.put_f32(elem, values),
            None => Err(self.wrong(format!("dtype of `{name}`"), dtype.name(), FLOATS)),
        }
    }

    /// Writes the next tensor, of type I32.
    pub fn put_i32(&mut self, name: &str, values: &[i32]) -> Result<()> {
        self.put_with(name, Dtype::I32, values.len(), |sink| sink.put_i32(values))
    }

    /// Writes the bytes of the next tensor unchanged.
    pub fn put_bytes(&mut self, name: &str, dtype: Dtype, bytes: &[u8]) -> Result<()> {
        self.put_with(name, dtype, bytes.len() / dtype.size(), |sink| sink.put(bytes))
    }

    /// Writes the next tensor, of this type and size, through `body`, which must write all of its bytes.
    pub(super) fn put_with(
        &mut self,
        name: &str,
        dtype: Dtype,
        numel: usize,
        body: impl FnOnce(&mut Sink<'out>) -> Result<()>,
    ) -> Result<()> {
        let ours = self.expect(name, numel)?;
        if ours != dtype {
            return Err(self.wrong(format!("dtype of `{name}`"), dtype.name(), ours.name()));
        }
        body(self.sink)
    }

    /// Checks that every tensor was written.
    pub fn finish(self) -> Result<()> {
        match self.header.file_order.get(self.next) {
            None => Ok(()),
            Some(&index) => {
                let name = &self.header.entries[index].name;
                Err(self.wrong(format!("tensor `{name}`"), "not written", "every tensor"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{SafeTensors, TensorInfo};
    use super::*;
    use crate::format::Source;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn open(bytes: Vec<u8>) -> Result<SafeTensors<std::io::Cursor<Vec<u8>>>> {
        SafeTensors::new(Source::memory(bytes, "f"))
    }

    fn refusal(header: &str, data: &[u8]) -> String {
        open(file(header, data)).unwrap_err().to_string()
    }

    /// Laid out as the Python package does: metadata first, spaces to a multiple of 8.
    const PYTHON: &str = concat!(
        r#"{"__metadata__":{"format":"pt","note":"ü"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"#,
        r#""a":{"dtype":"I32","shape":[],"data_offsets":[8,12]},"e":{"dtype":"F64","shape":[0,3],"data_offsets":[12,12]},"#,
        r#""c":{"dtype":"BF16","shape":[3],"data_offsets":[12,18]},"d":{"dtype":"F16","shape":[1],"data_offsets":[18,20]}}   "#,
    );
    const DATA: [u8; 20] = [0, 0, 128, 63, 0, 0, 0, 192, 7, 0, 0, 0, 128, 63, 0, 192, 192, 127, 0, 0x3c];

    #[test]
    fn tensors_are_read_and_widened() {
        let mut file = open(file(PYTHON, &DATA)).unwrap();
        assert_eq!(file.header().meta("note"), Some("ü"));
        assert_eq!(file.read_f32_vec("b").unwrap(), [1.0, -2.0]);
        assert_eq!(file.read_i32("a").unwrap(), [7]);
        let c = file.read_f32_vec("c").unwrap();
        assert!(c[0] == 1.0 && c[1] == -2.0 && c[2].is_nan());
        assert_eq!(file.read_f32_vec("d").unwrap(), [1.0]);
        let mut tail = [0.0];
        file.read_f32_at("b", 1, &mut tail).unwrap();
        assert_eq!(tail, [-2.0]);
        assert_eq!(
            file.read_f32("b", &mut tail).unwrap_err().to_string(),
            "f: size of `b` is 2, expected 1 elements"
        );
        assert_eq!(
            file.read_f32_vec("z").unwrap_err().to_string(),
            "f: tensor `z` is missing, expected in the file"
        );
        assert_eq!(
            file.read_f32_vec("a").unwrap_err().to_string(),
            "f: dtype of `a` is I32, expected F32, BF16 or F16"
        );
        assert_eq!(file.read_i32("b").unwrap_err().to_string(), "f: dtype of `b` is F32, expected I32");
        assert!(file.read_f32_at("b", usize::MAX, &mut tail).is_err());
        assert_eq!(file.crc32("a").unwrap(), crc32fast::hash(&[7, 0, 0, 0]));
    }

    #[test]
    fn a_copy_is_byte_identical() {
        // the second has its data in another order than its header
        let swapped = r#"{"b":{"data_offsets":[4,8],"dtype":"F32","shape":[1]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} "#;
        for before in [file(PYTHON, &DATA), file(swapped, &DATA[..8]), file("{}", &[])] {
            let mut after = Vec::new();
            open(before.clone()).unwrap().copy_to(&mut Sink::new(&mut after, Path::new("copy"))).unwrap();
            assert!(after == before);
        }
    }

    #[test]
    fn a_new_file_is_padded_and_in_order() {
        let tensors = [TensorInfo::new("z", Dtype::BF16, [3]), TensorInfo::new("a", Dtype::I32, [1])];
        let header = Header::build(&[("k".into(), "v\"".into())], &tensors).unwrap();
        let mut bytes = Vec::new();
        let mut sink = Sink::new(&mut bytes, Path::new("f"));
        let mut writer = Writer::new(&mut sink, header.clone()).unwrap();
        assert!(writer.put_i32("a", &[5]).unwrap_err().to_string().contains("tensor is `a`, expected `z`"));
        assert!(
            writer
                .put_f32("z", &[1.0])
                .unwrap_err()
                .to_string()
                .contains("size of `z` is 1, expected 3 elements")
        );
        writer.put_f32("z", &[1.0, 2.0, 3.0]).unwrap();
        writer.put_i32("a", &[5]).unwrap();
        assert!(writer.put_i32("a", &[5]).is_err());
        writer.finish().unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(length % 8, 0);
        let text = r#"{"__metadata__":{"k":"v\""},"z":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},"a":{"dtype":"I32","shape":[1],"data_offsets":[6,10]}}"#;
        assert!(
            std::str::from_utf8(&bytes[8..]).unwrap_or_default().starts_with(text)
                || bytes[8..].starts_with(text.as_bytes())
        );
        let mut file = open(bytes).unwrap();
        assert_eq!(file.read_f32_vec("z").unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(file.read_i32("a").unwrap(), [5]);

        let mut bytes = Vec::new();
        let mut sink = Sink::new(&mut bytes, Path::new("f"));
        assert!(
            Writer::new(&mut sink, header)
                .unwrap()
                .finish()
                .unwrap_err()
                .to_string()
                .contains("`z` is not written")
        );
        assert!(Header::build(&[], &[tensors[0].clone(), tensors[0].clone()]).is_err());
        assert!(Header::build(&[], &[TensorInfo::new("big", Dtype::F32, [usize::MAX, 2])]).is_err());
        assert!(Header::build(&[], &[TensorInfo::new("__metadata__", Dtype::F32, [1])]).is_err());
    }

    #[test]
    fn broken_headers_are_named() {
        let one = |entry: &str| format!(r#"{{"a":{entry}}}"#);
        let cases = [
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,8]}"#), "data_offsets of `a` is [0, 8], expected 4 bytes apart"),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[8,4]}"#), "data_offsets of `a` is [8, 4]"),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#), "expected to begin at 0"),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#), "size of the data is 8 bytes, expected 4 bytes"),
            (one(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,12]}"#), "size of the data is 8 bytes, expected 12 bytes"),
            (one(r#"{"dtype":"F99","shape":[2],"data_offsets":[0,8]}"#), "dtype of `a` is F99, expected BOOL, U8,"),
            (one(r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#), "header is not valid"),
            (one(r#"{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}"#), "expected fewer than 2^64 bytes"),
            (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}"#), "unknown field `x`"),
            (one(r#"{"dtype":"F32","shape":[2]}"#), "missing field `data_offsets`"),
            (one("1"), "header is not valid"),
            (r#"{"__metadata__":{"a":1}}"#.into(), "header is not valid"),
            (r#"{"__metadata__":{"a":"1","a":"2"}}"#.into(), "metadata `a` is given twice"),
            (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), "__metadata__ is given twice"),
            (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#.into(), "tensor `a` is given twice"),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#.into(), "expected to begin at 8"),
            ("[]".into(), "first byte of the header is 91"),
            ("{}x".into(), "header is not valid"),
        ];
        for (header, want) in cases {
            let text = refusal(&header, &[0; 8]);
            assert!(text.contains(want) && text.starts_with("f: ") && text.lines().count() == 1, "{text}");
        }
        assert!(open(vec![1; 7]).unwrap_err().to_string().contains("file size is 7 bytes"));
        assert!(
            open(vec![255; 100])
                .unwrap_err()
                .to_string()
                .contains("header length is 18446744073709551615, expected 2 to 92")
        );
        assert!(open(vec![0; 100]).unwrap_err().to_string().contains("header length is 0"));
    }
}
