//! Several processes that train together: equal bits for any number of them, and what happens when one is lost.
#![cfg(target_os = "linux")]

use super::Place;
use super::running::{Running, assert_equal, checkpoints, steps_logged};
use rustix::process::{Pid, Signal, kill_process};
use std::process::Command;

/// A run that is quick and has a piece for every rank.
const TINY: &str = "--model n_layer=1,n_head=2,n_embd=80,vocab_size=256,max_seq_len=32 --batch 1 --seq 16 --threads 1 --device cpu \
                    --accumulate 4 --schedule constant --warmup 0 --val-every 4 --val-batches 3 --sample-every 0 --sample-tokens 0";
/// The same without an end.
const ENDLESS: &str = "--steps 4000000 --save-every 0";

#[test]
fn any_world_is_the_same_run() {
    let place = Place::new();
    place.does(&format!("train {TINY} --steps 6 --out one"));
    for (ranks, shard) in [(2, "state"), (4, "state"), (4, "none"), (2, "grads")] {
        let run = format!("of-{ranks}-{shard}");
        let done = place.does(&format!("train {TINY} --steps 6 --ranks {ranks} --shard {shard} --out {run}"));
        assert!(done.stderr.contains(&format!("{ranks} ranks on ")), "{}", done.stderr);
        assert!(!done.stderr.contains("--fast"), "{}", done.stderr);
        assert_equal(&place.path("one"), &place.path(&run), 6);
        for rank in 0..ranks {
            let log = std::fs::read_to_string(place.path(&format!("{run}/ranks/rank-{rank}.log"))).unwrap();
            assert!(log.contains("step"), "{log}");
        }
        // one of them prints
        assert_eq!(done.stderr.matches("validation loss").count(), 3, "{}", done.stderr);
    }
    let done = place.does(&format!("train {TINY} --val-batches 0 --steps 1 --ranks 2 --fast --out fast"));
    assert!(done.stderr.contains("--fast changes nothing on CPU ranks"), "{}", done.stderr);
}

#[test]
fn a_checkpoint_does_not_know_how_many_wrote_it() {
    let place = Place::new();
    place.does(&format!("train {TINY} --val-batches 0 --steps 9 --out whole"));
    place.does(&format!("train {TINY} --val-batches 0 --steps 3 --out run"));
    place.does("train --resume run --steps 6 --ranks 4");
    place.does("train --resume run --steps 9 --ranks 2 --shard grads");
    assert_equal(&place.path("run"), &place.path("whole"), 9);
}

/// The processes of the ranks of a run, by rank.
fn ranks_of(launcher: u32) -> Vec<(usize, Pid)> {
    let mut ranks = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap_or("0").trim();
        if parent != launcher.to_string() {
            continue;
        }
        let vars = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let vars = String::from_utf8_lossy(&vars).into_owned();
        let rank = vars.split('\0').find_map(|var| var.strip_prefix("IRONHORSE_RANK="));
        if let (Some(rank), Some(pid)) = (rank.and_then(|rank| rank.parse().ok()), Pid::from_raw(id)) {
            ranks.push((rank, pid));
        }
    }
    ranks.sort_by_key(|(rank, _)| *rank);
    ranks
}

fn rank(running: &Running, wanted: usize) -> Pid {
    ranks_of(running.id()).into_iter().find(|(rank, _)| *rank == wanted).unwrap().1
}

/// Starts a run without an end, with a checkpoint to go back to.
fn endless(place: &Place, more: &str) -> Running {
    let mut running = Running::start(place, &format!("train {TINY} {ENDLESS} --out run {more}"));
    running.wait_for_step(&place.path("run"), 2);
    running
}

fn said(place: &Place, run: &str) -> String {
    let logs = std::fs::read_dir(place.path(run).join("ranks")).unwrap().flatten();
    logs.map(|log| std::fs::read_to_string(log.path()).unwrap_or_default()).collect()
}

/// Waits until a process has ended. Its parent may not have asked for its exit code yet: it is a zombie then.
fn wait_for_end(process: Pid, said: impl Fn() -> String) {
    let (stat, began) = (format!("/proc/{}/stat", process.as_raw_nonzero()), std::time::Instant::now());
    let runs = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
    while runs() {
        assert!(began.elapsed().as_secs() < 120, "{}", said());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn ranks_stop_with_a_checkpoint_when_their_launcher_is_gone() {
    let place = Place::new();
    let running = endless(&place, "--ranks 2");
    let ranks = ranks_of(running.id());
    assert_eq!(ranks.len(), 2);
    // the socket on which rank 0 met the others is closed, not the standard input of what it starts
    let stdin = std::fs::read_link(format!("/proc/{}/fd/0", ranks[0].1.as_raw_nonzero())).unwrap();
    assert_eq!(stdin.to_str(), Some("/dev/null"));
    running.signal(Signal::KILL);
    for (_, rank) in ranks {
        wait_for_end(rank, || said(&place, "run"));
    }
    let run = place.path("run");
    assert_eq!(steps_logged(&run) as u64, checkpoints(&run)[0]);
}

#[test]
fn a_rank_that_dies_ends_the_others_who_say_which() {
    for victim in [0, 1, 2] {
        let place = Place::new();
        let running = endless(&place, "--ranks 3 --accumulate 3 --save-every 1 --keep 0");
        kill_process(rank(&running, victim), Signal::KILL).unwrap();
        let done = running.end();
        assert_eq!(done.code, Some(3), "{}", done.stderr);
        let text = format!("rank {victim} on ");
        assert!(
            done.stderr.contains(&text) && done.stderr.contains("its process has ended"),
            "{}",
            done.stderr
        );
        // what was saved goes on with another number
        let run = place.path("run");
        let made = checkpoints(&run)[0];
        place.does(&format!("train --resume run --steps {}", made + 2));
        place.does(&format!(
            "train {TINY} --accumulate 3 --save-every 1 --keep 0 --steps {} --out whole",
            made + 2
        ));
        assert_equal(&run, &place.path("whole"), made + 2);
    }
}

#[test]
fn a_frozen_rank_ends_the_others_in_time() {
    for victim in [0, 1] {
        let place = Place::new();
        let running = endless(&place, "--ranks 2 --rank-timeout 1s");
        let frozen = rank(&running, victim);
        kill_process(frozen, Signal::STOP).unwrap();
        let other = rank(&running, 1 - victim);
        wait_for_end(other, || said(&place, "run"));
        let _ = kill_process(frozen, Signal::CONT); // its launcher may have killed it
        let done = running.end();
        assert_eq!(done.code, Some(3), "{}", done.stderr);
        let text = format!("rank {victim} on ");
        assert!(done.stderr.contains(&text) && done.stderr.contains("(--rank-timeout)"), "{}", done.stderr);
    }
}

#[test]
fn a_signal_to_any_of_them_stops_all_with_a_checkpoint() {
    for (to, ranks) in [(Some(0), 2), (Some(1), 2), (None, 2)] {
        let place = Place::new();
        let running = endless(&place, &format!("--ranks {ranks}"));
        match to {
            Some(to) => kill_process(rank(&running, to), Signal::TERM).unwrap(),
            None => running.signal(Signal::TERM),
        }
        let done = running.end();
        assert_eq!(done.code, Some(3), "{}", done.stderr);
        assert!(done.text().contains("stopped by SIGTERM after "), "{}", done.text());
        let run = place.path("run");
        let made = checkpoints(&run)[0];
        assert_eq!(steps_logged(&run) as u64, made);
        place.does(&format!("train --resume run --ranks 4 --steps {}", made + 1));
        place.does(&format!("train {TINY} --steps {} --out whole", made + 1));
        assert_equal(&run, &place.path("whole"), made + 1);
    }
}

/// A rank as a launcher other than ours starts it.
fn as_rank(place: &Place, line: &str, vars: &[(&str, String)]) -> Command {
    let mut command = place.command(line);
    for (name, value) in vars {
        command.env(name, value);
    }
    command
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn torchrun(rank: usize, port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", "2".into()),
        ("LOCAL_RANK", rank.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", (port - 1).to_string()),
    ]
}

#[test]
fn launchers_start_ranks() {
    let place = Place::new();
    place.does(&format!("train {TINY} --steps 3 --out one"));
    let port = free_port();
    let slurm = |rank: usize, _: u16| {
        vec![
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_NTASKS", "2".into()),
            ("SLURM_LOCALID", rank.to_string()),
            ("SLURM_JOB_ID", "77".into()),
            ("SLURM_STEP_ID", "0".into()),
            ("SLURM_STEP_NODELIST", "localhost".into()),
            ("MASTER_PORT", free_port().to_string()),
        ]
    };
    let slurm_vars = slurm(0, 0);
    for (name, vars) in [
        ("torchrun", [0, 1].map(|rank| torchrun(rank, port))),
        (
            "slurm",
            [0, 1].map(|rank| {
                let mut vars = slurm_vars.clone();
                vars[0].1 = rank.to_string();
                vars[2].1 = rank.to_string();
                vars
            }),
        ),
    ] {
        let line = format!("train {TINY} --steps 3 --out {name}");
        let ranks = vars.map(|vars| Running::spawn(&place, as_rank(&place, &line, &vars)));
        for done in ranks.map(Running::end) {
            assert_eq!(done.code, Some(0), "{}", done.stderr);
        }
        assert_equal(&place.path("one"), &place.path(name), 3);
    }
}

#[test]
fn ranks_that_do_not_do_the_same_are_refused_before_the_first_step() {
    for (other, what) in [
        ("--lr 0.5", "lr"),
        ("--seed 9", "seed"),
        ("--data other.bin", "the data"),
        ("--val-data other.bin", "the validation data"),
        // what would make ranks wait for each other for ever
        ("--shard none", "shard"),
        ("--bucket 1MiB", "bucket"),
        ("--local-ranks 1", "local-ranks"),
        ("--accumulate 8", "accumulate"),
    ] {
        let place = Place::new();
        let write = |name: &str, first: u16| {
            let tokens: Vec<u16> = (0..600).map(|i| (first + i * 7) % 250).collect();
            let mut bytes: Vec<u8> = [20_240_520_i32, 1, 600].iter().flat_map(|n| n.to_le_bytes()).collect();
            bytes.resize(1024, 0);
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            std::fs::write(place.path(name), bytes).unwrap();
        };
        write("same.bin", 0);
        write("other.bin", 3);
        let port = free_port();
        let line = |more: &str| {
            let kept = ["--data", "--val-data"].into_iter().filter(|flag| !more.starts_with(flag));
            let data: String = kept.map(|flag| format!("{flag} same.bin ")).collect();
            format!("train {TINY} --steps 3 --out run {data} {more}")
        };
        let leader = Running::spawn(&place, as_rank(&place, &line(""), &torchrun(0, port)));
        let follower = Running::spawn(&place, as_rank(&place, &line(other), &torchrun(1, port)));
        for done in [leader.end(), follower.end()] {
            assert_eq!(done.code, Some(2), "could not run, whoever noticed it first: {}", done.stderr);
            assert!(
                done.stderr.contains(&format!("rank 1 differs from rank 0 in {what}")),
                "{}",
                done.stderr
            );
        }
        assert!(!place.path("run").exists());
    }
}

/// How ranks work together stays as it was, unless a flag says otherwise; checkpoints do not know it.
#[test]
fn a_resumed_run_keeps_how_its_ranks_work() {
    let place = Place::new();
    let how = "--shard grads --bucket 1MiB --rank-timeout 90s";
    place.does(&format!("train {TINY} --val-batches 0 --steps 2 --ranks 2 {how} --out run"));
    let config = || String::from_utf8(place.read("run/config.toml")).unwrap();
    for line in ["shard = \"grads\"", "bucket = \"1MiB\"", "rank-timeout = \"90s\""] {
        assert!(config().contains(line), "{line}: {}", config());
    }
    let done = place.does("train --resume run --ranks 4 --steps 4");
    assert!(!done.stderr.contains("bucket"), "{}", done.stderr);
    let done = place.does("train --resume run --ranks 2 --shard state --steps 6");
    assert!(done.stderr.contains("changed: shard: \"grads\" → \"state\""), "{}", done.stderr);
    assert!(config().contains("shard = \"state\""), "{}", config());
    place.does(&format!("train {TINY} --val-batches 0 --steps 6 --out whole"));
    assert_equal(&place.path("run"), &place.path("whole"), 6);
}

/// A folder that rank 1 has of its own is not the run's.
#[test]
fn a_folder_that_is_not_shared_is_refused_before_the_first_step() {
    let (place, other) = (Place::new(), Place::new());
    let port = free_port();
    let line = format!("train {TINY} --steps 3 --rank-timeout 2s --out run");
    let ranks = [(0, &place), (1, &other)]
        .map(|(rank, place)| Running::spawn(place, as_rank(place, &line, &torchrun(rank, port))));
    for done in ranks.map(Running::end) {
        assert_eq!(done.code, Some(2), "{}", done.stderr);
        assert!(
            done.stderr.contains("rank 1 on ") && done.stderr.contains("that all machines share"),
            "{}",
            done.stderr
        );
    }
    assert!(!place.path("run").exists() && !other.path("run").exists());
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let place = Place::new();
    for (flags, text) in [
        ("--ranks 3", "--accumulate 4 counts the micro-steps of all 3 processes"),
        ("--ranks 2 --sum chain", "--sum chain is for one process"),
        ("--ranks 2 --optimizer muon --shard state", "use --shard none"),
        ("--ranks 2 --rampup-steps 2", "--rampup-steps needs one process"),
        ("--ranks 0", "at least 1"),
        ("--gpus 64", "--gpus 64"),
    ] {
        let done = place.runs(&format!("train {TINY} --steps 3 --out run {flags}"));
        assert_eq!(done.code, Some(2), "{}", done.stderr);
        assert!(done.stderr.contains(text), "{}", done.stderr);
        assert!(!place.path("run").exists());
    }
}

#[test]
fn a_launcher_and_a_flag_that_disagree_are_refused() {
    let place = Place::new();
    let line = format!("train {TINY} --steps 3 --out run --ranks 4");
    let done = Running::spawn(&place, as_rank(&place, &line, &torchrun(0, free_port()))).end();
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(done.stderr.contains("torchrun has started 2 processes"), "{}", done.stderr);
}

/// Ranks killed at random moments, resumed by other numbers of them; `cargo xtask torture --times 100 -- --ranks 4` is the long form.
#[test]
fn killed_at_random_the_run_goes_on_with_another_world() {
    let place = Place::new();
    let done = place.does("resume-check --torture 2 --ranks 2 --steps 12");
    assert!(done.text().contains("2 passed, 0 failed"), "{}", done.text());
}

/// A rank that dies while it writes its part of a checkpoint, or whose disk is full, leaves those from before; what was saved goes on.
#[test]
fn a_rank_that_fails_in_a_save_leaves_the_checkpoint_before() {
    let place = Place::new();
    let line =
        |run: &str| format!("train {TINY} --val-batches 0 --steps 8 --save-every 2 --keep 0 --out {run}");
    place.does(&line("whole"));
    // the first change to the disk that rank 1 makes is in the first save; later ones are in that or in the next
    for (fault, dies) in
        [("1:abort", true), ("3:abort", true), ("9:abort", true), ("1:enospc", false), ("5:short", false)]
    {
        let (run, port) = (fault.replace(':', "-"), free_port());
        let ranks = [0, 1].map(|rank| {
            let mut command = as_rank(&place, &line(&run), &torchrun(rank, port));
            if rank == 1 {
                command.env("IRONHORSE_FAULT", fault);
            }
            Running::spawn(&place, command)
        });
        let [leader, other] = ranks.map(Running::end);
        let folder = place.path(&run);
        if dies {
            assert_eq!(leader.code, Some(3), "{fault}: {}", leader.stderr);
            assert!(
                leader.stderr.contains("rank 1 on ") || leader.stderr.contains("its process has ended"),
                "{}",
                leader.stderr
            );
            assert_ne!(other.code, Some(0), "{}", other.stderr);
            place.does(&match checkpoints(&folder).is_empty() {
                true => format!("{} --overwrite --ranks 2", line(&run)),
                false => format!("train --resume {run} --ranks 4"),
            });
        } else {
            assert_eq!((leader.code, other.code), (Some(0), Some(0)), "{} {}", leader.stderr, other.stderr);
            assert!(
                leader.stderr.contains("not saved, will retry in a minute: rank 1: "),
                "{}",
                leader.stderr
            );
        }
        assert_equal(&folder, &place.path("whole"), 8);
        let left = std::fs::read_dir(folder.join("checkpoints")).unwrap().flatten();
        let hidden = left.filter(|entry| entry.file_name().to_string_lossy().starts_with('.')).count();
        assert_eq!(hidden, 0, "{fault}: what was not completed is gone");
    }
}

/// Ranks of two machines, as far as they know, and buckets that are exchanged beside the backward.
#[test]
fn machines_that_add_up_first_train_the_same_run() {
    let place = Place::new();
    place.does(&format!("train {TINY} --steps 4 --out one"));
    for shard in ["none", "state", "grads"] {
        let run = format!("two-machines-{shard}");
        place.does(&format!(
            "train {TINY} --steps 4 --ranks 4 --local-ranks 2 --bucket 256KiB --shard {shard} --out {run}"
        ));
        assert_equal(&place.path("one"), &place.path(&run), 4);
    }
}
