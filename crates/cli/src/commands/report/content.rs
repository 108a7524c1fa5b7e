//! What a report says, for every format.

use super::super::choices;
use super::super::runs;
use crate::figures::{duration, short, whole};
use crate::hardware::{COMMIT, VERSION, human_bytes};
use ironhorse::train::data::SourceFacts;
use ironhorse::train::run::view::{Quantity, RunView};
use ironhorse::train::run::{RunJson, utc};
use serde::Serialize;
use serde_json::Value;
use std::time::{SystemTime, UNIX_EPOCH};

/// Most samples that are shown of a run, spread over its steps.
const SAMPLES: usize = 10;
/// Most rows of the table of losses.
const READINGS: usize = 12;
/// Most files of data that are listed.
const FILES: usize = 20;

/// A table with a column for each run.
#[derive(Debug, Serialize)]
pub struct Section {
    pub title: &'static str,
    /// Said above the table; empty if there is nothing to say.
    pub note: String,
    /// Names, and what is to be said of each run.
    pub rows: Vec<(String, Vec<String>)>,
}

/// A text that a model wrote.
#[derive(Debug, Serialize)]
pub struct Sample {
    pub step: u64,
    pub text: String,
}

/// Everything but the curves.
#[derive(Debug, Serialize)]
pub struct Content {
    pub title: String,
    /// When and by what it was written.
    pub made: String,
    /// The names of the runs.
    pub runs: Vec<String>,
    pub sections: Vec<Section>,
    /// The samples of each run.
    pub samples: Vec<Vec<Sample>>,
}

impl Content {
    pub fn of(views: &[RunView], price: Option<f64>) -> Self {
        let mut names: Vec<String> = views.iter().map(RunView::name).collect();
        if names.len() == 2 && names[0] == names[1] {
            names = views.iter().map(|view| view.path().display().to_string()).collect();
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let told = |title, note: &str, of: &dyn Fn(&RunView) -> Vec<(String, String)>| Section {
            title,
            note: note.to_owned(),
            rows: side_by_side(&views.iter().map(of).collect::<Vec<_>>()),
        };
        let mut sections = vec![
            told("In short", "", &in_short),
            told("What was trained on what", "", &trained_on),
            told("Losses", "In nats per token; the training loss is the mean of its neighbourhood.", &losses),
            told("Accuracies", "Multiple-choice questions, graded on the way.", &accuracies),
            told("Speed, memory and cost", cost_note(price), &|view| speed(view, price)),
            told("Verification", "", &verification),
            told("Settings", settings_note(views.len()), &settings),
            told("Provenance", "", &provenance),
        ];
        sections.retain(|section| !section.rows.is_empty());
        Self {
            title: names.join(" and "),
            made: format!("{} UTC by ironhorse {VERSION} ({COMMIT})", utc(now)),
            runs: names,
            sections,
            samples: views.iter().map(samples).collect(),
        }
    }
}

/// Rows of several runs under their names, in the order of the first that has them. What a run does not have is empty.
fn side_by_side(of: &[Vec<(String, String)>]) -> Vec<(String, Vec<String>)> {
    let mut rows: Vec<(String, Vec<String>)> = Vec::new();
    for (run, facts) in of.iter().enumerate() {
        for (name, text) in facts {
            let at = rows.iter().position(|(row, _)| row == name).unwrap_or_else(|| {
                rows.push((name.clone(), vec![String::new(); of.len()]));
                rows.len() - 1
            });
            let cell = &mut rows[at].1[run];
            if !cell.is_empty() {
                cell.push('\n');
            }
            cell.push_str(text);
        }
    }
    rows
}

fn row(name: &str, text: impl Into<String>) -> (String, String) {
    (name.to_owned(), text.into())
}

fn in_short(view: &RunView) -> Vec<(String, String)> {
    let kept =
        ["state", "step", "training loss", "validation loss", "best", "trained for", "tokens", "speed"];
    let facts = runs::facts(view).into_iter().filter(|(name, _)| kept.contains(name));
    facts.map(|(name, text)| row(name, text)).collect()
}

fn trained_on(view: &RunView) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    if let Some(model) = view.config.get("model").and_then(|model| model.as_str()) {
        rows.push(row("model", model));
    }
    let Some(origin) = &view.origin else { return rows };
    if let Some(work) = origin.last_start().work {
        rows.push(row("parameters", whole(work.parameters as f64)));
    }
    rows.push(row(
        "weights of the start",
        origin
            .init
            .as_ref()
            .map_or("random".to_owned(), |init| format!("{}\nSHA-256 {}", init.path, init.sha256)),
    ));
    for (name, files) in [("training data", &origin.data), ("validation data", &origin.val_data)] {
        rows.extend(data(files).map(|text| row(name, text)));
    }
    rows
}

fn data(files: &[SourceFacts]) -> Option<String> {
    let tokens: u64 = files.iter().map(|file| file.tokens).sum();
    let mut lines = vec![match files.len() {
        1 => format!("{} tokens", whole(tokens as f64)),
        count => format!("{} tokens in {count} files", whole(tokens as f64)),
    }];
    lines.extend(files.iter().take(FILES).map(|file| {
        format!("{}: {} tokens, SHA-256 {}", file.path.display(), whole(file.tokens as f64), file.sha256)
    }));
    if files.len() > FILES {
        lines.push(format!("and {} more, all in run.json", files.len() - FILES));
    }
    (!files.is_empty()).then(|| lines.join("\n"))
}

/// The losses at some steps: validations, or every so many steps.
fn losses(view: &RunView) -> Vec<(String, String)> {
    let train = view.table.points(Quantity::Loss);
    let reach = (train.len() / 60).max(1);
    let smooth = ironhorse::train::picture::smoothed_over(&train, reach);
    let val = view.table.points(Quantity::ValLoss);
    let at: Vec<f64> = if val.is_empty() { &smooth } else { &val }.iter().map(|point| point.0).collect();
    let mut rows = Vec::new();
    for step in spread(&at, READINGS) {
        let nearest = smooth.partition_point(|point| point.0 < *step).min(smooth.len().saturating_sub(1));
        let train = smooth.get(nearest).map_or(String::new(), |point| format!("training {:.4}", point.1));
        let val = val.iter().find(|point| point.0 == *step);
        let text = match val {
            Some(point) if train.is_empty() => format!("validation {:.4}", point.1),
            Some(point) => format!("{train}, validation {:.4}", point.1),
            None => train,
        };
        rows.push((format!("step {}", whole(*step)), text));
    }
    rows
}

/// At most this many, the first and the last among them.
fn spread<T>(all: &[T], most: usize) -> Vec<&T> {
    let count = all.len().min(most);
    (0..count).map(|i| &all[if count > 1 { i * (all.len() - 1) / (count - 1) } else { 0 }]).collect()
}

fn accuracies(view: &RunView) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    for (step, graded) in spread(&view.table.evals, READINGS) {
        for (task, found) in graded {
            let text = format!("{} ({} questions)", choices::figures(found), found.questions);
            rows.push((format!("{task}, step {}", whole(*step as f64)), text));
        }
    }
    rows
}

fn cost_note(price: Option<f64>) -> &'static str {
    match price {
        Some(_) => {
            "The cost is that of the time of the steps; validation, samples, saving and starting are not counted."
        }
        None => "With --price EUR_PER_HOUR the report says what the steps cost.",
    }
}

fn speed(view: &RunView, price: Option<f64>) -> Vec<(String, String)> {
    let table = &view.table;
    if table.is_empty() {
        return Vec::new();
    }
    let seconds = table.seconds();
    let mut rows = vec![row("time of the steps", duration(seconds))];
    if seconds > 0.0 {
        rows.push(row("tokens/s, mean", short(table.all_tokens() / seconds)));
    }
    rows.extend(view.speed().map(|speed| row("tokens/s, last 100 steps", short(speed.into()))));
    rows.extend(
        view.mfu().map(|mfu| row("MFU, last 100 steps", format!("{:.1} % of the datasheet", 100.0 * mfu))),
    );
    rows.extend(
        table
            .recent(Quantity::StepMs, usize::MAX)
            .map(|ms| row("step, median", format!("{} ms", short(ms.into())))),
    );
    rows.extend(
        table
            .data_share(usize::MAX)
            .map(|share| row("reading data", format!("{:.1} % of the time", 100.0 * share))),
    );
    let work = view.origin.as_ref().and_then(|origin| origin.last_start().work);
    rows.extend(work.map(|work| row("planned memory", human_bytes(work.planned_bytes))));
    if let Some(price) = price {
        let hours = seconds / 3600.0;
        rows.push(row("cost", format!("{:.2} EUR ({hours:.2} h at {price:.2} EUR)", hours * price)));
    }
    rows
}

/// What `verify --json` wrote into the run's folder.
fn verification(view: &RunView) -> Vec<(String, String)> {
    let bytes = std::fs::read(view.path().join("verify.json"));
    let Some(said) = bytes.ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok()) else {
        return Vec::new();
    };
    let report = said.get("report").unwrap_or(&said);
    let mut rows = Vec::new();
    if let Some(verdict) = report["verdict"].as_str() {
        rows.push(row("verdict", verdict));
    }
    if let Some(tensors) = report["tensors"].as_array() {
        let right = tensors.iter().filter(|tensor| tensor["pass"] == Value::Bool(true)).count();
        rows.push(row("tensors within their tolerance", format!("{right} of {}", tensors.len())));
    } else if let (Some(compared), Some(wrong)) = (report["compared"].as_u64(), report["wrong"].as_u64()) {
        rows.push(row("results that agree", format!("{} of {compared}", compared.saturating_sub(wrong))));
    }
    for name in ["engine", "dtype"] {
        rows.extend(said[name].as_str().map(|text| row(name, text)));
    }
    if report["first_wrong"].is_object() {
        rows.push(row("first wrong", report["first_wrong"].to_string()));
    }
    rows
}

fn settings_note(runs: usize) -> &'static str {
    if runs > 1 { "Those that differ come first." } else { "" }
}

fn settings(view: &RunView) -> Vec<(String, String)> {
    view.config.iter().map(|(name, value)| (name.clone(), value.to_string())).collect()
}

fn provenance(view: &RunView) -> Vec<(String, String)> {
    let mut rows = vec![row("folder", view.path().display().to_string())];
    let Some(origin) = &view.origin else { return rows };
    for (start, name) in starts(origin) {
        let ran = format!(
            "{} UTC on {}, {}, ironhorse {} ({})",
            start.time, start.host, start.device, start.version, start.commit
        );
        let changes: String = start.changes.iter().map(|change| format!("\n{change}")).collect();
        rows.push((name, format!("{ran}\n{}{changes}", start.command.join(" "))));
    }
    let hardware = &origin.last_start().hardware;
    for name in ["cpu", "gpu", "system"] {
        rows.extend(hardware[name].as_str().map(|text| row(name, text)));
    }
    if let Some(libraries) = hardware["libraries"].as_object() {
        let text =
            |(name, found): (&String, &Value)| format!("{name} {}", found["version"].as_str().unwrap_or("?"));
        rows.push(row("libraries", libraries.iter().map(text).collect::<Vec<_>>().join(", ")));
    }
    rows
}

fn starts(origin: &RunJson) -> Vec<(&ironhorse::train::run::Started, String)> {
    let first = (&origin.started, "started".to_owned());
    let resumes =
        origin.resumes.iter().map(|start| (start, format!("resumed at step {}", whole(start.step as f64))));
    std::iter::once(first).chain(resumes).collect()
}

fn samples(view: &RunView) -> Vec<Sample> {
    let all: Vec<usize> = (0..view.samples.len()).collect();
    let shown = spread(&all, SAMPLES).into_iter().filter_map(|&index| view.sample(index));
    shown.map(|(step, text)| Sample { step, text: readable(&text) }).collect()
}

/// A text without control characters, which no page may hold.
fn readable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

impl Section {
    /// The rows, those first that differ between two runs, where this is about settings.
    pub fn sorted(&self) -> Vec<&(String, Vec<String>)> {
        let mut rows: Vec<_> = self.rows.iter().collect();
        if self.title == "Settings" {
            rows.sort_by_key(|(_, texts)| texts.windows(2).all(|pair| pair[0] == pair[1]));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_two_runs_stand_side_by_side() {
        let one = vec![row("a", "1"), row("b", "2"), row("b", "3")];
        let two = vec![row("c", "4"), row("a", "5")];
        let of = |texts: [&str; 2]| texts.map(str::to_owned).to_vec();
        assert_eq!(
            side_by_side(&[one, two]),
            [("a".into(), of(["1", "5"])), ("b".into(), of(["2\n3", ""])), ("c".into(), of(["", "4"]))]
        );
    }

    #[test]
    fn a_few_of_many_have_both_ends() {
        let all: Vec<u32> = (0..100).collect();
        assert_eq!(spread(&all, 4), [&0, &33, &66, &99]);
        assert_eq!(spread(&all[..2], 4), [&0, &1]);
        assert_eq!(spread(&all[..1], 4), [&0]);
        assert!(spread(&all[..0], 4).is_empty());
    }
}
