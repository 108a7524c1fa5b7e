//! `cargo xtask torture`: builds the binary, and runs its command that kills and compares training runs.

use crate::args::{Args, unknown};
use crate::out;
use crate::process::{run, shown};
use crate::repo::{Profile, Repo};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Help of `cargo xtask torture`.
pub const HELP: &str = "\
Kills training runs of the release binary with SIGKILL at random moments (in every second round while a checkpoint is
being written), resumes them, kills them again, and finally compares them byte by byte with an uninterrupted run. The
work is done by `ironhorse resume-check --torture N`, which needs no cargo: copy the binary to test another machine.

Usage: cargo xtask torture --times N [--seed S] [--binary PATH] [-- TRAIN_FLAG...]

  --times N       number of rounds
  --seed S        seed of the random moments [default: 1]
  --binary PATH   use this binary instead of building one
  TRAIN_FLAG      flags of `ironhorse train`; without --model three small models alternate: a dense one, a mixture of
                  experts, and one with gradients accumulated over two micro-steps

The last line is `N passed, N failed`.

Examples:
  cargo xtask torture --times 1000
  cargo xtask torture --times 24 -- --device cuda --dtype bf16
  cargo xtask torture --times 100 -- --ranks 4    one of up to four ranks is killed; other numbers of them go on";

/// The command that does the work.
pub fn command(binary: &Path, times: u64, seed: u64, flags: &[String]) -> Command {
    let mut command = Command::new(binary);
    command.arg("resume-check").args(["--torture", &times.to_string(), "--torture-seed", &seed.to_string()]);
    command.args(flags);
    command
}

struct Asked {
    times: u64,
    seed: u64,
    binary: Option<PathBuf>,
    flags: Vec<String>,
}

fn parse(mut args: Args) -> Result<Asked> {
    let (mut times, mut seed, mut binary) = (None, 1, None);
    let number = |flag: &str, text: String| {
        text.parse::<u64>().ok().with_context(|| format!("{flag} is '{text}', expected a whole number"))
    };
    let mut flags = Vec::new();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--times" => times = Some(number("--times", args.value("--times")?)?),
            "--seed" => seed = number("--seed", args.value("--seed")?)?,
            "--binary" => binary = Some(PathBuf::from(args.value("--binary")?)),
            "--" => {
                flags = args.rest();
                break;
            }
            _ => return unknown(&arg),
        }
    }
    let times =
        times.filter(|&times| times > 0).context("--times N is missing: how many rounds (see --help)")?;
    Ok(Asked { times, seed, binary, flags })
}

/// `cargo xtask torture`
pub fn torture(repo: &Repo, args: Args) -> Result<bool> {
    let Asked { times, seed, binary, flags } = parse(args)?;
    let binary = match binary {
        Some(binary) => binary,
        None => {
            repo.build_release(&["ironhorse-cli"])?;
            repo.binary(Profile::Release)?
        }
    };
    ensure!(binary.is_file(), "{}: no such file", binary.display());
    let mut command = command(&binary, times, seed, &flags);
    out::line(shown(&command));
    run(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> Result<Asked> {
        parse(Args::new(text.split_whitespace().map(str::to_owned)))
    }

    #[test]
    fn flags_behind_two_dashes_go_to_the_run() {
        let Asked { times, seed, binary, flags } =
            asked("--times 3 --seed 9 --binary b -- --device cuda --seed 4").unwrap();
        let command = command(&binary.unwrap(), times, seed, &flags);
        assert_eq!(shown(&command), "b resume-check --torture 3 --torture-seed 9 --device cuda --seed 4");
    }

    #[test]
    fn wrong_flags_are_refused() {
        for (text, want) in [
            ("", "--times N is missing"),
            ("--times 0", "--times N is missing"),
            ("--times x", "--times is 'x', expected a whole number"),
            ("--times 3 --device cuda", "unknown argument '--device'"),
        ] {
            let error = asked(text).err().unwrap().to_string();
            assert!(error.starts_with(want), "{text}: {error}");
        }
    }
}
