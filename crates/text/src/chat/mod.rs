//! Chat data: lines of JSON through a chat template to samples, of which only some tokens are learned.
//!
//! ```text
//! mod.rs        Mask, Chat: a tokenizer with its template      record.rs   a line of JSON
//! template.rs   templates as transformers renders them         turns.rs    what the assistant says, without marks
//! generation.rs {% generation %}                               python.rs   json.dumps, strftime
//! special.rs    tokens by name, and whether a BOS is added     lines.rs    files to samples and pairs
//! pair.rs       a question and two answers                     order.rs    roles that do not follow each other as usual
//! doubts.rs     what a template lacks
//! ```

mod doubts;
mod generation;
mod lines;
mod order;
mod pair;
mod python;
mod record;
mod template;
mod turns;

pub use lines::{ChatFiles, ChatLine, ChatLines, Counts, PairLine, PairLines};
pub use pair::PairRecord;
pub use record::{Conversation, Record};
pub use template::{Rendered, Template};

use std::ops::Range;
use std::path::Path;

use ironhorse_train::data::Sample;
use serde_json::{Map, Value, json};

use self::turns::Turns;
use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::{Error, Result};

/// Which tokens of a sample are learned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mask {
    /// What the assistant says, with the end of its turns. Of a prompt and its completion only the completion counts, of a text
    /// everything.
    #[default]
    Assistant,
    /// As [`Self::Assistant`], but of a conversation only what follows the last message that is not the assistant's.
    Completion,
    /// Every token.
    None,
}

impl Mask {
    /// All masks.
    pub const ALL: [Self; 3] = [Self::Assistant, Self::Completion, Self::None];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Assistant => "assistant",
            Self::Completion => "completion",
            Self::None => "none",
        }
    }
}

/// A tokenizer with its chat template and special tokens: what turns records into samples.
#[derive(Debug)]
pub struct Chat {
    tokenizer: Tokenizer,
    template: Option<Template>,
    special: SpecialTokens,
}

/// A text and which parts of it are learned, in bytes.
struct Marked {
    text: String,
    learned: Vec<Range<usize>>,
    /// Tokens before and after the text: those that a tokenizer adds to texts without a template.
    around: [Option<u32>; 2],
}

impl Marked {
    /// A text that is learned from a byte on.
    fn text(text: String, from: usize, around: [Option<u32>; 2]) -> Self {
        let learned = std::iter::once(from..text.len()).collect();
        Self { text, learned, around }
    }
}

impl Chat {
    /// A tokenizer as [`Tokenizer::open`] takes it, with the template beside it, or that of a file.
    pub fn open(tokenizer: &str, template: Option<&Path>) -> Result<Self> {
        let folder = match Path::new(tokenizer) {
            _ if Tokenizer::is_name(tokenizer) => None,
            path if path.is_dir() => Some(path),
            path => path.parent(),
        };
        let special = folder.map(SpecialTokens::read).transpose()?.unwrap_or_default();
        let template = match template {
            Some(file) => Some(Template::open(file)?),
            None => folder.map(|folder| Template::beside(folder, &special.config)).transpose()?.flatten(),
        };
        Ok(Self { tokenizer: Tokenizer::open(tokenizer)?, template, special })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The template, if there is one.
    pub fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// The sample of a record.
    pub fn sample(&self, record: &Record, mask: Mask) -> Result<Sample> {
        let marked = match record {
            Record::Text(text) => Marked::text(text.clone(), 0, self.around()),
            Record::Completion { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let from = if mask == Mask::None { 0 } else { prompt.len() };
                Marked::text(text, from, self.around())
            }
            Record::Messages(record) => self.conversation(record, mask)?,
        };
        self.encode(&marked, mask)
    }

    /// The text of messages as the template writes it; with `reply` up to where the assistant speaks next.
    pub fn prompt(&self, messages: &[Value], reply: bool) -> Result<String> {
        Ok(self.render(messages, &Map::new(), reply)?.text)
    }

    /// [`Chat::prompt`] up to the answer, with more for the template: `chat_template_kwargs` of a line of data.
    pub fn question(&self, messages: &[Value], given: &Map<String, Value>) -> Result<String> {
        Ok(self.render(messages, given, true)?.text)
    }

    /// The token that ends a text, and what the assistant says.
    pub fn end(&self) -> Option<u32> {
        let end = self.special.get("eos_token").and_then(|token| self.tokenizer.id(token));
        end.or(self.tokenizer.eot())
    }

    /// The tokens at which an answer stops.
    pub fn ends(&self) -> Vec<u32> {
        let mut ends = self.tokenizer.ends();
        ends.extend(self.end().filter(|end| !ends.contains(end)));
        ends
    }

    fn around(&self) -> [Option<u32>; 2] {
        let id = |token: &String| self.tokenizer.id(token);
        [self.special.added_bos.as_ref().and_then(id), self.end()]
    }

    /// A conversation, of which the assistant's messages from `given` on can be learned.
    fn conversation(&self, record: &Conversation, mask: Mask) -> Result<Marked> {
        let Conversation { messages, fields, given } = record;
        let whole = self.render(messages, fields, false)?;
        let first = match mask {
            Mask::None => return Ok(Marked::text(whole.text, 0, [None, None])),
            Mask::Assistant => *given,
            Mask::Completion => (*given).max(messages.len() - last_turns(messages)),
        };
        let marks = self.template.as_ref().is_some_and(Template::marks);
        let learned = match marks {
            true => {
                let before = self.spans_of(&messages[..first], fields);
                whole.spans.into_iter().skip(before).collect()
            }
            false => {
                let turns = Turns {
                    render: &|messages, reply| self.render(messages, fields, reply),
                    special: &|text| self.ends_with_special(text),
                    messages,
                    whole: &whole.text,
                };
                turns.spans(first)?
            }
        };
        Ok(Marked { text: whole.text, learned, around: [None, None] })
    }

    /// How many spans the template marks in messages; where it refuses these few, one for each turn of the assistant.
    fn spans_of(&self, messages: &[Value], fields: &Map<String, Value>) -> usize {
        let turns = messages.iter().filter(|message| record::is_assistant(message)).count();
        match turns {
            0 => 0,
            _ => self.render(messages, fields, false).map_or(turns, |rendered| rendered.spans.len()),
        }
    }

    fn render(&self, messages: &[Value], fields: &Map<String, Value>, reply: bool) -> Result<Rendered> {
        let template = self.template.as_ref().ok_or_else(|| {
            let name = self.tokenizer.name();
            let expected = "expected chat_template.jinja or `chat_template` in tokenizer_config.json";
            Error::tokenizer(name, format!("has no chat template, {expected}; --template FILE gives one"))
        })?;
        let mut context = Map::new();
        for name in ["tools", "documents"] {
            context.insert(name.into(), fields.get(name).cloned().unwrap_or_default());
        }
        context.extend(self.special.named().map(|(name, token)| (name.clone(), json!(token))));
        if let Some(Value::Object(more)) = fields.get("chat_template_kwargs") {
            context.extend(more.clone());
        }
        context.insert("messages".into(), messages.into());
        context.insert("add_generation_prompt".into(), reply.into());
        template.render(&context)
    }

    /// The end of the last special token of a text after which there is only white space, and its length.
    fn ends_with_special(&self, text: &str) -> Option<(usize, usize)> {
        let kept = text.trim_end();
        let markers = self.tokenizer.markers().into_iter();
        let lengths = markers.filter(|token| !token.is_empty() && kept.ends_with(token)).map(str::len);
        lengths.max().map(|length| (kept.len(), length))
    }

    fn encode(&self, marked: &Marked, mask: Mask) -> Result<Sample> {
        let tokens = self.tokenizer.encode_spans(&marked.text)?;
        let mut sample = Sample::default();
        let [bos, end] = marked.around;
        // a text may begin with the token already
        if let Some(bos) = bos.filter(|&bos| tokens.first().is_none_or(|(first, _)| *first != bos)) {
            sample.ids.push(bos as i32);
            sample.learned.push(mask == Mask::None);
        }
        for (id, span) in &tokens {
            sample.ids.push(*id as i32);
            let overlaps = |part: &Range<usize>| span.start < part.end && part.start < span.end;
            sample.learned.push(marked.learned.iter().any(overlaps));
        }
        // the end is learned, or the model never stops
        if let Some(end) = end.filter(|&end| tokens.last().is_none_or(|(last, _)| *last != end)) {
            sample.ids.push(end as i32);
            sample.learned.push(true);
        }
        Ok(sample)
    }
}

/// How many messages of the assistant follow the last one that is not the assistant's.
fn last_turns(messages: &[Value]) -> usize {
    messages.iter().rev().take_while(|message| record::is_assistant(message)).count()
}

#[cfg(test)]
mod tests;
