//! Linear layers of many experts. Where each expert's rows are is known to the device only, so blocks look for their tiles.

use super::lower::Lower;
use super::swiglu::swiglu_fwd;
use crate::args::{Args, Grid};
use crate::device::Matrix;
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{Gate, GroupedLinearBwdInput, GroupedLinearBwdWeight, GroupedLinearFwd, SwigluFwd};
use ironhorse_core::{DType, Slot};

/// Names the fastest kernels that may run: `any`, `mma`, `wgmma` (without pairs of blocks) or `pairs`.
const CHOICE: &str = "IRONHORSE_GROUPED";
/// Columns of a TMA copy: `BK` of experts/grouped_hopper.cuh.
pub(super) const BOX: usize = 64;
/// Rows of a TMA store of results: those of `STORE_TILE` of experts/grouped_hopper.cuh.
const STORE_ROWS: u32 = 16;
/// Warps that multiply: `CONSUMERS` of experts/grouped_hopper.cuh.
pub(super) const CONSUMERS: usize = 8;
/// Shared memory of a block of a Hopper.
pub(super) const HOPPER_SHARED: usize = 227 << 10;
/// Rows of an expert, on average, from which on pairs of blocks share its weights: most of its tiles of 128 rows have one below them.
const PAIR_ROWS: usize = 512;
/// The most experts: their offsets are held in shared memory.
const MOST_EXPERTS: usize = 2048;

/// The three products, and the forward with SwiGLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Fwd,
    /// experts/grouped_swiglu.cu, Hopper only.
    Swiglu,
    BwdInput,
    BwdWeight,
}

/// Which kernels compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(super) enum Path {
    /// experts/grouped_any.cu: f32 arithmetic, any shape.
    Any,
    /// experts/grouped_mma.cu: tensor cores, bf16 in whole vectors.
    Mma,
    /// experts/grouped_wgmma.cu and experts/grouped_swiglu.cu: Hopper only, bf16, multiples of 64 columns.
    Wgmma,
}

impl Path {
    /// The fastest that takes the shape, up to `most`.
    fn choose(g: &Groups, aligned: bool, most: Self) -> Self {
        let bf16 = g.dtype == DType::BF16 && aligned;
        let whole = |of: usize| [g.ic, g.oc].iter().all(|&size| size > 0 && size.is_multiple_of(of));
        let takes = |path: &Self| match path {
            Self::Any => true,
            Self::Mma => bf16 && whole(8),
            Self::Wgmma => bf16 && whole(BOX) && g.rows > 0 && Self::Wgmma.fits(g.experts),
        };
        let paths = [Self::Wgmma, Self::Mma];
        paths.into_iter().find(|path| *path <= most && takes(path)).unwrap_or(Self::Any)
    }

    /// The fastest that may run on a device.
    pub fn most(compute: (u32, u32)) -> Self {
        let choice = std::env::var(CHOICE).ok();
        match choice.as_deref() {
            Some("any") => Self::Any,
            Some("mma") => Self::Mma,
            _ if compute == (9, 0) => Self::Wgmma,
            _ => Self::Mma,
        }
    }

    fn name(self, step: Step, pairs: bool) -> &'static str {
        match (self, step) {
            (_, Step::Swiglu) if pairs => "grouped_swiglu_fwd_pair",
            (_, Step::Swiglu) => "grouped_swiglu_fwd",
            (_, Step::Fwd) if pairs => "grouped_wgmma_fwd_pair",
            (_, Step::BwdInput) if pairs => "grouped_wgmma_bwd_input_pair",
            (_, Step::BwdWeight) if pairs => "grouped_wgmma_bwd_weight_pair",
            (Self::Any, Step::Fwd) => "grouped_any_fwd",
            (Self::Any, Step::BwdInput) => "grouped_any_bwd_input",
            (Self::Any, Step::BwdWeight) => "grouped_any_bwd_weight",
            (Self::Mma, Step::Fwd) => "grouped_mma_fwd",
            (Self::Mma, Step::BwdInput) => "grouped_mma_bwd_input",
            (Self::Mma, Step::BwdWeight) => "grouped_mma_bwd_weight",
            (Self::Wgmma, Step::Fwd) => "grouped_wgmma_fwd",
            (Self::Wgmma, Step::BwdInput) => "grouped_wgmma_bwd_input",
            (Self::Wgmma, Step::BwdWeight) => "grouped_wgmma_bwd_weight",
        }
    }

    /// Rows and columns of a tile: `BM` and `BN` of the files.
    pub fn tile(self) -> [usize; 2] {
        if self == Self::Wgmma { [128, 256] } else { [128, 128] }
    }

    /// `THREADS` of the files.
    pub fn threads(self) -> u32 {
        if self == Self::Wgmma { 384 } else { 256 }
    }

    /// Bytes of dynamic shared memory: what the kernel needs itself, and the offsets.
    pub fn shared(self, experts: usize) -> usize {
        let tiles = match self {
            Self::Any => 0,
            Self::Mma => 64 << 10,
            // Stages, results on their way out, barriers, and what is lost to start at a multiple of 1024; with SwiGLU less.
            Self::Wgmma => 4 * (48 << 10) + (32 << 10) + 64 + 1024,
        };
        tiles + 2 * (experts + 1) * size_of::<u32>()
    }

    /// Whether a block of a Hopper has room for the offsets of `experts` experts.
    pub fn fits(self, experts: usize) -> bool {
        self.shared(experts) <= HOPPER_SHARED
    }

    fn spec(self, step: Step, input: DType, output: DType) -> Result<Spec> {
        Ok(match self {
            _ if step == Step::Swiglu => Spec::new("experts/grouped_swiglu.cu"),
            Self::Any => Spec::new("experts/grouped_any.cu").typed("IN", input)?.typed("OUT", output)?,
            Self::Mma => Spec::new("experts/grouped_mma.cu").typed("OUT", output)?,
            Self::Wgmma => Spec::new("experts/grouped_wgmma.cu").typed("OUT", output)?,
        })
    }
}

pub(super) fn check_experts(experts: usize) -> Result<()> {
    if experts > MOST_EXPERTS {
        return Err(Error::Unsupported(format!("{experts} experts, expected at most {MOST_EXPERTS}")));
    }
    Ok(())
}

/// The sizes of one product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Groups {
    pub dtype: DType,
    pub rows: usize,
    pub experts: usize,
    pub ic: usize,
    pub oc: usize,
}

impl Groups {
    /// The sizes by `inp` or its gradient, and `weight` or its gradient.
    pub fn new(inp: Slot, weight: Slot) -> Result<Self> {
        let [experts, oc, ic] = *weight.shape.dims() else {
            return Err(Error::Unsupported(format!(
                "grouped_linear: `weight` is {}, expected (experts, out, in)",
                weight.shape
            )));
        };
        check_experts(experts)?;
        Ok(Self { dtype: inp.dtype, rows: inp.shape.rows(), experts, ic, oc })
    }

    /// The most tiles of `tall` rows there can be: every expert may end inside one.
    pub fn row_tiles(&self, tall: usize) -> usize {
        self.rows / tall + self.experts.min(self.rows)
    }

    /// Whether two blocks of a cluster share the right operand: of a gradient of weights if there is an even number of rows of tiles, of
    /// other products if experts have many rows.
    fn in_pairs(&self, step: Step) -> bool {
        match step {
            Step::BwdWeight => self.oc.div_ceil(Path::Wgmma.tile()[0]).is_multiple_of(2),
            _ => self.rows >= PAIR_ROWS * self.experts,
        }
    }

    /// The most tiles there can be.
    fn tiles(&self, step: Step, [tall, wide]: [usize; 2]) -> usize {
        let by_rows = self.row_tiles(tall);
        match step {
            Step::Fwd | Step::Swiglu => by_rows * self.oc.div_ceil(wide),
            Step::BwdInput => by_rows * self.ic.div_ceil(wide),
            Step::BwdWeight => self.experts * self.oc.div_ceil(tall) * self.ic.div_ceil(wide),
        }
    }
}

/// Whether pairs of blocks may be used.
pub(super) fn may_pair() -> bool {
    std::env::var(CHOICE).map_or(true, |choice| choice != "wgmma")
}

/// The kernels for a product, by its sizes and by where what it reads and writes begins.
pub(super) fn path_of(cx: &Lower<'_>, g: &Groups, slots: &[Slot]) -> Result<Path> {
    Ok(Path::choose(g, cx.are_aligned(slots)?, Path::most(cx.device.info.compute)))
}

/// Adds the launch of one product; `slots` are the result, the operands and the offsets. `more` adds what only its kernel takes.
fn launch(
    cx: &mut Lower<'_>,
    g: &Groups,
    step: Step,
    slots: [Slot; 4],
    more: impl FnOnce(Args) -> Args,
) -> Result<()> {
    let path = path_of(cx, g, &slots[..3])?;
    let pairs = path == Path::Wgmma && g.in_pairs(step) && may_pair();
    let args = if path == Path::Wgmma {
        let args = mapped_result(cx, slots[0])?;
        let args = mapped(cx, args, slots[1], box_rows(step, 0, pairs))?;
        mapped(cx, args, slots[2], box_rows(step, 1, pairs))?
    } else {
        cx.pointers(&slots[..3])?
    };
    let args = args.ptr(cx.ptr(slots[3])?).ptr(cx.fault).u32s([g.rows, g.experts, g.ic, g.oc]);
    let spec = path.spec(step, g.dtype, slots[0].dtype)?;
    // The last tiles of an expert may be one without another.
    let (cluster, alone) = if pairs { (2, g.experts) } else { (1, 0) };
    let blocks = g.tiles(step, path.tile()) + alone;
    let grid = Grid::linear(blocks, path.threads()).shared(path.shared(g.experts));
    cx.launch_resident((&spec, path.name(step, pairs)), grid, cluster, more(args))
}

/// The address of a result, and its tensor map for TMA stores; f32 needs none.
pub(super) fn mapped_result(cx: &Lower<'_>, slot: Slot) -> Result<Args> {
    let args = cx.pointers(&[slot])?;
    if slot.dtype != DType::BF16 {
        return Ok(args.words(&[0; 32]));
    }
    mapped(cx, args, slot, STORE_ROWS)
}

/// Adds the tensor map of a matrix, whose TMA copies have `rows` rows, to other arguments.
pub(super) fn mapped(cx: &Lower<'_>, args: Args, slot: Slot, rows: u32) -> Result<Args> {
    let cols = slot.shape.cols();
    let matrix = Matrix { at: cx.ptr(slot)?, rows: slot.numel() / cols, cols, bytes: slot.dtype.size() };
    Ok(args.words(&matrix.tensor_map(cx.device, rows)?))
}

/// Rows of a TMA copy of an operand: a whole tile if they are rows or columns of the result, or what one block of a pair copies of it, and
/// 64 if they are terms of its sums.
fn box_rows(step: Step, operand: usize, pairs: bool) -> u32 {
    match (step, operand) {
        (Step::Fwd | Step::Swiglu | Step::BwdInput, 0) => 128,
        (Step::Fwd, _) if !pairs => 256,
        (Step::Fwd | Step::Swiglu, _) => 128, // gates, and as many ups
        _ => BOX as u32,
    }
}

pub(crate) fn grouped_linear_fwd(cx: &mut Lower<'_>, op: &GroupedLinearFwd) -> Result<()> {
    let g = Groups::new(op.inp, op.weight)?;
    if op.out.numel() == 0 {
        return Ok(());
    }
    let slots = [op.out, op.inp, op.weight, op.offsets];
    let Some(act) = op.act else { return launch(cx, &g, Step::Fwd, slots, |args| args) };
    let whole = act.shape.cols().is_multiple_of(BOX);
    if whole && path_of(cx, &g, &[op.out, op.inp, op.weight, act])? == Path::Wgmma {
        let to = cx.ptr(act)?;
        return launch(cx, &g, Step::Swiglu, slots, |args| args.ptr(to));
    }
    launch(cx, &g, Step::Fwd, slots, |args| args)?;
    swiglu_fwd(cx, &SwigluFwd { out: act, inp: op.out, gate: Gate::Silu })
}

pub(crate) fn grouped_linear_bwd_input(cx: &mut Lower<'_>, op: &GroupedLinearBwdInput) -> Result<()> {
    let g = Groups::new(op.d_inp, op.weight)?;
    if op.d_inp.numel() == 0 {
        return Ok(());
    }
    launch(cx, &g, Step::BwdInput, [op.d_inp, op.d_out, op.weight, op.offsets], |args| args)
}

pub(crate) fn grouped_linear_bwd_weight(cx: &mut Lower<'_>, op: &GroupedLinearBwdWeight) -> Result<()> {
    let g = Groups::new(op.inp, op.d_weight)?;
    if op.d_weight.numel() == 0 {
        return Ok(());
    }
    let adds = cx.adds(op.accum);
    let slots = [op.d_weight, op.d_out, op.inp, op.offsets];
    if path_of(cx, &g, &slots[..3])? != Path::Wgmma {
        return launch(cx, &g, Step::BwdWeight, slots, |args| args.u32(adds.into()));
    }
    let sums = g.tiles(Step::BwdWeight, Path::Wgmma.tile()) * CONSUMERS;
    let squares = if adds { None } else { cx.squares_for(op.d_weight, sums)? };
    launch(cx, &g, Step::BwdWeight, slots, |args| args.u32(adds.into()).ptr(squares.unwrap_or(0)))
}

pub(super) fn specs() -> Vec<Spec> {
    use DType::{BF16, F32};
    let all = [(Path::Any, F32, F32), (Path::Any, BF16, BF16), (Path::Any, BF16, F32)];
    let tensor = [Path::Mma, Path::Wgmma].map(|path| [(path, BF16, BF16), (path, BF16, F32)]);
    let plain = all.into_iter().chain(tensor.concat());
    plain
        .filter_map(|(path, input, output)| path.spec(Step::Fwd, input, output).ok())
        .chain(Path::Wgmma.spec(Step::Swiglu, BF16, BF16))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Groups = Groups { dtype: DType::BF16, rows: 65_536, experts: 16, ic: 768, oc: 12_288 };

    #[test]
    fn the_fastest_kernels_that_take_a_shape_are_chosen() {
        use Path::{Any, Mma, Wgmma};
        let choose = |g: Groups, aligned| [Wgmma, Mma, Any].map(|most| Path::choose(&g, aligned, most));
        assert_eq!(choose(MODEL, true), [Wgmma, Mma, Any]);
        assert_eq!(choose(MODEL, false), [Any; 3]);
        assert_eq!(choose(Groups { ic: 8, ..MODEL }, true), [Mma, Mma, Any]);
        assert_eq!(choose(Groups { rows: 0, ..MODEL }, true), [Mma, Mma, Any]);
        assert_eq!(choose(Groups { experts: 240, ..MODEL }, true), [Wgmma, Mma, Any]);
        assert_eq!(choose(Groups { experts: 250, ..MODEL }, true), [Mma, Mma, Any], "offsets find no room");
        assert_eq!(choose(Groups { ic: 129, ..MODEL }, true), [Any; 3]);
        assert_eq!(choose(Groups { dtype: DType::F32, ..MODEL }, true), [Any; 3]);
    }

    #[test]
    fn two_blocks_share_an_operand_where_experts_have_many_rows() {
        let of = |step| [65_536, 8192, 8191].map(|rows| Groups { rows, ..MODEL }.in_pairs(step));
        for step in [Step::Fwd, Step::Swiglu, Step::BwdInput] {
            assert_eq!(of(step), [true, true, false], "{step:?}");
        }
        assert_eq!(of(Step::BwdWeight), [true; 3], "rows are terms");
    }

    #[test]
    fn two_blocks_share_an_operand_where_rows_of_tiles_come_in_pairs() {
        let of = |oc| Groups { oc, ..MODEL }.in_pairs(Step::BwdWeight);
        assert!(of(12_288) && of(768) && of(256) && of(192), "the last tile may have fewer rows");
        assert!(!of(64) && !of(128) && !of(384) && !of(320));
    }

    #[test]
    fn tiles_and_offsets_find_room_in_shared_memory() {
        assert!(Path::Mma.shared(MOST_EXPERTS) <= 99 << 10, "the smallest of our GPUs");
        assert!(Path::Any.shared(MOST_EXPERTS) <= (48 << 10) - (17 << 10), "48 KiB beside its static tiles");
    }

    #[test]
    fn there_are_tiles_for_every_way_rows_can_spread() {
        assert_eq!(MODEL.tiles(Step::Fwd, [128, 128]), (512 + 16) * 96);
        assert_eq!(MODEL.tiles(Step::BwdInput, [128, 128]), (512 + 16) * 6);
        assert_eq!(MODEL.tiles(Step::BwdWeight, [128, 128]), 16 * 96 * 6);
        let thin = Groups { rows: 3, ..MODEL };
        assert_eq!(thin.tiles(Step::Fwd, [128, 128]), 3 * 96, "an expert each at most");
    }
}
