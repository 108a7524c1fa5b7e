//! Times added up by name: kernels, op kinds, layers, sections; and the tables that show them.

use crate::out;
use anyhow::Result;
use ironhorse::core::{Limits, Program, Slot, Timed};
use serde::Serialize;
use std::ops::Range;

/// All ops or kernels of one name.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Group {
    pub name: String,
    pub calls: usize,
    pub ms: f64,
    pub share: f64,
    pub gflops: f64,
    pub gb_per_s: f64,
    /// Time the group would need at the device's limits, over the time it took.
    pub of_possible: f64,
    #[serde(skip)]
    flops: f64,
    #[serde(skip)]
    bytes: f64,
    #[serde(skip)]
    least: f64,
    /// Whether what it computes is known: a kernel may be one of several of an op.
    #[serde(skip)]
    known: bool,
}

/// Work of a known size and the time it took.
pub struct Work {
    pub seconds: f64,
    /// Operations and bytes, where known.
    pub size: Option<(u64, u64)>,
}

impl Group {
    /// The part of its time that it would need at the device's limits; `None` where what it computes is not known.
    pub fn known_part(&self) -> Option<f64> {
        self.known.then_some(self.of_possible)
    }

    fn add(&mut self, work: &Work, limits: &Limits) {
        self.calls += 1;
        self.ms += work.seconds * 1e3;
        match work.size {
            Some((flops, bytes)) => {
                self.flops += flops as f64;
                self.bytes += bytes as f64;
                self.least += limits.least_seconds(flops, bytes);
            }
            None => self.known = false,
        }
    }

    fn finish(&mut self, total_ms: f64) {
        let per_second = |amount: f64| if self.ms > 0.0 { amount / (self.ms / 1e3) } else { 0.0 };
        let rates = [self.flops / 1e9, self.bytes / 1e9, self.least].map(per_second);
        [self.gflops, self.gb_per_s, self.of_possible] = if self.known { rates } else { [0.0; 3] };
        self.share = if total_ms > 0.0 { self.ms / total_ms } else { 0.0 };
    }
}

/// Adds up by name, the longest first. Shares are of `total_ms`, or of the sum where none is given.
pub fn groups(
    work: impl IntoIterator<Item = (String, Work)>,
    limits: &Limits,
    total_ms: Option<f64>,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (name, work) in work {
        let at = groups.iter().position(|group| group.name == name).unwrap_or_else(|| {
            groups.push(Group { name, known: true, ..Group::default() });
            groups.len() - 1
        });
        groups[at].add(&work, limits);
    }
    let total = total_ms.unwrap_or_else(|| groups.iter().map(|group| group.ms).sum());
    groups.iter_mut().for_each(|group| group.finish(total));
    groups.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    groups
}

/// The time between kernels, as a row.
pub fn idle(ms: f64, total_ms: f64) -> Group {
    let mut group = Group { name: "idle".into(), ms, ..Group::default() };
    group.finish(total_ms);
    group
}

/// The ops of a program in order, those that the engine joined in one range.
pub fn joined(kernels: &[Timed], ops: usize) -> Vec<Range<usize>> {
    let mut last: Vec<usize> = (0..ops).collect(); // the op that each one is done with
    for kernel in kernels {
        for at in last.iter_mut().take(kernel.op).skip(kernel.first) {
            *at = kernel.op.max(*at);
        }
    }
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut until = 0;
    for (op, last) in last.into_iter().enumerate() {
        match ranges.last_mut().filter(|_| op < until) {
            Some(range) => range.end = op + 1,
            None => ranges.push(op..op + 1),
        }
        until = until.max(last + 1);
    }
    ranges
}

/// The kinds of joined ops, as one name; several of a kind in a row are counted.
pub fn kinds(program: &Program, ops: Range<usize>) -> String {
    let rows = program.nodes()[ops].chunk_by(|a, b| a.op.name() == b.op.name());
    let names = rows.map(|row| match (row[0].op.name(), row.len()) {
        (name, 1) => name.to_owned(),
        (name, count) => format!("{name} × {count}"),
    });
    names.collect::<Vec<_>>().join(" + ")
}

/// Operations and bytes of joined ops: those of each, less what one reads of another's result.
pub fn size(program: &Program, ops: Range<usize>) -> (u64, u64) {
    let nodes = &program.nodes()[ops];
    let (mut flops, mut bytes) = (0, 0_u64);
    for (i, node) in nodes.iter().enumerate() {
        let made = |slot: &Slot| nodes[..i].iter().any(|earlier| earlier.op.writes().any(|to| to == *slot));
        let passed: u64 = node.op.reads().filter(made).map(|slot| slot.bytes() as u64).sum();
        flops += node.op.flops();
        bytes += node.op.bytes().saturating_sub(passed);
    }
    (flops, bytes)
}

/// The work of each op, or of several that are joined.
pub fn of_ops(
    program: &Program,
    ops: Vec<Range<usize>>,
    op_ns: &[u64],
    name: impl Fn(Range<usize>) -> String,
) -> Vec<(String, Work)> {
    ops.into_iter()
        .map(|ops| {
            let ns: u64 = op_ns[ops.clone()].iter().sum();
            let size = Some(size(program, ops.clone()));
            (name(ops), Work { seconds: ns as f64 * 1e-9, size })
        })
        .collect()
}

/// The work of each kernel. What it computes is known if it is its op's only kernel, or if the op is bound by
/// arithmetic and this kernel takes most of its time. Ops that are joined count as one.
pub fn of_kernels(
    program: &Program,
    kernels: &[Timed],
    op_ns: &[u64],
    limits: &Limits,
) -> Vec<(String, Work)> {
    let ops = joined(kernels, op_ns.len());
    let place = |kernel: &Timed| ops.iter().position(|ops| ops.contains(&kernel.op));
    let places: Vec<Option<usize>> = kernels.iter().map(place).collect();
    let mut counts = vec![0_usize; ops.len()];
    places.iter().flatten().for_each(|&at| counts[at] += 1);
    let size = |kernel: &Timed, at: usize| {
        let ns: u64 = op_ns[ops[at].clone()].iter().sum();
        let (flops, bytes) = size(program, ops[at].clone());
        let arithmetic = flops as f64 / limits.flops_per_s > bytes as f64 / limits.bytes_per_s;
        (counts[at] == 1 || (arithmetic && kernel.ns > ns / 2)).then_some((flops, bytes))
    };
    let work = |(kernel, at): (&Timed, &Option<usize>)| {
        let size = at.and_then(|at| size(kernel, at));
        (kernel.name.clone(), Work { seconds: kernel.ns as f64 * 1e-9, size })
    };
    kernels.iter().zip(&places).map(work).collect()
}

/// How a table is printed.
#[derive(Clone, Copy)]
pub struct Style {
    /// Rates in TFLOP/s and TB/s instead of GFLOP/s and GB/s.
    pub tera: bool,
    /// Rows to print.
    pub top: usize,
}

const NAME_WIDTH: usize = 24;
const WIDE_NAME_WIDTH: usize = 56;

/// Prints groups; of those beyond the first `top` only their number and their sum. Idle time comes last.
pub fn table(first: &str, groups: &[Group], style: Style) -> Result<()> {
    let is_long = |group: &Group| group.name.chars().count() > NAME_WIDTH;
    let width = if groups.iter().any(is_long) { WIDE_NAME_WIDTH } else { NAME_WIDTH };
    let units = if style.tera { ["TFLOP/s", "TB/s"] } else { ["GFLOP/s", "GB/s"] };
    out::line(format!(
        "{first:<width$} {:>5} {:>9} {:>6} {:>9} {:>7} {:>12}",
        "calls", "ms", "share", units[0], units[1], "of possible"
    ))?;
    let (idle, groups): (Vec<&Group>, Vec<&Group>) = groups.iter().partition(|group| group.calls == 0);
    let rest = groups.get(style.top..).unwrap_or_default();
    for g in groups.iter().take(style.top) {
        row(g, width, style)?;
    }
    if !rest.is_empty() {
        let (ms, share): (f64, f64) = rest.iter().fold((0.0, 0.0), |(a, b), g| (a + g.ms, b + g.share));
        let calls: usize = rest.iter().map(|group| group.calls).sum();
        let name = format!("{} more", rest.len());
        out::line(format!("{name:<width$} {calls:>5} {ms:>9.2} {:>5.1}%", share * 100.0))?;
    }
    idle.into_iter().try_for_each(|group| row(group, width, style))
}

fn row(g: &Group, width: usize, style: Style) -> Result<()> {
    let name: String = if g.name.chars().count() > width {
        g.name.chars().take(width - 1).chain(['…']).collect()
    } else {
        g.name.clone()
    };
    let start = format!("{name:<width$} {:>5} {:>9.2} {:>5.1}%", g.calls, g.ms, g.share * 100.0);
    let rates = if g.known {
        let (scale, digits) = if style.tera { (1e-3, 2) } else { (1.0, 1) };
        let (flops, bytes) = (g.gflops * scale, g.gb_per_s * scale);
        format!("{flops:>9.1} {bytes:>7.digits$} {:>11.0}%", g.of_possible * 100.0)
    } else {
        format!("{:>9} {:>7} {:>12}", "-", "-", "-")
    };
    out::line(format!("{start} {rates}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse::core::{Builder, DType, op::LinearFwd};

    const LIMITS: Limits = Limits { flops_per_s: 1e9, bytes_per_s: 1e9 };

    #[test]
    fn rows_and_idle_time_add_up_to_the_step() {
        let work = [("a", 1.0), ("b", 2.0), ("a", 3.0)]
            .map(|(name, ms)| (name.to_owned(), Work { seconds: ms * 1e-3, size: Some((4, 8)) }));
        let mut rows = groups(work, &LIMITS, Some(8.0));
        assert_eq!((rows[0].name.as_str(), rows[0].calls), ("a", 2));
        rows.push(idle(2.0, 8.0));
        assert!((rows.iter().map(|row| row.ms).sum::<f64>() - 8.0).abs() < 1e-9);
        assert!((rows.iter().map(|row| row.share).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_kernel_that_shares_its_op_has_no_rate_unless_it_does_the_arithmetic() {
        let mut b = Builder::new();
        let [inp, weight, out] = ["inp", "weight", "out"].map(|name| b.io(name, [64, 64], DType::F32));
        for _ in 0..2 {
            b.push(LinearFwd { out, pre: None, inp, weight, bias: None }).unwrap();
        }
        let program = b.finish().unwrap();
        let kernel = |op, ns| Timed { op, first: op, name: String::new(), start_ns: 0, ns };
        let kernels = [kernel(0, 10), kernel(1, 90), kernel(1, 10)];
        let known: Vec<bool> = of_kernels(&program, &kernels, &[10, 100], &LIMITS)
            .iter()
            .map(|(_, work)| work.size.is_some())
            .collect();
        assert_eq!(known, [true, true, false]);
    }

    /// Three layers one behind the other, of which the engine joins the last two.
    #[test]
    fn joined_ops_are_one_line_with_the_work_of_both() {
        let mut b = Builder::new();
        let [a, mid, out, weight] =
            ["a", "mid", "out", "weight"].map(|name| b.io(name, [64, 64], DType::F32));
        for (inp, out) in [(weight, a), (a, mid), (mid, out)] {
            b.push(LinearFwd { out, pre: None, inp, weight, bias: None }).unwrap();
        }
        let program = b.finish().unwrap();
        let kernels = [
            Timed { op: 0, first: 0, name: "one".into(), start_ns: 0, ns: 10 },
            Timed { op: 2, first: 1, name: "two".into(), start_ns: 10, ns: 30 },
        ];
        let op_ns = [10, 0, 30];
        assert_eq!(joined(&kernels, 3), [0..1, 1..3]);
        let alone = size(&program, 0..1);
        let both = (2 * alone.0, 2 * alone.1 - mid.bytes() as u64);
        let ops = of_ops(&program, joined(&kernels, 3), &op_ns, |ops| kinds(&program, ops));
        let found: Vec<_> = ops.iter().map(|(name, work)| (name.as_str(), work.size)).collect();
        assert_eq!(found, [("linear_fwd", Some(alone)), ("linear_fwd × 2", Some(both))]);
        let sizes: Vec<_> =
            of_kernels(&program, &kernels, &op_ns, &LIMITS).into_iter().map(|(_, work)| work.size).collect();
        assert_eq!(sizes, [Some(alone), Some(both)]);
    }

    #[test]
    fn every_op_is_in_one_range() {
        let kernel = |first, op| Timed { op, first, name: String::new(), start_ns: 0, ns: 1 };
        assert_eq!(joined(&[], 2), [0..1, 1..2]);
        assert_eq!(joined(&[kernel(0, 0), kernel(1, 3), kernel(3, 3)], 5), [0..1, 1..4, 4..5]);
        assert_eq!(joined(&[kernel(0, 1), kernel(1, 2)], 4), [0..3, 3..4]);
        assert_eq!(joined(&[kernel(0, 9)], 3)[0], 0..3, "a kernel of an op beyond the end");
    }
}
