//! Programs: the ops of a step in order, with everything needed to run, check and explain them.

use crate::op::Op;
use crate::{Pool, Precision, Shape, Slot};
use std::fmt;
use std::ops::Range;

/// The parts of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Section {
    /// The forward: from tokens to the loss.
    Forward,
    /// The backward: from the loss to every gradient.
    Backward,
    /// The sum of the gradients of all micro-steps, over all ranks. Which of these ops run depends on the micro-step
    /// ([`SumTree`](crate::SumTree)).
    Sum,
    /// Gradient norm and optimizer.
    Update,
}

impl Section {
    /// All sections in execution order.
    pub const ALL: [Self; 4] = [Self::Forward, Self::Backward, Self::Sum, Self::Update];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Sum => "sum",
            Self::Update => "update",
        }
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An op of a program, with its origin and section.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// The op.
    pub op: Op,
    /// Index into the program's origins: the part of the model it comes from.
    pub(crate) origin: usize,
    /// The part of the step it belongs to.
    pub section: Section,
}

/// A row of the parameter table.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Its name, as in the model's files.
    pub name: String,
    /// Whether weight decay applies.
    pub decay: bool,
    /// The weights.
    pub weight: Slot,
    /// The element types of the weights and of their gradients.
    pub precision: Precision,
    /// What updates it.
    pub update: Update,
}

/// What updates a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// AdamW.
    AdamW {
        /// How many elements of the pool before it have no second moment. The pool of second moments has no room for
        /// them.
        skipped: usize,
    },
    /// Muon.
    Muon {
        /// How many matrices of the same size it stacks, each of which is orthogonalised by itself: 3 for q, k and v in
        /// one tensor.
        matrices: usize,
    },
}

/// A matrix that Muon updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MuonMatrix {
    /// The index of its first element in every pool laid out like the parameters.
    pub first: usize,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// The matrices of this size that Muon updates, in the order of the parameter table.
pub fn muon_matrices(params: &[Param], [rows, cols]: [usize; 2]) -> impl Iterator<Item = MuonMatrix> {
    params.iter().flat_map(move |param| {
        let count = match param.update {
            Update::Muon { matrices } if param.matrix() == Some([rows, cols]) => matrices,
            _ => 0,
        };
        let first = param.elements().start;
        (0..count).map(move |i| MuonMatrix { first: first + i * rows * cols, decay: param.decay })
    })
}

impl Param {
    /// The size of the matrices that Muon updates in it; `None` if AdamW updates it.
    pub fn matrix(&self) -> Option<[usize; 2]> {
        let Update::Muon { matrices } = self.update else { return None };
        let (rows, cols) = (self.weight.shape.rows(), self.weight.shape.cols());
        Some([rows / matrices.max(1), cols])
    }

    /// The gradient, at the same position in the gradient pool.
    pub fn grad(&self) -> Slot {
        self.in_pool(Pool::Grads)
    }

    /// The slot in another pool that is laid out like the parameters: the same elements in the same order, in that
    /// pool's element type, at the same position. In the pool of second moments it is closer to the start by those
    /// elements that have none, and empty for a parameter without second moments.
    pub fn in_pool(&self, pool: Pool) -> Slot {
        let dtype = self.precision.of(pool);
        let index = self.weight.offset / self.weight.dtype.size();
        let (index, shape) = match (pool, self.update) {
            (Pool::Moment2, Update::AdamW { skipped }) => (index - skipped, self.weight.shape),
            (Pool::Moment2, Update::Muon { .. }) => (0, Shape::new([0])),
            _ => (index, self.weight.shape),
        };
        Slot { pool, offset: index * dtype.size(), shape, dtype }
    }

    /// Its elements in the pools laid out like the parameters.
    pub fn elements(&self) -> Range<usize> {
        let first = self.weight.offset / self.weight.dtype.size();
        first..first + self.weight.numel()
    }

    /// Its dimensions.
    pub fn shape(&self) -> Shape {
        self.weight.shape
    }
}

/// What a named value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// An activation of the forward.
    Activation,
    /// The gradient of the loss with respect to the activation of that name.
    Gradient,
}

/// A slot with a name, valid right after the op that completes it (later ops may reuse the memory).
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Its name: the origin in the model.
    pub name: String,
    /// Activation or gradient.
    pub kind: ValueKind,
    /// The memory it is stored in.
    pub slot: Slot,
    /// Index of the op after which it is valid.
    pub after: usize,
}

/// Bytes of each pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    sizes: [usize; Pool::ALL.len()],
}

impl Layout {
    pub(crate) fn new(sizes: [usize; Pool::ALL.len()]) -> Self {
        Self { sizes }
    }

    /// Bytes one pool needs.
    pub fn bytes(&self, pool: Pool) -> usize {
        self.sizes[pool.index()]
    }

    /// Bytes of all pools together: exactly what an engine allocates for the program.
    pub fn total(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// The smallest layout that holds either of two programs that share parameters.
    pub fn union(&self, other: &Self) -> Self {
        let mut sizes = self.sizes;
        for (size, &more) in sizes.iter_mut().zip(&other.sizes) {
            *size = (*size).max(more);
        }
        Self { sizes }
    }
}

/// A planned program, ready for an engine.
#[derive(Clone, Debug)]
pub struct Program {
    pub(crate) id: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) origins: Vec<String>,
    pub(crate) params: Vec<Param>,
    pub(crate) frozen: Vec<(String, Slot)>,
    pub(crate) precision: Precision,
    pub(crate) values: Vec<Value>,
    pub(crate) io: Vec<(String, Slot)>,
    pub(crate) layout: Layout,
    pub(crate) activation_lower_bound: usize,
}

impl Program {
    /// A number that is unique among the programs of this process; clones share it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The ops in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Whether its tokens continue sequences over a cache.
    pub fn continues(&self) -> bool {
        self.nodes.iter().any(|node| matches!(node.op, Op::AttentionCached(_)))
    }

    /// The part of the model that an op comes from.
    pub fn origin(&self, node: &Node) -> &str {
        self.origins.get(node.origin).map_or("", String::as_str)
    }

    /// The parameter table, in model order.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The weights that are not trained, in model order; empty unless the parameters are those of adapters.
    pub fn frozen(&self) -> &[(String, Slot)] {
        &self.frozen
    }

    /// The element types of weights and gradients.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Named activations and their gradients, in execution order.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// An input or result by name.
    pub fn io(&self, name: &str) -> Option<Slot> {
        self.io.iter().find(|(n, _)| n == name).map(|&(_, slot)| slot)
    }

    /// Bytes of each pool.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The most activation bytes alive at any one op: a lower bound of every plan.
    pub fn activation_lower_bound(&self) -> usize {
        self.activation_lower_bound
    }

    /// The range of op indices of a section; empty if the program has no op in it.
    pub fn range(&self, section: Section) -> Range<usize> {
        let start = self.nodes.partition_point(|node| node.section < section);
        let end = self.nodes.partition_point(|node| node.section <= section);
        start..end
    }

    /// The ops of a micro-step: those of the forward and of the backward, which follow each other.
    pub fn micro_step(&self) -> Range<usize> {
        self.range(Section::Forward).start..self.range(Section::Backward).end
    }

    /// The ops of a section that come from this part of the model, which must be neighbours.
    pub fn range_at(&self, section: Section, origin: &str) -> Range<usize> {
        let all = self.range(section);
        let is = |i: &usize| self.origin(&self.nodes[*i]) == origin;
        let first = all.clone().find(is).unwrap_or(all.end);
        let end = (first..all.end).find(|i| !is(i)).unwrap_or(all.end);
        first..end
    }

    /// Floating-point operations of a section.
    pub fn flops(&self, section: Section) -> u64 {
        self.nodes[self.range(section)].iter().map(|node| node.op.flops()).sum()
    }

    /// The number of parameters, padding included.
    pub fn num_params(&self) -> usize {
        self.params.iter().map(|param| param.weight.numel()).sum()
    }

    /// A pool laid out like the parameters, as one flat slot. It includes the alignment gaps, which stay 0.
    pub fn flat(&self, pool: Pool) -> Slot {
        flat(&self.params, self.precision, pool)
    }
}

pub(crate) fn flat(params: &[Param], precision: Precision, pool: Pool) -> Slot {
    let size = precision.weights.size();
    let end = |param: &Param| crate::slot::align_up(param.weight.end()) / size;
    let held = |param: &Param| match (pool, param.update) {
        (Pool::Moment2, Update::AdamW { skipped }) => end(param) - skipped,
        (Pool::Moment2, Update::Muon { .. }) => 0,
        _ => end(param),
    };
    let elements = params.iter().map(held).max().unwrap_or(0);
    Slot { pool, offset: 0, shape: Shape::new([elements]), dtype: precision.of(pool) }
}
