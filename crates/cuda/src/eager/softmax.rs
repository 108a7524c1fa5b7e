//! Softmax of rows, and the kernels that [`super::loss`] shares with it.

use super::layout::{pointers, whole_vectors};
use super::rows::{Team, congruent, empty};
use super::{Launch, OnStream};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use ironhorse_core::eager::{Array, Float, Rows, Softmax, SoftmaxBwd};

/// A kernel of loss/softmax.cu, in two forms: for rows held in registers (VECS vectors in each thread), and for all others.
#[derive(Clone, Copy)]
pub(super) enum Form {
    Forward,
    Backward,
    Log,
}

impl Form {
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Forward => ["softmax_held", "softmax_any"],
            Self::Backward => ["softmax_bwd_held", "softmax_bwd_any"],
            Self::Log => ["log_softmax_held", "log_softmax_any"],
        }
    }

    fn spec(self, float: Float, vecs: Option<u32>) -> Spec {
        let spec = Spec::of("loss/softmax.cu", float);
        let spec = vecs.into_iter().fold(spec, |spec, vecs| spec.define("VECS", vecs));
        if matches!(self, Self::Log) { spec.define("LOG", 1) } else { spec }
    }

    /// The threads that hold a row of `x`, if they can.
    fn team(self, at: &OnStream<'_>, x: Array, cols: usize) -> Option<Team> {
        let edges = !whole_vectors(&[x], cols, x.float);
        // `THREADS` of loss/softmax.cu; fewer of the newest GPUs, where the kernels need more registers.
        let wide = if at.info().compute.0 >= 10 { 768 } else { 1024 };
        match self {
            // Two arrays are held: 1024 threads with four vectors of each.
            Self::Backward => Team::held(cols, x.float, edges, 4, |_| 1024),
            _ => Team::held(cols, x.float, edges, 8, |vecs| if vecs == 8 { wide } else { 512 }),
        }
    }

    /// Launches for `arrays`, which all have these rows; `args` are the addresses.
    pub fn launch(self, at: &OnStream<'_>, arrays: &[Array], rows: Rows, args: Args) -> Result<()> {
        let (x, vector) = (arrays[0], congruent(arrays));
        let ([held, any], args) = (self.names(), args.u64(rows.rows as u64));
        match self.team(at, x, rows.cols).filter(|_| vector) {
            Some(team) => {
                let kernel = self.spec(x.float, Some(team.vecs)).kernel(held);
                at.launch(&kernel, team.grid(rows.rows), args.u32(rows.cols as u32).u32(team.lanes))
            }
            None => {
                let team = Team::streamed(rows.cols, 32, 512);
                let args = args.u64(rows.cols as u64).u32(team.lanes).u32(vector.into());
                at.launch(&self.spec(x.float, None).kernel(any), team.grid(rows.rows), args)
            }
        }
    }
}

/// As in PyTorch, a row with NaN or +inf, or of -inf alone, becomes NaN.
impl Launch for Softmax {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { x, y, rows } = *self;
        if empty(rows) {
            return Ok(());
        }
        Form::Forward.launch(at, &[x, y], rows, pointers([y, x]))
    }
}

impl Launch for SoftmaxBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { d_y, y, d_x, rows } = *self;
        if empty(rows) || !d_x.is_some() {
            return Ok(());
        }
        Form::Backward.launch(at, &[y, d_y, d_x], rows, pointers([d_x, d_y, y]))
    }
}

/// Every specialisation; logarithms of f32 only.
pub(super) fn specs() -> Vec<Spec> {
    let vecs = [Some(1), Some(2), Some(4), Some(8), None];
    let each = |form: Form, float| vecs.map(|vecs| form.spec(float, vecs));
    let plain = Float::ALL.into_iter().flat_map(|float| each(Form::Forward, float));
    plain.chain(each(Form::Log, Float::F32)).collect()
}
