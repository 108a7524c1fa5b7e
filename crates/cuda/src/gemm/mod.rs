//! Matrix products by cuBLASLt, and some by our own kernels: which algorithm, found once per problem, kept in memory and on disk.
//!
//! ```text
//! problem.rs  what a product is        search.rs  timing what the library proposes
//! store.rs    choices on disk          column_sums.rs  the bias gradient's own kernel
//! split.rs    f32 on tensor cores      gelu.rs    GELU behind products, by our own kernels
//! load.rs     comparing at the clock of a step
//! ```

mod column_sums;
mod gelu;
mod load;
mod problem;
mod search;
mod split;
mod store;

pub(crate) use column_sums::{ColumnSums, Step, spec};
pub(crate) use gelu::{Saved, gelu_product, partial_bytes, partial_rows};
pub(crate) use problem::{Addresses, Extra, Problem, Sizes};
pub(crate) use search::{Bench, workspace_limit};
pub(crate) use split::{split_product, splits};

use crate::cublaslt::{Handle, Operands, Product};
use crate::device::{Device, Stream};
use crate::ffi::cublaslt::Algo;
use crate::launch::LibraryCall;
use crate::{Cache, Result};
use gelu::Wish;
use ironhorse_core::NOTICE;
use search::{By, Others};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Once};
use store::{Candidate, ChosenAlgorithm, Fastest, GivenAlgorithms, Place};

/// Every specialisation in use.
pub(crate) fn specs() -> Vec<crate::kernels::Spec> {
    let mut specs = column_sums::specs();
    specs.extend(split::specs());
    specs.extend(gelu::specs());
    specs
}

/// Operations from which on an unmeasured choice is stored too, so that a later run, with more memory free or with other
/// proposals, computes the same bits. The library's first proposal for smaller ones depends on its version alone.
const STORED: f64 = 1e6;

/// The library on one device, and what was chosen so far.
pub(crate) struct Gemms {
    handle: Arc<Handle>,
    place: Place,
    cache: Cache,
    /// The choices of another run.
    given: GivenAlgorithms,
    /// `None`: the library has no algorithm.
    plans: HashMap<Problem, Option<ChosenAlgorithm>>,
}

impl Gemms {
    /// Opens the library; `given` are choices of another run.
    pub fn open(device: &'static Device, cache: &Cache, given: &[(String, String)]) -> Result<Self> {
        let handle = Handle::new(device)?;
        let place = Place::new(&device.info, handle.version());
        let plans = HashMap::new();
        let mut gemms =
            Self { handle, place, cache: cache.clone(), given: GivenAlgorithms::default(), plans };
        gemms.give(given);
        Ok(gemms)
    }

    /// Adds choices of another run, for problems that come up from now on.
    pub fn give(&mut self, choices: &[(String, String)]) {
        self.given.add(&self.place, choices);
    }

    /// What was chosen so far and what was handed in, by name.
    pub fn choices(&self) -> Vec<(String, String)> {
        let mut all: BTreeMap<String, String> = self.given.all().collect();
        let chosen = self.plans.iter().filter_map(|(problem, choice)| Some((problem, choice.as_ref()?)));
        let kept = chosen.filter(|(problem, choice)| is_stored(problem, choice));
        all.extend(kept.filter_map(|(problem, choice)| self.place.pack(problem, choice)));
        all.into_iter().collect()
    }

    /// A product at these addresses, with the best algorithm there is. `None` if the library has none, or if a simpler
    /// product and a kernel for the rest are faster.
    pub fn prepare(
        &mut self,
        bench: &mut Bench<'_>,
        problem: &Problem,
        at: &Addresses,
    ) -> Result<Option<Prepared>> {
        let Some(choice) = self.choose(bench, problem, at)? else { return Ok(None) };
        let own = gelu::wish(&bench.device.info, problem) != Wish::Library;
        if choice.fastest(own) != Fastest::Library {
            return Ok(None);
        }
        let product = Product::new(&self.handle, &problem.describe(at))?;
        let beta = if problem.adds { 1.0 } else { 0.0 };
        let Addresses { a, b, d, c, .. } = *at;
        let c = if c == 0 { d } else { c };
        let workspace_bytes = choice.best.workspace;
        let at = Operands { a, b, c, d, alpha: 1.0, beta, workspace: 0, workspace_bytes };
        Ok(Some(Prepared { product, algo: choice.best.algo, at }))
    }

    /// Whether our own kernel computes this product ([`gelu_product`]).
    pub fn is_own(&mut self, bench: &mut Bench<'_>, problem: &Problem, at: &Addresses) -> Result<bool> {
        Ok(match gelu::wish(&bench.device.info, problem) {
            Wish::Library => false,
            Wish::Own => true,
            Wish::Faster => {
                self.choose(bench, problem, at)?.is_some_and(|choice| choice.fastest(true) == Fastest::Own)
            }
        })
    }

    /// Whether a forward with GELU and its backward, in this order, are computed by our own kernels that leave and take its slopes.
    pub fn pass_slopes(
        &mut self,
        bench: &mut Bench<'_>,
        products: [(Problem, Addresses); 2],
    ) -> Result<bool> {
        match products.map(|(problem, _)| gelu::wish(&bench.device.info, &problem)) {
            [Wish::Own, Wish::Own] => return Ok(true),
            [Wish::Faster, Wish::Faster] => {}
            _ => return Ok(false),
        }
        let [forward, backward] = products;
        let forward = self.choose(bench, &forward.0, &forward.1)?;
        let backward = self.choose(bench, &backward.0, &backward.1)?;
        Ok(forward.zip(backward).is_some_and(|(f, b)| ChosenAlgorithm::slopes_are_faster(&f, &b)))
    }

    /// The best algorithm: remembered, handed in, stored, or searched for.
    fn choose(
        &mut self,
        bench: &mut Bench<'_>,
        problem: &Problem,
        at: &Addresses,
    ) -> Result<Option<ChosenAlgorithm>> {
        if let Some(known) = self.plans.get(problem) {
            return Ok(known.clone());
        }
        let choice = match self.known(bench, problem, at)? {
            Some(choice) => Some(choice),
            None => self.search(bench, problem, at)?,
        };
        self.plans.insert(*problem, choice.clone());
        Ok(choice)
    }

    /// The choice that was handed in, else the stored one, if the library takes it. What was handed in is stored too.
    fn known(&self, bench: &Bench<'_>, problem: &Problem, at: &Addresses) -> Result<Option<ChosenAlgorithm>> {
        let stored = self.place.read(&self.cache, problem);
        if let Some(given) = self.given.get(&self.place, problem)
            && let Some(choice) = self.accepted(bench, problem, at, given.clone())?
        {
            if stored.is_none() {
                self.place.write(&self.cache, problem, &choice);
            }
            return Ok(Some(choice));
        }
        stored.map_or(Ok(None), |stored| self.accepted(bench, problem, at, stored))
    }

    /// A choice of an earlier run, if the library still takes it.
    fn accepted(
        &self,
        bench: &Bench<'_>,
        problem: &Problem,
        at: &Addresses,
        mut choice: ChosenAlgorithm,
    ) -> Result<Option<ChosenAlgorithm>> {
        let product = Product::new(&self.handle, &problem.describe(at))?;
        let limit = workspace_limit(bench.device);
        match product.accepts(&choice.best.algo).filter(|&bytes| bytes <= limit) {
            Some(bytes) => {
                choice.best.workspace = choice.best.workspace.max(bytes).min(limit);
                Ok(Some(choice))
            }
            None => {
                tracing::warn!(
                    "{problem}: cuBLASLt rejects the stored algorithm; results may differ in the last bits"
                );
                Ok(None)
            }
        }
    }

    fn search(
        &mut self,
        bench: &mut Bench<'_>,
        problem: &Problem,
        at: &Addresses,
    ) -> Result<Option<ChosenAlgorithm>> {
        let start = std::time::Instant::now();
        let by = if self.cache.keeps() { By::Time } else { By::Order };
        if by == By::Time && search::takes_long(problem) {
            say_that_it_takes_long();
        }
        let Some(mut choice) = search::search(bench, &self.handle, problem, at, by)? else {
            tracing::debug!("{problem}: cuBLASLt has no algorithm");
            return Ok(None);
        };
        if by == By::Order {
            warn_unkept();
            return Ok(Some(choice));
        }
        let Some(ms) = choice.best.ms else {
            if is_stored(problem, &choice) {
                self.place.write(&self.cache, problem, &choice);
            }
            return Ok(Some(choice));
        };
        let gain = choice.first_ms.map_or(0.0, |first| 100.0 * (first / ms - 1.0));
        let others = Others {
            plain: self.plainer(bench, problem, at)?,
            own: gelu::wish(&bench.device.info, problem) != Wish::Library,
        };
        let mut compared = String::new();
        if others.plain.is_some() || others.own {
            bench.contest(&self.handle, problem, at, &mut choice, &others)?;
            compared = choice.compared();
            choice.settle();
        }
        tracing::info!(
            "{problem}: {:.0} TFLOP/s ({ms:.4} ms), {gain:.1} % faster than the first proposal{compared}; searched in {:?}",
            problem.flops() / f64::from(ms) * 1e-9,
            start.elapsed()
        );
        if self.place.write(&self.cache, problem, &choice) {
            return Ok(Some(choice));
        }
        // A later run would measure again and might choose otherwise.
        warn_unkept();
        search::search(bench, &self.handle, problem, at, By::Order)
    }

    /// The product that leaves a kernel to do the rest, with its best algorithm, if that was measured.
    fn plainer(
        &mut self,
        bench: &mut Bench<'_>,
        problem: &Problem,
        at: &Addresses,
    ) -> Result<Option<(Problem, Candidate)>> {
        let Some(extra) = problem.extra.plainer() else { return Ok(None) };
        let plain = problem.extra(extra);
        let at = Addresses { aux: 0, bias: if extra == Extra::Bias { at.bias } else { 0 }, ..*at };
        let choice = self.choose(bench, &plain, &at)?;
        Ok(choice.filter(|choice| choice.best.ms.is_some()).map(|choice| (plain, choice.best)))
    }
}

/// Whether a choice is kept for later runs: the others depend on the library's version alone.
fn is_stored(problem: &Problem, choice: &ChosenAlgorithm) -> bool {
    choice.best.ms.is_some() || problem.flops() >= STORED
}

/// Says once why the first start with these sizes takes longer.
fn say_that_it_takes_long() {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::info!(target: NOTICE, "finding the fastest matrix products for these sizes: some seconds, once");
    });
}

/// Warns once that algorithms are not timed.
fn warn_unkept() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            "chosen algorithms cannot be kept: matrix products use cuBLASLt's first proposals, unmeasured, so that every \
             run computes the same bits; {} names a folder to keep measured ones in",
            crate::cache::CACHE_VARIABLE
        );
    });
}

/// A product with its algorithm and addresses; the workspace is still to be given.
pub(crate) struct Prepared {
    product: Product,
    algo: Algo,
    at: Operands,
}

impl Prepared {
    /// Bytes of workspace it needs.
    pub fn workspace(&self) -> usize {
        self.at.workspace_bytes
    }

    /// The product with a factor of its own and one of what is added to it.
    pub fn scaled(mut self, alpha: f32, beta: f32) -> Self {
        (self.at.alpha, self.at.beta) = (alpha, beta);
        self
    }

    /// The product with its workspace.
    pub fn with_workspace(mut self, address: u64) -> Self {
        self.at.workspace = address;
        self
    }
}

impl LibraryCall for Prepared {
    fn enqueue(&self, stream: &Stream) -> Result<()> {
        self.product.enqueue(&self.algo, &self.at, stream)
    }
}
