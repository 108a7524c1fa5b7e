//! Command-line arguments, consumed one by one.

use anyhow::{Context, Result, bail};
use std::collections::VecDeque;

/// The remaining arguments of the command line.
pub struct Args(VecDeque<String>);

impl Args {
    /// All arguments after the program's name.
    pub fn new(args: impl IntoIterator<Item = String>) -> Self {
        Self(args.into_iter().collect())
    }

    /// The next argument.
    pub fn next(&mut self) -> Option<String> {
        self.0.pop_front()
    }

    /// The value that follows `flag`.
    pub fn value(&mut self, flag: &str) -> Result<String> {
        self.next().with_context(|| format!("{flag} needs a value (see --help)"))
    }

    /// Takes `flag` if it is the next argument.
    pub fn flag(&mut self, flag: &str) -> bool {
        self.0.pop_front_if(|arg| arg == flag).is_some()
    }

    /// Whether help is requested before any `--`.
    pub fn asks_for_help(&self) -> bool {
        self.0.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--help" || arg == "-h")
    }

    /// All remaining arguments, to pass on to another program; a leading `--` is dropped.
    pub fn rest(mut self) -> Vec<String> {
        if self.0.front().is_some_and(|arg| arg == "--") {
            self.0.pop_front();
        }
        self.0.into()
    }

    /// Fails if any arguments remain.
    pub fn end(mut self) -> Result<()> {
        match self.next() {
            None => Ok(()),
            Some(arg) => unknown(&arg),
        }
    }
}

/// The error for an unknown argument.
pub fn unknown<T>(arg: &str) -> Result<T> {
    bail!("unknown argument '{arg}' (see --help)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Args {
        Args::new(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn help_counts_only_before_two_dashes() {
        assert!(args("--steps 3 --help").asks_for_help());
        assert!(!args("-- --help").asks_for_help());
        assert_eq!(args("-- --help").rest(), ["--help"]);
        assert_eq!(args("--batch 4 -- x").rest(), ["--batch", "4", "--", "x"]);
    }

    #[test]
    fn values_and_ends_are_refused_in_one_line() {
        assert_eq!(args("").value("--stage").unwrap_err().to_string(), "--stage needs a value (see --help)");
        assert_eq!(args("x").end().unwrap_err().to_string(), "unknown argument 'x' (see --help)");
        assert!(args("").end().is_ok());
    }
}
