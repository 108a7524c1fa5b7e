//! `ironhorse chat`

use super::generate::SamplingArgs;
use super::speaking::{Rows, Speaking, SpeakingArgs};
use crate::args::heading;
use crate::{Outcome, number, out};
use anyhow::{Context, Result, bail};
use clap::Args;
use ironhorse::text::chat::Chat;
use ironhorse::text::tokenizer::bpe::Special;
use ironhorse::train::Error;
use ironhorse::train::generate::sample::Sampler;
use ironhorse::train::generate::{Request, Writer, generate};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Talks with a model in the terminal
#[derive(Args)]
#[command(after_help = "Examples:\n  ironhorse chat runs/0001\n  \
                        ironhorse chat Qwen/Qwen3-0.6B --system 'Be brief.'\n  \
                        printf 'What is a boiler?\\nAnd a valve?\\n' | ironhorse chat runs/0001\n\n\
                        Ctrl-C ends an answer, Ctrl-D the conversation. /help lists what else can be said.")]
pub struct ChatArgs {
    #[command(flatten)]
    model: SpeakingArgs,
    /// The system message that the conversation begins with
    #[arg(long, help_heading = heading::SAMPLING, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// The most tokens of an answer [default: half of the context]
    #[arg(long, help_heading = heading::SAMPLING, value_name = "N", value_parser = number::count::<usize>)]
    tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Random seed of the first answer; each later answer uses the next number
    #[arg(long, help_heading = heading::SAMPLING, default_value_t = 1, value_name = "S", value_parser = number::seed)]
    seed: u64,
}

const HELP: &str = "/reset          begin a new conversation\n\
                    /system TEXT    what the system says, and begin anew; without TEXT nothing\n\
                    /save FILE      write the conversation as a line of JSON, as `tune` reads it\n\
                    /help           this list\n\
                    Ctrl-C ends an answer, Ctrl-D the conversation";

/// What was said.
struct Conversation {
    system: Option<String>,
    /// Questions and answers in turn.
    messages: Vec<Value>,
}

impl Conversation {
    fn says(role: &str, text: &str) -> Value {
        json!({"role": role, "content": text})
    }

    fn all(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| Self::says("system", text));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Writes the conversation to the file, as a line that `tune` reads.
    fn save(&self, file: &str) -> Result<()> {
        let line = format!("{}\n", json!({"messages": self.all()}));
        std::fs::write(file, line).with_context(|| format!("{file}: cannot write the conversation"))
    }
}

/// What a line asks for.
enum Asked<'a> {
    Reset,
    System(&'a str),
    Save(&'a str),
    Help,
    Unknown(&'a str),
    Nothing,
    Says(&'a str),
}

impl<'a> Asked<'a> {
    fn read(line: &'a str) -> Self {
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match word {
            "" => Self::Nothing,
            "/reset" => Self::Reset,
            "/system" => Self::System(rest.trim()),
            "/save" => Self::Save(rest.trim()),
            "/help" => Self::Help,
            _ if word.starts_with('/') => Self::Unknown(word),
            _ => Self::Says(line),
        }
    }
}

/// While it lives, SIGINT sets the flag and ends nothing.
struct Interrupts {
    flag: Arc<AtomicBool>,
    #[cfg(unix)]
    id: signal_hook::SigId,
}

impl Interrupts {
    fn install() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        Ok(Self {
            #[cfg(unix)]
            id: signal_hook::flag::register(signal_hook::consts::SIGINT, flag.clone())?,
            flag,
        })
    }
}

#[cfg(unix)]
impl Drop for Interrupts {
    fn drop(&mut self) {
        signal_hook::low_level::unregister(self.id);
    }
}

pub fn run(args: &ChatArgs) -> Result<Outcome> {
    let mut speaking = args.model.open(&Rows::One)?;
    let Some(chat) = speaking.chat.take().filter(|chat| chat.template().is_some()) else {
        bail!(
            "{} has no chat template; give --template FILE, or continue texts with `ironhorse generate`",
            speaking.name
        );
    };
    let mut sampling = args.sampling.clone();
    sampling.settle(speaking.tokenizer.vocab_size());
    let mut talk = Conversation { system: args.system.clone(), messages: Vec::new() };
    let interrupts = Interrupts::install()?;
    let typed = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if typed {
        out::note(format_args!("{}: /help lists the commands, Ctrl-D ends", speaking.name));
    }
    let (mut input, mut seed) = (std::io::stdin().lock(), args.seed);
    loop {
        if typed {
            out::piece(b"> ")?;
        }
        let mut line = Vec::new();
        if input.read_until(b'\n', &mut line).context("cannot read what is typed")? == 0 {
            if typed {
                out::line("")?;
            }
            return Ok(Outcome::Done);
        }
        let line = String::from_utf8_lossy(&line);
        interrupts.flag.store(false, Ordering::Relaxed); // one while typing ends nothing
        match Asked::read(&line) {
            Asked::Nothing => {}
            Asked::Reset => talk.messages.clear(),
            Asked::System(text) => {
                talk.system = Some(text.to_owned()).filter(|text| !text.is_empty());
                talk.messages.clear();
            }
            Asked::Save("") => out::note("/save needs the name of a file"),
            Asked::Save(file) => match talk.save(file) {
                Ok(()) => out::note(format_args!("saved {file}")),
                Err(error) => out::note(format_args!("{error:#}")),
            },
            Asked::Help => out::line(HELP)?,
            Asked::Unknown(word) => out::note(format_args!("{word} is not a command; /help lists them")),
            Asked::Says(text) => {
                talk.messages.push(Conversation::says("user", text));
                let most = args.tokens.unwrap_or(speaking.context / 2).max(1);
                let answer =
                    Answer { chat: &chat, sampler: sampling.sampler(seed), most, stop: &interrupts.flag };
                match answer.write(&mut speaking, &mut talk) {
                    Ok(()) => seed = seed.wrapping_add(1),
                    Err(error) if typed && !is_closed(&error) => {
                        talk.messages.pop();
                        out::note(format_args!("{error:#}"));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }
}

/// Whether nobody reads any more.
fn is_closed(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().is_some_and(out::is_closed_pipe)
}

/// How an answer is made.
struct Answer<'a> {
    chat: &'a Chat,
    sampler: Sampler,
    /// Tokens.
    most: usize,
    /// Set to end it.
    stop: &'a AtomicBool,
}

impl Answer<'_> {
    /// The tokens of the conversation, without its oldest messages if it is too long.
    fn prompt(&self, speaking: &Speaking, talk: &mut Conversation) -> Result<Vec<u32>> {
        let room = speaking.context.saturating_sub(self.most).max(speaking.context / 2);
        let mut forgotten = 0;
        loop {
            let text = self.chat.prompt(&talk.all(), true)?;
            let ids = speaking.tokenizer.encode_as(text.as_bytes(), Special::Tokens)?;
            if ids.len() <= room {
                if forgotten > 0 {
                    out::note(format_args!(
                        "the context is full: the first {forgotten} messages are forgotten"
                    ));
                }
                return Ok(ids);
            }
            if talk.messages.len() < 3 {
                bail!("this is {} tokens, but the context has room for {room}; see --context", ids.len());
            }
            talk.messages.drain(..2); // a question and its answer
            forgotten += 2;
        }
    }

    /// Writes an answer as it comes, and adds it to the conversation.
    fn write(&self, speaking: &mut Speaking, talk: &mut Conversation) -> Result<()> {
        let prompt = self.prompt(speaking, talk)?;
        let stop = self.chat.ends();
        let Speaking { session, tokenizer, context, .. } = speaking;
        let request = Request {
            prompt: &prompt,
            vocab: tokenizer.vocab_size(),
            tokens: self.most.min(*context - prompt.len()),
            context: Some(*context),
            stop: &stop,
            sampler: self.sampler,
        };
        let (mut writer, mut text) = (Writer::new(Vec::new()), String::new());
        let written = generate(session, &request, |token| {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            let added = writer.push(tokenizer, token)?;
            out::piece(added.text.as_bytes())?;
            text.push_str(&added.text);
            Ok(())
        });
        let interrupted = match written {
            Ok(_) => false,
            Err(Error::Stopped) => true,
            Err(error) => return Err(error.into()),
        };
        let rest = writer.finish();
        out::piece(rest.as_bytes())?;
        text.push_str(&rest);
        out::line("")?;
        std::io::stdout().flush()?;
        if interrupted {
            out::note("interrupted");
        }
        talk.messages.push(Conversation::says("assistant", text.trim_end()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_said() {
        assert!(matches!(Asked::read("  \n"), Asked::Nothing));
        assert!(matches!(Asked::read("/reset\n"), Asked::Reset));
        assert!(matches!(Asked::read("/system  Be brief. \n"), Asked::System("Be brief.")));
        assert!(matches!(Asked::read("/system\n"), Asked::System("")));
        assert!(matches!(Asked::read("/save a b.jsonl"), Asked::Save("a b.jsonl")));
        assert!(matches!(Asked::read("/quit"), Asked::Unknown("/quit")));
        assert!(matches!(Asked::read(" What is 1/2? \n"), Asked::Says("What is 1/2?")));
    }
}
