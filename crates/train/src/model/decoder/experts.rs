//! A mixture of experts in place of an MLP: the router, the rows of each expert, and their backward.

use super::expert_layer::ExpertLayer;
use super::experts_fp8::RowsFp8;
use super::{Decoder, SavedLayer};
use crate::Result;
use crate::model::Recompute;
use crate::model::blocks::{Linear, Purpose};
use ironhorse_core::op::{
    Accum, Combine, CombineBwd, Gate, Permute, PermuteBwd, RouteSort, RouterBwd, RouterFwd, RouterLoad,
    SwigluBwd,
};
use ironhorse_core::{DType, Error, Slot};

/// The weights of a layer's experts.
#[derive(Clone, Copy)]
pub(super) struct Experts {
    /// (E,C), the router
    pub gate: Linear,
    /// (E,2F,C), w1 above w3
    pub w13: ExpertLayer,
    /// (E,C,F)
    pub w2: ExpertLayer,
    /// K
    pub top_k: usize,
    pub aux_alpha: f32,
}

/// Which experts the tokens go to.
#[derive(Clone, Copy)]
struct Routes {
    /// (N,E) f32
    probs: Slot,
    /// (N,K) f32
    weights: Slot,
    /// (N,K) i32
    experts: Slot,
    /// (N·K) i32
    order: Slot,
    /// (N,K) i32
    places: Slot,
    /// (E+1) i32
    offsets: Slot,
}

/// What the experts made of their rows.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// (N·K,C)
    pub inp: Slot,
    /// (N·K,2F)
    pub w13: Slot,
    /// (N·K,F)
    pub act: Slot,
    /// (N·K,C)
    pub out: Slot,
    /// (N·K,P·r), what the adapters of w1 and w3 and those of w2 made of their inputs.
    pub hidden: [Option<Slot>; 2],
    /// The rows in 8 bits, if the products are of 8-bit numbers; then the backward needs neither `inp` nor `act`.
    pub fp8: Option<RowsFp8>,
}

/// How a layer's tokens spread over its experts.
#[derive(Clone, Copy)]
struct Spread {
    /// (E) f32
    load: Slot,
    /// one f32
    aux: Slot,
}

/// What a layer's experts leave for the backward.
pub(super) struct SavedExperts {
    routes: Routes,
    rows: Rows,
    /// In training only.
    spread: Option<Spread>,
}

impl SavedExperts {
    /// The layer's auxiliary loss, in training.
    pub fn aux(&self) -> Option<Slot> {
        self.spread.map(|spread| spread.aux)
    }
}

impl Decoder {
    /// A new (N·K,cols) activation.
    pub(super) fn routes_by(&mut self, top_k: usize, cols: usize) -> Slot {
        let (rows, dtype) = (self.net.tokens() * top_k, self.net.dtype());
        self.net.b.activation([rows, cols], dtype)
    }

    /// A new (N,cols) buffer of this type.
    fn table(&mut self, cols: usize, dtype: DType) -> Slot {
        self.net.b.activation([self.net.tokens(), cols], dtype)
    }

    pub(super) fn experts_fwd(
        &mut self,
        l: usize,
        inp: Slot,
        p: Experts,
        purpose: Purpose,
    ) -> Result<(Slot, SavedExperts)> {
        let routes = self.router(l, inp, p)?;
        let training = purpose == Purpose::Training;
        let spread = training.then(|| self.router_load(l, &routes, p)).transpose()?;
        let rows = self.expert_rows(l, inp, &routes, p, None)?;
        let (out, name) = (self.net.hidden(), self.name(l, "moe"));
        let Routes { places, weights, .. } = routes;
        self.net.b.at(&name);
        self.net.b.push(Combine { out, rows: rows.out, places, weights })?;
        self.net.b.name(name, out);
        Ok((out, SavedExperts { routes, rows, spread }))
    }

    /// Chooses each token's experts and sorts the tokens by them.
    fn router(&mut self, l: usize, inp: Slot, p: Experts) -> Result<Routes> {
        let (e, k, dtype) = (p.gate.weight.shape.rows(), p.top_k, self.net.dtype());
        let logits = self.table(e, dtype);
        let name = self.name(l, "router_logits");
        self.net.linear_into(&name, logits, inp, p.gate)?;
        self.net.b.name(&name, logits);
        let (probs, weights) = (self.table(e, DType::F32), self.table(k, DType::F32));
        let [experts, places] = [(); 2].map(|()| self.table(k, DType::I32));
        let order = self.net.b.activation([self.net.tokens() * k], DType::I32);
        let offsets = self.net.b.activation([e + 1], DType::I32);
        self.net.b.at(self.name(l, "router"));
        self.net.b.push(RouterFwd { probs, weights, experts, logits })?;
        for (part, slot) in [("probs", probs), ("weights", weights), ("experts", experts)] {
            self.net.b.name(self.name(l, part), slot);
        }
        self.net.b.push(RouteSort { order, places, offsets, experts })?;
        Ok(Routes { probs, weights, experts, order, places, offsets })
    }

    /// Shares of the experts, auxiliary loss and entropy of a layer.
    fn router_load(&mut self, l: usize, routes: &Routes, p: Experts) -> Result<Spread> {
        let load = self.net.b.io(self.name(l, "load"), [p.gate.weight.shape.rows()], DType::F32);
        let [aux, entropy] = ["aux", "entropy"].map(|part| self.net.scalar(self.name(l, part)));
        let (Routes { probs, offsets, .. }, accum) = (*routes, Accum::FirstWrites);
        let (entropy, alpha) = (Some(entropy), p.aux_alpha);
        self.net.b.push(RouterLoad { load, aux, entropy, probs, offsets, alpha, accum })?;
        Ok(Spread { load, aux })
    }

    /// The rows of all experts. A backward that kept none of them computes them again.
    fn expert_rows(
        &mut self,
        l: usize,
        tokens: Slot,
        routes: &Routes,
        p: Experts,
        again: Option<RowsFp8>,
    ) -> Result<Rows> {
        let Routes { order, offsets, .. } = *routes;
        let inp = self.permuted(l, tokens, order, p)?;
        if self.are_experts_fp8(p) {
            return self.expert_rows_fp8(l, (inp, offsets), p, again);
        }
        let [wide, act] = [2, 1].map(|times| self.routes_by(p.top_k, times * self.plan.ffn));
        let w13 = self.name(l, "experts.w1_w3");
        let first = self.expert_layer_fwd(&w13, p.w13, [wide, inp], (Some(act), offsets))?;
        let (out, w2) = (self.routes_by(p.top_k, self.plan.setup.width), self.name(l, "experts.w2"));
        let second = self.expert_layer_fwd(&w2, p.w2, [out, act], (None, offsets))?;
        Ok(Rows { inp, w13: wide, act, out, hidden: [first, second], fp8: None })
    }

    fn permuted(&mut self, l: usize, inp: Slot, order: Slot, p: Experts) -> Result<Slot> {
        let out = self.routes_by(p.top_k, self.plan.setup.width);
        self.net.b.at(self.name(l, "experts.rows"));
        self.net.b.push(Permute { out, inp, order })?;
        Ok(out)
    }

    /// Gives the gradient of the normalised input: through the experts, and through the router that chose and weighed
    /// them.
    pub(super) fn experts_bwd(
        &mut self,
        l: usize,
        (saved, p, experts): (&SavedLayer, Experts, &SavedExperts),
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<Slot> {
        let SavedExperts { routes, rows, spread } = *experts;
        self.net.b.name_grad(self.name(l, "moe"), d_res);
        let norm = self.norm_2_again(l, saved, recompute)?;
        let rows = match recompute {
            Recompute::None | Recompute::Gelu => rows,
            Recompute::Full if rows.fp8.is_some() => rows,
            Recompute::Full => Rows { inp: self.permuted(l, norm, routes.order, p)?, ..rows },
            Recompute::Experts => self.expert_rows(l, norm, &routes, p, rows.fp8)?,
        };
        let Routes { probs, weights, experts, places, offsets, .. } = routes;
        let d_weights = self.table(p.top_k, DType::F32);
        self.net.b.at(self.name(l, "moe"));
        let d_rows = rows.out; // in place, as below: nothing reads the forward's value any more
        self.net.b.push(CombineBwd { d_rows, d_weights, d_out: d_res, rows: rows.out, places, weights })?;
        self.net.b.name_grad(self.name(l, "weights"), d_weights);
        let d_inp = match rows.fp8 {
            Some(fp8) => self.expert_rows_bwd_fp8(l, &rows, fp8, p, offsets)?,
            None => self.expert_rows_bwd(l, rows, p, offsets, recompute)?,
        };

        let dtype = self.net.dtype();
        let d_logits = self.table(p.gate.weight.shape.rows(), dtype);
        let no_load = || Error::Program("a backward without the load of its experts".into());
        let (load, alpha) = (spread.ok_or_else(no_load)?.load, p.aux_alpha);
        self.net.b.at(self.name(l, "router"));
        self.net.b.push(RouterBwd { d_logits, d_weights, probs, weights, experts, load, alpha })?;
        let router_logits = self.name(l, "router_logits");
        self.net.b.name_grad(&router_logits, d_logits);
        let d_norm = self.net.hidden();
        self.net.linear_bwd(&router_logits, p.gate, [d_norm, d_logits, norm], None)?;
        self.net.b.at(self.name(l, "experts.rows"));
        self.net.b.push(PermuteBwd { d_inp: d_norm, d_out: d_inp, places, accum: Accum::Add })?;
        Ok(d_norm)
    }

    /// Gives the gradient of the experts' rows; that of their results is in place of `rows.out`.
    fn expert_rows_bwd(
        &mut self,
        l: usize,
        rows: Rows,
        p: Experts,
        offsets: Slot,
        recompute: Recompute,
    ) -> Result<Slot> {
        let [w2, w13] = ["experts.w2", "experts.w1_w3"].map(|part| self.name(l, part));
        let (d_rows, d_act) = (rows.out, self.routes_by(p.top_k, self.plan.ffn));
        // The backward of SwiGLU reads all that its forward needs, so it also recomputes the result if that was not kept.
        let again = matches!(recompute, Recompute::Gelu | Recompute::Full);
        if !again {
            self.expert_layer_bwd_weight(&w2, p.w2, [d_rows, rows.act], offsets)?;
        }
        let [hidden_13, hidden_2] = rows.hidden;
        let d_hidden = self.expert_layer_bwd_input(&w2, p.w2, [d_act, d_rows], (hidden_2, offsets))?;
        if !again {
            self.expert_layer_bwd_a(&w2, p.w2, (d_hidden, rows.act), offsets)?;
        }
        self.net.b.at(self.name(l, "experts.act"));
        let act = again.then_some(d_act);
        self.net.b.push(SwigluBwd { d_inp: rows.w13, act, d_out: d_act, inp: rows.w13, gate: Gate::Silu })?;
        if let Some(act) = act {
            self.expert_layer_bwd_weight(&w2, p.w2, [d_rows, act], offsets)?;
            self.expert_layer_bwd_a(&w2, p.w2, (d_hidden, act), offsets)?;
        }
        let (d_inp, d_wide) = (self.routes_by(p.top_k, self.plan.setup.width), rows.w13);
        self.expert_layer_bwd_weight(&w13, p.w13, [d_wide, rows.inp], offsets)?;
        let d_hidden = self.expert_layer_bwd_input(&w13, p.w13, [d_inp, d_wide], (hidden_13, offsets))?;
        self.expert_layer_bwd_a(&w13, p.w13, (d_hidden, rows.inp), offsets)?;
        Ok(d_inp)
    }
}
