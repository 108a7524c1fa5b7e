//! Five hundred connections at once, half of them slow or cut. The server is a process of its own, so that neither runs out of files.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // a panic is a failed test, in helpers too

mod common;

use common::{Server, answer, post};
use ironhorse_serve::http::Limits;
use ironhorse_serve::{Settings, listen};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Set where this program is the server.
const SERVES: &str = "IRONHORSE_TEST_CROWD";
/// How long the slow may take. The others send at once: only a machine that stands still for so long would cut them off too.
const PATIENCE: Duration = Duration::from_secs(8);

/// No test: the server's process.
#[test]
fn the_server_of_the_crowd() {
    if std::env::var_os(SERVES).is_none() {
        return;
    }
    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    println!("\nlistening {}", listener.local_addr().unwrap());
    let limits = Limits { head: PATIENCE, body: PATIENCE, stalled: PATIENCE, ..Limits::default() };
    let settings = Settings { limits, queue: 1000, ..Settings::default() };
    let signal = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new()); // until the test ends, however it does
            signal.store(15, Ordering::Relaxed);
        });
        common::model::serve(listener, 16, settings, &signal).unwrap();
    });
}

/// The process, what it goes on to print, and its address.
fn start() -> (Child, impl Iterator<Item = String>, Server) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_server_of_the_crowd", "--nocapture"])
        .env(SERVES, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let at = lines.find_map(|line| line.strip_prefix("listening ").map(str::to_owned)).unwrap();
    (child, lines, Server::elsewhere(at.parse().unwrap()))
}

/// What is asked by one of those that read their answers.
fn question(i: usize) -> Value {
    json!({"prompt": format!("client {i}"), "max_tokens": 3 + i % 7, "seed": i, "ignore_eos": true})
}

#[test]
fn half_of_five_hundred_are_slow_or_cut_and_the_others_get_their_answers() {
    let (mut child, printed, server) = start();
    let body = json!({"prompt": "a", "max_tokens": 150, "ignore_eos": true, "stream": true}).to_string();
    let slow = post("/v1/completions", body.as_bytes(), "");
    let streams: Vec<TcpStream> = (0..500).map(|_| server.connect()).collect();
    let (mut good, mut held, mut cut) = (Vec::new(), Vec::new(), Vec::new());
    for (i, mut stream) in streams.into_iter().enumerate() {
        if i % 2 == 1 {
            let request = post("/v1/completions", question(i).to_string().as_bytes(), "");
            stream.write_all(&request).unwrap();
            good.push((i, stream));
            continue;
        }
        let kind = i / 2 % 5;
        let part = match kind {
            0 => &[][..],                 // says nothing
            1 => &slow[..20],             // half a head
            2 => &slow[..slow.len() - 5], // half a body
            _ => &slow[..],               // reads nothing; or goes away in the middle
        };
        stream.write_all(part).unwrap();
        if kind < 4 { held.push((kind, stream)) } else { cut.push(stream) }
    }
    for mut stream in cut {
        let _ = stream.read(&mut [0; 10]);
    }
    let mut texts = Vec::new();
    for (i, stream) in good {
        let (status, _, body) = answer(stream);
        assert_eq!(status, 200, "{i}: {body}");
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 3 + i % 7, "{i}: {answer}");
        texts.push((i, answer["choices"][0]["text"].clone()));
    }
    #[cfg(target_os = "linux")]
    {
        let threads = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let names =
            threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")).unwrap());
        let readers = names.filter(|name| name.trim() == "reader").count();
        assert!((1..=2).contains(&readers), "{readers} threads read requests");
    }
    // those that sent half are told or cut off
    server.falls_to("ironhorse_connections", 1);
    for (kind, stream) in held {
        let status = answer(stream).0;
        match kind {
            0 | 1 => assert!(matches!(status, 0 | 408), "{kind}: {status}"),
            2 => assert_eq!(status, 408),
            _ => assert_eq!(status, 200, "its answer was small enough to be kept for it"),
        }
    }
    server.falls_to("ironhorse_answering", 0);
    assert_eq!(server.metric("ironhorse_sequences"), 0);
    // the same to one who is alone
    for (i, text) in texts.iter().step_by(25) {
        assert_eq!(server.completion(&question(*i))["choices"][0]["text"], *text, "{i}");
    }
    drop(child.stdin.take());
    let printed: Vec<String> = printed.collect();
    assert!(child.wait().unwrap().success(), "{printed:?}");
}
