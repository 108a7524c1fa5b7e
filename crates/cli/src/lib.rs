//! The `ironhorse` command as a function: the binary and the Python package both call [`main_with`].
#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod figures;
mod hardware;
mod language_model;
mod loading;
mod number;
mod open_model;
mod out;
mod progress;
mod ranks;
mod signals;
mod usage;

pub use failure::{Cause, Refusal};
pub use language_model::{Facts, LanguageModel, Writing};
pub use open_model::{Calls, Ids, OpenModel, STOPPED_BY_CALLER, Training};

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Trains transformers and proves that it computes what PyTorch computes.
#[derive(Parser)]
#[command(name = "ironhorse", version, args_override_self = true, max_term_width = 110)]
#[command(
    after_help = "Start here:\n  ironhorse train       trains a small model on built-in stories, then writes\n  \
                        ironhorse generate    writes text with the newest run\n  \
                        ironhorse watch       shows the newest run: curves, speed, samples\n  \
                        ironhorse tune MODEL --data chat.jsonl    fine-tunes a model on chats\n  \
                        ironhorse fetch --list    models and data that can be used by name\n  \
                        ironhorse doctor      what this machine has and what will be used\n\n\
                        Exit code: 0 done, 1 the check failed, 2 could not run, 3 stopped early, can be resumed."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// TOML file whose keys are the flags of the command; flags on the line win
    #[arg(long, global = true, value_name = "FILE", help_heading = GENERAL)]
    #[allow(dead_code, reason = "for the help; `args::config_file::expand_config` takes it off the line")]
    config: Option<PathBuf>,
    /// Log what is chosen and why; -vv logs every decision
    #[arg(long, short, global = true, action = clap::ArgAction::Count, help_heading = GENERAL)]
    verbose: u8,
    /// The command line as it was given.
    #[arg(skip)]
    line: Vec<OsString>,
}

#[derive(Subcommand)]
enum Command {
    Train(Box<commands::train::TrainArgs>),
    Tune(Box<commands::train::TuneArgs>),
    Generate(commands::generate::GenerateArgs),
    Chat(Box<commands::chat::ChatArgs>),
    #[cfg(feature = "serve")]
    Serve(Box<commands::serve::ServeArgs>),
    Fetch(commands::fetch::FetchArgs),
    Prepare(commands::prepare::PrepareArgs),
    Tokenizer(commands::tokenizer::TokenizerArgs),
    Data(commands::data::DataArgs),
    Eval(commands::eval::EvalArgs),
    Watch(commands::watch::WatchArgs),
    Report(commands::report::ReportArgs),
    Compare(commands::compare::CompareArgs),
    Verify(commands::verify::VerifyArgs),
    Bench(commands::bench::BenchArgs),
    Profile(commands::profile::ProfileArgs),
    Plan(commands::plan::PlanArgs),
    Convert(commands::convert::ConvertArgs),
    Doctor(commands::doctor::DoctorArgs),
    Selftest(commands::selftest::SelftestArgs),
    ResumeCheck(Box<commands::resume_check::ResumeCheckArgs>),
}

/// How a command ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Done, or the check passed.
    Done,
    /// The check failed.
    Failed,
    /// Stopped early; can be resumed.
    Stopped,
    /// Could not run, and said why.
    Refused,
}

/// The exit code of a command that stopped early.
pub(crate) const STOPPED: i32 = ironhorse::core::ranks::RESUMABLE as i32;

/// The heading of flags that every command has.
const GENERAL: &str = "General";

/// All flags. A number below 0 is a value that a flag may refuse, not an unknown flag.
fn command() -> clap::Command {
    let help = clap::Arg::new("help").short('h').long("help").help("Print help").help_heading(GENERAL);
    let help = help.action(clap::ArgAction::Help).global(true);
    Cli::command().disable_help_flag(true).arg(help).mut_subcommands(|command| {
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
    let line = args::config_file::expand_config(given.iter().cloned())?;
    parse_line(&line, given)
}

/// The same of a line that is complete; `given` is what the user wrote.
fn parse_line(line: &args::config_file::Line, given: Vec<OsString>) -> anyhow::Result<Asked> {
    let matches = command().try_get_matches_from(&line.args).and_then(|m| Cli::from_arg_matches(&m));
    match matches {
        Ok(cli) => Ok(Asked::Run(Box::new(Cli { line: given, ..cli }))),
        Err(error)
            if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            let _ = error.print(); // to a reader that went away
            Ok(Asked::Told(u8::try_from(error.exit_code()).unwrap_or(2)))
        }
        Err(error) => Err(anyhow::anyhow!(usage::one_line(&error, line))),
    }
}

/// The flags of `train`, with those of a run's `config.toml`.
fn parse_train(line: &[OsString], config: &Path) -> anyhow::Result<commands::train::TrainArgs> {
    let with_config = line.iter().cloned().chain(["--config".into(), config.into()]);
    train_args(parse(with_config)?)
}

fn train_args(asked: Asked) -> anyhow::Result<commands::train::TrainArgs> {
    match asked {
        Asked::Run(cli) => match cli.command {
            Command::Train(args) => Ok(*args),
            Command::Tune(args) => Ok(args.into_train()),
            _ => anyhow::bail!("not a training run"),
        },
        Asked::Told(_) => anyhow::bail!("not a training run"),
    }
}

fn run(command: Command, line: &[OsString]) -> anyhow::Result<Outcome> {
    match command {
        Command::Train(args) => commands::train::run(&args, line),
        Command::Tune(args) => commands::train::run(&args.into_train(), line),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Chat(args) => commands::chat::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => commands::serve::run(&args),
        Command::Fetch(args) => commands::fetch::run(&args),
        Command::Prepare(args) => commands::prepare::run(&args),
        Command::Tokenizer(args) => commands::tokenizer::run(&args),
        Command::Data(args) => commands::data::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Watch(args) => commands::watch::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Compare(args) => commands::compare::run(&args),
        Command::Verify(args) => commands::verify::run(&args, line),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Profile(args) => commands::profile::run(&args, line),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args, line),
        Command::Selftest(args) => commands::selftest::run(&args),
        Command::ResumeCheck(args) => commands::resume_check::run(&args),
    }
}

/// Runs the command line, its first word the name of the program, and says the exit code: 0 done, 1 the check failed,
/// 2 could not run, 3 stopped early, can be resumed. Prints to standard output and error; ends no process.
pub fn main_with(args: impl IntoIterator<Item = OsString>) -> u8 {
    out::begin();
    let done = parse(args.into_iter()).and_then(|asked| match asked {
        Asked::Told(code) => Ok(code),
        Asked::Run(cli) => {
            out::log_level(cli.verbose);
            run(cli.command, &cli.line).map(|outcome| match outcome {
                Outcome::Done => 0,
                Outcome::Failed => 1,
                Outcome::Stopped => STOPPED as u8,
                Outcome::Refused => 2,
            })
        }
    });
    done.unwrap_or_else(|error| failure::report(&error))
}

/// `ironhorse verify` for another language: `args` are its flags, the report is JSON with the table as `text`. Prints
/// nothing. A failed verification is a report, not an error.
pub fn verify_with(args: impl IntoIterator<Item = OsString>) -> Result<String, Refusal> {
    let line = ["ironhorse".into(), "verify".into()].into_iter().chain(args);
    let found = command().try_get_matches_from(line).and_then(|m| Cli::from_arg_matches(&m));
    let args = match found.map(|cli| cli.command) {
        Ok(Command::Verify(args)) => args,
        Ok(_) => return Err(Refusal::input("not the flags of a verification")),
        Err(error) => return Err(Refusal::input(usage::one_line(&error, &Default::default()))),
    };
    let engine = args.engine().map_err(|error| Refusal::of(&error))?;
    let done = commands::verify::compute(&args, engine).map_err(|error| Refusal::of(&error))?;
    let text = done.text(false);
    let json = serde_json::to_value(done).map(|mut value| {
        value["text"] = text.into();
        value.to_string()
    });
    json.map_err(|error| Refusal::of(&error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
