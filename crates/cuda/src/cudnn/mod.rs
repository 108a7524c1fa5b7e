//! Attention by cuDNN, through its backend interface: graphs of primitive operations that its engines recognise.
//!
//! ```text
//! descriptor.rs  one descriptor, typed attributes, errors that name what failed
//! graph.rs       tensors and operations
//! attention_*.rs the two graphs
//! plan.rs        heuristics, the plan, its execution
//! parts.rs       the backward in parts that need little memory
//! ```
//! Set `IRONHORSE_CUDNN_TRACE=1` and debug logging to see every step; `CUDNN_LOGLEVEL_DBG=2` makes cuDNN log its own steps.

mod attention_bwd;
mod attention_fwd;
mod descriptor;
mod graph;
mod parts;
mod plan;

pub(crate) use attention_bwd::DqSum;
pub(crate) use attention_fwd::{Shape, Steps};
pub(crate) use graph::{ALIGNMENT, BF16, F16, Role};
pub(crate) use parts::{AttentionParts, Backward};
pub(crate) use plan::{Execution, Handle, Plan};

use crate::device::{Stream, human};
use crate::ffi::cudnn::Cudnn;
use crate::ffi::library::{NVRTC, Open};
use crate::{Error, Result};
use plan::Target;
use std::collections::HashMap;
use std::rc::Rc;

/// The oldest cuDNN we use: it masks with -inf and clears its sums of d_q itself.
const LEAST_VERSION: usize = 91000;
/// Sequences must be a multiple of this: up to 9.15 the backward is wrong for others without a padding mask.
const SEQ_MULTIPLE: i64 = 128;
/// The version from which on eager ops use it for sequences of any length: what python/tests/test_torch_attention.py was run with.
const ANY_LENGTH_VERSION: usize = 91900;

/// Which sequences cuDNN is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lengths {
    /// Multiples of 128: for programs, whose bits do not depend on cuDNN's version.
    Whole,
    /// Sequences of any length, where cuDNN's version computes them right.
    Any,
}

/// Shapes that plans are made for. None is given up for another one: work that uses it may be running or be recorded in a graph.
const MOST_PLANS: usize = 1024;

/// What a plan computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Forward,
    Backward(DqSum),
}

/// cuDNN, open on the engine's stream, with the plans made so far.
pub(crate) struct Session {
    cudnn: Rc<Cudnn>,
    pub handle: Rc<Handle>,
    target: Target,
    compute: (u32, u32),
    lengths: Lengths,
    /// A refusal is kept too: all layers of a model ask the same.
    plans: HashMap<(Direction, Shape), Result<Rc<Plan>>>,
    /// The backward of each shape.
    parts: HashMap<(DqSum, Shape), Result<Rc<AttentionParts>>>,
    /// cuDNN compiles engines with NVRTC, which it looks for by name: it finds one that is open, wherever that came from.
    _nvrtc: Option<Open>,
}

impl Session {
    /// Finds and opens the library.
    pub fn open(stream: &Stream, lengths: Lengths) -> Result<Self> {
        let nvrtc = Open::find(NVRTC).ok();
        let cudnn = Rc::new(Cudnn::load()?);
        let version = cudnn.version();
        if version < LEAST_VERSION {
            return Err(Error::Unsupported(format!(
                "{} is cuDNN {}, {} is needed",
                cudnn.path().display(),
                version_text(version),
                version_text(LEAST_VERSION)
            )));
        }
        // Stays loaded for the next engine of this process: its files are hundreds of megabytes.
        std::mem::forget(cudnn.clone());
        let handle = Rc::new(Handle::new(&cudnn, stream)?);
        tracing::info!("cuDNN {} at {}", version_text(version), cudnn.path().display());
        let (target, compute) = (Target::Handle(handle.clone()), stream.device().info.compute);
        let lengths = if version < ANY_LENGTH_VERSION { Lengths::Whole } else { lengths };
        Ok(Self {
            cudnn,
            handle,
            target,
            compute,
            lengths,
            plans: HashMap::new(),
            parts: HashMap::new(),
            _nvrtc: nvrtc,
        })
    }

    /// The plan for a shape, made at the first request.
    pub fn plan(&mut self, direction: Direction, shape: &Shape) -> Result<Rc<Plan>> {
        if let Some(known) = self.plans.get(&(direction, *shape)) {
            return known.clone();
        }
        room(self.plans.len())?;
        let plan = accepts(self.compute, self.lengths, shape)
            .and_then(|()| make_plan(&self.cudnn, &self.target, direction, shape))
            .map(Rc::new);
        self.plans.insert((direction, *shape), plan.clone());
        plan
    }

    /// The backward of a shape, in parts that need little memory.
    pub fn parts(&mut self, dq_sum: DqSum, shape: &Shape) -> Result<Rc<AttentionParts>> {
        if let Some(known) = self.parts.get(&(dq_sum, *shape)) {
            return known.clone();
        }
        room(self.parts.len())?;
        let parts = AttentionParts::new(self, dq_sum, shape).map(Rc::new);
        self.parts.insert((dq_sum, *shape), parts.clone());
        parts
    }
}

/// Whether one more shape is kept.
fn room(kept: usize) -> Result<()> {
    if kept < MOST_PLANS {
        return Ok(());
    }
    Err(Error::Unsupported(format!("cuDNN attention: there are {MOST_PLANS} other shapes already")))
}

/// Whether an error means that cuDNN cannot do it. A lost device would stop our kernels too.
pub(crate) fn is_refusal(error: &Error) -> bool {
    use Error::{Library, LibraryMissing, SymbolMissing, Unsupported};
    matches!(error, Unsupported(_) | LibraryMissing { .. } | SymbolMissing { .. } | Library { .. })
}

/// Whether cuDNN computes this shape correctly, as far as its rules are known.
fn accepts(compute: (u32, u32), lengths: Lengths, shape: &Shape) -> Result<()> {
    let largest = if compute.0 == 9 { 256 } else { 128 };
    let Shape { heads, kv_heads, q_len, kv_len, head_dim, .. } = *shape;
    let steps = [shape.q, shape.k, shape.v, shape.out];
    let refusal = if compute < (8, 0) {
        format!("compute capability {}.{} is below 8.0", compute.0, compute.1)
    } else if head_dim % 8 != 0 || head_dim > largest {
        format!("a head of {head_dim} is not a multiple of 8 up to {largest}")
    } else if let Some(len) =
        [q_len, kv_len].into_iter().find(|len| lengths == Lengths::Whole && len % SEQ_MULTIPLE != 0)
    {
        format!("a sequence of {len} is not a multiple of {SEQ_MULTIPLE}")
    } else if let Some(steps) = steps.into_iter().find(|steps| steps.iter().any(|step| step % 8 != 0)) {
        format!("steps of {steps:?} elements are not multiples of 16 bytes")
    } else if kv_heads == 0 || heads % kv_heads != 0 {
        format!("{kv_heads} heads of keys do not divide {heads}")
    } else {
        return Ok(());
    };
    Err(Error::Unsupported(format!("cuDNN attention: {refusal}")))
}

fn make_plan(cudnn: &Rc<Cudnn>, target: &Target, direction: Direction, shape: &Shape) -> Result<Plan> {
    let (graph, repeatable) = match direction {
        Direction::Forward => (attention_fwd::attention_fwd(cudnn, shape)?, true),
        Direction::Backward(sum) => (attention_bwd::attention_bwd(cudnn, shape, sum)?, sum == DqSum::Fixed),
    };
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, .. } = *shape;
    let seq = if q_len == kv_len { format!("{q_len}") } else { format!("{q_len}/{kv_len}") };
    let name = format!("attention {direction:?} B={batch} NH={heads}/{kv_heads} T={seq} HD={head_dim}");
    let plan = Plan::new(cudnn, target, graph, &name, repeatable)?;
    tracing::info!(
        "cuDNN {}: {name}: engine {}, {} of workspace{}",
        version_text(cudnn.version()),
        plan.engine,
        human(plan.workspace),
        if plan.varies { ", noted as non-deterministic" } else { "" }
    );
    Ok(plan)
}

fn version_text(version: usize) -> String {
    format!("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100)
}

#[cfg(test)]
mod tests;
