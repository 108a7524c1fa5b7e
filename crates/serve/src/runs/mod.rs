//! Runs as a page in the browser: `ironhorse watch --web`. Only reads, by the same reader as the terminal (ADR 0026).
//!
//! ```text
//! mod.rs    the paths                               shelf.rs  which runs there are, and what is known of them
//! curves.rs parts of curves, thinned                live.rs   what is new, as server-sent events
//! csv.rs    the log as a table                      page.html the page: plain JavaScript, nothing from elsewhere
//! ```

mod csv;
mod curves;
mod live;
mod shelf;

pub use shelf::{Shelf, Words};

use crate::access::Access;
use crate::error::{ApiError, quoted};
use crate::http::{
    Admission, BadBody, Handler, Limits, Open, Request, Response, answer, decoded, events, only, page,
};
use crate::{Error, LOOK, READERS, on_network};
use bytes::Bytes;
use hyper::header::HeaderValue;
use hyper::{Method, StatusCode};
use ironhorse_train::picture::{COLOURS, DASHES};
use ironhorse_train::run::view::{Quantity, SMOOTHING};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Semaphore, watch};

/// The page.
const PAGE: &str = include_str!("page.html");
/// Most runs of one request.
const MOST_RUNS: usize = 16;

/// How much a client may take: requests have no bodies, and a page needs a few connections.
const LIMITS: Limits = Limits {
    connections: 128,
    head: std::time::Duration::from_secs(15),
    body: std::time::Duration::from_secs(5),
    stalled: std::time::Duration::from_secs(30),
    body_bytes: 4096,
    bodies_bytes: 4096,
};

/// Serves the page until `signal` is not 0.
pub fn run(
    listener: TcpListener,
    shelf: Shelf,
    token: Option<String>,
    signal: &AtomicUsize,
) -> Result<(), Error> {
    let loopback = listener.local_addr().is_ok_and(|at| at.ip().is_loopback());
    let (end, ended) = watch::channel(false);
    let pages = Pages {
        access: Access { api_key: token, cors: None, loopback },
        shelf: Arc::new(shelf),
        readers: Semaphore::new(READERS),
        ended,
    };
    on_network(listener, Arc::new(pages), (LIMITS, Open::default()), async || {
        while signal.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(LOOK).await;
        }
        let _ = end.send(true); // streams would go on for ever
    })
}

/// Answers the requests of the page.
struct Pages {
    access: Access,
    shelf: Arc<Shelf>,
    readers: Semaphore,
    /// True when the server ends.
    ended: watch::Receiver<bool>,
}

impl Pages {
    async fn route(&self, request: &Request) -> Result<Response, ApiError> {
        if request.path == "/" {
            return Ok(page(PAGE));
        }
        match request.path.as_str() {
            "/api/runs" => self.read(|shelf| Ok(json(&start(&shelf.names())))).await,
            "/api/events" => {
                let names = self.names(request)?;
                Ok(events(live::follow(self.shelf.clone(), names, self.ended.clone())))
            }
            "/api/curves" => {
                let (names, asked) = (self.names(request)?, curves::Asked::read(request)?);
                self.read(move |shelf| curves::answer(shelf, &names, &asked)).await
            }
            path => {
                let Some((what, name)) = path.strip_prefix("/api/").and_then(|rest| rest.split_once('/'))
                else {
                    return Err(ApiError::no_path(path));
                };
                let name = decoded(name);
                match what {
                    "runs" => self.read(move |shelf| Ok(json(&shelf.open(&name)?.told(shelf)))).await,
                    "samples" => {
                        let step = number(request, "step")?;
                        self.read(move |shelf| {
                            shelf.open(&name)?.lock().sample(step).map(|sample| json(&sample))
                        })
                        .await
                    }
                    "experts" => {
                        let layer = number(request, "layer")?.unwrap_or(0);
                        self.read(move |shelf| {
                            let held = shelf.open(&name)?;
                            let loads = shelf::loads(&held.lock().view.table.loads, layer);
                            loads.map(|loads| json(&loads))
                        })
                        .await
                    }
                    "csv" => {
                        let steps = curves::steps(request)?;
                        self.read(move |shelf| {
                            let held = shelf.open(&name)?;
                            let rows = csv::Rows::new(&held.lock().view.table, &steps);
                            Ok(table(&name, rows))
                        })
                        .await
                    }
                    _ => Err(ApiError::no_path(path)),
                }
            }
        }
    }

    /// The runs that a request names.
    fn names(&self, request: &Request) -> Result<Vec<String>, ApiError> {
        let names: Vec<String> = request.values("run").collect();
        if names.len() > MOST_RUNS {
            let message = format!("{} runs are asked for, expected {MOST_RUNS} at most", names.len());
            return Err(ApiError::param("run", message));
        }
        Ok(names)
    }

    /// Reads files and makes an answer on another thread, so that a long log is in nobody's way.
    async fn read(
        &self,
        work: impl FnOnce(&Shelf) -> Result<Response, ApiError> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, None, "the run could not be read");
        let _turn = self.readers.acquire().await;
        let shelf = self.shelf.clone();
        tokio::task::spawn_blocking(move || work(&shelf)).await.map_err(failed)?
    }
}

impl Handler for Pages {
    fn admit(&self, request: &Request) -> Admission {
        if !matches!(request.method, Method::GET | Method::HEAD) {
            return Admission::Refused(only(ApiError::no_method(request).response(), "GET, HEAD"));
        }
        // the page holds nothing; what it asks for needs the token
        if request.path != "/"
            && let Err(error) = self.access.check(request)
        {
            return error.into();
        }
        if request.has_body {
            let message = "requests of this server have no body";
            return ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, None, message).into();
        }
        Admission::Unread
    }

    async fn handle(&self, request: Request, _: Result<Bytes, BadBody>) -> Response {
        self.route(&request).await.unwrap_or_else(|error| error.response())
    }
}

/// What the page needs to begin: the runs, and how curves look everywhere.
fn start(names: &[shelf::Listed]) -> Value {
    let quantities = Quantity::ALL.map(|one| {
        json!({"key": one.key(), "name": one.name(), "unit": one.unit(), "dots": one.is_sparse(), "noisy": one.is_noisy()})
    });
    let smoothing: Vec<Value> =
        SMOOTHING.iter().map(|(name, share)| json!({"name": name, "share": share})).collect();
    json!({"runs": names, "quantities": quantities, "smoothing": smoothing, "colours": COLOURS, "dashes": DASHES})
}

fn json(value: &Value) -> Response {
    answer(StatusCode::OK, "application/json", value.to_string())
}

/// A table as a file.
fn table(name: &str, rows: csv::Rows) -> Response {
    let mut response = events(Box::new(rows));
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("text/csv; charset=utf-8"));
    let plain: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    if let Ok(value) =
        HeaderValue::from_maybe_shared(Bytes::from(format!("attachment; filename=\"{plain}.csv\"")))
    {
        headers.insert("content-disposition", value);
    }
    response
}

/// A whole number of the query; `None` where it is not given.
fn number(request: &Request, name: &str) -> Result<Option<u64>, ApiError> {
    let Some(text) = request.values(name).next().filter(|text| !text.is_empty()) else { return Ok(None) };
    let wrong = |_| {
        let found = quoted(&text);
        ApiError::param(name, format!("{name} is {found}, expected a whole number from 0 on"))
    };
    text.parse().map(Some).map_err(wrong)
}
