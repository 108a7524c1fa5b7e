//! A server that behaves as the hub does, with a second port in the part of the servers that large files come from, and
//! what can go wrong on the way. On this machine only, of the standard library only.

#![allow(dead_code, clippy::unwrap_used, reason = "each test program uses a part")]

use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The commit of every repository here.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong once.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The answer has this status and these headers.
    Status(u16, &'static str),
    /// The connection ends after this many bytes of the body.
    Cut(usize),
    /// The answer is the whole file, whatever part was asked for.
    IgnoreRange,
    /// The body is these bytes; the headers still describe the right ones.
    Wrong(Vec<u8>),
    /// The answer is this many bytes of the body, then nothing more until the server ends.
    Hang(usize),
}

/// A request that came.
#[derive(Clone, Debug)]
pub struct Seen {
    /// "hub" or "cdn".
    pub port: &'static str,
    /// Method and path.
    pub line: String,
    /// Headers by their names in lower case.
    pub headers: HashMap<String, String>,
    /// Bytes of the body that were sent.
    pub sent: usize,
}

#[derive(Default)]
struct State {
    /// Contents by repository ("models/a/b") and path.
    files: BTreeMap<(String, String), Vec<u8>>,
    /// Repositories that were renamed.
    moved: HashMap<String, String>,
    /// What goes wrong with requests whose line contains the key.
    faults: Vec<(String, VecDeque<Fault>)>,
    seen: Vec<Seen>,
    token: Option<String>,
}

/// The server; ends with the process.
#[derive(Clone)]
pub struct Hub {
    state: Arc<Mutex<State>>,
    hub: u16,
    cdn: u16,
}

impl Hub {
    pub fn start() -> Self {
        let [hub, cdn] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let server = Self { state: Arc::default(), hub: port(&hub), cdn: port(&cdn) };
        for (listener, name) in [(hub, "hub"), (cdn, "cdn")] {
            let server = server.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let server = server.clone();
                    std::thread::spawn(move || server.serve(stream, name));
                }
            });
        }
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The address of the hub.
    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.hub)
    }

    /// Adds a file; `repo` is such as "models/a/b".
    pub fn file(&self, repo: &str, path: &str, content: impl Into<Vec<u8>>) {
        self.state().files.insert((repo.into(), path.into()), content.into());
    }

    /// From now on `old` redirects to `new`.
    pub fn moved(&self, old: &str, new: &str) {
        self.state().moved.insert(old.into(), new.into());
    }

    /// From now on the hub wants this token.
    pub fn wants_token(&self, token: &str) {
        self.state().token = Some(token.into());
    }

    /// The next requests whose line contains `key` go wrong in these ways, one after the other.
    pub fn fails(&self, key: &str, faults: impl IntoIterator<Item = Fault>) {
        self.state().faults.push((key.into(), faults.into_iter().collect()));
    }

    /// The requests so far, which are then forgotten.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state().seen)
    }

    fn serve(&self, stream: TcpStream, port: &'static str) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return; // a connection that asked for nothing
            }
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let headers = lines[1..].iter().filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
        let mut words = lines[0].split(' ');
        let line = format!("{} {}", words.next().unwrap(), words.next().unwrap());
        let seen = Seen { port, line, headers, sent: 0 };
        let fault = self.state().faults.iter_mut().find_map(|(key, faults)| {
            if seen.line.contains(key.as_str()) { faults.pop_front() } else { None }
        });
        self.answer(stream, seen, fault);
    }

    fn answer(&self, mut stream: TcpStream, mut seen: Seen, fault: Option<Fault>) {
        let (method, path) = seen.line.split_once(' ').unwrap();
        let is_head = method == "HEAD";
        let (mut head, mut body) = match &fault {
            Some(Fault::Status(status, headers)) => (format!("HTTP/1.1 {status} X\r\n{headers}"), Vec::new()),
            _ if seen.port == "cdn" => self.of_cdn(path),
            _ => self.of_hub(path, seen.headers.get("authorization").map(String::as_str)),
        };
        if let Some(Fault::Wrong(bytes)) = &fault {
            body.clone_from(bytes);
        }
        let range = seen.headers.get("range").filter(|_| !matches!(fault, Some(Fault::IgnoreRange)));
        if let Some(range) = range.filter(|_| head.starts_with("HTTP/1.1 200")) {
            let from: usize = range.strip_prefix("bytes=").unwrap().trim_end_matches('-').parse().unwrap();
            let all = body.len();
            if from >= all {
                (head, body) = (format!("HTTP/1.1 416 X\r\nContent-Range: bytes */{all}\r\n"), Vec::new());
            } else {
                head = head.replacen("200", "206", 1)
                    + &format!("Content-Range: bytes {from}-{}/{all}\r\n", all - 1);
                body.drain(..from);
            }
        }
        if !head.contains("Content-Length") {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        head += "Connection: close\r\n\r\n";
        let count = match fault {
            Some(Fault::Cut(count) | Fault::Hang(count)) => count.min(body.len()),
            _ => body.len(),
        };
        seen.sent = if is_head { 0 } else { count };
        let count = seen.sent;
        self.state().seen.push(seen); // before the client can have its answer
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(&body[..count]).and_then(|()| stream.flush());
        if matches!(fault, Some(Fault::Hang(_))) {
            std::thread::sleep(Duration::from_secs(3600)); // the test ends before
        }
    }

    fn of_cdn(&self, path: &str) -> (String, Vec<u8>) {
        let sha = path.trim_start_matches("/blob/").split('?').next().unwrap().to_owned();
        let state = self.state();
        match state.files.values().find(|content| sha256(content) == sha) {
            Some(content) => (format!("HTTP/1.1 200 OK\r\nETag: \"{}-cdn\"\r\n", &sha[..8]), content.clone()),
            None => ("HTTP/1.1 404 X\r\n".into(), Vec::new()),
        }
    }

    fn of_hub(&self, path: &str, token: Option<&str>) -> (String, Vec<u8>) {
        let state = self.state();
        let refusal = |status: u16, code: &str| {
            (
                format!(
                    "HTTP/1.1 {status} X\r\nX-Error-Code: {code}\r\nX-Error-Message: {code} of the test\r\n"
                ),
                Vec::new(),
            )
        };
        if let Some((old, new)) = state.moved.iter().find(|(old, _)| repo_of(path) == Some(old.as_str())) {
            let name = |repo: &str| repo.strip_prefix("models/").unwrap_or(repo).to_owned();
            return (
                format!("HTTP/1.1 307 X\r\nLocation: {}\r\n", path.replacen(&name(old), &name(new), 1)),
                Vec::new(),
            );
        }
        // files outside the repositories, as of GitHub
        if let Some(content) = state.files.get(&(String::new(), path.to_owned())) {
            return ("HTTP/1.1 200 OK\r\n".into(), content.clone());
        }
        if state.token.as_deref().is_some_and(|wanted| token != Some(format!("Bearer {wanted}").as_str())) {
            return refusal(401, "GatedRepo");
        }
        let Some(repo) = repo_of(path).filter(|repo| state.files.keys().any(|(known, _)| known == repo))
        else {
            return refusal(if token.is_some() { 404 } else { 401 }, "RepoNotFound");
        };
        if path.starts_with("/api/") {
            let revision = path.rsplit('/').next().unwrap();
            if revision != "main" && revision != COMMIT {
                return refusal(404, "RevisionNotFound");
            }
            let names = state.files.keys().filter(|(known, _)| known == repo);
            let siblings: Vec<_> = names.map(|(_, name)| format!("{{\"rfilename\":{name:?}}}")).collect();
            let json = format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", siblings.join(","));
            return ("HTTP/1.1 200 OK\r\n".into(), json.into_bytes());
        }
        let name = path
            .split_once("/resolve/")
            .and_then(|(_, rest)| rest.split_once('/'))
            .map_or("", |(_, name)| name);
        let Some(content) = state.files.get(&(repo.to_owned(), name.replace("%20", " "))) else {
            return refusal(404, "EntryNotFound");
        };
        let commit = format!("X-Repo-Commit: {COMMIT}\r\n");
        if name.ends_with(".safetensors") || name.ends_with(".parquet") {
            let (sha, size) = (sha256(content), content.len());
            let linked =
                format!("X-Linked-Etag: \"{sha}\"\r\nX-Linked-Size: {size}\r\nETag: \"not-this\"\r\n");
            let location = format!("Location: http://127.0.0.1:{}/blob/{sha}?signed=yes\r\n", self.cdn);
            return (
                format!("HTTP/1.1 302 Found\r\n{commit}{linked}{location}"),
                b"Found. Redirecting".to_vec(),
            );
        }
        (format!("HTTP/1.1 200 OK\r\n{commit}ETag: \"{}\"\r\n", git_blob(content)), content.clone())
    }
}

/// "models/a/b" of an address.
fn repo_of(path: &str) -> Option<&str> {
    if let Some(rest) = path.strip_prefix("/api/") {
        return rest.split_once("/revision/").map(|(repo, _)| repo);
    }
    let (repo, _) = path.split_once("/resolve/")?;
    let repo = repo.strip_prefix('/')?;
    // leaked: a few bytes in a test
    Some(if repo.starts_with("datasets/") {
        repo
    } else {
        Box::leak(format!("models/{repo}").into_boxed_str())
    })
}

pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

pub fn git_blob(bytes: &[u8]) -> String {
    format!("{:x}", Sha1::new_with_prefix(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}
