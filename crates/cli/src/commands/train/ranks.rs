//! Several processes that train together: how they start, what they must agree about, who prints.

use super::TrainArgs;
use crate::args::{OptimizerArg, SumArg};
use crate::{Outcome, out, ranks};
use anyhow::{Context, Result, bail};
use ironhorse::Device;
use ironhorse::core::ranks::Alone;
use ironhorse::core::{Communicator, DeviceDescription, EngineExt, Place, Pool, Shard, Slices, Slot};
use ironhorse::train::model::Sums;
use ironhorse::train::run::{Control, RunFolder};
use ironhorse::train::session::Session;
use ironhorse_ranks::Environment;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Settings that may differ between ranks: paths of the same data elsewhere, and what no bit depends on.
const MAY_DIFFER: [&str; 7] = ["data", "val-data", "init", "tokenizer", "threads", "device", "rank-timeout"];
/// How long the others look for what the leader has written: file systems of several machines show it late.
const TO_SEE: Duration = Duration::from_secs(30);

/// The processes that train together, seen by one of them.
pub struct Party {
    ranks: Arc<dyn Communicator>,
    environment: Option<Environment>,
    /// The machine of each.
    hosts: Vec<String>,
    /// How long to look for what the leader has written.
    to_see: Duration,
}

impl Default for Party {
    fn default() -> Self {
        Self { ranks: Arc::new(Alone), environment: None, hosts: Vec::new(), to_see: TO_SEE }
    }
}

/// Starts the ranks that were asked for, and waits for them; `None` if this process is to train itself.
pub fn start(args: &TrainArgs, line: &[OsString], control: &Control) -> Result<Option<Outcome>> {
    let asked = args.rank.gpus.or(args.rank.ranks).unwrap_or(1);
    if let Some(environment) = Environment::read()? {
        let Environment { place, by, .. } = &environment;
        if asked != place.world && asked > 1 {
            bail!(
                "--gpus or --ranks is {asked}, but {by} has started {} processes: leave the flag out under a launcher",
                place.world
            );
        }
        return Ok(None);
    }
    if let Some(gpus) = args.rank.gpus {
        check_gpus(gpus, args.engine.device()?, ironhorse::cuda::devices().map(|gpus| gpus.len()))?;
    }
    if asked == 1 {
        return Ok(None);
    }
    if args.resume.is_none() {
        check(args, asked)?; // what a run that is resumed has is known to its ranks
    }
    let mut told = 0;
    let each = |leader| tell(leader, control, &mut told);
    ranks::launch(line, asked, args.rank.rank_timeout, each).map(Some)
}

/// Refuses more ranks than GPUs, of which every rank has one.
fn check_gpus(asked: usize, device: Device, found: Result<usize, ironhorse::cuda::Error>) -> Result<()> {
    let instead = "--ranks N starts processes on the CPU, or on one GPU with --device";
    match found {
        _ if device == Device::Cpu && found.as_ref().is_ok_and(|&found| found > 0) => {
            bail!("--gpus {asked} is for GPUs, but --device is cpu; {instead}")
        }
        Ok(0) => bail!("--gpus {asked}: this machine has no GPU; {instead}"),
        Err(error) => bail!("--gpus {asked}: no GPU can be used here: {error}; {instead}"),
        Ok(found) if found < asked => {
            bail!("--gpus {asked}: this machine has {found}, and every process needs one; use --gpus {found}")
        }
        Ok(_) => Ok(()),
    }
}

/// Passes a request to stop or to save on to rank 0. At a terminal Ctrl-C reaches all processes by itself.
#[cfg(unix)]
fn tell(leader: Option<u32>, control: &Control, told: &mut usize) {
    use rustix::process::{Pid, Signal, kill_process};
    let Some(pid) = leader.and_then(|id| Pid::from_raw(id as i32)) else { return };
    let asked = control.stop_flag().load(std::sync::atomic::Ordering::Relaxed);
    if asked != *told {
        *told = asked;
        if asked != Signal::INT.as_raw() as usize || !std::io::stdin().is_terminal() {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
    if control.save_flag().swap(false, std::sync::atomic::Ordering::Relaxed) {
        let _ = kill_process(pid, Signal::USR2);
    }
}

#[cfg(not(unix))]
fn tell(_leader: Option<u32>, _control: &Control, _told: &mut usize) {}

/// Refuses what ranks cannot share.
fn check(args: &TrainArgs, world: usize) -> Result<()> {
    if args.rank.sum == SumArg::Chain {
        bail!("--sum chain is for one process; leave it out with {world} of them");
    }
    if !(args.accumulate as usize).is_multiple_of(world) {
        bail!(
            "--accumulate {} counts the micro-steps of all {world} processes, who share them: expected a multiple of {world}",
            args.accumulate
        );
    }
    if args.rampup_steps.is_some() {
        bail!("--rampup-steps needs one process, not {world}: its numbers of micro-steps cannot be shared");
    }
    let shard = shard_of(args);
    if args.state.optimizer == OptimizerArg::Muon && shard != Shard::None {
        bail!("--shard {} divides matrices, which Muon needs whole; use --shard none", shard.name());
    }
    if shard == Shard::Grads && !world.is_power_of_two() {
        bail!("--shard grads needs 2, 4, 8, ... processes, not {world}; use --shard state");
    }
    Ok(())
}

fn shard_of(args: &TrainArgs) -> Shard {
    match (args.rank.shard, args.state.optimizer) {
        (Some(shard), _) => shard.into(),
        (None, OptimizerArg::Muon) => Shard::None,
        (None, _) => Shard::State,
    }
}

impl Party {
    /// Meets the other ranks, if a launcher started several.
    pub fn join(args: &TrainArgs, control: &Control) -> Result<Self> {
        let Some(environment) = Environment::read()? else { return Ok(Self::default()) };
        let stop = || control.stop_reason().is_some();
        let ranks = ranks::meet(&environment, args.rank.rank_timeout, &control.stop_flag(), &stop)?;
        let hosts = ranks.hosts();
        let to_see = TO_SEE.min(args.rank.rank_timeout);
        Ok(Self { ranks, environment: Some(environment), hosts, to_see })
    }

    pub fn place(&self) -> Place {
        self.ranks.place()
    }

    pub fn leads(&self) -> bool {
        self.place().leads()
    }

    /// Ends the others, whose work is in vain without this one.
    pub fn give_up(&self, error: &anyhow::Error) {
        crate::failure::give_up(self.ranks.as_ref(), error);
    }

    /// What the leader says.
    pub fn of_leader(&self, text: &str) -> Result<String> {
        let all = self.ranks.share(text.as_bytes())?;
        Ok(String::from_utf8_lossy(all.first().map_or(&[][..], Vec::as_slice)).into_owned())
    }

    /// Does something that writes files: the leader first; the others find it done.
    pub fn leader_first<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.leads() {
            let done = work()?;
            self.ranks.share(&[])?;
            return Ok(done);
        }
        self.ranks.share(&[])?;
        work()
    }

    /// The run's folder: the leader's, which the others follow. It must be the same for all.
    pub fn folder(&self, path: &Path, open: impl FnOnce() -> Result<RunFolder>) -> Result<RunFolder> {
        let folder = if self.leads() { open()? } else { RunFolder::follow(path) };
        if self.place().is_alone() {
            return Ok(folder);
        }
        let logs = path.join("ranks");
        self.see(&logs)?;
        let name = format!("rank-{}.log", self.place().rank);
        out::rank_log_file(&logs.join(name))
            .with_context(|| format!("{}: cannot write the log of a rank", path.display()))?;
        Ok(folder)
    }

    /// Makes sure that all ranks see what the leader writes.
    fn see(&self, folder: &Path) -> Result<()> {
        let name = format!(".seen-by-all-{}-{}", std::process::id(), ironhorse_ranks::host());
        let mark = folder.join(self.of_leader(&name)?);
        if self.leads() {
            let made = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&mark, b""));
            made.with_context(|| format!("{}: cannot write", mark.display()))?;
        }
        self.ranks.share(&[])?;
        let until = Instant::now() + self.to_see;
        while !mark.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(100));
        }
        let seen = mark.exists();
        let all = self.ranks.share(&[u8::from(seen)])?;
        if self.leads() {
            let _ = std::fs::remove_file(&mark);
        }
        if let Some(rank) = all.iter().position(|seen| seen != &[1]) {
            let host = self.hosts.get(rank).map_or("", String::as_str);
            bail!(
                "{}: rank {rank} on {host} has another folder of this name than rank 0, or none; give --out on a file system that all \
                 machines share, as an absolute path",
                folder.parent().unwrap_or(folder).display()
            );
        }
        Ok(())
    }

    /// A path that the leader chooses.
    pub fn path(&self, choose: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
        let own = if self.leads() { choose()? } else { PathBuf::new() };
        if self.place().is_alone() {
            return Ok(own);
        }
        let text =
            own.to_str().context("the run's folder has a name that is not UTF-8; choose another --out")?;
        Ok(PathBuf::from(self.of_leader(text)?))
    }

    /// How this process computes, on the GPU of its number or on its share of the cores; refuses what ranks cannot share.
    pub fn settle(&self, args: &mut TrainArgs) -> Result<()> {
        let Some(environment) = &self.environment else { return Ok(()) };
        check(args, environment.place.world)?;
        if args.engine.cuda.fast && args.engine.device()? == Device::Cpu {
            out::note("--fast changes nothing on CPU ranks: sums keep their order");
        }
        args.engine.share = ranks::share(environment, &args.engine, args.rank.ranks.is_some())?;
        Ok(())
    }

    /// How micro-steps are added up.
    pub fn sums(&self, args: &TrainArgs) -> Option<Sums> {
        let sums = Sums {
            place: self.place(),
            shard: shard_of(args),
            accumulate: args.accumulate,
            machine: if args.engine.cuda.fast { 1 } else { self.machine(args) }, // NCCL adds inside machines itself
            bucket: ranks::pieces_of(args.rank.bucket),
        };
        (args.rank.sum == SumArg::Tree || !self.place().is_alone()).then_some(sums)
    }

    /// How many ranks a machine has: 1 unless all have as many, numbered machine by machine.
    fn machine(&self, args: &TrainArgs) -> usize {
        args.rank.local_ranks.unwrap_or_else(|| machine_of(&self.hosts))
    }

    /// Connects the session with those of the others, and makes sure that all of them do the same.
    pub fn connect(&self, session: &mut Session) -> Result<()> {
        if self.place().is_alone() {
            return Ok(());
        }
        Ok(session.join(self.ranks.clone())?)
    }

    /// Refuses ranks with other settings or another kind of device than the leader's: before they exchange anything by the engine,
    /// which would hang.
    pub fn agree_settings(&self, args: &TrainArgs, device: &DeviceDescription) -> Result<()> {
        let mut settings = serde_json::to_value(args)?;
        if let Value::Object(settings) = &mut settings {
            MAY_DIFFER.iter().for_each(|key| drop(settings.remove(*key)));
            settings.insert("steps".into(), args.steps.unwrap_or(0).into());
            settings.insert("local-ranks".into(), self.machine(args).into());
            let kind = device.name.split(':').next().unwrap_or_default();
            settings.insert("the kind of device".into(), kind.into());
            settings.insert("the GPU's model".into(), device.product.clone().into());
        }
        self.same(&settings)
    }

    /// Refuses ranks with other data or weights than the leader's.
    pub fn agree(&self, [data, val]: [&str; 2], session: &mut Session) -> Result<()> {
        if self.place().is_alone() {
            return Ok(());
        }
        let weights = weights(session)?;
        self.same(
            &json!({ "the data": data, "the validation data": val, "the weights to start from": weights }),
        )
    }

    /// Refuses a rank that says something else than the leader.
    fn same(&self, mine: &Value) -> Result<()> {
        if self.place().is_alone() {
            return Ok(());
        }
        let all = self.ranks.share(serde_json::to_string(mine)?.as_bytes())?;
        let all: Vec<Value> =
            all.iter().map(|text| serde_json::from_slice(text)).collect::<Result<_, _>>()?;
        for (rank, other) in all.iter().enumerate().skip(1) {
            let keys = all[0].as_object().into_iter().chain(other.as_object()).flat_map(|table| table.keys());
            if let Some(key) = keys.into_iter().find(|key| all[0].get(*key) != other.get(*key)) {
                let text =
                    |value: Option<&Value>| value.map_or_else(|| "not set".to_owned(), Value::to_string);
                bail!(
                    "rank {rank} differs from rank 0 in {key}: {}, expected {}; start all ranks with the same settings, data and weights",
                    text(other.get(key)),
                    text(all[0].get(key))
                );
            }
        }
        Ok(())
    }
}

/// How many of these hosts in a row are one machine: 1 unless all have as many.
fn machine_of(hosts: &[String]) -> usize {
    let sizes: Vec<usize> = hosts.chunk_by(|a, b| a == b).map(<[String]>::len).collect();
    let mut names: Vec<&String> = hosts.iter().collect();
    names.sort_unstable();
    names.dedup();
    let equal = sizes.iter().all(|size| Some(size) == sizes.first()) && names.len() == sizes.len();
    sizes.first().copied().filter(|_| equal).unwrap_or(1)
}

/// What tells the weights of a session from others: a checksum over all of them, the frozen ones of a base too.
fn weights(session: &mut Session) -> Result<String> {
    let program = session.train_program()?;
    let trained = program.flat(Pool::Params);
    let frozen: Vec<Slot> = program.frozen().iter().map(|(_, slot)| *slot).collect();
    let mut sum = 0_u64;
    for slot in [trained].into_iter().chain(frozen) {
        for bucket in Slices::new(Place::ALONE).buckets(slot.numel()) {
            let offset = slot.offset + bucket.start * slot.dtype.size();
            let part = Slot { offset, shape: [bucket.len()].into(), ..slot };
            let mut bytes = vec![0; part.bytes()];
            session.engine().read_bytes(part, &mut bytes)?;
            sum = checksum(sum, &bytes);
        }
    }
    Ok(format!("{sum:016x}"))
}

/// Goes on with a checksum, eight bytes at a time.
fn checksum(sum: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks();
    let step = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let sum = words.iter().fold(sum, |sum, word| step(sum, u64::from_le_bytes(*word)));
    rest.iter().fold(sum, |sum, byte| step(sum, u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_of_gpus_needs_one() {
        let refused = |asked, device, found| check_gpus(asked, device, found).unwrap_err().to_string();
        assert!(check_gpus(4, Device::Cuda(0), Ok(4)).is_ok());
        assert_eq!(
            refused(8, Device::Cuda(0), Ok(4)),
            "--gpus 8: this machine has 4, and every process needs one; use --gpus 4"
        );
        assert!(refused(2, Device::Cpu, Ok(0)).starts_with("--gpus 2: this machine has no GPU; --ranks N"));
        assert!(refused(2, Device::Cpu, Ok(2)).starts_with("--gpus 2 is for GPUs, but --device is cpu"));
    }

    #[test]
    fn machines_are_told_by_their_names() {
        let of = |names: &str| machine_of(&names.chars().map(String::from).collect::<Vec<_>>());
        assert_eq!([of("aabb"), of("aaaa"), of("abcd"), of("")], [2, 4, 1, 1]);
        assert_eq!([of("aab"), of("abab"), of("aabbaa")], [1, 1, 1], "unequal, or not machine by machine");
    }
}
