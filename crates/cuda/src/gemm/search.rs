//! Finding the fastest algorithm: the library proposes candidates, measurements decide.
//!
//! Timings run in memory of their own, filled with noise: no slot is written, and the power drawn is that of real numbers.

use super::column_sums::{ColumnSums, Step};
use super::gelu::{Saved, gelu_product, partial_bytes};
use super::load::{Load, Turn, first_look, under_load};
use super::problem::{ALIGN, Addresses, Extra, Problem, bytes_of};
use super::store::{Candidate, ChosenAlgorithm};
use crate::args::Args;
use crate::cublaslt::{Handle, Operands, Product, Wanted};
use crate::device::{Buffer, Device, Pinned, Stream};
use crate::ffi::cublaslt::{Algo, Found, reduction};
use crate::measure::{self, fill_with_noise, fill_with_noise_of, full_grid, mean_ms};
use crate::{Error, Result};
use ironhorse_core::DType;
use std::sync::Arc;

/// Proposals asked for.
const PROPOSALS: usize = 16;
/// Milliseconds to spend on trying each proposal once, about: of a product that takes long only the first are tried.
const FIRST_ROUND_MS: f64 = 100.0;
const LEAST_PROPOSALS: f64 = 3.0;
/// Operations below which the library's first proposal is taken unmeasured: the launch costs more than the product.
const SMALL: f64 = 1.34e8;
/// Device memory a search leaves free.
const RESERVE: usize = 256 << 20;

/// Resources for timing.
pub(crate) struct Bench<'a> {
    pub device: &'static Device,
    pub stream: &'a Stream,
}

/// Memory a product is timed in.
struct Arena {
    /// Held for its memory.
    _buffer: Buffer,
    at: Addresses,
    workspace: u64,
    /// Two sums of what a product wrote.
    sums: u64,
    /// Everything a product may write, its workspace aside: address and bytes.
    written: (u64, usize),
}

/// The most workspace an algorithm may use.
pub(crate) fn workspace_limit(device: &Device) -> usize {
    if device.info.compute.0 >= 9 { 64 << 20 } else { 32 << 20 }
}

/// What to ask the library for. Partial sums of a split product are added up in f32 and out of place: adding them in
/// bf16 would round each of them.
pub(crate) fn wanted(problem: &Problem, workspace: usize) -> Wanted {
    let output = if problem.output == DType::F32 { reduction::OUTPUT_TYPE } else { 0 };
    let [a, b, d, _] = problem.align;
    Wanted { workspace, reductions: reduction::COMPUTE_TYPE | output, align: [a, b, d], count: PROPOSALS }
}

/// A rough guess of the milliseconds of a product; only decides how often to repeat it.
fn guess_ms(problem: &Problem) -> f64 {
    let rate = match (problem.inputs, problem.tf32) {
        (DType::F32, false) => 4e10,
        (DType::F32, true) => 3e11,
        (DType::F8(_), _) => 1.2e12,
        _ => 6e11,
    };
    problem.flops() / rate
}

/// A way to compute a product with its extra.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Library,
    /// A plainer product and a kernel for the rest.
    Apart,
    /// Our own kernel.
    Own,
    /// Our own kernel that leaves or takes slopes of GELU.
    Slopes,
}

/// What a way puts on the stream.
enum Work {
    Product { product: Product, algo: Algo, at: Operands },
    Kernel(Step),
    Copy { to: u64, from: u64, bytes: usize },
}

impl Work {
    fn enqueue(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Product { product, algo, at } => product.enqueue(algo, at, stream),
            Self::Kernel((_, function, grid, args)) => stream.launch(*function, *grid, args),
            Self::Copy { to, from, bytes } => stream.copy(*to, *from, *bytes),
        }
    }
}

/// Other ways than the library's to compute a product with its extra.
pub(crate) struct Others {
    /// The plainer product and its best algorithm.
    pub plain: Option<(Problem, Candidate)>,
    /// Whether our own kernel may be taken.
    pub own: bool,
}

/// How to choose among what the library proposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The fastest, by measuring: another run may find another one.
    Time,
    /// The first that repeats itself, in the library's order: the same for every run with this version of it.
    Order,
}

/// Whether a search times products for so long that it should be said.
pub(crate) fn takes_long(problem: &Problem) -> bool {
    Load::of(problem.flops()) == Load::SUSTAINED
}

/// An algorithm for a product; `None` if the library has none. The first proposal, unmeasured, where measuring is not worth
/// it or memory is short.
pub(crate) fn search(
    bench: &mut Bench<'_>,
    handle: &Arc<Handle>,
    problem: &Problem,
    at: &Addresses,
    by: By,
) -> Result<Option<ChosenAlgorithm>> {
    let limit = workspace_limit(bench.device);
    let product = Product::new(handle, &problem.describe(at))?;
    let mut found = product.propose(&wanted(problem, limit))?;
    let Some(&first) = found.first() else { return Ok(None) };
    let unmeasured = ChosenAlgorithm {
        best: candidate(&first, None),
        others: vec![],
        first_ms: None,
        rival_ms: None,
        own_ms: None,
        slopes_ms: None,
    };
    if problem.flops() < SMALL {
        return Ok(Some(unmeasured));
    }
    let tries = (FIRST_ROUND_MS / guess_ms(problem)).clamp(LEAST_PROPOSALS, PROPOSALS as f64);
    found.truncate(tries as usize);
    let Some(arena) = bench.arena(problem, at, limit)? else { return Ok(Some(unmeasured)) };
    let product = Product::new(handle, &problem.describe(&arena.at))?;
    let timed = match by {
        By::Time => bench.race(problem, &product, &found, &arena)?,
        By::Order => found.iter().map(|found| candidate(found, None)).collect(),
    };
    let first_ms = timed.iter().find(|timed| timed.algo == first.algo).and_then(|timed| timed.ms);
    let mut timed = timed.into_iter();
    let best = loop {
        let Some(best) = timed.next() else { break None };
        if bench.repeats_itself(problem, &product, &best, &arena)? {
            break Some(best);
        }
        tracing::info!("{problem}: an algorithm is not deterministic; using the next one");
    };
    Ok(best.map(|best| ChosenAlgorithm {
        best,
        others: timed.take(3).collect(),
        first_ms,
        rival_ms: None,
        own_ms: None,
        slopes_ms: None,
    }))
}

fn candidate(found: &Found, ms: Option<f32>) -> Candidate {
    Candidate { algo: found.algo, workspace: found.workspace, ms }
}

impl Bench<'_> {
    /// Times all proposals once, the best few again, as a step runs them; fastest first.
    fn race(
        &mut self,
        problem: &Problem,
        product: &Product,
        found: &[Found],
        arena: &Arena,
    ) -> Result<Vec<Candidate>> {
        let mut started = Vec::new();
        for found in found {
            let at = operands(problem, found.workspace, arena);
            let run = || product.enqueue(&found.algo, &at, self.stream);
            // The first run loads the kernel. What does not start is not a candidate.
            if let Err(error) = run() {
                tracing::debug!("{problem}: a proposal does not start: {error}");
                continue;
            }
            started.push(found);
        }
        let time = |Turn { way, skip, repeats }: Turn| {
            let at = operands(problem, started[way].workspace, arena);
            mean_ms(self.stream, skip, repeats, || product.enqueue(&started[way].algo, &at, self.stream))
        };
        let load = Load::of(problem.flops());
        let full = first_look(started.len(), load, guess_ms(problem), time)?;
        let ms = under_load(&full, load, time)?;
        let mut all: Vec<Candidate> =
            started.into_iter().zip(ms).map(|(found, ms)| candidate(found, Some(ms))).collect();
        all.sort_by(|a, b| a.ms.unwrap_or(0.0).total_cmp(&b.ms.unwrap_or(0.0)));
        Ok(all)
    }

    /// Times the library's best algorithm beside other ways to compute the same: the plainer product with its own best algorithm and a
    /// kernel for the rest, and our own kernel where it may be taken. Where our own also sums the columns of its result, which is the
    /// next op's bias gradient, the others are timed together with those sums. Nothing changes where there is too little memory.
    pub fn contest(
        &mut self,
        handle: &Arc<Handle>,
        problem: &Problem,
        at: &Addresses,
        choice: &mut ChosenAlgorithm,
        others: &Others,
    ) -> Result<()> {
        let limit = workspace_limit(self.device);
        let Some(arena) = self.arena(problem, at, limit)? else { return Ok(()) };
        let own = others.own && partial_bytes(problem) <= limit;
        let spared = match problem.extra {
            Extra::GeluGrad if own => {
                self.column_sums([problem.n, problem.m], problem, arena.at.d, &arena)?
            }
            _ => Vec::new(),
        };
        let mut ways = vec![(Way::Library, self.library_way(handle, problem, &arena, &choice.best)?)];
        if let Some((plain, best)) = &others.plain
            && let Some(rest) = self.rest(problem, &arena)?
        {
            let mut apart = self.library_way(handle, plain, &arena, best)?;
            apart.extend(rest);
            ways.push((Way::Apart, apart));
        }
        for (_, work) in &mut ways {
            work.extend(spared.iter().cloned().map(Work::Kernel));
        }
        if own {
            for (way, saved) in [(Way::Own, Saved::Inputs), (Way::Slopes, Saved::Slopes)] {
                let kernel = gelu_product(self.device, problem, &arena.at, saved, arena.workspace)?;
                ways.push((way, vec![Work::Kernel(kernel)]));
            }
        }
        let time = |ways: &mut [(Way, Vec<Work>)], Turn { way, skip, repeats }: Turn| {
            let run = || ways[way].1.iter_mut().try_for_each(|work| work.enqueue(self.stream));
            mean_ms(self.stream, skip, repeats, run)
        };
        let count = ways.len();
        for way in 0..count {
            time(&mut ways, Turn { way, skip: 1, repeats: 1 })?; // loads kernels
        }
        let load = Load::of(problem.flops());
        let full = first_look(count, load, guess_ms(problem), |turn| time(&mut ways, turn))?;
        let ms = under_load(&full, load, |turn| time(&mut ways, turn))?;
        for ((way, _), ms) in ways.iter().zip(ms) {
            match way {
                Way::Library => choice.best.ms = Some(ms),
                Way::Apart => choice.rival_ms = Some(ms),
                Way::Own => choice.own_ms = Some(ms),
                Way::Slopes => choice.slopes_ms = Some(ms),
            }
        }
        Ok(())
    }

    /// A product of the library in the arena.
    fn library_way(
        &self,
        handle: &Arc<Handle>,
        problem: &Problem,
        arena: &Arena,
        best: &Candidate,
    ) -> Result<Vec<Work>> {
        let has_aux = matches!(problem.extra, Extra::Gelu { .. } | Extra::GeluGrad);
        let has_bias = !matches!(problem.extra, Extra::None | Extra::GeluGrad);
        let Addresses { aux, bias, .. } = arena.at;
        let at = Addresses {
            aux: if has_aux { aux } else { 0 },
            bias: if has_bias { bias } else { 0 },
            ..arena.at
        };
        let product = Product::new(handle, &problem.describe(&at))?;
        Ok(vec![Work::Product { product, algo: best.algo, at: operands(problem, best.workspace, arena) }])
    }

    /// What a plainer product leaves to a kernel. GELU's kernels move as many bytes a second as a copy.
    fn rest(&self, problem: &Problem, arena: &Arena) -> Result<Option<Vec<Work>>> {
        let bytes = bytes_of(&problem.d());
        let copy = |bytes| Work::Copy { to: arena.at.d, from: arena.at.aux, bytes };
        Ok(match problem.extra {
            Extra::None | Extra::Bias => None,
            Extra::Gelu { .. } => Some(vec![copy(bytes)]),
            Extra::GeluGrad => Some(vec![copy(bytes), copy(bytes / 2)]), // reads two, writes one
            Extra::BiasGrad => {
                let steps = self.column_sums([problem.k, problem.n], problem, arena.at.b, arena)?;
                (!steps.is_empty()).then(|| steps.into_iter().map(Work::Kernel).collect())
            }
        })
    }

    /// The sums over rows of a matrix at `x`, of the type of the operands; none where there is too little memory for them.
    fn column_sums(
        &self,
        [rows, cols]: [usize; 2],
        problem: &Problem,
        x: u64,
        arena: &Arena,
    ) -> Result<Vec<Step>> {
        let Problem { inputs, output, .. } = *problem;
        let to = if arena.at.bias == 0 { arena.at.aux } else { arena.at.bias };
        let sums = ColumnSums { rows, cols, inputs, output, x, sums: to, adds: false };
        if sums.scratch() > workspace_limit(self.device) {
            return Ok(Vec::new());
        }
        Ok(sums.steps(self.device, arena.workspace)?.into())
    }

    /// Whether an algorithm writes the same bits twice from the same input.
    fn repeats_itself(
        &mut self,
        problem: &Problem,
        product: &Product,
        candidate: &Candidate,
        arena: &Arena,
    ) -> Result<bool> {
        let checksum = self.device.function(&measure::spec().kernel("limits_checksum"))?;
        let (start, bytes) = arena.written;
        self.stream.zero(arena.sums, 16)?;
        for sum in [arena.sums, arena.sums + 8] {
            fill_with_noise(self.stream, start, bytes)?; // what is added to, and the side matrices read
            product.enqueue(&candidate.algo, &operands(problem, candidate.workspace, arena), self.stream)?;
            let mut args = Args::new().ptr(sum).ptr(start).u64(bytes as u64 / 16);
            self.stream.launch(checksum, full_grid(self.stream), &mut args)?;
        }
        let host = Pinned::new(self.device, 16)?;
        self.stream.download(&host, 0, arena.sums, 16)?;
        self.stream.synchronize()?;
        let (first, second) = host.as_slice().split_at(8);
        Ok(first == second)
    }

    /// Memory for all matrices with noise in it. Where that is too much, A and B are read where they are; `None` where
    /// not even the result fits.
    fn arena(&mut self, problem: &Problem, at: &Addresses, workspace: usize) -> Result<Option<Arena>> {
        let up = |bytes: usize| bytes.next_multiple_of(256);
        let [a, b, d] = [problem.a(), problem.b(), problem.d()].map(|x| problem.batch * bytes_of(&x));
        let has_aux = matches!(problem.extra, Extra::Gelu { .. } | Extra::GeluGrad);
        let (aux, bias) = (if has_aux { d } else { 0 }, 4 * problem.m.max(problem.n));
        let results = up(d) + up(aux) + up(bias) + up(workspace) + 2 * up(1);
        let (free, _) = self.device.memory()?;
        let all = results + up(a) + up(b) + RESERVE <= free;
        let own = if all { up(a) + up(b) } else { 0 };
        let fits = all || (results + RESERVE <= free && at.a != 0 && at.b != 0);
        // Free memory may be fragmented, so that even a size that fits can be refused.
        let buffer = match Buffer::new(self.device, if fits { own + results } else { 0 }) {
            Ok(buffer) if fits => buffer,
            Ok(_) | Err(Error::OutOfMemory(_)) => {
                tracing::warn!("{problem}: too little free memory to time its algorithms");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let mut next = buffer.address();
        let mut take = |bytes: usize| {
            let start = next;
            next += up(bytes) as u64;
            start
        };
        let (sums, workspace) = (take(1), take(workspace));
        let scale = take(1);
        let noisy = take(0);
        let (bias, d) = (take(bias), take(d));
        let aux = if has_aux { take(aux) } else { 0 };
        let written = (noisy, (take(0) - noisy) as usize);
        let (a, b) = if all { (take(a), take(b)) } else { (at.a, at.b) };
        let end = take(0);
        fill_with_noise(self.stream, noisy, (end - noisy) as usize)?;
        if all {
            for (matrix, at) in [(problem.a(), a), (problem.b(), b)] {
                fill_with_noise_of(self.stream, matrix.dtype, at, up(problem.batch * bytes_of(&matrix)))?;
            }
        }
        fill_with_noise(self.stream, scale, 16)?;
        let scales = at.scales.map(|address| if address == 0 { 0 } else { scale });
        let has_bias = matches!(problem.extra, Extra::Bias | Extra::Gelu { bias: true } | Extra::BiasGrad);
        let at = Addresses { a, b, d, bias: if has_bias { bias } else { 0 }, aux, c: 0, scales };
        Ok(Some(Arena { _buffer: buffer, at, workspace, sums, written }))
    }
}

fn operands(problem: &Problem, workspace_bytes: usize, arena: &Arena) -> Operands {
    let Addresses { a, b, d, .. } = arena.at;
    let beta = if problem.adds { 1.0 } else { 0.0 };
    Operands { a, b, c: d, d, alpha: 1.0, beta, workspace: arena.workspace, workspace_bytes }
}

/// The median of some measurements.
pub(super) fn median(mut ms: Vec<f32>) -> Option<f32> {
    ms.sort_by(f32::total_cmp);
    ms.get(ms.len() / 2).copied()
}

const _: () = assert!(256 % ALIGN == 0, "the arena's matrices are aligned at least as well as slots");

#[cfg(test)]
mod tests {
    use super::super::problem::Sizes;
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![5.0]), Some(5.0));
        assert_eq!(median(vec![9.0, 3.0, 1.0]), Some(3.0));
    }

    #[test]
    fn bf16_results_are_never_added_up_in_bf16() {
        let sizes = Sizes { rows: 8, ic: 8, oc: 8, inputs: DType::BF16, output: DType::BF16, tf32: false };
        let with = |output| Problem::weight_gradient(&Sizes { output, ..sizes }, &Addresses::default());
        assert_eq!(wanted(&with(DType::BF16), 0).reductions, reduction::COMPUTE_TYPE);
        assert_eq!(wanted(&with(DType::F32), 0).reductions, reduction::COMPUTE_TYPE | reduction::OUTPUT_TYPE);
    }
}
