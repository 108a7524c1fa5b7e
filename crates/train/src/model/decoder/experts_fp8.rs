//! The products of experts in 8 bits. Every tensor of all experts has one scale. What a product needs in rows and what it needs in
//! columns is made right before it, so that of the weights in 8 bits nothing is kept from the forward to the backward.
//!
//! | product | rows | columns | terms |
//! | --- | --- | --- | --- |
//! | w13 (N·K,2F) = inp · w13ᵀ | inp (N·K,C) | w13 (E,2F,C) | C |
//! | out (N·K,C) = act · w2ᵀ | act (N·K,F) | w2 (E,C,F) | F |
//! | d_act (N·K,F) = d_out · w2 | d_out (N·K,C) | w2ᵀ (F,E·C) | C |
//! | d_w2 (E,C,F) = d_outᵀ · act | d_outᵀ (C,N·K) | actᵀ (F,N·K) | an expert's rows |
//! | d_w13 (E,2F,C) = d_w13ᵀ · inp | d_w13ᵀ (2F,N·K) | inpᵀ (C,N·K) | an expert's rows |
//! | d_inp (N·K,C) = d_w13 · w13 | d_w13 (N·K,2F) | w13ᵀ (C,E·2F) | 2F |

use super::Decoder;
use super::experts::{Experts, Rows};
use crate::Result;
use crate::model::blocks::{Form, Kind, Narrow, Scaling};
use ironhorse_core::op::{Accum, Gate, GroupedFp8, GroupedFp8BwdWeight, SwigluBwd, SwigluFwd};
use ironhorse_core::{Error, Fp8, Slot};

/// What the experts of a layer leave for a backward in 8 bits.
#[derive(Clone, Copy)]
pub(super) struct RowsFp8 {
    /// In columns.
    inp: Narrow,
    scales: Scales,
}

/// How the tensors of the forward are scaled.
#[derive(Clone, Copy)]
struct Scales {
    inp: Scaling,
    act: Scaling,
    w13: Scaling,
    w2: Scaling,
}

/// `out = a · b` of experts; whether `b` has the experts side by side.
struct Product {
    out: Slot,
    a: (Option<Slot>, Slot),
    b: (Option<Slot>, Slot),
    beside: bool,
}

impl Decoder {
    /// Whether the products of these experts are of 8-bit numbers: as in dense layers, and not where there are adapters.
    pub(super) fn are_experts_fp8(&self, p: Experts) -> bool {
        let adapted = p.w13.adapter.is_some() || p.w2.adapter.is_some();
        let rows = self.net.tokens() * p.top_k;
        !adapted && self.net.are_experts_fp8(rows, &[p.w13.weight, p.w2.weight])
    }

    /// What the experts make of their rows `inp`, sorted by experts. A backward that computes them `again` scales them as the forward did.
    pub(super) fn expert_rows_fp8(
        &mut self,
        l: usize,
        (inp, offsets): (Slot, Slot),
        p: Experts,
        again: Option<RowsFp8>,
    ) -> Result<Rows> {
        self.net.b.keep_activations(2); // an engine can compute a product together with SwiGLU and the tensor in 8 bits made of it
        let scales = again.map(|rows| rows.scales);
        let [w13, w2] = ["experts.w1_w3", "experts.w2"].map(|part| self.name(l, part));
        let (of_inp, narrow) =
            self.narrow(inp, scales.map(|scales| scales.inp), Kind::Activation, Form::Both)?;
        self.net.b.at(&w13);
        let (of_w13, weight) =
            self.narrow(p.w13.weight, scales.map(|scales| scales.w13), Kind::Weight, Form::Rows)?;
        let wide = self.routes_by(p.top_k, 2 * self.plan.ffn);
        let of = |slot: Option<Slot>, weight: Slot| slot.map(|slot| Slot { shape: weight.shape, ..slot });
        let b = (of(weight.rows, p.w13.weight), weight.inverse);
        self.rows_product(
            &Product { out: wide, a: (narrow.rows, narrow.inverse), b, beside: false },
            offsets,
        )?;

        self.net.b.at(self.name(l, "experts.act"));
        let act = self.routes_by(p.top_k, self.plan.ffn);
        self.net.b.push(SwigluFwd { out: act, inp: wide, gate: Gate::Silu })?;
        let (of_act, gated) =
            self.narrow(act, scales.map(|scales| scales.act), Kind::Activation, Form::Rows)?;

        self.net.b.at(&w2);
        let (of_w2, weight) =
            self.narrow(p.w2.weight, scales.map(|scales| scales.w2), Kind::Weight, Form::Rows)?;
        let out = self.routes_by(p.top_k, self.plan.setup.width);
        let b = (of(weight.rows, p.w2.weight), weight.inverse);
        self.rows_product(&Product { out, a: (gated.rows, gated.inverse), b, beside: false }, offsets)?;
        let scales = Scales { inp: of_inp, act: of_act, w13: of_w13, w2: of_w2 };
        let fp8 = Some(RowsFp8 { inp: narrow, scales });
        Ok(Rows { inp, w13: wide, act, out, hidden: [None; 2], fp8 })
    }

    /// Gives the gradient of the experts' rows; that of their results is in place of `rows.out`.
    pub(super) fn expert_rows_bwd_fp8(
        &mut self,
        l: usize,
        rows: &Rows,
        fp8: RowsFp8,
        p: Experts,
        offsets: Slot,
    ) -> Result<Slot> {
        let [w2, w13] = ["experts.w2", "experts.w1_w3"].map(|part| self.name(l, part));
        let RowsFp8 { inp, scales } = fp8;
        self.net.b.at(&w2);
        let (_, d_out) = self.narrow(rows.out, None, Kind::Gradient, Form::Both)?;
        let (_, weight) = self.narrow(p.w2.weight, Some(scales.w2), Kind::Weight, Form::Columns)?;
        let d_act = self.routes_by(p.top_k, self.plan.ffn);
        let (a, b) = ((d_out.rows, d_out.inverse), (weight.columns, weight.inverse));
        self.rows_product(&Product { out: d_act, a, b, beside: true }, offsets)?;

        // The backward of SwiGLU reads all that its forward needs, so that it computes the result again, over its gradient.
        self.net.b.at(self.name(l, "experts.act"));
        let d_inp = rows.w13;
        self.net.b.push(SwigluBwd {
            d_inp,
            act: Some(d_act),
            d_out: d_act,
            inp: rows.w13,
            gate: Gate::Silu,
        })?;
        let (_, d_wide) = self.narrow(d_inp, None, Kind::Gradient, Form::Both)?;
        let (_, act) = self.narrow(d_act, Some(scales.act), Kind::Activation, Form::Columns)?;

        self.net.b.at(&w2);
        self.weight_product(p.w2.weight, d_out, act, offsets)?;
        self.net.b.at(&w13);
        self.weight_product(p.w13.weight, d_wide, inp, offsets)?;
        let (_, weight) = self.narrow(p.w13.weight, Some(scales.w13), Kind::Weight, Form::Columns)?;
        let d_rows = self.routes_by(p.top_k, self.plan.setup.width);
        let (a, b) = ((d_wide.rows, d_wide.inverse), (weight.columns, weight.inverse));
        self.rows_product(&Product { out: d_rows, a, b, beside: true }, offsets)?;
        Ok(d_rows)
    }

    /// A tensor in 8 bits, and how it is scaled: as it was, where it `was` before.
    fn narrow(
        &mut self,
        inp: Slot,
        was: Option<Scaling>,
        kind: Kind,
        form: Form,
    ) -> Result<(Scaling, Narrow)> {
        let format = if kind == Kind::Gradient { self.net.gradients_fp8() } else { Fp8::E4M3 };
        let scaling = match was {
            Some(scaling) => scaling.again(),
            None => self.net.scaling(inp, kind, format)?,
        };
        Ok((scaling, self.net.narrow(inp, scaling, form)?))
    }

    /// The sums of the forward, which has the experts one below the other, may be fast, as those of dense layers.
    fn rows_product(&mut self, product: &Product, offsets: Slot) -> Result<()> {
        let &Product { out, a: (Some(a), a_inverse), b: (Some(b), b_inverse), beside } = product else {
            return Err(missing().into());
        };
        let fast = !beside;
        Ok(self.net.b.push(GroupedFp8 { out, a, b, a_inverse, b_inverse, offsets, beside, fast })?)
    }

    fn weight_product(&mut self, weight: Slot, d_out: Narrow, inp: Narrow, offsets: Slot) -> Result<()> {
        let (Some(d_columns), Some(columns)) = (d_out.columns, inp.columns) else {
            return Err(missing().into());
        };
        Ok(self.net.b.push(GroupedFp8BwdWeight {
            d_weight: self.net.b.grad(weight),
            d_out: d_columns,
            inp: columns,
            d_out_inverse: d_out.inverse,
            inp_inverse: inp.inverse,
            offsets,
            accum: Accum::FirstWrites,
        })?)
    }
}

fn missing() -> Error {
    Error::Program("a product of experts in 8 bits without one of its operands".into())
}
