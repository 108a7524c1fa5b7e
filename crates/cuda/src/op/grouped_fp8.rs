//! Products of 8-bit numbers of many experts.

use super::fp8::{format_name, needs_fp8};
use super::grouped::{MOST_EXPERTS, Path, mapped_result, matrix};
use super::lower::Lower;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{GroupedFp8, GroupedFp8BwdWeight};
use ironhorse_core::{DType, Fp8, Slot};

/// Columns of a TMA store of experts/grouped_fp8.cu: `BK`.
const STORE: usize = 64;
/// Terms of a stage: `TERMS`.
const TERMS: usize = 128;

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
        let addresses = self.slots.iter().map(|slot| cx.ptr(*slot)).collect::<Result<Vec<_>>>()?;
        let aligned = addresses.iter().all(|at| at.is_multiple_of(16));
        let fits = Path::Wgmma.fits(self.experts()) && self.whole && self.rows > 0 && right == Fp8::E4M3;
        Ok(if aligned && fits && Path::most(cx.device.info.compute) == Path::Wgmma {
            Path::Wgmma
        } else {
            Path::Any
        })
    }

    fn launch(&self, cx: &mut Lower<'_>) -> Result<()> {
        needs_fp8(cx)?;
        let experts = self.experts();
        if experts > MOST_EXPERTS {
            return Err(Error::Unsupported(format!("{experts} experts, expected at most {MOST_EXPERTS}")));
        }
        let formats = self.formats()?;
        let path = self.path(cx, formats)?;
        let [out, left, right] = self.slots;
        let args = if path == Path::Wgmma {
            let [lines, columns] = path.tile();
            let args = mapped_result(cx, Args::new(), out)?;
            let args = args.words(&matrix(cx, left)?.tensor_map(cx.device, lines as u32)?);
            args.words(&matrix(cx, right)?.tensor_map(cx.device, columns as u32)?)
        } else {
            cx.pointers(&self.slots)?
        };
        let args = args.ptr(cx.ptr(self.offsets)?).ptr(cx.fault);
        let args = args.u32s([self.rows, experts, self.sizes[0], self.sizes[1]]);
        let args = cx.append(args, &self.inverses.map(Some))?.u32(self.flag.into());
        let name = self.kernels[usize::from(path == Path::Any)];
        let (threads, shared) = (path.threads(), path.shared(experts));
        let function = cx.kernel(&spec(path, formats, out.dtype)?, name)?;
        let resident = (cx.device.info.sms * function.blocks_per_sm(threads, shared)?.max(1)) as usize;
        let blocks = (self.tiles)(self, path.tile()).min(resident);
        cx.launch_function(name, function, Grid::linear(blocks, threads).shared(shared), args);
        Ok(())
    }
}

fn spec(path: Path, [left, right]: [Fp8; 2], output: DType) -> Result<Spec> {
    let of = |file| Spec::new(file).define("LEFT", format_name(left)).typed("OUT", output);
    match path {
        Path::Wgmma => of("experts/grouped_fp8.cu"),
        _ => Ok(of("experts/grouped_fp8_any.cu")?.define("RIGHT", format_name(right))),
    }
}

pub(crate) fn grouped_fp8(cx: &mut Lower<'_>, op: &GroupedFp8) -> Result<()> {
    let (inner, cols) = (op.a.shape.cols(), op.out.shape.cols());
    if op.out.numel() == 0 {
        return Ok(());
    }
    let terms = if op.beside { TERMS } else { 16 };
    let whole = cols.is_multiple_of(STORE) && inner > 0 && inner.is_multiple_of(terms);
    let product = Product {
        slots: [op.out, op.a, op.b],
        inverses: [op.a_inverse, op.b_inverse],
        offsets: op.offsets,
        rows: op.a.shape.rows(),
        sizes: [inner, cols],
        tiles: |p, [tall, wide]| (p.rows / tall + p.experts().min(p.rows)) * p.sizes[1].div_ceil(wide),
        kernels: [if op.fast { "grouped_fp8_fast" } else { "grouped_fp8_exact" }, "grouped_fp8_any"],
        flag: op.beside,
        whole: whole && op.out.dtype == DType::BF16,
    };
    product.launch(cx)
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
    };
    product.launch(cx)
}

pub(super) fn specs() -> Vec<Spec> {
    let mut all = Vec::new();
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
