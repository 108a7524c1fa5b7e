//! Runs as a page: what `ironhorse_serve` shows of them, in the words of the terminal.

use super::super::key::key;
use super::super::model::RUNS;
use super::super::runs;
use super::WatchArgs;
use crate::{Outcome, out, signals};
use anyhow::{Context, Result, bail};
use ironhorse::train::run::view::RunView;
use ironhorse::train::run::{Control, host};
use ironhorse_serve::runs::{Shelf, Words};
use std::net::SocketAddr;
use std::path::Path;

pub fn run(args: &WatchArgs) -> Result<Outcome> {
    let token = key(args.token.as_deref(), args.token_file.as_deref(), "--token")?;
    if !args.listen.ip().is_loopback() && token.is_none() {
        bail!(
            "--listen {} can be reached from other machines; give --token-file FILE with a secret, or listen on 127.0.0.1",
            args.listen
        );
    }
    let shelf = match args.runs.is_empty() {
        true => Shelf::below(Path::new(RUNS).to_owned(), words()),
        false => Shelf::of(&runs::given_or_newest(&args.runs)?, words())?,
    };
    let listener = ironhorse_serve::listen(args.listen)?;
    let at = listener.local_addr().context("cannot tell the address")?;
    // the page begins with the newest run: it is read before anybody waits for it
    if let Some(newest) = shelf.names().first() {
        let _ = shelf.open(&newest.name); // what is wrong with it is told on the page
    }
    let control = Control::default();
    let handlers = signals::Handlers::install(&control)?;
    let signal = control.stop_flag();
    let after = if token.is_some() { ", or with #token=TOKEN behind it" } else { "" };
    out::line(format_args!("runs at {}{after}; Ctrl-C ends the page, not the runs", address(at)))?;
    let served = ironhorse_serve::runs::run(listener, shelf, token, &signal);
    drop(handlers);
    served?;
    Ok(Outcome::Done)
}

/// Where the page is. An address that means all of this machine's is called by its name.
fn address(at: SocketAddr) -> String {
    match at.ip().is_unspecified() {
        true => format!("http://{}:{}/", host(), at.port()),
        false => format!("http://{at}/"),
    }
}

/// What is said of a run, as in the terminal.
fn words() -> Words {
    #[cfg(feature = "watch")]
    let machine = super::gpu::Machine::open();
    let facts = move |run: &RunView| {
        #[cfg(feature = "watch")]
        let known = machine.facts(run);
        #[cfg(not(feature = "watch"))]
        let known = Vec::new();
        let facts = runs::facts_with(run, &known).into_iter();
        facts.map(|(name, text)| (name.to_owned(), text)).collect()
    };
    Words { state: Box::new(runs::state), facts: Box::new(facts), settings: Box::new(runs::settings) }
}
