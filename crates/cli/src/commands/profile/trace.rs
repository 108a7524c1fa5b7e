//! A step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

use super::group::{kinds, size};
use ironhorse::core::{Program, Timed};
use serde_json::{Value, json};

const PROCESS: u32 = 1;
const SECTIONS: u32 = 1;
const OPS: u32 = 2;
const KERNELS: u32 = 3;

/// Tracks of sections, of ops with where they come from, and, if the engine tells them apart, of kernels.
pub fn trace(title: &str, program: &Program, timeline: &[Timed], has_kernels: bool) -> Value {
    let mut events = vec![track("process_name", SECTIONS, title)];
    let tracks = [(SECTIONS, "sections"), (OPS, "ops"), (KERNELS, "kernels")];
    for (id, name) in tracks.into_iter().filter(|(id, _)| *id != KERNELS || has_kernels) {
        events.push(track("thread_name", id, name));
    }
    let section = |op: usize| program.nodes().get(op).map_or("", |node| node.section.name());
    for span in spans(timeline, |timed| section(timed.op)) {
        events.push(event(SECTIONS, section(span.op), [span.start, span.end], json!({})));
    }
    for span in spans(timeline, |timed| timed.op) {
        let Some(node) = program.nodes().get(span.op) else { continue };
        let ops = span.first..span.op + 1;
        let name = format!("{} {}", kinds(program, ops.clone()), program.origin(node));
        let (flops, bytes) = size(program, ops);
        let args = json!({"op": span.op, "flops": flops, "bytes": bytes});
        events.push(event(OPS, name.trim_end(), [span.start, span.end], args));
    }
    if has_kernels {
        for timed in timeline {
            let time = [timed.start_ns, timed.start_ns + timed.ns];
            events.push(event(KERNELS, &timed.name, time, json!({"op": timed.op})));
        }
    }
    json!({"displayTimeUnit": "ns", "traceEvents": events})
}

struct Span {
    first: usize,
    op: usize,
    start: u64,
    end: u64,
}

/// Neighbours that share a key, joined.
fn spans<K: PartialEq>(timeline: &[Timed], key: impl Fn(&Timed) -> K) -> Vec<Span> {
    timeline
        .chunk_by(|a, b| key(a) == key(b))
        .map(|group| Span {
            first: group.iter().map(|timed| timed.first).min().unwrap_or(0),
            op: group.first().map_or(0, |timed| timed.op),
            start: group.iter().map(|timed| timed.start_ns).min().unwrap_or(0),
            end: group.iter().map(|timed| timed.start_ns + timed.ns).max().unwrap_or(0),
        })
        .collect()
}

fn track(what: &str, id: u32, name: &str) -> Value {
    json!({"ph": "M", "name": what, "pid": PROCESS, "tid": id, "args": {"name": name}})
}

/// Times in microseconds, as the format asks.
fn event(track: u32, name: &str, [start, end]: [u64; 2], args: Value) -> Value {
    let (ts, dur) = (start as f64 / 1e3, (end - start) as f64 / 1e3);
    json!({"ph": "X", "name": name, "pid": PROCESS, "tid": track, "ts": ts, "dur": dur, "args": args})
}
