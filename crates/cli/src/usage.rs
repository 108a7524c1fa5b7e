//! Usage errors: what clap says in paragraphs as one line, with a tip where the flag is another program's.

use crate::args::config_file::Line;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// A flag of nanoGPT, Hugging Face, llm.c or PyTorch, without dashes and with `-` for `_`; ours; and what else to know.
type Foreign = (&'static str, &'static str, &'static str);

const FOREIGN: &[Foreign] = &[
    // nanoGPT
    ("batch-size", "batch", ""),
    ("block-size", "seq", ""),
    ("learning-rate", "lr", ""),
    ("min-lr", "final-fraction", "as a fraction of --lr"),
    ("max-iters", "steps", ""),
    ("warmup-iters", "warmup", ""),
    ("lr-decay-iters", "steps", "the learning rate falls until the last step"),
    ("decay-lr", "schedule", "constant turns the decay off"),
    ("eval-interval", "val-every", ""),
    ("eval-iters", "val-batches", ""),
    ("out-dir", "out", ""),
    ("init-from", "init", ""),
    ("dataset", "data", ""),
    ("n-layer", "model", "such as --model n_layer=12,n_head=12,n_embd=768"),
    ("n-head", "model", "such as --model n_layer=12,n_head=12,n_embd=768"),
    ("n-embd", "model", "such as --model n_layer=12,n_head=12,n_embd=768"),
    ("start", "prompt", ""),
    // Hugging Face
    ("per-device-train-batch-size", "batch", ""),
    ("gradient-accumulation-steps", "accumulate", ""),
    ("num-train-epochs", "steps", "counted in optimizer steps, not in epochs"),
    ("max-steps", "steps", ""),
    ("max-seq-length", "seq", ""),
    ("output-dir", "out", ""),
    ("overwrite-output-dir", "overwrite", ""),
    ("model-name-or-path", "init", ""),
    ("model-name-or-path", "model", ""),
    ("train-file", "data", ""),
    ("validation-file", "val-data", ""),
    ("tokenizer-name", "tokenizer", ""),
    ("lr-scheduler-type", "schedule", ""),
    ("warmup-steps", "warmup", ""),
    ("warmup-ratio", "warmup", "counted in steps"),
    ("early-stopping-patience", "patience", ""),
    ("adam-beta1", "beta1", ""),
    ("adam-beta2", "beta2", ""),
    ("adam-epsilon", "eps", ""),
    ("max-grad-norm", "grad-clip", ""),
    ("eval-steps", "val-every", ""),
    ("save-steps", "save-every", ""),
    ("save-total-limit", "keep", ""),
    ("resume-from-checkpoint", "resume", ""),
    ("gradient-checkpointing", "recompute", "such as --recompute full"),
    ("bf16", "dtype", "as --dtype bf16"),
    ("fp16", "dtype", "bf16 instead of fp16: --dtype bf16"),
    ("max-new-tokens", "tokens", ""),
    ("max-length", "tokens", ""),
    ("num-tokens", "tokens", ""),
    ("do-sample", "temperature", "sampling is the default; --greedy turns it off"),
    // PEFT and others
    ("rank", "lora", ""),
    ("lora-r", "lora", ""),
    ("lora-rank", "lora", ""),
    ("lora-alpha", "alpha", ""),
    ("target-modules", "targets", "such as --targets q,k,v,o"),
    // llm.c
    ("i", "data", ""),
    ("j", "val-data", ""),
    ("e", "init", ""),
    ("o", "out", ""),
    ("b", "batch", ""),
    ("t", "seq", ""),
    ("d", "accumulate", "in micro-steps, not in tokens"),
    ("k", "schedule", ""),
    ("l", "lr", ""),
    ("u", "warmup", ""),
    ("q", "final-fraction", ""),
    ("c", "weight-decay", ""),
    ("m", "val-batches", ""),
    ("s", "sample-every", ""),
    ("g", "sample-tokens", ""),
    ("x", "steps", ""),
    ("n", "save-every", ""),
    ("y", "resume", ""),
    ("r", "recompute", ""),
    // Megatron and others
    ("rampup-batch-size", "rampup-steps", "with --rampup-from, in micro-steps"),
    ("lr-wsd-decay-iters", "decay-fraction", "as a fraction of --steps"),
    // torchrun and others
    ("gpu", "device", "such as --device cuda:0"),
    ("num-threads", "threads", ""),
];

/// What a plain word most likely is, by command.
const PLAIN_WORDS: &[(&str, &str)] = &[
    ("generate", "prompt"),
    ("train", "model"),
    ("bench", "model"),
    ("profile", "model"),
    ("plan", "model"),
    ("verify", "key"),
];

/// The error in one line. A wrong key of the configuration file is named with the file.
pub fn one_line(error: &clap::Error, line: &Line) -> String {
    let given = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(given)) => Some(given.as_str()),
        _ => None,
    };
    let flag = given.and_then(|given| given.split([' ', '=']).next());
    let unknown = (error.kind() == ErrorKind::UnknownArgument).then_some(given).flatten();
    let text = match unknown.and_then(|given| tip(given, line)) {
        Some(tip) => format!("unexpected argument '{}' found; tip: {tip}", unknown.unwrap_or_default()),
        None => joined(&error.to_string()),
    };
    match flag.and_then(|flag| line.key_of(flag)) {
        Some((path, key)) => format!("{}: key `{key}`: {text}", path.display()),
        None => format!("{text} (see --help)"),
    }
}

/// Paragraphs and lists as one line.
fn joined(paragraphs: &str) -> String {
    let mut text = String::new();
    let mut between = "";
    for part in paragraphs.lines().map(str::trim) {
        if part.starts_with("Usage:") || part.starts_with("For more information") {
            break;
        }
        if part.is_empty() {
            between = "; ";
            continue;
        }
        text += if part.starts_with('[') { " " } else { between };
        text += part;
        // a list follows a colon, one item to a line
        between = if part.ends_with(':') { " " } else { ", " };
    }
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}

/// What an unknown flag or plain word is called here, if the command has such a flag.
fn tip(given: &str, line: &Line) -> Option<String> {
    let all = crate::command();
    let command = line.args.iter().skip(1).find_map(|arg| all.find_subcommand(arg.to_str()?))?;
    let has = |flag: &str| command.get_arguments().any(|arg| arg.get_long() == Some(flag));
    if !given.starts_with('-') {
        let (_, flag) = PLAIN_WORDS.iter().find(|(name, _)| *name == command.get_name())?;
        let word = if given.contains(' ') { format!("'{given}'") } else { given.to_owned() };
        return Some(format!("did you mean --{flag} {word}?"));
    }
    let name = given.trim_start_matches('-').replace('_', "-");
    if has(&name) {
        return Some(format!("flags are written with -: --{name}"));
    }
    let (_, ours, more) = FOREIGN.iter().find(|(foreign, ours, _)| *foreign == name && has(ours))?;
    Some(if more.is_empty() {
        format!("here it is --{ours}")
    } else {
        format!("here it is --{ours}, {more}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tip_names_a_flag_of_some_command_and_shadows_none() {
        let all = crate::command();
        let flags = |command: &clap::Command| -> Vec<String> {
            command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned)).collect()
        };
        let train = flags(all.find_subcommand("train").unwrap());
        let every: Vec<String> = all.get_subcommands().flat_map(flags).collect();
        for (foreign, ours, _) in FOREIGN {
            assert!(every.iter().any(|flag| flag == ours), "--{ours}");
            assert!(!train.iter().any(|flag| flag == foreign), "--{foreign} is a flag of ours");
        }
        for (name, flag) in PLAIN_WORDS {
            assert!(
                flags(all.find_subcommand(name).unwrap()).iter().any(|own| own == flag),
                "{name} --{flag}"
            );
        }
    }
}
