//! The flags of chat data.

use super::{flag_values, heading};
use clap::Args;
use ironhorse::text::chat::Mask;
use serde::Serialize;
use std::path::PathBuf;

flag_values! {
    /// Which tokens of a sample are learned.
    MaskArg for Mask {
        /// What the assistant says, and the ends of its turns
        Assistant,
        /// The same, but only after the last message that is not the assistant's
        Completion,
        /// Every token
        None,
    }
}

/// How lines of chat data become samples.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[command(next_help_heading = heading::DATA)]
#[serde(rename_all = "kebab-case")]
pub struct TemplateArgs {
    /// The chat template, if not that beside the tokenizer
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PathBuf>,
    /// What is learned of chats [default: assistant]
    #[arg(long, value_enum, value_name = "MASK")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<MaskArg>,
}

impl TemplateArgs {
    /// The mask asked for.
    pub fn mask(&self) -> Mask {
        self.mask.map_or_else(Mask::default, Mask::from)
    }
}
