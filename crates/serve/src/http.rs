//! A bounded HTTP/1.1 server: whatever uses it says what to answer, this says how long and how much a client may take.
//!
//! Every limit is per connection, so a client that is slow or goes away holds a connection and nothing else: the head of a request and
//! its body must arrive in time, a body may not be larger than allowed, and a client that does not read is cut off. Connections beyond
//! the limit wait in the system's queue.

use crate::bodies::{self, Bodies};
use crate::error::ApiError;
use crate::timed::Timed;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

/// How much a client may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// The time until the head of a request is there, also of the next one on a connection that is kept open.
    pub head: Duration,
    /// The time from the head of a request until its body is there.
    pub body: Duration,
    /// The time until a client reads on.
    pub stalled: Duration,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Bytes of all bodies that are held at a time.
    pub bodies_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            head: Duration::from_secs(15),
            body: Duration::from_secs(30),
            stalled: Duration::from_secs(30),
            body_bytes: 8 << 20,
            bodies_bytes: 256 << 20,
        }
    }
}

/// The largest head of a request, in bytes.
const HEAD_BYTES: usize = 32 << 10;

/// What a page of ours may load: nothing from elsewhere.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                           base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The head of a request.
#[derive(Debug)]
pub struct Request {
    /// GET, POST, …
    pub method: Method,
    /// What is asked for, without the query.
    pub path: String,
    /// The query, as it was sent.
    pub query: String,
    /// Its headers.
    pub headers: HeaderMap,
    /// Whether a body follows.
    pub has_body: bool,
}

impl Request {
    /// The values of a name in the query, in their order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = String> + 'a {
        let pairs = self.query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs.filter(move |(key, _)| *key == name).map(|(_, value)| decoded(&value.replace('+', " ")))
    }
}

/// A part of a path or a query with its `%` escapes taken out.
pub fn decoded(text: &str) -> String {
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

/// Why a body did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadBody {
    /// It is larger than allowed.
    Large,
    /// It did not come in time.
    Slow,
    /// The client broke off, or what it sent is not HTTP.
    Broken,
    /// The bodies of others take all the memory there is for them.
    Crowded,
}

/// What follows piece by piece.
pub trait Source: Send {
    /// The next piece; `None` at the end.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

/// The body of an answer.
pub enum Body {
    /// The whole body at once.
    Whole(Bytes),
    /// A body that comes piece by piece; it is dropped when the client goes away.
    Pieces(Box<dyn Source>),
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Pieces(source) => {
                source.poll_next(cx).map(|piece| piece.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Pieces(_) => SizeHint::default(),
        }
    }
}

/// An answer.
pub type Response = hyper::Response<Body>;

/// An answer with a body of this type.
pub fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response {
    let mut response = hyper::Response::new(Body::Whole(body.into()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    response
}

/// Server-sent events.
pub fn events(source: Box<dyn Source>) -> Response {
    let mut response = answer(StatusCode::OK, "text/event-stream; charset=utf-8", Bytes::new());
    *response.body_mut() = Body::Pieces(source);
    response
}

/// One server-sent event.
pub fn sent(value: &serde_json::Value) -> String {
    format!("data: {value}\n\n")
}

/// A page that may load nothing from elsewhere.
pub fn page(html: &'static str) -> Response {
    let mut response = answer(StatusCode::OK, "text/html; charset=utf-8", html);
    let headers = response.headers_mut();
    headers.insert("content-security-policy", HeaderValue::from_static(PAGE_POLICY));
    headers.insert("referrer-policy", HeaderValue::from_static("no-referrer"));
    response
}

/// The answer to a method that a path does not have.
pub fn only(mut response: Response, allowed: &'static str) -> Response {
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

/// What is to be done about a request, by its head alone.
pub enum Admission {
    /// Its body is wanted.
    Read,
    /// It is answered without its body, if it has one.
    Unread,
    /// It is answered at once.
    Refused(Response),
}

impl From<ApiError> for Admission {
    fn from(error: ApiError) -> Self {
        Self::Refused(error.response())
    }
}

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// What is to be done about a request; asked before any of its body is read.
    fn admit(&self, request: &Request) -> Admission;

    /// The answer to a request that was not refused, with its body, which is empty where it is not read. Dropped when the client goes away.
    fn handle(&self, request: Request, body: Result<Bytes, BadBody>)
    -> impl Future<Output = Response> + Send;
}

/// How many connections there are.
#[derive(Clone, Debug, Default)]
pub struct Open(Arc<AtomicUsize>);

impl Open {
    /// How many connections there are now.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Serves until `stop` is true; then takes no connection any more, and gives those that are there `stalled` to end.
pub async fn serve<H: Handler>(
    listener: TcpListener,
    handler: Arc<H>,
    limits: Limits,
    open: Open,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let bodies = Bodies::new(&limits);
    let stopped = stop.clone();
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            next = next => next,
            _ = async { stop.wait_for(|stop| *stop).await.is_ok() } => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // too many open files, or a client that is gone already: others can still come
                tracing::debug!("a connection failed: {error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true); // tokens are small, and are wanted at once
        let (handler, open, stopped) = (handler.clone(), open.clone(), stopped.clone());
        let bodies = bodies.clone();
        open.0.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            connection(stream, handler, (limits, bodies), stopped).await;
            open.0.fetch_sub(1, Ordering::Relaxed);
            drop(place);
        });
    }
    drop(listener);
    let all = places.acquire_many(u32::try_from(limits.connections).unwrap_or(u32::MAX));
    let _ = tokio::time::timeout(limits.stalled, all).await;
}

async fn connection<H: Handler>(
    stream: tokio::net::TcpStream,
    handler: Arc<H>,
    (limits, bodies): (Limits, Bodies),
    mut stop: watch::Receiver<bool>,
) {
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (handler, bodies) = (handler.clone(), bodies.clone());
        async move { Ok::<_, Infallible>(answered(handler.as_ref(), &bodies, request).await) }
    });
    let timed = Timed::new(TokioIo::new(stream), limits.stalled);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(timed, service);
    tokio::pin!(connection);
    let stopping = async { stop.wait_for(|stop| *stop).await.is_ok() };
    let done = tokio::select! {
        done = connection.as_mut() => Some(done),
        _ = stopping => None,
    };
    let done = match done {
        Some(done) => done,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = done {
        tracing::debug!("a connection ended: {error}");
    }
}

/// Reads what is wanted of a request, and answers it.
async fn answered<H: Handler>(handler: &H, bodies: &Bodies, request: hyper::Request<Incoming>) -> Response {
    let (head, mut body) = request.into_parts();
    let (path, query) = (head.uri.path().to_owned(), head.uri.query().unwrap_or("").to_owned());
    let mut waits = bodies::is_expecting(head.version, &head.headers);
    let has_body = !body.is_end_stream();
    let request = Request { method: head.method, path, query, headers: head.headers, has_body };
    let (mut response, read) = match handler.admit(&request) {
        Admission::Refused(response) => (response, false),
        Admission::Unread => (handler.handle(request, Ok(Bytes::new())).await, false),
        Admission::Read if bodies.is_too_large(&body) => {
            (handler.handle(request, Err(BadBody::Large)).await, false)
        }
        Admission::Read => {
            waits = false; // whoever reads a body asks the client to go on
            let bytes = bodies.read(&mut body).await;
            let read = bytes.is_ok();
            (handler.handle(request, bytes).await, read)
        }
    };
    if has_body && !read {
        // what is left of the body would be taken for the next request
        response.headers_mut().insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
        if !waits {
            tokio::spawn(bodies.clone().pass_over(body));
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_taken_out() {
        assert_eq!(decoded("Qwen%2FQwen3-0.6B"), "Qwen/Qwen3-0.6B");
        assert_eq!(decoded("a%zz%2"), "a%zz%2");
        assert_eq!(decoded("%é"), "%é");
    }

    #[test]
    fn a_query_has_values_by_name() {
        let request = Request {
            method: Method::GET,
            path: "/".into(),
            query: "run=a%26b&x=1&run=c+d&run&runs=e".into(),
            headers: HeaderMap::new(),
            has_body: false,
        };
        assert_eq!(request.values("run").collect::<Vec<_>>(), ["a&b", "c d", ""]);
        assert_eq!(request.values("y").count(), 0);
    }
}
