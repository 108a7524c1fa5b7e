//! `ironhorse report`: one file that says what a run was, or how two of them differ.
//!
//! ```text
//! mod.rs     the flags                    content.rs  what is said, for every format
//! curves.rs  what is drawn                html.rs     one page that needs nothing else     markdown.rs  plain text
//! ```

mod content;
mod curves;
mod html;
mod markdown;

use super::runs;
use crate::args::{heading, json_help};
use crate::{Outcome, number, out};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use content::Content;
use ironhorse::train::format::atomic;
use ironhorse::train::run::view::RunView;
use std::path::PathBuf;

/// Writes a report of a run, or of two side by side: one HTML file that needs nothing else
#[derive(Args)]
#[command(
    after_help = "Examples:\n  ironhorse report                               the run whose log was written last\n  \
    ironhorse report runs/0001 --price 2.50        with what it cost at 2.50 an hour\n  \
    ironhorse report runs/0002 runs/0001 --out both.html\n  \
    ironhorse report runs/0001 --format md\n\n\
    What is in it: data and weights it started from, provenance, settings, curves, samples, accuracies, speed, memory, cost, and\n\
    the verification in RUN/verify.json (ironhorse verify ... --json RUN/verify.json) if there is one."
)]
pub struct ReportArgs {
    /// Run folders, or their names below runs/; two at most [default: the run whose log was written last]
    #[arg(value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Where to write it [default: report.html or report.md in the folder of the first run]
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a page or Markdown [default: what --out ends with, else html]
    #[arg(long, help_heading = heading::OUTPUT, value_enum)]
    format: Option<Format>,
    /// What the machine costs in an hour, in euros
    #[arg(long, help_heading = heading::OUTPUT, value_name = "EUR", value_parser = number::at_least_0::<f64>)]
    price: Option<f64>,
    #[arg(long, help = json_help!("what the report says"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How a report is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One page, its curves inside
    Html,
    /// Markdown
    Md,
}

pub fn run(args: &ReportArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    if args.runs.len() > 2 {
        bail!("{} runs are given, expected two at most; ironhorse watch shows more of them", args.runs.len());
    }
    let paths = runs::given_or_newest(&args.runs)?;
    let views = paths.iter().map(|path| RunView::open(path)).collect::<Result<Vec<_>, _>>()?;
    let by_name = args.out.as_ref().and_then(|path| path.extension()).is_some_and(|end| end == "md");
    let format = args.format.unwrap_or(if by_name { Format::Md } else { Format::Html });
    let name = if format == Format::Md { "report.md" } else { "report.html" };
    let path = args.out.clone().unwrap_or_else(|| paths[0].join(name));
    out::check_file(Some(&path))?;
    let content = Content::of(&views, args.price);
    let text = match format {
        Format::Html => html::page(&content, &curves::all(&views)?),
        Format::Md => markdown::text(&content, path.parent().is_some_and(|folder| folder == paths[0])),
    };
    atomic::write_file(&path, |sink| sink.put(text.as_bytes()))?;
    out::line(format_args!("report     {}", path.display()))?;
    out::json(args.json.as_deref(), &content)?;
    Ok(Outcome::Done)
}
