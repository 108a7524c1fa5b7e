//! Files of multiple-choice questions, which `eval` and `train` grade.

use anyhow::{Result, bail};
use ironhorse::train::eval::{Accuracies, Metric, Task};
use serde::{Serialize, Serializer};
use std::path::PathBuf;

/// A task and its file, NAME=FILE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    pub file: PathBuf,
}

impl Named {
    /// Parses NAME=FILE; FILE alone is named by its stem.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, file) = match text.split_once('=') {
            Some((name, file)) => (name.to_owned(), PathBuf::from(file)),
            None => {
                let file = PathBuf::from(text);
                let stem = file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
                (stem.unwrap_or_default(), file)
            }
        };
        match name.is_empty() || file.as_os_str().is_empty() {
            true => Err("expected NAME=FILE, such as hellaswag=hellaswag_val.jsonl".into()),
            false => Ok(Self { name, file }),
        }
    }

    /// Refuses two tasks of the same name.
    pub fn check_names(flag: &str, tasks: &[Self]) -> Result<()> {
        for (at, task) in tasks.iter().enumerate() {
            if tasks[..at].iter().any(|other| other.name == task.name) {
                bail!("{flag}: two are called {}; give them different names, NAME=FILE", task.name);
            }
        }
        Ok(())
    }
}

/// Writes it for config.toml as it is given on a command line; it came from one, so it is UTF-8.
impl Serialize for Named {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{}={}", self.name, self.file.display()))
    }
}

/// The accuracies of a task in a line.
pub fn figures(of: &Accuracies) -> String {
    let figure = |Metric { name, value, error, .. }: Metric| match error {
        Some(error) => format!("{name} {value:.4} ± {error:.4}"),
        None => format!("{name} {value:.4}"),
    };
    of.metrics().into_iter().map(figure).collect::<Vec<_>>().join("  ")
}

/// How many questions there are, how many are left out, and how many lose their beginning.
pub fn counted(task: &Task, longest: usize) -> String {
    let (count, cut) = (task.examples.len(), task.cut(longest));
    let questions = match count < task.of {
        true => format!("the first {count} of {} questions", task.of),
        false => format!("{count} questions"),
    };
    match cut {
        0 => questions,
        _ => format!("{questions}, {cut} of them longer than the context: they lose their beginning"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_has_a_name_and_a_file() {
        let named = |text| Named::parse(text).map(|named| (named.name, named.file));
        assert_eq!(named("a=b/c.jsonl"), Ok(("a".into(), "b/c.jsonl".into())));
        assert_eq!(named("b/hella.bin"), Ok(("hella".into(), "b/hella.bin".into())));
        assert!(named("=x").is_err() && named("x=").is_err() && named("").is_err());
    }

    #[test]
    fn figures_are_told_with_their_errors() {
        let of = Accuracies {
            acc: 0.25,
            acc_stderr: Some(0.5),
            acc_norm: None,
            acc_norm_stderr: None,
            acc_token: 1.0,
            acc_token_stderr: None,
            questions: 2,
        };
        assert_eq!(figures(&of), "acc 0.2500 ± 0.5000  acc_token 1.0000");
    }
}
