//! Finite-difference checks of the ops of a mixture of experts, and of a whole layer.

use super::*;

#[test]
fn rmsnorm() {
    for (c, gain) in
        [(1, Gain::Weight), (2, Gain::OnePlusWeight), (7, Gain::Weight), (7, Gain::OnePlusWeight)]
    {
        let mut k = Bench::new("rmsnorm");
        let (out, inp, weight, rstd) = (k.out([3, c]), k.inp([3, c]), k.inp([c]), k.out([3]));
        k.b.push(RmsNormFwd { out, rstd, inp, weight, eps: 0.01, gain }).unwrap();
        let (d_inp, d_weight, d_out) = (k.out([3, c]), k.out([c]), k.weigh(out));
        let (accum_inp, accum) = (Accum::Write, Accum::Write);
        k.backward(RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum, gain });
        k.check(Scalars::default(), &[(inp, d_inp), (weight, d_weight)]);
    }
}

/// Checks the op like `residual_layernorm`, then recomputes its result from the saved statistic.
#[test]
fn residual_rmsnorm() {
    for gain in [Gain::Weight, Gain::OnePlusWeight] {
        let mut k = Bench::new("residual rms");
        let (residual, first, out) = (k.out([3, 5]), k.out([3, 5]), k.out([3, 5]));
        let (a, b, weight, rstd) = (k.inp([3, 5]), k.inp([3, 5]), k.inp([5]), k.out([3]));
        k.b.push(ResidualRmsNormFwd { residual, out: first, rstd, a, b, weight, eps: 0.01, gain }).unwrap();
        k.b.push(RmsNormApply { out, inp: residual, rstd, weight, gain }).unwrap();
        let (d_weight, d_out) = (k.out([5]), k.weigh(out));
        let (d_weighed, d_inp) = (k.weigh(residual), k.out([3, 5]));
        k.backward(CopySlot { out: d_inp, inp: d_weighed });
        let (accum_inp, accum) = (Accum::Add, Accum::FirstWrites);
        k.backward(RmsNormBwd {
            d_inp,
            d_weight,
            d_out,
            inp: residual,
            rstd,
            weight,
            accum_inp,
            accum,
            gain,
        });
        k.check(Scalars::default(), &[(a, d_inp), (b, d_inp), (weight, d_weight)]);
    }
}

/// The backward replaces the gradient of the result by that of the input, so it works on a copy.
#[test]
fn qk_norm() {
    let plain = (Gain::Weight, 1.0);
    for (heads, kv_heads, hd, (gain, q_scale)) in [
        (1, 1, 1, plain),
        (3, 3, 2, plain),
        (4, 1, 6, (Gain::OnePlusWeight, 1.0)),
        (6, 3, 5, plain),
        (4, 2, 6, (Gain::OnePlusWeight, 0.75)),
    ] {
        let mut k = Bench::new("qk_norm");
        let shape = [2, 2, (heads + 2 * kv_heads) * hd];
        let (inp, out, rstd) = (k.inp(shape), k.out(shape), k.out([2, 2, heads + kv_heads]));
        let (q_weight, k_weight) = (k.inp([hd]), k.inp([hd]));
        let eps = 0.01;
        let op = QkNormFwd { out, rstd, inp, q_weight, k_weight, heads, kv_heads, eps, gain, q_scale };
        k.b.push(op).unwrap();
        let (d_out, d_qkv) = (k.weigh(out), k.out(shape));
        let (d_q_weight, d_k_weight, accum) = (k.out([hd]), k.out([hd]), Accum::Write);
        k.backward(CopySlot { out: d_qkv, inp: d_out });
        k.backward(QkNormBwd {
            d_qkv,
            d_q_weight,
            d_k_weight,
            inp,
            rstd,
            q_weight,
            k_weight,
            heads,
            kv_heads,
            accum,
            gain,
            q_scale,
        });
        k.check(Scalars::default(), &[(inp, d_qkv), (q_weight, d_q_weight), (k_weight, d_k_weight)]);
    }
}

/// Forward and backward rotation work in place, so each works on a copy.
#[test]
fn rope() {
    for (heads, kv_heads, hd, at) in [(1, 1, 2, None), (4, 1, 6, None), (6, 3, 4, Some(7))] {
        let mut k = Bench::new("rope");
        let shape = [2, 3, (heads + 2 * kv_heads) * hd];
        let (inp, qkv) = (k.inp(shape), k.out(shape));
        k.b.push(CopySlot { out: qkv, inp }).unwrap();
        let (base, alpha, at_position) = (100.0, 8.0, at.is_some());
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 20 };
        let (back, positions) = (false, None);
        let op =
            Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context: 10 };
        k.b.push(op).unwrap();
        let (d_out, d_qkv) = (k.weigh(qkv), k.out(shape));
        k.backward(CopySlot { out: d_qkv, inp: d_out });
        k.backward(Rope { qkv: d_qkv, back: true, ..op });
        let scalars = Scalars { position: at.unwrap_or(99), ..Scalars::default() };
        k.check(scalars, &[(inp, d_qkv)]);
    }
}

#[test]
fn swiglu() {
    for gate in Gate::ALL {
        let mut k = Bench::new("swiglu");
        let (out, inp) = (k.out([3, 5]), k.inp([3, 10]));
        k.b.push(SwigluFwd { out, inp, gate }).unwrap();
        let (d_inp, d_out) = (k.out([3, 10]), k.weigh(out));
        k.backward(SwigluBwd { d_inp, act: None, d_out, inp, gate });
        k.check(Scalars::default(), &[(inp, d_inp)]);
    }
}

/// The router alone: the gradient through the weights and through the auxiliary loss. A perturbation of 1e-5 does not
/// change which experts these logits choose, so `load` is constant.
#[test]
fn router() {
    for [n, e, chosen] in [[4, 3, 1], [5, 4, 2], [3, 5, 5], [6, 8, 3], [1, 1, 1]] {
        let mut k = Bench::new("router");
        let logits = k.inp([n, e]);
        let route = Routes::new(&mut k, logits, chosen, 0.7);
        let (d_weights, d_logits) = (k.weigh(route.weights), k.out([n, e]));
        k.functional.push((route.aux, vec![1.0]));
        k.backward(route.bwd(d_logits, d_weights));
        // aux is computed once for n tokens: its factor is n·loss_scale·counted = 1/2, for two micro-steps
        let scalars = Scalars { loss_scale: 2.0 / n as f32, counted: 0.25, ..Scalars::default() };
        k.check(scalars, &[(logits, d_logits)]);
    }
}

/// The slots that the routing of a layer writes.
pub(super) struct Routes {
    probs: Slot,
    pub weights: Slot,
    experts: Slot,
    load: Slot,
    pub aux: Slot,
    pub order: Slot,
    pub places: Slot,
    pub offsets: Slot,
    alpha: f32,
}

impl Routes {
    pub fn new(k: &mut Bench, logits: Slot, chosen: usize, alpha: f32) -> Self {
        let (n, e) = (logits.shape.rows(), logits.shape.cols());
        let (probs, weights, load, aux) = (k.out([n, e]), k.out([n, chosen]), k.out([e]), k.out([1]));
        let mut ints = |shape: Shape| {
            k.count += 1;
            k.b.io(format!("{}", k.count), shape, DType::I32)
        };
        let [experts, places] = [(); 2].map(|()| ints([n, chosen].into()));
        let (order, offsets) = (ints([n * chosen].into()), ints([e + 1].into()));
        k.b.push(RouterFwd { probs, weights, experts, logits }).unwrap();
        k.b.push(RouteSort { order, places, offsets, experts }).unwrap();
        let (entropy, accum) = (None, Accum::Write);
        k.b.push(RouterLoad { load, aux, entropy, probs, offsets, alpha, accum }).unwrap();
        Self { probs, weights, experts, load, aux, order, places, offsets, alpha }
    }

    pub fn bwd(&self, d_logits: Slot, d_weights: Slot) -> RouterBwd {
        let Self { probs, weights, experts, load, alpha, .. } = *self;
        RouterBwd { d_logits, d_weights, probs, weights, experts, load, alpha }
    }
}

/// A whole layer of experts (gate, routing, SwiGLU, combination), differentiated by the tokens and by every weight.
/// With five tokens and six experts, some experts have no tokens.
#[test]
fn mixture_of_experts() {
    const N: usize = 5;
    const C: usize = 4;
    const F: usize = 3;
    for [e, chosen] in [[6, 2], [3, 1], [3, 3]] {
        let mut k = Bench::new("experts");
        let (inp, gate) = (k.inp([N, C]), k.inp([e, C]));
        let (w13, w2) = (k.inp([e, 2 * F, C]), k.inp([e, C, F]));
        let logits = k.out([N, e]);
        k.b.push(LinearFwd { out: logits, pre: None, inp, weight: gate, bias: None }).unwrap();
        let route = Routes::new(&mut k, logits, chosen, 0.3);
        let Routes { order, places, offsets, weights, .. } = route;
        let r = N * chosen;
        let (x, h, a, rows, out) =
            (k.out([r, C]), k.out([r, 2 * F]), k.out([r, F]), k.out([r, C]), k.out([N, C]));
        k.b.push(Permute { out: x, inp, order }).unwrap();
        k.b.push(GroupedLinearFwd { out: h, act: None, inp: x, weight: w13, offsets }).unwrap();
        k.b.push(SwigluFwd { out: a, inp: h, gate: Gate::Silu }).unwrap();
        k.b.push(GroupedLinearFwd { out: rows, act: None, inp: a, weight: w2, offsets }).unwrap();
        k.b.push(Combine { out, rows, places, weights }).unwrap();
        k.functional.push((route.aux, vec![1.0]));
        let d_out = k.weigh(out);

        let (d_x, d_h, d_a, d_rows) = (k.out([r, C]), k.out([r, 2 * F]), k.out([r, F]), k.out([r, C]));
        let (d_weights, d_logits) = (k.out([N, chosen]), k.out([N, e]));
        let (d_inp, d_gate) = (k.out([N, C]), k.out([e, C]));
        let (d_w13, d_w2) = (k.out([e, 2 * F, C]), k.out([e, C, F]));
        let accum = Accum::Write;
        k.backward(CombineBwd { d_rows, d_weights, d_out, rows, places, weights });
        k.backward(GroupedLinearBwdWeight { d_weight: d_w2, d_out: d_rows, inp: a, offsets, accum });
        k.backward(GroupedLinearBwdInput { d_inp: d_a, d_out: d_rows, weight: w2, offsets });
        k.backward(SwigluBwd { d_inp: d_h, act: None, d_out: d_a, inp: h, gate: Gate::Silu });
        k.backward(GroupedLinearBwdWeight { d_weight: d_w13, d_out: d_h, inp: x, offsets, accum });
        k.backward(GroupedLinearBwdInput { d_inp: d_x, d_out: d_h, weight: w13, offsets });
        k.backward(route.bwd(d_logits, d_weights));
        k.backward(LinearBwdWeight { d_weight: d_gate, d_bias: None, d_out: d_logits, inp, accum });
        k.backward(LinearBwdInput { d_inp, d_out: d_logits, weight: gate, pre: None });
        k.backward(PermuteBwd { d_inp, d_out: d_x, places, accum: Accum::Add });
        let scalars = Scalars { loss_scale: 1.0 / N as f32, ..Scalars::default() };
        k.check(scalars, &[(inp, d_inp), (gate, d_gate), (w13, d_w13), (w2, d_w2)]);
    }
}
