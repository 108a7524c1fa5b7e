//! Progress of a run: a bar on a terminal, plain lines elsewhere.

use crate::commands::choices;
use crate::hardware::human_bytes;
use crate::out;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ironhorse::train::run::metrics::Metrics;
use ironhorse::train::run::{Observer, SaveStats};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// A bar on standard error, of a known length or of one that is set later.
pub fn bar(length: Option<u64>, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Time between two lines of progress where there is no terminal.
pub const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows a training run on standard error.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    /// The step it starts at.
    first: u64,
    started: Instant,
    last_line: Option<Instant>,
}

impl Progress {
    /// For a run that will begin.
    pub fn new() -> Self {
        Self { bar: None, total: 0, first: 0, started: Instant::now(), last_line: None }
    }

    fn print(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => out::note(text),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn eta(&self, done: u64) -> String {
        let made = done.saturating_sub(self.first).max(1);
        let left =
            self.started.elapsed().as_secs_f64() / made as f64 * self.total.saturating_sub(done) as f64;
        format!("{left:.0}s")
    }
}

impl Observer for Progress {
    fn begin(&mut self, made: u64, steps: u64) {
        (self.first, self.total, self.started) = (made, steps, Instant::now());
        self.bar = std::io::stderr().is_terminal().then(|| {
            let bar = bar(Some(steps), "{bar:30.cyan/dim} {pos}/{len}  {msg}  ETA {eta}");
            bar.set_position(made);
            bar.reset_eta();
            bar
        });
    }

    fn step(&mut self, m: &Metrics) {
        let norm = m.grad_norm.unwrap_or(f32::NAN);
        let message =
            format!("loss {:.4}  norm {norm:.3}  lr {:.2e}  {:.0} tok/s", m.loss, m.lr, m.tokens_per_s);
        let message = match (m.rewards_chosen, m.rewards_rejected, m.reward_accuracy) {
            (Some(chosen), Some(rejected), Some(accuracy)) => {
                format!("{message}  rewards {chosen:.3} {rejected:.3}  accuracy {accuracy:.2}")
            }
            _ => message,
        };
        if let Some(val) = m.val_loss {
            let accuracy =
                m.val_reward_accuracy.map_or_else(String::new, |share| format!(", accuracy {share:.3}"));
            self.print(&format!("step {:>5}  validation loss {val:.4}{accuracy}", m.step));
        }
        for (task, accuracies) in &m.eval {
            self.print(&format!("step {:>5}  {task}: {}", m.step, choices::figures(accuracies)));
        }
        match &self.bar {
            Some(bar) => {
                bar.set_position(m.step + 1);
                bar.set_message(message);
            }
            None => {
                let due = self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY);
                if due || m.step + 1 == self.total {
                    let eta = self.eta(m.step + 1);
                    out::note(format_args!("step {:>5}/{}  {message}  ETA {eta}", m.step, self.total));
                    self.last_line = Some(Instant::now());
                }
            }
        }
    }

    fn note(&mut self, text: &str) {
        self.print(text);
    }

    fn copied(&mut self, step: u64, bytes: u64, took: Duration) {
        if out::is_verbose() {
            let (ms, rate) = (took.as_secs_f64() * 1e3, bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9);
            let size = human_bytes(bytes);
            self.print(&format!(
                "step {step:>5}  copied {size} to host memory in {ms:.0} ms ({rate:.1} GB/s), being written"
            ));
        }
    }

    fn saved(&mut self, step: u64, stats: &SaveStats) {
        if out::is_verbose() {
            self.print(&saved_line(step, stats));
        }
    }

    fn sample(&mut self, step: u64, text: &str) {
        if step < self.total {
            let first: String = text.chars().take(160).collect();
            self.print(&format!("step {step:>5}  sample: {}…", first.replace('\n', " ")));
        }
    }
}

/// One save, as printed with `-v`.
fn saved_line(step: u64, stats: &SaveStats) -> String {
    format!(
        "step {step:>5}  saved {} in {:.1} s, a step waited for {:.0} ms at most",
        human_bytes(stats.bytes),
        stats.write_s,
        stats.held_up_ms
    )
}
