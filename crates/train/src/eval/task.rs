//! A file of questions under a name, read and checked before anything is graded.

use std::path::Path;

use super::{PromptForm, read_jsonl};
use crate::format::multiple_choice::{self as bin, Example};
use crate::generate::codec::Codec;
use crate::{Error, Result};

/// Questions under a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Its name.
    pub name: String,
    /// How prompts were made and what is counted, in words.
    pub definition: String,
    /// The questions.
    pub examples: Vec<Example>,
    /// Questions of the file, those left out included.
    pub of: usize,
}

/// Where a task comes from.
#[derive(Clone, Copy, Debug)]
pub struct TaskFile<'a> {
    /// Its name.
    pub name: &'a str,
    /// llm.c's .bin, or JSON lines.
    pub path: &'a Path,
    /// How prompts are made of JSON lines.
    pub form: PromptForm,
    /// Only the first so many questions.
    pub limit: Option<usize>,
    /// The model's vocabulary, in which every token must be.
    pub vocab: usize,
}

impl TaskFile<'_> {
    /// Whether the file holds text and not tokens.
    pub fn needs_tokenizer(&self) -> bool {
        self.path.extension().is_none_or(|ending| ending != "bin")
    }

    /// Reads the questions; text is cut into tokens by `codec`.
    pub fn read(&self, codec: Option<&dyn Codec>) -> Result<Task> {
        let (mut examples, prompts) = match (self.needs_tokenizer(), codec) {
            (false, _) => (bin::open(self.path)?, "the file's own tokens"),
            (true, Some(codec)) => {
                let encode = |text: &str| codec.encode(text.as_bytes());
                let examples = read_jsonl(self.path, self.form, codec.eot().unwrap_or(0), &encode)?;
                (examples, self.form.told())
            }
            (true, None) => {
                return Err(Error::field(self.path, "content", "text", "a tokenizer, for its tokens"));
            }
        };
        let of = examples.len();
        examples.truncate(self.limit.unwrap_or(usize::MAX));
        self.check(&examples)?;
        let definition = format!(
            "{prompts}; the answer with the highest log-likelihood wins: whole (acc), per character (acc_norm), per token \
             (acc_token)"
        );
        Ok(Task { name: self.name.to_owned(), definition, examples, of })
    }

    /// Refuses tokens that the model does not have.
    fn check(&self, examples: &[Example]) -> Result<()> {
        for (at, example) in examples.iter().enumerate() {
            let mut tokens = example.choices.iter().flat_map(|choice| &choice.tokens);
            if let Some(bad) = tokens.find(|&&token| token as usize >= self.vocab) {
                let expected = format!("below the model's vocabulary of {}", self.vocab);
                return Err(Error::field(self.path, format!("question {at}: a token"), bad, expected));
            }
        }
        Ok(())
    }
}

impl PromptForm {
    fn told(self) -> &'static str {
        match self {
            Self::Harness => "prompts as lm-evaluation-harness makes them",
            Self::Plain => "prompts as llm.c makes them",
        }
    }
}

impl Task {
    /// Questions of which an answer does not fit into `longest` tokens: they lose their beginning.
    pub fn cut(&self, longest: usize) -> usize {
        let is_long = |example: &&Example| example.choices.iter().any(|choice| choice.tokens.len() > longest);
        self.examples.iter().filter(is_long).count()
    }
}
