//! A server over a small model: the schema, batching, paths and keys.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

mod common;

use common::Server;
use common::model::{served, session};
use ironhorse_serve::Access;
use ironhorse_text::tokenizer::Tokenizer;
use ironhorse_train::generate::codec::Codec;
use ironhorse_train::generate::sample::Sampler;
use ironhorse_train::generate::{Request, generate};
use ironhorse_train::session::SessionSpec;
use serde_json::{Value, json};
use std::time::Duration;

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
    let server = served(|_| {});
    let at = server.at;
    let prompt = |i: usize| format!("question {i} {}", "of some length ".repeat(i % 5));
    let clients: Vec<_> = (0..12)
        .map(|i| {
            std::thread::spawn(move || {
                let server = Server::elsewhere(at);
                std::thread::sleep(Duration::from_millis(7 * i as u64));
                let body = json!({
                    "model": "small/model", "prompt": prompt(i), "max_tokens": 5 + 3 * i, "seed": i, "temperature": 0.9,
                    "top_k": 50, "top_p": 0.9,
                });
                server.completion(&body)["choices"][0]["text"].as_str().unwrap().to_owned()
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
    let server = served(|_| {});
    let body =
        json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 3, "echo": true});
    let answer = server.completion(&body);
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
    let answer = server.completion(&body);
    assert_eq!(answer["choices"][1]["text"], "upon");
    assert_eq!(answer["choices"][1]["index"], 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 4);
    assert!(answer["choices"][0]["logprobs"]["token_logprobs"][0].is_null());
    assert_eq!(answer["usage"]["prompt_tokens"], 8);
    assert_eq!(answer["usage"]["completion_tokens"], 0);

    // choices have seeds of their own, the same every time
    let body = json!({"prompt": "Once", "max_tokens": 20, "seed": 3, "n": 3});
    let (first, again) = (server.completion(&body), server.completion(&body));
    let texts = |answer: &Value| -> Vec<Value> {
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect()
    };
    assert_eq!(texts(&first), texts(&again));
    assert!(texts(&first)[0] != texts(&first)[1]);
    assert_eq!(first["usage"]["prompt_tokens"], Tokenizer::bytes().prompt("Once").unwrap().len());
}

#[test]
fn stop_strings_end_a_text_before_them() {
    let server = served(|_| {});
    let ask = |stop: Value| {
        let body =
            json!({"prompt": "Once", "max_tokens": 40, "temperature": 0, "ignore_eos": true, "stop": stop});
        server.completion(&body)
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
    let server = served(|_| {});
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
    let server = served(|_| {});
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
    let server = served(|settings| {
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
