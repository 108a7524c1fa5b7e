//! Attention by cuDNN, through its backend interface: graphs of primitive operations that its engines recognise.
//!
//! ```text
//! descriptor.rs  one descriptor, typed attributes, errors that name what failed
//! graph.rs       tensors and operations
//! attention_*.rs the two graphs
//! plan.rs        heuristics, the plan, its execution
//! ```
//! Set `IRONHORSE_CUDNN_TRACE=1` and debug logging to see every step; `CUDNN_LOGLEVEL_DBG=2` makes cuDNN log its own steps.

mod attention_bwd;
mod attention_fwd;
mod descriptor;
mod graph;
mod plan;

pub(crate) use attention_bwd::DqSum;
pub(crate) use attention_fwd::Shape;
pub(crate) use graph::Role;
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
    /// A refusal is kept too: all layers of a model ask the same.
    plans: HashMap<(Direction, Shape), Result<Rc<Plan>>>,
    /// cuDNN compiles engines with NVRTC, which it looks for by name: it finds one that is open, wherever that came from.
    _nvrtc: Option<Open>,
}

impl Session {
    /// Finds and opens the library.
    pub fn open(stream: &Stream) -> Result<Self> {
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
        Ok(Self { cudnn, handle, target, compute, plans: HashMap::new(), _nvrtc: nvrtc })
    }

    /// The plan for a shape, made at the first request.
    pub fn plan(&mut self, direction: Direction, shape: &Shape) -> Result<Rc<Plan>> {
        if let Some(known) = self.plans.get(&(direction, *shape)) {
            return known.clone();
        }
        let plan = accepts(self.compute, shape)
            .and_then(|()| make_plan(&self.cudnn, &self.target, direction, shape))
            .map(Rc::new);
        self.plans.insert((direction, *shape), plan.clone());
        plan
    }
}

/// Whether cuDNN computes this shape correctly, as far as its rules are known.
fn accepts(compute: (u32, u32), shape: &Shape) -> Result<()> {
    let largest = if compute.0 == 9 { 256 } else { 128 };
    let Shape { heads, kv_heads, seq, head_dim, qkv_row, out_row, .. } = *shape;
    let refusal = if compute < (8, 0) {
        format!("compute capability {}.{} is below 8.0", compute.0, compute.1)
    } else if head_dim % 8 != 0 || head_dim > largest {
        format!("a head of {head_dim} is not a multiple of 8 up to {largest}")
    } else if seq % SEQ_MULTIPLE != 0 {
        format!("a sequence of {seq} is not a multiple of {SEQ_MULTIPLE}")
    } else if qkv_row % 8 != 0 || out_row % 8 != 0 {
        format!("rows of {qkv_row} and {out_row} elements are not multiples of 16 bytes")
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
    let Shape { batch, heads, kv_heads, seq, head_dim, .. } = *shape;
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
