//! Checks the oracle: every backward op, and a whole small transformer, agrees with central differences of the forward
//! over every element.

use super::*;
use ironhorse_core::op::*;
use ironhorse_core::{Builder, DType, Shape};

#[path = "finite_dropout.rs"]
mod dropout;
#[path = "finite_embedding.rs"]
mod embedding;
#[path = "finite_experts.rs"]
mod experts;
#[path = "finite_lora.rs"]
mod lora;
#[path = "finite_masks.rs"]
mod masks;
#[path = "finite_preference.rs"]
mod preference;

/// Builds a forward and a backward whose slots all keep their contents.
struct Bench {
    b: Builder,
    rng: Rng,
    inputs: Vec<(Slot, Vec<f64>)>,
    functional: Vec<(Slot, Vec<f64>)>,
    count: usize,
}

impl Bench {
    fn new(name: &str) -> Self {
        let b = Builder::new();
        Self { b, rng: Rng::named(name), inputs: Vec::new(), functional: Vec::new(), count: 0 }
    }

    /// A slot to be written.
    fn out(&mut self, shape: impl Into<Shape>) -> Slot {
        self.count += 1;
        self.b.io(format!("{}", self.count), shape, DType::F32)
    }

    /// A slot with random values.
    fn inp(&mut self, shape: impl Into<Shape>) -> Slot {
        let slot = self.out(shape);
        let values = self.values(slot.numel());
        self.inputs.push((slot, values));
        slot
    }

    fn values(&mut self, count: usize) -> Vec<f64> {
        self.rng.uniforms(count, -1.5, 1.5).into_iter().map(f64::from).collect()
    }

    fn ints(&mut self, shape: impl Into<Shape>, values: &[i32]) -> Slot {
        self.count += 1;
        let slot = self.b.io(format!("{}", self.count), shape, DType::I32);
        self.inputs.push((slot, values.iter().map(|&v| f64::from(v)).collect()));
        slot
    }

    /// Adds a result of the forward to the functional with random weights; returns the slot of the weights.
    fn weigh(&mut self, out: Slot) -> Slot {
        let d_out = self.inp(out.shape);
        self.functional.push((out, self.inputs.last().unwrap().1.clone()));
        d_out
    }

    fn backward(&mut self, op: impl Into<Op>) {
        self.b.section(Section::Backward);
        self.b.push(op).unwrap();
    }

    fn check(self, scalars: Scalars, gradients: &[(Slot, Slot)]) {
        let program = &self.b.finish().unwrap();
        let (inputs, functional) = (&self.inputs[..], &self.functional[..]);
        let check = OpGradients { program, scalars, inputs, functional, gradients, tolerance: 1e-7 };
        check_op_gradients(&check).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn layernorm() {
    for c in [1, 2, 7] {
        let mut k = Bench::new("layernorm");
        let (out, inp, weight, bias) = (k.out([3, c]), k.inp([3, c]), k.inp([c]), k.inp([c]));
        let (mean, rstd) = (k.out([3]), k.out([3]));
        k.b.push(LayerNormFwd { out, mean, rstd, inp, weight, bias, eps: 0.01 }).unwrap();
        let (d_inp, d_weight, d_bias, d_out) = (k.out([3, c]), k.out([c]), k.out([c]), k.weigh(out));
        let (accum_inp, accum) = (Accum::Write, Accum::Write);
        k.backward(LayerNormBwd {
            d_inp,
            d_weight,
            d_bias,
            d_out,
            inp,
            mean,
            rstd,
            weight,
            accum_inp,
            accum,
        });
        k.check(Scalars::default(), &[(inp, d_inp), (weight, d_weight), (bias, d_bias)]);
    }
}

/// The residual stream: the sum is used after the norm too, so the norm's gradient is added to that of the sum.
#[test]
fn residual_layernorm() {
    let mut k = Bench::new("residual");
    let (residual, out) = (k.out([3, 5]), k.out([3, 5]));
    let (a, b, weight, bias) = (k.inp([3, 5]), k.inp([3, 5]), k.inp([5]), k.inp([5]));
    let (mean, rstd) = (k.out([3]), k.out([3]));
    k.b.push(ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps: 0.01 }).unwrap();
    let (d_weight, d_bias, d_out) = (k.out([5]), k.out([5]), k.weigh(out));
    let (d_weighed, d_inp) = (k.weigh(residual), k.out([3, 5]));
    k.backward(CopySlot { out: d_inp, inp: d_weighed });
    let (accum_inp, accum) = (Accum::Add, Accum::FirstWrites);
    let inp = residual;
    k.backward(LayerNormBwd { d_inp, d_weight, d_bias, d_out, inp, mean, rstd, weight, accum_inp, accum });
    k.check(Scalars::default(), &[(a, d_inp), (b, d_inp), (weight, d_weight), (bias, d_bias)]);
}

/// `layernorm_apply` recomputes `layernorm_fwd` from the saved statistics; weight and bias have the same gradients.
#[test]
fn layernorm_recomputed() {
    let mut k = Bench::new("apply");
    let (first, out) = (k.out([3, 5]), k.out([3, 5]));
    let (inp, weight, bias) = (k.inp([3, 5]), k.inp([5]), k.inp([5]));
    let (mean, rstd) = (k.out([3]), k.out([3]));
    k.b.push(LayerNormFwd { out: first, mean, rstd, inp, weight, bias, eps: 0.01 }).unwrap();
    k.b.push(LayerNormApply { out, inp, mean, rstd, weight, bias }).unwrap();
    let (d_inp, d_weight, d_bias, d_out) = (k.out([3, 5]), k.out([5]), k.out([5]), k.weigh(out));
    let (accum_inp, accum) = (Accum::Write, Accum::Write);
    k.backward(LayerNormBwd { d_inp, d_weight, d_bias, d_out, inp, mean, rstd, weight, accum_inp, accum });
    k.check(Scalars::default(), &[(inp, d_inp), (weight, d_weight), (bias, d_bias)]);
}

#[test]
fn linear() {
    let mut k = Bench::new("linear");
    let (out, inp, weight, bias) = (k.out([2, 2, 3]), k.inp([2, 2, 5]), k.inp([3, 5]), k.inp([3]));
    k.b.push(LinearFwd { out, pre: None, inp, weight, bias: Some(bias) }).unwrap();
    let (d_inp, d_weight, d_bias) = (k.out([2, 2, 5]), k.out([3, 5]), k.out([3]));
    let d_out = k.weigh(out);
    k.backward(LinearBwdInput { d_inp, d_out, weight, pre: None });
    k.backward(LinearBwdWeight { d_weight, d_bias: Some(d_bias), d_out, inp, accum: Accum::Write });
    k.check(Scalars::default(), &[(inp, d_inp), (weight, d_weight), (bias, d_bias)]);
}

/// A linear layer with activation, then another: the MLP, with the activation's gradient fused into the second layer's.
#[test]
fn mlp() {
    for &act in Act::ALL {
        let mut k = Bench::new("mlp");
        let (hidden, pre, out) = (k.out([4, 6]), k.out([4, 6]), k.out([4, 3]));
        let (inp, w1, b1, w2) = (k.inp([4, 3]), k.inp([6, 3]), k.inp([6]), k.inp([3, 6]));
        k.b.push(LinearFwd {
            out: hidden,
            pre: Some(PreAct { act, slot: pre }),
            inp,
            weight: w1,
            bias: Some(b1),
        })
        .unwrap();
        k.b.push(LinearFwd { out, pre: None, inp: hidden, weight: w2, bias: None }).unwrap();
        let (d_pre, d_inp, d_out) = (k.out([4, 6]), k.out([4, 3]), k.weigh(out));
        let (d_w1, d_b1, d_w2) = (k.out([6, 3]), k.out([6]), k.out([3, 6]));
        let accum = Accum::Write;
        k.backward(LinearBwdWeight { d_weight: d_w2, d_bias: None, d_out, inp: hidden, accum });
        k.backward(LinearBwdInput { d_inp: d_pre, d_out, weight: w2, pre: Some(PreAct { act, slot: pre }) });
        k.backward(LinearBwdWeight { d_weight: d_w1, d_bias: Some(d_b1), d_out: d_pre, inp, accum });
        k.backward(LinearBwdInput { d_inp, d_out: d_pre, weight: w1, pre: None });
        k.check(Scalars::default(), &[(inp, d_inp), (w1, d_w1), (b1, d_b1), (w2, d_w2)]);
    }
}

#[test]
fn activation_and_add() {
    for &act in Act::ALL {
        let mut k = Bench::new("gelu");
        let (hidden, out, inp, other) = (k.out([13]), k.out([13]), k.inp([13]), k.inp([13]));
        k.b.push(ActFwd { out: hidden, inp, act }).unwrap();
        k.b.push(Add { out, a: hidden, b: other }).unwrap();
        let (d_inp, d_out) = (k.out([13]), k.weigh(out));
        k.backward(ActBwd { d_inp, d_out, inp, act });
        k.check(Scalars::default(), &[(inp, d_inp), (other, d_out)]);
    }
}

#[test]
fn attention() {
    for [seq, width, heads, kv_heads] in
        [[1, 3, 1, 1], [5, 6, 2, 2], [4, 3, 3, 3], [5, 8, 4, 1], [4, 12, 6, 2], [3, 6, 2, 1]]
    {
        let packed = width + 2 * (width / heads * kv_heads);
        let mut k = Bench::new("attention");
        let (out, lse) = (k.out([2, seq, width]), k.out([2, heads, seq]));
        let qkv = k.inp([2, seq, packed]);
        let mask = AttentionMask::CAUSAL;
        k.b.push(AttentionFwd { out, lse, qkv, heads, kv_heads, mask }).unwrap();
        let (d_qkv, d_out) = (k.out([2, seq, packed]), k.weigh(out));
        k.backward(AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask });
        k.check(Scalars::default(), &[(qkv, d_qkv)]);
    }
}

/// The gradient replaces the logits, so the backward works on a copy; the gradient of the padding is 0.
#[test]
fn cross_entropy() {
    for wanted in [[4, 0, 2, 2], [4, IGNORED, 2, IGNORED], [IGNORED; 4]] {
        let scalars = Scalars::default().counting(&wanted);
        let mut k = Bench::new("cross entropy");
        let (losses, again, loss) = (k.out([2, 2]), k.out([2, 2]), k.out([]));
        let (logits, d_logits) = (k.inp([2, 2, 7]), k.out([2, 2, 7]));
        let targets = k.ints([2, 2], &wanted);
        k.b.push(CrossEntropy { losses, logits, targets, vocab: 5, grad: false }).unwrap();
        k.b.push(LossMean { loss, losses, accum: Accum::Write }).unwrap();
        k.functional.push((loss, vec![1.0]));
        k.backward(CopySlot { out: d_logits, inp: logits });
        k.backward(CrossEntropy { losses: again, logits: d_logits, targets, vocab: 5, grad: true });
        k.check(scalars, &[(logits, d_logits)]);
    }
}

/// Two GELUs forward, only one backward.
#[test]
fn a_wrong_gradient_is_caught() {
    let mut k = Bench::new("wrong");
    let (hidden, out, inp) = (k.out([5]), k.out([5]), k.inp([5]));
    k.b.push(ActFwd { out: hidden, inp, act: Act::Gelu }).unwrap();
    k.b.push(ActFwd { out, inp: hidden, act: Act::Gelu }).unwrap();
    let (d_inp, d_out) = (k.out([5]), k.weigh(out));
    k.backward(ActBwd { d_inp, d_out, inp, act: Act::Gelu });
    let program = &k.b.finish().unwrap();
    let (inputs, functional, scalars) = (&k.inputs[..], &k.functional[..], Scalars::default());
    let gradients = &[(inp, d_inp)];
    let check = OpGradients { program, scalars, inputs, functional, gradients, tolerance: 1e-7 };
    let error = check_op_gradients(&check).unwrap_err();
    assert!(matches!(error, GradMismatch::Value { .. }), "{error}");
}

/// A deliberate error in the transformer below.
#[derive(Clone, Copy, PartialEq)]
enum Bug {
    None,
    /// The residual gradient is overwritten at the norm.
    Residual,
    /// A parameter's gradient is overwritten in every micro-step.
    Accumulation,
    /// A parameter's gradient is never written.
    Missing,
}

/// One block of a transformer with tied embeddings over 2×3 tokens: forward and backward.
fn transformer(bug: Bug) -> Program {
    const B: usize = 2;
    const T: usize = 3;
    const C: usize = 4;
    const V: usize = 7;
    let accum = Accum::FirstWrites;
    let mut b = Builder::new();
    let names =
        [("wte", true), ("wpe", true), ("w_qkv", true), ("b_qkv", false), ("ln_w", false), ("ln_b", false)];
    let shapes: [Shape; 6] =
        [[V + 1, C].into(), [T + 2, C].into(), [3 * C, C].into(), [3 * C].into(), [C].into(), [C].into()];
    let [wte, wpe, w_qkv, b_qkv, ln_w, ln_b] =
        std::array::from_fn(|i| b.param(names[i].0, shapes[i], names[i].1));
    let [d_wte, d_wpe, d_w_qkv, d_b_qkv, d_ln_w, d_ln_b] =
        [wte, wpe, w_qkv, b_qkv, ln_w, ln_b].map(|weight| Slot { pool: Pool::Grads, ..weight });
    let [tokens, targets] = ["x", "y"].map(|name| b.io(name, [B, T], DType::I32));
    let loss = b.io("loss", [], DType::F32);
    let [x, att, res, ln, d_ln, d_res, d_att] = [(); 7].map(|()| b.activation([B, T, C], DType::F32));
    let [qkv, d_qkv] = [(); 2].map(|()| b.activation([B, T, 3 * C], DType::F32));
    let [mean, rstd, losses] = [(); 3].map(|()| b.activation([B, T], DType::F32));
    let lse = b.activation([B, 2, T], DType::F32);
    let logits = b.activation([B, T, V + 1], DType::F32);

    let forward: [Op; 7] = [
        EmbeddingFwd {
            out: x,
            tokens,
            wte,
            wpe: Some(wpe),
            positions: None,
            vocab: V,
            at_position: false,
            factor: 1.0,
        }
        .into(),
        LinearFwd { out: qkv, pre: None, inp: x, weight: w_qkv, bias: Some(b_qkv) }.into(),
        AttentionFwd { out: att, lse, qkv, heads: 2, kv_heads: 2, mask: AttentionMask::CAUSAL }.into(),
        ResidualLayerNormFwd {
            residual: res,
            out: ln,
            mean,
            rstd,
            a: x,
            b: att,
            weight: ln_w,
            bias: ln_b,
            eps: 1e-5,
        }
        .into(),
        LinearFwd { out: logits, pre: None, inp: ln, weight: wte, bias: None }.into(),
        CrossEntropy { losses, logits, targets, vocab: V, grad: true }.into(),
        LossMean { loss, losses, accum }.into(),
    ];
    // x → (attention, residual) → norm → head: the norm writes the residual gradient, then attention adds to it.
    let d_x = d_ln;
    let norm_accum = if bug == Bug::Accumulation { Accum::Write } else { accum };
    let qkv_bias = (bug != Bug::Missing).then_some(d_b_qkv);
    let mut backward: Vec<Op> = vec![
        LinearBwdWeight { d_weight: d_wte, d_bias: None, d_out: logits, inp: ln, accum }.into(),
        LinearBwdInput { d_inp: d_ln, d_out: logits, weight: wte, pre: None }.into(),
        LayerNormBwd {
            d_inp: d_res,
            d_weight: d_ln_w,
            d_bias: d_ln_b,
            d_out: d_ln,
            inp: res,
            mean,
            rstd,
            weight: ln_w,
            accum_inp: Accum::Write,
            accum: norm_accum,
        }
        .into(),
        CopySlot { out: d_att, inp: d_res }.into(),
        AttentionBwd {
            d_qkv,
            d_out: d_att,
            qkv,
            out: att,
            lse,
            heads: 2,
            kv_heads: 2,
            mask: AttentionMask::CAUSAL,
        }
        .into(),
        LinearBwdWeight { d_weight: d_w_qkv, d_bias: qkv_bias, d_out: d_qkv, inp: x, accum }.into(),
        LinearBwdInput { d_inp: d_x, d_out: d_qkv, weight: w_qkv, pre: None }.into(),
    ];
    if bug != Bug::Residual {
        backward.push(Add { out: d_x, a: d_x, b: d_res }.into());
    }
    let d_wpe = Some(d_wpe);
    backward.push(
        EmbeddingBwd {
            d_wte,
            d_wpe,
            d_out: d_x,
            tokens,
            positions: None,
            accum_wte: Accum::Add,
            accum,
            factor: 1.0,
        }
        .into(),
    );

    forward.into_iter().for_each(|op| b.push(op).unwrap());
    b.section(Section::Backward);
    backward.into_iter().for_each(|op| b.push(op).unwrap());
    b.finish().unwrap()
}

fn check_transformer(bug: Bug) -> Result<f64, GradMismatch> {
    check_program_gradients(&ProgramGradients {
        program: &transformer(bug),
        tokens: &[0, 6, 3, 3, 1, 2],
        targets: &[6, 3, 5, 1, 2, 0],
        positions: &[],
        more: &[],
        seed: 1,
        samples: 1000, // every element
        tolerance: 1e-7,
    })
}

#[test]
fn a_whole_transformer() {
    check_transformer(Bug::None).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_wrong_transformer_is_caught() {
    let error = check_transformer(Bug::Residual).unwrap_err();
    assert!(matches!(&error, GradMismatch::Value { name, .. } if name == "wte"), "{error}");
    let error = check_transformer(Bug::Accumulation).unwrap_err();
    assert!(matches!(&error, GradMismatch::NotAdded { name, .. } if name == "ln_w"), "{error}");
    let error = check_transformer(Bug::Missing).unwrap_err();
    assert!(error.to_string().contains("b_qkv") && error.to_string().contains("NaN"), "{error}");
}
