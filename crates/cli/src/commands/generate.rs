//! `ironhorse generate`

use super::choices::Named;
use super::model::{context, find_tokenizer, given_or_newest};
use crate::args::{EngineArgs, heading, json_help};
use crate::hardware::check_memory;
use crate::loading::load_base;
use crate::{Outcome, number, out};
use anyhow::{Result, bail};
use clap::Args;
use ironhorse::text::chat::Chat;
use ironhorse::text::tokenizer::Tokenizer;
use ironhorse::text::tokenizer::bpe::Special;
use ironhorse::train::format::checkpoint::{TrainerState, is_run};
use ironhorse::train::format::peft::AdapterFolder;
use ironhorse::train::format::{WeightSource, open_weights};
use ironhorse::train::generate::codec::{Codec, Stream};
use ironhorse::train::generate::sample::Sampler;
use ironhorse::train::generate::{Request, generate};
use ironhorse::train::model::Lora;
use ironhorse::train::session::{Session, SessionSpec};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How to choose tokens.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = heading::SAMPLING)]
pub struct SamplingArgs {
    /// Sampling temperature; 0 is greedy [default: 0.35 where tokens are bytes, 0.8 elsewhere]
    #[arg(long, value_name = "X", value_parser = number::at_least_0::<f32>)]
    temperature: Option<f32>,
    /// Keep only the K most likely tokens
    #[arg(long, value_name = "K", value_parser = number::count::<usize>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<usize>,
    /// Keep only the most likely tokens that together reach this probability
    #[arg(long, value_name = "P", value_parser = number::probability::<f32>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f32>,
    /// Always choose the most likely token
    #[arg(long)]
    greedy: bool,
}

impl SamplingArgs {
    /// The same with the temperature settled: one wrong byte spoils a word, so bytes are drawn more carefully.
    pub fn settle(&mut self, vocab: usize) {
        self.temperature.get_or_insert(if vocab <= 256 { 0.35 } else { 0.8 });
    }

    /// The sampler asked for.
    pub fn sampler(&self, seed: u64) -> Sampler {
        let temperature = if self.greedy { 0.0 } else { self.temperature.unwrap_or(1.0) };
        Sampler { temperature, top_k: self.top_k, top_p: self.top_p, seed }
    }
}

/// How much to write, and how.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::SAMPLING)]
pub struct WritingArgs {
    /// Maximum number of tokens to generate
    #[arg(long, default_value_t = 600, value_name = "N", value_parser = number::count_or_0::<usize>)]
    pub tokens: usize,
    /// Number of tokens the model attends to [default: the sequence length a run was trained with, else the model's
    /// context]
    #[arg(long, value_name = "N", value_parser = number::count::<usize>)]
    pub context: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Random seed
    #[arg(long, default_value_t = 1, value_name = "S", value_parser = number::seed)]
    seed: u64,
}

impl WritingArgs {
    /// The sampler asked for, for so many tokens.
    pub fn sampler(&self, vocab: usize) -> Sampler {
        let mut sampling = self.sampling.clone();
        sampling.settle(vocab);
        sampling.sampler(self.seed)
    }
}

/// Writes text with a trained model
#[derive(Args)]
#[command(
    after_help = "Examples:\n  ironhorse generate\n  ironhorse generate --prompt 'Ivy was' --temperature 0.7\n  \
                        ironhorse generate --model runs/0001/best\n  \
                        ironhorse generate --model runs/0001 --chat --prompt 'What is a boiler?'    a model of `tune` answers\n  \
                        ironhorse generate --model gpt2 --prompt 'The train' --top-k 40          GPT-2, fetched once\n  \
                        ironhorse generate --model Qwen/Qwen3-0.6B --adapter runs/0001 --prompt 'Ivy was'    an adapter of train --lora, or of PEFT\n  \
                        ironhorse generate --model Qwen/Qwen3-0.6B --adapter a=runs/0001 --adapter b=folder   one base, and each in turn\n  \
                        ironhorse generate --model gpt2_124M.bin --tokenizer gpt2 --prompt 'The train' --top-k 40"
)]
pub struct GenerateArgs {
    /// A run (RUN/best is its best checkpoint), a checkpoint, a Hugging Face folder, a model .bin, or a model by name such as gpt2 or org/name [default: the newest run below runs/]
    #[arg(long, help_heading = heading::MODEL, value_name = "FILE")]
    model: Option<PathBuf>,
    /// An adapter (LoRA) for the model: a folder of PEFT, or a run of `train --lora`; of several the base is loaded once, and each continues the text
    #[arg(long, help_heading = heading::MODEL, value_name = "[NAME=]DIR", value_parser = Named::parse)]
    adapter: Vec<Named>,
    /// The text to continue
    #[arg(long, help_heading = heading::SAMPLING, default_value = "", value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    /// Take the prompt for what a user says, in the model's chat template: the model answers
    #[arg(long, help_heading = heading::SAMPLING)]
    chat: bool,
    /// With --chat: the system message before the prompt
    #[arg(long, help_heading = heading::SAMPLING, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
    #[command(flatten)]
    writing: WritingArgs,
    /// Name, file or folder of a tokenizer, as of `prepare` [default: the one beside the model]
    #[arg(long, help_heading = heading::MODEL, value_name = "NAME")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    #[arg(long, help = json_help!("text, tokens and speed"), help_heading = heading::OUTPUT, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct GenerateReport {
    /// The name of the adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<String>,
    prompt: String,
    text: String,
    tokens: Vec<u32>,
    seconds: f64,
    tokens_per_s: f64,
}

pub fn run(args: &GenerateArgs) -> Result<Outcome> {
    out::check_json(args.json.as_deref())?;
    let model = given_or_newest(args.model.as_deref())?;
    let mut source = open_weights(&model)?;
    let config = source.config();
    let tokenizer = find_tokenizer(args.tokenizer.as_deref(), source.as_ref(), &model)?;
    let context = context("--context", args.writing.context, source.as_ref());
    let sampler = args.writing.sampler(tokenizer.vocab_size());
    Named::check_names("--adapter", &args.adapter)?;
    let mut adapters = open_adapters(&args.adapter, source.as_ref())?;
    let given = args.model.as_deref().unwrap_or(&model);
    let doubts = adapters.iter().filter_map(|(_, adapter)| adapter.doubt(&[given, &model, source.path()]));
    doubts.for_each(out::note);
    let precision = args.engine.dtype()?.precision(1);
    let lora = Lora::covering(&adapters.iter().map(|(_, adapter)| adapter.lora()).collect::<Vec<_>>());
    let (prompt, stop) = match args.chat {
        true => question(args, &tokenizer)?,
        false => (tokenizer.prompt(&args.prompt)?, tokenizer.ends()),
    };
    // the cache of a whole context can be larger than the model
    let positions = prompt.len().saturating_add(args.writing.tokens).clamp(1, context);
    let decode_context = Some(positions);
    let spec = SessionSpec { decode: Some(1), decode_context, precision, lora, ..SessionSpec::default() };
    let engine = args.engine.engine()?;
    check_memory(engine.as_ref(), &config, &spec)?;
    let mut session = Session::new(engine, config, &spec)?;
    let digest = load_base(&mut session, source.as_mut())?;
    adapters.iter().try_for_each(|(_, adapter)| adapter.check_base(&digest, &model))?;
    session.settle()?;

    name_model(&model, source.as_ref());
    if let Some(warning) = tokenizer.warning().filter(|_| !args.prompt.is_empty()) {
        out::note(warning);
    }
    let request = Request {
        prompt: &prompt,
        vocab: tokenizer.vocab_size(),
        tokens: args.writing.tokens,
        context: Some(positions),
        stop: &stop,
        sampler,
    };
    if adapters.is_empty() {
        let report = write(args, (&mut session, &tokenizer), &request, None)?;
        out::json(args.json.as_deref(), &report)?;
        return Ok(Outcome::Done);
    }
    let (mut reports, several) = (Vec::new(), adapters.len() > 1);
    for (name, adapter) in &mut adapters {
        session.load_adapter(adapter)?;
        if several {
            out::note(format_args!("adapter {name}: {}", adapter.path().display()));
        }
        reports.push(write(args, (&mut session, &tokenizer), &request, Some(name))?);
    }
    match &reports[..] {
        [one] => out::json(args.json.as_deref(), one)?,
        all => out::json(args.json.as_deref(), &all)?,
    }
    Ok(Outcome::Done)
}

/// What the answer to the prompt is continued from, by the template beside the tokenizer, and where it ends.
fn question(args: &GenerateArgs, tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>)> {
    if args.prompt.is_empty() {
        bail!("--chat needs --prompt, what the user says");
    }
    let chat = Chat::open(tokenizer.name(), None)?;
    let says = |role: &str, text: &str| json!({"role": role, "content": text});
    let system = args.system.iter().map(|text| says("system", text));
    let messages: Vec<Value> = system.chain([says("user", &args.prompt)]).collect();
    let text = chat.prompt(&messages, true)?;
    let mut stop = tokenizer.ends();
    stop.extend(chat.ends());
    Ok((tokenizer.encode_as(text.as_bytes(), Special::Tokens)?, stop))
}

/// The adapters, each with its name; one for a model of other shapes is refused.
pub(super) fn open_adapters(
    named: &[Named],
    source: &dyn WeightSource,
) -> Result<Vec<(String, AdapterFolder)>> {
    let open = |Named { name, file }: &Named| {
        let adapter = AdapterFolder::open(file)?;
        adapter.check(&source.config())?;
        Ok((name.clone(), adapter))
    };
    named.iter().map(open).collect()
}

/// Continues the prompt, token by token.
fn write(
    args: &GenerateArgs,
    (session, tokenizer): (&mut Session, &Tokenizer),
    request: &Request<'_>,
    adapter: Option<&str>,
) -> Result<GenerateReport> {
    let start = Instant::now();
    if !args.chat {
        out::piece(args.prompt.as_bytes())?;
    }
    let mut text = Stream::default();
    let tokens = generate(session, request, |token| {
        match out::piece(&text.next(tokenizer, token)?) {
            // the reader went away, but the report is still wanted
            Err(error) if args.json.is_some() && out::is_closed_pipe(&error) => Ok(()),
            written => written,
        }
    })?;
    out::line("")?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(GenerateReport {
        adapter: adapter.map(str::to_owned),
        prompt: args.prompt.clone(),
        text: tokenizer.decode_lossy(&tokens)?,
        tokens_per_s: tokens.len() as f64 / seconds,
        tokens,
        seconds,
    })
}

/// Says which checkpoint of a run was taken, and if the run is not finished.
pub(super) fn name_model(model: &Path, source: &dyn WeightSource) {
    if source.path() == model {
        return;
    }
    let steps = |state: &TrainerState| Some((state.step, state.settings.get("steps")?.as_u64()?));
    let unfinished = source.trainer().and_then(steps).filter(|(step, steps)| step < steps);
    let unfinished = unfinished.map_or_else(String::new, |(step, steps)| match is_run(model) {
        true => format!(", of a run that was stopped after {step} of {steps} steps"),
        false => format!(", the best of its run, after {step} of {steps} steps"),
    });
    out::note(format_args!("model: {}{unfinished}", source.path().display()));
}
