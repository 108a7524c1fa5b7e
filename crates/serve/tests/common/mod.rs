//! A server in a thread of its own, and what a client sends and reads.

#![allow(dead_code)] // every test program uses a part of it

pub mod model;

use ironhorse_serve::{Error, listen};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A server in a thread of its own, which ends with it; or the address of one.
pub struct Server {
    pub at: SocketAddr,
    pub signal: Arc<AtomicUsize>,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Server {
    /// Runs `serve` on a free port until the signal it is given is not 0.
    pub fn start(
        serve: impl FnOnce(TcpListener, &AtomicUsize) -> Result<(), Error> + Send + 'static,
    ) -> Self {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let (at, signal) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let flag = signal.clone();
        let thread = Some(std::thread::spawn(move || serve(listener, &flag)));
        Self { at, signal, thread }
    }

    /// A server that somebody else runs.
    pub fn elsewhere(at: SocketAddr) -> Self {
        Self { at, signal: Arc::default(), thread: None }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    /// A connection on which these bytes were sent.
    pub fn send(&self, request: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let _ = stream.write_all(request); // a server that refuses may close first
        stream
    }

    /// Sends bytes as they are; gives the status, the head and the body.
    pub fn raw(&self, request: &[u8]) -> (u16, String, String) {
        answer(self.send(request))
    }

    pub fn get_with(&self, path: &str, more: &str) -> (u16, String, String) {
        let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{more}\r\n");
        self.raw(head.as_bytes())
    }

    pub fn get(&self, path: &str) -> (u16, String, String) {
        self.get_with(path, "")
    }

    pub fn json(&self, path: &str) -> Value {
        let (status, _, body) = self.get(path);
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}"))
    }

    pub fn post_bytes(&self, path: &str, body: &[u8], more: &str) -> (u16, String) {
        let (status, _, body) = self.raw(&post(path, body, more));
        (status, body)
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.post_bytes(path, body.to_string().as_bytes(), "");
        (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}")))
    }

    pub fn completion(&self, body: &Value) -> Value {
        let (status, body) = self.post("/v1/completions", body);
        assert_eq!(status, 200, "{body}");
        body
    }

    pub fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").2;
        let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '));
        line.unwrap_or_else(|| panic!("{name} is not in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until a metric is at most this.
    pub fn falls_to(&self, name: &str, most: u64) {
        let start = Instant::now();
        while self.metric(name) > most {
            assert!(start.elapsed() < Duration::from_secs(300), "{name} stays above {most}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The events of a stream, one at a time.
    pub fn events(&self, path: &str) -> impl Iterator<Item = Value> + use<> {
        let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        let lines = BufReader::new(self.send(head.as_bytes())).lines().map_while(Result::ok);
        lines.filter_map(|line| Some(serde_json::from_str(line.strip_prefix("data: ")?).unwrap()))
    }

    /// Asks it to end, and waits.
    pub fn end(mut self) -> Duration {
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

/// A request to write, with more headers, each with its end of line.
pub fn post(path: &str, body: &[u8], more: &str) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{more}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// The status, the head and the body of an answer.
pub fn answer(stream: TcpStream) -> (u16, String, String) {
    let mut all = Vec::new();
    let _ = BufReader::new(stream).read_to_end(&mut all); // a connection that is cut has told what it has
    let all = String::from_utf8_lossy(&all).into_owned();
    let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let body = match head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_owned(),
    };
    (status, head.to_owned(), body)
}

/// A body without the sizes of its chunks.
fn unchunked(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 || size > rest.len() {
            break;
        }
        out.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    out
}
