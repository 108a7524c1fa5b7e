//! Products of 8-bit numbers of many experts.

use super::fp8::{format_name, needs_fp8, scaled};
use super::fp8_joined::{ahead, are_apart, is_plain, is_read_later};
use super::grouped::{CONSUMERS, Path, check_experts, mapped, mapped_result, may_pair};
use super::lower::Lower;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{Gate, GroupedFp8, GroupedFp8BwdWeight, Op, Quantize};
use ironhorse_core::{DType, Fp8, Slot};

/// Columns of a TMA store of experts/grouped_fp8.cu: `BK`.
const STORE: usize = 64;
/// Terms of a stage: `TERMS`.
const TERMS: usize = 128;

/// Threads of a block of experts/grouped_fp8_swiglu.cu.
const SWIGLU_THREADS: u32 = 512;

/// One product.
struct Product {
    /// The result and the operands.
    slots: [Slot; 3],
    inverses: [Slot; 2],
    offsets: Slot,
    rows: usize,
    /// The two sizes of a weight: of the rows' product terms and columns, of the gradient columns and rows.
    sizes: [usize; 2],
    /// The most tiles that there can be, by rows and columns of one.
    tiles: fn(&Self, [usize; 2]) -> usize,
    /// The kernel of experts/grouped_fp8.cu, and that of experts/grouped_fp8_any.cu.
    kernels: [&'static str; 2],
    /// Whether the experts of the right operand are side by side, or whether to add to the result.
    flag: bool,
    /// Whether experts/grouped_fp8.cu takes the sizes.
    whole: bool,
    /// Whether the result is a gradient of weights.
    is_gradient: bool,
}

impl Product {
    fn experts(&self) -> usize {
        self.offsets.numel() - 1
    }

    fn formats(&self) -> Result<[Fp8; 2]> {
        let format = |slot: Slot| match slot.dtype {
            DType::F8(format) => Ok(format),
            other => {
                Err(Error::Unsupported(format!("grouped_fp8: an operand is {other}, expected 8-bit numbers")))
            }
        };
        let [_, left, right] = self.slots;
        Ok([format(left)?, format(right)?])
    }

    /// The kernels to use: those of Hopper, or those that any GPU runs.
    fn path(&self, cx: &Lower<'_>, [_, right]: [Fp8; 2]) -> Result<Path> {
        let fits = Path::Wgmma.fits(self.experts()) && self.whole && self.rows > 0 && right == Fp8::E4M3;
        Ok(if fits && cx.are_aligned(&self.slots)? && Path::most(cx.device.info.compute) == Path::Wgmma {
            Path::Wgmma
        } else {
            Path::Any
        })
    }

    fn launch(&self, cx: &mut Lower<'_>) -> Result<()> {
        needs_fp8(cx)?;
        check_experts(self.experts())?;
        let formats = self.formats()?;
        let path = self.path(cx, formats)?;
        let spec = spec(path, formats, self.slots[0].dtype)?;
        let pairs = path == Path::Wgmma && self.in_pairs() && may_pair();
        let blocks = if pairs { 2 } else { 1 };
        let lines = path.tile()[1] / blocks; // each block of a pair copies one half
        let args = if path == Path::Wgmma { self.mapped(cx, lines)? } else { cx.pointers(&self.slots)? };
        let name = match path {
            _ if pairs => "grouped_fp8_bwd_weight_pair",
            Path::Any => self.kernels[1],
            _ => self.kernels[0],
        };
        let flag = self.flag;
        let squares = if path == Path::Wgmma && self.is_gradient { Some(self.squares(cx)?) } else { None };
        self.launch_kernel(cx, (path, path.threads(), blocks), (&spec, name), args, |_, args| {
            let args = args.u32(flag.into());
            Ok(match squares {
                Some(at) => args.ptr(at),
                None => args,
            })
        })
    }

    /// Whether two blocks of a cluster share the right operand: of a gradient of weights with an even number of rows of tiles.
    fn in_pairs(&self) -> bool {
        self.is_gradient && self.sizes[1].div_ceil(Path::Wgmma.tile()[0]).is_multiple_of(2)
    }

    /// The address at which experts/grouped_fp8.cu leaves the sums of squares of a gradient of weights, or null.
    fn squares(&self, cx: &mut Lower<'_>) -> Result<u64> {
        if self.flag {
            return Ok(0); // it is added to
        }
        let sums = (self.tiles)(self, Path::Wgmma.tile()) * CONSUMERS;
        Ok(cx.squares_for(self.slots[0], sums)?.unwrap_or(0))
    }

    /// The result, and what TMA needs to know of it and of the operands, of the right one `lines` at a time.
    fn mapped(&self, cx: &Lower<'_>, lines: usize) -> Result<Args> {
        let [out, left, right] = self.slots;
        let args = mapped(cx, mapped_result(cx, out)?, left, Path::Wgmma.tile()[0] as u32)?;
        mapped(cx, args, right, lines as u32)
    }

    /// Launches a kernel of this product, in clusters of `cluster` blocks; `args` are its first arguments, `more` adds the last ones.
    fn launch_kernel(
        &self,
        cx: &mut Lower<'_>,
        (path, threads, cluster): (Path, u32, usize),
        kernel: (&Spec, &'static str),
        args: Args,
        more: impl FnOnce(&Lower<'_>, Args) -> Result<Args>,
    ) -> Result<()> {
        let experts = self.experts();
        let args = args.ptr(cx.ptr(self.offsets)?).ptr(cx.fault);
        let args = args.u32s([self.rows, experts, self.sizes[0], self.sizes[1]]);
        let args = cx.append(args, &self.inverses.map(Some))?;
        let args = more(cx, args)?;
        let grid = Grid::linear((self.tiles)(self, path.tile()), threads).shared(path.shared(experts));
        cx.launch_resident(kernel, grid, cluster, args)
    }
}

/// A product of experts, SwiGLU of it and the 8 bits of that in one kernel, if the first two were the last launches and nothing else
/// reads the result of SwiGLU in bf16: the same bits. `false` if it is not so.
pub(super) fn with_product(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let (Some(Op::SwigluFwd(swiglu)), Some(Op::GroupedFp8(of))) = (ahead(cx, 1), ahead(cx, 2)) else {
        return Ok(false);
    };
    let (Some(out), None, Some(seen)) = (op.out, op.out_t, op.seen) else { return Ok(false) };
    let whole = swiglu.gate == Gate::Silu && swiglu.out == op.inp && swiglu.inp == of.out && is_plain(op);
    let product = rows_of(&of);
    let formats = product.formats()?;
    let fits = op.inp.shape.cols().is_multiple_of(STORE) && product.path(cx, formats)? == Path::Wgmma;
    let read = [of.a, of.b, of.a_inverse, of.b_inverse, of.offsets];
    let alone = are_apart([out, op.inverse, seen].into_iter(), &read) && !is_read_later(cx, op.inp);
    if !whole || !fits || !alone || of.beside || !of.fast || op.format != Fp8::E4M3 {
        return Ok(false);
    }
    let replaced = cx.out.split_off(cx.out.len() - 2); // the launches of the product and of SwiGLU
    let args = product.mapped(cx, Path::Wgmma.tile()[1] / 2)?; // gates, and as many ups
    let spec = swiglu_spec(formats[0]);
    let how = (Path::Wgmma, SWIGLU_THREADS, 1);
    product.launch_kernel(cx, how, (&spec, "grouped_fp8_swiglu"), args, |cx, args| {
        let args = cx.append(args, &[out, op.inverse, seen, op.amax].map(Some))?;
        Ok(scaled(args, op))
    })?;
    cx.joins(replaced);
    Ok(true)
}

fn swiglu_spec(left: Fp8) -> Spec {
    Spec::new("experts/grouped_fp8_swiglu.cu").define("LEFT", format_name(left))
}

fn spec(path: Path, [left, right]: [Fp8; 2], output: DType) -> Result<Spec> {
    let of = |file| Spec::new(file).define("LEFT", format_name(left)).typed("OUT", output);
    match path {
        Path::Wgmma => of("experts/grouped_fp8.cu"),
        _ => Ok(of("experts/grouped_fp8_any.cu")?.define("RIGHT", format_name(right))),
    }
}

pub(crate) fn grouped_fp8(cx: &mut Lower<'_>, op: &GroupedFp8) -> Result<()> {
    if op.out.numel() == 0 {
        return Ok(());
    }
    rows_of(op).launch(cx)
}

fn rows_of(op: &GroupedFp8) -> Product {
    let (inner, cols) = (op.a.shape.cols(), op.out.shape.cols());
    let terms = if op.beside { TERMS } else { 16 };
    let whole = cols.is_multiple_of(STORE) && inner > 0 && inner.is_multiple_of(terms);
    Product {
        slots: [op.out, op.a, op.b],
        inverses: [op.a_inverse, op.b_inverse],
        offsets: op.offsets,
        rows: op.a.shape.rows(),
        sizes: [inner, cols],
        tiles: |p, [tall, wide]| (p.rows / tall + p.experts().min(p.rows)) * p.sizes[1].div_ceil(wide),
        kernels: [if op.fast { "grouped_fp8_fast" } else { "grouped_fp8_exact" }, "grouped_fp8_any"],
        flag: op.beside,
        whole: whole && op.out.dtype == DType::BF16,
        is_gradient: false,
    }
}

pub(crate) fn grouped_fp8_bwd_weight(cx: &mut Lower<'_>, op: &GroupedFp8BwdWeight) -> Result<()> {
    let (oc, ic, rows) = (op.d_out.shape.rows(), op.inp.shape.rows(), op.inp.shape.cols());
    if op.d_weight.numel() == 0 {
        return Ok(());
    }
    let product = Product {
        slots: [op.d_weight, op.d_out, op.inp],
        inverses: [op.d_out_inverse, op.inp_inverse],
        offsets: op.offsets,
        rows,
        sizes: [ic, oc],
        tiles: |p, [tall, wide]| p.experts() * p.sizes[1].div_ceil(tall) * p.sizes[0].div_ceil(wide),
        kernels: ["grouped_fp8_bwd_weight", "grouped_fp8_any_bwd_weight"],
        flag: cx.adds(op.accum),
        whole: [oc, ic].iter().all(|size| size.is_multiple_of(STORE)),
        is_gradient: true,
    };
    product.launch(cx)
}

pub(super) fn specs() -> Vec<Spec> {
    let mut all: Vec<Spec> = Fp8::ALL.map(swiglu_spec).into();
    for output in [DType::BF16, DType::F32] {
        for left in Fp8::ALL {
            all.extend(spec(Path::Wgmma, [left, Fp8::E4M3], output));
        }
        for formats in [[Fp8::E4M3; 2], [Fp8::E5M2, Fp8::E4M3], [Fp8::E4M3, Fp8::E5M2]] {
            all.extend(spec(Path::Any, formats, output));
        }
    }
    all
}
