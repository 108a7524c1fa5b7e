//! One call at a time: calls of other threads wait, without the interpreter lock, and can be interrupted.

use crate::error;
use pyo3::prelude::*;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// How long a call waits before it looks for signals.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Whose turn it is.
#[derive(Default)]
pub struct Turn {
    of: Mutex<Option<ThreadId>>,
    over: Condvar,
}

/// A turn; dropping it ends it.
pub struct Taken<'a>(&'a Turn);

impl Turn {
    fn lock(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the other calls. A call inside another one of the same thread, such as in its callback, would wait forever and
    /// is refused.
    pub fn take(&self, py: Python<'_>, call: &str) -> PyResult<Taken<'_>> {
        let me = std::thread::current().id();
        loop {
            let taken = py.detach(|| {
                let mut of = self.lock();
                if of.is_some_and(|of| of != me) {
                    of = self.over.wait_timeout(of, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
                }
                match *of {
                    None => {
                        *of = Some(me);
                        Ok(true)
                    }
                    Some(of) if of == me => Err(()),
                    Some(_) => Ok(false),
                }
            });
            match taken {
                Ok(true) => return Ok(Taken(self)),
                Ok(false) => py.check_signals()?,
                Err(()) => {
                    let text = "the model is in use by the call that this one is made from; a callback cannot use it";
                    return Err(error::invalid(py, call, text));
                }
            }
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
        self.0.over.notify_one();
    }
}
