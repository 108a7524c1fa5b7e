//! The `ironhorse` command.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod hardware;
mod out;
mod progress;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Trains transformers and proves that it computes what PyTorch computes.
#[derive(Parser)]
#[command(name = "ironhorse", version, args_override_self = true, max_term_width = 110)]
#[command(
    after_help = "Start here:\n  ironhorse train       trains a small model on built-in stories, then writes\n  \
                        ironhorse generate    continues from the newest run\n  \
                        ironhorse doctor      what this machine has and what will be used\n\n\
                        Exit code: 0 done, 1 the check failed, 2 could not run."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
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
}

/// What a command found, where it did what it was asked.
pub(crate) enum Outcome {
    /// Done, or the check passed.
    Done,
    /// The check failed.
    Failed,
}

/// Help and version are printed as they are; a wrong flag becomes one line.
fn usage_error(error: clap::Error) -> anyhow::Result<Cli> {
    if !error.use_stderr() {
        error.exit();
    }
    let text = error.to_string();
    let paragraphs = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let parts: Vec<&str> = paragraphs.filter(|line| !line.is_empty()).collect();
    let line = parts.join("; ");
    anyhow::bail!("{} (see --help)", line.strip_prefix("error: ").unwrap_or(&line))
}

fn main() -> ExitCode {
    let result = args::expand_config(std::env::args_os()).and_then(|args| {
        let cli = Cli::try_parse_from(args).or_else(usage_error)?;
        match cli.command {
            Command::Train(args) => commands::train::run(&args),
            Command::Generate(args) => commands::generate::run(&args),
            Command::Verify(args) => commands::verify::run(&args),
            Command::Bench(args) => commands::bench::run(&args),
            Command::Profile(args) => commands::profile::run(&args),
            Command::Plan(args) => commands::plan::run(&args),
            Command::Convert(args) => commands::convert::run(&args),
            Command::Doctor(args) => commands::doctor::run(&args),
        }
    });
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::from(1),
        Err(error) if out::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever is inside.
            let line = format!("{error:#}").replace('\n', " ");
            eprintln!("error: {line}");
            let diverged =
                error.downcast_ref().is_some_and(|e| matches!(e, ironhorse::train::Error::Diverged { .. }));
            ExitCode::from(if diverged { 1 } else { 2 })
        }
    }
}
