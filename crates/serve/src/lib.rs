//! Serving a model over HTTP in OpenAI's schema, with continuous batching (ADR 0025), and runs as a page (ADR 0026).
//!
//! [`http`] is a server with limits that knows neither models nor runs, [`access`] says who may ask; [`api`] answers requests over a queue of
//! `worker`, whose thread owns the model, and [`runs`] from the folders of runs. [`run`] and [`runs::run`] put them together.
#![forbid(unsafe_code)]

pub mod access;
mod answers;
pub mod api;
mod bodies;
pub mod error;
pub mod exercise;
pub mod http;
mod metrics;
mod model;
mod paths;
pub mod runs;
mod schema;
mod timed;
mod worker;

pub use access::Access;
pub use model::Model;
pub use schema::MOST_TEXTS;

use api::Api;
use http::{Handler, Limits, Open};
use ironhorse_train::session::Session;
use metrics::Metrics;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use worker::Queue;

/// Why serving ended before it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model.
    #[error(transparent)]
    Model(#[from] ironhorse_train::Error),
    /// The network.
    #[error("{what}: {source}")]
    Network {
        /// What failed.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A thread that panicked.
    #[error("the {0} has panicked; this is a bug")]
    Panicked(&'static str),
}

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Who may ask.
    pub access: Access,
    /// How much a client may take.
    pub limits: Limits,
    /// Texts that may wait for the model.
    pub queue: usize,
    /// How long answers may take to end after a signal.
    pub drain: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            access: Access::default(),
            limits: Limits::default(),
            queue: 256,
            drain: Duration::from_secs(300),
        }
    }
}

/// The address to listen on.
pub fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    let failed = |source| Error::Network { what: format!("cannot listen on {address}"), source };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Serves until `signal` is not 0 and the answers under way have ended; new requests are refused from then on.
pub fn run(
    listener: TcpListener,
    session: &mut Session,
    model: Model,
    mut settings: Settings,
    signal: &AtomicUsize,
) -> Result<(), Error> {
    let (queue, metrics, open) =
        (Arc::new(Queue::new(settings.queue)), Arc::new(Metrics::default()), Open::default());
    settings.access.loopback = listener.local_addr().is_ok_and(|at| at.ip().is_loopback());
    let api = Api::new(model, queue.clone(), metrics.clone(), settings.access.clone(), open.clone());
    std::thread::scope(|scope| {
        let network = scope.spawn(|| serve(listener, (api, open), &settings, signal, &queue));
        let written = worker::run(session, &queue, &metrics);
        let served = network.join().map_err(|_| Error::Panicked("network's thread"))?;
        written?;
        served
    })
}

/// Threads that read what is asked for, and files; and their name.
const READERS: usize = 2;
const READER_NAME: &str = "reader";

/// How often signals are looked for.
const LOOK: Duration = Duration::from_millis(50);

/// The thread of the network.
fn serve(
    listener: TcpListener,
    (api, open): (Api, Open),
    settings: &Settings,
    signal: &AtomicUsize,
    queue: &Queue,
) -> Result<(), Error> {
    /// However this thread ends, the model's ends too.
    struct Close<'a>(&'a Queue);
    impl Drop for Close<'_> {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let _close = Close(queue);
    let api = Arc::new(api);
    on_network(listener, api.clone(), (settings.limits, open), async || {
        while signal.load(Ordering::Relaxed) == 0 && !queue.is_gone() {
            tokio::time::sleep(LOOK).await;
        }
        api.drain();
        let end = tokio::time::Instant::now() + settings.drain;
        while api.answering() > 0 && tokio::time::Instant::now() < end {
            tokio::time::sleep(LOOK).await;
        }
    })
}

/// Answers requests on this thread until `until` ends.
fn on_network<H: Handler>(
    listener: TcpListener,
    handler: Arc<H>,
    (limits, open): (Limits, Open),
    until: impl AsyncFnOnce(),
) -> Result<(), Error> {
    let failed = |source| Error::Network { what: "cannot serve".into(), source };
    // requests wait for a reader: more of them would take the cores from the model
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_io().enable_time().max_blocking_threads(READERS).thread_name(READER_NAME);
    let runtime = runtime.build().map_err(failed)?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let server = tokio::spawn(http::serve(listener, handler, limits, open, stopped));
        until().await;
        let _ = stop.send(true);
        // what is left are clients that do not read
        let _ = tokio::time::timeout(Duration::from_secs(2), server).await;
        Ok(())
    })
}
