//! The number of tests that passed, parsed from the output of cargo, pytest and the Python linters.

use std::fmt;
use std::ops::AddAssign;

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tests that passed.
    pub passed: usize,
    /// Tests that failed, or could not be run.
    pub failed: usize,
    /// Tests that were skipped by themselves (`#[ignore]`, `pytest.skip`, an expected failure) or deselected by pytest.
    pub skipped: usize,
    /// The skipped tests that `cargo xtask test --all` runs: they take minutes.
    pub waiting: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.waiting += other.waiting;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > self.waiting {
            write!(f, ", {} skipped", self.skipped - self.waiting)?;
        }
        if self.waiting > 0 {
            write!(f, ", {} {ONLY_WITH_ALL}", self.waiting)?;
        }
        Ok(())
    }
}

/// The beginning of the last line of `cargo xtask kernels`, which [`Dialect::Kernels`] parses.
pub const KERNELS_LINE: &str = "kernels: ";

/// Why a test is ignored that only `cargo xtask test --all` runs: `#[ignore = "only with --all"]`.
pub const ONLY_WITH_ALL: &str = "only with --all";

/// The program that prints the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// A program without counts.
    Silent,
    /// libtest: one line for each test program; the counts add up.
    Cargo,
    /// pytest: one line at the end.
    Pytest,
    /// `cargo xtask kernels`: one line at the end.
    Kernels,
    /// `ironhorse resume-check --torture`: the last line.
    Torture,
    /// ruff and mypy: one line at the end with the number of errors. They count files that pass, not tests.
    Lint,
}

impl Dialect {
    /// Counts one line of output.
    pub fn read(self, line: &str, counts: &mut Counts) {
        let line = without_colour(line);
        counts.waiting += usize::from(self == Self::Cargo && cargo_waits(&line));
        let found = match self {
            Self::Silent => None,
            Self::Cargo => cargo_line(&line),
            Self::Pytest => pytest_line(&line), // the last one is the summary
            Self::Kernels => line.trim().strip_prefix(KERNELS_LINE).and_then(passed_and_failed),
            Self::Torture => passed_and_failed(&line),
            Self::Lint => lint_line(&line).map(|failed| Counts { failed, ..Counts::default() }),
        };
        match found {
            Some(found) if self == Self::Cargo => *counts += found,
            Some(found) => *counts = found,
            None => {}
        }
    }
}

/// `test a_long_one_in_full ... ignored, only with --all`, which libtest counts as ignored too.
fn cargo_waits(line: &str) -> bool {
    let line = line.trim();
    line.starts_with("test ") && line.ends_with(&format!(" ... ignored, {ONLY_WITH_ALL}"))
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`
fn cargo_line(line: &str) -> Option<Counts> {
    let (_, list) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
    tally(list.split(';').take_while(|part| !part.trim().starts_with("finished")))
}

/// `=== 1 failed, 2 passed, 1 skipped, 1 error in 0.12s ===`, or without the frame.
fn pytest_line(line: &str) -> Option<Counts> {
    let line = line.trim().trim_matches('=').trim();
    let (list, time) = line.rsplit_once(" in ")?;
    // `61.20s (0:01:01)` from a minute on
    let seconds = time.split(' ').next()?.strip_suffix('s')?;
    seconds.parse::<f64>().ok()?;
    if list == "no tests ran" { Some(Counts::default()) } else { tally(list.split(',')) }
}

/// `20 passed, 0 failed`
fn passed_and_failed(line: &str) -> Option<Counts> {
    let is_either = |part: &str| part.ends_with(" passed") || part.ends_with(" failed");
    line.split(',').map(str::trim).all(is_either).then(|| tally(line.split(',')))?
}

/// The counts of parts such as `3 passed`; `None` if a part is anything else.
fn tally<'a>(parts: impl Iterator<Item = &'a str>) -> Option<Counts> {
    let mut counts = Counts::default();
    for part in parts {
        match number_and_word(part)? {
            (n, "passed" | "xpassed") => counts.passed += n,
            (n, "failed" | "error" | "errors") => counts.failed += n,
            (n, "skipped" | "xfailed" | "ignored") => counts.skipped += n,
            (n, "deselected") => {
                counts.skipped += n;
                counts.waiting += n;
            }
            (_, "measured" | "filtered out" | "warning" | "warnings" | "rerun") => {}
            _ => return None,
        }
    }
    Some(counts)
}

/// `Found 3 errors.`, `Found 3 errors in 2 files (checked 79 source files)`,
/// `2 files would be reformatted, 146 files already formatted`
fn lint_line(line: &str) -> Option<usize> {
    let line = line.trim();
    if let Some(rest) = line.strip_prefix("Found ") {
        let (number, word) = number_and_word(rest)?;
        return word.starts_with("error").then_some(number);
    }
    let (number, word) = number_and_word(line)?;
    (word.starts_with("file would be reformatted") || word.starts_with("files would be reformatted"))
        .then_some(number)
}

/// `12 passed` → (12, "passed")
fn number_and_word(text: &str) -> Option<(usize, &str)> {
    let (number, word) = text.trim().split_once(' ')?;
    Some((number.parse().ok()?, word.trim()))
}

/// The line without escape sequences of the form `ESC [ ... letter`.
fn without_colour(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(dialect: Dialect, output: &str) -> (usize, usize, usize) {
        let mut counts = Counts::default();
        output.lines().for_each(|line| dialect.read(line, &mut counts));
        (counts.passed, counts.failed, counts.skipped)
    }

    #[test]
    fn cargo_programs_add_up() {
        let output = "
running 3 tests
test a ... ok
test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/b.rs (target/debug/deps/b-0123)
test result: FAILED. 7 passed; 4 failed; 0 ignored; 0 measured; 5 filtered out; finished in 1.32s

error: 1 target failed:
";
        assert_eq!(counts(Dialect::Cargo, output), (9, 4, 1));
    }

    #[test]
    fn what_waits_for_all_is_told_from_what_is_skipped() {
        let output = "test a_in_full ... ignored, only with --all\ntest b ... ignored, needs a GPU\n\
                      test result: ok. 2 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out";
        let mut counts = Counts::default();
        output.lines().for_each(|line| Dialect::Cargo.read(line, &mut counts));
        assert_eq!(counts.to_string(), "2 passed, 0 failed, 1 skipped, 1 only with --all");
        let mut counts = Counts::default();
        Dialect::Pytest.read("= 2 passed, 3 skipped, 4 deselected in 1.0s =", &mut counts);
        assert_eq!(counts.to_string(), "2 passed, 0 failed, 3 skipped, 4 only with --all");
    }

    #[test]
    fn cargo_in_colour_and_other_lines() {
        let line =
            "test result: \u{1b}[32mok\u{1b}[m. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(counts(Dialect::Cargo, line), (12, 0, 0));
        assert_eq!(counts(Dialect::Cargo, "test counts::test result: ... ok\n12 passed in 3s"), (0, 0, 0));
        assert_eq!(counts(Dialect::Silent, line), (0, 0, 0));
    }

    #[test]
    fn pytest_summaries() {
        for (line, want) in [
            ("============ 120 passed in 3.21s ============", (120, 0, 0)),
            ("120 passed in 3.21s", (120, 0, 0)),
            ("==== 1 failed, 119 passed, 2 skipped, 3 warnings in 61.20s (0:01:01) ====", (119, 1, 2)),
            ("=== 2 failed, 3 passed, 1 error in 0.50s ===", (3, 3, 0)),
            ("=== 4 errors in 0.10s ===", (0, 4, 0)),
            ("=== 5 passed, 1 deselected, 2 xfailed, 1 xpassed in 0.10s ===", (6, 0, 3)),
            (
                "\u{1b}[32m==== \u{1b}[32m\u{1b}[1m7 passed\u{1b}[0m\u{1b}[32m in 0.01s\u{1b}[0m\u{1b}[32m ====\u{1b}[0m",
                (7, 0, 0),
            ),
            ("=== no tests ran in 0.01s ===", (0, 0, 0)),
        ] {
            assert_eq!(counts(Dialect::Pytest, line), want, "{line}");
        }
    }

    #[test]
    fn pytest_takes_the_last_summary_and_ignores_prose() {
        let output =
            "1 passed in 0.01s\nwrote 3 files in 2 folders\nsaved in 3s\n===== 8 passed in 0.02s =====";
        assert_eq!(counts(Dialect::Pytest, output), (8, 0, 0));
    }

    #[test]
    fn kernels_end_with_their_own_line() {
        let line = format!("\n{KERNELS_LINE}{}\n", Counts { passed: 540, failed: 2, ..Counts::default() });
        assert_eq!(counts(Dialect::Kernels, &line), (540, 2, 0));
        assert_eq!(counts(Dialect::Kernels, "3 passed, 0 failed\nkernels: none"), (0, 0, 0));
    }

    #[test]
    fn torture_ends_with_its_counts() {
        let output = "20 rounds in 31 s: 47 kills (21 during a save), 44 resumes, 3 restarts, 1 differences\n19 passed, 1 failed\n";
        assert_eq!(counts(Dialect::Torture, output), (19, 1, 0));
    }

    #[test]
    fn linters_say_how_much_is_wrong() {
        for (line, want) in [
            ("Found 62 errors.", 62),
            ("Found 1 error.", 1),
            ("Found 57 errors in 16 files (checked 79 source files)", 57),
            ("\u{1b}[1m\u{1b}[91mFound 1 error in 1 file (checked 79 source files)\u{1b}[0m", 1),
            ("22 files would be reformatted, 126 files already formatted", 22),
            ("1 file would be reformatted", 1),
            ("All checks passed!", 0),
            ("148 files already formatted", 0),
            ("Success: no issues found in 79 source files", 0),
            ("Found out of 3 errors", 0),
        ] {
            assert_eq!(counts(Dialect::Lint, line), (0, want, 0), "{line}");
        }
    }

    #[test]
    fn the_last_line_of_a_run() {
        let mut total = Counts { passed: 3, ..Counts::default() };
        assert_eq!(total.to_string(), "3 passed, 0 failed");
        total += Counts { passed: 1, failed: 2, skipped: 4, waiting: 0 };
        assert_eq!(total.to_string(), "4 passed, 2 failed, 4 skipped");
        total += Counts { passed: 0, failed: 0, skipped: 3, waiting: 3 };
        assert_eq!(total.to_string(), "4 passed, 2 failed, 4 skipped, 3 only with --all");
    }
}
