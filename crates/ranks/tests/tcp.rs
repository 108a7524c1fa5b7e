//! Ranks over TCP, as threads of one process.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use ironhorse_core::ranks::Watched;
use ironhorse_core::{Communicator, Error, Place};
use ironhorse_ranks::{Environment, Meeting, TcpRanks};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn environment(rank: usize, world: usize, port: u16, token: &str) -> Environment {
    Environment {
        place: Place { rank, world },
        local_rank: rank,
        local_world: None,
        address: "127.0.0.1".into(),
        port,
        token: token.into(),
        by: "a test",
        listens_on_stdin: false,
    }
}

struct Asked<'a> {
    version: &'a str,
    patience: Duration,
    timeout: Duration,
}

const USUAL: Asked<'_> =
    Asked { version: "1", patience: Duration::from_secs(20), timeout: Duration::from_secs(20) };

fn meet(environment: &Environment, asked: &Asked<'_>, notes: &Mutex<Vec<String>>) -> Result<TcpRanks, Error> {
    let note = |text: &str| notes.lock().unwrap().push(text.to_owned());
    let (version, patience, timeout) = (asked.version, asked.patience, asked.timeout);
    Meeting { environment, version, patience, timeout, note: &note, stop: &|| false }.meet()
}

/// Runs `work` on every rank of a world.
fn world<T: Send>(size: usize, asked: &Asked<'_>, work: impl Fn(TcpRanks) -> T + Sync) -> Vec<T> {
    let (port, work) = (free_port(), &work);
    std::thread::scope(|scope| {
        let rank = |rank| {
            scope.spawn(move || {
                let notes = Mutex::new(Vec::new());
                work(meet(&environment(rank, size, port, "secret"), asked, &notes).unwrap())
            })
        };
        let threads: Vec<_> = (0..size).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn everybody_gets_what_is_for_him() {
    world(4, &USUAL, |ranks| {
        let Place { rank, world } = ranks.place();
        assert_eq!(ranks.hosts().len(), world);
        for round in 0..20 {
            // the message of rank a to rank b has a·7 + b·3 + round bytes; a large one now and then
            let length = |a: usize, b: usize| a * 7 + b * 3 + round + if round == 7 { 3 << 20 } else { 0 };
            let messages: Vec<Vec<u8>> =
                (0..world).map(|to| vec![(rank * 16 + to) as u8; length(rank, to)]).collect();
            let send: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
            let mut arrived: Vec<Vec<u8>> = (0..world).map(|from| vec![0; length(from, rank)]).collect();
            let mut receive: Vec<&mut [u8]> = arrived.iter_mut().map(Vec::as_mut_slice).collect();
            ranks.exchange(&send, &mut receive).unwrap();
            for (from, bytes) in arrived.iter().enumerate() {
                assert!(bytes.iter().all(|&byte| byte == (from * 16 + rank) as u8), "round {round}");
            }
            let all = ranks.share(format!("{rank}.{round}").as_bytes()).unwrap();
            let texts: Vec<String> = all.into_iter().map(|text| String::from_utf8(text).unwrap()).collect();
            assert_eq!(texts, (0..world).map(|from| format!("{from}.{round}")).collect::<Vec<_>>());
        }
    });
}

#[test]
fn strangers_are_refused_and_named() {
    let port = free_port();
    let notes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| meet(&environment(0, 2, port, "secret"), &USUAL, &notes).unwrap());
        let mut stranger = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        stranger.write_all(b"GET / HTTP/1.1\r\nHost: here\r\nAccept: everything\r\n\r\n").unwrap();
        let others = Mutex::new(Vec::new());
        let wrong = meet(&environment(1, 2, port, "guess"), &USUAL, &others);
        let text = wrong.err().unwrap().to_string();
        assert!(text.contains("refused rank 1") && text.contains("another token"), "{text}");
        let follower = meet(&environment(1, 2, port, "secret"), &USUAL, &others).unwrap();
        let leader = leader.join().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| follower.share(b"a").unwrap());
            assert_eq!(leader.share(b"b").unwrap(), [b"b".to_vec(), b"a".to_vec()]);
        });
    });
    let notes = notes.into_inner().unwrap();
    let has = |text: &str| {
        notes.iter().any(|note| note.starts_with("refused a connection of") && note.contains(text))
    };
    assert!(has("does not speak as a rank") && has("does not know the token"), "{notes:?}");
}

#[test]
fn another_version_is_refused() {
    let port = free_port();
    std::thread::scope(|scope| {
        let leader =
            scope.spawn(|| meet(&environment(0, 2, port, "s"), &USUAL, &Mutex::new(Vec::new())).err());
        let follower =
            meet(&environment(1, 2, port, "s"), &Asked { version: "2", ..USUAL }, &Mutex::new(Vec::new()))
                .err();
        for error in [leader.join().unwrap(), follower] {
            let text = error.unwrap().to_string();
            assert!(text.contains("runs version 2") && text.contains("use the same program"), "{text}");
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let asked = Asked { patience: Duration::from_millis(300), ..USUAL };
    let port = free_port();
    let text =
        meet(&environment(0, 2, port, "s"), &asked, &Mutex::new(Vec::new())).err().unwrap().to_string();
    assert!(text.contains("rank 1 did not come") && text.contains("127.0.0.1"), "{text}");
}

#[test]
fn the_others_learn_who_gave_up_and_why() {
    let texts = world(3, &USUAL, |ranks| {
        if ranks.place().rank == 1 {
            ranks.give_up("its disk is full", 2);
            return String::new();
        }
        let error = ranks.share(b"waiting").unwrap_err();
        assert!(
            matches!(error, Error::RankLost { rank: 1, code: 2, .. }),
            "the code goes with the blame: {error:?}"
        );
        error.to_string()
    });
    for text in [&texts[0], &texts[2]] {
        assert!(text.starts_with("rank 1 on ") && text.ends_with(": its disk is full"), "{text}");
    }
}

#[test]
fn a_silent_rank_is_lost_within_the_time() {
    // a rank that takes part in the rendezvous, and then neither speaks nor goes
    let asked = Asked { timeout: Duration::from_millis(600), ..USUAL };
    let port = free_port();
    std::thread::scope(|scope| {
        let silent = scope.spawn(|| {
            let long = Asked { timeout: Duration::from_secs(3600), ..USUAL }; // beats every five seconds
            meet(&environment(1, 2, port, "s"), &long, &Mutex::new(Vec::new())).unwrap()
        });
        let leader = meet(&environment(0, 2, port, "s"), &asked, &Mutex::new(Vec::new())).unwrap();
        let start = Instant::now();
        let text = leader.share(b"").unwrap_err().to_string();
        assert!(text.contains("rank 1 on ") && text.contains("nothing was heard of it for 0.6 s"), "{text}");
        assert!(start.elapsed() < Duration::from_secs(30));
        drop(silent.join().unwrap());
    });
}

#[test]
fn two_runs_on_one_port_do_not_meet() {
    let port = free_port();
    let first = Asked { patience: Duration::from_secs(2), ..USUAL };
    std::thread::scope(|scope| {
        let leader =
            scope.spawn(|| meet(&environment(0, 2, port, "run a"), &first, &Mutex::new(Vec::new())).err());
        std::thread::sleep(Duration::from_millis(200));
        let other = meet(&environment(1, 2, port, "run b"), &first, &Mutex::new(Vec::new()));
        assert!(other.is_err());
        assert!(leader.join().unwrap().unwrap().to_string().contains("rank 1 did not come"));
    });
}

#[test]
fn a_rank_that_lives_but_hangs_in_its_step_is_lost() {
    let asked = Asked { timeout: Duration::from_secs(2), ..USUAL };
    let texts = world(3, &asked, |ranks| {
        ranks.in_step(Some(Watched { step: 5, first: false }));
        if ranks.place().rank == 1 {
            // neither gets on nor waits, like a process whose GPU hangs; its other threads go on
            let until = Instant::now() + Duration::from_secs(30);
            while ranks.failure().is_none() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(20));
            }
            return ranks.failure().unwrap().to_string();
        }
        ranks.share(b"waiting").unwrap_err().to_string()
    });
    for text in texts {
        assert!(text.contains("rank 1 on ") && text.contains("not got on with its step for 2 s"), "{text}");
    }
}

#[test]
fn a_second_rank_of_the_same_number_is_refused() {
    let port = free_port();
    let notes = Mutex::new(Vec::<String>::new());
    std::thread::scope(|scope| {
        let come = |rank| {
            scope.spawn(move || meet(&environment(rank, 3, port, "s"), &USUAL, &Mutex::new(Vec::new())))
        };
        let leader = scope.spawn(|| meet(&environment(0, 3, port, "s"), &USUAL, &notes).unwrap());
        let twice = [come(1), come(1)];
        let until = Instant::now() + Duration::from_secs(20);
        let refused = || notes.lock().unwrap().iter().any(|note| note.contains("refused a second rank 1"));
        while !refused() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        let last = come(2);
        let met = twice.map(|thread| thread.join().unwrap());
        assert_eq!(met.iter().filter(|met| met.is_ok()).count(), 1);
        drop((leader.join().unwrap(), last.join().unwrap().unwrap()));
    });
    assert!(notes.into_inner().unwrap().iter().any(|note| note.contains("IRONHORSE_TOKEN")));
}
