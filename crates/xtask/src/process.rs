//! Runs programs: their output is passed through as it comes, and test counts are parsed from it.

use crate::counts::{Counts, Dialect};
use crate::out;
use anyhow::{Context, Result};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// The command as a person would type it, for messages.
pub fn shown(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program()).to_string_lossy().into_owned();
    let args = command.get_args().map(|arg| arg.to_string_lossy().into_owned());
    std::iter::once(name).chain(args).collect::<Vec<_>>().join(" ")
}

/// Runs to the end with its output unchanged; true if the exit status is 0.
pub fn run(command: &mut Command) -> Result<bool> {
    let status = command.status().with_context(|| format!("cannot start `{}`", shown(command)))?;
    Ok(status.success())
}

/// As [`run`], and parses the counts from standard output. Standard error, where cargo shows its progress, is unchanged.
pub fn run_counted(command: &mut Command, dialect: Dialect) -> Result<(bool, Counts)> {
    let mut counts = Counts::default();
    if dialect == Dialect::Silent {
        return Ok((run(command)?, counts));
    }
    let text = shown(command);
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start `{text}`"))?;
    if let Some(stdout) = child.stdout.take() {
        copy_lines(BufReader::new(stdout), dialect, &mut counts, out::bytes)
            .with_context(|| format!("cannot read the output of `{text}`"))?;
    }
    let status = child.wait().with_context(|| format!("cannot wait for `{text}`"))?;
    Ok((status.success(), counts))
}

/// Passes output on to `show` as it comes, including incomplete lines, and whole lines to the counter.
fn copy_lines(
    mut from: impl BufRead,
    dialect: Dialect,
    counts: &mut Counts,
    mut show: impl FnMut(&[u8]),
) -> std::io::Result<()> {
    let mut line = Vec::new();
    loop {
        let piece = from.fill_buf()?;
        if piece.is_empty() {
            break;
        }
        show(piece);
        for part in piece.split_inclusive(|&byte| byte == b'\n') {
            line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                dialect.read(&String::from_utf8_lossy(&line), counts);
                line.clear();
            }
        }
        let taken = piece.len();
        from.consume(taken);
    }
    dialect.read(&String::from_utf8_lossy(&line), counts);
    Ok(())
}

/// Runs to the end; returns whether the exit status is 0, and all output.
pub fn captured(command: &mut Command) -> Result<(bool, String)> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start `{}`", shown(command)))?;
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok((output.status.success(), text.concat()))
}

/// The output of the program, if it can be started and its exit status is 0.
pub fn output_of(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_whatever_the_pieces() {
        let output = b"x\n2 passed in 0.1s\ny\r\n3 passed in 0.1s";
        for size in [1, 2, 7, 100] {
            let (mut counts, mut shown) = (Counts::default(), Vec::new());
            let from = BufReader::with_capacity(size, &output[..]);
            copy_lines(from, Dialect::Pytest, &mut counts, |piece| shown.extend_from_slice(piece)).unwrap();
            assert_eq!(counts.passed, 3, "pieces of {size}");
            assert_eq!(shown, output);
        }
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = run(Command::new("no-such-program-here").arg("x")).unwrap_err().to_string();
        assert_eq!(error, "cannot start `no-such-program-here x`");
        assert_eq!(output_of(&mut Command::new("no-such-program-here")), None);
    }
}
