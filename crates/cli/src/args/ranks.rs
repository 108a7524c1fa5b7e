//! Flags about several processes that train together.

use super::{flag_values, heading};
use crate::number;
use clap::{Args, ValueEnum};
use ironhorse::core::Shard;
use serde::Serialize;
use std::time::Duration;

/// Several processes.
#[derive(Args, Clone, Debug, Serialize)]
#[command(next_help_heading = heading::RANKS)]
#[serde(rename_all = "kebab-case")]
pub struct RankArgs {
    /// Start N processes on this machine, one for each GPU, which share the micro-steps of --accumulate
    #[arg(long, value_name = "N", value_parser = number::count::<usize>, conflicts_with = "ranks")]
    #[serde(skip)]
    pub gpus: Option<usize>,
    /// Start N processes on this machine, which share the micro-steps of --accumulate; on the CPU, or all on the GPU of --device
    #[arg(long, value_name = "N", value_parser = number::count::<usize>)]
    #[serde(skip)]
    pub ranks: Option<usize>,
    /// What each process keeps of what training needs besides the weights [default: state; none with --optimizer muon]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardArg>,
    /// The order in which the gradients of micro-steps are added
    #[arg(long, value_enum, default_value_t = SumArg::Tree)]
    pub sum: SumArg,
    /// A process of which nothing is heard for this long is lost, and ends the others with exit code 3
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = number::duration)]
    #[serde(serialize_with = "number::as_seconds")]
    pub rank_timeout: Duration,
    /// Processes of a machine, whose links are the fastest: they add up gradients before these leave it [default: those with the
    /// same host name]
    #[arg(long, value_name = "N", value_parser = number::count::<usize>)]
    #[serde(skip)]
    pub local_ranks: Option<usize>,
    /// Gradients that are exchanged at a time, beside the backward: at least 256 KiB for each process
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = number::bytes)]
    #[serde(serialize_with = "number::as_bytes")]
    pub bucket: u64,
}

flag_values! {
    /// What a rank keeps.
    ShardArg for Shard {
        /// Everything; every process makes the whole update
        None,
        /// Its part of moments and master weights (ZeRO-1)
        State,
        /// Also only its part of the gradients that are kept from micro-step to micro-step (ZeRO-2)
        Grads,
    }
}

/// Orders of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SumArg {
    /// A binary tree over the micro-steps: the same bits for any number of processes that divides --accumulate
    Tree,
    /// One after the other, in place: less memory, one process only
    Chain,
}
