//! `ironhorse data show`

mod texts;

use super::fetch::names;
use super::train::{Tally, note_disorder};
use crate::args::{TemplateArgs, heading};
use crate::{Outcome, number, out};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ironhorse::text::chat::{Chat, ChatFiles, ChatLine, Counts, Mask};
use ironhorse::text::read::Input;
use ironhorse::text::tokenizer::show::visible;
use ironhorse::train::run::Control;
use serde::Serialize;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Shows data for fine-tuning as the model sees them
#[derive(Args)]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand)]
enum DataCommand {
    Show(ShowArgs),
}

/// Shows the first samples: their text, coloured by what is trained on, their ids, and where that begins and ends; of plain text
/// the first documents
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse data show --data chat.jsonl --tokenizer Qwen/Qwen3-0.6B\n  \
    ironhorse data show --data chat.jsonl --tokenizer runs/base --template chatml.jinja --mask completion --count 1\n  \
    ironhorse data show --data 'chats/*.jsonl.zst' --tokenizer model --context 2048 --whole\n  \
    ironhorse data show --data book.txt --tokenizer gpt2 --context 64    text, as `train --data book.txt` sees it\n\n\
    A line is {\"messages\": [{\"role\": ..., \"content\": ...}, ...]}, {\"prompt\": ..., \"completion\": ...} or {\"text\": ...}.\n\
    Where there are no colours, what is learned is between ⟦ and ⟧.")]
struct ShowArgs {
    /// Files, folders or patterns of JSON lines, or of text (.txt, .md, .parquet), also with .gz or .zst, or a data set of the hub; - means
    /// standard input, of JSON lines
    #[arg(long, help_heading = heading::DATA, required = true, value_name = "FILE", num_args = 1..)]
    data: Vec<PathBuf>,
    /// A folder with a tokenizer and its chat template, a tokenizer.json in one, a model of the hub such as org/name, or a name such as gpt2
    #[arg(long, help_heading = heading::DATA, value_name = "NAME")]
    tokenizer: PathBuf,
    #[command(flatten)]
    template: TemplateArgs,
    /// Cut samples after N tokens; of text, show the first N of each document [default there: 512]
    #[arg(long, help_heading = heading::DATA, value_name = "N", value_parser = number::count::<usize>)]
    context: Option<usize>,
    /// How many samples to show
    #[arg(long, help_heading = heading::OUTPUT, default_value_t = 3, value_name = "N", value_parser = number::count::<usize>)]
    count: usize,
    /// Read all of the data, not only what is shown, and count it
    #[arg(long, help_heading = heading::OUTPUT)]
    whole: bool,
    /// Also write the samples to this file as JSON; - means standard output, and the text for people goes to standard error
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: &DataArgs) -> Result<Outcome> {
    match &args.command {
        DataCommand::Show(args) => show(args),
    }
}

#[derive(Serialize)]
struct Report {
    tokenizer: String,
    /// The file that the chat template is from, if there is one.
    template: Option<String>,
    mask: &'static str,
    context: Option<usize>,
    /// The counts of everything that was read: of the samples that are shown, or of all.
    counts: Counts,
    samples: Vec<Shown>,
}

/// A sample for people.
#[derive(Serialize)]
struct Shown {
    #[serde(serialize_with = "out::lossy_path")]
    file: PathBuf,
    /// The number of the line, or of the document in its file.
    line: u64,
    /// What is numbered.
    #[serde(skip)]
    unit: &'static str,
    text: String,
    ids: Vec<i32>,
    learned: Vec<bool>,
    runs: Vec<Run>,
    /// Tokens that were cut off.
    cut: usize,
}

/// Tokens in a row that are all learned, or all not.
#[derive(Serialize)]
struct Run {
    start: usize,
    end: usize,
    learned: bool,
    /// Whether this is the token between documents.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    boundary: bool,
    text: String,
}

fn show(args: &ShowArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let mask = args.template.mask();
    let chat = open_chat(&args.tokenizer, args.template.template.as_deref())?;
    let paths = names::data(&args.data, &Control::default())?;
    if let Some(inputs) = texts::inputs(&paths)? {
        return show_texts(args, &inputs, &chat);
    }
    let files = ChatFiles::new(&paths)?;
    let (mut counts, mut samples) = (Counts::default(), Vec::new());
    let mut disorder = Tally::default();
    for line in files.samples(&chat, mask, args.context) {
        let line = line?;
        if let Some(what) = &line.disorder {
            disorder.add(|| format!("{} line {} {what}", line.path.display(), line.line));
        }
        counts.add(&line);
        if samples.len() < args.count {
            let shown = Shown::new(&chat, line)?;
            out::line(shown.text(out::colours()))?;
            samples.push(shown);
        }
        if samples.len() == args.count && !args.whole {
            break;
        }
    }
    out::line(counts.text(args.context))?;
    chat.doubts(mask).iter().for_each(out::note);
    note_disorder([&disorder]);
    let report = Report {
        tokenizer: chat.tokenizer().name().to_owned(),
        template: chat.template().map(|template| template.origin().to_owned()),
        mask: mask.name(),
        context: args.context,
        counts,
        samples,
    };
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

fn show_texts(args: &ShowArgs, inputs: &[Input], chat: &Chat) -> Result<Outcome> {
    if args.template.mask.is_some() || args.template.template.is_some() {
        bail!(
            "{}: every token of plain text is trained on; --mask and --template are for chats",
            inputs[0].path.display()
        );
    }
    let (samples, read) = texts::show(args, inputs, chat.tokenizer())?;
    out::line(format!("{} documents, {} tokens, all learned", read.documents, read.tokens))?;
    let counts = Counts {
        samples: read.documents,
        tokens: read.tokens,
        learned: read.tokens.saturating_sub(1), // all but the very first are predicted
        ..Counts::default()
    };
    let report = Report {
        tokenizer: chat.tokenizer().name().to_owned(),
        template: None,
        mask: Mask::None.name(),
        context: args.context,
        counts,
        samples,
    };
    out::json(args.json.as_deref(), &report)?;
    Ok(Outcome::Done)
}

/// The tokenizer of `--tokenizer` with its template; one of the hub is fetched if need be.
pub fn open_chat(tokenizer: &Path, template: Option<&Path>) -> Result<Chat> {
    let tokenizer = names::tokenizer(tokenizer)?;
    let name =
        tokenizer.to_str().with_context(|| format!("{}: its name is not UTF-8", tokenizer.display()))?;
    Ok(Chat::open(name, template)?)
}

impl Shown {
    fn new(chat: &Chat, line: ChatLine) -> Result<Self> {
        let ChatLine { path, line, sample, cut, .. } = line;
        let text = |range: Range<usize>| -> Result<String> {
            let ids: Vec<u32> = sample.ids[range].iter().map(|&id| id as u32).collect();
            Ok(String::from_utf8_lossy(&chat.tokenizer().decode(&ids)?).into_owned())
        };
        let (mut runs, mut start) = (Vec::new(), 0);
        for run in sample.learned.chunk_by(|a, b| a == b) {
            let end = start + run.len();
            runs.push(Run { start, end, learned: run[0], boundary: false, text: text(start..end)? });
            start = end;
        }
        let text = text(0..sample.ids.len())?;
        Ok(Self { file: path, line, unit: "line", text, ids: sample.ids, learned: sample.learned, runs, cut })
    }

    /// A line about it, its text, and a line for every run.
    fn text(&self, colour: bool) -> String {
        let (place, tokens) =
            (format!("{} {} {}", self.file.display(), self.unit, self.line), self.ids.len());
        // of text all is learned, its first token after the last one of another document
        let learned = self.learned.iter().skip(1).filter(|&&learned| learned).count();
        let mut text = match (self.unit, self.cut) {
            ("document", 0) => format!("{place}: {tokens} tokens, all learned"),
            ("document", cut) => {
                format!("{place}: {} tokens, all learned, the first {tokens} shown", tokens + cut)
            }
            (_, 0) => format!("{place}: {tokens} tokens, {learned} learned"),
            (_, cut) => format!("{place}: {tokens} tokens, {learned} learned, {cut} more cut off"),
        };
        text.push('\n');
        for run in &self.runs {
            let said = visible(&run.text, false);
            match (colour, run.learned) {
                // the colour ends with the line, or a terminal paints it to its edge
                (true, learned) => {
                    let paint = if learned { "1;32" } else { "2" };
                    let painted = said.split('\n').map(|line| format!("\x1b[{paint}m{line}\x1b[0m"));
                    text += &painted.collect::<Vec<_>>().join("\n");
                }
                (false, true) => text += &format!("⟦{said}⟧"),
                (false, false) => text += &said,
            }
        }
        if !text.ends_with('\n') {
            text.push('\n');
        }
        for run in &self.runs {
            let ids: Vec<String> = self.ids[run.start..run.end].iter().map(ToString::to_string).collect();
            let what = match (run.boundary, run.learned) {
                (true, _) => "between",
                (false, true) => "learned",
                (false, false) => "given",
            };
            text += &format!("{:>6}..{:<6} {what:<7} {}\n", run.start, run.end, ids.join(" "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is learned is green, what is given faint, line by line; without colours brackets tell.
    #[test]
    fn what_is_learned_is_coloured() {
        let run = |start, end, learned, text: &str| {
            let boundary = false;
            Run { start, end, learned, boundary, text: text.to_owned() }
        };
        let shown = Shown {
            file: "c.jsonl".into(),
            line: 7,
            unit: "line",
            text: "a\nbc".into(),
            ids: vec![5, 6, 7],
            learned: vec![false, false, true],
            runs: vec![run(0, 2, false, "a\nb"), run(2, 3, true, "c")],
            cut: 4,
        };
        let first = "c.jsonl line 7: 3 tokens, 1 learned, 4 more cut off\n";
        let last = "     0..2      given   5 6\n     2..3      learned 7\n";
        let plain = format!("{first}a⏎\nb⟦c⟧\n{last}");
        assert_eq!(shown.text(false), plain);
        let coloured = format!("{first}\x1b[2ma⏎\x1b[0m\n\x1b[2mb\x1b[0m\x1b[1;32mc\x1b[0m\n{last}");
        assert_eq!(shown.text(true), coloured);
    }
}
