//! Adapters beside linear layers: products on some of the columns of a tensor, one for each part, by cuBLASLt or else our
//! kernel.

use super::linear::{library_scaled, own_product};
use super::lower::Lower;
use crate::Result;
use crate::gemm::{Addresses, Problem, Sizes};
use ironhorse_core::op::{LoraBwdHidden, LoraBwdInput, LoraBwdWeight, LoraFwd};
use ironhorse_core::{DType, Slot};

pub(crate) fn lora_fwd(cx: &mut Lower<'_>, op: &LoraFwd) -> Result<()> {
    let (rows, oc, wide) = (op.out.shape.rows(), op.out.shape.cols(), op.hidden.shape.cols());
    let rank = op.b.shape.cols();
    let [out, hidden, b] = addresses(cx, [op.out, op.hidden, op.b])?;
    for part in op.parts.each(rank) {
        let at = Addresses {
            a: b(part.b.start * rank),
            b: hidden(part.hidden.start),
            d: out(part.out.start),
            ..Addresses::default()
        };
        let sizes = [rows, rank, part.out.len()];
        let product = Product { sizes, transposed: [false, true], ld: [rank, wide, oc], adds: true };
        run(cx, "lora_fwd", &product, &at, (op.out.dtype, op.out.dtype, op.scale))?;
    }
    Ok(())
}

pub(crate) fn lora_bwd_hidden(cx: &mut Lower<'_>, op: &LoraBwdHidden) -> Result<()> {
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.d_hidden.shape.cols());
    let rank = op.b.shape.cols();
    let [d_hidden, d_out, b] = addresses(cx, [op.d_hidden, op.d_out, op.b])?;
    for part in op.parts.each(rank) {
        let at = Addresses {
            a: b(part.b.start * rank),
            b: d_out(part.out.start),
            d: d_hidden(part.hidden.start),
            ..Addresses::default()
        };
        let sizes = [rows, part.out.len(), rank];
        let product = Product { sizes, transposed: [false, false], ld: [rank, oc, wide], adds: false };
        run(cx, "lora_bwd_hidden", &product, &at, (op.d_out.dtype, op.d_hidden.dtype, op.scale))?;
    }
    Ok(())
}

pub(crate) fn lora_bwd_weight(cx: &mut Lower<'_>, op: &LoraBwdWeight) -> Result<()> {
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.hidden.shape.cols());
    let rank = op.d_b.shape.cols();
    let [d_b, d_out, hidden] = addresses(cx, [op.d_b, op.d_out, op.hidden])?;
    let adds = cx.adds(op.accum);
    for part in op.parts.each(rank) {
        let at = Addresses {
            a: hidden(part.hidden.start),
            b: d_out(part.out.start),
            d: d_b(part.b.start * rank),
            ..Addresses::default()
        };
        let sizes = [part.out.len(), rows, rank];
        let product = Product { sizes, transposed: [true, false], ld: [wide, oc, rank], adds };
        run(cx, "lora_bwd_weight", &product, &at, (op.d_out.dtype, op.d_b.dtype, op.scale))?;
    }
    Ok(())
}

pub(crate) fn lora_bwd_input(cx: &mut Lower<'_>, op: &LoraBwdInput) -> Result<()> {
    let (rows, ic, wide) = (op.d_inp.shape.rows(), op.d_inp.shape.cols(), op.d_hidden.shape.cols());
    let at =
        Addresses { a: cx.ptr(op.a)?, b: cx.ptr(op.d_hidden)?, d: cx.ptr(op.d_inp)?, ..Addresses::default() };
    let sizes = [rows, wide, ic];
    let product = Product { sizes, transposed: [false, false], ld: [ic, wide, ic], adds: true };
    run(cx, "lora_bwd_input", &product, &at, (op.d_hidden.dtype, op.d_inp.dtype, 1.0))
}

/// The addresses of elements of slots, by their index.
pub(super) fn addresses(cx: &Lower<'_>, slots: [Slot; 3]) -> Result<[impl Fn(usize) -> u64 + use<>; 3]> {
    let mut starts = [0; 3];
    for (start, slot) in starts.iter_mut().zip(slots) {
        *start = cx.ptr(slot)?;
    }
    let sizes = slots.map(|slot| slot.dtype.size());
    Ok([0, 1, 2].map(|i| move |index: usize| starts[i] + (index * sizes[i]) as u64))
}

/// A product of row-major matrices: rows, terms and columns, which are transposed, and the elements from one row to the
/// next of the right one, of the left one and of the result.
struct Product {
    sizes: [usize; 3],
    transposed: [bool; 2],
    ld: [usize; 3],
    adds: bool,
}

fn run(
    cx: &mut Lower<'_>,
    name: &'static str,
    product: &Product,
    at: &Addresses,
    (inputs, output, scale): (DType, DType, f32),
) -> Result<()> {
    let [rows, ic, oc] = product.sizes;
    if rows == 0 || oc == 0 {
        return Ok(());
    }
    let sizes = Sizes { rows, ic, oc, inputs, output, tf32: cx.settings.tf32 };
    let problem = Problem::matmul(&sizes, 1, product.transposed, at).adds(product.adds).strided(product.ld);
    let factors = [scale, if product.adds { 1.0 } else { 0.0 }];
    if library_scaled(cx, name, &problem, at, factors)? {
        return Ok(());
    }
    own_product(cx, &problem, at, factors)
}
