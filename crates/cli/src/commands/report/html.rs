//! A report as one page: styles and curves inside, no script, nothing from elsewhere; light or dark as the reader's system is.

use super::content::{Content, Section};
use std::fmt::Write as _;

/// The look. The colours of pictures are those of the picture module; in the dark those of paper and ink change places.
const STYLE: &str = r##"
:root { color-scheme: light dark; --page: #fff; --ink: #111827; --pale: #6b7280; --line: #e5e7eb; --soft: #f9fafb; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1420; --ink: #e5e7eb; --pale: #9ca3af; --line: #2b3444; --soft: #161d2b; }
  svg [fill="#ffffff"] { fill: #0f1420 } svg [fill="#111827"] { fill: #e5e7eb } svg [fill="#4b5563"], svg [fill="#6b7280"] { fill: #9ca3af }
  svg [stroke="#e5e7eb"] { stroke: #2b3444 } svg [stroke="#f3f4f6"] { stroke: #1b2331 } svg [stroke="#ffffff"] { stroke: #0f1420 }
  svg [stroke="#2563eb"] { stroke: #60a5fa } svg [fill="#2563eb"] { fill: #60a5fa }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 Inter, system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem } p { color: var(--pale); margin: .25rem 0 .5rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; white-space: pre-wrap }
th { font-weight: 500; color: var(--pale); width: 14rem } tr.differs td { font-weight: 600 }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem }
.curves svg { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 10px }
.samples { display: grid; gap: 1rem } .samples.two { grid-template-columns: 1fr 1fr }
pre { margin: 0 0 1rem; padding: .7rem; background: var(--soft); border: 1px solid var(--line); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px } h3 { font-size: .95rem; margin: .3rem 0; color: var(--pale); font-weight: 500 }
@media (max-width: 40rem) { .samples.two { grid-template-columns: 1fr } th { width: 8rem } }
"##;

/// The page.
pub fn page(content: &Content, pictures: &[String]) -> String {
    let title = escape(&content.title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n<style>{STYLE}</style>\n\
         </head>\n<body>\n<h1>{title}</h1>\n<p>Report of {}</p>\n",
        escape(&content.made)
    );
    for section in &content.sections {
        if section.title == "Speed, memory and cost" {
            page += &samples(content);
        }
        page += &table(section, &content.runs);
        if section.title == "In short" && !pictures.is_empty() {
            page += "<h2>Curves</h2>\n<div class=\"curves\">\n";
            pictures.iter().for_each(|picture| page += picture);
            page += "</div>\n";
        }
    }
    page + "</body>\n</html>\n"
}

fn table(section: &Section, runs: &[String]) -> String {
    let mut text = format!("<h2>{}</h2>\n", section.title);
    if !section.note.is_empty() {
        let _ = writeln!(text, "<p>{}</p>", escape(&section.note));
    }
    text += "<table>\n";
    if runs.len() > 1 {
        let names: String = runs.iter().map(|run| format!("<th>{}</th>", escape(run))).collect();
        let _ = writeln!(text, "<tr><th></th>{names}</tr>");
    }
    for (name, cells) in section.sorted() {
        let differs = section.title == "Settings" && cells.windows(2).any(|pair| pair[0] != pair[1]);
        let class = if differs { " class=\"differs\"" } else { "" };
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        let _ = writeln!(text, "<tr{class}><th>{}</th>{cells}</tr>", escape(name));
    }
    text + "</table>\n"
}

fn samples(content: &Content) -> String {
    if content.samples.iter().all(Vec::is_empty) {
        return String::new();
    }
    let two = if content.samples.len() > 1 { " two" } else { "" };
    let mut text = format!("<h2>Samples</h2>\n<div class=\"samples{two}\">\n");
    for (run, samples) in content.runs.iter().zip(&content.samples) {
        text += "<div>\n";
        for sample in samples {
            let whose = if content.samples.len() > 1 { format!("{}, ", escape(run)) } else { String::new() };
            let _ = writeln!(
                text,
                "<h3>{whose}after {} steps</h3>\n<pre>{}</pre>",
                sample.step,
                escape(&sample.text)
            );
        }
        text += "</div>\n";
    }
    text + "</div>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
