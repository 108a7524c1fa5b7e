//! The `ironhorse` command as a function: the binary and the Python package both call [`main_with`].
#![forbid(unsafe_code)]

mod args;
mod commands;
mod hardware;
mod number;
mod out;
mod progress;
mod signals;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Trains transformers and proves that it computes what PyTorch computes.
#[derive(Parser)]
#[command(name = "ironhorse", version, args_override_self = true, max_term_width = 110)]
#[command(
    after_help = "Start here:\n  ironhorse train       trains a small model on built-in stories, then writes\n  \
                        ironhorse generate    continues from the newest run\n  \
                        ironhorse doctor      what this machine has and what will be used\n\n\
                        Exit code: 0 done, 1 the check failed, 2 could not run, 3 stopped early, can be resumed."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// TOML file whose keys are the flags of the command; flags on the line win
    #[arg(long, global = true, value_name = "FILE")]
    #[allow(dead_code, reason = "for the help; `args::expand_config` takes it off the line")]
    config: Option<PathBuf>,
    /// Say what is chosen and why; twice for every step of the way
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// The command line as it was given.
    #[arg(skip)]
    line: Vec<OsString>,
}

#[derive(Subcommand)]
enum Command {
    Train(Box<commands::train::TrainArgs>),
    Generate(commands::generate::GenerateArgs),
    Verify(commands::verify::VerifyArgs),
    Bench(commands::bench::BenchArgs),
    Profile(commands::profile::ProfileArgs),
    Plan(commands::plan::PlanArgs),
    Convert(commands::convert::ConvertArgs),
    Doctor(commands::doctor::DoctorArgs),
    Selftest(commands::selftest::SelftestArgs),
    ResumeCheck(Box<commands::resume_check::ResumeCheckArgs>),
}

/// What a command found, where it did what it was asked.
pub(crate) enum Outcome {
    /// Done, or the check passed.
    Done,
    /// The check failed.
    Failed,
    /// Stopped early; can be resumed.
    Stopped,
}

/// All flags. A number below 0 is a value that a flag may refuse, not an unknown flag.
fn command() -> clap::Command {
    Cli::command().mut_subcommands(|command| {
        command.mut_args(|arg| {
            let takes_values = arg.get_action().takes_values();
            arg.allow_negative_numbers(takes_values)
        })
    })
}

/// What the command line asks for.
enum Asked {
    Run(Box<Cli>),
    /// Help or the version, which has been printed, and the exit code.
    Told(u8),
}

/// The command line. Help and version are printed as they are; a wrong flag becomes one line.
fn parse(args: impl Iterator<Item = OsString>) -> anyhow::Result<Asked> {
    let given: Vec<OsString> = args.collect();
    let line = args::expand_config(given.iter().cloned())?;
    let matches = command().try_get_matches_from(&line.args).and_then(|m| Cli::from_arg_matches(&m));
    match matches {
        Ok(cli) => Ok(Asked::Run(Box::new(Cli { line: given, ..cli }))),
        Err(error)
            if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            let _ = error.print(); // to a reader that went away
            Ok(Asked::Told(u8::try_from(error.exit_code()).unwrap_or(2)))
        }
        Err(error) => Err(anyhow::anyhow!(usage_error(&error, &line))),
    }
}

/// What clap says in paragraphs, in one line; a wrong key of the configuration file is said to be one.
fn usage_error(error: &clap::Error, line: &args::Line) -> String {
    let paragraphs = error.to_string();
    let mut text = String::new();
    let mut between = "";
    for part in paragraphs.lines().map(str::trim) {
        if part.starts_with("Usage:") || part.starts_with("For more information") {
            break;
        }
        if part.is_empty() {
            between = "; ";
            continue;
        }
        text += if part.starts_with('[') { " " } else { between };
        text += part;
        // a list follows a colon, one item to a line
        between = if part.ends_with(':') { " " } else { ", " };
    }
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let flag = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) => flag.split([' ', '=']).next(),
        _ => None,
    };
    match flag.and_then(|flag| line.key_of(flag)) {
        Some((path, key)) => format!("{}: key `{key}`: {text}", path.display()),
        None => format!("{text} (see --help)"),
    }
}

/// The flags of `train` with those that a run's `config.toml` stands for.
fn parse_train(line: &[OsString], config: &Path) -> anyhow::Result<commands::train::TrainArgs> {
    let with_config = line.iter().cloned().chain(["--config".into(), config.into()]);
    match parse(with_config)? {
        Asked::Run(cli) => match cli.command {
            Command::Train(args) => Ok(*args),
            _ => anyhow::bail!("not a training run"),
        },
        Asked::Told(_) => anyhow::bail!("not a training run"),
    }
}

fn run(command: Command, line: &[OsString]) -> anyhow::Result<Outcome> {
    match command {
        Command::Train(args) => commands::train::run(&args, line),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Profile(args) => commands::profile::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Selftest(args) => commands::selftest::run(&args),
        Command::ResumeCheck(args) => commands::resume_check::run(&args),
    }
}

/// Runs the command line, its first word the name of the program, and says the exit code: 0 done, 1 the check failed,
/// 2 could not run, 3 stopped early, can be resumed. Prints to standard output and error; ends no process.
pub fn main_with(args: impl IntoIterator<Item = OsString>) -> u8 {
    out::running(); // from here on
    let done = parse(args.into_iter()).and_then(|asked| match asked {
        Asked::Told(code) => Ok(code),
        Asked::Run(cli) => {
            out::log_level(cli.verbose);
            run(cli.command, &cli.line).map(|outcome| match outcome {
                Outcome::Done => 0,
                Outcome::Failed => 1,
                Outcome::Stopped => 3,
            })
        }
    });
    done.unwrap_or_else(|error| match error.downcast_ref::<ironhorse::train::Error>() {
        Some(closed) if out::is_closed_pipe(closed) => 0,
        known => {
            out::note(format_args!("error: {}", one_line(&error)));
            let diverged = matches!(known, Some(ironhorse::train::Error::Diverged { .. }));
            if diverged { 1 } else { 2 }
        }
    })
}

/// Why there is no report.
#[derive(Debug)]
pub struct Refusal {
    /// What kind of reason.
    pub cause: Cause,
    /// One line.
    pub text: String,
}

/// What kind of reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// An argument or a file.
    Input,
    /// The device is not there.
    NoDevice,
    /// The device stopped in the middle.
    Device,
    /// Too large for the device.
    Memory,
}

/// `ironhorse verify` for another language: `args` are its flags, the report is JSON with the table as `text`. Prints
/// nothing. That something is wrong is a report, not an error.
pub fn verify_with(args: impl IntoIterator<Item = OsString>) -> Result<String, Refusal> {
    let line = ["ironhorse".into(), "verify".into()].into_iter().chain(args);
    let refuse = |error: &anyhow::Error| {
        use ironhorse::core::Error as Core;
        let known = match error.downcast_ref::<ironhorse::train::Error>() {
            Some(ironhorse::train::Error::Core(core)) => Some(core),
            _ => error.downcast_ref::<ironhorse::core::Error>(),
        };
        let cause = match known {
            Some(Core::NoDevice { .. }) => Cause::NoDevice,
            Some(Core::OutOfMemory { .. }) => Cause::Memory,
            Some(Core::Unsupported { .. } | Core::DeviceLost { .. }) => Cause::Device,
            _ if error.is::<hardware::NotEnough>() => Cause::Memory,
            _ => Cause::Input,
        };
        Refusal { cause, text: one_line(error) }
    };
    let found = command().try_get_matches_from(line).and_then(|m| Cli::from_arg_matches(&m));
    let args = match found.map(|cli| cli.command) {
        Ok(Command::Verify(args)) => args,
        Ok(_) => return Err(Refusal { cause: Cause::Input, text: "not a verification".into() }),
        Err(error) => {
            return Err(Refusal { cause: Cause::Input, text: usage_error(&error, &args::Line::default()) });
        }
    };
    let engine = args.engine().map_err(|error| refuse(&error))?;
    let done = commands::verify::compute(&args, engine).map_err(|error| refuse(&error))?;
    let text = done.text(false);
    let json = serde_json::to_value(done).map(|mut value| {
        value["text"] = text.into();
        value.to_string()
    });
    json.map_err(|error| refuse(&error.into()))
}

/// The causes in one line; one that the text before it already quotes is left out.
fn one_line(error: &anyhow::Error) -> String {
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
    fn flags_are_consistent() {
        command().debug_assert();
    }

    #[test]
    fn a_verification_that_cannot_run_says_why() {
        let refused = |flags: &[&str]| verify_with(flags.iter().map(OsString::from)).unwrap_err();
        for flags in
            [&["--no-such-flag"][..], &["--help"], &["--device=gpu", "--key=k"], &["--key=no-such-file"]]
        {
            let refusal = refused(flags);
            assert_eq!(refusal.cause, Cause::Input, "{flags:?}");
            assert!(!refusal.text.is_empty() && !refusal.text.contains('\n'), "{}", refusal.text);
        }
        let large = ["--lockstep", "--device=cpu", "--model=d48", "--batch=100000", "--seq=1024"];
        assert_eq!(refused(&large).cause, Cause::Memory);
    }

    #[test]
    fn a_cause_is_said_once() {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let error = ironhorse::train::Error::io("a\x1b\nb".as_ref(), "open", missing());
        let line = one_line(&anyhow::Error::new(error));
        assert_eq!(line, format!("a\\u{{1b}} b: cannot open: {}", missing()));
        let error = Err::<(), _>(missing()).context("c.toml: cannot read").unwrap_err();
        assert_eq!(one_line(&error), format!("c.toml: cannot read: {}", missing()));
    }
}
