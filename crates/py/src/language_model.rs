//! A model with its weights on a device: what `ironhorse.lm_eval` is made of.

use crate::error;
use ironhorse::train::generate::sample::Sampler;
use ironhorse_cli::{LanguageModel as Inner, Refusal, Writing};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A model and its tokenizer.
#[pyclass(frozen, module = "ironhorse._native")]
pub struct LanguageModel(Mutex<Inner>);

/// The sum of the logarithms of the probabilities, how many tokens were counted, and whether each is the most likely one.
type Likelihood = (f64, usize, bool);

impl LanguageModel {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` without the interpreter lock. What it is given says whether Python wants it to stop, such as by Ctrl-C.
    fn working<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Inner, &mut dyn FnMut() -> ControlFlow<()>) -> Result<T, Refusal> + Send,
    ) -> PyResult<T> {
        let mut stopped = None;
        let done = py.detach(|| {
            let mut ask = || match Python::attach(|py| py.check_signals()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    stopped = Some(error);
                    ControlFlow::Break(())
                }
            };
            work(&mut self.lock(), &mut ask)
        });
        match stopped {
            Some(error) => Err(error),
            None => done.map_err(|refusal| error::of_refusal(py, &refusal)),
        }
    }
}

#[pymethods]
impl LanguageModel {
    /// `args` are flags: `--model`, `--tokenizer`, `--seq`, `--batch-tokens`, `--batch-texts` and those of the device.
    #[new]
    #[pyo3(signature = (args, /))]
    fn new(py: Python<'_>, args: Vec<OsString>) -> PyResult<Self> {
        let opened = py.detach(|| Inner::open(args));
        opened.map(|model| Self(Mutex::new(model))).map_err(|refusal| error::of_refusal(py, &refusal))
    }

    /// The path of the weights.
    #[getter]
    fn path(&self) -> PathBuf {
        self.lock().facts().path.clone()
    }

    /// The device.
    #[getter]
    fn device(&self) -> String {
        self.lock().facts().device.clone()
    }

    /// f32, tf32 or bf16.
    #[getter]
    fn dtype(&self) -> String {
        self.lock().facts().dtype.clone()
    }

    /// The most tokens that the model sees at once.
    #[getter]
    fn context(&self) -> usize {
        self.lock().facts().context
    }

    /// Tokens of the model.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.lock().facts().vocab_size
    }

    /// Weights.
    #[getter]
    fn params(&self) -> usize {
        self.lock().facts().params
    }

    /// The token between texts; `None` without a tokenizer.
    #[getter]
    fn eot(&self) -> Option<u32> {
        self.lock().eot()
    }

    /// The ids of a text; special tokens that are spelled out in it are tokens.
    #[pyo3(signature = (text, /))]
    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        self.lock().encode(text).map_err(|refusal| error::of_refusal(py, &refusal))
    }

    /// The text that ids stand for.
    #[pyo3(signature = (ids, /))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        self.lock().decode(&ids).map_err(|refusal| error::of_refusal(py, &refusal))
    }

    /// How likely tokens are: `texts` are (tokens, the first that counts).
    #[pyo3(signature = (texts, /))]
    fn score(&self, py: Python<'_>, texts: Vec<(Vec<u32>, usize)>) -> PyResult<Vec<Likelihood>> {
        let scores = self.working(py, |model, ask| model.score(&texts, &mut |_| ask()))?;
        Ok(scores.into_iter().map(|score| (-score.nats, score.tokens, score.greedy)).collect())
    }

    /// Continues `prompt` by at most `tokens` tokens, until one of the texts `until`.
    #[pyo3(signature = (prompt, tokens, until, *, temperature=0.0, top_k=None, top_p=None, seed=0))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn write(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        tokens: usize,
        until: Vec<String>,
        temperature: f32,
        top_k: Option<usize>,
        top_p: Option<f32>,
        seed: u64,
    ) -> PyResult<String> {
        let writing = Writing { prompt, tokens, until, sampler: Sampler { temperature, top_k, top_p, seed } };
        self.working(py, |model, ask| model.write(&writing, ask))
    }
}
