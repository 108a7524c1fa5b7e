//! `ironhorse eval`

use super::choices::Named;
use super::fetch::names;
use super::model::{batch_tokens, context, find_tokenizer, given_or_newest};
use super::train::text_as_shards;
use crate::args::{EngineArgs, FlagValue, heading, json_help};
use crate::hardware::check_fits;
use crate::loading::load;
use crate::progress::bar;
use crate::{Outcome, number, out};
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use ironhorse::Device;
use ironhorse::core::EngineExt;
use ironhorse::text::read::is_data_name;
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::train::data::open_shards;
use ironhorse::train::eval::{
    EvalReport, Grade, Metric, PromptForm, Scorer, StreamLoss, Task, TaskFile, TaskResult, multiple_choice,
    stream_loss,
};
use ironhorse::train::format::{atomic, open_weights};
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::run::Control;
use ironhorse::train::session::{Session, SessionSpec};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// Grades a model: loss, perplexity and bits per byte of data, accuracy on multiple-choice questions
#[derive(Args, Clone)]
#[command(after_help = "Examples:\n  ironhorse eval --data 'shards/*_val_*.bin'\n  \
    ironhorse eval --model gpt2 --choices hellaswag --data tinyshakespeare    both by name, fetched once\n  \
    ironhorse eval --model gpt2-folder --data book.txt\n  \
    ironhorse eval --model gpt2_124M.bin --choices hellaswag=hellaswag_val.bin\n  \
    ironhorse eval --model runs/0001 --choices hellaswag=hellaswag_val.jsonl --form harness --json eval.json\n\n\
    A question is graded by the likelihood of its answers after the context. `acc` takes the whole answer, `acc_norm` divides by\n\
    its characters (lm-evaluation-harness), `acc_token` by its tokens (what llm.c calls acc_norm).\n\n\
    The JSON has the form of lm-evaluation-harness: results, n-shot, n-samples, versions, config.")]
pub struct EvalArgs {
    /// A run (RUN/best is its best checkpoint), a checkpoint, a Hugging Face folder, a model .bin, or a model by name such as gpt2 or org/name [default: the newest run below runs/]
    #[arg(long, help_heading = heading::MODEL, value_name = "FILE")]
    model: Option<PathBuf>,
    /// A tokenizer: gpt2 or another name, a tokenizer.json, a folder [default: the one beside the model]
    #[arg(long, help_heading = heading::MODEL, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Token shards or text (.txt .md .jsonl .parquet), or data by name such as tinyshakespeare, whose loss is measured: every token, in windows of --seq
    #[arg(long, help_heading = heading::DATA, value_name = "FILE", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Multiple-choice questions: llm.c's .bin, JSON lines with a context, choices and a label, or hellaswag; may be given several times
    #[arg(long, help_heading = heading::DATA, value_name = "NAME=FILE", value_parser = Named::parse)]
    choices: Vec<Named>,
    /// How prompts are made from JSON lines
    #[arg(long, help_heading = heading::DATA, value_enum, default_value_t = Form::Harness)]
    form: Form,
    /// Only the first N questions of each file
    #[arg(long, help_heading = heading::DATA, value_name = "N", value_parser = number::count::<usize>)]
    limit: Option<usize>,
    /// Context length in tokens [default: the sequence length a run was trained with, else the model's context]
    #[arg(long, help_heading = heading::DATA, value_name = "T", value_parser = number::count::<usize>)]
    seq: Option<usize>,
    /// Tokens of one batch, padding included [default: 16384 on a GPU, 2048 on the CPU]
    #[arg(long, help_heading = heading::DATA, value_name = "N", value_parser = number::count::<usize>)]
    batch_tokens: Option<usize>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Also write every question's log-likelihoods to this file, one JSON object in a line
    #[arg(long, help_heading = heading::OUTPUT, value_name = "FILE")]
    samples: Option<PathBuf>,
    #[arg(long, help = json_help!("the results"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How prompts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// As lm-evaluation-harness: HellaSwag's activity, a colon, the cleaned context
    Harness,
    /// As llm.c: the context as it is
    Plain,
}

pub fn run(args: &EvalArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    out::check_file(args.samples.as_deref())?;
    ensure!(!args.data.is_empty() || !args.choices.is_empty(), "nothing to grade: give --data or --choices");
    let model = given_or_newest(args.model.as_deref())?;
    let mut source = open_weights(&model)?;
    let (config, seq) = (source.config(), context("--seq", args.seq, source.as_ref()));
    let tokenizer = find_tokenizer(args.tokenizer.as_deref(), source.as_ref(), &model);
    let args = &with_files(args)?;
    let tasks = questions(args, config.vocab_size(), &tokenizer)?;

    let engine = args.engine.engine()?;
    let device = format!("{} {}", engine.name(), args.engine.dtype()?.name());
    let precision = args.engine.dtype()?.precision(1);
    let is_cpu = args.engine.device()? == Device::Cpu;
    let tokens = args.batch_tokens.unwrap_or(batch_tokens(is_cpu));
    let spec = SessionSpec { score: Some((seq, tokens)), precision, ..SessionSpec::default() };
    let needs = spec.layout(&config)?.total() as u64;
    check_fits(engine.as_ref(), needs, |_| "give a smaller --batch-tokens or --seq".into())?;
    let mut session = Session::new(engine, config, &spec)?;
    load(&mut session, source.as_mut(), || false)?;
    let mut scorer = Scorer::new(&mut session)?;

    let mut report = EvalReport { model: model.display().to_string(), device, tasks: Vec::new() };
    if !args.data.is_empty() {
        report.tasks.push(data(args, &mut scorer, source.config().vocab_size(), &tokenizer)?);
    }
    let mut samples = String::new();
    for task in &tasks {
        let (result, grades) = grade(task, &mut scorer)?;
        report.tasks.push(result);
        samples.extend(grades.iter().enumerate().map(|(at, grade)| sample_line(&task.name, at, grade)));
    }
    if let Some(path) = &args.samples {
        atomic::write_file(path, |sink| sink.put(samples.as_bytes()))?;
    }
    table(&report)?;
    out::json(args.json.as_deref(), &report.json())?;
    Ok(Outcome::Done)
}

/// The same with the files that names stand for.
fn with_files(args: &EvalArgs) -> Result<EvalArgs> {
    let (control, mut args) = (Control::default(), args.clone());
    args.data = names::data(&args.data, &control)?;
    for task in &mut args.choices {
        task.file = names::one_file(&task.file, &control)?;
    }
    Ok(args)
}

/// All questions, read before the model is loaded.
fn questions(args: &EvalArgs, vocab: usize, tokenizer: &Result<Tokenizer>) -> Result<Vec<Task>> {
    Named::check_names("--choices", &args.choices)?;
    let read = |task: &Named| -> Result<Task> {
        let (form, limit) = (args.form.prompt(), args.limit);
        let file = TaskFile { name: &task.name, path: &task.file, form, limit, vocab };
        let codec = file.needs_tokenizer().then(|| needed(tokenizer)).transpose()?;
        Ok(file.read(codec.map(|codec| codec as &dyn Codec))?)
    };
    args.choices.iter().map(read).collect()
}

/// The tokenizer, for what cannot do without.
fn needed(tokenizer: &Result<Tokenizer>) -> Result<&Tokenizer> {
    tokenizer.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))
}

/// The bytes of text that each token stands for. The token between texts is predicted too, but it is no text.
fn bytes_of_tokens(tokenizer: &Tokenizer) -> Result<Vec<usize>> {
    let size = |id: u32| match tokenizer.eot() == Some(id) {
        true => Ok(0),
        false => Ok(tokenizer.decode(&[id])?.len()),
    };
    (0..tokenizer.vocab_size() as u32).map(size).collect()
}

impl Form {
    fn prompt(self) -> PromptForm {
        match self {
            Self::Harness => PromptForm::Harness,
            Self::Plain => PromptForm::Plain,
        }
    }
}

/// The loss of `--data`.
fn data(
    args: &EvalArgs,
    scorer: &mut Scorer<'_>,
    vocab: usize,
    tokenizer: &Result<Tokenizer>,
) -> Result<TaskResult> {
    let start = Instant::now();
    let shards = match args.data.iter().any(|path| is_data_name(path)) {
        true => text_as_shards(&args.data, needed(tokenizer)?)?,
        false => args.data.clone(),
    };
    let mut sources = open_shards(&shards)?;
    let bar = bar(Some(sources.iter().map(|source| source.len()).sum()), &template("tokens"));
    let bytes = tokenizer.as_ref().ok().map(bytes_of_tokens).transpose()?;
    let bytes_of = bytes.as_ref().map(|bytes| |token: u32| bytes.get(token as usize).copied().unwrap_or(0));
    let bytes_of = bytes_of.as_ref().map(|bytes_of| bytes_of as &dyn Fn(u32) -> usize);
    let loss = stream_loss(scorer, &mut sources, (vocab, bytes_of), &mut |done| {
        bar.set_position(done);
        ControlFlow::Continue(())
    })?;
    bar.finish_and_clear();
    Ok(TaskResult {
        name: "data".into(),
        definition: format!(
            "every token once, from at most {} before it in its window",
            scorer.longest() - 1
        ),
        metrics: data_metrics(&loss),
        samples: loss.tokens as usize,
        cut: 0,
        seconds: start.elapsed().as_secs_f64(),
    })
}

fn data_metrics(loss: &StreamLoss) -> Vec<Metric> {
    let metric = |name, value, error| Metric { name, value, error, higher_is_better: false };
    let error = loss.error();
    let mut all = vec![
        metric("loss", loss.mean(), Some(error)),
        // the slope of e^x at the mean
        metric("perplexity", loss.perplexity(), Some(error * loss.perplexity())),
    ];
    let bits =
        loss.bits_per_byte().map(|bits| metric("bits_per_byte", bits, Some(error * bits / loss.mean())));
    all.extend(bits);
    all
}

/// One file of questions.
fn grade(task: &Task, scorer: &mut Scorer<'_>) -> Result<(TaskResult, Vec<Grade>)> {
    let start = Instant::now();
    let answers = task.examples.iter().map(|example| example.choices.len()).sum::<usize>();
    let bar = bar(Some(answers as u64), &template("answers"));
    let (accuracies, grades) = multiple_choice(scorer, &task.examples, &mut |done| {
        bar.set_position(done as u64);
        ControlFlow::Continue(())
    })?;
    bar.finish_and_clear();
    let result = TaskResult {
        name: task.name.clone(),
        definition: task.definition.clone(),
        metrics: accuracies.metrics(),
        samples: task.examples.len(),
        cut: task.cut(scorer.longest()),
        seconds: start.elapsed().as_secs_f64(),
    };
    Ok((result, grades))
}

fn sample_line(task: &str, at: usize, grade: &Grade) -> String {
    let line = json!({
        "task": task,
        "doc_id": at,
        "target": grade.label,
        "log_likelihoods": grade.log_likelihoods,
        "is_greedy": grade.is_greedy,
        "acc": u8::from(grade.best == grade.label),
        "acc_norm": grade.best_by_char.map(|best| u8::from(best == grade.label)),
        "acc_token": u8::from(grade.best_by_token == grade.label),
    });
    format!("{line}\n")
}

fn template(what: &str) -> String {
    format!("{{bar:30.cyan/dim}} {{human_pos}}/{{human_len}} {what}  {{per_sec}}  ETA {{eta}}")
}

fn table(report: &EvalReport) -> Result<()> {
    out::line(format_args!("{} on {}\n", report.model, report.device))?;
    out::line(format_args!(
        "{:<16} {:<14} {:>10}   {:<10} {:>10} {:>9}",
        "task", "metric", "value", "±", "samples", "time"
    ))?;
    for task in &report.tasks {
        for (at, metric) in task.metrics.iter().enumerate() {
            let error = metric.error.filter(|error| error.is_finite()).map(|error| format!("{error:.4}"));
            let (name, samples, time) = match at {
                0 => (task.name.as_str(), task.samples.to_string(), format!("{:.1} s", task.seconds)),
                _ => ("", String::new(), String::new()),
            };
            let error = error.unwrap_or_default();
            out::line(format_args!(
                "{name:<16} {:<14} {:>10.4}   {error:<10} {samples:>10} {time:>9}",
                metric.name, metric.value
            ))?;
        }
    }
    for task in &report.tasks {
        out::line(format_args!("\n{}: {}", task.name, task.definition))?;
        if task.cut > 0 {
            let cut = task.cut;
            out::line(format_args!(
                "{}: {cut} questions are longer than the context and lost their beginning",
                task.name
            ))?;
        }
    }
    Ok(())
}
