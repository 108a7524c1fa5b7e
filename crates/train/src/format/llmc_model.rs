//! Model files `gpt2_*.bin`, version 3 (f32) and 5 (bf16).

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::atomic;
use super::header::{BinHeader, HEADER_BYTES, magic};
use super::stacked::{Stacked, expect_numel, filled, total_elements};
use super::{Elem, Sink, Source, Span};
use crate::model::{Gpt2Config, TensorSpec};
use crate::{Error, Result};
use ironhorse_core::op::Act;

/// An open model file. Rows of `wte` beyond the vocabulary should be 0, and are read unchanged.
#[derive(Debug)]
pub struct ModelFile<R = File> {
    source: Source<R>,
    header: BinHeader,
    config: Gpt2Config,
    elem: Elem,
    stacked: Stacked,
}

impl ModelFile<File> {
    /// Opens a file and checks its header and size.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(Source::open(path)?)
    }
}

impl<R: Read + Seek> ModelFile<R> {
    /// Checks the header and the size; reads no weights yet.
    pub fn new(mut source: Source<R>) -> Result<Self> {
        let header = BinHeader::read(&mut source, "GPT-2 model", &[magic::MODEL])?;
        let elem = if header.version(&source, &[3, 5])? == 3 { Elem::F32 } else { Elem::BF16 };
        let size = |at: usize, name: &str| header.positive(&source, at, name);
        let config = Gpt2Config {
            padded_vocab_size: size(7, "padded_vocab_size")?,
            ..Gpt2Config::new(
                size(2, "max_seq_len")?,
                size(3, "vocab_size")?,
                size(4, "n_layer")?,
                size(5, "n_head")?,
                size(6, "n_embd")?,
            )
        };
        config.validate().map_err(|error| error.in_file(source.path()))?;
        source.expect_len(HEADER_BYTES + total_elements(&config) * elem.size() as u64)?;
        Ok(Self { source, header, config, elem, stacked: Stacked::new(&config) })
    }

    /// The sizes in the header.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The encoding of the numbers in the file.
    pub fn elem(&self) -> Elem {
        self.elem
    }

    /// The header with its unnamed fields, for a byte-identical copy.
    pub fn header(&self) -> &BinHeader {
        &self.header
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Reads one tensor by its name in the parameter table.
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let (spec, offset) = &self.stacked.tensors()[self.stacked.find(name)?];
        expect_numel(name, out.len(), spec.shape.numel())?;
        self.source.read_f32(HEADER_BYTES + offset * self.elem.size() as u64, self.elem, out)
    }

    /// Where every tensor is, in file order, without the rows that pad the vocabulary.
    pub fn spans(&self) -> Vec<Span> {
        self.stacked.spans(self.path(), HEADER_BYTES, self.elem, self.config.vocab_size).collect()
    }
}

/// Rejects NaN and infinity with an error that names the tensor and the index of the first: row and column of a matrix.
/// `cols` returns the length of a row, 1 for a vector; it is called only for the error.
pub(crate) fn check_finite(
    path: &Path,
    name: &str,
    values: &[f32],
    cols: impl FnOnce() -> usize,
) -> Result<()> {
    let Some(index) = values.iter().position(|value| !value.is_finite()) else { return Ok(()) };
    let place = match cols() {
        0 | 1 => format!("{name}[{index}]"),
        cols => format!("{name}[{}, {}]", index / cols, index % cols),
    };
    Err(Error::field(path, place, values[index], "a finite number"))
}

/// The length of a row of a matrix; 1 for a vector.
pub(crate) fn row_len(spec: &TensorSpec) -> usize {
    if spec.shape.dims().len() == 1 { 1 } else { spec.shape.cols() }
}

/// How to write a model file.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// F32 (version 3) or BF16 (version 5).
    pub elem: Elem,
    /// The header of the file this is a copy of: its unnamed fields are kept.
    pub header: Option<BinHeader>,
}

/// Writes a model file atomically. `fill` is called once per tensor, in file order, with a zeroed buffer of its size.
pub fn write_model(
    path: &Path,
    config: &Gpt2Config,
    options: &ModelOptions,
    fill: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    atomic::write_file(path, |sink| write_model_to(sink, config, options, fill))
}

/// Writes a model file into `sink`.
pub fn write_model_to(
    sink: &mut Sink<'_>,
    config: &Gpt2Config,
    options: &ModelOptions,
    mut fill: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    config.validate()?;
    if config.act != Act::Gelu {
        return Err(Error::Unsupported(format!(
            "a model .bin has GELU and no other activation, but this model has {}; write a Hugging Face folder",
            config.act
        )));
    }
    let version = match options.elem {
        Elem::F32 => 3,
        Elem::BF16 => 5,
        Elem::F16 => return Err(Error::Unsupported("a model .bin holds f32 or bf16, not f16".into())),
    };
    let sizes = [
        ("max_seq_len", config.max_seq_len),
        ("vocab_size", config.vocab_size),
        ("n_layer", config.n_layer),
        ("n_head", config.n_head),
        ("n_embd", config.n_embd),
        ("padded_vocab_size", config.padded_vocab_size),
    ];
    let mut fields = vec![magic::MODEL, version];
    for (name, size) in sizes {
        let field = i32::try_from(size);
        fields.push(field.map_err(|_| Error::field(sink.path(), name, size, "at most 2147483647"))?);
    }
    let base = options.header.clone().unwrap_or_else(|| BinHeader::new(&[]));
    base.with(&fields).write(sink)?;
    let mut values = Vec::new();
    for (spec, _) in Stacked::new(config).tensors() {
        filled(spec, &mut values, &mut fill)?;
        sink.put_f32(options.elem, &values)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::WeightSource;
    use crate::format::sink::tests::FullAfter;

    const CONFIG: Gpt2Config = Gpt2Config { padded_vocab_size: 7, ..Gpt2Config::new(3, 5, 2, 2, 4) };

    /// A model whose n-th number in the file is n / 8, written without the code under test.
    fn bytes(version: i32) -> Vec<u8> {
        let fields = [magic::MODEL, version, 3, 5, 2, 2, 4, 7];
        let mut bytes: Vec<u8> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        for n in 0..CONFIG.num_params() {
            let value = n as f32 / 8.0;
            let wide = value.to_le_bytes();
            bytes.extend_from_slice(if version == 3 { &wide } else { &wide[2..] });
        }
        bytes
    }

    fn open(bytes: Vec<u8>) -> Result<ModelFile<std::io::Cursor<Vec<u8>>>> {
        ModelFile::new(Source::memory(bytes, "m.bin"))
    }

    fn patched(field: usize, value: i32) -> String {
        let mut bytes = bytes(3);
        bytes[4 * field..4 * field + 4].copy_from_slice(&value.to_le_bytes());
        open(bytes).unwrap_err().to_string()
    }

    #[test]
    fn tensors_are_found_by_name() {
        let mut model = open(bytes(3)).unwrap();
        assert_eq!(*model.config(), CONFIG);
        let mut ln = [0.0; 4];
        model.read_tensor("h.1.ln_1.weight", &mut ln).unwrap();
        let first = (7 * 4 + 3 * 4 + 4) as f32; // after wte, wpe and layer 0 of the stack
        assert_eq!(ln, [0.0, 1.0, 2.0, 3.0].map(|n| (first + n) / 8.0));
        let mut seen = 0;
        for span in model.spans() {
            let spec = CONFIG.tensors().into_iter().find(|spec| spec.name == span.name).unwrap();
            let mut values = vec![0.0; spec.shape.numel()];
            model.read_tensor(&spec.name, &mut values).unwrap();
            assert_eq!(values[0], seen as f32 / 8.0);
            seen += values.len();
        }
        assert_eq!(seen, CONFIG.num_params());
        assert!(
            model
                .read_tensor("h.2.ln_1.weight", &mut ln)
                .unwrap_err()
                .to_string()
                .contains("h.2.ln_1.weight")
        );
        let text = model.read_tensor("ln_f.bias", &mut [0.0; 3]).unwrap_err().to_string();
        assert_eq!(text, "size of the buffer for tensor `ln_f.bias` is 3, expected 4 elements");
    }

    #[test]
    fn both_versions_round_trip_with_their_unnamed_fields() {
        for (version, elem) in [(3, Elem::F32), (5, Elem::BF16)] {
            let mut before = bytes(version);
            before[1020] = 77;
            let mut model = open(before.clone()).unwrap();
            assert_eq!(model.elem(), elem);
            let options = ModelOptions { elem, header: Some(model.header().clone()) };
            let mut after = Vec::new();
            let mut sink = Sink::new(&mut after, Path::new("copy"));
            write_model_to(&mut sink, &CONFIG, &options, |spec, out| model.read_tensor(&spec.name, out))
                .unwrap();
            assert_eq!(sink.crc32(), crc32fast::hash(&before));
            assert!(before == after);
        }
    }

    #[test]
    fn broken_headers_are_named() {
        assert_eq!(patched(0, 1), "m.bin: magic is 1, expected 20240326 (GPT-2 model)");
        assert_eq!(patched(1, 2), "m.bin: version is 2, expected 3 or 5");
        assert_eq!(patched(2, -1), "m.bin: max_seq_len (header field 2) is -1, expected at least 1");
        assert_eq!(patched(4, 0), "m.bin: n_layer (header field 4) is 0, expected at least 1");
        assert_eq!(patched(5, 3), "m.bin: n_head is 3, expected a divisor of n_embd, 4");
        assert_eq!(patched(7, 4), "m.bin: padded_vocab_size is 4, expected at least vocab_size, 5");
        assert!(patched(4, i32::MAX).starts_with("m.bin: n_layer is 2147483647, expected at most"));
        assert!(patched(6, 1 << 30).contains("expected at most 2^40"));
        let size = bytes(3).len();
        assert_eq!(patched(2, 4), format!("m.bin: file size is {size} bytes, expected {} bytes", size + 16));
        let text = open(bytes(3)[..1000].to_vec()).unwrap_err().to_string();
        assert_eq!(
            text,
            "m.bin: file size is 1000 bytes, expected at least 1024 bytes, the header of a GPT-2 model"
        );
        assert!(open(bytes(3)[..size - 1].to_vec()).is_err());
        assert!(open([bytes(3), vec![0]].concat()).is_err());
        assert!(open(Vec::new()).is_err());
    }

    #[test]
    fn bad_weights_are_named() {
        let mut broken = bytes(3);
        let at = 1024 + 4 * (7 * 4 + 2); // wpe.weight[2]
        broken[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        let mut model = open(broken).unwrap();
        let mut values = vec![0.0; CONFIG.max_seq_len * CONFIG.n_embd];
        model.read_tensor("wpe.weight", &mut values).unwrap();
        let text = WeightSource::read_tensor(&mut model, "wpe.weight", &mut values).unwrap_err().to_string();
        assert_eq!(text, "m.bin: wpe.weight[0, 2] is NaN, expected a finite number");
    }

    #[test]
    fn a_full_disk_and_a_refusal_stop_the_writer() {
        let options = ModelOptions { elem: Elem::F32, header: None };
        let mut disk = FullAfter(1500);
        let mut sink = Sink::new(&mut disk, Path::new("m.bin"));
        let error = write_model_to(&mut sink, &CONFIG, &options, |_, _| Ok(())).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.bin");
        let refuse = |spec: &TensorSpec, _: &mut [f32]| Err(Error::Unsupported(format!("no {}", spec.name)));
        let error = write_model(&path, &CONFIG, &options, refuse).unwrap_err();
        assert_eq!(error.to_string(), "no wte.weight");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        write_model(&path, &CONFIG, &options, |_, _| Ok(())).unwrap();
        ModelFile::open(&path).unwrap();
    }
}
