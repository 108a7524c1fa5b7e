//! The paths of the model.

use crate::access::Access;
use crate::answers::Answers;
use crate::error::{ApiError, quoted};
use crate::http::{
    Admission, BadBody, Handler, Open, Request, Response, Source, answer, decoded, events, only, page, sent,
};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::paths::{MODEL, Path};
use crate::schema::{Asked, no_model};
use crate::worker::{Busy, Queue, Told, Work};
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
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
    /// The API of a model whose work goes to this queue.
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

    /// Refuses what its head shows to be wrong; says whether its body is wanted.
    fn check(&self, request: &Request, path: Path) -> Result<Admission, ApiError> {
        let allowed = match path {
            Path::Other => return Err(ApiError::no_path(&request.path)),
            Path::Write { .. } => "POST",
            _ => "GET, HEAD",
        };
        if !allowed.split(", ").any(|method| request.method == method) {
            let response = only(ApiError::no_method(request).response(), allowed);
            return Ok(Admission::Refused(response));
        }
        if !matches!(path, Path::Page | Path::Health) {
            self.access.check(request)?;
        }
        if !matches!(path, Path::Write { .. }) {
            return Ok(Admission::Unread);
        }
        self.takes()?;
        is_json(request)?;
        Ok(Admission::Read)
    }

    /// Refuses new work when the server is to end.
    fn takes(&self) -> Result<(), ApiError> {
        if !self.draining.load(Ordering::Relaxed) {
            return Ok(());
        }
        let message = "the server is shutting down; ask again later";
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("shutting_down"), message))
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
    async fn write(&self, body: Bytes, chat: bool) -> Result<Response, ApiError> {
        let came = Instant::now();
        self.takes()?; // the signal may have come while the body did
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

    /// An answer as it is sent: counted, and with the headers that pages of other origins need.
    fn told(&self, path: Path, mut response: Response) -> Response {
        self.metrics.answered(path.name(), response.status().as_u16());
        self.share(&mut response);
        response
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
    fn admit(&self, request: &Request) -> Admission {
        if request.method == Method::OPTIONS && self.access.cors.is_some() {
            let mut response = answer(StatusCode::NO_CONTENT, "text/plain", Bytes::new());
            self.share(&mut response);
            return Admission::Refused(response);
        }
        let path = Path::of(&request.path);
        match self.check(request, path).unwrap_or_else(Admission::from) {
            Admission::Refused(response) => Admission::Refused(self.told(path, response)),
            other => other,
        }
    }

    async fn handle(&self, request: Request, body: Result<Bytes, BadBody>) -> Response {
        let path = Path::of(&request.path);
        let answered = match path {
            Path::Page => Ok(page(PAGE)),
            Path::Health => Ok(self.health()),
            Path::Metrics => Ok(self.told_metrics()),
            Path::Models => Ok(self.models()),
            Path::Model => self.one_model(&request.path[MODEL.len()..]),
            Path::Write { chat } => match body {
                Ok(body) => self.write(body, chat).await,
                Err(why) => Err(bad_body(why)),
            },
            Path::Other => Err(ApiError::no_path(&request.path)),
        };
        self.told(path, answered.unwrap_or_else(|error| error.response()))
    }
}

/// Refuses a body that is not said to be JSON: a form of a page elsewhere could send others.
fn is_json(request: &Request) -> Result<(), ApiError> {
    let kind = request.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    if kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        return Ok(());
    }
    let message = format!("the content type is {}, expected application/json", quoted(kind));
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, message))
}

fn bad_body(why: BadBody) -> ApiError {
    let (status, message) = match why {
        BadBody::Large => (StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than this server takes"),
        BadBody::Slow => (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"),
        BadBody::Broken => (StatusCode::BAD_REQUEST, "the body did not arrive"),
        BadBody::Crowded => {
            (StatusCode::SERVICE_UNAVAILABLE, "others are sending too much at the same time; ask again later")
        }
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

fn note_first(metrics: &Metrics, came: &mut Option<Instant>, (_, event): &Told) {
    if matches!(event, Ok(ironhorse_train::generate::Event::Token(_)))
        && let Some(came) = came.take()
    {
        metrics.first_token_seconds.record(came.elapsed());
    }
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
