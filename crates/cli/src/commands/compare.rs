//! `ironhorse compare`: a run beside another, or beside the reference curve of a recipe.

use crate::args::{flag_values, heading, json_help};
use crate::{Outcome, number, out};
use anyhow::{Context, Result};
use clap::Args;
use ironhorse::train::picture::curves_svg;
use ironhorse::train::run::COMPARE_SVG;
use ironhorse::train::run::compare::{Axis, Comparison, Kind, Log, Verdict, compare};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Compares the losses of a run with those of another run or of a reference curve
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse compare runs/0002 runs/0001\n  \
    ironhorse compare runs/0001 recipes/shakespeare-bytes.jsonl\n  \
    ironhorse compare runs/muon runs/adamw --by seconds --svg muon.svg\n  \
    ironhorse compare runs/0001 log124M/main.log            a log of llm.c\n\n\
    The last line says whether the run is on track: whether its last loss is at most --tolerance above the reference's at the same\n\
    place, by how much, and since when.\n\n\
    Exit code: 0 on track or ahead, 1 behind, 2 could not compare.")]
pub struct CompareArgs {
    /// A run folder, a metrics.jsonl or a main.log of llm.c
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// What it is compared with: the same kinds of files, such as the curves in recipes/
    #[arg(value_name = "REFERENCE")]
    reference: PathBuf,
    /// Compare after equally many steps, tokens or seconds of training
    #[arg(long, help_heading = heading::CHECKS, value_enum, default_value_t = AxisArg::Steps)]
    by: AxisArg,
    /// Which losses to compare [default: validation where both have it]
    #[arg(long, help_heading = heading::CHECKS, value_enum)]
    loss: Option<KindArg>,
    /// How much higher the loss may be, in nats per token
    #[arg(long, help_heading = heading::CHECKS, default_value_t = 0.02, value_name = "X", value_parser = number::at_least_0::<f64>)]
    tolerance: f64,
    /// Draw both curves [default: compare.svg in the folder of RUN, if that is a run folder]
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[arg(long, help = json_help!("every reading"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

flag_values! {
    /// What puts two runs side by side.
    AxisArg for Axis {
        /// Optimizer steps
        Steps,
        /// Tokens trained on
        Tokens,
        /// Time of the training steps
        Seconds,
    }
}

flag_values! {
    /// Which losses are compared.
    KindArg for Kind {
        /// Losses of validation data
        Validation,
        /// Losses of the training steps, smoothed
        Training,
    }
}

#[derive(Serialize)]
struct CompareReport<'a> {
    #[serde(serialize_with = "out::lossy_path")]
    run: &'a Path,
    #[serde(serialize_with = "out::lossy_path")]
    reference: &'a Path,
    on_track: bool,
    text: String,
    /// Settings that differ: name, the run's, the reference's.
    settings: Vec<(String, String, String)>,
    #[serde(flatten)]
    found: &'a Comparison,
}

/// Most rows of the table; the JSON has all.
const ROWS: usize = 12;

pub fn run(args: &CompareArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let (run, reference) = (Log::open(&args.run)?, Log::open(&args.reference)?);
    let by = args.by.into();
    let found = compare(&run, &reference, by, args.loss.map(Into::into), args.tolerance)?;
    let svg = match &args.svg {
        Some(path) => Some(path.clone()),
        None => args.run.is_dir().then(|| args.run.join(COMPARE_SVG)),
    };
    out::check_file(svg.as_deref())?;
    let settings = differing(&args.run, &args.reference)?;
    table(args, &found, &settings)?;
    if let Some(path) = &svg {
        let names = [&args.run, &args.reference].map(|path| short_name(path));
        let title = format!("{} and {}", names[0], names[1]);
        let series = [run.series(&names[0], found.losses, by), reference.series(&names[1], found.losses, by)];
        curves_svg(path, &title, by.unit(), &series)?;
        out::line(format_args!("picture    {}", path.display()))?;
    }
    let on_track = found.verdict != Verdict::Behind;
    let text = verdict(&found);
    out::line(&text)?;
    let (run, reference) = (args.run.as_path(), args.reference.as_path());
    let report = CompareReport { run, reference, on_track, text, settings, found: &found };
    out::json(args.json.as_deref(), &report)?;
    Ok(if on_track { Outcome::Done } else { Outcome::Failed })
}

/// The last two parts of a path, as a name in the picture.
fn short_name(path: &Path) -> String {
    let parts: Vec<_> = path.components().map(|part| part.as_os_str().to_string_lossy()).collect();
    parts[parts.len().saturating_sub(2)..].join("/")
}

fn table(args: &CompareArgs, found: &Comparison, settings: &[(String, String, String)]) -> Result<()> {
    let losses = match found.losses {
        Kind::Validation => "validation",
        Kind::Training => "training",
    };
    out::line(format_args!(
        "{losses} loss of {}, reference {}\n",
        args.run.display(),
        args.reference.display()
    ))?;
    for (name, ours, theirs) in settings {
        out::line(format_args!("{name:<16} {ours}, reference {theirs}"))?;
    }
    if !settings.is_empty() {
        out::line("")?;
    }
    out::line(format_args!(
        "{:>12} {:>10} {:>10} {:>11}",
        found.by.unit(),
        "run",
        "reference",
        "difference"
    ))?;
    let (all, shown) = (found.rows.len(), found.rows.len().min(ROWS));
    for at in 0..shown {
        let row = if shown > 1 { &found.rows[at * (all - 1) / (shown - 1)] } else { found.last() };
        out::line(format_args!(
            "{:>12} {:>10.4} {:>10.4} {:>+11.4}",
            place(row.at),
            row.run,
            row.reference,
            row.difference
        ))?;
    }
    out::line("")
}

fn place(at: f64) -> String {
    format!("{:.0}", at.round())
}

/// Says whether the run is on track, by how much it differs, and since when.
fn verdict(found: &Comparison) -> String {
    let (last, unit) = (found.last(), found.by.unit());
    let at = |at: f64| match found.by {
        Axis::Steps => format!("step {}", place(at)),
        Axis::Tokens | Axis::Seconds => format!("{} {unit}", place(at)),
    };
    let (size, percent) = (last.difference.abs(), 100.0 * last.difference.abs() / last.reference);
    let had = match found.reference_had_it_at {
        Some(place) => format!("the reference was there at {}", at(place)),
        None => "the reference never was as low".to_owned(),
    };
    let (place, since, tolerance) = (at(last.at), at(found.since), found.tolerance);
    let mut text = match found.verdict {
        Verdict::Equal => format!(
            "on track: {size:.4} nats {} at {place}, within {tolerance} since {since}",
            if last.difference > 0.0 { "higher" } else { "lower" }
        ),
        Verdict::Ahead => format!(
            "ahead: {size:.4} nats ({percent:.1} %) lower at {place}, by more than {tolerance} since {since}; {had}"
        ),
        Verdict::Behind if last.run.is_nan() => format!("not on track: the loss is NaN since {since}"),
        Verdict::Behind => format!(
            "not on track: {size:.4} nats ({percent:.1} %) higher at {place}, by more than {tolerance} since {since}; {had}"
        ),
    };
    let (best_at, best) = found.reference_best;
    if let Some(ours) = found.run_had_it_at.filter(|_| best_at > 0.0 && found.verdict == Verdict::Ahead) {
        text += &format!(
            "\nthe reference's lowest loss, {best:.4} at {}: the run had it at {}, {:.2} times as far",
            at(best_at),
            at(ours),
            ours / best_at
        );
    }
    text
}

/// The settings in the `config.toml` of both runs that are not the same; none if one of them is not a run folder.
fn differing(run: &Path, reference: &Path) -> Result<Vec<(String, String, String)>> {
    let read = |folder: &Path| -> Result<Option<toml::Table>> {
        let path = folder.join("config.toml");
        if !path.is_file() {
            return Ok(None);
        }
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("{}: cannot read", path.display()))?;
        Ok(Some(text.parse().with_context(|| format!("{}: not TOML", path.display()))?))
    };
    let (Some(ours), Some(theirs)) = (read(run)?, read(reference)?) else { return Ok(Vec::new()) };
    let mut keys: Vec<&String> = ours.keys().chain(theirs.keys()).collect();
    keys.sort();
    keys.dedup();
    let text = |value: Option<&toml::Value>| value.map_or("not set".to_owned(), ToString::to_string);
    let differ = keys.into_iter().filter(|&key| ours.get(key) != theirs.get(key));
    Ok(differ.map(|key| (key.clone(), text(ours.get(key)), text(theirs.get(key)))).collect())
}
