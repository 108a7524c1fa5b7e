//! Gradients of adapters, and of the input that they share with their layer.

use super::experts::Routes;
use super::*;

/// q and v of a product of 9 columns, in rank 2: the middle columns have no adapter.
#[test]
fn lora() {
    let mut k = Bench::new("lora");
    let parts = LoraParts::new(&[0..4, 6..9]).unwrap();
    let (inp, weight, a, b) = (k.inp([2, 3, 5]), k.inp([9, 5]), k.inp([4, 5]), k.inp([7, 2]));
    let (out, hidden, scale) = (k.out([2, 3, 9]), k.out([2, 3, 4]), 1.5);
    k.b.push(LinearFwd { out, pre: None, inp, weight, bias: None }).unwrap();
    k.b.push(LinearFwd { out: hidden, pre: None, inp, weight: a, bias: None }).unwrap();
    k.b.push(LoraFwd { out, hidden, b, parts, scale }).unwrap();
    let (d_inp, d_a, d_b, d_hidden) = (k.out([2, 3, 5]), k.out([4, 5]), k.out([7, 2]), k.out([2, 3, 4]));
    let (d_out, accum) = (k.weigh(out), Accum::Write);
    k.backward(LinearBwdInput { d_inp, d_out, weight, pre: None });
    k.backward(LoraBwdWeight { d_b, d_out, hidden, parts, scale, accum });
    k.backward(LoraBwdHidden { d_hidden, d_out, b, parts, scale });
    k.backward(LinearBwdWeight { d_weight: d_a, d_bias: None, d_out: d_hidden, inp, accum });
    k.backward(LoraBwdInput { d_inp, d_hidden, a });
    k.check(Scalars::default(), &[(inp, d_inp), (a, d_a), (b, d_b)]);
}

/// Adapters of two parts of the experts' results, in rank 2, behind a router: those of experts without tokens have a gradient of 0.
#[test]
fn grouped_lora() {
    const N: usize = 5;
    const C: usize = 4;
    for [e, chosen] in [[6, 2], [3, 1], [3, 3]] {
        let mut k = Bench::new("grouped lora");
        let parts = LoraParts::new(&[0..2, 3..6]).unwrap();
        let (inp, gate, weight) = (k.inp([N, C]), k.inp([e, C]), k.inp([e, 6, C]));
        let (a, b, logits) = (k.inp([e, 4, C]), k.inp([e, 5, 2]), k.out([N, e]));
        k.b.push(LinearFwd { out: logits, pre: None, inp, weight: gate, bias: None }).unwrap();
        let route = Routes::new(&mut k, logits, chosen, 0.3);
        let Routes { order, places, offsets, weights, .. } = route;
        let (r, scale) = (N * chosen, 1.5);
        let (x, hidden, rows, out) = (k.out([r, C]), k.out([r, 4]), k.out([r, 6]), k.out([N, 6]));
        k.b.push(Permute { out: x, inp, order }).unwrap();
        k.b.push(GroupedLinearFwd { out: rows, act: None, inp: x, weight, offsets }).unwrap();
        k.b.push(GroupedLinearFwd { out: hidden, act: None, inp: x, weight: a, offsets }).unwrap();
        k.b.push(GroupedLoraFwd { out: rows, hidden, b, offsets, parts, scale }).unwrap();
        k.b.push(Combine { out, rows, places, weights }).unwrap();
        k.functional.push((route.aux, vec![1.0]));
        let (d_out, d_rows, d_x, d_hidden) = (k.weigh(out), k.out([r, 6]), k.out([r, C]), k.out([r, 4]));
        let (d_weights, d_logits, d_inp) = (k.out([N, chosen]), k.out([N, e]), k.out([N, C]));
        let (d_a, d_b, accum) = (k.out([e, 4, C]), k.out([e, 5, 2]), Accum::Write);
        k.backward(CombineBwd { d_rows, d_weights, d_out, rows, places, weights });
        k.backward(GroupedLinearBwdInput { d_inp: d_x, d_out: d_rows, weight, offsets });
        k.backward(GroupedLoraBwdWeight { d_b, d_out: d_rows, hidden, offsets, parts, scale, accum });
        k.backward(GroupedLoraBwdHidden { d_hidden, d_out: d_rows, b, offsets, parts, scale });
        k.backward(GroupedLinearBwdWeight { d_weight: d_a, d_out: d_hidden, inp: x, offsets, accum });
        k.backward(GroupedLoraBwdInput { d_inp: d_x, d_hidden, a, offsets });
        k.backward(route.bwd(d_logits, d_weights));
        k.backward(LinearBwdInput { d_inp, d_out: d_logits, weight: gate, pre: None });
        k.backward(PermuteBwd { d_inp, d_out: d_x, places, accum: Accum::Add });
        let scalars = Scalars { loss_scale: 1.0 / N as f32, ..Scalars::default() };
        k.check(scalars, &[(inp, d_inp), (a, d_a), (b, d_b)]);
    }
}
