//! What a long call asks Python, and what it tells it: signals, steps, notes.

use ironhorse::train::run::metrics::Metrics;
use ironhorse::train::run::{Control, Observer};
use ironhorse_cli::STOPPED_BY_CALLER;
use pyo3::prelude::*;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a call looks for signals: each look waits for the interpreter lock.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The exception that a call is to end with: Ctrl-C, or one of the callback.
#[derive(Clone, Default)]
pub struct Asked(Arc<Mutex<Option<PyErr>>>);

impl Asked {
    /// Keeps the first exception.
    fn keep(&self, raised: PyErr) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(raised);
    }

    /// What was raised.
    pub fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stops when Python has a signal to handle. Only its main thread ever has.
    pub fn control(&self) -> Control {
        let (asked, last) = (self.clone(), Mutex::new(Instant::now()));
        Control::default().asking(move || {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.elapsed() < LOOK_EVERY {
                return 0;
            }
            *last = Instant::now();
            match Python::attach(|py| py.check_signals()) {
                Ok(()) => 0,
                Err(raised) => {
                    asked.keep(raised);
                    STOPPED_BY_CALLER
                }
            }
        })
    }
}

/// A Python object that follows a run.
pub struct Watcher {
    object: Rc<Py<PyAny>>,
    asked: Asked,
    stop: Arc<AtomicUsize>,
}

impl Watcher {
    pub fn new(object: Py<PyAny>, asked: &Asked, control: &Control) -> Self {
        Self { object: Rc::new(object), asked: asked.clone(), stop: control.stop_flag() }
    }

    /// Tells notes to Python.
    pub fn note_teller(&self) -> Rc<dyn Fn(&str)> {
        let watcher =
            Self { object: self.object.clone(), asked: self.asked.clone(), stop: self.stop.clone() };
        Rc::new(move |text| watcher.tell(|py, object| object.call_method1(py, "note", (text,)).map(|_| true)))
    }

    /// Calls Python; an exception, or false, stops the run after the step in flight.
    fn tell(&self, call: impl FnOnce(Python<'_>, &Py<PyAny>) -> PyResult<bool>) {
        let go_on = Python::attach(|py| call(py, &self.object));
        if !matches!(go_on, Ok(true)) {
            self.stop.store(STOPPED_BY_CALLER, Ordering::Relaxed);
        }
        if let Err(raised) = go_on {
            self.asked.keep(raised);
        }
    }
}

impl Observer for Watcher {
    fn begin(&mut self, made: u64, steps: u64) {
        self.tell(|py, object| object.call_method1(py, "begin", (made, steps)).map(|_| true));
    }

    fn step(&mut self, metrics: &Metrics) {
        let line = metrics.to_line();
        self.tell(|py, object| {
            let answer = object.call_method1(py, "step", (line,))?;
            Ok(!answer.is(pyo3::types::PyBool::new(py, false)))
        });
    }

    fn sample(&mut self, step: u64, text: &str) {
        self.tell(|py, object| object.call_method1(py, "sample", (step, text)).map(|_| true));
    }

    fn note(&mut self, text: &str) {
        self.tell(|py, object| object.call_method1(py, "note", (text,)).map(|_| true));
    }
}
