//! Finding the fastest algorithm: the library proposes candidates, measurements decide.
//!
//! Timings run in memory of their own, filled with noise: no slot is written, and the power drawn is that of real numbers.

use super::column_sums::ColumnSums;
use super::gelu::{gelu_product, partial_bytes};
use super::problem::{ALIGN, At, Extra, Problem, bytes_of};
use super::store::{Candidate, Choice};
use crate::args::Args;
use crate::cublaslt::{Handle, Operands, Product, Wanted};
use crate::device::{Buffer, Device, Pinned, Stream};
use crate::ffi::cublaslt::{Found, reduction};
use crate::measure::{self, fill_with_noise, fill_with_noise_of, full_grid, mean_ms};
use crate::{Error, Result};
use ironhorse_core::DType;
use std::sync::Arc;

/// Proposals asked for.
const PROPOSALS: usize = 16;
/// Milliseconds to spend on trying each proposal once, about: of a product that takes long only the first are tried.
const FIRST_ROUND_MS: f64 = 60.0;
const LEAST_PROPOSALS: f64 = 3.0;
/// Operations below which the library's first proposal is taken unmeasured: the launch costs more than the product.
const SMALL: f64 = 1.34e8;
/// Milliseconds one measurement should at least cover.
const LEAST_MS: f64 = 0.25;
/// How many go to the final, and how many rounds it has at most.
const FINALISTS: usize = 4;
const ROUNDS: usize = 5;
/// Milliseconds to spend on one finalist, about.
const FINAL_MS: f64 = 30.0;
/// Milliseconds of each turn of our own kernel and the library's, and turns before the first that count: by then a chip that its power limit
/// slows down in a long run is as slow as there, where the two need not compare as they do at full clock.
const TURN_MS: f64 = 20.0;
const WARM_TURNS: usize = 5;
/// A candidate slower than the best by this factor after the first round is dropped.
const HOPELESS: f32 = 1.1;
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
    at: At,
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

/// How to choose among what the library proposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The fastest, by measuring: another run may find another one.
    Time,
    /// The first that repeats itself, in the library's order: the same for every run with this version of it.
    Order,
}

/// An algorithm for a product; `None` if the library has none. The first proposal, unmeasured, where measuring is not worth
/// it or memory is short.
pub(crate) fn search(
    bench: &mut Bench<'_>,
    handle: &Arc<Handle>,
    problem: &Problem,
    at: &At,
    by: By,
) -> Result<Option<Choice>> {
    let limit = workspace_limit(bench.device);
    let product = Product::new(handle, &problem.describe(at))?;
    let mut found = product.propose(&wanted(problem, limit))?;
    let Some(&first) = found.first() else { return Ok(None) };
    let unmeasured = Choice {
        best: candidate(&first, None),
        others: vec![],
        first_ms: None,
        rival_ms: None,
        own_ms: None,
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
    Ok(best.map(|best| Choice {
        best,
        others: timed.take(3).collect(),
        first_ms,
        rival_ms: None,
        own_ms: None,
    }))
}

fn candidate(found: &Found, ms: Option<f32>) -> Candidate {
    Candidate { algo: found.algo, workspace: found.workspace, ms }
}

impl Bench<'_> {
    /// Times all proposals once, the best few again; fastest first.
    fn race(
        &mut self,
        problem: &Problem,
        product: &Product,
        found: &[Found],
        arena: &Arena,
    ) -> Result<Vec<Candidate>> {
        let repeats = (LEAST_MS / guess_ms(problem)).ceil().clamp(1.0, 20.0) as u32;
        let mut timed = Vec::new();
        for found in found {
            let at = operands(problem, found.workspace, arena);
            let run = || product.enqueue(&found.algo, &at, self.stream);
            // The first run loads the kernel. What does not start is not a candidate.
            if let Err(error) = run() {
                tracing::debug!("{problem}: a proposal does not start: {error}");
                continue;
            }
            timed.push((found, vec![mean_ms(self.stream, repeats, run)?]));
        }
        timed.sort_by(|a, b| a.1[0].total_cmp(&b.1[0]));
        let best = timed.first().map_or(0.0, |timed| timed.1[0]);
        let finalists = timed.iter().take(FINALISTS).filter(|timed| timed.1[0] <= best * HOPELESS).count();
        if finalists > 1 {
            // In turn, so that a change of the clock affects all alike.
            let rounds = (FINAL_MS / guess_ms(problem)).clamp(1.0, ROUNDS as f64) as usize;
            for _ in 0..rounds {
                for (found, ms) in &mut timed[..finalists] {
                    let at = operands(problem, found.workspace, arena);
                    let run = || product.enqueue(&found.algo, &at, self.stream);
                    ms.push(mean_ms(self.stream, repeats, run)?);
                }
            }
        }
        let mut all: Vec<Candidate> =
            timed.into_iter().map(|(found, ms)| candidate(found, Some(median(ms)))).collect();
        all[..finalists].sort_by(|a, b| a.ms.unwrap_or(0.0).total_cmp(&b.ms.unwrap_or(0.0)));
        Ok(all)
    }

    /// Times our own kernel and the library's best algorithm in turn. Nothing changes where there is too little memory.
    pub fn race_own(
        &mut self,
        handle: &Arc<Handle>,
        problem: &Problem,
        at: &At,
        choice: &mut Choice,
    ) -> Result<()> {
        let limit = workspace_limit(self.device);
        let Some(arena) = self.arena(problem, at, limit)? else { return Ok(()) };
        if partial_bytes(problem) > limit {
            return Ok(());
        }
        let product = Product::new(handle, &problem.describe(&arena.at))?;
        let operands = operands(problem, choice.best.workspace, &arena);
        let (_, function, grid, mut args) = gelu_product(self.device, problem, &arena.at, arena.workspace)?;
        let repeats = (TURN_MS / guess_ms(problem)).ceil().clamp(1.0, 200.0) as u32;
        let (mut library_ms, mut own_ms) = (Vec::new(), Vec::new());
        for _ in 0..WARM_TURNS + ROUNDS {
            let run = || product.enqueue(&choice.best.algo, &operands, self.stream);
            library_ms.push(mean_ms(self.stream, repeats, run)?);
            own_ms.push(mean_ms(self.stream, repeats, || self.stream.launch(function, grid, &mut args))?);
        }
        // With the derivative it sums the columns of its result on the way, which is the next op's bias gradient.
        let spared_ms = match problem.extra {
            Extra::GeluGrad => {
                let (rows, cols) = (problem.n, problem.m);
                self.column_sums_ms([rows, cols], problem, arena.at.d, &arena)?.unwrap_or(0.0)
            }
            _ => 0.0,
        };
        let last = |ms: Vec<f32>| median(ms.into_iter().skip(WARM_TURNS - 1).collect());
        let library_ms = last(library_ms);
        // Two kernels were timed as the library was before.
        let slowdown = choice.best.ms.map_or(1.0, |before| library_ms / before);
        choice.rival_ms = choice.rival_ms.map(|ms| ms * slowdown);
        choice.best.ms = Some(library_ms);
        choice.own_ms = Some((last(own_ms) - spared_ms).max(0.0));
        Ok(())
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
    fn arena(&mut self, problem: &Problem, at: &At, workspace: usize) -> Result<Option<Arena>> {
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
        let at = At { a, b, d, bias: if has_bias { bias } else { 0 }, aux, c: 0, scales };
        Ok(Some(Arena { _buffer: buffer, at, workspace, sums, written }))
    }

    /// Milliseconds of what a plainer product leaves to a kernel. GELU's kernels move as many bytes a second as a copy.
    pub fn rest_ms(&mut self, problem: &Problem, at: &At) -> Result<Option<f32>> {
        let limit = workspace_limit(self.device);
        let Some(arena) = self.arena(problem, at, limit)? else { return Ok(None) };
        let bytes = bytes_of(&problem.d());
        let copy_ms = || self.warm_ms(|| self.stream.copy(arena.at.d, arena.at.aux, bytes));
        let ms = match problem.extra {
            Extra::None | Extra::Bias => None,
            Extra::Gelu { .. } => Some(copy_ms()?),
            Extra::GeluGrad => Some(1.5 * copy_ms()?), // reads two, writes one
            Extra::BiasGrad => self.column_sums_ms([problem.k, problem.n], problem, arena.at.b, &arena)?,
        };
        self.stream.synchronize()?;
        Ok(ms)
    }

    /// Milliseconds of the sums over rows of a matrix at `x`, of the type of the operands.
    fn column_sums_ms(
        &self,
        [rows, cols]: [usize; 2],
        problem: &Problem,
        x: u64,
        arena: &Arena,
    ) -> Result<Option<f32>> {
        let Problem { inputs, output, .. } = *problem;
        let to = if arena.at.bias == 0 { arena.at.aux } else { arena.at.bias };
        let sums = ColumnSums { rows, cols, inputs, output, x, sums: to, adds: false };
        if sums.scratch() > workspace_limit(self.device) {
            return Ok(None);
        }
        let mut steps = sums.steps(self.device, arena.workspace)?;
        let run = || {
            let mut steps = steps.iter_mut();
            steps.try_for_each(|(_, function, grid, args)| self.stream.launch(*function, *grid, args))
        };
        Ok(Some(self.warm_ms(run)?))
    }

    /// Once to warm up, then timed.
    fn warm_ms(&self, mut run: impl FnMut() -> Result<()>) -> Result<f32> {
        run()?;
        mean_ms(self.stream, ROUNDS as u32, run)
    }
}

fn operands(problem: &Problem, workspace_bytes: usize, arena: &Arena) -> Operands {
    let At { a, b, d, .. } = arena.at;
    let beta = if problem.adds { 1.0 } else { 0.0 };
    Operands { a, b, c: d, d, alpha: 1.0, beta, workspace: arena.workspace, workspace_bytes }
}

/// The median of some measurements; the first round's is used only if there is no other.
fn median(mut ms: Vec<f32>) -> f32 {
    if ms.len() > 1 {
        ms.remove(0);
    }
    ms.sort_by(f32::total_cmp);
    ms.get(ms.len() / 2).copied().unwrap_or(f32::MAX)
}

const _: () = assert!(256 % ALIGN == 0, "the arena's matrices are aligned at least as well as slots");

#[cfg(test)]
mod tests {
    use super::super::problem::Sizes;
    use super::*;

    #[test]
    fn medians_leave_out_the_first_round() {
        assert_eq!(median(vec![5.0]), 5.0);
        assert_eq!(median(vec![9.0, 3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn bf16_results_are_never_added_up_in_bf16() {
        let sizes = Sizes { rows: 8, ic: 8, oc: 8, inputs: DType::BF16, output: DType::BF16, tf32: false };
        let with = |output| Problem::weight_gradient(&Sizes { output, ..sizes }, &At::default());
        assert_eq!(wanted(&with(DType::BF16), 0).reductions, reduction::COMPUTE_TYPE);
        assert_eq!(wanted(&with(DType::F32), 0).reductions, reduction::COMPUTE_TYPE | reduction::OUTPUT_TYPE);
    }
}
