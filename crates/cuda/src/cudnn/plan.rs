//! From a graph to something that runs: cuDNN's heuristics name engines, the first that accepts the graph makes the plan.

use super::descriptor::{Attribute, Descriptor, Kind};
use super::graph::{ALIGNMENT, Graph, Role};
use crate::device::Stream;
use crate::ffi::cudnn::Cudnn;
use crate::launch::LibraryCall;
use crate::{Error, Result};
use cudarc::cudnn::sys::cudnnBackendAttributeType_t as Type;
use cudarc::cudnn::sys::cudnnBackendHeurMode_t as Heuristic;
use cudarc::cudnn::sys::cudnnBackendNumericalNote_t as Note;
use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;

/// The heuristics that cuDNN is asked for engines, in this order.
const HEURISTICS: [Heuristic; 3] =
    [Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_B, Heuristic::CUDNN_HEUR_MODE_FALLBACK];
/// Room for an engine's notes; version 9 has ten kinds.
const MOST_NOTES: usize = 64;

/// cuDNN on one stream at a time.
pub(crate) struct Handle {
    cudnn: Rc<Cudnn>,
    raw: *mut c_void,
    stream: Cell<*mut c_void>,
}

impl Handle {
    pub fn new(cudnn: &Rc<Cudnn>, stream: &Stream) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: cuDNN writes the handle; the device's context is current while programs are lowered.
        let status = unsafe { (cudnn.cudnnCreate)(&mut raw) };
        cudnn.check("cudnnCreate", || "a handle".into(), status)?;
        let handle = Self { cudnn: cudnn.clone(), raw, stream: Cell::new(std::ptr::null_mut()) };
        handle.work_on(stream)?;
        Ok(handle)
    }

    /// Puts what is executed from now on on this stream.
    pub fn work_on(&self, stream: &Stream) -> Result<()> {
        if self.stream.get() == stream.raw() {
            return Ok(());
        }
        // SAFETY: both are alive.
        let status = unsafe { (self.cudnn.cudnnSetStream)(self.raw, stream.raw) };
        self.cudnn.check("cudnnSetStream", || "the caller's stream".into(), status)?;
        self.stream.set(stream.raw());
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `cudnnCreate`, destroyed once; calls hold it by `Rc`.
        let _ = unsafe { (self.cudnn.cudnnDestroy)(self.raw) };
    }
}

/// The GPU a plan is made for.
pub(crate) enum Target {
    Handle(Rc<Handle>),
    /// A GPU known by its description only: plans can be made, not run.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests make plans on machines without a GPU"))]
    Described(Descriptor),
}

impl Target {
    fn set(
        &self,
        on: &mut Descriptor,
        handle: Option<Attribute>,
        described: Option<Attribute>,
    ) -> Result<()> {
        match (self, handle, described) {
            (Self::Handle(target), Some(name), _) => on.set_handle(name, target.raw),
            (Self::Described(target), _, Some(name)) => on.set_descriptors(name, &[target]),
            _ => Ok(()),
        }
    }
}

/// A finalised execution plan. What it was made from is kept beside it.
pub(crate) struct Plan {
    plan: Descriptor,
    /// Bytes it needs besides its tensors.
    pub workspace: usize,
    /// cuDNN's number of the engine.
    pub engine: i64,
    /// Whether cuDNN says that its results may differ from run to run.
    pub varies: bool,
    graph: Graph,
    _op_graph: Descriptor,
    _config: Descriptor,
}

impl Plan {
    /// Asks cuDNN for engines and takes the first that accepts the graph; if `repeatable`, the first without the note
    /// "non-deterministic".
    pub fn new(
        cudnn: &Rc<Cudnn>,
        target: &Target,
        graph: Graph,
        name: &str,
        repeatable: bool,
    ) -> Result<Self> {
        let mut op_graph = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, name)?;
        let ops: Vec<&Descriptor> = graph.ops.iter().collect();
        op_graph.set_descriptors(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, &ops)?;
        target.set(&mut op_graph, Some(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE), None)?;
        op_graph.finalize()?;
        let mut refusals = Vec::new();
        for mode in HEURISTICS {
            let candidates = match candidates(cudnn, target, &op_graph, mode) {
                Ok(candidates) => candidates,
                Err(error) => {
                    refusals.push(format!("{mode:?}: {error}"));
                    continue;
                }
            };
            if candidates.is_empty() {
                refusals.push(format!("{mode:?} names no engine"));
            }
            for candidate in candidates {
                if repeatable && candidate.varies {
                    refusals.push(format!("engine {} is noted as non-deterministic", candidate.engine));
                    continue;
                }
                match finalised(cudnn, &candidate.config) {
                    Ok((plan, workspace)) => {
                        let Candidate { config, engine, varies } = candidate;
                        return Ok(Self {
                            plan,
                            workspace,
                            engine,
                            varies,
                            graph,
                            _op_graph: op_graph,
                            _config: config,
                        });
                    }
                    Err(error) => refusals.push(format!("engine {}: {error}", candidate.engine)),
                }
            }
        }
        Err(Error::Unsupported(format!(
            "cuDNN has no engine for {name}{}: {}; CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr shows its reasons",
            if repeatable { " that gives the same bits every time" } else { "" },
            refusals.join("; ")
        )))
    }
}

/// An engine with its settings.
struct Candidate {
    config: Descriptor,
    engine: i64,
    varies: bool,
}

fn candidates(
    cudnn: &Rc<Cudnn>,
    target: &Target,
    op_graph: &Descriptor,
    mode: Heuristic,
) -> Result<Vec<Candidate>> {
    let name = op_graph.label();
    let mut heuristic = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, name)?;
    heuristic.set_descriptors(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[op_graph])?;
    heuristic.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?;
    target.set(&mut heuristic, None, Some(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP))?;
    heuristic.finalize()?;
    let results = Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS;
    let mut configs = (0..heuristic.count(results)?)
        .map(|i| Descriptor::new(cudnn, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, format!("{name} {i}")))
        .collect::<Result<Vec<_>>>()?;
    if configs.is_empty() {
        return Ok(Vec::new());
    }
    let filled = heuristic.get_descriptors(results, &mut configs)?;
    configs.truncate(filled);
    configs.into_iter().map(|config| candidate(cudnn, config)).collect()
}

fn candidate(cudnn: &Rc<Cudnn>, config: Descriptor) -> Result<Candidate> {
    let engine = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR, config.label())?;
    let mut engine = [engine];
    config.get_descriptors(Attribute::CUDNN_ATTR_ENGINECFG_ENGINE, &mut engine)?;
    let [engine] = engine;
    let index = engine.get_i64(Attribute::CUDNN_ATTR_ENGINE_GLOBAL_INDEX)?;
    let notes = engine.get_codes(
        Attribute::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
        Type::CUDNN_TYPE_NUMERICAL_NOTE,
        MOST_NOTES,
    )?;
    let varies = notes.contains(&(Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC as u32));
    tracing::debug!("cuDNN {}: engine {index}, numerical notes {notes:?}", config.label());
    Ok(Candidate { config, engine: index, varies })
}

fn finalised(cudnn: &Rc<Cudnn>, config: &Descriptor) -> Result<(Descriptor, usize)> {
    let mut plan = Descriptor::new(cudnn, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, config.label())?;
    plan.set_descriptors(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config])?;
    plan.finalize()?;
    let workspace = plan.get_i64(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
    Ok((plan, usize::try_from(workspace).unwrap_or(0)))
}

/// A plan with addresses: all it takes to run it.
pub(crate) struct Execution {
    plan: Rc<Plan>,
    handle: Rc<Handle>,
    pack: Descriptor,
    /// The numbers of the graph: the pack points at them, cuDNN reads them at each execution.
    _numbers: Box<[f32]>,
}

impl Execution {
    /// Gives every tensor of the plan its address; the workspace is at least as large as the plan asks.
    pub fn new(plan: &Rc<Plan>, handle: &Rc<Handle>, at: &[(Role, u64)], workspace: u64) -> Result<Self> {
        let mut ids = Vec::new();
        let mut pointers: Vec<*mut c_void> = Vec::new();
        for &role in &plan.graph.roles {
            let found = at.iter().find(|(given, _)| *given == role).map(|&(_, address)| address);
            let Some(address) = found.filter(|&address| address != 0 && address % ALIGNMENT == 0) else {
                let what =
                    format!("cuDNN needs {role:?} at a multiple of {ALIGNMENT} bytes, it is at {found:x?}");
                return Err(Error::Unsupported(what));
            };
            ids.push(role as i64);
            pointers.push(address as *mut c_void);
        }
        let numbers: Box<[f32]> = plan.graph.numbers.iter().map(|&(_, value)| value).collect();
        for (&(id, _), value) in plan.graph.numbers.iter().zip(&numbers) {
            ids.push(id);
            pointers.push((&raw const *value).cast_mut().cast());
        }
        let mut pack =
            Descriptor::new(&handle.cudnn, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, plan.plan.label())?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace as *mut c_void])?;
        pack.finalize()?;
        Ok(Self { plan: plan.clone(), handle: handle.clone(), pack, _numbers: numbers })
    }
}

impl LibraryCall for Execution {
    fn enqueue(&self, stream: &Stream) -> Result<()> {
        if self.handle.stream.get() != stream.raw() {
            return Err(Error::Unsupported("cuDNN was opened for another stream".into()));
        }
        let cudnn = &self.handle.cudnn;
        let plan = &self.plan.plan;
        // SAFETY: the plan is finalised, the pack has an address for each of its tensors and a workspace large enough;
        // whoever made the execution keeps that memory until the stream has done it.
        let status = unsafe { (cudnn.cudnnBackendExecute)(self.handle.raw, plan.raw(), self.pack.raw()) };
        cudnn.check(
            "cudnnBackendExecute",
            || format!("`{}`, engine {}", plan.label(), self.plan.engine),
            status,
        )
    }
}
