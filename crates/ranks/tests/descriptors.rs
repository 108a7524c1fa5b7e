//! Open files of ranks, counted in a process of its own.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use ironhorse_core::{Communicator, Place};
use ironhorse_ranks::{Environment, Meeting, TcpRanks};
use std::net::TcpListener;
use std::time::{Duration, Instant};

const WORLD: usize = 6;

fn sockets() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let target = |entry: std::fs::DirEntry| std::fs::read_link(entry.path()).ok();
    open.filter_map(target).filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// One for each connection: a run of a thousand ranks has a thousand in each process, and systems allow 1,024 unless asked.
#[test]
fn a_connection_takes_one_descriptor() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let before = sockets();
    let meet = |rank| -> TcpRanks {
        let environment = Environment {
            place: Place { rank, world: WORLD },
            local_rank: rank,
            local_world: None,
            address: "127.0.0.1".into(),
            port,
            token: "t".into(),
            by: "a test",
            listens_on_stdin: false,
        };
        let seconds = Duration::from_secs(60);
        let meeting = Meeting {
            environment: &environment,
            version: "1",
            patience: seconds,
            timeout: seconds,
            note: &|_| {},
            stop: &|| false,
        };
        meeting.meet().unwrap()
    };
    let ranks: Vec<TcpRanks> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WORLD).map(|rank| scope.spawn(move || meet(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(ranks[1].place().world, WORLD);
    // both ends are here; those that listened end soon
    let expected = WORLD * (WORLD - 1);
    let until = Instant::now() + Duration::from_secs(20);
    while sockets() - before > expected && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(sockets() - before, expected);
}
