//! The flags of `ironhorse train`; serialised they are the run's config.toml.

use super::super::choices::Named;
use super::super::generate::SamplingArgs;
use super::BUILTIN;
use super::tune::Tuning;
use crate::args::{
    EngineArgs, LoraArgs, RankArgs, RecomputeArg, StateArgs, TemplateArgs, check_utf8, flag_values, heading,
    json_help, model_help,
};
use crate::number;
use anyhow::Result;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use ironhorse::train::run::schedule::Decay;
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

/// What `--beta` is, if not given.
const BETA: f32 = 0.1;
/// The most steps of a run: the optimizer counts them in 32 bits.
const MOST_STEPS: u64 = u32::MAX as u64;

/// Trains a model; with no flags a small one on built-in stories, on this machine
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(after_help = "Examples:\n  ironhorse train\n  \
    ironhorse train --steps 200 --lr 3e-3 --out runs/quick\n  \
    ironhorse train --optimizer muon              Muon for the matrices of the blocks\n  \
    ironhorse train --init gpt2 --data tinyshakespeare    fine-tunes GPT-2; both are fetched once, see ironhorse fetch --list\n  \
    ironhorse train --data book.txt               prepares the text once, then trains on it\n  \
    ironhorse train --model d12 --data 'shards/*_train_*.bin' --val-data 'shards/*_val_*.bin' --tokenizer gpt2\n  \
    ironhorse train --model d12 --data 'fineweb/*.bin' --eval hellaswag=hellaswag_val.bin --eval-every 250 --eval-limit 500\n  \
    ironhorse train --model hidden=128,layers=4,heads=4,experts=8,top_k=2,ffn=256,vocab=256,context=128\n  \
    ironhorse train --model moe-6.9b --device cuda --batch 8 --seq 1024 --recompute experts --master residual --moments bf16\n  \
    ironhorse train --resume                      resumes the newest run; the result is the same to the bit\n  \
    ironhorse train --resume runs/0001 --steps 5000\n  \
    ironhorse train --schedule wsd --steps 4000   can be resumed with more or fewer --steps before its decay, as if it had had them from the start\n  \
    ironhorse train --data book.txt --val-every 100 --patience 5   ends when the validation loss has stopped falling\n  \
    ironhorse train --accumulate 8 --rampup-steps 500   1 to 8 micro-steps, growing over the first 500 steps\n  \
    ironhorse train --gpus 8 --accumulate 8       eight GPUs of this machine; the same bits as --accumulate 8 on one\n  \
    torchrun --no-python --nproc-per-node 8 ironhorse train --accumulate 8   the same under a launcher, see docs/scale.md\n  \
    ironhorse train --init runs/0001 --steps 500  a new run from the weights of another\n  \
    ironhorse train --init Qwen/Qwen3-0.6B --lora 16 --targets q,k,v,o --data book.txt   adapters only; checkpoints load in PEFT\n  \
    ironhorse train --init Qwen/Qwen3-0.6B --lora 16 --data chat.jsonl --chat   chats, see ironhorse data show\n  \
    ironhorse train --init runs/0001 --data preferences.jsonl --chat --dpo --beta 0.1   which of two answers is better\n  \
    ironhorse train --config runs/0001/config.toml --out runs/again\n\n\
    A run folder holds config.toml (reproduces the run), run.json (what it ran on), metrics.jsonl, loss.svg, experts.svg (of a mixture\n\
    of experts), samples/, tensorboard/, checkpoints/step-N/ and bad/ (steps with a NaN or infinite loss or gradient norm). Look at it with\n\
    ironhorse watch and ironhorse report.\n\n\
    SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and --max-time stop after the step in flight and save; a second Ctrl-C ends at once. SIGUSR2 or\n\
    a file SAVE in the run folder saves and continues.\n\n\
    Exit code: 0 done (all steps, or ended by --patience), 1 training diverged (the run folder has the log and a checkpoint), 2 could not run, 3 stopped\n\
    early, can be resumed.")]
pub struct TrainArgs {
    #[arg(long, help = model_help("or `builtin`"), help_heading = heading::MODEL, default_value = BUILTIN, value_name = "NAME")]
    pub model: String,
    /// Start from these weights: a model .bin, a Hugging Face folder, a run, a checkpoint, or a model by name such as gpt2 or org/name
    #[arg(long, help_heading = heading::MODEL, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
    #[command(flatten)]
    #[serde(flatten)]
    pub adapters: LoraArgs,
    /// Token shards, text (.txt, .md, .jsonl, .parquet, also .gz and .zst), a folder of `prepare`, or data by name such as tinyshakespeare or datasets/org/name, as paths or patterns [default: built-in stories, one token per byte]
    #[arg(long, help_heading = heading::DATA, value_name = "GLOB", num_args = 1..)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub data: Vec<PathBuf>,
    /// Token shards or text to validate on [default with text: a part of it]
    #[arg(long, help_heading = heading::DATA, value_name = "GLOB", num_args = 1..)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub val_data: Vec<PathBuf>,
    /// --data and --val-data are lines of chat data, as of `data show`: whole samples, several in a sequence
    #[arg(long, help_heading = heading::DATA)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub chat: bool,
    #[command(flatten)]
    #[serde(flatten)]
    pub template: TemplateArgs,
    /// Learn preferences (DPO): lines hold a question with a chosen and a rejected answer
    #[arg(long, help_heading = heading::DATA)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dpo: bool,
    /// With --dpo: how much a change of likelihood counts; a larger one keeps the model closer to where it starts [default: 0.1]
    #[arg(long, help_heading = heading::OPTIMIZER, value_name = "X", value_parser = number::above_0::<f32>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta: Option<f32>,
    /// The part of the chats to validate on where there is no --val-data; what a sample holds decides [default: 0.05]
    #[arg(long, help_heading = heading::DATA, value_name = "F", value_parser = number::below_1::<f64>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_fraction: Option<f64>,
    /// Name, file or folder of a tokenizer, as of `prepare`, for text and samples [default: the one beside --init or --data; for text gpt2, or bytes if the model has 256 tokens]
    #[arg(long, help_heading = heading::DATA, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Micro-batch size: sequences of one forward and backward pass
    #[arg(long, help_heading = heading::STEPS, value_name = "B", value_parser = number::count::<usize>)]
    pub batch: Option<usize>,
    /// Sequence length in tokens
    #[arg(long, help_heading = heading::STEPS, value_name = "T", value_parser = number::count::<usize>)]
    pub seq: Option<usize>,
    /// Gradient accumulation: micro-steps that make up one optimizer step, those of all processes of --gpus or --ranks together
    #[arg(long, help_heading = heading::STEPS, default_value_t = 1, value_name = "N", value_parser = number::count::<u32>)]
    pub accumulate: u32,
    /// Batch-size ramp-up: --accumulate is reached after this many steps, from --rampup-from, in whole micro-steps
    #[arg(long, help_heading = heading::STEPS, value_name = "N", value_parser = number::count::<u64>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rampup_steps: Option<u64>,
    /// Micro-steps of the first step of a batch-size ramp-up [default: 1]
    #[arg(long, help_heading = heading::STEPS, value_name = "N", value_parser = number::count::<u32>, requires = "rampup_steps")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rampup_from: Option<u32>,
    /// Optimizer steps
    #[arg(long, help_heading = heading::STEPS, value_name = "N", value_parser = number::whole::<u64>(1..=MOST_STEPS))]
    pub steps: Option<u64>,
    /// With --chat, in place of --steps: how often every sample is seen [default: 3 with fewer than 1,000 samples, else 1]
    #[arg(long, help_heading = heading::STEPS, value_name = "X", conflicts_with = "steps", value_parser = number::above_0::<f64>)]
    #[serde(skip)]
    pub epochs: Option<f64>,
    /// Peak learning rate
    #[arg(long, help_heading = heading::OPTIMIZER, value_name = "X", value_parser = number::at_least_0::<f32>)]
    pub lr: Option<f32>,
    /// Learning-rate decay after the warm-up
    #[arg(long, help_heading = heading::OPTIMIZER, value_enum, default_value_t = ScheduleArg::Cosine)]
    pub schedule: ScheduleArg,
    /// Steps of linear warm-up [default: 100 for small models, 20 for others, at most half of --steps]
    #[arg(long, help_heading = heading::OPTIMIZER, value_name = "N", value_parser = number::count_or_0::<u64>)]
    pub warmup: Option<u64>,
    /// Learning rate of the last step, as a fraction of --lr
    #[arg(long, help_heading = heading::OPTIMIZER, value_name = "X", value_parser = number::fraction::<f32>)]
    pub final_fraction: Option<f32>,
    /// With --schedule wsd: the last part of --steps, in which the learning rate falls [default: 0.2]
    #[arg(long, help_heading = heading::OPTIMIZER, value_name = "X", value_parser = number::fraction::<f32>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_fraction: Option<f32>,
    /// Weight decay (decoupled), of 2-D tensors only
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 0.1, value_name = "X", value_parser = number::at_least_0::<f32>)]
    pub weight_decay: f32,
    /// AdamW's beta1; Muon's momentum is 0.95
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 0.9, value_name = "X", value_parser = number::below_1::<f64>)]
    pub beta1: f64,
    /// AdamW's beta2
    #[arg(long, help_heading = heading::OPTIMIZER, value_name = "X", value_parser = number::below_1::<f64>)]
    pub beta2: Option<f64>,
    /// AdamW's epsilon
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 1e-8, value_name = "X", value_parser = number::above_0::<f32>)]
    pub eps: f32,
    /// Clip gradients to this norm; 0 turns clipping off
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 1.0, value_name = "X", value_parser = number::at_least_0::<f32>)]
    pub grad_clip: f32,
    /// Steps in a row that may be skipped because their loss or gradient norm is NaN or infinite
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 3, value_name = "N", value_parser = number::count_or_0::<u32>)]
    pub bad_steps: u32,
    /// Steps between validations; 0 means only before the first and after the last step
    #[arg(long, help_heading = heading::VALIDATION, value_name = "N", value_parser = number::count_or_0::<u64>)]
    pub val_every: Option<u64>,
    /// Batches per validation; 0 turns validation off
    #[arg(long, help_heading = heading::VALIDATION, default_value_t = 32, value_name = "N", value_parser = number::count_or_0::<u64>)]
    pub val_batches: u64,
    /// End the run after N validations in a row without a new lowest loss, and keep every new best checkpoint on the way; 0 turns it off
    #[arg(long, help_heading = heading::VALIDATION, default_value_t = 0, value_name = "N", value_parser = number::count_or_0::<u64>)]
    pub patience: u64,
    /// Multiple-choice questions to grade on the way, as `ironhorse eval --choices`: llm.c's .bin, or JSON lines; may be given several times
    #[arg(long, help_heading = heading::VALIDATION, value_name = "NAME=FILE", value_parser = Named::parse)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub eval: Vec<Named>,
    /// Steps between grades of --eval; 0 means only after the last step
    #[arg(long, help_heading = heading::VALIDATION, default_value_t = 0, value_name = "N", value_parser = number::count_or_0::<u64>)]
    pub eval_every: u64,
    /// Only the first N questions of each file of --eval
    #[arg(long, help_heading = heading::VALIDATION, value_name = "N", value_parser = number::count::<usize>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_limit: Option<usize>,
    /// Steps between samples; 0 means only one at the end
    #[arg(long, help_heading = heading::VALIDATION, value_name = "N", value_parser = number::count_or_0::<u64>)]
    pub sample_every: Option<u64>,
    /// Tokens per sample; 0 turns samples off
    #[arg(long, help_heading = heading::VALIDATION, value_name = "N", value_parser = number::count_or_0::<usize>)]
    pub sample_tokens: Option<usize>,
    /// Text that samples begin with
    #[arg(long, help_heading = heading::VALIDATION, default_value = "", value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,
    #[command(flatten)]
    #[serde(flatten)]
    pub sampling: SamplingArgs,
    /// Dropout of GPT-2: how often embeddings, attention probabilities and what attention and MLP add to the residual stream are zeroed in training
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 0.0, value_name = "P", value_parser = number::below_1::<f64>)]
    pub dropout: f64,
    /// Random seed of weights, data order, dropout and samples
    #[arg(long, help_heading = heading::STEPS, default_value_t = 1, value_name = "S", value_parser = number::seed)]
    pub seed: u64,
    /// Activation checkpointing: what the backward pass recomputes instead of keeping it in memory
    #[arg(long, help_heading = heading::MEMORY, value_enum, default_value_t = RecomputeArg::None)]
    pub recompute: RecomputeArg,
    /// Into how many parts the tokens of a micro-batch are cut for the output head and the loss: the logits of one part only need memory
    #[arg(long, help_heading = heading::MEMORY, default_value_t = 1, value_name = "N", value_parser = number::count::<usize>)]
    pub head_chunks: usize,
    #[command(flatten)]
    #[serde(flatten)]
    pub state: StateArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub rank: RankArgs,
    /// Steps between checkpoints; 0 leaves it to --save-minutes
    #[arg(long, help_heading = heading::CHECKPOINTS, default_value_t = 0, value_name = "N", value_parser = number::count_or_0::<u64>)]
    pub save_every: u64,
    /// Minutes between checkpoints; 0 turns it off
    #[arg(long, help_heading = heading::CHECKPOINTS, default_value_t = 10.0, value_name = "M", value_parser = number::at_least_0::<f64>)]
    pub save_minutes: f64,
    /// Checkpoints to keep: the newest ones, besides the one with the lowest validation loss; 0 keeps all
    #[arg(long, help_heading = heading::CHECKPOINTS, default_value_t = 2, value_name = "K", value_parser = number::count_or_0::<usize>)]
    pub keep: usize,
    /// Write checkpoints synchronously: training waits for the disk, and no copy in host memory is needed
    #[arg(long, help_heading = heading::CHECKPOINTS)]
    pub save_sync: bool,
    /// Save and stop after this long, such as 3h55m, 90m or 45s; for this start only, a resumed run does not keep it
    #[arg(long, help_heading = heading::CHECKPOINTS, value_name = "TIME", value_parser = number::duration)]
    #[serde(skip)]
    pub max_time: Option<Duration>,
    /// Resume a run where it stopped, with its own settings [default RUN: the newest below runs/]
    #[arg(long, help_heading = heading::CHECKPOINTS, value_name = "RUN", num_args = 0..=1, default_missing_value = "", value_parser = OsStringValueParser::new().map(PathBuf::from), conflicts_with_all = ["out", "overwrite", "save_batches"])]
    #[serde(skip)]
    pub resume: Option<PathBuf>,
    /// The run folder [default: the next free number below runs/]
    #[arg(long, help_heading = heading::OUTPUT, value_name = "DIR")]
    #[serde(skip)]
    pub out: Option<PathBuf>,
    /// Also write the tokens of every step to this safetensors file: x and y, (steps, B, T), for another program to train on
    #[arg(long, help_heading = heading::DATA, value_name = "FILE")]
    #[serde(skip)]
    pub save_batches: Option<PathBuf>,
    /// Replace the run in the run folder; it is removed once the new run has a checkpoint
    #[arg(long, help_heading = heading::OUTPUT)]
    #[serde(skip)]
    pub overwrite: bool,
    #[arg(long, help = json_help!("the summary"), help_heading = heading::OUTPUT, value_name = "FILE")]
    #[serde(skip)]
    pub json: Option<PathBuf>,
    /// What `ironhorse tune` may choose; `None` for `train`.
    #[arg(skip)]
    #[serde(skip)]
    pub tuning: Option<Tuning>,
}

/// Settings of how ranks work together, on which no bit depends: a checkpoint does not know who wrote it.
const OF_RANKS: [&str; 3] = ["shard", "bucket", "rank-timeout"];

impl TrainArgs {
    /// The settings as checkpoints keep them.
    pub fn of_checkpoint(&self) -> Result<Value> {
        let mut settings = serde_json::to_value(self)?;
        if let Value::Object(settings) = &mut settings {
            OF_RANKS.iter().for_each(|key| drop(settings.shift_remove(*key))); // the others keep their order
        }
        Ok(settings)
    }

    /// The β of `--dpo`, where preferences are learned.
    pub fn preference(&self) -> Option<f32> {
        self.dpo.then(|| self.beta.unwrap_or(BETA))
    }

    /// Refuses paths that config.toml could not hold.
    pub fn check_paths(&self) -> Result<()> {
        let lists = [("--data", &self.data), ("--val-data", &self.val_data)];
        let lists =
            lists.into_iter().flat_map(|(flag, paths)| paths.iter().map(move |path| (flag, path.as_path())));
        let single = [
            ("--init", &self.init),
            ("--tokenizer", &self.tokenizer),
            ("--template", &self.template.template),
        ];
        check_utf8(lists.chain(single.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?)))))
    }
}

flag_values! {
    /// Shapes of the learning rate.
    ScheduleArg for Decay {
        /// Half a cosine wave
        Cosine,
        /// A straight line
        Linear,
        /// No decay: the rate stays at --lr
        Constant,
        /// Warm-up, stable, decay: --lr, then a straight line in the last --decay-fraction of the steps
        Wsd,
    }
}
