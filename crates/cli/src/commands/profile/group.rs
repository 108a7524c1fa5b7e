//! Times added up by name: kernels, op kinds, layers, sections; and the tables that show them.

use crate::out;
use anyhow::Result;
use ironhorse::core::{Limits, Program, Timed};
use serde::Serialize;

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

/// The work of each op.
pub fn of_ops(program: &Program, op_ns: &[u64], name: impl Fn(usize) -> String) -> Vec<(String, Work)> {
    let ops = program.nodes().iter().zip(op_ns).enumerate();
    ops.map(|(i, (node, &ns))| {
        let size = Some((node.op.flops(), node.op.bytes()));
        (name(i), Work { seconds: ns as f64 * 1e-9, size })
    })
    .collect()
}

/// The work of each kernel. What it computes is known if it is its op's only kernel, or if the op is bound by
/// arithmetic and this kernel takes most of its time.
pub fn of_kernels(
    program: &Program,
    kernels: &[Timed],
    op_ns: &[u64],
    limits: &Limits,
) -> Vec<(String, Work)> {
    let mut per_op = vec![0_usize; op_ns.len()];
    for kernel in kernels {
        if let Some(count) = per_op.get_mut(kernel.op) {
            *count += 1;
        }
    }
    let size = |kernel: &Timed| {
        let op = &program.nodes().get(kernel.op)?.op;
        let (count, ns) = (per_op.get(kernel.op)?, op_ns.get(kernel.op)?);
        let (flops, bytes) = (op.flops(), op.bytes());
        let arithmetic = flops as f64 / limits.flops_per_s > bytes as f64 / limits.bytes_per_s;
        (*count == 1 || (arithmetic && kernel.ns > ns / 2)).then_some((flops, bytes))
    };
    let work = |kernel: &Timed| Work { seconds: kernel.ns as f64 * 1e-9, size: size(kernel) };
    kernels.iter().map(|kernel| (kernel.name.clone(), work(kernel))).collect()
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
        let kernel = |op, ns| Timed { op, name: String::new(), start_ns: 0, ns };
        let kernels = [kernel(0, 10), kernel(1, 90), kernel(1, 10)];
        let known: Vec<bool> = of_kernels(&program, &kernels, &[10, 100], &LIMITS)
            .iter()
            .map(|(_, work)| work.size.is_some())
            .collect();
        assert_eq!(known, [true, true, false]);
    }
}
