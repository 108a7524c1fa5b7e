//! Cross entropy.

use super::gpu::{At, Kernel};
use super::rows::{Team, address, congruent, empty, lane_width};
use super::softmax;
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use ironhorse_core::eager::{Array, Float, Rows, Targets};

const FILE: &str = "loss/eager_cross_entropy.cu";

/// The numbers of `any_at` in cross_entropy.cu.
fn number_of(float: Float) -> u32 {
    match float {
        Float::F64 => 0,
        Float::F32 => 1,
        Float::BF16 => 2,
        Float::F16 => 3,
    }
}

/// (address, whether they are i64)
fn targets_of(targets: Targets) -> (u64, u32) {
    match targets {
        Targets::I32(at) => (at.addr() as u64, 0),
        Targets::I64(at) => (at.addr() as u64, 1),
    }
}

/// losses = lse - logits\[target\], lse = log Σ e^logits, per row: 0 where the target is `ignore`, NaN where it is none of the
/// columns. Null `losses` or `lse` are not written. Without columns both are NaN.
///
/// # Safety
/// See [the module](super); logits: rows·cols, targets, losses and lse: rows elements.
pub unsafe fn cross_entropy(
    at: &At<'_>,
    logits: Array,
    targets: Targets,
    [losses, lse]: [Array; 2],
    rows: Rows,
    ignore: i64,
) -> Result<()> {
    if empty(rows) {
        // SAFETY: rows elements, by the contract.
        return unsafe { at.fill_nan([losses, lse], rows.rows) };
    }
    // Four vectors at a time to a thread; a long row has several rounds, for which 256 threads leave more blocks to work
    // beside each other, unless there are too few rows for that.
    let few = rows.rows < 4 * at.info().sms as usize;
    let team = Team::streamed(rows.cols, 4 * lane_width(logits.float), if few { 512 } else { 256 });
    let (targets, wide) = targets_of(targets);
    let args = Args::new().ptr(address(losses)).ptr(address(lse)).ptr(address(logits)).ptr(targets);
    let args =
        args.u64(rows.rows as u64).u64(rows.cols as u64).u64(ignore as u64).u32(wide).u32(team.lanes).u32(1);
    at.launch(&Kernel::of(FILE, "cross_entropy", logits.float), team.grid(rows.rows), args)
}

/// loss\[0\] = the sum of the losses, divided where `mean` by the number of targets that are not `ignore` (none: NaN);
/// inv_count\[0\] = that factor, or 1. `loss` may be of any type; what is null is not written.
///
/// # Safety
/// See [the module](super); losses and targets: rows elements, loss and inv_count: 1.
pub unsafe fn cross_entropy_mean(
    at: &At<'_>,
    losses: Array,
    targets: Targets,
    [loss, inv_count]: [Array; 2],
    rows: usize,
    ignore: i64,
    mean: bool,
) -> Result<()> {
    let (targets, wide) = targets_of(targets);
    let args = Args::new().ptr(address(loss)).ptr(address(inv_count)).ptr(address(losses)).ptr(targets);
    let args = args.u64(rows as u64).u64(ignore as u64).u32(number_of(loss.float)).u32(wide).u32(mean.into());
    at.launch(&Kernel::of(FILE, "cross_entropy_mean", losses.float), Grid::linear(1, 1024), args)
}

/// d_logits = (e^(logits - lse) - onehot(target)) · d_loss\[per_row ? row : 0\] · inv_count\[0\], the last 1 where null; 0 where the
/// target is `ignore`, NaN where it is none of the columns. `d_loss` may be of any type; `d_logits` may be `logits`.
///
/// # Safety
/// See [the module](super); logits and d_logits: rows·cols, targets and lse: rows, d_loss: rows or 1, inv_count: 1 element.
pub unsafe fn cross_entropy_bwd(
    at: &At<'_>,
    [d_loss, logits, lse, inv_count]: [Array; 4],
    targets: Targets,
    d_logits: Array,
    rows: Rows,
    ignore: i64,
    per_row: bool,
) -> Result<()> {
    let bwd = Bwd { d_loss, logits, lse, inv_count, targets, d_logits, rows, ignore, per_row, scale: 1.0 };
    bwd.launch(at)
}

struct Bwd {
    d_loss: Array,
    logits: Array,
    lse: Array,
    inv_count: Array,
    targets: Targets,
    d_logits: Array,
    rows: Rows,
    ignore: i64,
    per_row: bool,
    scale: f64,
}

impl Bwd {
    fn launch(&self, at: &At<'_>) -> Result<()> {
        let rows = self.rows;
        if empty(rows) || self.d_logits.at.is_null() {
            return Ok(());
        }
        let batch = 4 * lane_width(self.logits.float);
        let team = Team::streamed(rows.cols, batch, 256);
        let mut grid = team.grid(rows.rows);
        // A block has one batch to a thread; blockIdx.y counts the parts of a row.
        grid.grid[1] = rows.cols.div_ceil(batch * team.lanes as usize).min(65535) as u32;
        let (targets, wide) = targets_of(self.targets);
        let vector = congruent(&[self.logits, self.d_logits]);
        let args =
            Args::new().ptr(address(self.d_logits)).ptr(address(self.d_loss)).ptr(address(self.logits));
        let args = args.ptr(targets).ptr(address(self.lse)).ptr(address(self.inv_count));
        let args = args.u64(rows.rows as u64).u64(rows.cols as u64).u64(self.ignore as u64).f64(self.scale);
        let args = args.u32(number_of(self.d_loss.float)).u32(self.per_row.into()).u32(wide);
        let args = args.u32(team.lanes).u32(vector.into());
        at.launch(&Kernel::of(FILE, "cross_entropy_bwd", self.logits.float), grid, args)
    }
}

/// No class number that can be given as an i32.
const NEVER: i64 = i64::MIN;

/// log_probs = log softmax(logits) per row; loss\[0\] = mean over the rows of -log_probs\[row, target\]: NaN if a target is none of
/// the columns. `log_probs` may be `logits`. All f32.
///
/// # Safety
/// See [the module](super); logits and log_probs: rows·cols, targets: rows, loss: 1 element.
pub unsafe fn cross_entropy_log_probs(
    at: &At<'_>,
    logits: Array,
    targets: *const i32,
    [loss, log_probs]: [Array; 2],
    rows: Rows,
) -> Result<()> {
    if rows.rows == 0 {
        return Ok(());
    }
    let float = logits.float;
    let losses = at.scratch(rows.rows * float.acc().size())?;
    let args =
        Args::new().ptr(address(log_probs)).ptr(losses).ptr(address(logits)).ptr(targets.addr() as u64);
    let args = args.u64(rows.rows as u64);
    let vector = congruent(&[logits, log_probs]);
    let edges = softmax::edges(logits, rows.cols);
    let held = Team::held(rows.cols, float, edges, 8, softmax::threads(at)).filter(|_| vector);
    match held {
        Some(team) => {
            let kernel = Kernel::of(softmax::FILE, "log_softmax_held", float).number("VECS", team.vecs);
            let args = args.u32(rows.cols as u32).u32(team.lanes);
            at.launch(&kernel.number("LOG", 1), team.grid(rows.rows), args)?;
        }
        None => {
            let team = Team::streamed(rows.cols, 32, 512);
            let args = args.u64(rows.cols as u64).u32(team.lanes).u32(vector.into());
            let kernel = Kernel::of(softmax::FILE, "log_softmax_any", float).number("LOG", 1);
            at.launch(&kernel, team.grid(rows.rows), args)?;
        }
    }
    let losses = Array { at: std::ptr::with_exposed_provenance_mut(losses as usize), float: float.acc() };
    let none = Array::none(float.acc());
    // SAFETY: the losses are scratch of this call; the rest is the caller's.
    unsafe { cross_entropy_mean(at, losses, Targets::I32(targets), [loss, none], rows.rows, NEVER, true) }
}

/// d_logits = (e^log_probs - onehot(target)) · scale; NaN in rows whose target is none of the columns. `d_logits` may be
/// `log_probs`.
///
/// # Safety
/// See [the module](super); log_probs and d_logits: rows·cols, targets: rows elements.
pub unsafe fn cross_entropy_log_probs_bwd(
    at: &At<'_>,
    log_probs: Array,
    targets: *const i32,
    d_logits: Array,
    rows: Rows,
    scale: f64,
) -> Result<()> {
    let none = Array::none(log_probs.float.acc());
    let bwd = Bwd {
        d_loss: none,
        logits: log_probs,
        lse: none,
        inv_count: none,
        targets: Targets::I32(targets),
        d_logits,
        rows,
        ignore: NEVER,
        per_row: false,
        scale,
    };
    bwd.launch(at)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    Float::ALL.map(|float| Kernel::of(FILE, "", float).spec()).into()
}
