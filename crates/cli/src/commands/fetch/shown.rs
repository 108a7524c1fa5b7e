//! Progress of a download on standard error: one line on a terminal, a line now and then elsewhere.

use crate::hardware::human_bytes;
use crate::out;
use crate::progress::{LINE_EVERY, bar};
use indicatif::ProgressBar;
use ironhorse::train::run::Control;
use ironhorse_fetch::{Progress, Watch};
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::time::Instant;

/// Shows a download, and stops it when a signal came.
pub struct Shown<'a> {
    control: &'a Control,
    bar: Option<ProgressBar>,
    /// When the first bytes were expected, and how many were there.
    began: Option<(Instant, u64)>,
    last_line: Instant,
}

impl<'a> Shown<'a> {
    pub fn new(control: &'a Control) -> Self {
        Self { control, bar: None, began: None, last_line: Instant::now() }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// What came, and how fast.
    pub fn summary(&self, received: u64) -> String {
        let seconds = self.began.map_or(0.0, |(began, _)| began.elapsed().as_secs_f64());
        let rate = received as f64 / seconds.max(1e-9) / 1e6;
        format!("{} downloaded in {seconds:.1} s ({rate:.1} MB/s)", human_bytes(received))
    }

    fn show(&mut self, progress: Progress<'_>) {
        let Progress { file, done, total } = progress;
        let (began, first) = *self.began.get_or_insert((Instant::now(), done));
        let rate = done.saturating_sub(first) as f64 / began.elapsed().as_secs_f64().max(1e-9);
        let left = total.saturating_sub(done) as f64 / rate.max(1.0);
        let message = format!("{:.1} MB/s  ETA {left:.0}s  {file}", rate / 1e6);
        if std::io::stderr().is_terminal() {
            let bar = self
                .bar
                .get_or_insert_with(|| bar(Some(total), "{bar:30.cyan/dim} {bytes}/{total_bytes}  {msg}"));
            bar.set_length(total.max(done));
            bar.set_position(done);
            bar.set_message(message);
        } else if self.last_line.elapsed() >= LINE_EVERY {
            out::note(format_args!("{} of {}  {message}", human_bytes(done), human_bytes(total)));
            self.last_line = Instant::now();
        }
    }
}

impl Watch for Shown<'_> {
    fn progress(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        if !progress.file.is_empty() {
            self.show(progress);
        }
        if self.control.stop_reason().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn note(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => out::note(text),
        }
    }
}
