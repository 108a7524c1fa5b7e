//! Counters in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A number that is counted up, or set.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    /// Counts up.
    pub fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    /// Sets it.
    pub fn set(&self, to: u64) {
        self.0.store(to, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds of the buckets, in seconds.
const BOUNDS: [f64; 12] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, f64::INFINITY];

/// Durations by size.
#[derive(Debug, Default)]
pub struct Seconds {
    buckets: [Number; BOUNDS.len()],
    micros: Number,
}

impl Seconds {
    /// Counts one.
    pub fn record(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let at = BOUNDS.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS.len() - 1);
        self.buckets[at].add(1);
        self.micros.add(took.as_micros() as u64);
    }

    fn write(&self, out: &mut String, (name, help): (&str, &str)) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut count = 0;
        for (bound, bucket) in BOUNDS.iter().zip(&self.buckets) {
            count += bucket.get();
            let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".to_owned() };
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(out, "{name}_sum {}\n{name}_count {count}", self.micros.get() as f64 * 1e-6);
    }
}

/// What a server counts.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Tokens of prompts.
    pub prompt_tokens: Number,
    /// Tokens written.
    pub completion_tokens: Number,
    /// Texts that are written now.
    pub sequences: Number,
    /// The time from the request to the first token.
    pub first_token_seconds: Seconds,
    /// The time from the request to a row of the decoder.
    pub queue_seconds: Seconds,
    /// The time of a step of the decoder.
    pub step_seconds: Seconds,
    /// Requests by path and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
}

impl Metrics {
    /// Counts an answer.
    pub fn answered(&self, path: &'static str, status: u16) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry((path, status)).or_default() += 1;
    }

    /// All metrics in Prometheus's format; `now` are values that are not counted here, each with its name and help.
    pub fn text(&self, now: &[(&str, &str, u64)]) -> String {
        let mut out = String::new();
        let name = "ironhorse_requests_total";
        let _ = writeln!(out, "# HELP {name} Requests by path and status.\n# TYPE {name} counter");
        for ((path, status), count) in &*self.requests.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = writeln!(out, "{name}{{path=\"{path}\",status=\"{status}\"}} {count}");
        }
        for (name, help, number) in [
            ("ironhorse_prompt_tokens_total", "Tokens of prompts.", &self.prompt_tokens),
            ("ironhorse_completion_tokens_total", "Tokens written.", &self.completion_tokens),
        ] {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {}", number.get());
        }
        let sequences = ("ironhorse_sequences", "Texts that are written now.", self.sequences.get());
        for (name, help, value) in now.iter().copied().chain([sequences]) {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        }
        for (seconds, told) in [
            (
                &self.first_token_seconds,
                ("ironhorse_first_token_seconds", "From the request to its first token."),
            ),
            (&self.queue_seconds, ("ironhorse_queue_seconds", "From the request to a row of the decoder.")),
            (&self.step_seconds, ("ironhorse_step_seconds", "Steps of the decoder.")),
        ] {
            seconds.write(&mut out, told);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let metrics = Metrics::default();
        for millis in [0, 2, 2, 50, 1_000_000] {
            metrics.step_seconds.record(Duration::from_millis(millis));
        }
        metrics.answered("/health", 200);
        metrics.answered("/health", 200);
        let text = metrics.text(&[("ironhorse_queued", "Texts that wait.", 3)]);
        for line in [
            "ironhorse_step_seconds_bucket{le=\"0.001\"} 1",
            "ironhorse_step_seconds_bucket{le=\"0.003\"} 3",
            "ironhorse_step_seconds_bucket{le=\"100\"} 4",
            "ironhorse_step_seconds_bucket{le=\"+Inf\"} 5",
            "ironhorse_step_seconds_count 5",
            "ironhorse_requests_total{path=\"/health\",status=\"200\"} 2",
            "ironhorse_queued 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
