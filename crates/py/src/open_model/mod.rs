//! A model with its weights on a device: what `ironhorse.Model` is made of.
//!
//! ```text
//! mod.rs  the class    turn.rs  one call at a time, whichever thread makes it    watch.rs  signals, steps and notes to Python
//! ```

mod turn;
mod watch;

use crate::error;
use crate::model::{Described, told};
use ironhorse::train::run::Control;
use ironhorse_cli::{Calls, Ids, OpenModel as Inner, Refusal, Training};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use turn::Turn;
use watch::{Asked, Watcher};

/// A model, its tokenizer, and where they came from; `None` once it is closed.
#[pyclass(frozen, module = "ironhorse._native")]
pub struct OpenModel {
    turn: Turn,
    inner: Mutex<Option<Inner>>,
}

impl OpenModel {
    /// Runs `work` without the interpreter lock, when no other call uses the model. What it is given says whether Python wants
    /// it to stop, such as by Ctrl-C. A panic is a bug, which closes the model.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: &str,
        work: impl FnOnce(&mut Inner, &Asked) -> Result<T, Refusal> + Send,
    ) -> PyResult<T> {
        let _turn = self.turn.take(py, call)?;
        let asked = Asked::default();
        let done = py.detach(|| {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            let model = inner.as_mut()?;
            let done = catch_unwind(AssertUnwindSafe(|| work(model, &asked)));
            if done.is_err() {
                *inner = None;
            }
            Some(done)
        });
        match (asked.take(), done) {
            (Some(raised), _) => Err(raised),
            (None, None) => {
                Err(error::invalid(py, call, "the model is closed; open it again with from_pretrained"))
            }
            (None, Some(Ok(done))) => done.map_err(|refusal| error::of_refusal(py, &refusal)),
            (None, Some(Err(panic))) => {
                Err(error::named(py, "LaunchFailedError", &error::panicked(call, &*panic)))
            }
        }
    }
}

/// Rows of tokens of an array.
fn ids_of<'a>(name: &'static str, array: &'a PyReadonlyArray2<'_, i64>) -> PyResult<Ids<'a>> {
    let shape = array.shape();
    let (rows, cols) = (shape[0], shape[1]);
    Ok(Ids { name, rows, cols, ids: array.as_slice()? })
}

#[pymethods]
impl OpenModel {
    /// `args` are flags: `--model`, `--tokenizer` and those of the device.
    #[new]
    #[pyo3(signature = (args, /))]
    fn new(py: Python<'_>, args: Vec<OsString>) -> PyResult<Self> {
        let asked = Asked::default();
        let opened = py.detach(|| catch_unwind(AssertUnwindSafe(|| Inner::open(args, &asked.control()))));
        match (asked.take(), opened) {
            (Some(raised), _) => Err(raised),
            (None, Ok(opened)) => {
                let inner = opened.map_err(|refusal| error::of_refusal(py, &refusal))?;
                Ok(Self { turn: Turn::default(), inner: Mutex::new(Some(inner)) })
            }
            (None, Err(panic)) => {
                Err(error::named(py, "LaunchFailedError", &error::panicked("from_pretrained", &*panic)))
            }
        }
    }

    /// The path of the weights, the device, the element type, the kind of model and its sizes.
    fn facts(&self, py: Python<'_>) -> PyResult<(PathBuf, String, String, Described)> {
        self.with(py, "model", |model, _| {
            Ok((model.path().to_owned(), model.device().to_owned(), model.dtype()?, told(&model.config())))
        })
    }

    /// The base of weights with adapters in them, and the names of the weights that differ from it.
    fn adapted(&self, py: Python<'_>) -> PyResult<Option<(PathBuf, Vec<String>)>> {
        self.with(py, "model", |model, _| Ok(model.adapted().map(|from| (from.base, from.names))))
    }

    /// A weight by its name, in one dimension.
    #[pyo3(signature = (name, /))]
    fn weight<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyArray1<f32>>> {
        Ok(self.with(py, "state_dict", |model, _| model.weight(name))?.into_pyarray(py))
    }

    /// Gives back all memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let _turn = self.turn.take(py, "close")?;
        py.detach(|| self.inner.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    }

    /// The ids of a text; special tokens that are spelled out in it are tokens.
    #[pyo3(signature = (text, /))]
    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        self.with(py, "encode", |model, _| model.encode(text))
    }

    /// The text that ids stand for.
    #[pyo3(signature = (ids, /))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        self.with(py, "decode", |model, _| model.decode(&ids))
    }

    /// What a text is continued from.
    #[pyo3(signature = (text, /))]
    fn prompt(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        self.with(py, "generate", |model, _| model.prompt(text))
    }

    /// The logits after every token of rows: rows, tokens and vocabulary in one dimension.
    #[pyo3(signature = (ids, /))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        ids: PyReadonlyArray2<'py, i64>,
    ) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let ids = ids_of("ids", &ids)?;
        let logits = self.with(py, "logits", |model, asked| model.logits(ids, &asked.control()))?;
        Ok(logits.into_pyarray(py))
    }

    /// The mean loss of the labels that count.
    #[pyo3(signature = (ids, labels, /))]
    fn loss(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray2<'_, i64>,
        labels: PyReadonlyArray2<'_, i64>,
    ) -> PyResult<f64> {
        let (ids, labels) = (ids_of("ids", &ids)?, ids_of("labels", &labels)?);
        self.with(py, "loss", |model, asked| model.loss(ids, labels, &asked.control()))
    }

    /// What the answer to messages, a JSON list, is continued from, and the token that ends it.
    #[pyo3(signature = (messages, /))]
    fn chat_prompt(&self, py: Python<'_>, messages: &str) -> PyResult<(Vec<u32>, Option<u32>)> {
        self.with(py, "generate", |model, _| model.chat_prompt(messages))
    }

    /// The tokens that follow `prompt` until `end`, or the token between texts; `settings` are those of the command `generate`, as
    /// JSON.
    #[pyo3(signature = (prompt, end, settings, /))]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        end: Option<u32>,
        settings: &str,
    ) -> PyResult<Vec<u32>> {
        self.with(py, "generate", |model, asked| model.generate((&prompt, end), settings, &asked.control()))
    }

    /// Writes a Hugging Face folder; `settings` are those of the command `convert`, as JSON.
    #[pyo3(signature = (folder, settings, /))]
    fn save(&self, py: Python<'_>, folder: PathBuf, settings: &str) -> PyResult<()> {
        self.with(py, "save_pretrained", |model, _| model.save(&folder, settings))
    }

    /// Trains; `settings` are those of the command, `train` or `tune`, as JSON. `watcher` has the methods `begin(made, steps)`, `step(line)`,
    /// which may return False to stop, `sample(step, text)` and `note(text)`. Gives the command's report as JSON.
    #[pyo3(signature = (command, settings, watcher, /))]
    fn train(&self, py: Python<'_>, command: &str, settings: &str, watcher: Py<PyAny>) -> PyResult<String> {
        let command = if command == "tune" { Training::Tune } else { Training::Train };
        self.with(py, command.name(), |model, asked| {
            let control: Control = asked.control();
            let mut observer = Watcher::new(watcher, asked, &control);
            let note = observer.note_teller();
            model.train((command, settings), Calls { control: &control, observer: &mut observer, note })
        })
    }
}
