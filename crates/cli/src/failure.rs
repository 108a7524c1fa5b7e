//! What an error means to the caller: the exit code of the command, or the cause that another language turns into its own
//! kind of exception. The only place that looks at the kind of an error.

use crate::{hardware, out};
use anyhow::Error;
use ironhorse::core::ranks::{COULD_NOT_RUN, RESUMABLE};
use ironhorse::core::{Communicator, Error as CoreError};
use ironhorse::train::Error as TrainError;

/// Why there is no report.
#[derive(Debug)]
pub struct Refusal {
    /// Its cause.
    pub cause: Cause,
    /// One line.
    pub text: String,
}

/// The cause of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// An argument or a file is invalid.
    Input,
    /// The device does not exist or cannot be used.
    NoDevice,
    /// The device failed during the work.
    Device,
    /// Too large for the device's memory.
    Memory,
}

impl Refusal {
    /// An invalid argument.
    pub fn input(text: impl Into<String>) -> Self {
        Self { cause: Cause::Input, text: text.into() }
    }

    /// What an error of a command means.
    pub fn of(error: &Error) -> Self {
        Self { cause: cause(error), text: one_line(error) }
    }
}

/// The error of a program or engine that is behind another.
fn core_error(error: &Error) -> Option<&CoreError> {
    match error.downcast_ref() {
        Some(TrainError::Core(core)) => Some(core),
        _ => error.downcast_ref::<CoreError>(),
    }
}

fn cause(error: &Error) -> Cause {
    if error.is::<hardware::NotEnough>() {
        return Cause::Memory;
    }
    match core_error(error) {
        Some(CoreError::NoDevice { .. }) => Cause::NoDevice,
        Some(CoreError::OutOfMemory { .. }) => Cause::Memory,
        Some(CoreError::Unsupported { .. } | CoreError::DeviceLost { .. }) => Cause::Device,
        _ => Cause::Input,
    }
}

/// Prints the error, unless the reader of standard output went away; gives the exit code.
pub fn report(error: &Error) -> u8 {
    let known = error.downcast_ref::<TrainError>();
    if known.is_some_and(out::is_closed_pipe) {
        return 0;
    }
    match out::quiet_rank() {
        Some(rank) => out::note_of_rank(rank, format_args!("error: {}", one_line(error))),
        None => out::note(format_args!("error: {}", one_line(error))),
    }
    code(error)
}

/// The exit code that an error means: of a rank that is lost or gave up, the one that it said.
pub fn code(error: &Error) -> u8 {
    match (error.downcast_ref::<TrainError>(), core_error(error)) {
        (Some(TrainError::Diverged { .. }), _) => 1,
        (Some(TrainError::Stopped), _) => RESUMABLE,
        (_, Some(CoreError::RankLost { code, .. })) => *code,
        _ => COULD_NOT_RUN,
    }
}

/// Tells the other ranks why this one ends, and with which code.
pub fn give_up(ranks: &dyn Communicator, error: &Error) {
    ranks.give_up(&one_line(error), code(error));
}

/// The error and its causes in one line; a cause that the text before it already quotes is left out.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.ends_with(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    let mut escaped = String::with_capacity(line.len());
    for c in line.chars() {
        match c {
            '\n' => escaped.push(' '),
            c if c.is_control() => escaped.extend(c.escape_default()),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_said_once() {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let error = TrainError::io("a\x1b\nb".as_ref(), "open", missing());
        let line = one_line(&Error::new(error));
        assert_eq!(line, format!("a\\u{{1b}} b: cannot open: {}", missing()));
        let error = Err::<(), _>(missing()).context("c.toml: cannot read").unwrap_err();
        assert_eq!(one_line(&error), format!("c.toml: cannot read: {}", missing()));
    }
}
