//! Several processes that train together: how they find each other, talk, and notice that one is lost.
//!
//! ```text
//! environment.rs  which rank this process is, from what torchrun, srun, mpirun or our own launcher set
//! launch.rs       starts the ranks of one machine
//! meet.rs         the rendezvous: rank 0 listens, the others come, all connect to all
//! proof.rs        both sides of a connection prove that they know the token of the run
//! tcp.rs          the communicator: one connection for each pair, heartbeats, failure
//! wire.rs         messages on a connection
//! work.rs         how ranks get on with their steps, and when one hangs
//! ```
//!
//! Connections are authenticated, not encrypted: like NCCL and MPI they are for a network whose machines trust each other.
#![forbid(unsafe_code)]

mod environment;
mod launch;
mod meet;
mod proof;
mod tcp;
mod wire;
mod work;

pub use environment::Environment;
pub use launch::{Local, launch};
pub use meet::Meeting;
pub use tcp::TcpRanks;

use std::path::Path;

/// The name of this machine.
pub fn host() -> String {
    let kernel = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname")).ok();
    let named = kernel.or_else(|| std::env::var("HOSTNAME").ok());
    named
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "this host".into())
}
