//! `ironhorse serve`

use super::key::key;
use super::speaking::{Rows, Speaking, SpeakingArgs};
use crate::{Outcome, number, out, signals};
use anyhow::{Context, Result};
use clap::Args;
use ironhorse::Device;
use ironhorse::train::run::Control;
use ironhorse::train::session::PREFILL;
use ironhorse_serve::http::Limits;
use ironhorse_serve::{Access, Model, Settings};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Serves a model in OpenAI's schema, with a chat page
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse serve runs/0001\n  \
                        ironhorse serve Qwen/Qwen3-0.6B --listen 127.0.0.1:9000\n  \
                        ironhorse serve gpt2 --listen 0.0.0.0:8080 --api-key-file key.txt\n\n\
                        The page is at /, the API at /v1, Prometheus' metrics at /metrics. SIGTERM lets answers end. See docs/serve.md.")]
pub struct ServeArgs {
    #[command(flatten)]
    model: SpeakingArgs,
    /// The address and port to listen on; port 0 takes a free one
    #[arg(long, help_heading = SERVER, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// What clients must send as their key; other users of the machine can see it in the command line
    #[arg(long, help_heading = SERVER, value_name = "KEY", conflicts_with = "api_key_file")]
    api_key: Option<String>,
    /// Read the key from the first line of this file
    #[arg(long, help_heading = SERVER, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// What clients call the model [default: as it was given]
    #[arg(long, help_heading = SERVER, value_name = "NAME")]
    name: Option<String>,
    /// Texts that are written at a time [default: 16, or as many as memory has room for]
    #[arg(long, help_heading = SERVER, value_name = "N", value_parser = number::count::<usize>)]
    rows: Option<usize>,
    /// Tokens of prompts that are read at a time, beside those that are written [default: 64 on the CPU, 256 on a GPU]
    #[arg(long, help_heading = SERVER, value_name = "N", value_parser = number::count::<usize>)]
    prefill: Option<usize>,
    /// Texts that may wait; more are refused with 429
    #[arg(long, help_heading = SERVER, default_value_t = 256, value_name = "N", value_parser = number::count::<usize>)]
    queue: usize,
    /// The most tokens of an answer [default: as many as the context has room for]
    #[arg(long, help_heading = SERVER, value_name = "N", value_parser = number::count::<usize>)]
    max_tokens: Option<usize>,
    /// The largest request, in MiB
    #[arg(long, help_heading = SERVER, default_value_t = 8, value_name = "MIB", value_parser = number::count::<usize>)]
    max_body: usize,
    /// Lets web pages of this origin ask, such as `https://example.org`, or `*` for all
    #[arg(long, help_heading = SERVER, value_name = "ORIGIN")]
    cors: Option<String>,
    /// Seconds that answers may take to end after SIGTERM
    #[arg(long, help_heading = SERVER, default_value_t = 300, value_name = "S", value_parser = number::count_or_0::<u64>)]
    drain: u64,
}

const SERVER: &str = "Server";
/// Tokens of prompts that are read at a time on a GPU.
const GPU_PREFILL: usize = 256;

pub fn run(args: &ServeArgs) -> Result<Outcome> {
    let api_key = key(args.api_key.as_deref(), args.api_key_file.as_deref(), "--api-key")?;
    let is_cpu = args.model.engine.device()? == Device::Cpu;
    let prefill = args.prefill.unwrap_or(if is_cpu { PREFILL } else { GPU_PREFILL });
    // first, so that a port that is taken is told before the weights are read
    let listener = ironhorse_serve::listen(args.listen)?;
    let at = listener.local_addr().context("cannot tell the address")?;
    let Speaking { mut session, tokenizer, chat, config, name, context, .. } =
        args.model.open(&Rows::Many(args.rows, prefill))?;
    session.warm_up()?;
    let has_template = chat.as_ref().is_some_and(|chat| chat.template().is_some());
    let name = args.name.clone().unwrap_or(name);
    if !has_template {
        out::note(format_args!(
            "{name} has no chat template: /v1/chat/completions is refused; see --template"
        ));
    }
    if !at.ip().is_loopback() && api_key.is_none() {
        out::note("everybody who reaches this address can use the model; --api-key-file asks for a key");
    }
    let most_tokens = args.max_tokens.unwrap_or(usize::MAX);
    let model =
        Model { name: name.clone(), tokenizer, chat, context, vocab: config.vocab_size(), most_tokens };
    let settings = Settings {
        access: Access { api_key, cors: args.cors.clone(), loopback: false },
        limits: Limits { body_bytes: args.max_body.saturating_mul(1 << 20), ..Limits::default() },
        queue: args.queue,
        drain: Duration::from_secs(args.drain),
    };
    let control = Control::default();
    let handlers = signals::Handlers::install(&control)?;
    let stop = control.stop_flag();
    out::line(format_args!("serving {name} at http://{at}/ (API http://{at}/v1)"))?;
    let served = ironhorse_serve::run(listener, &mut session, model, settings, &stop);
    drop(handlers);
    served?;
    out::note("stopped: all answers have ended");
    Ok(Outcome::Done)
}
