//! A report as Markdown. Curves are those of the run's folder, where the report is in it.

use super::content::Content;
use std::fmt::Write as _;

pub fn text(content: &Content, in_folder: bool) -> String {
    let mut text = format!("# {}\n\nReport of {}\n", inline(&content.title), content.made);
    for section in &content.sections {
        let _ = writeln!(text, "\n## {}\n", section.title);
        if !section.note.is_empty() {
            let _ = writeln!(text, "{}\n", section.note);
        }
        let names: String = match content.runs.len() {
            1 => " |".to_owned(),
            _ => content.runs.iter().map(|run| format!(" {} |", inline(run))).collect(),
        };
        let _ = writeln!(text, "| |{names}\n| --- |{}", " --- |".repeat(content.runs.len()));
        for (name, cells) in section.sorted() {
            let cells: String = cells.iter().map(|cell| format!(" {} |", inline(cell))).collect();
            let _ = writeln!(text, "| {} |{cells}", inline(name));
        }
        if section.title == "In short" && in_folder {
            text += "\n![loss](loss.svg)\n";
        }
    }
    for (run, samples) in content.runs.iter().zip(&content.samples) {
        for sample in samples {
            let _ = writeln!(text, "\n## Sample of {} after {} steps\n", inline(run), sample.step);
            sample.text.trim_end().lines().for_each(|line| {
                let _ = writeln!(text, "    {line}");
            });
        }
    }
    text
}

/// A text inside a line or a cell.
fn inline(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('|', "\\|")
        .replace('<', "&lt;")
        .replace('*', "\\*")
        .replace('_', "\\_")
        .replace('`', "\\`")
        .replace('\n', "<br>")
}
