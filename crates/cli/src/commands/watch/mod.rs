//! `ironhorse watch`: runs in a terminal, while they go on or afterwards. Only reads.
//!
//! ```text
//! mod.rs   the flags, the loop of the terminal    app.rs   what is shown, and what keys change
//! draw.rs  the panels                             gpu.rs   memory and GPU of the process
//! ```

#[cfg(feature = "watch")]
mod app;
#[cfg(feature = "watch")]
mod draw;
#[cfg(feature = "watch")]
mod gpu;

use super::runs;
use crate::{Outcome, out};
use anyhow::Result;
use clap::Args;
use ironhorse::train::run::view::RunView;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Shows runs in the terminal: curves, speed, memory, samples
#[derive(Args)]
#[command(
    after_help = "Examples:\n  ironhorse watch                          the run whose log was written last\n  \
    ironhorse watch runs/0001 runs/0002      two runs, one over the other\n  \
    ironhorse watch --once                   what is known now, as text\n\n\
    Keys: q ends, tab another panel, s smoothing, l logarithmic axis, up and down another run, left and right another sample.\n\
    The run is only read, never stopped: it does not know that it is watched."
)]
pub struct WatchArgs {
    /// Run folders, or their names below runs/ [default: the run whose log was written last]
    #[arg(value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Print what is known now and end; this is also done where standard output is no terminal
    #[arg(long)]
    once: bool,
}

pub fn run(args: &WatchArgs) -> Result<Outcome> {
    let views = runs::given_or_newest(&args.runs)?;
    let views = views.iter().map(|path| RunView::open(path)).collect::<Result<Vec<_>, _>>()?;
    if args.once || !std::io::stdout().is_terminal() {
        return print(&views);
    }
    terminal(views)
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
