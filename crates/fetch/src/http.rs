//! The HTTP client. A request runs on a thread of its own, so that its caller sees a signal at once, also while a server
//! says nothing.

use crate::watch::STEP;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Whether only the headers are wanted.
    pub head: bool,
    /// The address.
    pub url: String,
    /// The token to send.
    pub token: Option<String>,
    /// The first byte wanted.
    pub from: u64,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The caller stopped.
    Stopped,
    /// The server cannot be reached, and asking again at once will not help.
    Unreachable(String),
    /// The connection was lost or nothing came; worth another try.
    Lost(String),
}

/// What the thread sends: the headers, then the body in parts, then an empty part.
enum Message {
    Head(u16, Vec<(String, String)>),
    Part(Vec<u8>),
    Failed(Failure),
}

/// An answer whose body is still arriving.
pub struct Answer {
    /// The status.
    pub status: u16,
    headers: Vec<(String, String)>,
    messages: Receiver<Message>,
}

impl Answer {
    /// A header by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The next bytes; none at the end.
    pub fn next(&self, stop: &mut dyn FnMut() -> bool) -> Result<Option<Vec<u8>>, Failure> {
        match receive(&self.messages, stop)? {
            Message::Part(bytes) if bytes.is_empty() => Ok(None),
            Message::Part(bytes) => Ok(Some(bytes)),
            Message::Failed(failure) => Err(failure),
            Message::Head(..) => Err(Failure::Lost("two answers".into())),
        }
    }

    /// The whole body, if it is no longer than `most`.
    pub fn all(&self, most: usize, stop: &mut dyn FnMut() -> bool) -> Result<Vec<u8>, Failure> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next(stop)? {
            all.extend_from_slice(&bytes);
            if all.len() > most {
                return Err(Failure::Unreachable(format!("the answer has more than {most} bytes")));
            }
        }
        Ok(all)
    }
}

fn receive(messages: &Receiver<Message>, stop: &mut dyn FnMut() -> bool) -> Result<Message, Failure> {
    loop {
        match messages.recv_timeout(STEP) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Timeout) if stop() => return Err(Failure::Stopped),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Failure::Lost("the request ended".into())),
        }
    }
}

#[cfg(feature = "http")]
pub use client::Client;

#[cfg(feature = "http")]
mod client {
    use super::{Answer, Failure, Message, Request, receive};
    use crate::Settings;
    use std::io::{ErrorKind, Read};
    use std::sync::mpsc::{SyncSender, sync_channel};
    use std::time::Duration;
    use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
    use ureq::{Agent, Proxy};

    /// Bytes of one part of a body.
    const PART: usize = 1 << 18;
    /// Parts that may wait for the disk.
    const WAITING: usize = 8;
    /// How long a connection may take, and how long a server may say nothing.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Connections for https and http, which may have different proxies.
    pub struct Client {
        https: Agent,
        http: Agent,
    }

    impl Client {
        /// A client with the proxies and certificates of the settings.
        pub fn new(settings: &Settings) -> Result<Self, String> {
            let roots = match &settings.certificates {
                Some(path) => certificates(path)?,
                None => RootCerts::WebPki,
            };
            let agent = |proxy: &Option<String>| -> Result<Agent, String> {
                let proxy = proxy.as_deref().map(|proxy| with_exceptions(proxy, &settings.proxies.none));
                let config = Agent::config_builder()
                    .http_status_as_error(false)
                    .max_redirects(0)
                    .max_redirects_will_error(false)
                    .proxy(proxy.transpose()?)
                    .tls_config(TlsConfig::builder().root_certs(roots.clone()).build())
                    .user_agent(concat!("ironhorse/", env!("CARGO_PKG_VERSION")))
                    // a length that is that of the file, and bytes that can be hashed
                    .accept_encoding("identity")
                    .timeout_connect(Some(PATIENCE))
                    .timeout_resolve(Some(PATIENCE))
                    .timeout_per_read(Some(PATIENCE))
                    .timeout_per_write(Some(PATIENCE));
                Ok(config.build().new_agent())
            };
            Ok(Self { https: agent(&settings.proxies.https)?, http: agent(&settings.proxies.http)? })
        }

        /// Sends the request and waits for the headers of the answer.
        pub fn send(&self, request: Request, stop: &mut dyn FnMut() -> bool) -> Result<Answer, Failure> {
            let agent = if request.url.starts_with("https:") { &self.https } else { &self.http }.clone();
            let (sender, messages) = sync_channel(WAITING);
            let thread = std::thread::Builder::new().name("fetch".into());
            let started = thread.spawn(move || {
                if let Err(failure) = run(&agent, &request, &sender) {
                    let _ = sender.send(Message::Failed(failure)); // the caller may have gone
                }
            });
            started.map_err(|error| Failure::Unreachable(format!("no thread can be started: {error}")))?;
            match receive(&messages, stop)? {
                Message::Head(status, headers) => Ok(Answer { status, headers, messages }),
                Message::Failed(failure) => Err(failure),
                Message::Part(_) => Err(Failure::Lost("an answer without headers".into())),
            }
        }
    }

    fn run(agent: &Agent, request: &Request, sender: &SyncSender<Message>) -> Result<(), Failure> {
        let mut builder = if request.head { agent.head(&request.url) } else { agent.get(&request.url) };
        if let Some(token) = &request.token {
            builder = builder.header("authorization", format!("Bearer {token}"));
        }
        if request.from > 0 {
            builder = builder.header("range", format!("bytes={}-", request.from));
        }
        let answer = builder.call().map_err(failure)?;
        let text = |value: &ureq::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        let headers = answer.headers().iter().map(|(name, value)| (name.as_str().to_owned(), text(value)));
        if sender.send(Message::Head(answer.status().as_u16(), headers.collect())).is_err() {
            return Ok(());
        }
        let mut body = answer.into_body().into_reader();
        loop {
            let mut part = vec![0; PART];
            let count = body.read(&mut part).map_err(lost)?;
            part.truncate(count);
            // nobody reads on: the connection ends with this thread
            if sender.send(Message::Part(part)).is_err() || count == 0 {
                return Ok(());
            }
        }
    }

    fn failure(error: ureq::Error) -> Failure {
        match error {
            // a connection that was there and is lost; all else, such as a name that nobody knows, stays as it is
            ureq::Error::Io(error) => match error.kind() {
                ErrorKind::BrokenPipe
                | ErrorKind::ConnectionAborted
                | ErrorKind::ConnectionReset
                | ErrorKind::Interrupted
                | ErrorKind::TimedOut
                | ErrorKind::UnexpectedEof
                | ErrorKind::WouldBlock => lost(error),
                _ => Failure::Unreachable(error.to_string()),
            },
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                Failure::Unreachable(error.to_string())
            }
            ureq::Error::Timeout(_) | ureq::Error::Protocol(_) => Failure::Lost(error.to_string()),
            other => Failure::Unreachable(other.to_string()),
        }
    }

    fn lost(error: std::io::Error) -> Failure {
        Failure::Lost(error.to_string())
    }

    fn certificates(path: &std::path::Path) -> Result<RootCerts, String> {
        let wrong = |error: &dyn std::fmt::Display| {
            format!("{}: cannot read the certificates: {error}", path.display())
        };
        let bytes = std::fs::read(path).map_err(|error| wrong(&error))?;
        let mut found = Vec::new();
        for item in parse_pem(&bytes) {
            if let PemItem::Certificate(certificate) = item.map_err(|error| wrong(&error))? {
                found.push(certificate);
            }
        }
        if found.is_empty() {
            Err(wrong(&"the file contains no certificate in PEM format"))
        } else {
            Ok(RootCerts::new_with_certs(&found))
        }
    }

    /// A proxy with the hosts that are reached without it. A name means its subdomains too, as in curl.
    fn with_exceptions(proxy: &str, none: &str) -> Result<Proxy, String> {
        let wrong = |error: ureq::Error| format!("the proxy of the environment cannot be used: {error}");
        let parsed = Proxy::new(proxy).map_err(wrong)?;
        let mut builder = Proxy::builder(parsed.protocol())
            .host(parsed.host())
            .port(parsed.port())
            .resolve_target(parsed.resolve_target());
        if let Some(user) = parsed.username() {
            builder = builder.username(user);
        }
        if let Some(password) = parsed.password() {
            builder = builder.password(password);
        }
        for host in none.split(',').map(str::trim).filter(|host| !host.is_empty()) {
            builder = builder.no_proxy(host);
            if !host.starts_with(['.', '*']) {
                builder = builder.no_proxy(&format!(".{host}"));
            }
        }
        builder.build().map_err(wrong)
    }
}

/// The client of a program without the feature `http`: it fetches nothing.
#[cfg(not(feature = "http"))]
pub struct Client;

#[cfg(not(feature = "http"))]
impl Client {
    pub fn new(_settings: &crate::Settings) -> Result<Self, String> {
        Ok(Self)
    }

    pub fn send(&self, _request: Request, _stop: &mut dyn FnMut() -> bool) -> Result<Answer, Failure> {
        Err(Failure::Unreachable("this program was built without the feature `fetch`".into()))
    }
}
