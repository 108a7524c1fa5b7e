//! Files of models: what they are and where their tensors are, as `ironhorse::train::format` reads and checks them. Python
//! maps the bytes. What is wrong with a file is a `FormatError`.

use crate::error;
use crate::model::{Described, told};
use ironhorse::train::Error;
use ironhorse::train::format::checkpoint::{Checkpoint, named_checkpoint};
use ironhorse::train::format::debug_state::DebugState;
use ironhorse::train::format::hf::HfFolder;
use ironhorse::train::format::llmc_model::ModelFile;
use ironhorse::train::format::safetensors::SafeTensors;
use ironhorse::train::format::tokenizer::Tokenizer;
use ironhorse::train::format::{Kind, Span, sniff};
use ironhorse::train::model::{ModelConfig, Notation};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::path::PathBuf;

/// A tensor: its name in the file, its element type, its shape there, the file, and its first byte.
type Place = (String, &'static str, Vec<usize>, PathBuf, u64);

/// The texts of `__metadata__`, in the order of the header.
type Metadata = Vec<(String, String)>;

fn place(span: Span) -> Place {
    (span.name, span.dtype.name(), span.shape, span.file, span.offset)
}

fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let text = match error {
        Error::Io { path, source, .. } => format!("{}: cannot read it ({source})", path.display()),
        other => other.to_string(),
    };
    error::named(py, "FormatError", &text)
}

/// Runs `read` without the interpreter lock.
fn without_lock<T: Send>(py: Python<'_>, read: impl FnOnce() -> Result<T, Error> + Send) -> PyResult<T> {
    py.detach(read).map_err(|error| raise(py, &error))
}

/// The kind of a file or folder, by its content.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub fn file_kind(py: Python<'_>, path: PathBuf) -> PyResult<&'static str> {
    let kind = without_lock(py, || sniff(&named_checkpoint(&path)?))?;
    Ok(match kind {
        Kind::Model => "model",
        Kind::DebugState => "state",
        Kind::Tokenizer => "tokenizer",
        Kind::Shard => "shard",
        Kind::MultipleChoice => "multiple-choice",
        Kind::AnswerKey => "key",
        Kind::HfFolder => "hf",
        Kind::HfFile => "hf-file",
        Kind::SafeTensors => "safetensors",
        Kind::Checkpoint => "checkpoint",
        Kind::Adapter => "adapter",
        Kind::Run => "run",
        Kind::Toml => "toml",
        Kind::Gguf => "gguf",
    })
}

/// The metadata and the tensors of a safetensors file.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub fn file_safetensors(py: Python<'_>, path: PathBuf) -> PyResult<(Metadata, Vec<Place>)> {
    without_lock(py, || {
        let file = SafeTensors::open(&path)?;
        Ok((file.header().metadata().to_vec(), file.spans().map(place).collect()))
    })
}

/// The sizes, the metadata and the parameters, under their stored names, of a Hugging Face folder.
#[pyfunction]
#[pyo3(signature = (folder, /))]
pub fn file_hf(py: Python<'_>, folder: PathBuf) -> PyResult<(Described, Metadata, Vec<Place>)> {
    without_lock(py, || {
        let found = HfFolder::open(&folder)?;
        let spans = found.spans().into_iter().map(place).collect();
        Ok((told(found.config()), found.metadata().cloned().collect(), spans))
    })
}

/// Checks a checkpoint, also `RUN/best`, or finds the newest whole one of a run: its folder, its sizes, and what is wrong with newer ones.
/// `check` compares the sizes and checksums of the files; without `state` the optimizer's moments are not looked at.
#[pyfunction]
#[pyo3(signature = (folder, state, check, /))]
pub fn file_checkpoint(
    py: Python<'_>,
    folder: PathBuf,
    state: bool,
    check: bool,
) -> PyResult<(PathBuf, Described, Vec<String>)> {
    let open = |folder: &std::path::Path| {
        let found = Checkpoint::open_as(folder, state, check)?;
        found.check_tensors(state)?;
        Ok(found)
    };
    without_lock(py, || {
        let folder = named_checkpoint(&folder)?;
        let (found, damage) = match sniff(&folder)? {
            Kind::Run => Checkpoint::of_run_as(&folder, open)?,
            _ => (open(&folder)?, Vec::new()),
        };
        Ok((found.path().to_owned(), told(found.config()), damage))
    })
}

/// The sizes and the tensors of a model `.bin`, without the padding of the vocabulary.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub fn file_model(py: Python<'_>, path: PathBuf) -> PyResult<(Described, Vec<Place>)> {
    without_lock(py, || {
        let file = ModelFile::open(&path)?;
        Ok((told(&(*file.config()).into()), file.spans().into_iter().map(place).collect()))
    })
}

/// The tensors of the debug state of a GPT-2 with these sizes: x, y, logits, loss, and gradients by parameter.
#[pyfunction]
#[pyo3(signature = (path, sizes, /))]
pub fn file_state(py: Python<'_>, path: PathBuf, sizes: &str) -> PyResult<Vec<Place>> {
    without_lock(py, || match ModelConfig::from_text(sizes, Notation::Json, Some("gpt2"))? {
        ModelConfig::Gpt2(config) => {
            Ok(DebugState::open(&path, &config)?.spans().into_iter().map(place).collect())
        }
        ModelConfig::Moe(_) => {
            Err(Error::Unsupported("a debug state is of a GPT-2, not of a mixture of experts".into()))
        }
    })
}

/// The tokens of a tokenizer, and the one that ends a text.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub fn file_tokenizer(py: Python<'_>, path: PathBuf) -> PyResult<(Vec<Bound<'_, PyBytes>>, u32)> {
    let Tokenizer { tokens, eot } = without_lock(py, || Tokenizer::open(&path))?;
    Ok((tokens.iter().map(|token| PyBytes::new(py, token)).collect(), eot))
}
