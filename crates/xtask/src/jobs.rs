//! Runs many programs with tests, several at a time, so that no core is idle while one of them ends or waits.

use crate::counts::{Counts, Dialect};
use crate::out;
use crate::process::{captured, shown};
use crate::scratch::Scratch;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// How many programs run at a time: most use one core, and their memory adds up.
pub fn at_a_time() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).clamp(1, 4)
}

/// Runs all of them, in their order; returns whether all passed, and the sum of their counts.
pub fn run(mut jobs: Vec<Command>, dialect: Dialect) -> (bool, Counts) {
    let scratch = Scratch::new();
    jobs.iter_mut().for_each(|job| scratch.set(job));
    let jobs = Mutex::new(jobs.into_iter());
    let done = Mutex::new((true, Counts::default()));
    let take = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    std::thread::scope(|scope| {
        let work = || {
            while let Some(mut command) = take() {
                let one = run_one(&mut command, dialect);
                let mut all = done.lock().unwrap_or_else(PoisonError::into_inner);
                all.0 &= one.0;
                all.1 += one.1;
            }
        };
        (0..at_a_time()).for_each(|_| _ = scope.spawn(work));
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one program to its end and then prints its output, so that the output of two programs does not mix.
fn run_one(command: &mut Command, dialect: Dialect) -> (bool, Counts) {
    let start = std::time::Instant::now();
    let (passed, text) = match captured(command) {
        Ok(ended) => ended,
        Err(error) => (false, format!("error: {error:#}\n")),
    };
    let mut counts = Counts::default();
    text.lines().for_each(|line| dialect.read(line, &mut counts));
    if !passed && counts.failed == 0 {
        counts.failed = 1; // it died before its last line
    }
    let time = start.elapsed().as_secs_f64();
    out::bytes(format!("\n$ {} ({time:.1} s)\n{text}", shown(command)).as_bytes());
    (passed, counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(text: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        command
    }

    #[test]
    fn a_program_that_dies_counts_as_failed() {
        for (text, want) in
            [("echo 3 passed in 0.1s; exit 1", (false, 3, 1)), ("echo 3 passed in 0.1s >&2", (true, 3, 0))]
        {
            let (passed, counts) = run_one(&mut shell(text), Dialect::Pytest);
            assert_eq!((passed, counts.passed, counts.failed), want);
        }
        assert!(!run_one(&mut Command::new("no-such-program-here"), Dialect::Pytest).0);
    }

    // The output of the programs is shown, and counted by those who run this test: it must not look like that of a test.
    #[test]
    fn one_failure_fails_all_and_the_others_still_run() {
        let fine = "echo 2 passed in 0.1s";
        let jobs = [fine, "echo 1 failed, 1 passed in 0.1s; exit 1", fine, fine];
        let (passed, counts) = run(jobs.map(shell).into(), Dialect::Pytest);
        assert_eq!((passed, counts.passed, counts.failed), (false, 7, 1));
    }
}
