//! A server over a small model: the schema, batching, limits, clients that misbehave, and how it ends.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

mod client;

use client::answer;
use ironhorse_cpu::CpuEngine;
use ironhorse_serve::http::Limits;
use ironhorse_serve::{Access, Model, Settings, listen, run};
use ironhorse_text::chat::Chat;
use ironhorse_text::tokenizer::Tokenizer;
use ironhorse_train::generate::codec::Codec;
use ironhorse_train::generate::sample::Sampler;
use ironhorse_train::generate::{Request, generate};
use ironhorse_train::model::ModelConfig;
use ironhorse_train::session::{Serving, Session, SessionSpec};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SIZES: &str =
    "kind=qwen3,hidden=32,layers=2,heads=2,kv_heads=1,head_dim=16,ffn=40,vocab=256,context=200";
const TEMPLATE: &str = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

fn session(spec: &SessionSpec) -> Session {
    let config = ModelConfig::parse(SIZES).unwrap();
    let mut session = Session::new(Box::new(CpuEngine::new(1)), config, spec).unwrap();
    session.init(5).unwrap();
    session
}

/// A server in a thread of its own.
struct Server {
    at: SocketAddr,
    signal: Arc<AtomicUsize>,
    thread: Option<JoinHandle<Result<(), ironhorse_serve::Error>>>,
}

impl Server {
    fn new(change: impl FnOnce(&mut Settings)) -> Self {
        Self::with_rows(4, change)
    }

    fn with_rows(rows: usize, change: impl FnOnce(&mut Settings)) -> Self {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let (at, signal) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let mut settings = Settings::default();
        change(&mut settings);
        let flag = signal.clone();
        let thread = std::thread::spawn(move || {
            let serving = Serving { sequences: rows, context: None, tokens: 16, all_logits: true };
            let mut session = session(&SessionSpec { serving: Some(serving), ..SessionSpec::default() });
            let folder = std::env::temp_dir().join(format!("ironhorse-serve-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            let file = folder.join("chat.jinja");
            std::fs::write(&file, TEMPLATE).unwrap();
            let model = Model {
                name: "small/model".into(),
                tokenizer: Tokenizer::bytes(),
                chat: Some(Chat::open("bytes", Some(&file)).unwrap()),
                context: 200,
                vocab: 256,
                most_tokens: usize::MAX,
            };
            run(listener, &mut session, model, settings, &flag)
        });
        Self { at, signal, thread: Some(thread) }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends bytes as they are; gives the status, the head and the body.
    fn raw(&self, request: &[u8]) -> (u16, String, String) {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        answer(stream)
    }

    fn get(&self, path: &str) -> (u16, String, String) {
        self.raw(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").as_bytes())
    }

    fn post_bytes(&self, path: &str, body: &[u8], more: &str) -> (u16, String) {
        let head = post_head(path, body.len(), more);
        let (status, _, body) = self.raw(&[head.as_bytes(), body].concat());
        (status, body)
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.post_bytes(path, body.to_string().as_bytes(), "");
        (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}")))
    }

    fn completion(&self, body: Value) -> Value {
        let (status, body) = self.post("/v1/completions", &body);
        assert_eq!(status, 200, "{body}");
        body
    }

    fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").2;
        let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '));
        line.unwrap_or_else(|| panic!("{name} is not in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Asks it to end, and waits.
    fn end(mut self) -> Duration {
        let start = Instant::now();
        self.signal.store(15, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap().unwrap();
        start.elapsed()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal.store(15, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.unwrap().unwrap();
            }
        }
    }
}

fn post_head(path: &str, length: usize, more: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n{more}\r\n"
    )
}

/// What `generate` writes after a prompt, with the same settings.
fn alone(prompt: &[u32], tokens: usize, sampler: Sampler) -> String {
    let mut session = session(&SessionSpec { decode: Some(1), ..SessionSpec::default() });
    let tokenizer = Tokenizer::bytes();
    let stop = Codec::ends(&tokenizer);
    let request = Request { prompt, vocab: 256, tokens, context: None, stop: &stop, sampler };
    let written = generate(&mut session, &request, |_| Ok(())).unwrap();
    tokenizer.decode_lossy(&written).unwrap()
}

#[test]
fn answers_are_those_of_generate_however_many_ask() {
    let server = Server::new(|_| {});
    let at = server.at;
    let prompt = |i: usize| format!("question {i} {}", "of some length ".repeat(i % 5));
    let clients: Vec<_> = (0..12)
        .map(|i| {
            std::thread::spawn(move || {
                let server = Server { at, signal: Arc::default(), thread: None };
                std::thread::sleep(Duration::from_millis(7 * i as u64));
                let body = json!({
                    "model": "small/model", "prompt": prompt(i), "max_tokens": 5 + 3 * i, "seed": i, "temperature": 0.9,
                    "top_k": 50, "top_p": 0.9,
                });
                server.completion(body)["choices"][0]["text"].as_str().unwrap().to_owned()
            })
        })
        .collect();
    for (i, client) in clients.into_iter().enumerate() {
        let sampler = Sampler { temperature: 0.9, top_k: Some(50), top_p: Some(0.9), seed: i as u64 };
        let ids = Tokenizer::bytes().prompt(&prompt(i)).unwrap();
        assert_eq!(client.join().unwrap(), alone(&ids, 5 + 3 * i, sampler), "client {i}");
    }
    assert!(server.metric("ironhorse_completion_tokens_total") > 0);
    assert_eq!(server.metric("ironhorse_sequences"), 0);
    assert_eq!(server.metric("ironhorse_answering"), 0);
}

#[test]
fn completions_have_openais_schema() {
    let server = Server::new(|_| {});
    let body =
        json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 3, "echo": true});
    let answer = server.completion(body);
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "small/model");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    let choice = &answer["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("Once upon a time"));
    let written = answer["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    let logprobs = &choice["logprobs"];
    let count = |name: &str| logprobs[name].as_array().unwrap().len();
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(count(name), 16 + written, "{name}: {logprobs}");
    }
    assert_eq!(logprobs["tokens"][1], "n");
    assert_eq!(logprobs["text_offset"][5], 5);
    assert!(logprobs["token_logprobs"][3].as_f64().unwrap() < 0.0);
    assert!(logprobs["top_logprobs"][4].as_object().unwrap().len() >= 3);
    let total = &answer["usage"]["total_tokens"];
    assert_eq!(*total, answer["usage"]["prompt_tokens"].as_u64().unwrap() + written as u64);

    // tokens as the prompt: nothing is put before them, so the first follows nothing
    let ids: Vec<u8> = b"Once".to_vec();
    let body = json!({"prompt": [ids, b"upon".to_vec()], "max_tokens": 0, "logprobs": 0, "echo": true});
    let answer = server.completion(body);
    assert_eq!(answer["choices"][1]["text"], "upon");
    assert_eq!(answer["choices"][1]["index"], 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 4);
    assert!(answer["choices"][0]["logprobs"]["token_logprobs"][0].is_null());
    assert_eq!(answer["usage"]["prompt_tokens"], 8);
    assert_eq!(answer["usage"]["completion_tokens"], 0);

    // choices have seeds of their own, the same every time
    let body = json!({"prompt": "Once", "max_tokens": 20, "seed": 3, "n": 3});
    let (first, again) = (server.completion(body.clone()), server.completion(body));
    let texts = |answer: &Value| -> Vec<Value> {
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect()
    };
    assert_eq!(texts(&first), texts(&again));
    assert!(texts(&first)[0] != texts(&first)[1]);
    assert_eq!(first["usage"]["prompt_tokens"], Tokenizer::bytes().prompt("Once").unwrap().len());
}

#[test]
fn stop_strings_end_a_text_before_them() {
    let server = Server::new(|_| {});
    let ask = |stop: Value| {
        let body =
            json!({"prompt": "Once", "max_tokens": 40, "temperature": 0, "ignore_eos": true, "stop": stop});
        server.completion(body)
    };
    let whole = ask(Value::Null);
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    let characters: Vec<char> = text.chars().collect();
    let stop: String = characters[5..8].iter().collect();
    let stopped = ask(json!(["never in it, that is sure", stop]));
    let expected = text.split(stop.as_str()).next().unwrap();
    assert_eq!(stopped["choices"][0]["text"], expected);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(stopped["usage"]["completion_tokens"].as_u64().unwrap() < 40);
}

#[test]
fn streams_add_up_to_the_whole() {
    let server = Server::new(|_| {});
    let chat = json!({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
                      "max_tokens": 30, "seed": 4, "temperature": 1.2, "logprobs": true, "top_logprobs": 2});
    for (path, mut body) in [
        ("/v1/chat/completions", chat),
        ("/v1/completions", json!({"prompt": "Hi", "max_tokens": 30, "seed": 4, "n": 2, "echo": true})),
    ] {
        let (_, whole) = server.post(path, &body);
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let (status, text) = server.post_bytes(path, body.to_string().as_bytes(), "");
        assert_eq!(status, 200);
        let mut lines: Vec<&str> = text.split("\n\n").filter(|line| !line.is_empty()).collect();
        assert_eq!(lines.pop(), Some("data: [DONE]"));
        let events =
            lines.iter().map(|line| serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap());
        let mut events: Vec<Value> = events.collect();
        let usage = events.pop().unwrap();
        assert_eq!((&usage["usage"], &usage["choices"]), (&whole["usage"], &json!([])));
        let is_chat = path.contains("chat");
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let own: Vec<&Value> = events
                .iter()
                .map(|event| &event["choices"][0])
                .filter(|choice| choice["index"] == index)
                .collect();
            let piece =
                |choice: &&Value| if is_chat { &choice["delta"]["content"] } else { &choice["text"] }.clone();
            let text: String =
                own.iter().filter_map(|choice| piece(choice).as_str().map(str::to_owned)).collect();
            let expected = if is_chat { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(*expected, text);
            assert_eq!(own.last().unwrap()["finish_reason"], choice["finish_reason"]);
            if is_chat {
                assert_eq!(own[0]["delta"]["role"], "assistant");
                let scored: usize = own
                    .iter()
                    .filter_map(|choice| choice["logprobs"]["content"].as_array())
                    .map(Vec::len)
                    .sum();
                assert_eq!(scored, choice["logprobs"]["content"].as_array().unwrap().len());
                assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 2);
            }
        }
    }
}

#[test]
fn other_paths_and_methods_are_refused() {
    let server = Server::new(|_| {});
    assert_eq!(server.get("/health").0, 200);
    assert!(server.get("/").2.contains("<!doctype html>"));
    assert!(server.get("/").1.contains("content-security-policy"));
    let models: Value = serde_json::from_str(&server.get("/v1/models").2).unwrap();
    assert_eq!(models["data"][0]["id"], "small/model");
    assert_eq!(server.get("/v1/models/small%2Fmodel").0, 200);
    assert_eq!(server.get("/v1/models/small/model").0, 200);
    assert_eq!(server.get("/v1/models/other").0, 404);
    for path in [
        "/etc/passwd",
        "/../../etc/passwd",
        "/v1/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//",
        "/v1",
        "/page.html",
    ] {
        let (status, _, body) = server.get(path);
        assert_eq!(status, 404, "{path}");
        assert!(body.contains("unknown_url") && !body.contains("root:"), "{path}: {body}");
    }
    for (method, path, status) in
        [("POST", "/health", 405), ("GET", "/v1/completions", 405), ("DELETE", "/", 405)]
    {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let (found, head, _) = server.raw(request.as_bytes());
        assert_eq!(found, status, "{method} {path}");
        assert!(head.contains("allow: "), "{head}");
    }
    // CORS is off, and a page of another site cannot ask under its own name
    let (status, head, _) = server.raw(
        b"OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://x\r\nconnection: close\r\n\r\n",
    );
    assert!(status == 405 && !head.contains("access-control"), "{head}");
    let other = b"GET /v1/models HTTP/1.1\r\nhost: evil.example:80\r\nconnection: close\r\n\r\n";
    assert_eq!(server.raw(other).0, 403);
    let body = "{}";
    let plain = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n{body}"
    );
    assert_eq!(server.raw(plain.as_bytes()).0, 415);
}

#[test]
fn keys_and_origins() {
    let server = Server::new(|settings| {
        settings.access = Access {
            api_key: Some("secret".into()),
            cors: Some("https://example.org".into()),
            loopback: false,
        };
    });
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let ask = |header: &str| server.post_bytes("/v1/completions", body.as_bytes(), header).0;
    assert_eq!(ask("authorization: Bearer secret\r\n"), 200);
    for wrong in [
        "",
        "authorization: Bearer secre\r\n",
        "authorization: Bearer secrett\r\n",
        "authorization: secret\r\n",
        "authorization: Basic secret\r\n",
        "authorization: Bearer\r\n",
    ] {
        assert_eq!(ask(wrong), 401, "{wrong}");
    }
    let (_, told) = server.post_bytes("/v1/completions", body.as_bytes(), "");
    assert!(told.contains("authentication_error") && told.contains("invalid_api_key"), "{told}");
    assert_eq!((server.get("/v1/models").0, server.get("/metrics").0), (401, 401));
    assert_eq!((server.get("/health").0, server.get("/").0), (200, 200), "the page asks for the key");
    let (status, head, _) =
        server.raw(b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\norigin: https://example.org\r\nconnection: close\r\n\r\n");
    assert!(status == 204 && head.contains("access-control-allow-origin: https://example.org"), "{head}");
}

#[test]
fn bodies_that_are_wrong_are_errors_not_ends() {
    let server = Server::new(|settings| settings.limits.body_bytes = 4096);
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
    let server = Server::with_rows(1, |settings| settings.queue = 2);
    let long = json!({"prompt": "a", "max_tokens": 199, "ignore_eos": true, "stream": true}).to_string();
    let hold = |server: &Server| {
        let mut stream = server.connect();
        stream
            .write_all(&[post_head("/v1/completions", long.len(), "").as_bytes(), long.as_bytes()].concat())
            .unwrap();
        stream
    };
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
    let start = Instant::now();
    while server.metric("ironhorse_answering") > 0 && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).0, 200);
}

#[test]
fn slow_and_broken_clients_hold_up_nobody() {
    let server = Server::new(|settings| {
        settings.limits = Limits {
            head: Duration::from_millis(1500),
            body: Duration::from_millis(1500),
            stalled: Duration::from_millis(1500),
            ..Limits::default()
        };
    });
    let body = json!({"prompt": "a", "max_tokens": 150, "ignore_eos": true, "stream": true}).to_string();
    let whole = [post_head("/v1/completions", body.len(), "").as_bytes(), body.as_bytes()].concat();
    let mut held = Vec::new();
    for i in 0..50 {
        let mut stream = server.connect();
        match i % 5 {
            0 => {}                                                    // says nothing
            1 => stream.write_all(&whole[..20]).unwrap(),              // half a head
            2 => stream.write_all(&whole[..whole.len() - 5]).unwrap(), // half a body
            3 => stream.write_all(&whole).unwrap(),                    // reads nothing
            _ => {
                stream.write_all(&whole).unwrap();
                let mut first = [0; 10];
                let _ = stream.read(&mut first);
                continue; // and is gone
            }
        }
        held.push(stream);
    }
    let at = server.at;
    let good: Vec<_> = (0..50)
        .map(|i| {
            std::thread::spawn(move || {
                let server = Server { at, signal: Arc::default(), thread: None };
                server.completion(json!({"prompt": "a", "max_tokens": 3, "seed": i}))
            })
        })
        .collect();
    for client in good {
        client.join().unwrap();
    }
    // those that sent half are told or cut off
    std::thread::sleep(Duration::from_millis(2500));
    for (i, stream) in held.into_iter().enumerate() {
        let kind = i % 4;
        let (status, _, _) = answer(stream);
        match kind {
            0 | 1 => assert!(matches!(status, 0 | 408), "{i}: {status}"),
            2 => assert_eq!(status, 408, "{i}"),
            _ => assert_eq!(status, 200, "{i}: its answer was small enough to be kept for it"),
        }
    }
    assert_eq!(server.metric("ironhorse_answering"), 0);
    assert!(server.metric("ironhorse_connections") <= 2);
    server.end();
}

#[test]
fn a_signal_lets_answers_end_and_refuses_new_ones() {
    let server = Server::with_rows(1, |_| {});
    // one row, so that this takes a while
    let body =
        json!({"prompt": "a", "max_tokens": 199, "ignore_eos": true, "stream": true, "n": 30}).to_string();
    let mut stream = server.connect();
    let head = post_head("/v1/completions", body.len(), "");
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).unwrap();
    let mut reader = BufReader::new(stream);
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
