//! Matrix products by cuBLASLt: which algorithm, found once per problem, kept in memory and on disk.
//!
//! ```text
//! problem.rs  what a product is        search.rs  timing what the library proposes
//! store.rs    choices on disk          column_sums.rs  the bias gradient's own kernel
//! ```

mod column_sums;
mod problem;
mod search;
mod store;

pub(crate) use column_sums::{ColumnSums, spec, specs};
pub(crate) use problem::{At, Extra, Problem, Sizes};
pub(crate) use search::{Bench, workspace_limit};

use crate::device::Device;
use crate::ffi::cublaslt::{Algo, Handle, Operands, Product};
use crate::ffi::driver::Stream;
use crate::launch::Call;
use crate::{Cache, Result};
use std::collections::HashMap;
use std::rc::Rc;
use store::{Choice, Place};

/// Operations from which on an unmeasured choice is stored too, so that a later run, with more memory free or with other
/// proposals, computes the same bits. The library's first proposal for smaller ones hangs on its version alone.
const STORED: f64 = 1e6;

/// The library on one device, and what was chosen so far.
pub(crate) struct Gemms {
    handle: Rc<Handle>,
    place: Place,
    cache: Cache,
    /// `None`: the library has nothing for it.
    plans: HashMap<Problem, Option<Choice>>,
}

impl Gemms {
    /// Opens the library.
    pub fn open(device: &Rc<Device>, cache: &Cache) -> Result<Self> {
        let handle = Handle::new(device)?;
        let place = Place::new(&device.info, handle.version());
        Ok(Self { handle, place, cache: cache.clone(), plans: HashMap::new() })
    }

    /// A product at these addresses, with the best algorithm there is. `None` if the library has none, or if a plainer
    /// product and a kernel for the rest are faster.
    pub fn prepare(&mut self, bench: &mut Bench<'_>, problem: &Problem, at: &At) -> Result<Option<Prepared>> {
        let Some(choice) = self.choose(bench, problem, at)? else { return Ok(None) };
        if choice.is_beaten() {
            return Ok(None);
        }
        let product = Product::new(&self.handle, &problem.describe(at))?;
        let beta = if problem.adds { 1.0 } else { 0.0 };
        let At { a, b, d, .. } = *at;
        let workspace_bytes = choice.best.workspace;
        let at = Operands { a, b, d, beta, workspace: 0, workspace_bytes };
        Ok(Some(Prepared { product, algo: choice.best.algo, at }))
    }

    /// The best algorithm: remembered, stored, or searched for.
    fn choose(&mut self, bench: &mut Bench<'_>, problem: &Problem, at: &At) -> Result<Option<Choice>> {
        if let Some(known) = self.plans.get(problem) {
            return Ok(known.clone());
        }
        let choice = match self.stored(bench, problem, at)? {
            Some(choice) => Some(choice),
            None => self.search(bench, problem, at)?,
        };
        self.plans.insert(*problem, choice.clone());
        Ok(choice)
    }

    /// The stored choice, if the library still takes it.
    fn stored(&self, bench: &Bench<'_>, problem: &Problem, at: &At) -> Result<Option<Choice>> {
        let Some(mut choice) = self.place.read(&self.cache, problem) else { return Ok(None) };
        let product = Product::new(&self.handle, &problem.describe(at))?;
        let limit = workspace_limit(bench.device);
        match product.accepts(&choice.best.algo).filter(|&bytes| bytes <= limit) {
            Some(bytes) => {
                choice.best.workspace = choice.best.workspace.max(bytes).min(limit);
                Ok(Some(choice))
            }
            None => {
                tracing::warn!("{problem}: cuBLASLt refuses the stored algorithm; searching again");
                Ok(None)
            }
        }
    }

    fn search(&mut self, bench: &mut Bench<'_>, problem: &Problem, at: &At) -> Result<Option<Choice>> {
        let start = std::time::Instant::now();
        let Some(mut choice) = search::search(bench, &self.handle, problem, at)? else {
            tracing::debug!("{problem}: cuBLASLt has no algorithm");
            return Ok(None);
        };
        let Some(ms) = choice.best.ms else {
            if problem.flops() >= STORED {
                self.place.write(&self.cache, problem, &choice);
            }
            return Ok(Some(choice));
        };
        if let Some(plainer) = problem.extra.plainer() {
            let plain_at = At { aux: 0, bias: if plainer == Extra::Bias { at.bias } else { 0 }, ..*at };
            let plain = self.choose(bench, &problem.extra(plainer), &plain_at)?;
            if let Some(plain_ms) = plain.and_then(|plain| plain.best.ms) {
                choice.rival_ms = bench.rest_ms(problem, at)?.map(|rest| plain_ms + rest);
            }
        }
        let tflops = |ms: f32| problem.flops() / f64::from(ms) * 1e-9;
        let gain = choice.first_ms.map_or(0.0, |first| 100.0 * (first / ms - 1.0));
        let rival = choice.rival_ms.map_or(String::new(), |ms| format!("; in two kernels {ms:.4} ms"));
        tracing::info!(
            "{problem}: {:.0} TFLOP/s ({ms:.4} ms), {gain:.1} % faster than the first proposal{rival}; searched in {:?}",
            tflops(ms),
            start.elapsed()
        );
        self.place.write(&self.cache, problem, &choice);
        Ok(Some(choice))
    }
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

    /// With its workspace.
    pub fn with_workspace(mut self, address: u64) -> Self {
        self.at.workspace = address;
        self
    }
}

impl Call for Prepared {
    fn enqueue(&self, stream: &Stream) -> Result<()> {
        self.product.enqueue(&self.algo, &self.at, stream)
    }
}
