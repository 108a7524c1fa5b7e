//! `ironhorse watch`: runs in a terminal or as a page, while they go on or afterwards. Only reads.
//!
//! ```text
//! mod.rs   the flags, the loop of the terminal    app.rs   what is shown, and what keys change
//! draw.rs  the panels                             gpu.rs   memory and GPU of the process
//! web.rs   the page
//! ```

#[cfg(feature = "watch")]
mod app;
#[cfg(feature = "watch")]
mod draw;
#[cfg(feature = "watch")]
mod gpu;
#[cfg(feature = "serve")]
mod web;

use super::runs;
use crate::{Outcome, out};
use anyhow::Result;
use clap::Args;
use ironhorse::train::run::view::RunView;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Shows runs in the terminal or as a page: curves, speed, memory, samples
#[derive(Args)]
#[command(
    after_help = "Examples:\n  ironhorse watch                          the run whose log was written last\n  \
    ironhorse watch runs/0001 runs/0002      two runs, one over the other\n  \
    ironhorse watch --once                   what is known now, as text\n  \
    ironhorse watch --web                    all runs below runs/ as a page, http://127.0.0.1:8090/\n\n\
    Keys: q ends, tab another panel, s smoothing, l logarithmic axis, up and down another run, left and right another sample.\n\
    The run is only read, never stopped: it does not know that it is watched."
)]
pub struct WatchArgs {
    /// Run folders, or their names below runs/ [default: the run whose log was written last]
    #[arg(value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Print what is known now and end; this is also done where standard output is no terminal
    #[arg(long, conflicts_with = "web")]
    once: bool,
    /// A page in the browser instead of the terminal; without RUN it has all runs below runs/, also those that begin later
    #[arg(long)]
    web: bool,
    /// The address and port of the page; port 0 takes a free one. Other addresses than this machine's own need a token
    #[arg(long, requires = "web", default_value = "127.0.0.1:8090", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// What the page must be given to show anything; other users of the machine can see it in the command line
    #[arg(long, requires = "web", value_name = "TOKEN", conflicts_with = "token_file")]
    token: Option<String>,
    /// Read the token from the first line of this file
    #[arg(long, requires = "web", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

pub fn run(args: &WatchArgs) -> Result<Outcome> {
    if args.web {
        return web(args);
    }
    let views = runs::given_or_newest(&args.runs)?;
    let views = views.iter().map(|path| RunView::open(path)).collect::<Result<Vec<_>, _>>()?;
    if args.once || !std::io::stdout().is_terminal() {
        return print(&views);
    }
    terminal(views)
}

#[cfg(feature = "serve")]
fn web(args: &WatchArgs) -> Result<Outcome> {
    web::run(args)
}

#[cfg(not(feature = "serve"))]
fn web(args: &WatchArgs) -> Result<Outcome> {
    let WatchArgs { listen, token, token_file, .. } = args;
    let _ = (listen, token, token_file);
    anyhow::bail!(
        "this build has no page (feature `serve`); use ironhorse watch in a terminal, or ironhorse report"
    )
}

/// Prints the figures of each run.
fn print(views: &[RunView]) -> Result<Outcome> {
    for (i, view) in views.iter().enumerate() {
        if i > 0 {
            out::line("")?;
        }
        out::line(format_args!("{:<16} {}", "run", view.path().display()))?;
        for (name, text) in runs::facts(view) {
            out::line(format_args!("{name:<16} {text}"))?;
        }
    }
    Ok(Outcome::Done)
}

#[cfg(not(feature = "watch"))]
fn terminal(views: Vec<RunView>) -> Result<Outcome> {
    out::note("this build has no terminal view (feature `watch`); these are the figures as they are now");
    print(&views)
}

#[cfg(feature = "watch")]
fn terminal(views: Vec<RunView>) -> Result<Outcome> {
    use anyhow::Context;
    use ratatui::crossterm::event;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    /// Time between two looks at the files.
    const LOOK_EVERY: Duration = Duration::from_secs(1);

    // a signal that ends the process must not leave the terminal as we use it
    let end = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, end.clone()).context("cannot listen to signals")?;
    }
    let mut app = app::App::new(views, std::env::var_os("NO_COLOR").is_none());
    let mut terminal = ratatui::try_init().context("cannot use the terminal; try --once")?;
    let mut work = || -> Result<()> {
        let mut looked = Instant::now();
        app.look()?;
        loop {
            terminal.draw(|frame| draw::draw(frame, &mut app))?;
            let mut draw_again = false;
            while !draw_again {
                if end.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if event::poll(LOOK_EVERY.saturating_sub(looked.elapsed()).min(Duration::from_millis(200)))? {
                    match event::read()? {
                        event::Event::Key(key) => match app.key(key) {
                            app::Then::End => return Ok(()),
                            app::Then::Draw => draw_again = true,
                            app::Then::Nothing => {}
                        },
                        event::Event::Resize(..) => draw_again = true,
                        _ => {}
                    }
                }
                if looked.elapsed() >= LOOK_EVERY {
                    app.look()?;
                    looked = Instant::now();
                    draw_again = true; // also for times that pass
                }
            }
        }
    };
    let done = work();
    ratatui::restore();
    done.map(|()| Outcome::Done)
}
