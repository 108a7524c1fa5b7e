//! The paths, and who may use them.

use crate::answers::Answers;
use crate::error::ApiError;
use crate::http::{BadBody, Handler, Open, Request, Response, Source, answer, events, only};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::schema::{Asked, no_model};
use crate::worker::{Busy, Queue, Told, Work};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::sync::mpsc;

/// The chat page.
const PAGE: &str = include_str!("page.html");
/// The page may load nothing from elsewhere.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                           base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Who may ask.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// What a client must send as its bearer token.
    pub api_key: Option<String>,
    /// The origin of pages, other than our own, that may ask; `*` for all.
    pub cors: Option<String>,
    /// Whether only this machine can reach us: then names of other machines are refused, which a web page that knows our port could
    /// otherwise give us.
    pub loopback: bool,
}

/// OpenAI's schema over a queue of work.
pub struct Api {
    model: Arc<Model>,
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
    access: Access,
    open: Open,
    draining: AtomicBool,
    /// Requests that are being answered.
    answering: Arc<AtomicUsize>,
    number: AtomicU64,
    started: Instant,
}

/// Counts a request while it is answered.
struct Answering(Arc<AtomicUsize>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Api {
    /// Of a model whose work goes to this queue.
    pub fn new(model: Model, queue: Arc<Queue>, metrics: Arc<Metrics>, access: Access, open: Open) -> Self {
        Self {
            model: Arc::new(model),
            queue,
            metrics,
            access,
            open,
            draining: AtomicBool::new(false),
            answering: Arc::default(),
            number: AtomicU64::new(0),
            started: Instant::now(),
        }
    }

    /// Takes no new requests from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Requests that are being answered.
    pub fn answering(&self) -> usize {
        self.answering.load(Ordering::Relaxed)
    }

    /// The answer, and the path it is counted under.
    async fn route(&self, request: Request) -> (&'static str, Result<Response, ApiError>) {
        let get = |path, answer: Result<Response, ApiError>| match request.method {
            Method::GET | Method::HEAD => (path, answer),
            _ => (path, Ok(only(no_method(&request).response(), "GET, HEAD"))),
        };
        match request.path.as_str() {
            "/" => get("/", Ok(self.page())),
            "/health" => get("/health", Ok(self.health())),
            "/metrics" => get("/metrics", self.allowed(&request).map(|()| self.told_metrics())),
            "/v1/models" => get("/v1/models", self.allowed(&request).map(|()| self.models())),
            path if path.starts_with("/v1/models/") => {
                let name = path["/v1/models/".len()..].to_owned();
                get("/v1/models/…", self.allowed(&request).and_then(|()| self.one_model(&name)))
            }
            path @ ("/v1/completions" | "/v1/chat/completions") => {
                let (chat, path) = match path {
                    "/v1/completions" => (false, "/v1/completions"),
                    _ => (true, "/v1/chat/completions"),
                };
                if request.method != Method::POST {
                    return (path, Ok(only(no_method(&request).response(), "POST")));
                }
                (path, self.write(request, chat).await)
            }
            other => {
                let message = format!("{other:?} is not a path of this server");
                let code = Some("unknown_url");
                ("other", Err(ApiError::new(StatusCode::NOT_FOUND, code, message)))
            }
        }
    }

    /// Refuses a client that may not ask.
    fn allowed(&self, request: &Request) -> Result<(), ApiError> {
        self.check_host(request)?;
        let Some(key) = &self.access.api_key else { return Ok(()) };
        let given = request.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or("").trim();
        if same(given.as_bytes(), key.as_bytes()) {
            return Ok(());
        }
        let message = match given {
            "" => "no API key: send the header `Authorization: Bearer KEY`",
            _ => "the API key is wrong",
        };
        Err(ApiError::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message))
    }

    /// On the loopback address and without a key, a page of another site could reach us under its own name.
    fn check_host(&self, request: &Request) -> Result<(), ApiError> {
        if !self.access.loopback || self.access.api_key.is_some() || self.access.cors.is_some() {
            return Ok(());
        }
        let host = request.headers.get(HOST).and_then(|value| value.to_str().ok()).unwrap_or("");
        let name = match host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or(""),
            None => host.split(':').next().unwrap_or(""),
        };
        let local = name == "localhost" || name.parse().is_ok_and(|at: std::net::IpAddr| at.is_loopback());
        if local {
            return Ok(());
        }
        let message = format!(
            "the host is {host:?}, expected this machine's own name; give the server --api-key to serve others"
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, Some("wrong_host"), message))
    }

    fn page(&self) -> Response {
        let mut response = answer(StatusCode::OK, "text/html; charset=utf-8", PAGE);
        let headers = response.headers_mut();
        headers.insert("content-security-policy", HeaderValue::from_static(PAGE_POLICY));
        headers.insert("referrer-policy", HeaderValue::from_static("no-referrer"));
        response
    }

    fn health(&self) -> Response {
        let (status, word) = match () {
            () if self.queue.is_gone() => (StatusCode::SERVICE_UNAVAILABLE, "the model has stopped"),
            () if self.draining.load(Ordering::Relaxed) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
            () => (StatusCode::OK, "ok"),
        };
        answer(status, "application/json", json!({"status": word}).to_string())
    }

    fn told_metrics(&self) -> Response {
        let text = self.metrics.text(&[
            ("ironhorse_queued", "Texts that wait for a row of the decoder.", self.queue.len() as u64),
            ("ironhorse_queue_room", "Texts that the queue has room for.", self.queue.most() as u64),
            ("ironhorse_answering", "Requests that are being answered.", self.answering() as u64),
            ("ironhorse_connections", "Open connections.", self.open.count() as u64),
            ("ironhorse_uptime_seconds", "Since the start.", self.started.elapsed().as_secs()),
        ]);
        answer(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text)
    }

    fn model_entry(&self) -> Value {
        let chat = self.model.chat.as_ref().is_some_and(|chat| chat.template().is_some());
        json!({
            "id": self.model.name, "object": "model", "created": 0, "owned_by": "ironhorse",
            "context_length": self.model.context, "chat": chat,
        })
    }

    fn models(&self) -> Response {
        let list = json!({"object": "list", "data": [self.model_entry()]});
        answer(StatusCode::OK, "application/json", list.to_string())
    }

    fn one_model(&self, name: &str) -> Result<Response, ApiError> {
        if decoded(name) != self.model.name {
            return Err(no_model(name, &self.model.name));
        }
        Ok(answer(StatusCode::OK, "application/json", self.model_entry().to_string()))
    }

    /// Writes what is asked for.
    async fn write(&self, request: Request, chat: bool) -> Result<Response, ApiError> {
        let came = Instant::now();
        self.allowed(&request)?;
        if self.draining.load(Ordering::Relaxed) {
            let message = "the server is shutting down; ask again later";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("shutting_down"), message));
        }
        let kind = request.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
        if !kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
            let message = format!("the content type is {kind:?}, expected application/json");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, message));
        }
        let body = request.body.map_err(bad_body)?;
        self.answering.fetch_add(1, Ordering::Relaxed);
        let answering = Answering(self.answering.clone());
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let model = self.model.clone();
        // reading a long text is work: others are answered meanwhile
        let planned = tokio::task::spawn_blocking(move || -> Result<_, ApiError> {
            let asked = Asked::read(&body, &model.name, chat)?;
            let seed = asked.seed.unwrap_or_else(|| RandomState::new().hash_one(number));
            let planned = model.plan(&asked, seed)?;
            let answers = Answers::new(model, &asked, &planned, number);
            Ok((asked, planned, answers))
        });
        let failed =
            |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, None, "the request could not be read");
        let (asked, planned, mut answers) = planned.await.map_err(failed)??;
        let (told, mut news) = mpsc::unbounded_channel();
        let work = planned.into_iter().enumerate().map(|(index, text)| {
            let cancelled = answers.cancellation(index);
            Work { job: text.job, index, told: told.clone(), cancelled, came }
        });
        self.queue.add(work.collect()).map_err(busy)?;
        drop(told); // the work has it
        let mut first = Some(came);
        if asked.stream {
            let metrics = self.metrics.clone();
            let stream = Stream {
                ready: opening(&answers),
                answers,
                news,
                usage: asked.stream_usage,
                done: false,
                metrics,
                first,
                _answering: answering,
            };
            return Ok(events(Box::new(stream)));
        }
        while !answers.is_done() {
            let Some(event) = news.recv().await else { return Err(stopped()) };
            note_first(&self.metrics, &mut first, &event);
            answers.take(event)?;
        }
        Ok(answer(StatusCode::OK, "application/json", answers.whole().to_string()))
    }

    /// The headers by which a browser lets pages of other origins ask.
    fn share(&self, response: &mut Response) {
        let Some(origin) = self.access.cors.as_deref().and_then(|origin| HeaderValue::from_str(origin).ok())
        else {
            return;
        };
        let headers = response.headers_mut();
        headers.insert("access-control-allow-origin", origin);
        for (name, value) in [
            ("access-control-allow-headers", "authorization, content-type"),
            ("access-control-allow-methods", "GET, POST"),
            ("access-control-max-age", "600"),
            ("vary", "origin"),
        ] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
    }
}

impl Handler for Api {
    async fn handle(&self, request: Request) -> Response {
        if request.method == Method::OPTIONS && self.access.cors.is_some() {
            let mut response = answer(StatusCode::NO_CONTENT, "text/plain", Bytes::new());
            self.share(&mut response);
            return response;
        }
        let (path, answered) = self.route(request).await;
        let mut response = answered.unwrap_or_else(|error| error.response());
        self.metrics.answered(path, response.status().as_u16());
        self.share(&mut response);
        response
    }
}

fn no_method(request: &Request) -> ApiError {
    let message = format!("{} is not a method of {:?}", request.method, request.path);
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, None, message)
}

fn bad_body(why: BadBody) -> ApiError {
    let (status, message) = match why {
        BadBody::Large => (StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than this server takes"),
        BadBody::Slow => (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"),
        BadBody::Broken => (StatusCode::BAD_REQUEST, "the body did not arrive"),
    };
    ApiError::new(status, None, message)
}

fn busy(why: Busy) -> ApiError {
    match why {
        Busy::Full => {
            let message = "the queue is full; ask again later";
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message)
        }
        Busy::Gone => stopped(),
    }
}

fn stopped() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, None, "the model has stopped")
}

/// Whether two texts are the same, in a time that does not tell where they differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    let longest = a.len().max(b.len());
    let byte = |text: &[u8], at: usize| text.get(at).copied().unwrap_or(0);
    let differ = (0..longest).fold(a.len() ^ b.len(), |all, at| all | usize::from(byte(a, at) ^ byte(b, at)));
    std::hint::black_box(differ) == 0
}

/// A part of a path with its `%` escapes taken out.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let hex = text.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn note_first(metrics: &Metrics, came: &mut Option<Instant>, (_, event): &Told) {
    if matches!(event, Ok(ironhorse_train::generate::Event::Token(_)))
        && let Some(came) = came.take()
    {
        metrics.first_token_seconds.record(came.elapsed());
    }
}

/// One server-sent event.
fn sent(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// What a stream of a conversation begins with.
fn opening(answers: &Answers) -> String {
    match answers.is_chat() {
        true => (0..answers.len()).map(|index| sent(&answers.opening(index))).collect(),
        false => String::new(),
    }
}

/// An answer piece by piece. Dropped when the client goes away, and with it the wish for more.
struct Stream {
    answers: Answers,
    news: mpsc::UnboundedReceiver<Told>,
    /// What can be sent now.
    ready: String,
    usage: bool,
    done: bool,
    metrics: Arc<Metrics>,
    first: Option<Instant>,
    _answering: Answering,
}

impl Source for Stream {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while !self.done {
            match self.news.poll_recv(cx) {
                Poll::Pending if self.ready.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Some(event)) => {
                    note_first(&self.metrics, &mut self.first, &event);
                    match self.answers.take(event) {
                        Ok(Some(index)) => {
                            let piece = self.answers.piece(index);
                            self.ready.extend(piece.iter().map(sent));
                        }
                        Ok(None) => {}
                        Err(error) => self.end(Some(error)),
                    }
                    if self.answers.is_done() {
                        self.end(None);
                    }
                }
                Poll::Ready(None) => self.end(Some(stopped())),
            }
        }
        match self.ready.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Ready(Some(std::mem::take(&mut self.ready).into())),
        }
    }
}

impl Stream {
    fn end(&mut self, error: Option<ApiError>) {
        if self.done {
            return;
        }
        self.done = true;
        if let Some(error) = error {
            self.ready.push_str(&sent(&error.json()));
            return;
        }
        if self.usage {
            self.ready.push_str(&sent(&self.answers.usage_piece()));
        }
        self.ready.push_str("data: [DONE]\n\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        assert!(same(b"", b"") && same(b"key", b"key"));
        for (a, b) in [("key", "kez"), ("key", "ke"), ("", "k"), ("key\0", "key"), ("a", "b")] {
            assert!(!same(a.as_bytes(), b.as_bytes()), "{a} {b}");
        }
    }

    #[test]
    fn escapes_are_taken_out() {
        assert_eq!(decoded("Qwen%2FQwen3-0.6B"), "Qwen/Qwen3-0.6B");
        assert_eq!(decoded("a%zz%2"), "a%zz%2");
        assert_eq!(decoded("%é"), "%é");
    }
}
