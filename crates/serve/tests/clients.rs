//! Clients that send what is wrong, too much, too slowly or in odd ways; a full queue; and how a server ends.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

mod common;

use common::model::{served, served_rows};
use common::{Server, answer, post};
use ironhorse_serve::Access;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn bodies_that_are_wrong_are_errors_not_ends() {
    let server = served(|settings| settings.limits.body_bytes = 4096);
    let good =
        json!({"model": "small/model", "prompt": "a", "max_tokens": 2, "stop": ["x"], "n": 1, "seed": 1})
            .to_string();
    let mut state = 12345_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for round in 0..300 {
        let mut bytes = good.clone().into_bytes();
        for _ in 0..1 + random(3) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes.truncate(at.max(1)),
                2 => bytes.insert(at, b"{}[]\",:0-e"[random(10)]),
                _ => drop(bytes.remove(at)),
            }
            if bytes.is_empty() {
                bytes.push(b'{');
            }
        }
        let (status, body) = server.post_bytes("/v1/completions", &bytes, "");
        let told: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{round}: {body}"));
        match status {
            200 => assert!(told["choices"].is_array()),
            400 | 404 => assert!(
                told["error"]["message"].is_string() && told["error"]["type"] == "invalid_request_error"
            ),
            other => panic!("{round}: {other} for {}", String::from_utf8_lossy(&bytes)),
        }
    }
    let deep = "[".repeat(4000);
    assert_eq!(server.post_bytes("/v1/completions", deep.as_bytes(), "").0, 400);
    let large = json!({"prompt": "a".repeat(5000)}).to_string();
    assert_eq!(server.post_bytes("/v1/completions", large.as_bytes(), "").0, 413);
    let (status, told) = server.post("/v1/completions", &json!({"prompt": "a".repeat(300), "max_tokens": 1}));
    assert_eq!((status, &told["error"]["code"]), (400, &json!("context_length_exceeded")));
    let (status, _) = server.post("/v1/completions", &json!({"prompt": [999], "max_tokens": 1}));
    assert_eq!(status, 400);
    for wrong in [
        &b"GET / HTTP/9.9\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x01",
        b"GET  /\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n",
    ] {
        assert!(matches!(server.raw(wrong).0, 0 | 400 | 505), "{wrong:?}");
    }
    let head = format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(100_000));
    assert!(matches!(server.raw(head.as_bytes()).0, 0 | 431));
    assert_eq!(server.get("/health").0, 200);
}

#[test]
fn a_full_queue_is_told() {
    let server = served_rows(1, |settings| settings.queue = 2);
    let long = json!({"prompt": "a", "max_tokens": 199, "ignore_eos": true, "stream": true}).to_string();
    let hold = |server: &Server| server.send(&post("/v1/completions", long.as_bytes(), ""));
    let (status, told) = server.post("/v1/completions", &json!({"prompt": ["a", "b", "c"], "max_tokens": 1}));
    assert_eq!((status, &told["error"]["code"]), (429, &json!("queue_full")), "more than ever fits");
    let mut held = Vec::new();
    let full = (0..200).any(|_| {
        held.push(hold(&server));
        server.metric("ironhorse_queued") >= 2
            && server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).0 == 429
    });
    assert!(full);
    drop(held); // all of them go away: nobody waits for their texts
    server.falls_to("ironhorse_answering", 0);
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).0, 200);
}

#[test]
fn a_signal_lets_answers_end_and_refuses_new_ones() {
    let server = served_rows(1, |_| {});
    // one row, so that this takes a while
    let body =
        json!({"prompt": "a", "max_tokens": 199, "ignore_eos": true, "stream": true, "n": 30}).to_string();
    let mut reader = BufReader::new(server.send(&post("/v1/completions", body.as_bytes(), "")));
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0);
    }
    server.signal.store(15, Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(120)); // it looks every 50
    let (status, told) = server.post("/v1/completions", &json!({"prompt": "a"}));
    assert_eq!((status, &told["error"]["code"]), (503, &json!("shutting_down")));
    assert_eq!(server.get("/health").0, 503);
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    let (at, took) = (server.at, server.end());
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert!(TcpStream::connect(at).is_err(), "nobody listens any more");
}

fn with_key(change: impl FnOnce(&mut ironhorse_serve::Settings)) -> Server {
    served(|settings| {
        settings.access = Access { api_key: Some("secret".into()), ..Access::default() };
        settings.limits.body = Duration::from_secs(3600); // who waits for a body waits too long
        change(settings);
    })
}

/// A head that says that a body of a million bytes follows.
fn large_head(start: &str, headers: &str) -> String {
    format!("{start} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n{headers}\r\n")
}

#[test]
fn what_the_head_shows_to_be_wrong_is_answered_before_the_body_comes() {
    let (json, key) = ("content-type: application/json\r\n", "authorization: Bearer secret\r\n");
    let both = format!("{json}{key}");
    let (write, plain) = ("POST /v1/completions", format!("content-type: text/plain\r\n{key}"));
    let server = with_key(|settings| settings.limits.body_bytes = 500_000);
    for (start, headers, status) in [
        (write, json, 401),
        ("POST /v1/chat/completions", "authorization: Bearer wrong\r\n", 401),
        (write, plain.as_str(), 415),
        (write, both.as_str(), 413), // it says how large it is
        ("PUT /v1/completions", both.as_str(), 405),
        ("POST /v1/other", both.as_str(), 404),
        ("GET /v1/models", "", 401),
        ("GET /v1/models", key, 200), // no body is wanted there
    ] {
        let (found, head, _) = server.raw(large_head(start, headers).as_bytes());
        assert_eq!(found, status, "{start} {headers}");
        assert!(head.to_ascii_lowercase().contains("connection: close"), "{head}");
    }
    let open = served(|settings| settings.limits.body = Duration::from_secs(3600));
    let long = "a".repeat(5000);
    for (start, headers, status) in [
        (format!("GET /{long}"), String::new(), 404),
        ("GET /v1/models".into(), format!("host: {long}\r\n"), 403),
        (format!("{} /v1/completions", &long[..200].to_uppercase()), json.into(), 405),
        (write.into(), format!("content-type: {long}\r\n"), 415),
    ] {
        let host = if headers.starts_with("host") { "" } else { "host: localhost\r\n" };
        let (found, _, body) =
            open.raw(format!("{start} HTTP/1.1\r\nconnection: close\r\n{host}{headers}\r\n").as_bytes());
        let said = body;
        assert!(found == status && said.contains('…') && said.len() < 400, "{found} {said}");
    }
    let head = large_head(write, json).replace("localhost", "evil.example");
    assert_eq!(open.raw(head.as_bytes()).0, 403);
}

#[test]
fn a_refused_client_that_goes_on_sending_reads_why() {
    let server = with_key(|_| {});
    for _ in 0..20 {
        let (status, told) = server.post_bytes("/v1/completions", &vec![b' '; 3 << 20], "");
        assert!(status == 401 && told.contains("invalid_api_key"), "{status} {told}");
    }
    // a body that is not read is no request either
    let inner = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(50);
    let mut all = Vec::new();
    let request = post("/v1/completions", inner.as_bytes(), "");
    let kept = String::from_utf8(request).unwrap().replace("connection: close", "connection: keep-alive");
    server.send(kept.as_bytes()).read_to_end(&mut all).unwrap();
    let all = String::from_utf8(all).unwrap();
    assert!(all.starts_with("HTTP/1.1 401") && all.matches("HTTP/1.1").count() == 1, "{all}");
}

#[test]
fn a_client_that_waits_to_be_asked_for_its_body_is_asked_if_it_may_write() {
    let server = with_key(|_| {});
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let request = |more: &str| {
        let all = post("/v1/completions", body.as_bytes(), &format!("expect: 100-continue\r\n{more}"));
        all[..all.len() - body.len()].to_vec()
    };
    assert_eq!(server.raw(&request("")).0, 401, "the answer, and no `100 Continue` before it");
    let mut stream = server.send(&request("authorization: Bearer secret\r\n"));
    let mut first = [0; 25];
    stream.read_exact(&mut first).unwrap();
    assert_eq!(std::str::from_utf8(&first).unwrap(), "HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).unwrap();
    assert_eq!(answer(stream).0, 200);
}

#[test]
fn bodies_without_an_end_are_ended() {
    let server = served(|settings| {
        settings.limits.body_bytes = 1 << 16;
        settings.limits.body = Duration::from_millis(500);
    });
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                transfer-encoding: chunked\r\n\r\n";
    let chunk = format!("1000\r\n{}\r\n", " ".repeat(0x1000));
    let mut stream = server.send(head.as_bytes());
    // more than is taken, and no more than is passed over
    (0..20).for_each(|_| drop(stream.write_all(chunk.as_bytes())));
    assert_eq!(answer(stream).0, 413);
    // the same by a client that was asked to go on
    let mut stream = server.send(head.replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n").as_bytes());
    let mut asked = [0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
    stream.read_exact(&mut asked).unwrap();
    assert_eq!(&asked, b"HTTP/1.1 100 Continue\r\n\r\n");
    (0..20).for_each(|_| drop(stream.write_all(chunk.as_bytes())));
    assert_eq!(answer(stream).0, 413);
    let mut stream = server.send(head.as_bytes());
    stream.write_all(chunk.as_bytes()).unwrap(); // and no more
    assert_eq!(answer(stream).0, 408);
    let stream = server.send([head, "zz\r\nno chunk\r\n"].concat().as_bytes());
    assert_eq!(answer(stream).0, 400);
    let whole = format!("{head}1c\r\n{}\r\n0\r\n\r\n", r#"{"prompt":"a","max_tokens":1"#);
    assert_eq!(server.raw(whole.as_bytes()).0, 400, "half an object");
}

#[test]
fn all_bodies_together_are_bounded() {
    let server = served(|settings| {
        (settings.limits.body_bytes, settings.limits.bodies_bytes) = (1 << 20, 1 << 20);
        settings.limits.body = Duration::from_secs(3600);
    });
    // one holds nearly all the room with a body that is not whole yet
    let body = [json!({"prompt": "a", "max_tokens": 1}).to_string(), " ".repeat(1 << 20)].concat();
    let request = post("/v1/completions", &body.as_bytes()[..1 << 20], "");
    let start = Instant::now();
    let other = json!({"prompt": "a", "max_tokens": 1, "stop": "x".repeat(40_000)}).to_string();
    let mut held = loop {
        let held = server.send(&request[..request.len() - 10]);
        std::thread::sleep(Duration::from_millis(50));
        // whoever comes second is refused; where that is the large one, it is tried again
        if server.post_bytes("/v1/completions", other.as_bytes(), "").0 == 503 {
            break held;
        }
        assert!(start.elapsed() < Duration::from_secs(300), "the other body is taken all the same");
    };
    held.write_all(&request[request.len() - 10..]).unwrap();
    assert_eq!(answer(held).0, 200);
    assert_ne!(server.post_bytes("/v1/completions", other.as_bytes(), "").0, 503, "there is room again");
}

#[test]
fn requests_that_do_not_wait_for_answers_get_them_in_order() {
    let server = served(|_| {});
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").into_bytes();
    let body = json!({"prompt": "a", "max_tokens": 2, "ignore_eos": true}).to_string();
    let write = post("/v1/completions", body.as_bytes(), "");
    let mut all = String::new();
    let requests = [get("/health"), get("/v1/models"), get("/nowhere"), write].concat();
    server.send(&requests).read_to_string(&mut all).unwrap();
    let found: Vec<&str> = all.split("HTTP/1.1 ").skip(1).collect();
    assert_eq!(found.len(), 4, "{all}");
    for (found, (status, text)) in found.iter().zip([
        ("200", "\"ok\""),
        ("200", "small/model"),
        ("404", "unknown_url"),
        ("200", "text_completion"),
    ]) {
        assert!(found.starts_with(status) && found.contains(text), "{found}");
    }
}

#[test]
fn heads_that_are_odd() {
    let server = served(|_| {});
    let headers = |count: usize| (0..count).map(|i| format!("x-{i}: y\r\n")).collect::<String>();
    assert_eq!(server.get_with("/v1/models", &headers(60)).0, 200);
    let (status, ..) = server.get_with("/v1/models", &headers(3000));
    assert!(matches!(status, 0 | 400 | 431), "{status}");
    // HTTP/1.0 has no chunks: the end of an answer is the end of the connection
    assert_eq!(server.raw(b"GET /health HTTP/1.0\r\n\r\n").0, 200);
    assert_eq!(server.raw(b"GET /v1/models HTTP/1.0\r\n\r\n").0, 403, "no host");
    let body = json!({"prompt": "a", "max_tokens": 5, "stream": true, "ignore_eos": true}).to_string();
    let old = String::from_utf8(post("/v1/completions", body.as_bytes(), "")).unwrap();
    let (status, head, text) = server.raw(old.replace("HTTP/1.1", "HTTP/1.0").as_bytes());
    assert!(
        status == 200 && !head.contains("chunked") && text.ends_with("data: [DONE]\n\n"),
        "{head} {text}"
    );
    for (path, expected) in [("/\0", 400), ("/v1/\0models", 400), ("/%00", 404), ("/v1/models/%00", 404)] {
        assert_eq!(server.get(path).0, expected, "{path:?}");
    }
    let twice = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}";
    assert_eq!(server.raw(twice).0, 400);
    let name = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: \xff\xfe\r\n\r\n";
    assert_eq!(server.raw(name).0, 200, "bytes that are no text in a header that nobody reads");
}

#[test]
fn mutated_heads_never_fail_the_server() {
    let server = served(|settings| {
        let limits = &mut settings.limits;
        [limits.head, limits.body, limits.stalled] = [Duration::from_millis(200); 3];
    });
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let good = post("/v1/completions", body.as_bytes(), "accept: */*\r\nauthorization: Bearer x\r\n");
    let at = server.at;
    let threads: Vec<_> = (0..8_u64)
        .map(|thread| {
            let good = good.clone();
            std::thread::spawn(move || {
                let (server, mut state) = (Server::elsewhere(at), 977 * thread + 1);
                let mut random = |below: usize| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 33) as usize % below
                };
                for round in 0..50 {
                    let mut bytes = good.clone();
                    for _ in 0..1 + random(4) {
                        let at = random(bytes.len());
                        match random(5) {
                            0 => bytes[at] = random(256) as u8,
                            1 => bytes.truncate(at.max(1)),
                            2 => bytes.insert(at, b"\r\n\0: ;,/%\x7f"[random(10)]),
                            3 => bytes.extend_from_within(at..),
                            _ => drop(bytes.remove(at)),
                        }
                    }
                    let (status, _, told) = server.raw(&bytes);
                    let text = String::from_utf8_lossy(&bytes);
                    assert!(
                        matches!(status, 0 | 200 | 400..=499 | 505),
                        "{thread} {round}: {status} {told} for {text:?}"
                    );
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    server.falls_to("ironhorse_connections", 1);
    assert_eq!(server.metric("ironhorse_answering"), 0);
}
