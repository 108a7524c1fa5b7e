//! Signals, turned into flags that a run checks between steps.

use ironhorse::train::run::Control;

/// What a program that calls this one stores to stop a run: it is no signal.
pub const CALLER: usize = usize::MAX;

/// The name of a signal.
pub fn name(number: usize) -> String {
    if number == CALLER {
        return "the caller".to_owned();
    }
    #[cfg(unix)]
    {
        use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
        let known = [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"), (SIGUSR1, "SIGUSR1")];
        if let Some((_, name)) = known.iter().find(|(signal, _)| usize::try_from(*signal) == Ok(number)) {
            return (*name).to_owned();
        }
    }
    format!("signal {number}")
}

/// While it lives, SIGINT, SIGTERM and SIGUSR1 ask the run to stop, SIGUSR2 to save; a second SIGINT ends the process at
/// once. Dropping it restores the previous handlers.
#[cfg(unix)]
pub struct Handlers(Vec<signal_hook::SigId>);

#[cfg(unix)]
impl Handlers {
    /// Begins to listen.
    pub fn install(control: &Control) -> std::io::Result<Self> {
        use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
        use signal_hook::flag;
        use std::sync::Arc;
        use std::sync::atomic::AtomicBool;

        /// The exit code by which shells report SIGINT.
        const INTERRUPTED: i32 = 130;
        let mut handlers = Self(Vec::new());
        let interrupted = Arc::new(AtomicBool::new(false));
        // in this order: the first Ctrl-C finds the flag unset and sets it, the second finds it set
        handlers.0.push(flag::register_conditional_shutdown(SIGINT, INTERRUPTED, interrupted.clone())?);
        handlers.0.push(flag::register(SIGINT, interrupted)?);
        for signal in [SIGINT, SIGTERM, SIGUSR1] {
            let value = usize::try_from(signal).unwrap_or(usize::MAX);
            handlers.0.push(flag::register_usize(signal, control.stop_flag(), value)?);
        }
        handlers.0.push(flag::register(SIGUSR2, control.save_flag())?);
        Ok(handlers)
    }
}

#[cfg(unix)]
impl Drop for Handlers {
    fn drop(&mut self) {
        for &id in &self.0 {
            signal_hook::low_level::unregister(id);
        }
    }
}

/// Only Unix has these signals.
#[cfg(not(unix))]
pub struct Handlers;

#[cfg(not(unix))]
impl Handlers {
    /// Does nothing.
    pub fn install(_control: &Control) -> std::io::Result<Self> {
        Ok(Self)
    }
}
