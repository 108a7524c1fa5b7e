//! Linear layers: cuBLASLt with bias and GELU in its epilogue where it has them, or our own product with GELU where that is faster, else
//! with kernels of our own around it.

use super::lower::{Lower, Partials};
use super::{elementwise, gemv};
use crate::args::{Args, Grid};
use crate::gemm::{
    Addresses, Bench, ColumnSums, Extra, Problem, Saved, Sizes, gelu_product, partial_bytes, partial_rows,
    spec, split_product, splits,
};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{Act, ActBwd, ActFwd, LinearBwdInput, LinearBwdWeight, LinearFwd, Op, PreAct};
use ironhorse_core::{DType, Slot};
use std::rc::Rc;

pub(crate) fn linear_fwd(cx: &mut Lower<'_>, op: &LinearFwd) -> Result<()> {
    if gemv::linear_few(cx, op)? {
        return Ok(());
    }
    let sizes = sizes(cx, op.inp, op.weight.shape.rows(), op.out);
    let at = Addresses { a: cx.ptr(op.weight)?, b: cx.ptr(op.inp)?, ..Addresses::default() };
    let bias = cx.optional(op.bias)?;
    let Some(PreAct { act, slot: pre }) = op.pre else {
        return product_and_bias(cx, &sizes, &Addresses { d: cx.ptr(op.out)?, bias, ..at });
    };
    if fuses(cx, act, op.out) {
        let (problem, fused) = gelu_forward(cx, op, pre)?;
        let saved = saved(cx, pre)?;
        if own_gelu(cx, &problem, &fused, saved)?.is_some()
            || library(cx, "linear_fwd_gelu", &problem, &fused)?
        {
            return Ok(());
        }
    }
    product_and_bias(cx, &sizes, &Addresses { d: cx.ptr(pre)?, bias, ..at })?;
    elementwise::act_fwd(cx, &ActFwd { out: op.out, inp: pre, act })
}

pub(crate) fn linear_bwd_input(cx: &mut Lower<'_>, op: &LinearBwdInput) -> Result<()> {
    let sizes = sizes(cx, op.d_inp, op.d_out.shape.cols(), op.d_inp);
    let at = Addresses {
        a: cx.ptr(op.weight)?,
        b: cx.ptr(op.d_out)?,
        d: cx.ptr(op.d_inp)?,
        ..Addresses::default()
    };
    if let Some(pre) = op.pre.filter(|pre| fuses(cx, pre.act, op.d_inp)) {
        let (problem, fused) = gelu_backward(cx, op, pre.slot)?;
        let saved = saved(cx, pre.slot)?;
        if let Some(at) = own_gelu(cx, &problem, &fused, saved)? {
            *cx.partials = Some(Partials { op: cx.op, of: op.d_inp, at, rows: partial_rows(&problem) });
            return Ok(());
        }
        if library(cx, "linear_bwd_input_gelu", &problem, &fused)? {
            return Ok(());
        }
    }
    product(cx, "linear_bwd_input", &Problem::input_gradient(&sizes, &at), &at)?;
    match op.pre {
        Some(PreAct { act, slot: inp }) => {
            elementwise::act_bwd(cx, &ActBwd { d_inp: op.d_inp, d_out: op.d_inp, inp, act })
        }
        None => Ok(()),
    }
}

pub(crate) fn linear_bwd_weight(cx: &mut Lower<'_>, op: &LinearBwdWeight) -> Result<()> {
    let sizes = sizes(cx, op.inp, op.d_out.shape.cols(), op.d_weight);
    let adds = cx.adds(op.accum);
    let at = Addresses {
        a: cx.ptr(op.inp)?,
        b: cx.ptr(op.d_out)?,
        d: cx.ptr(op.d_weight)?,
        ..Addresses::default()
    };
    let plain = Problem::weight_gradient(&sizes, &at).adds(adds);
    if let Some(d_bias) = op.d_bias {
        if let Some(partials) = cx.partials_of(op.d_out) {
            let sums = bias_sums(cx, op.d_out, d_bias, adds)?;
            cx.launch_all([sums.finish(cx.device, partials.at, partials.rows)?]);
            return product(cx, "linear_bwd_weight", &plain, &at);
        }
        let fused = Addresses { bias: cx.ptr(d_bias)?, ..at };
        let problem = Problem::weight_gradient(&sizes, &fused).extra(Extra::BiasGrad);
        if !adds && !splits(&plain) && library(cx, "linear_bwd_weight_bias", &problem, &fused)? {
            return Ok(());
        }
        bias_gradient(cx, op.d_out, d_bias, adds)?;
    }
    product(cx, "linear_bwd_weight", &plain, &at)
}

/// Every specialisation these launchers ask for.
pub(super) fn specs() -> Vec<Spec> {
    crate::gemm::specs()
}

/// Whether the library has this activation in its epilogue, accurate enough: its GELU is good for results rounded to bf16
/// or made of rounded operands; f32 ones get the more accurate kernel.
fn fuses(cx: &Lower<'_>, act: Act, out: Slot) -> bool {
    act == Act::Gelu && (out.dtype == DType::BF16 || cx.settings.tf32)
}

/// Sizes of a layer by a tensor with its input's shape.
fn sizes(cx: &Lower<'_>, inp: Slot, oc: usize, result: Slot) -> Sizes {
    let (rows, ic) = (inp.shape.rows(), inp.shape.cols());
    Sizes { rows, ic, oc, inputs: inp.dtype, output: result.dtype, tf32: cx.settings.tf32 }
}

/// A product by the library alone; `false` if it cannot, or if doing it in steps is faster.
fn library(cx: &mut Lower<'_>, name: &'static str, problem: &Problem, at: &Addresses) -> Result<bool> {
    library_scaled(cx, name, problem, at, plain(problem))
}

/// A forward with GELU behind it.
fn gelu_forward(cx: &Lower<'_>, op: &LinearFwd, pre: Slot) -> Result<(Problem, Addresses)> {
    let at = Addresses {
        a: cx.ptr(op.weight)?,
        b: cx.ptr(op.inp)?,
        d: cx.ptr(op.out)?,
        bias: cx.optional(op.bias)?,
        aux: cx.ptr(pre)?,
        ..Addresses::default()
    };
    let sizes = sizes(cx, op.inp, op.weight.shape.rows(), op.out);
    Ok((Problem::forward(&sizes, &at).extra(Extra::Gelu { bias: op.bias.is_some() }), at))
}

/// An input gradient with GELU's derivative behind it.
fn gelu_backward(cx: &Lower<'_>, op: &LinearBwdInput, pre: Slot) -> Result<(Problem, Addresses)> {
    let at = Addresses {
        a: cx.ptr(op.weight)?,
        b: cx.ptr(op.d_out)?,
        d: cx.ptr(op.d_inp)?,
        aux: cx.ptr(pre)?,
        ..Addresses::default()
    };
    let sizes = sizes(cx, op.d_inp, op.d_out.shape.cols(), op.d_inp);
    Ok((Problem::input_gradient(&sizes, &at).extra(Extra::GeluGrad), at))
}

/// What is between the forward that writes `pre` and its backward: slopes only if both are lowered together, nothing else touches the slot, and
/// it is faster. Either op finds the same.
fn saved(cx: &mut Lower<'_>, pre: Slot) -> Result<Saved> {
    let (forward, backward) = match (&cx.program.nodes()[cx.op].op, cx.partner(pre)) {
        (Op::LinearFwd(forward), Some(Op::LinearBwdInput(backward)))
        | (Op::LinearBwdInput(backward), Some(Op::LinearFwd(forward))) => (*forward, *backward),
        _ => return Ok(Saved::Inputs),
    };
    let gelu = Some(PreAct { act: Act::Gelu, slot: pre });
    if (forward.pre, backward.pre) != (gelu, gelu) || !fuses(cx, Act::Gelu, backward.d_inp) {
        return Ok(Saved::Inputs);
    }
    let products = [gelu_forward(cx, &forward, pre)?, gelu_backward(cx, &backward, pre)?];
    if !products.iter().all(|(problem, _)| problem.is_askable()) {
        return Ok(Saved::Inputs);
    }
    let mut bench = Bench { device: cx.device, stream: cx.stream };
    let slopes = cx.libraries.gemms(cx.device)?.pass_slopes(&mut bench, products)?;
    Ok(if slopes { Saved::Slopes } else { Saved::Inputs })
}

/// A product by our own kernel with GELU or its derivative, where that is to be used; then the address of the partial sums of columns
/// that the derivative's leaves.
fn own_gelu(cx: &mut Lower<'_>, problem: &Problem, at: &Addresses, saved: Saved) -> Result<Option<u64>> {
    let mut bench = Bench { device: cx.device, stream: cx.stream };
    let mut is_own = || -> Result<bool> {
        Ok(saved == Saved::Slopes || cx.libraries.gemms(cx.device)?.is_own(&mut bench, problem, at)?)
    };
    if !problem.is_askable() || !is_own()? {
        return Ok(None);
    }
    let partials = match partial_bytes(problem) {
        0 => 0,
        bytes => cx.scratch(bytes)?,
    };
    cx.launch_all([gelu_product(cx.device, problem, at, saved, partials)?]);
    Ok(Some(partials))
}

/// The factors of a product and of what is added to it, where it is not scaled.
fn plain(problem: &Problem) -> [f32; 2] {
    [1.0, if problem.adds { 1.0 } else { 0.0 }]
}

/// [`library`] with factors of the product and of what is added to it.
pub(super) fn library_scaled(
    cx: &mut Lower<'_>,
    name: &'static str,
    problem: &Problem,
    at: &Addresses,
    [alpha, beta]: [f32; 2],
) -> Result<bool> {
    if !problem.is_askable() {
        return Ok(false);
    }
    let mut bench = Bench { device: cx.device, stream: cx.stream };
    let gemms = cx.libraries.gemms(cx.device)?;
    let Some(prepared) = gemms.prepare(&mut bench, problem, at)? else { return Ok(false) };
    let workspace = cx.workspace(prepared.workspace())?;
    cx.call(name, Rc::new(prepared.scaled(alpha, beta).with_workspace(workspace)));
    Ok(true)
}

/// A product by our f32 kernels on tensor cores; `false` if they do not take it.
fn split(cx: &mut Lower<'_>, problem: &Problem, at: &Addresses) -> Result<bool> {
    let steps = split_product(cx.device, problem, at, |bytes| cx.scratch(bytes))?;
    let some = !steps.is_empty();
    cx.launch_all(steps);
    Ok(some)
}

/// A product without extras: by the library, or else by our kernel.
fn product(cx: &mut Lower<'_>, name: &'static str, problem: &Problem, at: &Addresses) -> Result<()> {
    let d = problem.d();
    if problem.m == 0 || problem.n == 0 {
        return Ok(());
    }
    if problem.k == 0 {
        if !problem.adds {
            cx.zero(at.d, d.rows * d.cols * d.dtype.size());
        }
        return Ok(());
    }
    if split(cx, problem, at)? || library(cx, name, problem, at)? {
        return Ok(());
    }
    own_product(cx, problem, at, plain(problem))
}

/// A product by our kernel for any shape, with factors of the product and of what is added to it.
pub(super) fn own_product(
    cx: &mut Lower<'_>,
    problem: &Problem,
    at: &Addresses,
    [alpha, beta]: [f32; 2],
) -> Result<()> {
    tracing::debug!("{problem}: by our own kernel");
    let tiles = problem.m.div_ceil(32) as u64 * problem.n.div_ceil(32) as u64;
    if tiles > i32::MAX as u64 || problem.batch > usize::from(u16::MAX) {
        return Err(Error::Unsupported(format!("{problem}: too large for our own kernel")));
    }
    let [[a_k, a_m], [b_k, b_n]] = problem.strides();
    let args = Args::new().ptr(at.d).ptr(if at.c == 0 { at.d } else { at.c }).ptr(at.a).ptr(at.b);
    let args = args.u64s([problem.m, problem.n, problem.k, a_k, a_m, b_k, b_n, problem.d().ld]);
    let args = args.f32(alpha).f32(beta);
    let spec = spec("product/gemm_any.cu", problem.inputs, problem.output)?;
    cx.launch(&spec, "gemm_any", Grid::plane(tiles as usize, problem.batch, 256), args)
}

/// `d = a · b + bias`, rounded once.
fn product_and_bias(cx: &mut Lower<'_>, sizes: &Sizes, at: &Addresses) -> Result<()> {
    let problem = Problem::forward(sizes, at);
    if at.bias == 0 {
        return product(cx, "linear_fwd", &problem, at);
    }
    let biased = problem.extra(Extra::Bias);
    if split(cx, &biased, at)? || library(cx, "linear_fwd_bias", &biased, at)? {
        return Ok(());
    }
    if sizes.rows == 0 || sizes.oc == 0 {
        return Ok(());
    }
    let args = Args::new().ptr(at.d).ptr(at.bias).u64s([sizes.rows, sizes.oc]);
    let grid = Grid::linear(sizes.rows.min(4096), 256);
    cx.launch(&spec("product/bias.cu", sizes.inputs, sizes.output)?, "bias_rows", grid, args)?;
    let plain = Addresses { bias: 0, ..*at };
    product(cx, "linear_fwd", &Problem::forward(sizes, &plain).adds(true), &plain)
}

fn bias_sums(cx: &Lower<'_>, d_out: Slot, d_bias: Slot, adds: bool) -> Result<ColumnSums> {
    let (rows, cols) = (d_out.shape.rows(), d_out.shape.cols());
    let (inputs, output) = (d_out.dtype, d_bias.dtype);
    Ok(ColumnSums { rows, cols, inputs, output, x: cx.ptr(d_out)?, sums: cx.ptr(d_bias)?, adds })
}

/// `d_bias (+)= Σ_rows d_out`.
fn bias_gradient(cx: &mut Lower<'_>, d_out: Slot, d_bias: Slot, adds: bool) -> Result<()> {
    let sums = bias_sums(cx, d_out, d_bias, adds)?;
    if sums.rows == 0 || sums.cols == 0 {
        if !adds && sums.cols > 0 {
            cx.zero(sums.sums, d_bias.bytes());
        }
        return Ok(());
    }
    let scratch = cx.scratch(sums.scratch())?;
    cx.launch_all(sums.steps(cx.device, scratch)?);
    Ok(())
}
