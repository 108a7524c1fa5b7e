//! `doctor --ranks`: several processes say who they are and how they reach each other, and time an exchange.

use super::DoctorArgs;
use crate::hardware::{COMMIT, VERSION, human_bytes};
use crate::{Outcome, failure, out, ranks};
use anyhow::{Result, bail};
use ironhorse::Device;
use ironhorse::core::op::{Exchange, Fill, TreeSum};
use ironhorse::core::ranks::{Among, Watched};
use ironhorse::core::{Builder, Communicator, DType, EngineExt, Place, Scalars, Slices};
use ironhorse::cuda::{self, Settings};
use ironhorse_ranks::{Environment, TcpRanks};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank of which nothing is heard for so long, or that does not get on with the exchange, is lost; NCCL has ten times as long to
/// begin.
const TIMEOUT: Duration = Duration::from_secs(20);
/// What is exchanged: 64 MiB of f32.
const ELEMENTS: usize = 16 << 20;
/// How often the exchange is timed, after a first time that does not count.
const ROUNDS: usize = 3;
/// How many small messages are timed for the latency.
const MESSAGES: usize = 21;

/// What a rank says of itself.
#[derive(Serialize, Deserialize)]
struct RankReport {
    rank: usize,
    host: String,
    device: String,
    version: String,
    /// The version of NCCL, if the device has it.
    nccl: Option<String>,
    /// For each other rank: the address at this end of the connection and the one at the other end.
    connections: Vec<String>,
    interfaces: Vec<Interface>,
    /// How the GPUs of its machine reach each other.
    peers: Vec<Reach>,
    /// Median of a small message to all and from all.
    latency_us: f64,
    /// The time of the exchange; `None` until it was measured.
    exchange: Option<Timing>,
}

#[derive(Serialize, Deserialize)]
struct Interface {
    name: String,
    state: String,
    /// The speed of the interface, if the system knows it.
    mbit_per_s: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct Reach {
    from: usize,
    to: usize,
    by: String,
}

/// The reduce-scatter of training: slices to their owners, who add them.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Timing {
    bytes: usize,
    least_ms: f64,
    median_ms: f64,
    /// What a rank sends, by the least time.
    gb_per_s: f64,
    /// Whether the sums are right.
    right: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    world: usize,
    started_by: &'a str,
    ranks: &'a [RankReport],
}

/// Starts the ranks and waits for them, or is one of them.
pub fn run(args: &DoctorArgs, asked: Option<usize>, line: &[OsString]) -> Result<Outcome> {
    match (Environment::read()?, asked) {
        (Some(environment), _) => {
            let with = ranks::meet(&environment, TIMEOUT, &Arc::default(), &|| false)?;
            let done = join(args, &environment, &with);
            if let Err(error) = &done {
                failure::give_up(with.as_ref(), error);
            }
            done
        }
        (None, Some(world)) if world > 1 => ranks::launch(line, world, TIMEOUT, |_| {}),
        (None, Some(_)) => bail!("--ranks 1: one process has no other to reach, expected 2 or more"),
        (None, None) => bail!("no launcher started this process; --ranks N starts N here"),
    }
}

/// What is known without an exchange is printed first: where that hangs, it shows by which addresses ranks reach each other.
fn join(args: &DoctorArgs, environment: &Environment, with: &Arc<TcpRanks>) -> Result<Outcome> {
    let (mut mine, device) = look(args, environment, with)?;
    let of_all = |mine: &RankReport| -> Result<Vec<RankReport>> {
        let all = with.share(&serde_json::to_vec(mine)?)?;
        Ok(all.iter().map(|text| serde_json::from_slice(text)).collect::<Result<_, _>>()?)
    };
    let leads = with.place().leads();
    let all = of_all(&mine)?;
    if leads {
        reached(&all, environment.by).into_iter().try_for_each(out::line)?;
    }
    mine.exchange = Some(exchange(device, args.threads, with)?);
    let all = of_all(&mine)?;
    let right = all.iter().flat_map(|rank| &rank.exchange).all(|exchange| exchange.right);
    if leads {
        exchanged(&all).into_iter().try_for_each(out::line)?;
        let report = Report { world: all.len(), started_by: environment.by, ranks: &all };
        out::json(args.json.as_deref(), &report)?;
    }
    Ok(if right { Outcome::Done } else { Outcome::Failed })
}

fn look(args: &DoctorArgs, environment: &Environment, with: &Arc<TcpRanks>) -> Result<(RankReport, Device)> {
    let gpus = cuda::devices().map_or(0, |gpus| gpus.len());
    let device = match args.device.parse::<Device>()?.resolve() {
        Device::Cuda(_) if !args.device.contains(':') => Device::Cuda(environment.local_rank % gpus.max(1)),
        device => device,
    };
    let nccl = cuda::report::libraries().into_iter().find(|library| library.name == "NCCL");
    let nccl = nccl.and_then(|library| library.found.ok()).map(|(version, _)| version);
    let mut times: Vec<f64> = Vec::new();
    for _ in 0..MESSAGES {
        let begin = Instant::now();
        with.share(&[0; 8])?;
        times.push(1e6 * begin.elapsed().as_secs_f64());
    }
    let reach = |peer: cuda::report::Peer| Reach {
        from: peer.from,
        to: peer.to,
        by: match (peer.access, peer.atomics) {
            (true, true) => "NVLink",
            (true, false) => "PCIe",
            (false, _) => "the host",
        }
        .into(),
    };
    let connections = with.addresses().into_iter().enumerate().filter_map(|(rank, addresses)| {
        let [here, there] = addresses?;
        Some(format!("{here} to rank {rank} at {there}"))
    });
    let report = RankReport {
        rank: environment.place.rank,
        host: ironhorse_ranks::host(),
        device: device.to_string(),
        version: format!("{VERSION} {COMMIT}"),
        nccl,
        connections: connections.collect(),
        interfaces: interfaces(),
        peers: cuda::report::peers().unwrap_or_default().into_iter().map(reach).collect(),
        latency_us: median(times),
        exchange: None,
    };
    Ok((report, device))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// The network interfaces of this machine, as far as the system shows them.
fn interfaces() -> Vec<Interface> {
    let Ok(all) = std::fs::read_dir("/sys/class/net") else { return Vec::new() };
    let read =
        |path: std::path::PathBuf| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let mut found: Vec<Interface> = all
        .flatten()
        .map(|entry| Interface {
            name: entry.file_name().to_string_lossy().into_owned(),
            state: read(entry.path().join("operstate")).unwrap_or_else(|| "unknown".into()),
            mbit_per_s: read(entry.path().join("speed")).and_then(|speed| speed.parse().ok()),
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Times the exchange and sum of gradients of one micro-step a rank, by the ops of training, and checks the sums.
fn exchange(device: Device, threads: usize, with: &Arc<TcpRanks>) -> Result<Timing> {
    let place @ Place { rank, world } = with.place();
    let mut b = Builder::new();
    let part = Slices::new(place).part_of(&(0..ELEMENTS), rank).len();
    let sum = b.io("sum", [part], DType::F32);
    let inp = b.activation([ELEMENTS], DType::F32);
    let out = b.activation([world, part], DType::F32);
    b.push(Fill { out: inp, value: (rank + 1) as f32 })?;
    b.push(Exchange {
        out,
        inp: Some(inp),
        round: 0,
        micro_steps: world,
        place,
        among: Among::All,
        divided: true,
    })?;
    if part > 0 {
        b.push(TreeSum { out: sum, inp: out, micro_steps: world, world })?;
    }
    let program = b.finish()?;
    let mut engine = device.engine(threads, &Settings::default())?;
    engine.reserve(program.layout())?;
    engine.join(with.clone())?;
    let (scalars, last) = (Scalars::default(), program.nodes().len());
    engine.run(&program, 0..1, &scalars)?;
    let mut times = Vec::new();
    for round in 0..=ROUNDS {
        with.in_step(Some(Watched { step: round as u64, first: false }));
        engine.synchronize()?;
        with.share(&[])?; // all begin together
        let begin = Instant::now();
        engine.run(&program, 1..last, &scalars)?;
        engine.synchronize()?;
        times.push(1e3 * begin.elapsed().as_secs_f64());
    }
    with.in_step(None);
    let mut sums = vec![0.0; part];
    engine.read_f32(sum, &mut sums)?;
    let expected = (world * (world + 1) / 2) as f32;
    times.remove(0);
    let least_ms = times.iter().copied().fold(f64::INFINITY, f64::min);
    let bytes = ELEMENTS * DType::F32.size();
    let sent = (bytes - part * DType::F32.size()) as f64;
    Ok(Timing {
        bytes,
        least_ms,
        median_ms: median(times),
        gb_per_s: sent / least_ms / 1e6,
        right: sums.iter().all(|&sum| sum == expected),
    })
}

/// Who came, and how they reach each other.
fn reached(all: &[RankReport], by: &str) -> Vec<String> {
    let version = all.first().map_or("", |rank| rank.version.as_str());
    let mut lines = vec![
        format!("{} ranks by {by}, ironhorse {version} on all; each reaches each", all.len()),
        format!("{:>4} {:<16} {:<8} {:<9} {:>10}", "rank", "host", "device", "NCCL", "latency"),
    ];
    for rank in all {
        let nccl = rank.nccl.as_deref().unwrap_or("-");
        let RankReport { rank, host, device, latency_us, .. } = rank;
        lines.push(format!("{rank:>4} {host:<16} {device:<8} {nccl:<9} {latency_us:>7.0} us"));
    }
    let mut hosts: Vec<&str> = Vec::new();
    for rank in all {
        if hosts.contains(&rank.host.as_str()) {
            continue;
        }
        hosts.push(&rank.host);
        for Interface { name, state, mbit_per_s } in &rank.interfaces {
            let speed = mbit_per_s.map_or_else(String::new, |speed| format!(", {speed} Mbit/s"));
            lines.push(format!("interface {}: {name} {state}{speed}", rank.host));
        }
        for Reach { from, to, by } in &rank.peers {
            lines.push(format!("gpu {}: cuda:{from} reaches cuda:{to} by {by}", rank.host));
        }
    }
    for rank in all {
        for connection in &rank.connections {
            lines.push(format!("connection of rank {}: {connection}", rank.rank));
        }
    }
    lines
}

/// How long the exchange took.
fn exchanged(all: &[RankReport]) -> Vec<String> {
    let bytes = all.iter().find_map(|rank| Some(rank.exchange.as_ref()?.bytes)).unwrap_or(0);
    let mut lines = vec![
        format!(
            "exchange: {} of gradients, each slice to its owner, who adds them: the reduce-scatter of training",
            human_bytes(bytes as u64)
        ),
        format!("{:>4} {:>12} {:>12} {:>11}  sums", "rank", "exchange", "median", "sends"),
    ];
    for rank in all {
        let Some(Timing { least_ms, median_ms, gb_per_s, right, .. }) = rank.exchange else { continue };
        let (rank, sums) = (rank.rank, if right { "right" } else { "WRONG" });
        lines.push(format!("{rank:>4} {least_ms:>9.2} ms {median_ms:>9.2} ms {gb_per_s:>6.2} GB/s  {sums}"));
    }
    lines
}
